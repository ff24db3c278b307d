//! A waker that stands between one registration (a socket's readiness, a timer) and the tasks
//! that wait for it.
//!
//! Why it exists: glommio keeps one more waker for *each poll* of a pending registration. A
//! connection that streams tokens is polled once a token while its read side waits for hours;
//! its list of wakers would grow without end. With the relay a registration is polled once,
//! and later polls only look at a flag and replace the task to wake.
//!
//! It never leaves its shard (wakers of tasks must not, see `shard`); it is an `Arc` with a
//! mutex, never contended, only because a `Waker` has to be made of something `Sync`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// Tasks that may wait for one registration at a time. One is usual, two happen when a task
/// hands a socket on. More are woken for nothing and come again: 64 x 16 B = 1 KiB a direction.
const WAITERS_MAX: usize = 64;

/// Remembers that it was woken, and wakes the tasks that wait.
#[derive(Default)]
pub(crate) struct Relay {
    fired: AtomicBool,
    waiters: Mutex<Vec<Waker>>,
}

impl Relay {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Notes `waker` for the next wake. Register first, then look at [`Relay::fired`].
    pub(crate) fn register(&self, waker: &Waker) {
        let overflow = {
            let mut waiters = self.waiters();
            if waiters.iter().any(|known| known.will_wake(waker)) {
                return;
            }
            let overflow = if waiters.len() < WAITERS_MAX {
                Vec::new()
            } else {
                std::mem::take(&mut *waiters)
            };
            waiters.push(waker.clone());
            overflow
        };
        overflow.into_iter().for_each(Waker::wake);
    }

    /// Whether it was woken since the last [`Relay::reset`].
    pub(crate) fn fired(&self) -> bool {
        self.fired.load(Ordering::Acquire)
    }

    /// Makes ready for a new registration; tasks that still wait stay noted.
    pub(crate) fn reset(&self) {
        self.fired.store(false, Ordering::Release);
    }

    /// Sets the flag and wakes the tasks noted so far.
    pub(crate) fn fire(&self) {
        self.fired.store(true, Ordering::Release);
        let waiters = std::mem::take(&mut *self.waiters());
        waiters.into_iter().for_each(Waker::wake);
    }

    fn waiters(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.fire();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.fire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counter() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        (count.clone(), Waker::from(count))
    }

    #[test]
    fn the_same_task_is_noted_once_and_woken_once() {
        let relay = Relay::new();
        let (count, waker) = counter();
        for _ in 0..1000 {
            relay.register(&waker);
        }
        assert_eq!(relay.waiters().len(), 1);
        Waker::from(relay.clone()).wake();
        assert!(relay.fired());
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(relay.waiters().len(), 0);
    }

    #[test]
    fn more_waiters_than_the_bound_are_woken_not_lost() {
        let relay = Relay::new();
        let all: Vec<_> = (0..WAITERS_MAX * 2 + 1).map(|_| counter()).collect();
        for (_, waker) in &all {
            relay.register(waker);
        }
        assert!(relay.waiters().len() <= WAITERS_MAX);
        relay.fire();
        assert!(
            all.iter()
                .all(|(count, _)| count.0.load(Ordering::Relaxed) == 1)
        );
    }
}
