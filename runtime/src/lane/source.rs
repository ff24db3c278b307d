//! The shard's side of a lane: a completion source.

#![allow(
    clippy::disallowed_types,
    reason = "the one place where threads meet: bounded, and every wait above it has a deadline"
)]

use super::pulse::LanePulse;
use super::thread::{Ended, LaneConfig, LaneOutcome, Queued, Shared, start};
use crate::completion::{ChannelId, Completed, WorkId};
use crate::shard::EventFd;
use crate::source::{COMPLETIONS_PER_POLL_MAX, CompletionSource, Reap};
use crate::time::Nanos;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// An engine lane, as its shard holds it. Dropping it lets the running job end and starts none
/// of those that wait; it does not wait for the thread.
pub struct Lane<J: Send> {
    name: String,
    jobs: flume::Sender<Queued<J>>,
    ended: flume::Receiver<Ended<J>>,
    /// Ended jobs whose completion was handed out, waiting for `collect`.
    finished: VecDeque<J>,
    /// Works not completed yet, in order.
    posted: VecDeque<WorkId>,
    numbers: u64,
    /// The channel whose jobs do not start any more, of those still posted.
    killed: Option<ChannelId>,
    jobs_max: usize,
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Why a lane did not take a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneRefusal {
    /// It holds as many jobs as it may: wait for a completion, and collect ended jobs.
    Full {
        /// Jobs waiting, running or not collected.
        held: usize,
        /// [`LaneConfig::jobs_max`].
        max: usize,
    },
    /// The work's channel was killed.
    Killed,
    /// The lane's thread is gone.
    Gone,
}

impl std::fmt::Display for LaneRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LaneRefusal::Full { held, max } => {
                write!(f, "the engine lane holds {held} jobs of at most {max}")
            }
            LaneRefusal::Killed => f.write_str("the engine lane's channel was killed"),
            LaneRefusal::Gone => f.write_str("the engine lane's thread is gone"),
        }
    }
}

impl std::error::Error for LaneRefusal {}

impl<J: Send + 'static> Lane<J> {
    /// Starts the lane's thread. `worker` is called with each job in turn, on that thread; a
    /// panic in it ends the process.
    ///
    /// # Errors
    /// When the thread cannot be made or placed, or descriptors have run out.
    pub fn spawn<W, O>(config: LaneConfig, worker: W) -> io::Result<Self>
    where
        W: FnMut(&mut J) -> O + Send + 'static,
        O: LaneOutcome,
    {
        let jobs_max = config.jobs_max.max(1);
        let (jobs, jobs_out) = flume::bounded(jobs_max);
        let (ended_in, ended) = flume::bounded(jobs_max);
        let shared = Arc::new(Shared {
            killed_below: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            event: EventFd::new()?,
            pulse: config.pulse.clone(),
        });
        let thread = start(&config, jobs_out, ended_in, shared.clone(), worker)?;
        Ok(Lane {
            name: config.name,
            jobs,
            ended,
            finished: VecDeque::with_capacity(jobs_max),
            posted: VecDeque::with_capacity(jobs_max),
            numbers: 0,
            killed: None,
            jobs_max,
            shared,
            thread: Some(thread),
        })
    }

    /// The lane's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lane's signs of life, for the sentinel.
    pub fn pulse(&self) -> &Arc<LanePulse> {
        &self.shared.pulse
    }

    /// Hands the lane a job, whose end is reported as `work`. Works of one channel are
    /// submitted in the order of their positions.
    ///
    /// # Errors
    /// The job comes back with the reason.
    pub fn submit(&mut self, work: WorkId, job: J) -> Result<(), (J, LaneRefusal)> {
        if self.killed == Some(work.channel()) {
            return Err((job, LaneRefusal::Killed));
        }
        let held = self.posted.len() + self.finished.len();
        if held >= self.jobs_max {
            let max = self.jobs_max;
            return Err((job, LaneRefusal::Full { held, max }));
        }
        let number = self.numbers;
        let queued = Queued { work, number, job };
        self.shared.pulse.job_submitted();
        match self.jobs.try_send(queued) {
            Ok(()) => {
                self.numbers += 1;
                self.posted.push_back(work);
                Ok(())
            }
            Err(flume::TrySendError::Full(queued) | flume::TrySendError::Disconnected(queued)) => {
                // There is room for `jobs_max` jobs, so only a gone thread refuses one.
                self.shared.pulse.job_gone();
                Err((queued.job, LaneRefusal::Gone))
            }
        }
    }

    /// Takes back the oldest ended job whose completion `poll` has handed out.
    pub fn collect(&mut self) -> Option<J> {
        self.finished.pop_front()
    }

    /// Ends the lane and gives its thread, to be joined off the shard. The running job ends
    /// first; those that wait are dropped.
    pub fn shut_down(mut self) -> std::thread::JoinHandle<()> {
        self.thread.take().expect("taken here only")
    }
}

impl<J: Send> Drop for Lane<J> {
    fn drop(&mut self) {
        // What waits is not started; the thread sees the closed queue and ends by itself.
        self.shared.killed_below.store(u64::MAX, Ordering::Release);
    }
}

impl<J: Send> CompletionSource for Lane<J> {
    fn poll(&mut self, _now: Nanos, out: &mut Vec<Completed>) -> usize {
        let mut count = 0;
        while count < COMPLETIONS_PER_POLL_MAX {
            let Ok(end) = self.ended.try_recv() else {
                break;
            };
            let expected = self.posted.pop_front();
            debug_assert_eq!(expected, Some(end.completed.work), "a lane works in order");
            self.finished.push_back(end.job);
            out.push(end.completed);
            count += 1;
        }
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        if self.posted.is_empty() {
            return None;
        }
        self.shared.event.drain();
        self.shared.armed.store(true, Ordering::Relaxed);
        // Pairs with the lane's fence: either it sees `armed`, or the poll after this sees its
        // end.
        fence(Ordering::SeqCst);
        Some(self.shared.event.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.posted.len()
    }

    fn kill(&mut self, channel: ChannelId) {
        if self.posted.iter().any(|work| work.channel() == channel) {
            self.shared
                .killed_below
                .store(self.numbers, Ordering::Release);
        }
        self.killed = Some(channel);
    }

    /// The running job's own progress: a long step that moves is not a lane that stands still.
    fn moved(&self, _channel: ChannelId) -> u64 {
        self.shared.pulse.progress()
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        let posted = self
            .posted
            .iter()
            .filter(|work| work.channel() == channel)
            .count();
        match posted {
            0 => Reap::Quiet,
            some => Reap::Draining(some),
        }
    }
}
