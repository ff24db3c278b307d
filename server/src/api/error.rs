//! The one error object of the API and the table from typed failures to HTTP.
//!
//! Owns: `{"error":{"message","type","param","code"}}` and which status each failure has
//! (api.md "Errors"). Never: text of a request inside an error.

use crate::engine::{Refusal, RetryClass, ServeError, Stage};
use hyper::StatusCode;
use serde::Serialize;
use std::borrow::Cow;
use std::time::Duration;

/// The longest `Retry-After` told to anybody: one hour. More would only keep clients away
/// from a node that has long come back.
const RETRY_AFTER_S_MAX: u64 = 3600;

/// `type` of errors that the client can mend.
pub const INVALID_REQUEST: &str = "invalid_request_error";
/// `type` of errors about something that is not there.
pub const NOT_FOUND: &str = "not_found_error";
/// `type` of 429: too many requests at once.
pub const RATE_LIMIT: &str = "rate_limit_error";
/// `type` of 503: come again later.
pub const OVERLOADED: &str = "overloaded_error";
/// `type` of 501: known to OpenAI clients, not served here.
pub const NOT_SUPPORTED: &str = "not_supported_error";
/// `type` of 500.
pub const SERVER: &str = "server_error";
/// `type` and `code` of 504.
pub const DEADLINE_EXCEEDED: &str = "deadline_exceeded";

/// A failure as the client sees it: before the first byte an HTTP status with a JSON body,
/// inside a stream an SSE error event (PROTOCOL R5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status, when headers have not gone out yet.
    pub status: StatusCode,
    /// `error.type`.
    pub kind: &'static str,
    /// `error.code`: a stable label.
    pub code: &'static str,
    /// `error.param`: the field that was wrong.
    pub param: Option<Cow<'static, str>>,
    /// `error.message`: what was wrong, where, what to do.
    pub message: String,
    /// `Retry-After`, in seconds.
    pub retry_after_s: Option<u64>,
    /// `Allow`, for 405.
    pub allow: Option<&'static str>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

