//! Work shaped by the client (JSON, templates, tokenising) leaves the shard through here.

use super::clock::LocalFuture;
use super::error::ApiError;
use kvserve_runtime::Deadline;
use kvserve_runtime::side_pool::{SidePool, SidePoolError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Bodies up to this size are handled on the shard: parsing, a template and some 130 tokens
/// take about 0.1 ms, which two hops between threads do not repay.
pub const INLINE_BODY_BYTES_MAX: usize = 512;

/// One piece of work.
pub type Job = Box<dyn FnOnce() + Send>;

/// Why a job was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadError {
    /// The pool's queue is full.
    Full {
        /// The bound.
        queued_max: usize,
    },
    /// The deadline passed before the job had ended.
    Deadline,
    /// The job panicked, or the pool is gone.
    Lost,
}

/// A bounded pool of side threads.
pub trait Offload {
    /// Runs `job` on a side thread; ends when it has ended, or at the deadline.
    fn run(&self, deadline: Deadline, job: Job) -> LocalFuture<'_, Result<(), OffloadError>>;
}

impl Offload for SidePool {
    fn run(&self, deadline: Deadline, job: Job) -> LocalFuture<'_, Result<(), OffloadError>> {
        Box::pin(async move {
            SidePool::run(self, deadline, job)
                .await
                .map_err(|error| match error {
                    SidePoolError::Full { max, .. } => OffloadError::Full { queued_max: max },
                    SidePoolError::Deadline => OffloadError::Deadline,
                    SidePoolError::Panicked { .. } | SidePoolError::Closed => OffloadError::Lost,
                })
        })
    }
}

/// Runs every job at once on the caller's thread: for tests and tools, not for a server.
pub struct Inline;

impl Offload for Inline {
    fn run(&self, _: Deadline, job: Job) -> LocalFuture<'_, Result<(), OffloadError>> {
        job();
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Runs `work` on the pool, or here when `bytes` of input are few.
///
/// # Errors
/// 503 when the pool is full, 504 at the deadline, 500 when the thread is gone.
pub async fn offload<T: Send + 'static>(
    pool: &dyn Offload,
    deadline: Deadline,
    timeout: Duration,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= INLINE_BODY_BYTES_MAX {
        return Ok(work());
    }
    let result = Arc::new(Mutex::new(None));
    let slot = result.clone();
    let ended = pool
        .run(
            deadline,
            Box::new(move || {
                let value = work();
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
            }),
        )
        .await;
    match ended {
        Ok(()) => {}
        Err(OffloadError::Full { queued_max }) => return Err(ApiError::side_pool_full(queued_max)),
        Err(OffloadError::Deadline) => return Err(ApiError::deadline("tokenize", timeout)),
        Err(OffloadError::Lost) => return Err(lost()),
    }
    let value = result.lock().unwrap_or_else(PoisonError::into_inner).take();
    value.ok_or_else(lost)
}

fn lost() -> ApiError {
    ApiError::server("-", "a side thread ended before its work was done")
}
