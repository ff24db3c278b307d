//! The handle that code on a shard works with.

use super::bell::Desk;
use super::guard::abort_on_unwind;
use super::pulse::{ShardPulse, ShardRemote};
use super::timers::{SleepUntil, Timers};
use crate::time::{Deadline, Nanos};
use crate::trace::TraceRing;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

thread_local! {
    static CURRENT: RefCell<Option<Shard>> = const { RefCell::new(None) };
}

/// Handle to the shard the caller runs on. Cheap to clone, never leaves its thread.
#[derive(Clone)]
pub struct Shard {
    inner: Rc<ShardInner>,
}

struct ShardInner {
    remote: ShardRemote,
    index: usize,
    desk: Desk,
    timers: Timers,
    trace: Arc<TraceRing>,
}

/// A task of this shard; dropping it cancels the task.
#[must_use = "dropping a task cancels it: keep it, await it, or detach it"]
pub struct Task<T>(glommio::Task<T>);

impl<T: 'static> Task<T> {
    /// Lets the task run on without a handle.
    pub fn detach(self) {
        drop(self.0.detach());
    }

    /// Cancels the task and waits until its future has been dropped; gives its result if it
    /// had ended before.
    pub async fn cancel(self) -> Option<T> {
        self.0.cancel().await
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<T> {
        std::pin::Pin::new(&mut self.0).poll(cx)
    }
}

/// A wait reached its deadline before its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadlinePassed;

impl std::fmt::Display for DeadlinePassed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the deadline passed before the result was there")
    }
}

impl std::error::Error for DeadlinePassed {}

impl Shard {
    pub(crate) fn new(remote: ShardRemote, index: usize) -> Self {
        Shard {
            inner: Rc::new(ShardInner {
                trace: Arc::new(TraceRing::new(remote.name(), TraceRing::EVENTS_DEFAULT)),
                remote,
                index,
                desk: Desk::default(),
                timers: Timers::default(),
            }),
        }
    }

    /// The shard that the calling thread runs, if it runs one.
    pub fn current() -> Option<Shard> {
        // A thread that is being torn down runs no shard any more.
        CURRENT
            .try_with(|current| current.borrow().clone())
            .unwrap_or(None)
    }

    pub(crate) fn set_current(shard: Option<Shard>) {
        let old = CURRENT.with(|current| current.replace(shard));
        drop(old);
    }

    /// The shard's name.
    pub fn name(&self) -> &str {
        self.inner.remote.name()
    }

    /// The shard's place in the list it was launched from; 0 when launched alone.
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// The monotonic clock.
    pub fn now(&self) -> Nanos {
        Nanos::now()
    }

    /// The shard's signs of life; whatever loops on the shard counts its turns here.
    pub fn pulse(&self) -> &ShardPulse {
        self.inner.remote.pulse()
    }

    /// The handle that other threads may hold.
    pub fn remote(&self) -> &ShardRemote {
        &self.inner.remote
    }

    /// The shard's trace ring.
    pub fn trace(&self) -> &Arc<TraceRing> {
        &self.inner.trace
    }

    pub(crate) fn desk(&self) -> &Desk {
        &self.inner.desk
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.inner.timers
    }

    /// Starts a task on this shard; dropping the handle cancels it. A panic in it ends the
    /// process with its message.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        Task(glommio::spawn_local(guarded(self.clone(), future)))
    }

    /// Waits for `span`.
    pub async fn sleep(&self, span: Duration) {
        self.sleep_until(Nanos::now().after(span)).await;
    }

    /// Waits for a point in time.
    pub async fn sleep_until(&self, at: Nanos) {
        SleepUntil::new(self.clone(), at).await;
    }

    /// Waits for `future`, at most to `deadline`; then the future is dropped.
    ///
    /// # Errors
    /// [`DeadlinePassed`]. A result that is there at the deadline wins.
    pub async fn until<T>(
        &self,
        deadline: Deadline,
        future: impl Future<Output = T>,
    ) -> Result<T, DeadlinePassed> {
        let mut future = pin!(future);
        let mut limit = pin!(SleepUntil::new(self.clone(), deadline.at()));
        poll_fn(|cx| {
            if let Poll::Ready(value) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(value));
            }
            limit.as_mut().poll(cx).map(|()| Err(DeadlinePassed))
        })
        .await
    }

    /// Lets the shard's other runnable tasks run once. I/O is looked at when they
    /// all wait, or when the executor preempts (after 1 ms at the latest).
    pub async fn yield_now(&self) {
        glommio::executor().yield_now().await;
    }

    /// Lets other tasks run if the caller's millisecond is over; nearly free otherwise. For
    /// loops over work that is seldom long.
    pub async fn yield_if_needed(&self) {
        glommio::yield_if_needed().await;
    }
}

/// Polls `future` so that a panic in it ends the process before it unwinds into the executor.
pub(crate) async fn guarded<T>(shard: Shard, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    poll_fn(|cx| abort_on_unwind(shard.name(), || future.as_mut().poll(cx))).await
}

#[doc(hidden)]
impl Shard {
    /// **Not for use**: a task in a latency class of `latency`, which lowers the executor's
    /// preempt timer and makes it park with runnable tasks. It exists so that the regression
    /// test can reproduce that fault against the locked executor version.
    pub fn spawn_in_latency_class_for_reproduction<T: 'static>(
        &self,
        latency: Duration,
        future: impl Future<Output = T> + 'static,
    ) -> Task<T> {
        let queue = glommio::executor().create_task_queue(
            glommio::Shares::default(),
            glommio::Latency::Matters(latency),
            "reproduction",
        );
        match glommio::spawn_local_into(guarded(self.clone(), future), queue) {
            Ok(task) => Task(task),
            Err(error) => panic!("a task queue that was just made is gone: {error}"),
        }
    }
}
