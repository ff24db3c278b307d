//! From the bytes of a body to what the engine is asked: pure, `Send`, no clock, so that a
//! side thread can do it.

use super::error::ApiError;
use super::fields::{Fields, token_ids, wrong_type};
use super::json::parse_object;
use super::params::{Kind, Params, no_tokenizer, read};
use super::text::{ChatMessage, ServedModel, TextError, TextModel};
use serde_json::{Map, Value};

/// Most prompts in one request: each is a generation of its own in the queue (256 long).
pub const PROMPTS_MAX: usize = 128;
/// `max_tokens` of completions that give none (OpenAI's).
pub const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// One generation that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedPrompt {
    /// Ids; never empty, all within the vocabulary.
    pub ids: Vec<u32>,
    /// Tokens to generate: at least 1, fits the context.
    pub max_tokens: u32,
}

/// A request that has passed every check.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// Which endpoint.
    pub kind: Kind,
    /// Checked parameters.
    pub params: Params,
    /// One generation each; the place is the choice's index.
    pub prompts: Vec<PreparedPrompt>,
}

/// Parses and checks a body, renders the template, tokenises.
///
/// # Errors
/// The HTTP error that the client gets.
pub fn prepare(kind: Kind, body: &[u8], model: &ServedModel) -> Result<Prepared, ApiError> {
    let map = parse_object(body)?;
    let fields = Fields::new(&map);
    let params = read(kind, &fields, model)?;
    let ids = match kind {
        Kind::Completion => completion_prompts(&fields, model)?,
        Kind::Chat => vec![chat_prompt(&fields, model)?],
    };
    let param = match kind {
        Kind::Completion => "prompt",
        Kind::Chat => "messages",
    };
    let mut prompts = Vec::with_capacity(ids.len());
    for ids in ids {
        prompts.push(fit(kind, param, ids, params.max_tokens, model)?);
    }
    Ok(Prepared {
        kind,
        params,
        prompts,
    })
}

/// Checks a prompt's length and settles how much may be generated.
fn fit(
    kind: Kind,
    param: &'static str,
    mut ids: Vec<u32>,
    max_tokens: Option<u32>,
    model: &ServedModel,
) -> Result<PreparedPrompt, ApiError> {
    if ids.is_empty() {
        match model.bos_id {
            Some(bos) => ids.push(bos),
            None => {
                return Err(ApiError::invalid(
                    "invalid_value",
                    param,
                    format!(
                        "`{param}` is empty, and this model has no BOS token to start from; send \
                         at least one token"
                    ),
                ));
            }
        }
    }
    let context = model.context_tokens as usize;
    if ids.len() >= context {
        return Err(too_long(param, ids.len(), "", context));
    }
    let left = (context - ids.len()) as u32;
    let max_tokens = match (max_tokens, kind) {
        (Some(wanted), Kind::Completion | Kind::Chat) => wanted.min(left),
        (None, Kind::Completion) => COMPLETION_TOKENS_DEFAULT.min(left),
        (None, Kind::Chat) => left,
    };
    Ok(PreparedPrompt { ids, max_tokens })
}

fn too_long(param: &'static str, tokens: usize, about: &str, context: usize) -> ApiError {
    ApiError::invalid(
        "context_length_exceeded",
        param,
        format!(
            "the prompt has {about}{tokens} tokens, this server's context length is {context} \
             tokens (prompt and answer together); shorten the prompt"
        ),
    )
}

fn completion_prompts(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let Some(prompt) = fields.get("prompt") else {
        return Err(ApiError::invalid(
            "missing_field",
            "prompt",
            "`prompt` is missing: a string, an array of strings, of token ids or of arrays of \
             token ids",
        ));
    };
    match prompt {
        Value::String(text) => Ok(vec![encode("prompt", text, add_special, model)?]),
        Value::Array(list) => match list.first() {
            None => Ok(vec![Vec::new()]),
            Some(Value::Number(_)) => Ok(vec![token_ids("prompt", list, model.vocabulary)?]),
            Some(Value::String(_) | Value::Array(_)) => several_prompts(list, add_special, model),
            Some(other @ (Value::Null | Value::Bool(_) | Value::Object(_))) => Err(wrong_type(
                "prompt[0]",
                "a string, a token id or an array of token ids",
                other,
            )),
        },
        other => Err(wrong_type("prompt", "a string or an array", other)),
    }
}

fn several_prompts(
    list: &[Value],
    add_special: bool,
    model: &ServedModel,
) -> Result<Vec<Vec<u32>>, ApiError> {
    if list.len() > PROMPTS_MAX {
        return Err(ApiError::invalid(
            "invalid_value",
            "prompt",
            format!(
                "`prompt` holds {} prompts, the limit is {PROMPTS_MAX} a request",
                list.len()
            ),
        ));
    }
    let mut prompts = Vec::with_capacity(list.len());
    for (place, value) in list.iter().enumerate() {
        prompts.push(match value {
            Value::String(text) => encode("prompt", text, add_special, model)?,
            Value::Array(ids) => token_ids(&format!("prompt[{place}]"), ids, model.vocabulary)?,
            other => {
                return Err(wrong_type(
                    format!("prompt[{place}]"),
                    "a string or an array of token ids",
                    other,
                ));
            }
        });
    }
    Ok(prompts)
}

