//! `/tokenize` and `/detokenize`, pure.

use super::error::ApiError;
use super::fields::{Fields, token_ids};
use super::json::{parse_object, put, put_ids};
use super::params::no_tokenizer;
use super::prepare::{chat_prompt, text_error, tokenizer};
use super::text::ServedModel;
use std::sync::Arc;

/// Longest text that `/tokenize` takes: 1 MiB is some 300 Ki tokens, and a second of a side
/// thread at worst.
pub const TEXT_BYTES_MAX: usize = 1024 * 1024;

/// `prompt`, `content` or `messages` to ids.
///
/// # Errors
/// The HTTP error that the client gets.
pub fn tokenize(body: &[u8], model: &ServedModel) -> Result<Vec<u8>, ApiError> {
    let map = parse_object(body)?;
    let fields = Fields::new(&map);
    check_model(&fields, model)?;
    let with_names = fields.flag("return_token_strs")?.unwrap_or(false)
        || fields.flag("with_pieces")?.unwrap_or(false);
    let ids = match (fields.text("prompt")?, fields.text("content")?) {
        (Some(text), _) => encode("prompt", text, true, &fields, model)?,
        (None, Some(text)) => encode("content", text, false, &fields, model)?,
        (None, None) if fields.get("messages").is_some() => chat_prompt(&fields, model)?,
        (None, None) => {
            return Err(ApiError::invalid(
                "missing_field",
                "prompt",
                "send `prompt`, `content` or `messages`",
            ));
        }
    };
    let mut out = Vec::with_capacity(64 + ids.len() * 6);
    out.extend_from_slice(b"{\"count\":");
    put(&mut out, &ids.len());
    out.extend_from_slice(b",\"max_model_len\":");
    put(&mut out, &model.context_tokens);
    out.extend_from_slice(b",\"tokens\":");
    put_ids(&mut out, &ids);
    if with_names {
        let names = tokenizer("prompt", model)?;
        let names: Vec<String> = ids
            .iter()
            .map(|id| String::from_utf8_lossy(&names.token_bytes(*id)).into_owned())
            .collect();
        out.extend_from_slice(b",\"token_strs\":");
        put(&mut out, &names);
    }
    out.push(b'}');
    Ok(out)
}

/// Tokenises without regard to the context's length: that is what people count with it.
fn encode(
    param: &'static str,
    text: &str,
    add_special_default: bool,
    fields: &Fields<'_>,
    model: &ServedModel,
) -> Result<Vec<u32>, ApiError> {
    let add_special = match fields.flag("add_special_tokens")? {
        Some(flag) => flag,
        None => fields.flag("add_special")?.unwrap_or(add_special_default),
    };
    if text.len() > TEXT_BYTES_MAX {
        return Err(ApiError::invalid(
            "invalid_value",
            param,
            format!(
                "`{param}` has {} bytes, the limit is {TEXT_BYTES_MAX}",
                text.len()
            ),
        ));
    }
    tokenizer(param, model)?
        .encode(text, add_special)
        .map_err(|error| text_error(param, error))
}

/// `tokens` to text, special tokens with their names.
///
/// # Errors
/// The HTTP error that the client gets.
pub fn detokenize(body: &[u8], model: &ServedModel) -> Result<Vec<u8>, ApiError> {
    let map = parse_object(body)?;
    let fields = Fields::new(&map);
    check_model(&fields, model)?;
    let skip_special = fields.flag("skip_special_tokens")?.unwrap_or(false);
    let list = fields.list("tokens")?.ok_or_else(|| {
        ApiError::invalid(
            "missing_field",
            "tokens",
            "`tokens` is missing: an array of token ids",
        )
    })?;
    let ids = token_ids("tokens", list, model.vocabulary)?;
    let Some(text_model) = &model.text else {
        return Err(no_tokenizer("tokens", "text"));
    };
    let mut detokenizer = Arc::clone(text_model).detokenizer(skip_special);
    let mut text = String::new();
    for id in ids {
        detokenizer.push(id, &mut text);
    }
    detokenizer.finish(&mut text);
    let mut out = Vec::with_capacity(32 + 2 * text.len());
    out.extend_from_slice(b"{\"prompt\":");
    put(&mut out, &text);
    out.extend_from_slice(b",\"content\":");
    put(&mut out, &text);
    out.push(b'}');
    Ok(out)
}

fn check_model(fields: &Fields<'_>, model: &ServedModel) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(name) if !model.is_named(name) => Err(ApiError::unknown_model(name, model.name())),
        Some(_) | None => Ok(()),
    }
}
