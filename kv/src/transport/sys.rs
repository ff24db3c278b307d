//! The system calls of the transports, each behind a safe owner.

use kvserve_runtime::Nanos;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::rc::Rc;

/// The most buffers one `readv` or `sendmsg` takes (Linux: `UIO_MAXIOV`).
pub(crate) const IOVECS_MAX: usize = 1024;

/// Readiness events taken in one look: one turn hands out no more completions either.
const EVENTS_MAX: usize = 64;

/// Bytes of memory that this process may lock; `None` without a limit.
pub(crate) fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid struct for the call. A failure leaves zero, which is told as it is.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The NUMA node of the processor that runs this thread now; on a pinned shard that is the
/// shard's. `None` when the kernel does not tell.
pub(crate) fn numa_node_of_this_thread() -> Option<u32> {
    let (mut cpu, mut node) = (0_u32, 0_u32);
    // SAFETY: two valid places; the third argument has had no meaning since Linux 2.6.24.
    let done = unsafe {
        libc::syscall(
            libc::SYS_getcpu,
            &raw mut cpu,
            &raw mut node,
            ptr::null_mut::<libc::c_void>(),
        )
    };
    (done == 0).then_some(node)
}

/// What to be told of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Readable, or closed.
    Read,
    /// As `Read`, and writable.
    ReadWrite,
}

impl Interest {
    fn bits(self) -> u32 {
        let bits = match self {
            Interest::Read => libc::EPOLLIN | libc::EPOLLRDHUP,
            Interest::ReadWrite => libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLOUT,
        };
        bits as u32
    }
}

/// An epoll instance. Its own descriptor is readable while any of its members is ready, which
/// is what a shard arms.
pub(crate) struct Epoll {
    fd: OwnedFd,
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointer is passed.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just created and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Epoll { fd })
    }

    /// Adds a descriptor, or changes what is asked of it. `token` comes back with its events.
    pub(crate) fn set(&self, member: RawFd, interest: Interest, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: interest.bits(),
            u64: token,
        };
        // SAFETY: `event` is valid for the call; the kernel checks the descriptors.
        let mut control =
            |op| unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, member, &raw mut event) };
        if control(libc::EPOLL_CTL_MOD) == 0 || control(libc::EPOLL_CTL_ADD) == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    }

    /// Takes a descriptor out; one that is no member is passed over.
    pub(crate) fn remove(&self, member: RawFd) {
        // SAFETY: no event is passed, which this operation allows; the kernel checks the
        // descriptors. ENOENT is the only possible error and what was asked for.
        unsafe {
            libc::epoll_ctl(
                self.fd.as_raw_fd(),
                libc::EPOLL_CTL_DEL,
                member,
                ptr::null_mut(),
            )
        };
    }

    /// Calls `ready` with the token of each member that is ready now, at most [`EVENTS_MAX`].
    /// Never blocks.
    pub(crate) fn look(&self, mut ready: impl FnMut(u64)) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        // SAFETY: the array is valid for `EVENTS_MAX` events; a zero timeout never blocks.
        let count = unsafe {
            libc::epoll_wait(
                self.fd.as_raw_fd(),
                events.as_mut_ptr(),
                EVENTS_MAX as libc::c_int,
                0,
            )
        };
        // An error can only be EINTR here: nothing was ready, the next turn looks again.
        for event in events.iter().take(count.max(0) as usize) {
            ready(event.u64);
        }
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A timer descriptor on the clock of [`Nanos`]: readable from its set time on.
pub(crate) struct Timer {
    fd: OwnedFd,
    set_for: Option<Nanos>,
}

impl Timer {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointer is passed.
        let fd = unsafe {
            libc::timerfd_create(
                libc::CLOCK_MONOTONIC,
                libc::TFD_NONBLOCK | libc::TFD_CLOEXEC,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just created and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Timer { fd, set_for: None })
    }

