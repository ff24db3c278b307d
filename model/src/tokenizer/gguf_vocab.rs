//! The tokenizer that a GGUF describes: byte-level BPE with one of the known ways to split text.
//!
//! | `tokenizer.ggml.pre` | splits |
//! |---|---|
//! | `gpt-2` | GPT-2's expression |
//! | `smollm` | every digit alone, then GPT-2's expression |
//! | `llama-bpe` | Llama 3's expression (digits by three); whole words of the vocabulary skip merging |
//! | `qwen2` | Qwen2's expression (digits alone), after NFC |

use super::TokenizerError;
use crate::gguf::{Gguf, KeyError};
use std::collections::HashSet;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// What Llama 3 splits text by.
const LLAMA3_EXPRESSION: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What Qwen2 splits text by: as Llama 3, digits one by one.
const QWEN2_EXPRESSION: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) struct Built {
    pub(super) pipeline: tokenizers::Tokenizer,
    pub(super) before: Option<u32>,
    pub(super) after: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pre {
    Gpt2,
    SmolLm,
    LlamaBpe,
    Qwen2,
}

/// What a token is (llama.cpp's numbers).
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Normal,
    /// Never written by a user on purpose: special.
    Control,
    /// Matched whole before anything is split.
    UserDefined,
    /// Fills up the vocabulary; has no text.
    Unused,
}

pub(super) fn build(gguf: &Gguf<'_>, vocab: usize) -> Result<Built, TokenizerError> {
    match gguf.text("tokenizer.ggml.model")? {
        Some("gpt2") => {}
        Some(found) => {
            return Err(TokenizerError::Model {
                found: found.to_owned(),
            });
        }
        None => return Err(missing("tokenizer.ggml.model", "a text")),
    }
    let pre = pre(gguf)?;
    let tokens = typed_tokens(gguf, vocab)?;
    let mut pipeline = tokenizers::Tokenizer::new(bpe(gguf, pre, &tokens)?);
    if pre == Pre::Qwen2 {
        pipeline.with_normalizer(Some(NFC));
    }
    pipeline.with_pre_tokenizer(Some(splitter(pre)?));
    pipeline.with_decoder(Some(ByteLevel::default()));
    let of_kind = |wanted, special| {
        let of_kind = tokens.iter().filter(move |(_, kind)| *kind == wanted);
        of_kind
            .map(move |(token, _)| AddedToken::from(*token, special).normalized(false))
            .collect::<Vec<_>>()
    };
    pipeline.add_special_tokens(&of_kind(TokenKind::Control, true));
    pipeline.add_tokens(&of_kind(TokenKind::UserDefined, false));
    // Meta's tokenizer begins every text with BOS; files of that kind may leave the key out.
    let bos_unless_said = pre == Pre::LlamaBpe;
    let before = around(
        gguf,
        "add_bos_token",
        "bos_token_id",
        bos_unless_said,
        vocab,
    )?;
    let after = around(gguf, "add_eos_token", "eos_token_id", false, vocab)?;
    Ok(Built {
        pipeline,
        before,
        after,
    })
}

fn missing(key: &str, wanted: &'static str) -> TokenizerError {
    KeyError {
        key: key.to_owned(),
        wanted,
        found: None,
    }
    .into()
}

fn pre(gguf: &Gguf<'_>) -> Result<Pre, TokenizerError> {
    match gguf.text("tokenizer.ggml.pre")? {
        Some("gpt-2") => Ok(Pre::Gpt2),
        Some("smollm") => Ok(Pre::SmolLm),
        Some("llama-bpe") => Ok(Pre::LlamaBpe),
        Some("qwen2") => Ok(Pre::Qwen2),
        Some(found) => Err(TokenizerError::Pre {
            found: found.to_owned(),
        }),
        None => Err(missing("tokenizer.ggml.pre", "a text")),
    }
}

