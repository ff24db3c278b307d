//! Pages that the API serves and the rest of the process knows: health, metrics, debug.

use super::call::{Answer, JSON};
use super::clock::LocalFuture;
use super::error::ApiError;
use bytes::Bytes;
use hyper::{Method, StatusCode};
use serde_json::Value;

/// A JSON page.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Status, e.g. 503 for a shard that stands still.
    pub status: StatusCode,
    /// The page itself.
    pub body: Value,
}

impl Page {
    /// A page with status 200.
    pub fn ok(body: Value) -> Self {
        Page {
            status: StatusCode::OK,
            body,
        }
    }
}

impl From<Page> for Answer {
    fn from(page: Page) -> Self {
        Answer::full(page.status, JSON, page.body.to_string())
    }
}

/// What the node around the API provides.
pub trait AdminPages {
    /// `/health`: from the sentinel's atomics; never waits for anything.
    fn health(&self) -> Page;
    /// `/ready`: whether work is admitted.
    fn ready(&self) -> Page;
    /// `/progress`: age of the oldest waiter per stage.
    fn progress(&self) -> Page;
    /// `/nodes/status` of a node: how pages come to it; `None`: no such page.
    fn nodes_status(&self) -> Option<Page> {
        None
    }
    /// Appends the node's own metrics in Prometheus' text format.
    fn metrics(&self, out: &mut String);
    /// `GET /debug/*` and `POST /debug/chaos`; `None`: no such page.
    ///
    /// # Errors
    /// What was wrong with the request.
    fn debug(
        &self,
        method: Method,
        path: String,
        body: Bytes,
    ) -> LocalFuture<'_, Result<Option<Page>, ApiError>>;
}
