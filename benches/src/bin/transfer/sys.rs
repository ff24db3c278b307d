//! The few calls that the standard library lacks.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Keeps this thread on one CPU.
pub fn pin(core: Option<usize>) {
    let Some(core) = core else { return };
    // SAFETY: all zero is an empty set; the calls write and read it only.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    assert_eq!(
        result, 0,
        "cannot pin to CPU {core}: use --cores D,P or none"
    );
}

/// Sets both buffers of a socket, as `TcpConfig::buffer_bytes` does; 0 leaves them alone.
pub fn set_buffers(stream: &TcpStream, bytes: usize) {
    let value = bytes as libc::c_int;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        if bytes == 0 {
            return;
        }
        // SAFETY: `value` is a valid int for the length of the call.
        let done = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}

/// CPU time of a process, all its threads together.
pub struct CpuClock(libc::clockid_t);

impl CpuClock {
    pub fn of(process: u32) -> Self {
        let mut clock = 0;
        // SAFETY: one valid clock id to write to.
        let found = unsafe { libc::clock_getcpuclockid(process as libc::pid_t, &raw mut clock) };
        assert_eq!(found, 0, "no CPU clock of process {process}");
        CpuClock(clock)
    }

    pub fn seconds(&self) -> f64 {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: one valid timespec. A process that is gone gives an error and zero.
        unsafe { libc::clock_gettime(self.0, &raw mut time) };
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    }
}

/// Waits until one of the descriptors is ready for its events (`POLLIN`, `POLLOUT`), or `limit`
/// has passed.
pub fn wait(descriptors: &[(RawFd, i16)], limit: Duration) {
    let mut list = [libc::pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    }; 4];
    for (entry, (fd, events)) in list.iter_mut().zip(descriptors) {
        (entry.fd, entry.events) = (*fd, *events);
    }
    let count = descriptors.len().min(list.len());
    // SAFETY: `count` valid entries. An error can only be EINTR: the caller looks again.
    unsafe {
        libc::poll(
            list.as_mut_ptr(),
            count as libc::nfds_t,
            limit.as_millis() as libc::c_int,
        )
    };
}

/// A read-only map of the child's pool, for the floors and for looking at what arrived.
pub struct SourceMap {
    start: *const u8,
    bytes: usize,
    pages_at: usize,
}

impl SourceMap {
    pub fn new(pool: &File, bytes: usize, pages_at: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                pool.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(SourceMap {
            start: start.cast(),
            bytes,
            pages_at,
        })
    }

    /// First byte of a page.
    pub fn page(&self, page: u32, page_bytes: usize) -> *const u8 {
        let at = self.pages_at + page as usize * page_bytes;
        assert!(at + page_bytes <= self.bytes, "page {page} is not there");
        self.start.wrapping_add(at)
    }

    /// A page's bytes: the child has written them before it told of its pool, and never again.
    pub fn bytes_of(&self, page: u32, page_bytes: usize) -> &[u8] {
        // SAFETY: inside the map; nobody writes the page any more.
        unsafe { std::slice::from_raw_parts(self.page(page, page_bytes), page_bytes) }
    }
}

impl Drop for SourceMap {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length.
        unsafe { libc::munmap(self.start.cast_mut().cast(), self.bytes) };
    }
}
