//! A lane's signs of life.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Written by the lane and by its jobs, read by the sentinel: has it work, does it move?
#[derive(Debug, Default)]
pub struct LanePulse {
    jobs: AtomicU64,
    progress: AtomicU64,
}

impl LanePulse {
    /// A pulse for a lane to be made.
    pub fn new() -> Arc<Self> {
        Arc::new(LanePulse::default())
    }

    /// Says that the running job moves. Jobs that may take longer than the sentinel allows a
    /// lane to stand still (1 s) call it between their parts, e.g. once per layer.
    pub fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Jobs waiting or running.
    pub fn jobs(&self) -> u64 {
        self.jobs.load(Ordering::Acquire)
    }

    /// Grows with each job begun or ended and with each [`LanePulse::advance`].
    pub fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    pub(super) fn job_submitted(&self) {
        self.jobs.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn job_gone(&self) {
        self.advance();
        self.jobs.fetch_sub(1, Ordering::AcqRel);
    }
}
