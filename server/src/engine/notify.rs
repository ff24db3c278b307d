//! A wake-up between two tasks of one shard.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// One waiter, any number of notifications; those between two waits count as one.
#[derive(Default)]
pub struct Notify {
    set: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Notify {
    /// Wakes the waiter, now or when it next waits.
    pub fn notify(&self) {
        self.set.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Waits for a notification since the last wait. The caller bounds the wait.
    pub async fn notified(&self) {
        poll_fn(|cx| {
            if self.set.replace(false) {
                return Poll::Ready(());
            }
            *self.waiter.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
