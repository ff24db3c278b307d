//! A request on a node that does both prefill and decode itself.

use super::NodeContext;
use super::decode::{compute_here, follow};
use super::request::RequestOut;
use crate::engine::{FinishReason, ServeError};

/// Runs a request to its end on this node alone. Dropping the future cancels it.
pub(super) async fn drive(
    node: &NodeContext,
    out: &RequestOut,
) -> Result<FinishReason, ServeError> {
    let sequence = compute_here(node, out)?;
    follow(out, sequence).await
}
