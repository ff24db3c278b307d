//! The face of everything that completes work: socket engines, copy queues, RDMA queues,
//! GPU counters, engine lanes. Synchronous, no futures in it.

use crate::completion::{ChannelId, Completed};
use crate::time::Nanos;
use std::os::fd::RawFd;

/// Completions a source may hand out in one poll turn, so that one busy source cannot starve
/// the rest of a shard: 64 at about 100 ns each stay well below the 1 ms preempt timer.
pub const COMPLETIONS_PER_POLL_MAX: usize = 64;

/// What became of a killed channel (PROTOCOL E2, E4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reap {
    /// This many posts have not ended yet.
    Draining(usize),
    /// Nothing posted on it can touch memory any more.
    Quiet,
    /// It cannot be proven quiet: its memory must be quarantined.
    Stuck,
}

/// Something a shard polls for completions.
pub trait CompletionSource {
    /// Makes progress and appends at most [`COMPLETIONS_PER_POLL_MAX`] completions to `out`;
    /// returns how many. Never blocks.
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize;

    /// Arms notification and returns the descriptor that turns readable when a poll would
    /// find something. The shard polls once more after arming and before it parks. `None`: the
    /// source has nothing to wait on right now (or must be polled while work is in flight).
    fn arm(&mut self) -> Option<RawFd>;

    /// Posts that have not completed yet.
    fn in_flight(&self) -> usize;

    /// Stops a channel at once: nothing new starts on it. Idempotent.
    fn kill(&mut self, channel: ChannelId);

    /// Asks what became of a killed channel.
    fn reap(&mut self, channel: ChannelId) -> Reap;
}
