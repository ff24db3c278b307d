//! The bytes of every token, in one block of memory.
//!
//! Byte-level vocabularies write each byte as a printable character (a space is `Ġ`). The table
//! holds the bytes themselves, so that decoding a token is a slice. A token with any character
//! outside that alphabet stands for its own UTF-8 bytes, as in Hugging Face's decoder.

use super::TokenizerError;
use tokenizers::DecoderWrapper;

/// Bytes and kinds of all tokens by id.
#[derive(Debug)]
pub struct PieceTable {
    bytes: Vec<u8>,
    /// Piece `id` is `bytes[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl PieceTable {
    /// Builds the table of a pipeline with a byte-level decoder.
    pub(super) fn from_pipeline(
        pipeline: &tokenizers::Tokenizer,
        vocab: usize,
    ) -> Result<Self, TokenizerError> {
        check_decoder(pipeline.get_decoder())?;
        let tokens = pipeline.get_vocab(true);
        let id_max = tokens.values().copied().max();
        let bound = id_max.map_or(0, |id| id as usize + 1);
        if bound > vocab {
            return Err(TokenizerError::Vocabulary {
                id: bound as u64 - 1,
                vocab,
            });
        }
        let mut taken = vec![false; bound];
        for id in tokens.values() {
            if std::mem::replace(&mut taken[*id as usize], true) {
                return Err(TokenizerError::SharedId { id: *id });
            }
        }
        let added = pipeline.get_added_vocabulary();
        let alphabet = byte_alphabet();
        let mut table = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(bound),
            special: Vec::with_capacity(bound),
        };
        for id in 0..bound as u32 {
            // The added tokens win over the model's, as in `decode`.
            let token = added
                .simple_id_to_token(id)
                .or_else(|| pipeline.id_to_token(id))
                .unwrap_or_default();
            push_bytes(&alphabet, &token, &mut table.bytes);
            let end = u32::try_from(table.bytes.len()).map_err(|_| TokenizerError::Pipeline {
                problem: "its tokens have over 4 GiB of text".into(),
            })?;
            table.ends.push(end);
            table.special.push(added.is_special_token(&token));
        }
        Ok(table)
    }

    /// Ids in the table are below this.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// No token at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of a token; empty for an id without one.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    /// Whether it is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

fn check_decoder(decoder: Option<&DecoderWrapper>) -> Result<(), TokenizerError> {
    let name = match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => return Ok(()),
        None => "missing",
        Some(DecoderWrapper::BPE(_)) => "BPE",
        Some(DecoderWrapper::WordPiece(_)) => "WordPiece",
        Some(DecoderWrapper::Metaspace(_)) => "Metaspace",
        Some(DecoderWrapper::CTC(_)) => "CTC",
        Some(DecoderWrapper::Sequence(_)) => "a sequence (SentencePiece style)",
        Some(DecoderWrapper::Replace(_)) => "Replace",
        Some(DecoderWrapper::Fuse(_)) => "Fuse",
        Some(DecoderWrapper::Strip(_)) => "Strip",
        Some(DecoderWrapper::ByteFallback(_)) => "ByteFallback",
    };
    Err(TokenizerError::Decoder {
        found: name.to_owned(),
    })
}

/// Characters of the alphabet are below this: 256 and the 68 bytes that are not printable.
const ALPHABET_END: usize = 0x100 + 68;

/// The byte that each character stands for. A byte's character is itself where that is printable
/// Latin-1, else the next one from U+0100 on.
fn byte_alphabet() -> [Option<u8>; ALPHABET_END] {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let mut alphabet = [None; ALPHABET_END];
    for byte in 0..=255u8 {
        let character = if printable(byte) {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        alphabet[character] = Some(byte);
    }
    alphabet
}

fn push_bytes(alphabet: &[Option<u8>; ALPHABET_END], token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for character in token.chars() {
        match alphabet.get(character as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_stand_for_the_known_bytes() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet['Ġ' as usize], Some(b' '));
        assert_eq!(alphabet['Ċ' as usize], Some(b'\n'));
        assert_eq!(alphabet['A' as usize], Some(b'A'));
        assert_eq!(alphabet[0x143], Some(0xad));
        assert_eq!(alphabet[usize::from(b' ')], None);
        let bytes: std::collections::HashSet<_> = alphabet.iter().flatten().collect();
        assert_eq!(bytes.len(), 256);
    }

    #[test]
    fn tokens_outside_the_alphabet_stand_for_themselves() {
        let alphabet = byte_alphabet();
        let mut bytes = Vec::new();
        push_bytes(&alphabet, "ĠParis", &mut bytes);
        push_bytes(&alphabet, "<|a b|>", &mut bytes);
        push_bytes(&alphabet, "Ġ日", &mut bytes);
        assert_eq!(bytes, " Paris<|a b|>Ġ日".as_bytes());
    }
}
