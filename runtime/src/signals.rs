//! SIGTERM and SIGINT ask for a drain; a second SIGINT ends the process at once, or, for a process
//! that must end others first, is told by [`interrupted_again`].
//!
//! The handler only touches atomics and an eventfd. A plain thread waits on that and tells
//! shards (by their seats) and threads (by a condition variable).

use crate::shard::{EventFd, Notice, Seat, Shard};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The exit status of a process that a second SIGINT ended: 128 + SIGINT.
const EXIT_INTERRUPTED: i32 = 130;

/// "Stop taking work, finish what runs, end": one flag that shards and threads wait for.
/// Clones are the same flag. It is never taken back.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    inner: Arc<DrainInner>,
}

#[derive(Debug, Default)]
struct DrainInner {
    requested: AtomicBool,
    waiting: Mutex<Vec<Arc<Notice>>>,
    threads: Condvar,
}

impl Drain {
    /// A flag that is down. [`install`] makes signals raise it; [`Drain::request`] does too.
    pub fn new() -> Self {
        Drain::default()
    }

    /// Whether a drain was asked for.
    pub fn requested(&self) -> bool {
        self.inner.requested.load(Ordering::Acquire)
    }

    /// Asks for the drain. Idempotent.
    pub fn request(&self) {
        let waiting = {
            let mut waiting = self.waiting();
            self.inner.requested.store(true, Ordering::Release);
            self.inner.threads.notify_all();
            std::mem::take(&mut *waiting)
        };
        for notice in waiting {
            notice.ring();
        }
    }

    /// Waits on a shard until a drain is asked for. This wait has no deadline by its nature:
    /// race it with what the task does meanwhile.
    ///
    /// # Panics
    /// Outside a shard.
    pub async fn wait(&self) {
        let shard = Shard::current().expect("Drain::wait is for shards; threads: wait_timeout");
        let mut entry = Entry {
            drain: self,
            seat: Seat::on(&shard),
        };
        {
            let mut waiting = self.waiting();
            if self.requested() {
                return;
            }
            waiting.push(entry.seat.notice().clone());
        }
        while !self.requested() {
            entry.seat.rung().await;
        }
    }

    /// Waits on a plain thread, at most for `span`; says whether a drain was asked for.
    pub fn wait_timeout(&self, span: Duration) -> bool {
        let end = Instant::now() + span.min(crate::time::Deadline::SPAN_MAX);
        let mut waiting = self.waiting();
        while !self.requested() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            waiting = self
                .inner
                .threads
                .wait_timeout(waiting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Arc<Notice>>> {
        self.inner
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A waiter's entry; leaves the list when the wait ends or is dropped.
struct Entry<'a> {
    drain: &'a Drain,
    seat: Seat,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut waiting = self.drain.waiting();
        waiting.retain(|notice| !Arc::ptr_eq(notice, self.seat.notice()));
    }
}

/// What the handler may touch: made once, before the handler is installed, never freed.
struct HandlerState {
    event: EventFd,
    interrupts: AtomicU32,
    second: SecondInterrupt,
}

static HANDLER: OnceLock<HandlerState> = OnceLock::new();

/// What a second SIGINT does. A third one always ends the process at once with status 130.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondInterrupt {
    /// Ends the process at once with status 130.
    Ends,
    /// Is told by [`interrupted_again`]: for a process that has others to end first.
    IsTold,
}

/// Whether SIGINT came more than once; for processes that installed [`SecondInterrupt::IsTold`].
pub fn interrupted_again() -> bool {
    HANDLER
        .get()
        .is_some_and(|state| state.interrupts.load(Ordering::Relaxed) > 1)
}

/// Makes SIGTERM and SIGINT request `drain`, once per process. A second SIGINT ends the
/// process at once with status 130.
///
/// # Errors
/// When it was installed before, or no thread, descriptor or handler could be had.
pub fn install(drain: &Drain) -> io::Result<()> {
    install_with(drain, SecondInterrupt::Ends)
}

/// [`install`], with a choice of what a second SIGINT does.
///
/// # Errors
/// As [`install`].
pub fn install_with(drain: &Drain, second: SecondInterrupt) -> io::Result<()> {
    let state = HandlerState {
        event: EventFd::new()?,
        interrupts: AtomicU32::new(0),
        second,
    };
    if HANDLER.set(state).is_err() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "signal handlers were installed before; share that Drain",
        ));
    }
    let drain = drain.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if wait_for_signal() {
                drain.request();
            }
        })?;
    handle(libc::SIGTERM)?;
    handle(libc::SIGINT)
}

fn wait_for_signal() -> bool {
    let Some(state) = HANDLER.get() else {
        return false;
    };
    loop {
        let mut wait = libc::pollfd {
            fd: state.event.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd. No time limit: this thread exists to wait for a signal.
        unsafe { libc::poll(&mut wait, 1, -1) };
        if state.event.drain() {
            return true;
        }
    }
}

fn handle(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction; the fields that matter are set below.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int) = on_signal;
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    // Interrupted calls go on by themselves: nothing here relies on EINTR.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is filled in, and `on_signal` is async-signal-safe (see there).
    let code = unsafe {
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(signal, &action, std::ptr::null_mut())
    };
    match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Async-signal-safe: a static that was set before, atomics, `write` on an eventfd, `_exit`.
extern "C" fn on_signal(signal: libc::c_int) {
    let Some(state) = HANDLER.get() else { return };
    let patience = match state.second {
        SecondInterrupt::Ends => 0,
        SecondInterrupt::IsTold => 1,
    };
    if signal == libc::SIGINT && state.interrupts.fetch_add(1, Ordering::Relaxed) > patience {
        // SAFETY: `_exit` may be called from a signal handler and does not return.
        unsafe { libc::_exit(EXIT_INTERRUPTED) };
    }
    // SAFETY: errno's address is this thread's own; it is restored so that the interrupted
    // code does not see the handler's.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        state.event.signal();
        *errno = before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_see_the_request() {
        let drain = Drain::new();
        assert!(!drain.wait_timeout(Duration::from_millis(5)));
        let other = drain.clone();
        let waiter = std::thread::spawn(move || other.wait_timeout(Duration::from_secs(30)));
        drain.request();
        drain.request();
        assert!(waiter.join().unwrap());
        assert!(drain.wait_timeout(Duration::ZERO));
    }
}
