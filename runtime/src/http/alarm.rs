//! One timer a connection, whatever its limits: it is armed for the earliest time that was
//! asked for and looks again when it rings. A limit that moves later (the usual case: the next
//! request of a kept connection) costs nothing.

use crate::net::Relay;
use crate::shard::Shard;
use crate::time::{Deadline, Nanos};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

pub(crate) struct Alarm {
    shard: Shard,
    relay: Arc<Relay>,
    relay_waker: Waker,
    armed: Option<Armed>,
}

struct Armed {
    at: Nanos,
    /// Held so that the timer stays; it is polled once, when it is armed.
    _sleep: Pin<Box<dyn Future<Output = ()>>>,
}

impl Alarm {
    pub(crate) fn new(shard: Shard) -> Self {
        let relay = Relay::new();
        Alarm {
            shard,
            relay_waker: Waker::from(relay.clone()),
            relay,
            armed: None,
        }
    }

    /// Ready once `at` has passed. May be asked with another time at each poll.
    pub(crate) fn poll_until(&mut self, cx: &mut Context<'_>, at: Nanos) -> Poll<()> {
        loop {
            let now = self.shard.now();
            if now >= at {
                return Poll::Ready(());
            }
            self.relay.register(cx.waker());
            match &self.armed {
                Some(armed) if armed.at <= at && !self.relay.fired() => return Poll::Pending,
                Some(_) | None => self.arm(now, at),
            }
        }
    }

    fn arm(&mut self, now: Nanos, at: Nanos) {
        self.armed = None;
        self.relay.reset();
        let shard = self.shard.clone();
        let span = at.since(now);
        let mut sleep: Pin<Box<dyn Future<Output = ()>>> =
            Box::pin(async move { shard.sleep(span).await });
        match sleep
            .as_mut()
            .poll(&mut Context::from_waker(&self.relay_waker))
        {
            Poll::Pending => self.armed = Some(Armed { at, _sleep: sleep }),
            Poll::Ready(()) => {}
        }
    }
}

/// Runs `future` until `deadline`; `None` when the deadline came first (the future is dropped).
pub(crate) async fn until<T>(
    shard: &Shard,
    deadline: Deadline,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = pin!(future);
    let mut alarm = Alarm::new(shard.clone());
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => alarm.poll_until(cx, deadline.at()).map(|()| None),
    })
    .await
}
