//! What a peer's path moves per second while reads are in flight. A leaf.

use kvserve_runtime::Nanos;
use std::time::Duration;

/// A sample is taken when a busy time has lasted this long: several reads of 1 MiB.
const SAMPLE_SPAN: Duration = Duration::from_millis(10);

/// A shorter busy time gives a sample if it moved this much; less is all latency.
const SAMPLE_BYTES: u64 = 256 << 10;

/// Bytes per second of a path, over the time in which something was in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    since: Nanos,
    moved: u64,
    bytes_per_s: u64,
}

impl Rate {
    /// The path, idle so far, gets something to do.
    pub fn begin(&mut self, now: Nanos) {
        self.since = now;
        self.moved = 0;
    }

    /// A read of `bytes` is in place; `idle`: nothing is in flight any more.
    pub fn moved(&mut self, now: Nanos, bytes: u64, idle: bool) {
        self.moved += bytes;
        let span = now.since(self.since);
        if span >= SAMPLE_SPAN || (idle && self.moved >= SAMPLE_BYTES) {
            let span_ns = span.as_nanos().max(1);
            let sample = u128::from(self.moved) * 1_000_000_000 / span_ns;
            let sample = u64::try_from(sample).unwrap_or(u64::MAX).max(1);
            self.bytes_per_s = match self.bytes_per_s {
                0 => sample,
                known => known - known / 4 + sample / 4,
            };
            self.begin(now);
        }
    }

    /// The rate; 0 while unknown.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    /// How long `bytes` take; `None` while the rate is unknown.
    pub fn span_of(&self, bytes: u64) -> Option<Duration> {
        if self.bytes_per_s == 0 {
            return None;
        }
        let span_ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        Some(Duration::from_nanos(
            u64::try_from(span_ns).unwrap_or(u64::MAX),
        ))
    }
}