/// Tokens by id with their kinds; none twice, none empty.
fn typed_tokens<'a>(
    gguf: &Gguf<'a>,
    vocab: usize,
) -> Result<Vec<(&'a str, TokenKind)>, TokenizerError> {
    let list = gguf
        .array(TOKENS)?
        .ok_or_else(|| missing(TOKENS, "an array of texts"))?;
    let types = gguf
        .array(TYPES)?
        .ok_or_else(|| missing(TYPES, "an array of integers"))?;
    let wrong_array = |key: &str, wanted: &'static str| {
        let found = Some("an array of another type".to_owned());
        TokenizerError::from(KeyError {
            key: key.to_owned(),
            wanted,
            found,
        })
    };
    if list.len() > vocab {
        return Err(TokenizerError::Vocabulary {
            id: list.len() as u64 - 1,
            vocab,
        });
    }
    if list.len() != types.len() {
        return Err(TokenizerError::Lengths {
            tokens: list.len(),
            types: types.len(),
        });
    }
    let texts = list
        .texts()
        .ok_or_else(|| wrong_array(TOKENS, "an array of texts"))?;
    let kinds = types
        .integers()
        .ok_or_else(|| wrong_array(TYPES, "an array of integers"))?;
    let mut seen = HashSet::with_capacity(list.len());
    let mut tokens = Vec::with_capacity(list.len());
    for (id, (token, kind)) in texts.zip(kinds).enumerate() {
        let kind = match kind {
            1 | 6 => TokenKind::Normal,
            2 | 3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            found => return Err(TokenizerError::TokenType { id, found }),
        };
        let problem = if token.is_empty() {
            Some("is empty")
        } else if !seen.insert(token) {
            Some("is there twice")
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(TokenizerError::Token {
                id,
                token: token.to_owned(),
                problem,
            });
        }
        tokens.push((token, kind));
    }
    Ok(tokens)
}

fn bpe(gguf: &Gguf<'_>, pre: Pre, tokens: &[(&str, TokenKind)]) -> Result<BPE, TokenizerError> {
    let list = gguf
        .array(MERGES)?
        .ok_or_else(|| missing(MERGES, "an array of texts"))?;
    let texts = list
        .texts()
        .ok_or_else(|| missing(MERGES, "an array of texts"))?;
    let used: HashSet<&str> = tokens
        .iter()
        .filter(|(_, kind)| *kind != TokenKind::Unused)
        .map(|(token, _)| *token)
        .collect();
    let mut merges = Vec::with_capacity(list.len());
    let mut joined = String::new();
    for (rank, merge) in texts.enumerate() {
        let wrong = || TokenizerError::Merge {
            rank,
            merge: merge.to_owned(),
        };
        let (left, right) = merge.split_once(' ').ok_or_else(wrong)?;
        joined.clear();
        joined.extend([left, right]);
        if ![left, right, joined.as_str()]
            .iter()
            .all(|token| used.contains(token))
        {
            return Err(wrong());
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    let vocabulary: Vocab = tokens
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| *kind != TokenKind::Unused)
        .map(|(id, (token, _))| ((*token).to_owned(), id as u32))
        .collect();
    BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(pre == Pre::LlamaBpe)
        .build()
        .map_err(|error| TokenizerError::Pipeline {
            problem: error.to_string(),
        })
}

fn splitter(pre: Pre) -> Result<PreTokenizerWrapper, TokenizerError> {
    let bytes = |splits| ByteLevel::new(false, true, splits).into();
    let by = |expression: &str| -> Result<PreTokenizerWrapper, TokenizerError> {
        let pattern = SplitPattern::Regex(expression.to_owned());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map(Into::into)
            .map_err(|error| TokenizerError::Pipeline {
                problem: error.to_string(),
            })
    };
    Ok(match pre {
        Pre::Gpt2 => bytes(true),
        Pre::SmolLm => Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into(),
        Pre::LlamaBpe => Sequence::new(vec![by(LLAMA3_EXPRESSION)?, bytes(false)]).into(),
        Pre::Qwen2 => Sequence::new(vec![by(QWEN2_EXPRESSION)?, bytes(false)]).into(),
    })
}

/// The token that the file asks to put before or after a text.
fn around(
    gguf: &Gguf<'_>,
    flag: &str,
    id: &str,
    unless_said: bool,
    vocab: usize,
) -> Result<Option<u32>, TokenizerError> {
    if !gguf
        .bool(&format!("tokenizer.ggml.{flag}"))?
        .unwrap_or(unless_said)
    {
        return Ok(None);
    }
    let key = format!("tokenizer.ggml.{id}");
    let found = gguf
        .unsigned(&key)?
        .ok_or_else(|| missing(&key, "a token id"))?;
    match u32::try_from(found) {
        Ok(id) if (id as usize) < vocab => Ok(Some(id)),
        _ => Err(TokenizerError::Vocabulary { id: found, vocab }),
    }
}
