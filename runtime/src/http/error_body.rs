//! The one shape of an error: `{"error":{"message","type","param","code"}}`.

/// Builds the JSON of an error. `param` is the request field at fault, if one is; `code` the
/// stable name that programs compare.
pub fn error_json(message: &str, kind: &str, param: Option<&str>, code: &str) -> String {
    let mut json = String::with_capacity(message.len() + 96);
    json.push_str("{\"error\":{\"message\":");
    escape_json(message, &mut json);
    json.push_str(",\"type\":");
    escape_json(kind, &mut json);
    json.push_str(",\"param\":");
    match param {
        Some(param) => escape_json(param, &mut json),
        None => json.push_str("null"),
    }
    json.push_str(",\"code\":");
    escape_json(code, &mut json);
    json.push_str("}}");
    json
}

/// Appends `text` as a JSON string, quotes included.
pub fn escape_json(text: &str, json: &mut String) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\r' => json.push_str("\\r"),
            '\t' => json.push_str("\\t"),
            control if control < ' ' => {
                json.push_str(&format!("\\u{:04x}", control as u32));
            }
            plain => json.push(plain),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_controls_are_escaped() {
        assert_eq!(
            error_json("a \"b\"\\\n\u{1}é", "t", None, "c"),
            "{\"error\":{\"message\":\"a \\\"b\\\"\\\\\\n\\u0001é\",\"type\":\"t\",\"param\":null,\"code\":\"c\"}}"
        );
        assert!(error_json("m", "t", Some("p"), "c").contains("\"param\":\"p\""));
    }
}