/// Tokenises, after refusing what cannot fit the context anyhow.
pub(super) fn encode(
    param: &'static str,
    text: &str,
    add_special: bool,
    model: &ServedModel,
) -> Result<Vec<u32>, ApiError> {
    let tokenizer = tokenizer(param, model)?;
    let context = model.context_tokens as usize;
    let tokens_min = text.len() / model.token_bytes_max.max(1);
    if tokens_min >= context {
        return Err(too_long(param, tokens_min, "at least ", context));
    }
    tokenizer
        .encode(text, add_special)
        .map_err(|error| text_error(param, error))
}

pub(super) fn tokenizer<'a>(
    param: &'static str,
    model: &'a ServedModel,
) -> Result<&'a dyn TextModel, ApiError> {
    model
        .text
        .as_deref()
        .ok_or_else(|| no_tokenizer(param, "text"))
}

pub(super) fn text_error(param: &'static str, error: TextError) -> ApiError {
    match error {
        TextError::Tokenizer(what) => ApiError::invalid(
            "tokenizer_failed",
            param,
            format!("the text could not be tokenised: {what}"),
        ),
        TextError::Template(what) => ApiError::invalid(
            "chat_template_failed",
            param,
            format!("the model's chat template refused the messages: {what}"),
        ),
        TextError::NoTemplate => ApiError::invalid(
            "no_chat_template",
            param,
            "this model has no chat template; use /v1/completions with a prompt",
        ),
    }
}

/// Renders and tokenises a chat.
pub(super) fn chat_prompt(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<u32>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| {
        ApiError::invalid(
            "missing_field",
            "messages",
            "`messages` is missing: an array of {\"role\", \"content\"}",
        )
    })?;
    let text_model = tokenizer("messages", model)?;
    if list.is_empty() {
        return Err(ApiError::invalid(
            "invalid_value",
            "messages",
            "`messages` is empty; send at least one message",
        ));
    }
    let mut messages = Vec::with_capacity(list.len());
    for (place, value) in list.iter().enumerate() {
        messages.push(message(place, value)?);
    }
    let text = text_model
        .render_chat(&messages)
        .map_err(|error| text_error("messages", error))?;
    // The template writes the special tokens itself.
    encode("messages", &text, false, model)
}

fn message(place: usize, value: &Value) -> Result<ChatMessage, ApiError> {
    let Value::Object(map) = value else {
        return Err(wrong_type(format!("messages[{place}]"), "an object", value));
    };
    let role = match map.get("role") {
        Some(Value::String(role)) => role.as_str(),
        None | Some(Value::Null) => {
            return Err(ApiError::invalid(
                "missing_field",
                format!("messages[{place}].role"),
                format!("`messages[{place}].role` is missing"),
            ));
        }
        Some(other) => {
            return Err(wrong_type(
                format!("messages[{place}].role"),
                "a string",
                other,
            ));
        }
    };
    let role = match role {
        "system" | "user" | "assistant" => role,
        // OpenAI's newer name for the same turn.
        "developer" => "system",
        "tool" | "function" => {
            return Err(ApiError::not_supported(
                format!("messages[{place}].role"),
                "a tool's message",
            ));
        }
        other => {
            return Err(ApiError::invalid(
                "invalid_value",
                format!("messages[{place}].role"),
                format!(
                    "`messages[{place}].role` is `{}`, it must be system, developer, user or \
                     assistant",
                    super::error::clipped(other)
                ),
            ));
        }
    };
    for name in ["tool_calls", "function_call", "audio"] {
        let neutral = match map.get(name) {
            None | Some(Value::Null) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_)) => false,
        };
        if !neutral {
            return Err(ApiError::not_supported(
                format!("messages[{place}].{name}"),
                "a call",
            ));
        }
    }
    Ok(ChatMessage {
        role: role.to_owned(),
        content: content(place, role, map)?,
    })
}

fn content(place: usize, role: &str, map: &Map<String, Value>) -> Result<String, ApiError> {
    let name = || format!("messages[{place}].content");
    match map.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        None | Some(Value::Null) if role == "assistant" => Ok(String::new()),
        None | Some(Value::Null) => Err(ApiError::invalid(
            "missing_field",
            name(),
            format!("`{}` is missing", name()),
        )),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (part, value) in parts.iter().enumerate() {
                texts.push(text_part(&format!("{}[{part}]", name()), value)?);
            }
            Ok(texts.join("\n"))
        }
        Some(other) => Err(wrong_type(
            name(),
            "a string or an array of text parts",
            other,
        )),
    }
}

fn text_part<'a>(name: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    match (value.get("type").and_then(Value::as_str), value.get("text")) {
        (Some("text"), Some(Value::String(text))) => Ok(text),
        (Some("text"), Some(other)) => Err(wrong_type(format!("{name}.text"), "a string", other)),
        (Some("text"), None) => Err(ApiError::invalid(
            "missing_field",
            format!("{name}.text"),
            format!("`{name}.text` is missing"),
        )),
        (Some(_), _) => Err(ApiError::not_supported(
            format!("{name}.type"),
            "a part that is not text",
        )),
        (None, _) => Err(ApiError::invalid(
            "missing_field",
            format!("{name}.type"),
            format!("`{name}` must be an object with `type`: \"text\" and `text`"),
        )),
    }
}