    /// Makes it readable from `at` on (at once if that has passed), or not at all for `None`.
    /// Setting it again also takes an earlier expiry back.
    pub(crate) fn set(&mut self, at: Option<Nanos>) {
        if self.set_for == at {
            return;
        }
        // Zero would mean "never" to the kernel, so the earliest time is 1 ns.
        let nanos = at.map_or(0, |at| at.0.max(1));
        let spec = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: (nanos / 1_000_000_000) as libc::time_t,
                tv_nsec: (nanos % 1_000_000_000) as libc::c_long,
            },
        };
        // SAFETY: `spec` is valid for the call; the old value is not asked for.
        let done = unsafe {
            libc::timerfd_settime(
                self.fd.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const spec,
                ptr::null_mut(),
            )
        };
        assert_eq!(done, 0, "timerfd_settime: {}", io::Error::last_os_error());
        self.set_for = at;
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A list of buffers for one vectored call; its memory is used again from call to call.
pub(crate) struct IoVecs {
    list: Vec<libc::iovec>,
    bytes: usize,
}

impl IoVecs {
    pub(crate) fn new() -> Self {
        IoVecs {
            list: Vec::with_capacity(IOVECS_MAX),
            bytes: 0,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.bytes = 0;
    }

    /// Bytes of all buffers in the list.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a buffer that does not follow on the last one has no place.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() == IOVECS_MAX
    }

    /// Appends a buffer, or grows the last one if this follows on it in memory.
    pub(crate) fn push(&mut self, start: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        self.bytes += len;
        if let Some(last) = self.list.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == start
        {
            last.iov_len += len;
            return;
        }
        debug_assert!(!self.is_full());
        self.list.push(libc::iovec {
            iov_base: start.cast(),
            iov_len: len,
        });
    }
}

/// One non-blocking scattered read of a socket. `Ok(0)`: the peer has closed.
///
/// # Safety
/// Every buffer of the list is valid for writes and nobody else touches it during the call.
pub(crate) unsafe fn receive(socket: RawFd, into: &mut IoVecs) -> io::Result<usize> {
    let mut message = message_of(into);
    // SAFETY: the buffers are valid by the contract; the kernel keeps no pointer after return.
    let count = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(count as usize)
}

