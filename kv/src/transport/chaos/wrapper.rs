//! The wrapper that sits between a transport's `poll` and the slab.

use super::spec::{ChaosHandle, CompletionFault};
use crate::transport::sys::{Epoll, Interest, Timer};
use crate::transport::{Posted, Read, Transport, code};
use kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;
use kvserve_runtime::{
    ChannelId, Completed, CompletionSource, CompletionStatus, Nanos, Reap, WorkId,
};
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// The epoll's tokens; what is ready does not matter, only that something is.
const TIMER_TOKEN: u64 = 0;
const INNER_TOKEN: u64 = 1;

/// A completion that is held back.
struct Held {
    due: Nanos,
    completed: Completed,
}

/// A transport whose completions suffer what a [`ChaosHandle`] says.
///
/// Held completions are counted in `in_flight`, and `arm` gives a descriptor that also turns
/// readable when the earliest of them is due, so a parked shard wakes for it. Their number is
/// bounded by the posts that the slab lets be outstanding, twice (duplicates).
pub struct ChaosTransport<T: Transport> {
    inner: T,
    handle: ChaosHandle,
    /// In order of arrival; of one channel also in order of `due`.
    held: Vec<Held>,
    /// Fresh completions of the inner transport; kept for its memory.
    fresh: Vec<Completed>,
    /// Lost completions that no later one of their channel has made up for (PROTOCOL P3), so at
    /// most the posts that the slab still counts as outstanding.
    lost: Vec<WorkId>,
    /// Killed channels, and whether the proof of their quiet gets lost. At most one entry a
    /// channel.
    killed: Vec<(ChannelId, bool)>,
    epoll: Epoll,
    timer: Timer,
}

impl<T: Transport> ChaosTransport<T> {
    /// Wraps a transport.
    ///
    /// # Errors
    /// When the kernel gives no epoll or timer descriptor.
    pub fn new(inner: T, handle: ChaosHandle) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let timer = Timer::new()?;
        epoll.set(timer.as_raw_fd(), Interest::Read, TIMER_TOKEN)?;
        Ok(ChaosTransport {
            inner,
            handle,
            held: Vec::new(),
            fresh: Vec::new(),
            lost: Vec::new(),
            killed: Vec::new(),
            epoll,
            timer,
        })
    }

    /// The wrapped transport, for its own settings and counters.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// The wrapped transport, e.g. to add a channel. Do not poll, kill or reap it here.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// The handle it obeys.
    pub fn handle(&self) -> &ChaosHandle {
        &self.handle
    }

    /// Lets chaos strike one fresh completion and queues what is left of it.
    fn strike(&mut self, completed: Completed, now: Nanos) {
        let fault = match completed.status {
            CompletionStatus::Success => self.handle.on_completion(),
            // Never hidden, see the module's docs.
            CompletionStatus::Error(_) | CompletionStatus::Flushed(_) => None,
        };
        match fault {
            None => self.hold(completed, now),
            Some(CompletionFault::Lose) => self.lost.push(completed.work),
            Some(CompletionFault::Fail) => self.hold(
                Completed {
                    status: CompletionStatus::Error(code::CHAOS),
                    ..completed
                },
                now,
            ),
            Some(CompletionFault::Duplicate) => {
                self.hold(completed, now);
                self.hold(completed, now);
            }
            Some(CompletionFault::Late(delay)) => self.hold(completed, now.after(delay)),
        }
    }

    /// Queues a completion for `due`, or for when the one before it on its channel is due.
    fn hold(&mut self, completed: Completed, due: Nanos) {
        let channel = completed.work.channel();
        let before = self.held.iter().rev();
        let due = before
            .filter(|held| held.completed.work.channel() == channel)
            .map(|held| held.due)
            .next()
            .map_or(due, |before| before.max(due));
        self.held.push(Held { due, completed });
    }
}

impl<T: Transport> Transport for ChaosTransport<T> {
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted> {
        // A post on a channel that was killed once means that it was opened anew.
        self.killed.retain(|(killed, _)| *killed != channel);
        self.inner.post(channel, first, reads)
    }

    fn abandon(&mut self, first: WorkId, count: usize) {
        Transport::abandon(&mut self.inner, first, count);
    }

    fn moved_at(&self, channel: ChannelId) -> Nanos {
        self.inner.moved_at(channel)
    }
}

impl<T: Transport> CompletionSource for ChaosTransport<T> {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        if self.held.is_empty() && self.lost.is_empty() && !self.handle.is_on() {
            return self.inner.poll(now, out);
        }
        let mut fresh = std::mem::take(&mut self.fresh);
        self.inner.poll(now, &mut fresh);
        for completed in fresh.drain(..) {
            self.strike(completed, now);
        }
        self.fresh = fresh;
        let mut given = 0;
        let lost = &mut self.lost;
        self.held.retain(|held| {
            let give = held.due <= now && given < COMPLETIONS_PER_POLL_MAX;
            if give {
                let told = held.completed.work;
                lost.retain(|lost| {
                    lost.channel() != told.channel() || lost.position() > told.position()
                });
                out.push(held.completed);
                given += 1;
            }
            !give
        });
        given
    }

    fn arm(&mut self) -> Option<RawFd> {
        let inner = self.inner.arm();
        let due = self.held.iter().map(|held| held.due).min();
        self.timer.set(due);
        // Another descriptor means another watch, so it changes only with the chaos itself.
        if due.is_none() && (!self.handle.is_on() || inner.is_none()) {
            return inner;
        }
        if let Some(fd) = inner
            && self.epoll.set(fd, Interest::Read, INNER_TOKEN).is_err()
        {
            // Out of kernel memory: be polled again at once rather than sleep on it.
            self.timer.set(Some(Nanos(0)));
        }
        Some(self.epoll.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn busy(&self) -> bool {
        self.inner.busy()
    }

    fn kill(&mut self, channel: ChannelId) {
        self.inner.kill(channel);
        self.held
            .retain(|held| held.completed.work.channel() != channel);
        self.lost.retain(|lost| lost.channel() != channel);
        if !self.killed.iter().any(|(killed, _)| *killed == channel) {
            self.killed.push((channel, self.handle.on_flush()));
        }
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        let reaped = self.inner.reap(channel);
        let place = self
            .killed
            .iter()
            .position(|(killed, _)| *killed == channel);
        match (reaped, place.map(|place| self.killed[place].1)) {
            // The proof is lost for good; a new channel of that number forgets it when it posts.
            (Reap::Draining(_) | Reap::Quiet | Reap::Stuck, Some(true)) => Reap::Stuck,
            (Reap::Quiet, Some(false)) => {
                self.killed.retain(|(killed, _)| *killed != channel);
                Reap::Quiet
            }
            (reaped, Some(false) | None) => reaped,
        }
    }

    fn moved(&self, channel: ChannelId) -> u64 {
        self.inner.moved(channel)
    }

    /// As the inner transport says, but never for a completion that chaos has lost or holds
    /// back: a transport that does not know of it could not promise anything either, and the
    /// ladder is to be seen at work.
    fn take_back(&mut self, work: WorkId) -> bool {
        let lost = self.lost.contains(&work);
        let held = self.held.iter().any(|held| held.completed.work == work);
        !lost && !held && self.inner.take_back(work)
    }
}
