//! Fields that OpenAI clients know and this server does not serve yet. A value that would
//! change the answer is refused by name; a neutral one is accepted.

use super::error::ApiError;
use super::fields::{Fields, whole};
use serde_json::Value;

/// What leaves the answer as it is.
#[derive(Clone, Copy, Debug)]
enum Neutral {
    /// This number.
    Number(f64),
    /// This boolean.
    Flag(bool),
    /// The empty string.
    EmptyText,
    /// The empty array or object.
    Empty,
    /// One of these strings.
    Words(&'static [&'static str]),
    /// `{"type": "text"}`.
    TextFormat,
    /// `["text"]`.
    TextModality,
    /// Only `null` (or absence).
    Never,
}

/// Name and neutral value. `n` and the structured outputs are served by later releases; each
/// leaves this table then.
const FIELDS: &[(&str, Neutral)] = &[
    ("n", Neutral::Number(1.0)),
    ("best_of", Neutral::Number(1.0)),
    ("length_penalty", Neutral::Number(1.0)),
    ("priority", Neutral::Number(0.0)),
    ("echo", Neutral::Flag(false)),
    ("include_stop_str_in_output", Neutral::Flag(false)),
    ("use_beam_search", Neutral::Flag(false)),
    ("continue_final_message", Neutral::Flag(false)),
    ("add_generation_prompt", Neutral::Flag(true)),
    ("suffix", Neutral::EmptyText),
    ("tools", Neutral::Empty),
    ("functions", Neutral::Empty),
    ("documents", Neutral::Empty),
    ("chat_template_kwargs", Neutral::Empty),
    ("tool_choice", Neutral::Words(&["none", "auto"])),
    ("function_call", Neutral::Words(&["none", "auto"])),
    ("response_format", Neutral::TextFormat),
    ("modalities", Neutral::TextModality),
    ("audio", Neutral::Never),
    ("web_search_options", Neutral::Never),
    ("chat_template", Neutral::Never),
    ("prompt_logprobs", Neutral::Never),
    ("truncate_prompt_tokens", Neutral::Never),
    ("structured_outputs", Neutral::Never),
    ("guided_json", Neutral::Never),
    ("guided_regex", Neutral::Never),
    ("guided_choice", Neutral::Never),
    ("guided_grammar", Neutral::Never),
    ("guided_decoding_backend", Neutral::Never),
    ("grammar", Neutral::Never),
    ("json_schema", Neutral::Never),
    ("regex", Neutral::Never),
    ("logits_processors", Neutral::Never),
    ("kv_transfer_params", Neutral::Never),
];

/// Accepted and ignored: they name the caller or tune things that change no answer.
const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
    "cache_prompt",
    "spaces_between_special_tokens",
];

/// Whether the name is one of the tables here.
pub fn is_known(name: &str) -> bool {
    FIELDS.iter().any(|(known, _)| *known == name) || IGNORED.contains(&name)
}

/// Refuses what would change the answer.
///
/// # Errors
/// 400 `not_supported` naming the field, 400 `invalid_type` for a value that could never be
/// right.
pub fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, neutral) in FIELDS {
        if let Some(value) = fields.get(name) {
            check(name, *neutral, value)?;
        }
    }
    Ok(())
}

fn check(name: &'static str, neutral: Neutral, value: &Value) -> Result<(), ApiError> {
    let accepted = match neutral {
        Neutral::Number(number) => match value.as_f64() {
            Some(given) => given == number,
            None => return Err(super::fields::wrong_type(name, "a number", value)),
        },
        Neutral::Flag(flag) => match value.as_bool() {
            Some(given) => given == flag,
            None => return Err(super::fields::wrong_type(name, "a boolean", value)),
        },
        Neutral::EmptyText => match value.as_str() {
            Some(given) => given.is_empty(),
            None => return Err(super::fields::wrong_type(name, "a string", value)),
        },
        Neutral::Empty => match value {
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
        },
        Neutral::Words(words) => value.as_str().is_some_and(|given| words.contains(&given)),
        Neutral::TextFormat => value.get("type").and_then(Value::as_str) == Some("text"),
        Neutral::TextModality => value
            .as_array()
            .is_some_and(|list| list.iter().all(|one| one.as_str() == Some("text"))),
        Neutral::Never => false,
    };
    if accepted {
        return Ok(());
    }
    Err(ApiError::not_supported(name, &shown(value)))
}

/// A value in a few words; never the client's text at length.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => match whole(value) {
            Some(number) => format!("the value {number}"),
            None => format!("the value {number}"),
        },
        Value::Bool(flag) => format!("the value {flag}"),
        Value::Null | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            "a value other than the neutral one".into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(value: Value) -> Option<ApiError> {
        let Value::Object(map) = value else {
            panic!("not an object")
        };
        refuse(&Fields::new(&map)).err()
    }

    #[test]
    fn neutral_values_pass() {
        let body = json!({
            "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.0, "logit_bias": {}, "echo": false, "suffix": "",
            "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
            "modalities": ["text"], "min_p": 0, "guided_json": null, "user": "me"
        });
        assert_eq!(refused(body), None);
    }

    #[test]
    fn everything_else_is_refused_by_name() {
        for (body, param) in [
            (json!({"n": 2}), "n"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"echo": true}), "echo"),
            (json!({"tools": [{}]}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (
                json!({"response_format": {"type": "json_object"}}),
                "response_format",
            ),
            (json!({"guided_json": {}}), "guided_json"),
        ] {
            let error = refused(body).unwrap();
            assert_eq!(error.status, 400);
            assert_eq!(error.code, "not_supported");
            assert_eq!(error.param.as_deref(), Some(param));
        }
        assert_eq!(refused(json!({"n": "1"})).unwrap().code, "invalid_type");
    }
}
