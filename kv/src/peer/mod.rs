//! Peers of this node: the async shell around [`crate::session`], [`crate::lease`] and
//! [`crate::pull`] on one shard.
//!
//! Owns: the sockets, the sessions, the data connections, the timers of both sides, and the
//! pages given over to migrations and leases until they go back to the ledger.
//! Never does: computes, allocates pages, decides which node to ask.
//! Keeps: P5 (each wait is a slot with a deadline), S3 (channels of a dead peer are destroyed
//! before anything is freed), L7, I9 (dropping a [`Migration`] at any point keeps the books).
//!
//! ```text
//!          listener ── handshake ─┐                     ┌─ events (up, down, app)
//!  dial loops ────── handshake ───┴─▶ session ─ frames ─┼─ lease table ── publisher ── service
//!  timer (200 ms): heartbeats, expiry, renewals         └─ attempts ───── migration ── decode
//!                  data connections ── TcpReadServer / TcpTransport (completion sources)
//! ```

mod ask;
mod config;
mod connect;
mod data;
mod dispatch;
mod entropy;
mod hub;
mod migrate;
mod migration;
mod path;
mod rdma;
mod reads;
mod serve;
mod session;
mod wait;

pub use crate::pull::{FailReason, MigrationError, NotBegun, Retry, Stage};
pub use crate::session::handshake::Refusal as HandshakeRefusal;
pub use crate::session::{
    AbortReason, AttemptId, PeerKey, RefuseReason, RequestId, Role, ServiceRefusal as Refusal,
};
pub use config::{
    IncomingPrefill, PathCounters, PeerConfig, PeerCounters, PeerEvents, PeerLimits, PeerParts,
    PeerState, PeerView, PrefillAsk, PrefillError, PrefillService, SendError, TransportChoice,
};
pub use entropy::{fresh_incarnation, fresh_key};
pub use hub::{AttemptView, PeerHub};
pub use migration::{Migration, MigrationEvent};
pub use serve::{GrantRefused, NOT_A_PREFILL_NODE, Publisher};
