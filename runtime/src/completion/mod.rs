//! The completion contract: channels, posts, slots (PROTOCOL 1) and their two ends (PROTOCOL 2).
//!
//! ```text
//!   source.poll ──Completed{channel, position}──► Slab: ring[position] ─► slot ─► waker
//!                                                  │      (cumulative: retires all up to it)
//!   Completion (future) ◄──logical end, once───────┤
//!   GuardKeeper         ◄──physical end, once──────┘  released | quarantined
//! ```
//!
//! | file | what it decides |
//! |---|---|
//! | `ids` | the names: work, channel, slot, guard, reason |
//! | `wheel` | which deadline has passed |
//! | `channel` | which posts a completion retires (P2, P3) |
//! | `ladder` | how a channel is stopped in bounded time (E2 to E4) |
//! | `slot` | the states of one awaited thing (P4), the free list |
//! | `slab` | all of these together, sans-IO: events in, effects out |
//! | `hub`, `future`, `oneshot` | the shell of one shard: futures, sources, the poll turn |
//!
//! Everything up to `slab` is given the time and does no I/O; futures exist only in the shell.

mod channel;
mod counters;
mod effects;
mod errors;
mod future;
mod hub;
mod ids;
mod ladder;
mod oneshot;
mod slab;
mod slot;
mod wheel;

pub use channel::RING_MAX;
pub use counters::{HubCounters, SlotPhase, SlotView};
pub use effects::{Effects, GuardEnd, Order};
pub use errors::{BeginError, OpenError, PostError};
pub use future::Completion;
pub use hub::{Arming, GuardKeeper, Hub, HubLimits, Turn};
pub use ids::{
    ChannelId, ChannelKind, Completed, CompletionStatus, EndReason, GuardToken, SlotId, WorkId,
};
pub use ladder::{DRAIN_BOUND, GRACE, StopRule};
pub use oneshot::{Completer, OneshotCompletion};
pub use slab::{Slab, SourceId};
pub use slot::{CHANNELS_PER_SLOT_MAX, POSTS_PER_SLOT_MAX};
pub use wheel::{TICK, Wheel};
