//! The proxy's data plane: OpenAI requests go to the least busy decode or hybrid node as they
//! are, answers come back chunk by chunk.
//!
//! ```text
//! client -> http -> Proxy::handle -> NodeTable::choose -> Upstream::send -> node's API
//!        <- ForwardedStream (whole events) <- UpstreamAnswer::chunk <-
//! ```
//!
//! Owns: how many requests each node has from here, and what they took. Never: parses a body,
//! holds state that safety needs (PROTOCOL R7).
//! Invariants: dropping an answer drops the exchange with the node, so the node cancels; a
//! node is tried anew only before any byte of an answer; after the headers a lost node is an
//! SSE error event with code `peer_lost` and the end (R5); every wait ends at the request's
//! deadline plus [`forward::ANSWER_SLACK`], or when the cluster layer removes the node.

mod client;
pub mod forward;
pub mod stream;
pub mod table;
pub mod ticket;
pub mod upstream;

pub use forward::{Proxy, ProxyConfig, ProxyMetrics};
pub use table::{NodeRecord, NodeRole, NodeTable, TableFull, path_json};
pub use ticket::Ticket;
pub use upstream::{Upstream, UpstreamAnswer, UpstreamError};
