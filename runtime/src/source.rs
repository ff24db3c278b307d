//! The face of everything that completes work: socket engines, copy queues, RDMA queues,
//! GPU counters, engine lanes. Synchronous, no futures in it.

use crate::completion::{ChannelId, Completed, WorkId};
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
///
/// The poll loop borrows a source only for the length of one of these calls, and never while
/// anything of the completion slab is borrowed.
pub trait CompletionSource {
    /// Makes progress and appends at most [`COMPLETIONS_PER_POLL_MAX`] completions to `out`;
    /// returns how many. Never blocks. A poll that finds nothing more takes back the readiness
    /// of the armed descriptor (reads its eventfd), else the shard could not park.
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize;

    /// Arms notification and returns the descriptor that turns readable when a poll would
    /// find something. The shard polls once more after arming and before it parks, so a poll
    /// does not disarm. `None`: the source has nothing to wait on right now, or, with work in
    /// flight, must be polled (the shard then polls it each millisecond).
    ///
    /// The descriptor stays open for as long as the source is registered: a watch on it lives
    /// on over many parks. A source with several sockets gives the descriptor of an `epoll`.
    fn arm(&mut self) -> Option<RawFd>;

    /// Posts that have not completed yet.
    fn in_flight(&self) -> usize;

    /// Stops a channel at once: nothing new starts on it. Idempotent.
    fn kill(&mut self, channel: ChannelId);

    /// Asks what became of a killed channel.
    fn reap(&mut self, channel: ChannelId) -> Reap;

    /// Whether a poll right now would go on with work in hand although nothing comes from
    /// outside (a copy that is done in pieces). The loop then turns again before it arms and
    /// parks.
    fn busy(&self) -> bool {
        false
    }

    /// Any number that grows while `channel` moves something between two completions (bytes,
    /// for instance). The stop ladder takes a change as progress, so that a large read over a
    /// slow link is not taken for a channel that stands still (PROTOCOL E3).
    fn moved(&self, channel: ChannelId) -> u64 {
        let _ = channel;
        0
    }

    /// The waiter of this post has ended: its bytes are wanted no more. `true` is a promise
    /// that from now on nothing of this post touches the memory it named (a TCP source reads
    /// the rest into scrap, PROTOCOL E3); the post still completes in its turn, with whatever
    /// status. `false`: it cannot be taken back, its memory waits for its completion.
    fn take_back(&mut self, work: WorkId) -> bool {
        let _ = work;
        false
    }
}
