//! The signal to finish: from any thread to the listeners of every shard.

use crate::shard::{Notice, Seat, Shard};
use crate::time::{Deadline, Nanos};
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// One for each live [`DrainWatch`]: a listener of a shard has one.
    watchers: Mutex<Vec<Arc<Notice>>>,
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
        let earlier = |current: u64| (current == 0 || wanted < current).then_some(wanted);
        let begun = &self.inner.deadline;
        if begun
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, earlier)
            .is_ok()
        {
            self.inner.watchers().iter().for_each(Notice::ring);
        }
    }

    /// The deadline of the drain, once it has begun.
    pub fn deadline(&self) -> Option<Nanos> {
        match self.inner.deadline.load(Ordering::Acquire) {
            0 => None,
            at => Some(Nanos(at)),
        }
    }

    /// Watches for the drain from `shard`.
    pub fn watch(&self, shard: &Shard) -> DrainWatch {
        let seat = Seat::on(shard);
        self.inner.watchers().push(seat.notice().clone());
        DrainWatch {
            drain: self.clone(),
            seat,
        }
    }

    /// Waits for the drain to begin and gives its deadline. Waits as long as the process
    /// serves: the owner's select ends it.
    pub async fn begun(&self, shard: &Shard) -> Nanos {
        let watch = self.watch(shard);
        poll_fn(|cx| watch.poll_begun(cx)).await
    }
}

impl Inner {
    fn watchers(&self) -> MutexGuard<'_, Vec<Arc<Notice>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One task's watch for a drain, on its shard.
pub struct DrainWatch {
    drain: Drain,
    seat: Seat,
}

impl DrainWatch {
    /// Ready once the drain has begun; wakes again when its deadline is brought forward.
    ///
    /// # Panics
    /// On any thread but the shard it was made on.
    pub fn poll_begun(&self, cx: &mut Context<'_>) -> Poll<Nanos> {
        // Take the mark of earlier rings and sit down for the next; look only then.
        while self.seat.poll_rung(cx).is_ready() {}
        match self.drain.deadline() {
            Some(at) => Poll::Ready(at),
            None => Poll::Pending,
        }
    }
}

impl Drop for DrainWatch {
    fn drop(&mut self) {
        let ours = self.seat.notice();
        let mut watchers = self.drain.inner.watchers();
        watchers.retain(|notice| !Arc::ptr_eq(notice, ours));
    }
}
