//! Tokens to text one by one, never half a character.
//!
//! A token's bytes may end within a UTF-8 character; those bytes are held back (at most 3) until
//! the next token completes it or proves it broken. The pieces joined are exactly what decoding
//! all tokens at once gives: every broken sequence becomes one U+FFFD, by the same rule.

use crate::tokenizer::Tokenizer;

/// An incremental decoder for one sequence.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    /// The beginning of a character whose end has not come.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts empty. See [`Tokenizer::detokenizer`].
    pub fn new(tokenizer: Tokenizer, skip_special_tokens: bool) -> Self {
        Self {
            tokenizer,
            skip_special_tokens,
            pending: Vec::new(),
        }
    }

    /// Appends the text that `id` completes to `out`.
    pub fn push(&mut self, id: u32, out: &mut String) {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return;
        }
        let piece = self.tokenizer.piece(id);
        if self.pending.is_empty() {
            append_complete(piece, out, &mut self.pending);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(piece);
            append_complete(&joined, out, &mut self.pending);
        }
    }

    /// Ends the text: bytes still held back become one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Bytes held back: 0 to 3.
    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }
}

/// Appends `bytes` to `out`, keeping an unfinished character at the end in `pending`.
fn append_complete(mut bytes: &[u8], out: &mut String, pending: &mut Vec<u8>) {
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(text) => return out.push_str(text),
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        out.push_str(std::str::from_utf8(valid).unwrap_or_default());
        match error.error_len() {
            None => return pending.extend_from_slice(rest),
            Some(broken) => {
                out.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[broken..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_gives_the_text_of_the_whole() {
        let whole: &[u8] =
            b"a\xc3\xa9\xf0\x9f\x99\x82\xff\xe2\x82z\xf0\x9f\xe6\x97\xa5\xf0\x9f\x99";
        let expected = String::from_utf8_lossy(whole);
        for size in 1..whole.len() {
            let (mut out, mut pending) = (String::new(), Vec::new());
            for chunk in whole.chunks(size) {
                let mut joined = std::mem::take(&mut pending);
                joined.extend_from_slice(chunk);
                append_complete(&joined, &mut out, &mut pending);
                assert!(pending.len() <= 3);
            }
            if !pending.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
            assert_eq!(out, expected, "in pieces of {size}");
        }
    }
}
