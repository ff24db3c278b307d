//! Time as the API and the proxy see it: a seam, so that tests turn the clock by hand.

use kvserve_runtime::{Nanos, Shard};
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

/// A future of this shard.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Reads the time and waits for it.
pub trait Clock {
    /// Monotonic time.
    fn now(&self) -> Nanos;
    /// Ends after `span`.
    fn sleep(&self, span: Duration) -> LocalFuture<'static, ()>;
}

impl Clock for Shard {
    fn now(&self) -> Nanos {
        Shard::now(self)
    }

    fn sleep(&self, span: Duration) -> LocalFuture<'static, ()> {
        let shard = self.clone();
        Box::pin(async move { Shard::sleep(&shard, span).await })
    }
}

/// Unix seconds, for `created`.
pub fn unix_s() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
