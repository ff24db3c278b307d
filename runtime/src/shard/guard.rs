//! A panic on a shard or an engine lane ends the process: a dead shard must not leave its
//! listener, its peers' sessions or its leases behind. Release builds abort on any panic
//! (`panic = "abort"`); these guards do the same where unwinding is compiled in.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Ends the process if it is dropped while its thread unwinds. Put it on the stack of any
/// thread body whose death the process must not survive.
#[derive(Debug)]
pub struct AbortOnUnwind {
    what: String,
}

impl AbortOnUnwind {
    /// Guards the rest of the scope; `what` names the body in the last message.
    pub fn new(what: impl Into<String>) -> Self {
        AbortOnUnwind { what: what.into() }
    }
}

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            abort_process(&format!("{} panicked", self.what));
        }
    }
}

/// Runs `body`; if it panics, says so with the panic's message and ends the process.
pub fn abort_on_unwind<T>(what: &str, body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(payload) => abort_process(&format!(
            "{what} panicked: {}",
            panic_message(payload.as_ref())
        )),
    }
}

/// Says why on standard error and aborts. It writes to the descriptor itself: a test harness
/// that captures output would swallow the last words otherwise.
pub fn abort_process(why: &str) -> ! {
    let line = format!("kvserve-runtime: {why}; aborting the process\n");
    let bytes = line.as_bytes();
    // SAFETY: the pointer and length name `line`'s bytes, alive for the whole call.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    std::process::abort()
}

/// The text of a panic's payload.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "(a panic without a text)"
    }
}
