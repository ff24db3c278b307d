//! The exchange with a node, as the proxy sees it: a seam, so that tests script nodes and the
//! simulator can stand in for sockets.

use crate::api::LocalFuture;
use bytes::Bytes;
use hyper::{HeaderMap, Request, StatusCode};
use kvserve_runtime::Deadline;
use std::net::SocketAddr;

/// How an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamError {
    /// No connection: refused, unreachable, or not accepted in time.
    NotConnected {
        /// What happened.
        message: String,
    },
    /// The connection ended before the answer was whole.
    Closed {
        /// Whether any byte of the answer had come.
        answered: bool,
        /// What happened.
        message: String,
    },
    /// The deadline passed.
    Deadline,
    /// What came was no HTTP answer.
    Malformed {
        /// What happened.
        message: String,
    },
    /// This proxy has no connection left to give.
    TooManyConnections {
        /// The bound.
        open_max: usize,
    },
}

/// Sends requests to nodes.
pub trait Upstream {
    /// Sends and waits for the head of the answer. Dropping the future cancels.
    fn send(
        &self,
        address: SocketAddr,
        request: Request<Bytes>,
        deadline: Deadline,
    ) -> LocalFuture<'_, Result<Box<dyn UpstreamAnswer>, UpstreamError>>;
}

/// An answer whose body is on its way. Dropping it before its end closes the connection: the
/// node sees the cancel.
pub trait UpstreamAnswer {
    /// The status.
    fn status(&self) -> StatusCode;
    /// The headers.
    fn headers(&self) -> &HeaderMap;
    /// The next bytes; `None` at the end of a whole body.
    fn chunk(
        &mut self,
        deadline: Deadline,
    ) -> LocalFuture<'_, Result<Option<Bytes>, UpstreamError>>;
}
