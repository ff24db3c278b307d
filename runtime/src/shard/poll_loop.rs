//! The poll loop of a shard: turns the completion hub, and parks when there is nothing to do.
//!
//! ```text
//!   turn ── worked? ──yes──► breathe, turn again
//!     │no
//!     ├─ Spin, or Adaptive with posts in flight and a fresh completion? ─► breathe, turn again
//!     ▼
//!   arm every source ─► turn once more ── worked? ─► turn again
//!     │no
//!     ▼
//!   park: until a descriptor fires, a task rings the hub, or the next deadline
//! ```
//!
//! To *breathe* is to let the other tasks of the shard run; every [`SPIN_WITHOUT_IO_MAX`] the
//! whole task queue yields, so that glommio looks at its I/O, too. Waits on descriptors are
//! small tasks of their own (`watch`): each registers one poll with io_uring, which outlives
//! any number of parks, and rings the hub when it fires. So a park costs no system call of its
//! own, no descriptor is ever watched twice, and no waker piles up in glommio's poll sources
//! (which keep every waker they are given until they fire).

use crate::completion::{Arming, Hub};
use crate::shard::{Shard, Task};
use crate::time::Nanos;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// How a shard looks for completions when none is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollPolicy {
    /// Parks at once; a descriptor wakes it. Least CPU, some 13 µs to a woken future.
    Armed,
    /// Polls on for [`SPIN_AFTER_COMPLETION`] after a completion while posts are in flight, then
    /// parks.
    #[default]
    Adaptive,
    /// Never parks. For shards that have a core of their own and nothing else to do.
    Spin,
}

/// How long `Adaptive` polls after the last completion: about twice what a parked shard needs
/// to wake up, so that it never spins longer than twice what a park would have cost.
pub const SPIN_AFTER_COMPLETION: Duration = Duration::from_micros(50);

/// How long a loop that does not park keeps the executor from its I/O: a sixth of the time a
/// small request takes, against a reactor look of about 1 µs.
pub const SPIN_WITHOUT_IO_MAX: Duration = Duration::from_micros(20);

impl Hub {
    /// Turns this hub on `shard` until [`Hub::stop`]. One loop per hub; the shard's other tasks
    /// run between the turns.
    pub async fn run(self, shard: Shard, policy: PollPolicy) {
        let mut watches: Vec<Option<Watch>> = Vec::new();
        let mut completed_at = Nanos(0);
        let mut io_at = shard.now();
        while !self.stopped() {
            let now = shard.now();
            let turn = self.turn(now);
            if turn.completions > 0 {
                completed_at = now;
            }
            let fresh = now.since(completed_at) < SPIN_AFTER_COMPLETION;
            let spins = match policy {
                PollPolicy::Armed => false,
                PollPolicy::Adaptive => fresh && self.in_flight(),
                PollPolicy::Spin => true,
            };
            if turn.worked() || spins {
                breathe(now, &mut io_at).await;
                continue;
            }
            let must_poll = self.arm(&shard, &mut watches);
            let now = shard.now();
            let turn = self.turn(now);
            if turn.completions > 0 {
                completed_at = now;
            }
            if turn.worked() {
                breathe(now, &mut io_at).await;
                continue;
            }
            Park::new(&self, self.turn_again_at(now, must_poll)).await;
            io_at = shard.now();
        }
    }

    /// Arms every source and watches its descriptor; whether one has to be polled instead.
    fn arm(&self, shard: &Shard, watches: &mut Vec<Option<Watch>>) -> bool {
        let mut must_poll = false;
        let mut place = 0;
        while let Some(arming) = self.arm_source(place) {
            if place == watches.len() {
                watches.push(None);
            }
            match arming {
                Arming::Descriptor { descriptor, serial } => {
                    let name = (descriptor, serial);
                    let watch = match &mut watches[place] {
                        Some(watch) if watch.name == name => watch,
                        other => other.insert(Watch::start(self, shard, name)),
                    };
                    must_poll |= !watch.arm();
                }
                Arming::Idle => {}
                Arming::Gone => watches[place] = None,
                Arming::MustPoll => must_poll = true,
            }
            place += 1;
        }
        must_poll
    }
}

/// Lets the shard's other tasks run, and now and then its I/O.
async fn breathe(now: Nanos, io_at: &mut Nanos) {
    let executor = glommio::executor();
    if now.since(*io_at) >= SPIN_WITHOUT_IO_MAX {
        *io_at = now;
        executor.yield_task_queue_now().await;
    } else {
        executor.yield_now().await;
    }
}

/// One wait of the poll loop. Ready at the second poll, whatever caused it: a needless turn is
/// harmless, a missed one is not.
struct Park<'a> {
    hub: &'a Hub,
    until: Option<Nanos>,
    timer: Option<glommio::timer::Timer>,
    parked: bool,
}

impl<'a> Park<'a> {
    fn new(hub: &'a Hub, until: Option<Nanos>) -> Self {
        Park {
            hub,
            until,
            timer: None,
            parked: false,
        }
    }
}

impl Future for Park<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<()> {
        if self.parked || self.hub.take_ring() {
            return Poll::Ready(());
        }
        if let Some(until) = self.until {
            // Polled exactly once: each poll of a glommio timer registers another one.
            let mut timer = glommio::timer::Timer::new(until.since(self.hub.now()));
            if Pin::new(&mut timer).poll(cx).is_ready() {
                return Poll::Ready(());
            }
            self.timer = Some(timer);
        }
        self.hub.park(cx.waker().clone(), self.until);
        self.parked = true;
        Poll::Pending
    }
}

impl Drop for Park<'_> {
    fn drop(&mut self) {
        self.hub.unpark();
    }
}

/// The watch on one source's descriptor: a task with at most one poll in io_uring.
struct Watch {
    /// The descriptor, and the registration of the source that gave it.
    name: (RawFd, u64),
    state: Rc<WatchState>,
    /// Dropped with the watch, which takes the poll out of io_uring.
    _task: Task<()>,
}

#[derive(Default)]
struct WatchState {
    armed: Cell<bool>,
    broken: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Watch {
    fn start(hub: &Hub, shard: &Shard, name: (RawFd, u64)) -> Self {
        let state = Rc::new(WatchState::default());
        let task = shard.spawn(watch(hub.clone(), name.0, state.clone()));
        Watch {
            name,
            state,
            _task: task,
        }
    }

    /// Sees to it that the next readiness rings the hub; `false` if the descriptor cannot be
    /// watched, so that its source must be polled.
    fn arm(&self) -> bool {
        if !self.state.armed.replace(true) {
            let waiting = self.state.waker.take();
            if let Some(waker) = waiting {
                waker.wake();
            }
        }
        !self.state.broken.get()
    }
}

/// A descriptor of a source, which keeps it open as long as it is registered.
struct Borrowed(RawFd);

impl AsRawFd for Borrowed {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

async fn watch(hub: Hub, descriptor: RawFd, state: Rc<WatchState>) {
    let Ok(pollable) = glommio::io::PollableFd::new(Borrowed(descriptor)) else {
        state.broken.set(true);
        hub.ring();
        return;
    };
    loop {
        poll_fn(|cx| {
            if state.armed.get() {
                return Poll::Ready(());
            }
            let replaced = state.waker.replace(Some(cx.waker().clone()));
            drop(replaced);
            Poll::Pending
        })
        .await;
        let readiness = pollable.readable().await;
        state.armed.set(false);
        state.broken.set(readiness.is_err());
        hub.ring();
        if readiness.is_err() {
            return;
        }
    }
}
