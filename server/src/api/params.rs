//! The fields that completions and chat completions share, read and checked.

use super::error::ApiError;
use super::fields::{Fields, Tolerated, token_ids, wrong_type};
use super::text::ServedModel;
use super::unsupported;
use kvserve_kv::prefix::CACHE_SALT_BYTES_MAX;
use kvserve_model::LogitRules;
use kvserve_model::logit_rules::BIASED_IDS_MAX;
use kvserve_model::stop::{STOP_BYTES_MAX, STOPS_MAX};
use serde_json::Value;

/// Most log-probabilities a token may be asked for (as OpenAI).
pub const LOGPROBS_MAX: u32 = 20;
/// Most stop token ids of a request; each costs one comparison a token.
pub const STOP_IDS_MAX: usize = 128;
/// Largest number of tokens that may be asked for; what exceeds the context is cut to it.
pub const MAX_TOKENS_MAX: u32 = 16 * 1024 * 1024;

/// Which of the two endpoints a request came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// Checked parameters of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Answer as server-sent events.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// Tokens to generate at most; `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    /// 0 is greedy.
    pub temperature: f32,
    /// In (0, 1].
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Bias, penalties and `min_tokens`, without the ids that may not come early.
    pub rules: LogitRules,
    /// The client's seed.
    pub seed: Option<u64>,
    /// Stop strings, none empty.
    pub stop: Vec<String>,
    /// Stop token ids of the request, without the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's EOS does not end the text.
    pub ignore_eos: bool,
    /// `Some(n)`: log-probabilities of the chosen and the n best tokens.
    pub logprobs: Option<u8>,
    /// Token ids in the answer.
    pub return_token_ids: bool,
    /// Special tokens leave no text.
    pub skip_special_tokens: bool,
    /// Only prompts of the same salt share cached pages; empty for all without one.
    pub cache_salt: String,
    /// What was there beyond that.
    pub tolerated: Tolerated,
}

const KNOWN: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "skip_special_tokens",
    "add_special_tokens",
    "cache_salt",
];

/// Reads and checks the shared fields.
///
/// # Errors
/// 400 or 404 as in api.md, naming the field.
pub fn read(kind: Kind, fields: &Fields<'_>, model: &ServedModel) -> Result<Params, ApiError> {
    if let Some(name) = fields.text("model")?
        && !model.is_named(name)
    {
        return Err(ApiError::unknown_model(name, model.name()));
    }
    unsupported::refuse(fields)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let max_tokens = fields.u32("max_tokens", 1, MAX_TOKENS_MAX)?;
    let max_completion_tokens = fields.u32("max_completion_tokens", 1, MAX_TOKENS_MAX)?;
    let temperature = fields
        .number("temperature", 0.0, 2.0)?
        .map_or(model.defaults.temperature, |number| number as f32);
    let (top_p, only_best) = match fields.number("top_p", 0.0, 1.0)? {
        // Not even the best token's mass: the best token alone.
        Some(0.0) => (1.0, true),
        Some(mass) => ((mass as f32).max(f32::MIN_POSITIVE), false),
        None => (model.defaults.top_p, false),
    };
    let top_k = match fields.integer("top_k", -1, i128::from(i32::MAX))? {
        _ if only_best => 1,
        Some(-1) => 0,
        Some(count) => count as u32,
        None => model.defaults.top_k,
    };
    let seed = fields
        .integer("seed", i128::from(i64::MIN), i128::from(u64::MAX))?
        .map(|seed| seed as u64);
    let params = Params {
        stream,
        include_usage: include_usage(fields, stream)?,
        max_tokens: max_completion_tokens.or(max_tokens),
        temperature,
        top_p,
        top_k,
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0) as f32,
        rules: rules(fields, model, max_completion_tokens.or(max_tokens))?,
        seed,
        stop: stop_strings(fields, model)?,
        stop_token_ids: stop_ids(fields, model)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        logprobs: match kind {
            Kind::Completion => completion_logprobs(fields)?,
            Kind::Chat => chat_logprobs(fields)?,
        },
        // Where there is no text, the ids are the answer.
        return_token_ids: fields
            .flag("return_token_ids")?
            .unwrap_or(model.text.is_none()),
        skip_special_tokens: fields.flag("skip_special_tokens")?.unwrap_or(true),
        cache_salt: cache_salt(fields)?,
        tolerated: fields.tolerated(|name| {
            KNOWN.contains(&name)
                || unsupported::is_known(name)
                || match kind {
                    Kind::Completion => name == "prompt",
                    Kind::Chat => name == "messages",
                }
        }),
    };
    Ok(params)
}

fn rules(
    fields: &Fields<'_>,
    model: &ServedModel,
    max_tokens: Option<u32>,
) -> Result<LogitRules, ApiError> {
    let penalty = |name| fields.number(name, -2.0, 2.0);
    let early_tokens = fields.u32("min_tokens", 0, MAX_TOKENS_MAX)?.unwrap_or(0);
    if let Some(most) = max_tokens.filter(|most| *most < early_tokens) {
        return Err(ApiError::invalid(
            "invalid_value",
            "min_tokens",
            format!(
                "`min_tokens` is {early_tokens}, more than the {most} tokens asked for at most"
            ),
        ));
    }
    Ok(LogitRules {
        bias: logit_bias(fields, model)?,
        repetition: fields
            .number("repetition_penalty", 0.01, 100.0)?
            .unwrap_or(1.0) as f32,
        presence: penalty("presence_penalty")?.unwrap_or(0.0) as f32,
        frequency: penalty("frequency_penalty")?.unwrap_or(0.0) as f32,
        early_banned: Vec::new(),
        early_tokens,
    })
}

