//! The lane's own thread.

#![allow(
    clippy::disallowed_types,
    reason = "the one place where threads meet: bounded, and every wait above it has a deadline"
)]

use super::pulse::LanePulse;
use crate::completion::{Completed, CompletionStatus, WorkId};
use crate::shard::{EventFd, abort_on_unwind};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How one lane is placed, named and bounded.
#[derive(Clone, Debug)]
pub struct LaneConfig {
    /// Thread name (its first 15 bytes), also the metric label.
    pub name: String,
    /// CPU to pin to; `None` leaves the thread where the kernel puts it. Shards and lanes may
    /// name the same CPU.
    pub core: Option<usize>,
    /// Jobs that the lane holds at most: waiting, running, and ended but not collected.
    pub jobs_max: usize,
    /// Added to the thread's niceness, 0 to 19, so that a shard on the same CPU wins it.
    pub nice: u8,
    /// The lane's signs of life; give a clone to the worker if its jobs are long.
    pub pulse: Arc<LanePulse>,
}

impl LaneConfig {
    /// A lane that is not pinned, holds four jobs (one runs, one waits to follow it without a
    /// gap, two are being collected) and is as nice as its parent.
    pub fn new(name: impl Into<String>) -> Self {
        LaneConfig {
            name: name.into(),
            core: None,
            jobs_max: 4,
            nice: 0,
            pulse: LanePulse::new(),
        }
    }
}

/// What a lane's worker returns: how its job's work is reported to the completion slab.
pub trait LaneOutcome {
    /// The status of the work's completion.
    fn status(self) -> CompletionStatus;
}

/// A worker that returns nothing always succeeds; the job carries whatever else it has to say.
impl LaneOutcome for () {
    fn status(self) -> CompletionStatus {
        CompletionStatus::Success
    }
}

impl LaneOutcome for CompletionStatus {
    fn status(self) -> CompletionStatus {
        self
    }
}

/// A job on its way to the thread.
pub(super) struct Queued<J> {
    pub work: WorkId,
    pub number: u64,
    pub job: J,
}

/// A job on its way back.
pub(super) struct Ended<J> {
    pub completed: Completed,
    pub job: J,
}

/// What the two sides share beside the queues.
pub(super) struct Shared {
    /// Jobs with smaller numbers do not start any more.
    pub killed_below: AtomicU64,
    /// The shard waits on `event` (or is about to): the next end signals it, once.
    pub armed: AtomicBool,
    pub event: EventFd,
    pub pulse: Arc<LanePulse>,
}

/// Starts the thread; gives its handle once it is placed.
pub(super) fn start<J, W, O>(
    config: &LaneConfig,
    jobs: flume::Receiver<Queued<J>>,
    ended: flume::Sender<Ended<J>>,
    shared: Arc<Shared>,
    worker: W,
) -> io::Result<std::thread::JoinHandle<()>>
where
    J: Send + 'static,
    W: FnMut(&mut J) -> O + Send + 'static,
    O: LaneOutcome,
{
    let (ready_tx, ready) = std::sync::mpsc::channel();
    let (name, core, nice) = (config.name.clone(), config.core, config.nice);
    let thread = std::thread::Builder::new()
        .name(crate::shard::thread_name(&config.name))
        .spawn(move || {
            let placed = place_this_thread(core, nice);
            let goes_on = placed.is_ok();
            let _launcher_gone = ready_tx.send(placed);
            if goes_on {
                abort_on_unwind(&format!("engine lane `{name}`"), || {
                    run(&jobs, &ended, &shared, worker);
                });
            }
        })?;
    let placed = ready
        .recv()
        .unwrap_or_else(|_| Err(io::Error::other("its thread ended at once")));
    placed.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "engine lane `{}`: cannot be placed on CPU {:?} at niceness +{}: {error}",
                config.name, config.core, config.nice
            ),
        )
    })?;
    Ok(thread)
}

fn run<J, W, O>(
    jobs: &flume::Receiver<Queued<J>>,
    ended: &flume::Sender<Ended<J>>,
    shared: &Shared,
    mut worker: W,
) where
    J: Send,
    W: FnMut(&mut J) -> O,
    O: LaneOutcome,
{
    // Ends when the lane's owner is gone. Waiting for a job is a lane's idle state.
    while let Ok(mut queued) = jobs.recv() {
        shared.pulse.advance();
        let killed = queued.number < shared.killed_below.load(Ordering::Acquire);
        let status = if killed {
            CompletionStatus::Error(libc::ECANCELED as u32)
        } else {
            worker(&mut queued.job).status()
        };
        let end = Ended {
            completed: Completed {
                work: queued.work,
                status,
            },
            job: queued.job,
        };
        // It has room for every job the lane may hold; it fails only if the owner is gone.
        let owner_gone = ended.try_send(end).is_err();
        shared.pulse.job_gone();
        if owner_gone {
            return;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        if shared.armed.load(Ordering::Relaxed) && shared.armed.swap(false, Ordering::AcqRel) {
            shared.event.signal();
        }
    }
}

fn place_this_thread(core: Option<usize>, nice: u8) -> io::Result<()> {
    if let Some(core) = core {
        pin_this_thread(core)?;
    }
    if nice > 0 {
        // SAFETY: no pointers; `who` 0 is the calling thread on Linux.
        let code = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice.min(19).into()) };
        if code != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Pins the calling thread to one CPU.
///
/// # Errors
/// When the CPU does not exist or this process may not use it.
fn pin_this_thread(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("CPU numbers end at {}", libc::CPU_SETSIZE - 1),
        ));
    }
    // SAFETY: all-zero is the empty set; `core` is below its size (checked above); the kernel
    // reads the set during the call only; 0 is the calling thread.
    let code = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
