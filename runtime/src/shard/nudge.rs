//! Getting a shard's thread out of a sleep in the kernel before any of its tasks has run.
//!
//! The executor may take the end of its time slice, over before anything ran, for "nothing to
//! run", and park (see [`super::bell`]). Later the doorbell's hard wake gets it out of that. The
//! very first task has no waker yet that anybody could use: a shard that loses its CPU for a
//! millisecond between its first poll and its first task (3 of some 500 starts on a busy
//! machine) would sleep for ever. A signal ends the kernel's wait with `EINTR`, which the
//! executor takes as a reason to look at its tasks again.

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// Ignored by default, and made for news of this kind: what a library may use.
const NUDGE: libc::c_int = libc::SIGURG;

/// A thread that can be nudged.
#[derive(Debug, Default)]
pub(crate) struct Nudge {
    /// 0: no thread.
    tid: AtomicI32,
}

impl Nudge {
    /// From now on the calling thread is nudged.
    pub(crate) fn adopt_this_thread(&self) {
        take_the_signal();
        // SAFETY: a plain query of the calling thread.
        let tid = unsafe { libc::gettid() };
        self.tid.store(tid, Ordering::Release);
    }

    /// The thread ends.
    pub(crate) fn forget(&self) {
        self.tid.store(0, Ordering::Release);
    }

    /// Interrupts the thread's system call, if it is in one.
    pub(crate) fn nudge(&self) {
        let tid = self.tid.load(Ordering::Acquire);
        if tid != 0 {
            // SAFETY: a signal to a thread of this process, whose handler does nothing. A thread
            // that has just ended is an error, which is as good.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, NUDGE) };
        }
    }
}

/// Does nothing: that it is called is what interrupts.
extern "C" fn nothing(_signal: libc::c_int) {}

/// Has the signal interrupt system calls, unless the program already does something with it.
fn take_the_signal() {
    static TAKEN: Once = Once::new();
    TAKEN.call_once(|| {
        // SAFETY: both structs are plain memory that outlives the calls; the handler touches
        // nothing. Without SA_RESTART, so that calls end with EINTR.
        unsafe {
            let mut known: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(NUDGE, ptr::null(), &mut known) != 0
                || known.sa_sigaction != libc::SIG_DFL
            {
                return;
            }
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = nothing as *const () as libc::sighandler_t;
            libc::sigemptyset(&mut ours.sa_mask);
            libc::sigaction(NUDGE, &ours, ptr::null_mut());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn a_thread_that_sleeps_in_a_call_is_interrupted() {
        let nudge = Arc::new(Nudge::default());
        nudge.nudge();
        let own = nudge.clone();
        let sleeper = std::thread::spawn(move || {
            own.adopt_this_thread();
            // SAFETY: no descriptors are given; it waits for a signal or 20 s.
            let code = unsafe { libc::poll(ptr::null_mut(), 0, 20_000) };
            (code, std::io::Error::last_os_error().kind())
        });
        let began = Instant::now();
        while !sleeper.is_finished() && began.elapsed() < Duration::from_secs(10) {
            nudge.nudge();
            std::thread::sleep(Duration::from_millis(5));
        }
        let (code, kind) = sleeper.join().unwrap();
        assert_eq!((code, kind), (-1, std::io::ErrorKind::Interrupted));
        nudge.forget();
        nudge.nudge();
    }
}
