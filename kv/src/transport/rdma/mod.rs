//! Pages by RDMA READ on reliable connections (PROTOCOL X3): the decode node's card reads the
//! prefill node's pool, and its completions wake the transfers on the shard that posted them.
//!
//! **Owns** the device, its queue pairs and one completion queue per shard. **Never** lets a peer
//! write, never waits in a call, never takes a completion queue into overrun.
//! **Keeps** E4: a read is told as over only when the card has said so of each of its requests,
//! or when its queue pair is destroyed. What was told is in order, and once.
//!
//! ```text
//! decode node                                        prefill node
//!  prepare: queue pair, INIT ── endpoint (sealed) ──▶ serve: queue pair, INIT, RTR
//!  connect: RTR, RTS         ◀── endpoint, key ──────
//!  lease's pages             ◀── control ───────────  Places after Granted
//!  post: READ, READ, ...     ═══ the cards ════════▶  (nothing: reads are one-sided)
//!  poll: completions → reads → slots → wakers
//! ```
//!
//! A frozen peer's memory can be read on; such a migration fails at COMMIT.
//!
//! | file | what |
//! |---|---|
//! | `verbs/` | safe owners of the library's objects: the only `unsafe` |
//! | `config.rs` | settings, and which are refused |
//! | `address.rs` | which device, port and GID |
//! | `endpoint.rs` | what two ends tell each other, and what both can do |
//! | `cut.rs` | reads into work requests |
//! | `ring.rs` | requests on their way, closed by number |
//! | `channel.rs` | one queue pair that pulls |
//! | `connect.rs` | from RESET to use; the side that serves |
//! | `doctor.rs` | what stands in the way of RDMA here, in words |
//! | `transport.rs` | [`RdmaTransport`]: what a shard polls |

pub mod address;
mod channel;
pub mod config;
mod connect;
mod cut;
pub mod doctor;
pub mod endpoint;
mod ring;
mod transport;
pub mod verbs;

pub use super::places::PeerPlaces;
pub use config::RdmaConfig;
pub use connect::{Prepared, ServedId};
pub use endpoint::Endpoint;
pub use transport::{Opening, RdmaCounters, RdmaError, RdmaTransport, devices_found};
