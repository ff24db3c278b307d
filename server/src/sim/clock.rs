//! Virtual time: one global clock of the world, one drifting clock a node.

use kvserve_runtime::Nanos;
use std::cell::Cell;

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// What completion hubs of simulated nodes read: the clock of the node that runs now.
pub fn now() -> Nanos {
    Nanos(NOW.get())
}

/// The node about to run sees this time.
pub fn set(now: Nanos) {
    NOW.set(now.0);
}

/// Milliseconds as nanoseconds of the world's clock.
pub const fn ms(milliseconds: u64) -> u64 {
    milliseconds * 1_000_000
}

/// A node's clock: started at some time, running fast or slow by parts in a thousand.
#[derive(Clone, Copy, Debug)]
pub struct NodeClock {
    /// What it showed at the world's time 0.
    pub offset: u64,
    /// Parts in a thousand it runs fast.
    pub drift_permille: i64,
}

impl NodeClock {
    /// What it shows at the world's time `world`.
    pub fn at(&self, world: u64) -> Nanos {
        let drift = world as i64 / 1000 * self.drift_permille;
        Nanos((self.offset as i64 + world as i64 + drift) as u64)
    }

    /// The world's time by which it shows at least `local`.
    pub fn world(&self, local: Nanos) -> u64 {
        let span = local.0.saturating_sub(self.offset) as u128;
        (span * 1000 / (1000 + self.drift_permille) as u128) as u64 + 1000
    }
}
