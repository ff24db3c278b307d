//! Text to token ids and back.
//!
//! One [`Tokenizer`] is built at load, from a `tokenizer.json` or from the vocabulary inside a
//! GGUF, and shared: cloning is cheap, all methods take `&self`. Encoding is heavy and belongs on
//! the side pool, not on a shard; going back is a table lookup per token.
//!
//! * `gguf_vocab`: the `tokenizers` pipeline that a GGUF's keys describe
//! * `json_file`: checks of a `tokenizer.json` that the library leaves out
//! * `pieces`: the bytes of each token, for decoding without the pipeline

mod error;
mod gguf_vocab;
mod json_file;
mod pieces;

pub use error::{EncodeError, TokenizerError};
pub use pieces::PieceTable;

use crate::detokenizer::Detokenizer;
use crate::gguf::Gguf;
use std::sync::Arc;

/// Longest text to encode, in bytes: some 250,000 tokens of English, beyond any context here.
/// Measured on one busy core: 1 MiB of prose takes 1 s, of digits (each a piece) 5 s.
pub const TEXT_BYTES_MAX: usize = 1 << 20;
/// Longest run of whitespace to encode, in characters. The splitting expressions step back once
/// per character of such a run and give up, silently, after 1,000,000 steps.
pub const WHITESPACE_RUN_MAX: usize = 250_000;

/// A model's tokenizer.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    pipeline: tokenizers::Tokenizer,
    pieces: PieceTable,
    /// What `add_special` puts before and after a text, where the pipeline itself does not.
    before: Option<u32>,
    after: Option<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.0.pieces.len())
    }
}

impl Tokenizer {
    /// Builds it from the bytes of a `tokenizer.json`. `vocab` is the model's: an id at or above
    /// it is an error.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn from_json(bytes: &[u8], vocab: usize) -> Result<Self, TokenizerError> {
        let declared = json_file::Declared::parse(bytes)?;
        let mut pipeline =
            tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| TokenizerError::Pipeline {
                problem: error.to_string(),
            })?;
        declared.check(&pipeline, vocab)?;
        // A server neither cuts nor pads prompts behind the user's back.
        let cut = pipeline.with_truncation(None).map(|_| ());
        cut.map_err(|error| TokenizerError::Pipeline {
            problem: error.to_string(),
        })?;
        pipeline.with_padding(None);
        let pieces = PieceTable::from_pipeline(&pipeline, vocab)?;
        Ok(Self(Arc::new(Inner {
            pipeline,
            pieces,
            before: None,
            after: None,
        })))
    }

    /// Builds it from the vocabulary of a GGUF.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn from_gguf(gguf: &Gguf<'_>, vocab: usize) -> Result<Self, TokenizerError> {
        let built = gguf_vocab::build(gguf, vocab)?;
        let pieces = PieceTable::from_pipeline(&built.pipeline, vocab)?;
        let (before, after) = (built.before, built.after);
        Ok(Self(Arc::new(Inner {
            pipeline: built.pipeline,
            pieces,
            before,
            after,
        })))
    }

    /// Token ids of a text. Special tokens written out in the text are recognised, as Hugging
    /// Face does: a rendered chat template needs it. `add_special` also puts the tokens around
    /// the text that the file asks for (usually BOS); leave it off for a rendered chat template.
    ///
    /// # Errors
    /// [`EncodeError`] if the text is too long to be encoded safely.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeError> {
        check_text(text)?;
        let encoding = self
            .0
            .pipeline
            .encode_fast(text, add_special)
            .map_err(|error| EncodeError::Pipeline {
                problem: error.to_string(),
            })?;
        let (before, after) = match add_special {
            true => (self.0.before, self.0.after),
            false => (None, None),
        };
        Ok(before
            .into_iter()
            .chain(encoding.get_ids().iter().copied())
            .chain(after)
            .collect())
    }

    /// The text of token ids. Bytes that are no UTF-8 become U+FFFD; ids without a token give
    /// nothing.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut text = String::new();
        let mut detokenizer = self.detokenizer(skip_special_tokens);
        for id in ids {
            detokenizer.push(*id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// A decoder that takes one token after the other.
    pub fn detokenizer(&self, skip_special_tokens: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special_tokens)
    }

    /// The bytes of a token: maybe only a part of a character, empty for an id without a token.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.0.pieces.bytes(id)
    }

    /// Whether the id is a special (control) token such as BOS or `<|im_end|>`.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.pieces.is_special(id)
    }

    /// The id of a token's text as the vocabulary writes it, e.g. `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.pipeline.token_to_id(token)
    }

    /// Ids with a token are below this; at most the model's vocabulary.
    pub fn id_bound(&self) -> usize {
        self.0.pieces.len()
    }
}

fn check_text(text: &str) -> Result<(), EncodeError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(EncodeError::TooLong { bytes: text.len() });
    }
    if text.len() > WHITESPACE_RUN_MAX {
        let mut run = 0;
        for character in text.chars() {
            run = if character.is_whitespace() {
                run + 1
            } else {
                0
            };
            if run > WHITESPACE_RUN_MAX {
                return Err(EncodeError::WhitespaceRun);
            }
        }
    }
    Ok(())
}
