//! What a sentinel reads about a shard's poll loop from another thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// Progress of one poll loop. Written by the shard with one relaxed store each a turn, read by
/// anyone; the numbers order nothing.
#[derive(Debug, Default)]
pub struct PollProgress {
    turns: AtomicU64,
    slots_live: AtomicU64,
}

impl PollProgress {
    /// Turns of the poll loop so far. A shard with live slots that does not turn is stuck; one
    /// without may be parked.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Slots that were not free at the last turn: whether the shard has work.
    pub fn slots_live(&self) -> u64 {
        self.slots_live.load(Ordering::Relaxed)
    }

    pub(super) fn turned(&self, slots_live: u64) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.slots_live.store(slots_live, Ordering::Relaxed);
    }
}
