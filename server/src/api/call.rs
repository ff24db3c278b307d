//! One request and one answer, free of sockets: what the routing takes and gives.
//!
//! The HTTP shell (`http.rs`) fills a [`Call`] and sends an [`Answer`]; tests do the same by
//! hand. A streamed answer is pulled: dropping its [`EventSource`] is the cancellation.

use super::error::ApiError;
use bytes::Bytes;
use hyper::header::{ALLOW, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, Method, StatusCode};
use std::future::Future;
use std::pin::Pin;

/// Content type of JSON answers.
pub const JSON: &str = "application/json";
/// Content type of streams.
pub const EVENT_STREAM: &str = "text/event-stream";
/// Content type of `/metrics`.
pub const METRICS_TEXT: &str = "text/plain; version=0.0.4";

/// A request whose body has been read.
#[derive(Clone, Debug)]
pub struct Call {
    /// Method; `HEAD` is served as `GET`.
    pub method: Method,
    /// Path without the query, as sent.
    pub path: String,
    /// The query, without its question mark.
    pub query: Option<String>,
    /// Headers as sent.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// The bytes of a streamed answer, pulled one event at a time.
pub trait EventSource {
    /// The next bytes to send; `None` when the answer has ended. Dropping the source cancels
    /// whatever computes for it.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<Bytes>> + '_>>;
}

/// What an answer carries.
pub enum AnswerBody {
    /// All of it.
    Full(Bytes),
    /// A stream.
    Events(Box<dyn EventSource>),
}

/// An answer ready to be sent.
pub struct Answer {
    /// Status.
    pub status: StatusCode,
    /// `Content-Type`.
    pub content_type: HeaderValue,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body.
    pub body: AnswerBody,
}

impl Answer {
    /// A whole answer.
    pub fn full(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Answer {
            status,
            content_type: HeaderValue::from_static(content_type),
            headers: Vec::new(),
            body: AnswerBody::Full(body.into()),
        }
    }

    /// A JSON answer.
    pub fn json(status: StatusCode, value: &serde_json::Value) -> Self {
        Answer::full(status, JSON, value.to_string())
    }

    /// A stream of server-sent events.
    pub fn events(source: Box<dyn EventSource>) -> Self {
        Answer {
            status: StatusCode::OK,
            content_type: HeaderValue::from_static(EVENT_STREAM),
            headers: vec![(
                hyper::header::CACHE_CONTROL,
                HeaderValue::from_static("no-cache"),
            )],
            body: AnswerBody::Events(source),
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }
}

impl From<ApiError> for Answer {
    fn from(error: ApiError) -> Self {
        let mut answer = Answer::full(error.status, JSON, error.to_json());
        if let Some(seconds) = error.retry_after_s {
            answer = answer.with_header(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(allow) = error.allow {
            answer = answer.with_header(ALLOW, HeaderValue::from_static(allow));
        }
        answer
    }
}
