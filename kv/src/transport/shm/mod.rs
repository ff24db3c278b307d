//! Shared memory: two nodes on one host, the decode node copies pages out of the prefill node's
//! pool by itself (PROTOCOL X2).
//!
//! **Owns** the read-only maps of peers' pools, the copy queues, and the hand-over of a pool's
//! descriptor. **Never** writes a peer's memory (the pool is sealed, the map is read-only) and
//! never takes bytes for good that were written over meanwhile.
//! **Keeps** I2 and I10 as they are meant on shared memory: a page's generation is compared with
//! the lease's before and after its copy, so bytes of a page that was reused are noticed before
//! the read is `Done`; only then its checksum counts.
//!
//! ```text
//! decode node                                    prefill node
//!  connect, DataOpen{token} ── unix socket ──▶  same user? token of a live session?
//!  size, seals, head, nonce ◀── SCM_RIGHTS ───  DataAccepted{proof} + the pool's memfd
//!  lease's pages            ◀── control ──────  Places{page, generation} after Granted
//!  poll: generation? copy a piece, generation?  (nothing: reads are one-sided)
//! ```
//!
//! The socket stays open for as long as the channel: its end is how a dead peer is noticed,
//! whose memory could be read on. A frozen peer's memory can be read on too; such a migration
//! fails at COMMIT.
//!
//! | file | what |
//! |---|---|
//! | `transport.rs` | [`ShmTransport`]: channels, turns, what a shard polls |
//! | `channel.rs` | one peer's copy queue |
//! | `shared.rs` | [`SharedPool`]: a peer's pool, validated and mapped |
//! | `sys.rs` | seals, maps, descriptors over sockets: the `libc` calls |

mod channel;
mod shared;
mod sys;
mod transport;

pub use super::places::{LearnError, Place};
pub use shared::{ExpectedPool, MapRefusal, SharedPool};
pub(crate) use sys::{own_uid, peer_uid, receive_descriptor, send_descriptor};
pub use transport::{ShmConfig, ShmCounters, ShmTransport};