impl ApiError {
    /// An error with everything but message and status left at its usual value.
    pub fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        ApiError {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after_s: None,
            allow: None,
        }
    }

    /// 400 about one field.
    pub fn invalid(
        code: &'static str,
        param: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID_REQUEST, code, message).with_param(param)
    }

    /// 400 for a field that is known and not served yet: never silently ignored.
    pub fn not_supported(param: impl Into<Cow<'static, str>>, asked: &str) -> Self {
        let param = param.into();
        let message = format!(
            "`{param}`: {asked} is not supported by this server yet; support follows in a later \
             release. Leave the field out or send its neutral value."
        );
        ApiError::invalid("not_supported", param, message)
    }

    /// 404 for a path nobody knows.
    pub fn unknown_path(method: &str, path: &str) -> Self {
        ApiError::new(
            StatusCode::NOT_FOUND,
            NOT_FOUND,
            "not_found",
            format!(
                "no such endpoint: {method} {}; try /v1/chat/completions, /v1/completions or \
                 /v1/models",
                clipped(path)
            ),
        )
    }

    /// 404 for a model that is not served here.
    pub fn unknown_model(asked: &str, served: &str) -> Self {
        ApiError::new(
            StatusCode::NOT_FOUND,
            NOT_FOUND,
            "model_not_found",
            format!(
                "the model `{}` does not exist here; this server has `{served}` (leave `model` \
                 out to use it)",
                clipped(asked)
            ),
        )
        .with_param("model")
    }

    /// 405 with the methods that the path has.
    pub fn wrong_method(method: &str, path: &str, allow: &'static str) -> Self {
        let mut error = ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            INVALID_REQUEST,
            "method_not_allowed",
            format!("{} does not take {method}; use {allow}", clipped(path)),
        );
        error.allow = Some(allow);
        error
    }

    /// 501 for endpoints that OpenAI clients know and this server has not.
    pub fn unsupported_endpoint(path: &str) -> Self {
        ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            NOT_SUPPORTED,
            "not_supported",
            format!(
                "{} is not served here; this server has /v1/chat/completions and \
                 /v1/completions",
                clipped(path)
            ),
        )
    }

    /// 503 because the helpers that read requests are all busy.
    pub fn side_pool_full(queued_max: usize) -> Self {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "overloaded",
            format!("{queued_max} requests already wait to be read and tokenised; come again"),
        )
        .with_retry_after(Duration::from_secs(1))
    }

    /// 504: the request's time is over.
    pub fn deadline(stage: &'static str, timeout: Duration) -> Self {
        ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            DEADLINE_EXCEEDED,
            DEADLINE_EXCEEDED,
            format!(
                "the request did not end within its {} ms (stage: {stage}); raise \
                 --request-timeout or ask for fewer tokens",
                timeout.as_millis()
            ),
        )
    }

    /// 500 with an id that the log has too.
    pub fn server(id: &str, what: &str) -> Self {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            SERVER,
            "internal_error",
            format!("{what} (request {id})"),
        )
    }

    /// Names the field.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Adds `Retry-After`: whole seconds, rounded up, 1 to 3600.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        let whole_s = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        self.retry_after_s = Some(whole_s.clamp(1, RETRY_AFTER_S_MAX));
        self
    }

    /// What the engine would not accept.
    pub fn from_refusal(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Overloaded {
                queued,
                queued_max,
                retry_after,
            } => ApiError::new(
                StatusCode::TOO_MANY_REQUESTS,
                RATE_LIMIT,
                "queue_full",
                format!("{queued} of at most {queued_max} requests already wait; come again"),
            )
            .with_retry_after(retry_after),
            Refusal::Draining => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                OVERLOADED,
                "draining",
                "this server is shutting down and takes no new requests",
            )
            .with_retry_after(Duration::from_secs(5)),
            Refusal::NotReady { missing } => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                OVERLOADED,
                "not_ready",
                format!("not ready to serve: {missing}"),
            )
            .with_retry_after(Duration::from_secs(1)),
            Refusal::TooLarge { tokens, tokens_max } => ApiError::new(
                StatusCode::BAD_REQUEST,
                INVALID_REQUEST,
                "kv_cache_too_small",
                format!(
                    "prompt and max_tokens may need {tokens} tokens of KV cache, this server \
                     holds {tokens_max}; send less or start it with a larger --kv-cache"
                ),
            ),
        }
    }

    /// A request that failed after it was accepted. `id` goes into 500s, so that the log
    /// line can be found.
    pub fn from_serve_error(error: &ServeError, id: &str) -> Self {
        let (status, kind) = match error.reason {
            "deadline_exceeded" => (StatusCode::GATEWAY_TIMEOUT, DEADLINE_EXCEEDED),
            "draining" | "peer_lost" | "overloaded" | "not_ready" | "kv_cache_full" => {
                (StatusCode::SERVICE_UNAVAILABLE, OVERLOADED)
            }
            // A reason that this table does not know: what may be tried tells whether coming
            // again can help.
            _ => match error.retry {
                RetryClass::SamePair | RetryClass::OtherPair | RetryClass::Recompute => {
                    (StatusCode::SERVICE_UNAVAILABLE, OVERLOADED)
                }
                RetryClass::Fail => (StatusCode::INTERNAL_SERVER_ERROR, SERVER),
            },
        };
        let message = if status == StatusCode::INTERNAL_SERVER_ERROR {
            format!(
                "{} (stage: {}, request {id})",
                error.message,
                stage_label(error.stage)
            )
        } else {
            format!("{} (stage: {})", error.message, stage_label(error.stage))
        };
        let answer = ApiError::new(status, kind, error.reason, message);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            answer.with_retry_after(Duration::from_secs(1))
        } else {
            answer
        }
    }

    /// The error object, compact.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(&Envelope {
            error: Body {
                message: &self.message,
                kind: self.kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        })
        .expect("an object of strings always serialises")
    }

    /// The error as the last event of a stream. Nothing follows it: no `finish_reason`, no
    /// `[DONE]`.
    pub fn to_sse(&self) -> Vec<u8> {
        let mut event = b"data: ".to_vec();
        event.extend_from_slice(&self.to_json());
        event.extend_from_slice(b"\n\n");
        event
    }
}

