//! An eventfd: the one kind of descriptor that plain threads and shards wake each other with.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An owned, non-blocking, close-on-exec eventfd. Any thread may signal or drain it.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// Makes one with its counter at zero.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made by the kernel for us and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(EventFd { fd })
    }

    /// Makes the descriptor readable. A counter at its maximum is readable already, so the
    /// only other outcome (`EAGAIN`) needs nothing done. Async-signal-safe.
    pub fn signal(&self) {
        let one: u64 = 1;
        // SAFETY: the pointer covers the eight bytes of `one` for the whole call.
        unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Resets the counter; says whether it had been signalled.
    pub fn drain(&self) -> bool {
        let mut count: u64 = 0;
        // SAFETY: the pointer covers the eight writable bytes of `count` for the whole call.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) };
        read == 8
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_add_up_to_one_drain() {
        let event = EventFd::new().unwrap();
        assert!(!event.drain());
        event.signal();
        event.signal();
        assert!(event.drain());
        assert!(!event.drain());
    }
}
