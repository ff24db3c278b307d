//! Reading JSON bodies within bounds, and writing JSON without building trees.
//!
//! Invariant: a body never costs more memory than [`VALUES_MAX`] parsed values and never
//! recurses deeper than [`DEPTH_MAX`], whatever it holds.

use super::error::{ApiError, INVALID_REQUEST};
use hyper::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};

/// Deepest nesting of arrays and objects that a body may have.
pub const DEPTH_MAX: usize = 64;

/// Most values (numbers, strings, arrays, ...) in one body. A parsed value takes about 72
/// bytes, so a body becomes at most 38 MiB of tree; 512 Ki ids are four full contexts of
/// 128 Ki tokens.
pub const VALUES_MAX: usize = 512 * 1024;

/// Parses a body that must be one JSON object.
///
/// # Errors
/// 400 `invalid_json` naming line and column, or the bound that was passed.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    check_bounds(body)?;
    match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(bad_json(format!(
            "the body must be a JSON object, not {}",
            kind_of(&other)
        ))),
        Err(error) => Err(bad_json(format!(
            "the body is not valid JSON at line {} column {}: {}",
            error.line(),
            error.column(),
            category(&error)
        ))),
    }
}

/// One pass over the bytes, no recursion, no allocation. It needs not be exact on broken
/// JSON: the parser refuses that anyway.
fn check_bounds(body: &[u8]) -> Result<(), ApiError> {
    let mut depth = 0usize;
    let mut values = 1usize;
    let mut in_string = false;
    let mut escaped = false;
    for &byte in body {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                values += 1;
                if depth > DEPTH_MAX {
                    return Err(bad_json(format!(
                        "the body nests deeper than the limit of {DEPTH_MAX} levels"
                    )));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            _ => {}
        }
        if values > VALUES_MAX {
            return Err(bad_json(format!(
                "the body holds more than the limit of {VALUES_MAX} JSON values"
            )));
        }
    }
    Ok(())
}

fn bad_json(message: String) -> ApiError {
    ApiError::new(
        StatusCode::BAD_REQUEST,
        INVALID_REQUEST,
        "invalid_json",
        message,
    )
}

/// The parser's own words without its position (which it repeats).
fn category(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// What a value is, for messages.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Appends `value` as compact JSON.
pub fn put<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    serde_json::to_writer(out, value).expect("plain values always serialise into memory");
}

/// Appends a list of ids.
pub fn put_ids(out: &mut Vec<u8>, ids: &[u32]) {
    put(out, ids);
}

/// Appends a natural log-probability. JSON has no infinities: -9999 stands for "impossible",
/// as with OpenAI, `null` for "not known".
pub fn put_logprob(out: &mut Vec<u8>, logprob: f32) {
    if logprob == f32::NEG_INFINITY {
        out.extend_from_slice(b"-9999.0");
    } else {
        put(out, &logprob);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(depth: usize) -> Vec<u8> {
        let mut body = b"{\"a\":".to_vec();
        body.extend(std::iter::repeat_n(b'[', depth - 1));
        body.extend(std::iter::repeat_n(b']', depth - 1));
        body.push(b'}');
        body
    }

    #[test]
    fn the_depth_limit_is_exact() {
        assert!(parse_object(&nested(DEPTH_MAX)).is_ok());
        let error = parse_object(&nested(DEPTH_MAX + 1)).unwrap_err();
        assert!(error.message.contains("64"), "{}", error.message);
    }

    #[test]
    fn brackets_inside_strings_do_not_nest() {
        let body = format!(r#"{{"a":"{}","b":"\"["}}"#, "[".repeat(200));
        assert!(parse_object(body.as_bytes()).is_ok());
    }

    #[test]
    fn a_body_of_very_many_values_is_refused_before_it_is_parsed() {
        let mut body = b"{\"prompt\":[".to_vec();
        for _ in 0..VALUES_MAX {
            body.extend_from_slice(b"1,");
        }
        body.extend_from_slice(b"1]}");
        let error = parse_object(&body).unwrap_err();
        assert_eq!(error.code, "invalid_json");
        assert!(error.message.contains("524288"));
    }

    #[test]
    fn broken_json_names_its_place() {
        let error = parse_object(b"{\"a\": 1,\n \"b\" 2}").unwrap_err();
        assert!(error.message.contains("line 2 column"), "{}", error.message);
        for body in [
            &b""[..],
            b"[]",
            b"null",
            b"\xff\xfe",
            b"{\"a\":\"\\ud800\"}",
            b"{\"a\":1e999}",
        ] {
            assert_eq!(parse_object(body).unwrap_err().status, 400);
        }
    }

    #[test]
    fn the_last_of_two_equal_keys_counts() {
        let map = parse_object(br#"{"a":1,"a":2}"#).unwrap();
        assert_eq!(map["a"], 2);
    }

    #[test]
    fn log_probabilities_are_always_json() {
        let mut out = Vec::new();
        for value in [f32::NAN, f32::NEG_INFINITY, -0.5] {
            put_logprob(&mut out, value);
            out.push(b' ');
        }
        assert_eq!(out, b"null -9999.0 -0.5 ");
    }
}