/// Stable label of a stage, for messages and metrics.
pub fn stage_label(stage: Stage) -> &'static str {
    match stage {
        Stage::Queue => "queue",
        Stage::Pair => "pair",
        Stage::Prefill => "prefill",
        Stage::Pull => "pull",
        Stage::Commit => "commit",
        Stage::Decode => "decode",
        Stage::Forward => "forward",
    }
}

/// Text of the client's inside a message: at most 64 characters of it.
pub(crate) fn clipped(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(64) {
        Some((end, _)) => Cow::Owned(format!("{}...", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(reason: &'static str, retry: RetryClass) -> ServeError {
        ServeError {
            stage: Stage::Pull,
            reason,
            retry,
            message: "it broke".into(),
        }
    }

    #[test]
    fn each_failure_has_its_status_type_and_code() {
        let table = [
            (
                "deadline_exceeded",
                RetryClass::Fail,
                504,
                DEADLINE_EXCEEDED,
            ),
            ("draining", RetryClass::Fail, 503, OVERLOADED),
            ("peer_lost", RetryClass::OtherPair, 503, OVERLOADED),
            ("commit_refused", RetryClass::Recompute, 503, OVERLOADED),
            ("engine_failed", RetryClass::Fail, 500, SERVER),
        ];
        for (reason, retry, status, kind) in table {
            let error = ApiError::from_serve_error(&failure(reason, retry), "req-7");
            assert_eq!(error.status.as_u16(), status, "{reason}");
            assert_eq!(error.kind, kind, "{reason}");
            assert_eq!(error.code, reason);
            assert_eq!(error.retry_after_s.is_some(), status == 503, "{reason}");
            assert_eq!(error.message.contains("req-7"), status == 500, "{reason}");
        }
    }

    #[test]
    fn refusals_tell_when_to_come_again() {
        let error = ApiError::from_refusal(Refusal::Overloaded {
            queued: 256,
            queued_max: 256,
            retry_after: Duration::from_millis(1200),
        });
        assert_eq!(error.status, 429);
        assert_eq!(error.retry_after_s, Some(2));
        assert_eq!(ApiError::from_refusal(Refusal::Draining).status, 503);
        let missing = ApiError::from_refusal(Refusal::NotReady {
            missing: "no prefill node has joined".into(),
        });
        assert_eq!(missing.status, 503);
        assert!(missing.message.contains("no prefill node"));
        let large = ApiError::from_refusal(Refusal::TooLarge {
            tokens: 9000,
            tokens_max: 4096,
        });
        assert_eq!(large.status, 400);
        assert!(large.message.contains("9000") && large.message.contains("4096"));
    }

    #[test]
    fn the_object_has_exactly_the_four_fields() {
        let error = ApiError::invalid("invalid_value", "top_p", "no \"such\" value");
        assert_eq!(
            String::from_utf8(error.to_json()).unwrap(),
            r#"{"error":{"message":"no \"such\" value","type":"invalid_request_error","param":"top_p","code":"invalid_value"}}"#
        );
        assert!(error.to_sse().starts_with(b"data: {\"error\""));
        assert!(error.to_sse().ends_with(b"}\n\n"));
    }

    #[test]
    fn a_long_name_of_the_client_is_clipped_at_a_character() {
        let long = "é".repeat(500);
        assert!(clipped(&long).len() < 200);
        assert_eq!(clipped("short"), "short");
    }
}