/// OpenAI's map from token id (as text) to a number from -100 to 100.
fn logit_bias(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<(u32, f32)>, ApiError> {
    let map = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => {
            return Err(wrong_type(
                "logit_bias",
                "an object of token ids and numbers",
                other,
            ));
        }
    };
    let wrong = |message: String| Err(ApiError::invalid("invalid_value", "logit_bias", message));
    if map.len() > BIASED_IDS_MAX {
        return wrong(format!(
            "`logit_bias` holds {} ids, the limit is {BIASED_IDS_MAX}",
            map.len()
        ));
    }
    let mut bias = Vec::with_capacity(map.len());
    for (name, value) in map {
        let id = name.parse::<u32>().ok().filter(|id| *id < model.vocabulary);
        let Some(id) = id else {
            return wrong(format!(
                "`{}` is no token id of this model: ids are 0 to {}",
                super::error::clipped(name),
                model.vocabulary - 1
            ));
        };
        match value.as_f64() {
            Some(number) if (-100.0..=100.0).contains(&number) => bias.push((id, number as f32)),
            Some(number) => {
                return wrong(format!(
                    "`logit_bias` of token {id} is {number}, it must be -100 to 100"
                ));
            }
            None => return Err(wrong_type(format!("logit_bias.{id}"), "a number", value)),
        }
    }
    Ok(bias)
}

fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    match fields.get("stream_options") {
        None => Ok(false),
        Some(Value::Object(options)) => {
            if !stream {
                return Err(ApiError::invalid(
                    "invalid_value",
                    "stream_options",
                    "`stream_options` is only for requests with `stream`: true",
                ));
            }
            match options.get("include_usage") {
                None | Some(Value::Null) => Ok(false),
                Some(Value::Bool(flag)) => Ok(*flag),
                Some(other) => Err(wrong_type(
                    "stream_options.include_usage",
                    "a boolean",
                    other,
                )),
            }
        }
        Some(other) => Err(wrong_type("stream_options", "an object", other)),
    }
}

fn stop_strings(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<String>, ApiError> {
    let stops = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => {
            if list.len() > STOPS_MAX {
                return Err(ApiError::invalid(
                    "invalid_value",
                    "stop",
                    format!(
                        "`stop` holds {} strings, the limit is {STOPS_MAX}",
                        list.len()
                    ),
                ));
            }
            let mut stops = Vec::with_capacity(list.len());
            for (place, value) in list.iter().enumerate() {
                match value {
                    Value::String(stop) => stops.push(stop.clone()),
                    other => return Err(wrong_type(format!("stop[{place}]"), "a string", other)),
                }
            }
            stops
        }
        Some(other) => return Err(wrong_type("stop", "a string or an array of strings", other)),
    };
    for stop in &stops {
        if stop.is_empty() || stop.len() > STOP_BYTES_MAX {
            return Err(ApiError::invalid(
                "invalid_value",
                "stop",
                format!(
                    "a stop string is {} bytes long, it must be 1 to {STOP_BYTES_MAX}",
                    stop.len()
                ),
            ));
        }
    }
    if model.text.is_none() && !stops.is_empty() {
        return Err(no_tokenizer("stop", "stop strings"));
    }
    Ok(stops)
}

fn cache_salt(fields: &Fields<'_>) -> Result<String, ApiError> {
    let salt = fields.text("cache_salt")?.unwrap_or_default();
    if salt.len() > CACHE_SALT_BYTES_MAX {
        return Err(ApiError::invalid(
            "invalid_value",
            "cache_salt",
            format!(
                "`cache_salt` is {} bytes long, the limit is {CACHE_SALT_BYTES_MAX}",
                salt.len()
            ),
        ));
    }
    Ok(salt.to_owned())
}

fn stop_ids(fields: &Fields<'_>, model: &ServedModel) -> Result<Vec<u32>, ApiError> {
    let Some(list) = fields.list("stop_token_ids")? else {
        return Ok(Vec::new());
    };
    if list.len() > STOP_IDS_MAX {
        return Err(ApiError::invalid(
            "invalid_value",
            "stop_token_ids",
            format!(
                "`stop_token_ids` holds {} ids, the limit is {STOP_IDS_MAX}",
                list.len()
            ),
        ));
    }
    token_ids("stop_token_ids", list, model.vocabulary)
}

/// Completions: `logprobs` is a count.
fn completion_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    Ok(fields
        .u32("logprobs", 0, LOGPROBS_MAX)?
        .map(|count| count as u8))
}

/// Chat: `logprobs` is a switch, `top_logprobs` the count.
fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let count = fields.u32("top_logprobs", 0, LOGPROBS_MAX)?;
    match (wanted, count) {
        (true, count) => Ok(Some(count.unwrap_or(0) as u8)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "invalid_value",
            "top_logprobs",
            "`top_logprobs` needs `logprobs`: true",
        )),
    }
}

/// 400 for text where there is no tokenizer.
pub fn no_tokenizer(param: &'static str, what: &str) -> ApiError {
    ApiError::invalid(
        "no_tokenizer",
        param,
        format!(
            "this model has no tokenizer, so {what} cannot be served; send `prompt` as token ids \
             to /v1/completions"
        ),
    )
}
