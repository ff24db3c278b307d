//! What every shard must know to admit or refuse a request, as atomics.

use crate::engine::{GenerateRequest, Refusal};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Shared by all shards of a process; written by the engine's shard and the signal handler.
#[derive(Debug)]
pub struct Readiness {
    active: AtomicUsize,
    active_max: usize,
    tokens_max: AtomicUsize,
    draining: AtomicBool,
    /// Written seldom, read by `/ready` and refusals only.
    missing: Mutex<Option<String>>,
}

impl Readiness {
    /// A process that admits `active_max` requests at once (queued and running).
    pub fn new(active_max: usize, tokens_max: usize) -> Self {
        Readiness {
            active: AtomicUsize::new(0),
            active_max,
            tokens_max: AtomicUsize::new(tokens_max),
            draining: AtomicBool::new(false),
            missing: Mutex::new(Some("the node is starting".into())),
        }
    }

    /// Checks a request before anything is reserved for it. What [`Readiness::missing`] names
    /// does not refuse it: a decode node without prefill nodes computes prompts itself.
    ///
    /// # Errors
    /// The [`Refusal`] to answer with.
    pub fn admit(&self, request: &GenerateRequest) -> Result<(), Refusal> {
        if self.draining.load(Relaxed) {
            return Err(Refusal::Draining);
        }
        let tokens = request.prompt.len() + request.max_tokens as usize;
        let tokens_max = self.tokens_max.load(Relaxed);
        if tokens > tokens_max {
            return Err(Refusal::TooLarge { tokens, tokens_max });
        }
        let queued = self.active.load(Relaxed);
        if queued >= self.active_max {
            return Err(Refusal::Overloaded {
                queued,
                queued_max: self.active_max,
                retry_after: Duration::from_secs(1),
            });
        }
        Ok(())
    }

    /// Requests this process works on.
    pub fn active(&self) -> usize {
        self.active.load(Relaxed)
    }

    /// The bound on them.
    pub fn active_max(&self) -> usize {
        self.active_max
    }

    /// The engine's shard tells how many requests there are.
    pub fn set_active(&self, count: usize) {
        self.active.store(count, Relaxed);
    }

    /// The engine's shard tells how many tokens one request can have (quarantine shrinks it).
    pub fn set_tokens_max(&self, tokens: usize) {
        self.tokens_max.store(tokens, Relaxed);
    }

    /// From now on nothing new is admitted.
    pub fn drain(&self) {
        self.draining.store(true, Relaxed);
    }

    /// Whether the process is going down.
    pub fn draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    /// What is missing for work to be admitted; `None` when ready.
    pub fn missing(&self) -> Option<String> {
        match self.missing.lock() {
            Ok(missing) => missing.clone(),
            Err(poisoned) => poisoned.into_inner().clone(),
        }
    }

    /// Says what is missing, or that nothing is.
    pub fn set_missing(&self, missing: Option<String>) {
        match self.missing.lock() {
            Ok(mut place) => *place = missing,
            Err(poisoned) => *poisoned.into_inner() = missing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::SamplingParams;
    use kvserve_runtime::{Deadline, Nanos};

    fn request(tokens: usize) -> GenerateRequest {
        GenerateRequest {
            prompt: vec![1; tokens],
            max_tokens: 1,
            sampling: SamplingParams {
                seed: 0,
                ..SamplingParams::default()
            },
            stop_token_ids: Vec::new(),
            cache_salt: String::new(),
            deadline: Deadline::after(Nanos(0), Duration::from_secs(1)),
            label: String::new(),
        }
    }

    #[test]
    fn each_refusal_has_its_cause() {
        let readiness = Readiness::new(2, 10);
        assert!(readiness.missing().is_some());
        readiness.set_missing(None);
        assert_eq!(readiness.admit(&request(9)), Ok(()));
        assert_eq!(
            readiness.admit(&request(10)),
            Err(Refusal::TooLarge {
                tokens: 11,
                tokens_max: 10
            })
        );
        readiness.set_active(2);
        assert!(matches!(
            readiness.admit(&request(1)),
            Err(Refusal::Overloaded { queued: 2, .. })
        ));
        readiness.drain();
        assert_eq!(readiness.admit(&request(1)), Err(Refusal::Draining));
    }
}
