//! A bounded pool of plain threads for work that a client's request shapes: tokenising,
//! templates, grammars. It never runs on a shard and never queues beyond its bound.
//!
//! A panic in a job is its caller's error, not the process's end: client-shaped work meets
//! client-shaped inputs. That holds where unwinding is compiled in; release builds abort on
//! any panic (`panic = "abort"`).

#![allow(
    clippy::disallowed_types,
    reason = "the one place where threads meet: bounded, and every wait above it has a deadline"
)]

use crate::bridge::lock;
use crate::shard::{Notice, Seat, Shard, panic_message, thread_name};
use crate::time::Deadline;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The pool; clones are the same pool. Its threads end when the last clone is gone and the
/// queue is empty.
#[derive(Clone)]
pub struct SidePool {
    jobs: flume::Sender<Job>,
    queue_max: usize,
}

type Job = Box<dyn FnOnce() + Send>;

/// Why a job gave no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SidePoolError {
    /// The queue is at its bound: the process is overloaded, answer so.
    Full {
        /// Jobs waiting.
        queued: usize,
        /// The bound.
        max: usize,
    },
    /// The deadline passed. A job that had not begun will not; one that runs runs to its end
    /// for nobody.
    Deadline,
    /// The job panicked; the thread lives on.
    Panicked {
        /// The panic's text.
        message: String,
    },
    /// The pool's threads are gone.
    Closed,
}

impl std::fmt::Display for SidePoolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SidePoolError::Full { queued, max } => {
                write!(
                    f,
                    "the side pool has {queued} jobs waiting of at most {max}"
                )
            }
            SidePoolError::Deadline => f.write_str("the side pool's job missed its deadline"),
            SidePoolError::Panicked { message } => {
                write!(f, "the side pool's job panicked: {message}")
            }
            SidePoolError::Closed => f.write_str("the side pool's threads are gone"),
        }
    }
}

impl std::error::Error for SidePoolError {}

/// Where a job leaves its result.
struct Outcome<T> {
    result: Mutex<Option<Result<T, SidePoolError>>>,
    /// The caller is gone: do not begin.
    abandoned: AtomicBool,
    notice: Arc<Notice>,
}

/// Rings the caller however its job ends, also when the job is dropped without having run
/// (which says that the pool is gone).
struct RingAtEnd<T>(Arc<Outcome<T>>);

impl<T> Drop for RingAtEnd<T> {
    fn drop(&mut self) {
        lock(&self.0.result).get_or_insert(Err(SidePoolError::Closed));
        self.0.notice.ring();
    }
}

struct AbandonAtEnd<T>(Arc<Outcome<T>>);

impl<T> Drop for AbandonAtEnd<T> {
    fn drop(&mut self) {
        self.0.abandoned.store(true, Ordering::Relaxed);
    }
}

impl SidePool {
    /// Starts `threads` threads (at least 1) with room for `queue_max` waiting jobs (at least
    /// 1): the wait of the last one is at most `queue_max / threads` jobs long.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn new(threads: usize, queue_max: usize) -> io::Result<Self> {
        let queue_max = queue_max.max(1);
        let (jobs, work) = flume::bounded::<Job>(queue_max);
        for index in 0..threads.max(1) {
            let work = work.clone();
            std::thread::Builder::new()
                .name(thread_name(&format!("side{index}")))
                .spawn(move || {
                    while let Ok(job) = work.recv() {
                        job();
                    }
                })?;
        }
        Ok(SidePool { jobs, queue_max })
    }

    /// Runs `work` on one of the pool's threads and waits for it on a shard, at most to
    /// `deadline`. Dropped before the work has begun, it never begins.
    ///
    /// # Errors
    /// See [`SidePoolError`]; `Full` comes at once.
    ///
    /// # Panics
    /// Outside a shard.
    pub async fn run<T: Send + 'static>(
        &self,
        deadline: Deadline,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, SidePoolError> {
        let shard = Shard::current().expect("the side pool is used from a shard");
        let mut seat = Seat::on(&shard);
        let outcome = Arc::new(Outcome {
            result: Mutex::new(None),
            abandoned: AtomicBool::new(false),
            notice: seat.notice().clone(),
        });
        let _abandon = AbandonAtEnd(outcome.clone());
        self.enqueue(job_for(outcome.clone(), work))?;
        let wait = async {
            loop {
                if let Some(result) = lock(&outcome.result).take() {
                    return result;
                }
                seat.rung().await;
            }
        };
        match shard.until(deadline, wait).await {
            Ok(result) => result,
            Err(_passed) => Err(SidePoolError::Deadline),
        }
    }

    /// Jobs waiting now.
    pub fn queued(&self) -> usize {
        self.jobs.len()
    }

    fn enqueue(&self, job: Job) -> Result<(), SidePoolError> {
        match self.jobs.try_send(job) {
            Ok(()) => Ok(()),
            Err(flume::TrySendError::Full(_)) => Err(SidePoolError::Full {
                queued: self.jobs.len(),
                max: self.queue_max,
            }),
            Err(flume::TrySendError::Disconnected(_)) => Err(SidePoolError::Closed),
        }
    }
}

fn job_for<T: Send + 'static>(
    outcome: Arc<Outcome<T>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Job {
    let outcome = RingAtEnd(outcome);
    Box::new(move || {
        if outcome.0.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let result = catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
            let message = panic_message(payload.as_ref()).to_owned();
            SidePoolError::Panicked { message }
        });
        *lock(&outcome.0.result) = Some(result);
    })
}
