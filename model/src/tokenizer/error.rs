//! What can go wrong with a tokenizer: at load, and with a text.

use super::{TEXT_BYTES_MAX, WHITESPACE_RUN_MAX};
use crate::gguf::KeyError;
use std::fmt;

/// A tokenizer that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerError {
    /// A key of the GGUF is missing or of the wrong type.
    Key(KeyError),
    /// The kind of vocabulary is not one that is read from a GGUF.
    Model {
        /// `tokenizer.ggml.model`.
        found: String,
    },
    /// The way of splitting text is not known. Guessing would give other ids than the model was
    /// trained on.
    Pre {
        /// `tokenizer.ggml.pre`.
        found: String,
    },
    /// Two lists of the GGUF that must be of one length.
    Lengths {
        /// Tokens.
        tokens: usize,
        /// Their types.
        types: usize,
    },
    /// A token's type that is not known.
    TokenType {
        /// The token's id.
        id: usize,
        /// The type.
        found: i64,
    },
    /// A token that is there twice or empty.
    Token {
        /// The token's id.
        id: usize,
        /// The token.
        token: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A merge that is not two tokens of the vocabulary, making a third.
    Merge {
        /// Its rank.
        rank: usize,
        /// The merge.
        merge: String,
    },
    /// An id at or above the model's vocabulary.
    Vocabulary {
        /// The largest id or the number of tokens less one.
        id: u64,
        /// Rows of the model's embedding.
        vocab: usize,
    },
    /// An added token has another id in the pipeline than the file says.
    AddedToken {
        /// The token.
        token: String,
        /// What the file says.
        declared: u32,
        /// What it would be.
        found: Option<u32>,
    },
    /// Two tokens have one id.
    SharedId {
        /// The id.
        id: u32,
    },
    /// The way back to text is not byte-level.
    Decoder {
        /// What it is.
        found: String,
    },
    /// `tokenizer.json` is not usable, or the pipeline cannot be built.
    Pipeline {
        /// What the `tokenizers` library says.
        problem: String,
    },
}

impl From<KeyError> for TokenizerError {
    fn from(error: KeyError) -> Self {
        TokenizerError::Key(error)
    }
}

impl fmt::Display for TokenizerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerError::Key(error) => error.fmt(f),
            TokenizerError::Model { found } => write!(
                f,
                "key \"tokenizer.ggml.model\" is {found:?}; byte-level BPE (\"gpt2\") is read from a GGUF, use the Hugging Face folder for others"
            ),
            TokenizerError::Pre { found } => write!(
                f,
                "key \"tokenizer.ggml.pre\" is {found:?}; known are \"smollm\", \"qwen2\", \"llama-bpe\" and \"gpt-2\", use the Hugging Face folder for others"
            ),
            TokenizerError::Lengths { tokens, types } => write!(
                f,
                "key \"tokenizer.ggml.tokens\" has {tokens} elements, \"tokenizer.ggml.token_type\" has {types}"
            ),
            TokenizerError::TokenType { id, found } => {
                write!(
                    f,
                    "key \"tokenizer.ggml.token_type\": token {id} has type {found}, it must be 1 to 6"
                )
            }
            TokenizerError::Token { id, token, problem } => {
                write!(
                    f,
                    "key \"tokenizer.ggml.tokens\": token {id} {token:?} {problem}"
                )
            }
            TokenizerError::Merge { rank, merge } => write!(
                f,
                "key \"tokenizer.ggml.merges\": merge {rank} {merge:?} is not two tokens of the vocabulary that make a third"
            ),
            TokenizerError::Vocabulary { id, vocab } => {
                write!(
                    f,
                    "the tokenizer has token id {id}, the model's vocabulary has {vocab}"
                )
            }
            TokenizerError::AddedToken {
                token,
                declared,
                found: Some(found),
            } => write!(
                f,
                "the added token {token:?} has id {declared} in the file and {found} by its vocabulary"
            ),
            TokenizerError::AddedToken {
                token,
                declared,
                found: None,
            } => {
                write!(
                    f,
                    "the added token {token:?} of id {declared} cannot be added"
                )
            }
            TokenizerError::SharedId { id } => write!(f, "two tokens have the id {id}"),
            TokenizerError::Decoder { found } => {
                write!(
                    f,
                    "the tokenizer's decoder is {found}; byte-level decoders are supported"
                )
            }
            TokenizerError::Pipeline { problem } => {
                write!(f, "the tokenizer is unusable: {problem}")
            }
        }
    }
}

impl std::error::Error for TokenizerError {}

/// A text that cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncodeError {
    /// Longer than [`TEXT_BYTES_MAX`].
    TooLong {
        /// Bytes of the text.
        bytes: usize,
    },
    /// A run of whitespace longer than [`WHITESPACE_RUN_MAX`].
    WhitespaceRun,
    /// The pipeline refused it.
    Pipeline {
        /// What the `tokenizers` library says.
        problem: String,
    },
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EncodeError::TooLong { bytes } => {
                write!(
                    f,
                    "the text has {bytes} bytes, at most {TEXT_BYTES_MAX} are taken"
                )
            }
            EncodeError::WhitespaceRun => {
                write!(
                    f,
                    "the text has over {WHITESPACE_RUN_MAX} whitespace characters in a row"
                )
            }
            EncodeError::Pipeline { problem } => write!(f, "the text cannot be encoded: {problem}"),
        }
    }
}

impl std::error::Error for EncodeError {}