/// One non-blocking gathered write to a socket.
///
/// # Safety
/// Every buffer of the list is valid for reads and nobody writes it during the call.
pub(crate) unsafe fn send(socket: RawFd, from: &mut IoVecs) -> io::Result<usize> {
    let message = message_of(from);
    // SAFETY: the buffers are valid by the contract; the kernel has copied what it took when it
    // returns and keeps no pointer.
    let count = unsafe {
        libc::sendmsg(
            socket,
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(count as usize)
}

/// One non-blocking write of plain bytes.
pub(crate) fn send_bytes(socket: RawFd, from: &[u8]) -> io::Result<usize> {
    // SAFETY: the slice is valid for reads for the whole call.
    let count = unsafe {
        libc::send(
            socket,
            from.as_ptr().cast(),
            from.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(count as usize)
}

/// One non-blocking read of plain bytes. `Ok(0)`: the peer has closed.
pub(crate) fn receive_bytes(socket: RawFd, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the slice is valid for writes for the whole call.
    let count = unsafe {
        libc::recv(
            socket,
            into.as_mut_ptr().cast(),
            into.len(),
            libc::MSG_DONTWAIT,
        )
    };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(count as usize)
}

fn message_of(list: &mut IoVecs) -> libc::msghdr {
    // SAFETY: all zero is a valid msghdr: no name, no buffers, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.list.as_mut_ptr();
    message.msg_iovlen = list.list.len() as _;
    message
}

/// What a failed socket call means to a non-blocking loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Nothing to do now; try again when it is ready.
    NotNow,
    /// A signal came between; try again at once or next turn.
    Again,
    /// The connection is broken; the errno.
    Broken(u32),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Trouble::NotNow,
            Some(libc::EINTR) => Trouble::Again,
            other => Trouble::Broken(other.unwrap_or(libc::EIO) as u32),
        }
    }
}

/// A data connection's socket and its membership of an epoll.
///
/// Dropping it is the connection's end even if something else still holds the open file (a poll
/// that is being cancelled in io_uring, say): it leaves the epoll and is shut down explicitly,
/// where closing alone would do neither until the last holder lets go.
pub(crate) struct Socket {
    stream: TcpStream,
    epoll: Rc<Epoll>,
    token: u64,
    interest: Interest,
}

impl Socket {
    /// Takes over a connected socket: non-blocking, no delay, and buffers of `buffer_bytes`
    /// unless 0, which leaves them to the kernel's own tuning. Its events come as `token`.
    pub(crate) fn new(
        stream: TcpStream,
        epoll: &Rc<Epoll>,
        token: u64,
        buffer_bytes: usize,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        if buffer_bytes > 0 {
            let socket = socket2::SockRef::from(&stream);
            socket.set_send_buffer_size(buffer_bytes)?;
            socket.set_recv_buffer_size(buffer_bytes)?;
        }
        epoll.set(stream.as_raw_fd(), Interest::Read, token)?;
        Ok(Socket {
            stream,
            epoll: epoll.clone(),
            token,
            interest: Interest::Read,
        })
    }

    /// Changes what the epoll asks of it; a call only if that is another thing.
    pub(crate) fn ask(&mut self, interest: Interest) -> io::Result<()> {
        if self.interest != interest {
            self.epoll.set(self.as_raw_fd(), interest, self.token)?;
            self.interest = interest;
        }
        Ok(())
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.epoll.remove(self.as_raw_fd());
        // Fails only if the peer was first; the end is the same.
        self.stream.shutdown(Shutdown::Both).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_memory_share_a_buffer() {
        let mut bytes = [0u8; 64];
        let start = bytes.as_mut_ptr();
        let mut list = IoVecs::new();
        list.push(start, 16);
        list.push(start.wrapping_add(16), 16);
        list.push(start.wrapping_add(48), 16);
        list.push(start.wrapping_add(48), 0);
        assert_eq!((list.list.len(), list.bytes()), (2, 48));
        list.clear();
        assert_eq!(list.bytes(), 0);
    }

    #[test]
    fn a_dropped_socket_is_over_for_the_epoll_and_the_peer_though_its_file_is_held() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let held = near.try_clone().unwrap();
        let epoll = Rc::new(Epoll::new().unwrap());
        let socket = Socket::new(near, &epoll, 3, 0).unwrap();
        let ready = || {
            let mut tokens = Vec::new();
            epoll.look(|token| tokens.push(token));
            tokens
        };
        io::Write::write_all(&mut far, &[1]).unwrap();
        let begun = std::time::Instant::now();
        while ready() != [3] {
            assert!(begun.elapsed().as_secs() < 20);
        }
        drop(socket);
        assert!(ready().is_empty());
        let end = io::Read::read(&mut far, &mut [0; 8]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
        drop(held);
    }

    #[test]
    fn a_timer_wakes_the_epoll_it_belongs_to() {
        let epoll = Epoll::new().unwrap();
        let mut timer = Timer::new().unwrap();
        epoll.set(timer.as_raw_fd(), Interest::Read, 7).unwrap();
        let ready = || {
            let mut tokens = Vec::new();
            epoll.look(|token| tokens.push(token));
            tokens
        };
        assert!(ready().is_empty());
        timer.set(Some(Nanos(0)));
        assert_eq!(ready(), [7]);
        timer.set(Some(Nanos(u64::MAX / 2)));
        assert!(ready().is_empty(), "a later time takes the expiry back");
        timer.set(Some(Nanos::now()));
        assert_eq!(ready(), [7]);
        timer.set(None);
        assert!(ready().is_empty());
    }
}
