//! Sleeping on a shard: all sleepers share one timer of the executor.
//!
//! The executor's own timers are dear (it walks all of them each turn, and each poll of a
//! pending one leaves a further entry behind), so a shard holds at most one of them, set to
//! its earliest sleeper. Sleepers sit in an ordered map; the timer task fires those that are
//! due. When the earliest leaves early the timer stays: it fires once for nothing.

use super::face::Shard;
use crate::time::Nanos;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Sleepers of a shard by (when, number).
#[derive(Default)]
pub(crate) struct Timers {
    sleepers: RefCell<BTreeMap<(Nanos, u64), Waker>>,
    numbers: Cell<u64>,
    /// When the executor's timer is set to.
    armed: Cell<Option<Nanos>>,
    task: RefCell<Option<Waker>>,
}

impl Timers {
    fn insert(&self, at: Nanos, waker: Waker) -> u64 {
        let number = self.numbers.get();
        self.numbers.set(number + 1);
        self.sleepers.borrow_mut().insert((at, number), waker);
        if self.armed.get().is_none_or(|armed| at < armed)
            && let Some(task) = self.task.borrow().as_ref()
        {
            task.wake_by_ref();
        }
        number
    }

    fn remove(&self, at: Nanos, number: u64) -> Option<Waker> {
        self.sleepers.borrow_mut().remove(&(at, number))
    }

    /// Takes one sleeper that is due.
    fn pop_due(&self, now: Nanos) -> Option<Waker> {
        let mut sleepers = self.sleepers.borrow_mut();
        let first = sleepers.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    fn earliest(&self) -> Option<Nanos> {
        self.sleepers
            .borrow()
            .first_key_value()
            .map(|((at, _), _)| *at)
    }
}

/// The timer task of a shard.
pub(crate) async fn keep_time(shard: Shard) {
    let mut timer: Option<glommio::timer::Timer> = None;
    poll_fn(|cx| {
        let timers = shard.timers();
        if timers.task.borrow().is_none() {
            *timers.task.borrow_mut() = Some(cx.waker().clone());
        }
        loop {
            let now = Nanos::now();
            while let Some(waker) = timers.pop_due(now) {
                waker.wake();
            }
            let Some(at) = timers.earliest() else {
                timer = None;
                timers.armed.set(None);
                return Poll::<()>::Pending;
            };
            if timer.is_some()
                && timers
                    .armed
                    .get()
                    .is_some_and(|armed| now < armed && armed <= at)
            {
                return Poll::Pending;
            }
            let mut fresh = glommio::timer::Timer::new(at.since(now));
            // Polled once only: each poll of a pending timer enters it again.
            match Pin::new(&mut fresh).poll(cx) {
                Poll::Ready(_) => continue,
                Poll::Pending => {
                    timer = Some(fresh);
                    timers.armed.set(Some(at));
                    return Poll::Pending;
                }
            }
        }
    })
    .await
}

/// A sleep to a point in time; dropping it takes the sleeper out.
pub(crate) struct SleepUntil {
    shard: Shard,
    at: Nanos,
    entered: Option<(u64, Waker)>,
}

impl SleepUntil {
    pub(crate) fn new(shard: Shard, at: Nanos) -> Self {
        SleepUntil {
            shard,
            at,
            entered: None,
        }
    }

    fn leave(&mut self) {
        if let Some((number, _)) = self.entered.take() {
            drop(self.shard.timers().remove(self.at, number));
        }
    }
}

impl Future for SleepUntil {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if Nanos::now() >= self.at {
            self.leave();
            return Poll::Ready(());
        }
        let waits = matches!(&self.entered, Some((_, waker)) if waker.will_wake(cx.waker()));
        if !waits {
            self.leave();
            let number = self.shard.timers().insert(self.at, cx.waker().clone());
            self.entered = Some((number, cx.waker().clone()));
        }
        Poll::Pending
    }
}

impl Drop for SleepUntil {
    fn drop(&mut self) {
        self.leave();
    }
}
