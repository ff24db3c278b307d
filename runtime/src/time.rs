//! Monotonic time as plain numbers, so that sans-IO cores can be driven with any clock.

use std::time::Duration;

/// Nanoseconds on one process-wide monotonic clock (`CLOCK_MONOTONIC`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Reads the clock. Only shells call this; cores are given the time.
    pub fn now() -> Self {
        let mut spec = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `spec` is a valid, writable timespec for the whole call.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut spec) };
        Nanos(spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64)
    }

    /// This time plus `span`, saturating.
    pub fn after(self, span: Duration) -> Self {
        Nanos(
            self.0
                .saturating_add(span.as_nanos().min(u64::MAX as u128) as u64),
        )
    }

    /// The span since `earlier`; zero when `earlier` is later.
    pub fn since(self, earlier: Nanos) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A point in time by which a wait has ended. It is finite by construction (PROTOCOL P5):
/// there is no value that means "never", and spans are cut to [`Deadline::SPAN_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Deadline(Nanos);

impl Deadline {
    /// The longest wait anything may ask for: one day.
    pub const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

    /// A deadline `span` after `now`, cut to [`Deadline::SPAN_MAX`].
    pub fn after(now: Nanos, span: Duration) -> Self {
        Deadline(now.after(span.min(Self::SPAN_MAX)))
    }

    /// The point in time itself.
    pub fn at(self) -> Nanos {
        self.0
    }

    /// What is left of it at `now`; zero once it has passed.
    pub fn left(self, now: Nanos) -> Duration {
        self.0.since(now)
    }

    /// Whether it has passed at `now`.
    pub fn passed(self, now: Nanos) -> bool {
        now >= self.0
    }

    /// The earlier of two deadlines.
    pub fn earlier(self, other: Deadline) -> Deadline {
        self.min(other)
    }
}
