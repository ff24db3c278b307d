//! The signal to finish: from any thread to the listeners of every shard.

use crate::net::Relay;
use crate::time::{Deadline, Nanos};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// A drain that may be begun once, from any thread; clones are the same drain.
///
/// Listeners then stop accepting, answer what runs and what is on its way, close what idles,
/// and end when all is done, or cut the rest at the drain's deadline.
#[derive(Clone, Default)]
pub struct Drain {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Nanoseconds of the deadline, 0 while none has begun.
    deadline: AtomicU64,
    /// At most one waiter a listener of the process.
    relay: Relay,
}

impl Drain {
    /// A drain that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins the drain; requests still running at `deadline` are cut. A second call may only
    /// bring the deadline forward.
    pub fn begin(&self, deadline: Deadline) {
        let wanted = deadline.at().0.max(1);
        let update =
            self.inner
                .deadline
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |current| {
                    (current == 0 || wanted < current).then_some(wanted)
                });
        if update.is_ok() {
            self.inner.relay.fire();
        }
    }

    /// The deadline of the drain, once it has begun.
    pub fn deadline(&self) -> Option<Nanos> {
        match self.inner.deadline.load(Ordering::Acquire) {
            0 => None,
            at => Some(Nanos(at)),
        }
    }

    /// Ready once the drain has begun; wakes again when its deadline is brought forward.
    pub fn poll_begun(&self, cx: &mut Context<'_>) -> Poll<Nanos> {
        self.inner.relay.register(cx.waker());
        match self.deadline() {
            Some(at) => Poll::Ready(at),
            None => Poll::Pending,
        }
    }

    /// Waits for the drain to begin and gives its deadline. Waits as long as the process
    /// serves: the owner's select ends it.
    pub async fn begun(&self) -> Nanos {
        poll_fn(|cx| self.poll_begun(cx)).await
    }
}
