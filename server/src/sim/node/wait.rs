//! A completion future polled only when its waker was called, as an executor would.

use kvserve_runtime::EndReason;
use kvserve_runtime::completion::{Completion, SlotId};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// One wait. See the module's text.
pub struct Wait {
    completion: Completion,
    flag: Arc<Flag>,
}

impl Wait {
    /// A wait that has not been polled.
    pub fn new(completion: Completion) -> Self {
        let mut wait = Wait {
            completion,
            flag: Arc::new(Flag(AtomicBool::new(true))),
        };
        // Registers the waker; a slot that was just begun has not ended.
        let first = wait.poll();
        debug_assert!(first.is_none());
        wait
    }

    /// Its slot.
    pub fn slot(&self) -> SlotId {
        self.completion.slot()
    }

    /// Whether its waker was called.
    pub fn is_due(&self) -> bool {
        self.flag.0.load(Relaxed)
    }

    /// Polls it if its waker was called.
    pub fn poll(&mut self) -> Option<Result<(), EndReason>> {
        if !self.flag.0.swap(false, Relaxed) {
            return None;
        }
        let waker = Waker::from(self.flag.clone());
        match Pin::new(&mut self.completion).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => None,
            Poll::Ready(result) => Some(result),
        }
    }
}
