//! What a handler is given.

use super::alarm::Alarm;
use super::body_budget::BodyShare;
use super::error_body::error_json;
use super::limits::HttpLimits;
use super::response::Response;
use crate::shard::Shard;
use crate::time::Nanos;
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use hyper::body::{Body, Incoming};
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

/// Reserved for a body before any of it came: a head that only claims a size costs no more.
const RESERVE_BYTES_MAX: usize = 64 * 1024;

/// A request whose head has been read whole.
pub struct Request {
    /// Method, URI, version, headers.
    pub parts: hyper::http::request::Parts,
    /// The body, not read yet.
    pub body: RequestBody,
    /// The client's address; port 0 of the loopback for a Unix socket.
    pub peer: SocketAddr,
}

impl Request {
    /// The path without the query.
    pub fn path(&self) -> &str {
        self.parts.uri.path()
    }

    /// A header's value, if it is there and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.parts.headers.get(name)?.to_str().ok()
    }
}

/// The body of a request. Dropping it unread closes the connection after the answer.
pub struct RequestBody {
    incoming: Incoming,
    bytes_max: u64,
    bytes_read: u64,
    share: BodyShare,
    head_at: Nanos,
    limit: Duration,
    alarm: Alarm,
}

/// Why a body could not be had.
#[derive(Debug)]
pub enum BodyError {
    /// It is longer than allowed.
    TooLarge {
        /// The limit, bytes.
        bytes_max: u64,
    },
    /// The bodies of all requests together leave no room for it.
    NoRoom {
        /// The limit of all, bytes.
        bytes_max: u64,
    },
    /// It did not come in time.
    Timeout {
        /// The limit, from the end of the head.
        limit: Duration,
        /// Bytes that came.
        bytes_read: u64,
    },
    /// The client left in mid-body.
    Closed {
        /// Bytes that came.
        bytes_read: u64,
    },
    /// Its framing is broken (chunk sizes).
    Malformed {
        /// What the parser said.
        source: hyper::Error,
    },
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, shard: Shard, limits: &HttpLimits) -> Self {
        RequestBody {
            incoming,
            bytes_max: limits.body_bytes_max,
            bytes_read: 0,
            share: limits.bodies.share(),
            head_at: shard.now(),
            limit: limits.body_read,
            alarm: Alarm::new(shard),
        }
    }

    /// The length the client announced, if it did.
    pub fn announced(&self) -> Option<u64> {
        self.incoming.size_hint().exact()
    }

    /// The next piece, or `None` at the end.
    ///
    /// # Errors
    /// [`BodyError`]; the limits are those of the listener.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, BodyError> {
        let deadline = self.head_at.after(self.limit);
        let frame = poll_fn(|cx| match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => self.alarm.poll_until(cx, deadline).map(Err),
        });
        match frame.await {
            Err(()) => Err(BodyError::Timeout {
                limit: self.limit,
                bytes_read: self.bytes_read,
            }),
            Ok(None) => Ok(None),
            Ok(Some(Err(source))) => Err(self.classify(source)),
            // Trailers end a body and say nothing that anyone here asks for.
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => self.take(data).map(Some),
                Err(_) => Ok(None),
            },
        }
    }

    /// Reads the body whole; at most `bytes_max` and the listener's own limit.
    ///
    /// # Errors
    /// [`BodyError`]; [`BodyError::response`] is the answer to give.
    pub async fn read_all(mut self, bytes_max: u64) -> Result<Bytes, BodyError> {
        self.bytes_max = self.bytes_max.min(bytes_max);
        let announced = self.announced().unwrap_or(0);
        if announced > self.bytes_max {
            return Err(self.too_large());
        }
        let Some(first) = self.chunk().await? else {
            return Ok(Bytes::new());
        };
        if first.len() as u64 == announced {
            return Ok(self.held(first));
        }
        let reserve = usize::try_from(announced).unwrap_or(usize::MAX);
        let mut whole = BytesMut::with_capacity(reserve.min(RESERVE_BYTES_MAX).max(first.len()));
        whole.extend_from_slice(&first);
        while let Some(chunk) = self.chunk().await? {
            whole.extend_from_slice(&chunk);
        }
        Ok(self.held(whole.freeze()))
    }

    fn take(&mut self, data: Bytes) -> Result<Bytes, BodyError> {
        self.bytes_read += data.len() as u64;
        if self.bytes_read > self.bytes_max {
            return Err(self.too_large());
        }
        if !self.share.grow(data.len() as u64) {
            let bytes_max = self.share.bytes_max();
            return Err(BodyError::NoRoom { bytes_max });
        }
        Ok(data)
    }

    /// The bytes of a whole body, which count until the last reference to them is dropped.
    fn held(&mut self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(HeldBody {
            bytes,
            _share: self.share.take(),
        })
    }

    fn too_large(&self) -> BodyError {
        BodyError::TooLarge {
            bytes_max: self.bytes_max,
        }
    }

    fn classify(&self, source: hyper::Error) -> BodyError {
        let io_kind = std::error::Error::source(&source)
            .and_then(|cause| cause.downcast_ref::<std::io::Error>())
            .map(std::io::Error::kind);
        match io_kind {
            Some(std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData) => {
                BodyError::Malformed { source }
            }
            _ => BodyError::Closed {
                bytes_read: self.bytes_read,
            },
        }
    }
}

