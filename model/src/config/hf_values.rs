//! Reading values of Hugging Face's JSON files.

use super::{ConfigError, EOS_MAX};
use serde_json::{Map, Value};

/// Parses a JSON object.
pub(crate) fn object(bytes: &[u8]) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_slice(bytes).map_err(|error| ConfigError::Json {
        problem: error.to_string(),
    })
}

/// A token id or a list of them; absent and null are none.
pub(crate) fn token_ids(fields: &Map<String, Value>, key: &str) -> Result<Vec<u32>, ConfigError> {
    let wrong = |found: &Value| ConfigError::Type {
        key: key.to_owned(),
        wanted: "a token id or a list of them",
        found: short(found),
    };
    let one = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| wrong(value))
    };
    match fields.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= EOS_MAX => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}

/// A value in few words, for messages.
pub(crate) fn short(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(fields) => format!("an object of {} keys", fields.len()),
        Value::String(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}
