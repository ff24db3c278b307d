//! Checks of a `tokenizer.json` that the `tokenizers` library leaves out.
//!
//! The library (0.22) panics on a syntax error inside the decoder, also where that follows from an
//! unknown key before it, and on a malformed precompiled normaliser. And it only logs a warning
//! when an added token gets another id than the file says: the model would then read other words
//! than the user wrote.

use super::TokenizerError;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// The keys of the file; any other is an error.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Declared {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(rename = "version")]
    _version: Option<IgnoredAny>,
    #[serde(rename = "truncation")]
    _truncation: Option<IgnoredAny>,
    #[serde(rename = "padding")]
    _padding: Option<IgnoredAny>,
    #[serde(rename = "pre_tokenizer")]
    _pre_tokenizer: Option<IgnoredAny>,
    #[serde(rename = "post_processor")]
    _post_processor: Option<IgnoredAny>,
    #[serde(rename = "decoder")]
    _decoder: Option<IgnoredAny>,
    #[serde(rename = "model")]
    _model: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

impl Declared {
    /// Parses the file; also proves that all of it is JSON.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let declared: Declared =
            serde_json::from_slice(bytes).map_err(|error| TokenizerError::Pipeline {
                problem: error.to_string(),
            })?;
        if has_type(&declared.normalizer, "Precompiled") {
            let problem = "a precompiled normaliser (SentencePiece) is not supported".to_owned();
            return Err(TokenizerError::Pipeline { problem });
        }
        Ok(declared)
    }

    /// Compares the ids of added tokens with those that the pipeline gives them, and checks what
    /// is put around a text.
    pub(super) fn check(
        &self,
        pipeline: &tokenizers::Tokenizer,
        vocab: usize,
    ) -> Result<(), TokenizerError> {
        // As the library understood it: with every component's type written out.
        let processor = serde_json::to_value(pipeline.get_post_processor()).map_err(|error| {
            TokenizerError::Pipeline {
                problem: error.to_string(),
            }
        })?;
        check_post_processor(&processor, vocab)?;
        for token in &self.added_tokens {
            let found = pipeline.token_to_id(&token.content);
            if found != Some(token.id) {
                let (token, declared) = (token.content.clone(), token.id);
                return Err(TokenizerError::AddedToken {
                    token,
                    declared,
                    found,
                });
            }
        }
        Ok(())
    }
}

/// A template that names a token it does not define, or a second text where there is one, makes
/// the library panic at the first request; an id beyond the vocabulary would fail in the model.
fn check_post_processor(processor: &Value, vocab: usize) -> Result<(), TokenizerError> {
    let wrong = |problem: String| Err(TokenizerError::Pipeline { problem });
    match processor["type"].as_str() {
        None if processor.is_null() => Ok(()),
        Some("ByteLevel") => Ok(()),
        Some("Sequence") => items(&processor["processors"])
            .iter()
            .try_for_each(|inner| check_post_processor(inner, vocab)),
        Some("TemplateProcessing") => {
            for piece in items(&processor["single"]) {
                if let Some(token) = piece["SpecialToken"]["id"].as_str() {
                    if processor["special_tokens"].get(token).is_none() {
                        return wrong(format!("its template does not define the token {token:?}"));
                    }
                } else if piece["Sequence"]["id"] != "A" {
                    return wrong(format!("its template has the piece {piece}"));
                }
            }
            let tokens = processor["special_tokens"].as_object();
            let ids = tokens
                .into_iter()
                .flatten()
                .flat_map(|(_, token)| items(&token["ids"]));
            match ids.filter_map(Value::as_u64).find(|id| *id >= vocab as u64) {
                Some(id) => Err(TokenizerError::Vocabulary { id, vocab }),
                None => Ok(()),
            }
        }
        found => wrong(format!(
            "its post-processor {} is not supported (TemplateProcessing and ByteLevel are)",
            found.unwrap_or("without a type")
        )),
    }
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// Whether a component, or one inside it, is of a type. JSON nests at most 128 deep here: the
/// parser's limit.
fn has_type(component: &Value, kind: &str) -> bool {
    match component {
        Value::Object(fields) => {
            fields.get("type").and_then(Value::as_str) == Some(kind)
                || fields.values().any(|value| has_type(value, kind))
        }
        Value::Array(list) => list.iter().any(|value| has_type(value, kind)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