/// A body with its part of the budget.
struct HeldBody {
    bytes: Bytes,
    _share: BodyShare,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl BodyError {
    /// The HTTP status that says it: 400, 408, 413 or 503.
    pub fn status(&self) -> StatusCode {
        match self {
            BodyError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::NoRoom { .. } => StatusCode::SERVICE_UNAVAILABLE,
            BodyError::Timeout { .. } => StatusCode::REQUEST_TIMEOUT,
            BodyError::Closed { .. } | BodyError::Malformed { .. } => StatusCode::BAD_REQUEST,
        }
    }

    /// The stable name for `error.code`.
    pub fn code(&self) -> &'static str {
        match self {
            BodyError::TooLarge { .. } => "body_too_large",
            BodyError::NoRoom { .. } => "overloaded",
            BodyError::Timeout { .. } => "body_timeout",
            BodyError::Closed { .. } => "body_incomplete",
            BodyError::Malformed { .. } => "body_malformed",
        }
    }

    /// The answer: JSON error, and the connection closes after it.
    pub fn response(&self) -> Response {
        let kind = match self {
            BodyError::NoRoom { .. } => "overloaded_error",
            BodyError::TooLarge { .. }
            | BodyError::Timeout { .. }
            | BodyError::Closed { .. }
            | BodyError::Malformed { .. } => "invalid_request_error",
        };
        let json = error_json(&self.to_string(), kind, None, self.code());
        let response = Response::bytes(self.status(), "application/json", json).closing();
        match self {
            BodyError::NoRoom { .. } => response.header("retry-after", "1"),
            BodyError::TooLarge { .. }
            | BodyError::Timeout { .. }
            | BodyError::Closed { .. }
            | BodyError::Malformed { .. } => response,
        }
    }
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodyError::TooLarge { bytes_max } => write!(
                f,
                "the request body is longer than the limit of {bytes_max} bytes; send less"
            ),
            BodyError::NoRoom { bytes_max } => write!(
                f,
                "the bodies of all requests together would pass the limit of {bytes_max} bytes; \
                 try again"
            ),
            BodyError::Timeout { limit, bytes_read } => write!(
                f,
                "the request body was not complete within {} ms ({bytes_read} bytes came); send it faster",
                limit.as_millis()
            ),
            BodyError::Closed { bytes_read } => write!(
                f,
                "the connection ended after {bytes_read} bytes of the request body"
            ),
            BodyError::Malformed { source } => {
                write!(f, "the request body's framing is broken: {source}")
            }
        }
    }
}

impl std::error::Error for BodyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BodyError::Malformed { source } => Some(source),
            BodyError::TooLarge { .. }
            | BodyError::NoRoom { .. }
            | BodyError::Timeout { .. }
            | BodyError::Closed { .. } => None,
        }
    }
}
