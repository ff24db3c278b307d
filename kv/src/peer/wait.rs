//! Waiting on one shard: the first of two futures, a time limit, and a bell that is a slot.

use kvserve_runtime::completion::{Completer, Hub, OneshotCompletion};
use kvserve_runtime::{Deadline, EndReason, Nanos, Shard};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

/// What the first of two futures gave.
pub(super) enum Either<A, B> {
    Left(A),
    Right(B),
}

/// Runs two futures in one task until either is ready; the other is dropped.
pub(super) async fn race<A, B>(
    left: impl Future<Output = A>,
    right: impl Future<Output = B>,
) -> Either<A, B> {
    let (mut left, mut right) = (pin!(left), pin!(right));
    poll_fn(|cx| {
        if let Poll::Ready(value) = left.as_mut().poll(cx) {
            return Poll::Ready(Either::Left(value));
        }
        match right.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Either::Right(value)),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Gives `future` at most `span`.
pub(super) async fn within<T>(
    shard: &Shard,
    span: Duration,
    future: impl Future<Output = T>,
) -> Option<T> {
    match race(future, shard.sleep(span)).await {
        Either::Left(value) => Some(value),
        Either::Right(()) => None,
    }
}

/// Wakes one waiting task. Each wait is a slot of the hub with a deadline (PROTOCOL P5). A ring
/// while nobody waits is kept, so no wake-up is lost.
pub(super) struct Bell {
    hub: Hub,
    label: &'static str,
    rung: Cell<bool>,
    waiter: RefCell<Option<Completer<()>>>,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Rung,
    Deadline,
    /// The slab is full: the caller must fall back to a plain timer.
    NoSlot,
}

impl Bell {
    pub(super) fn new(hub: &Hub, label: &'static str) -> Self {
        Bell {
            hub: hub.clone(),
            label,
            rung: Cell::new(false),
            waiter: RefCell::new(None),
        }
    }

    pub(super) fn ring(&self) {
        self.rung.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waiter) = waiter {
            // An ended wait has been told already; `rung` stays for the next one.
            let _told: Result<(), ()> = waiter.complete(());
        }
    }

    /// A wait that ends with the next ring, at once if one was kept, or at `until`.
    pub(super) fn wait(&self, until: Nanos) -> BellWait<'_> {
        let now = self.hub.now();
        let slot = if self.rung.get() {
            None
        } else {
            let deadline = Deadline::after(now, until.since(now));
            match self.hub.oneshot(self.label, deadline) {
                Ok((completer, wait)) => {
                    let replaced = self.waiter.borrow_mut().replace(completer);
                    drop(replaced);
                    Some(wait)
                }
                Err(_full) => None,
            }
        };
        BellWait { bell: self, slot }
    }
}

/// See [`Bell::wait`].
pub(super) struct BellWait<'a> {
    bell: &'a Bell,
    slot: Option<OneshotCompletion<()>>,
}

impl Future for BellWait<'_> {
    type Output = Woken;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Woken> {
        let rung = self.bell.rung.get();
        let ended = match &mut self.slot {
            None if rung => Woken::Rung,
            None => Woken::NoSlot,
            Some(slot) => match Pin::new(slot).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(EndReason::Deadline)) => Woken::Deadline,
                Poll::Ready(
                    Ok(())
                    | Err(
                        EndReason::Failed(_)
                        | EndReason::Cancelled
                        | EndReason::SessionEnded
                        | EndReason::CompleterDropped
                        | EndReason::ChannelKilled
                        | EndReason::ChannelStuck,
                    ),
                ) => Woken::Rung,
            },
        };
        match ended {
            Woken::Rung => self.bell.rung.set(false),
            Woken::Deadline | Woken::NoSlot => {}
        }
        Poll::Ready(ended)
    }
}
