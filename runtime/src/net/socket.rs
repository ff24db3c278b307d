//! A connected stream socket of this shard, and the readiness of any descriptor.

use super::relay::Relay;
use super::to_io;
use glommio::io::{PollState, PollableFd};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

/// Which readiness is waited for.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    /// Readable: data, end of stream, an error, or a connection to accept.
    Read,
    /// Writable.
    Write,
}

/// One direction's wait on one descriptor: at most one kernel registration at a time, which
/// outlives the futures that wait for it (dropping a read and starting another costs nothing).
pub(super) struct Readiness {
    direction: Direction,
    state: RefCell<PollState>,
    armed: Cell<bool>,
    /// The last call came back short: the next one would block, so wait first.
    exhausted: Cell<bool>,
    relay: Arc<Relay>,
    relay_waker: Waker,
}

impl Readiness {
    pub(super) fn new(direction: Direction) -> Self {
        let relay = Relay::new();
        Readiness {
            direction,
            state: RefCell::new(PollState::new()),
            armed: Cell::new(false),
            exhausted: Cell::new(false),
            relay_waker: Waker::from(relay.clone()),
            relay,
        }
    }

    /// Ready once the kernel has reported readiness after the wait began.
    pub(super) fn poll<T: AsRawFd>(
        &self,
        cx: &mut Context<'_>,
        fd: &PollableFd<T>,
    ) -> Poll<io::Result<()>> {
        self.relay.register(cx.waker());
        if self.armed.get() && !self.relay.fired() {
            return Poll::Pending;
        }
        self.relay.reset();
        let mut relay_cx = Context::from_waker(&self.relay_waker);
        let mut state = self.state.borrow_mut();
        let polled = match self.direction {
            Direction::Read => fd.poll_readable(&mut relay_cx, &mut state),
            Direction::Write => fd.poll_writable(&mut relay_cx, &mut state),
        };
        self.armed.set(polled.is_pending());
        polled.map_err(to_io)
    }

    /// Runs `call` until it gives something other than "would block", waiting in between.
    /// `short` says whether a result means that the descriptor has no more for now.
    pub(super) fn poll_call<T: AsRawFd, R>(
        &self,
        cx: &mut Context<'_>,
        fd: &PollableFd<T>,
        mut call: impl FnMut(&T) -> io::Result<R>,
        short: impl Fn(&R) -> bool,
    ) -> Poll<io::Result<R>> {
        loop {
            if !self.exhausted.get() {
                match call(fd.get_ref()) {
                    Ok(result) => {
                        self.exhausted.set(short(&result));
                        return Poll::Ready(Ok(result));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            ready!(self.poll(cx, fd))?;
            self.exhausted.set(false);
        }
    }

    /// Whether a registration is out and has not reported yet: an event will wake the waiter.
    pub(super) fn waiting(&self) -> bool {
        self.armed.get() && !self.relay.fired()
    }
}

/// A connected stream socket (TCP or Unix) of this shard.
///
/// Reads and writes take `&self`: one task may read while another writes. In one direction
/// there should be one waiting task at a time; more are woken together and race for the bytes.
///
/// Dropping it closes the connection *at once*: a registration that is still out holds the
/// kernel's file open until its cancel is submitted (and for ever if the shard ends before), so
/// a close alone would not reach the peer.
pub struct Socket {
    /// Taken by [`Socket::into_socket`] only, which consumes the rest.
    fd: Option<PollableFd<socket2::Socket>>,
    read: Readiness,
    write: Readiness,
}

impl Socket {
    /// Takes over a connected (or connecting) socket and makes it non-blocking.
    ///
    /// # Errors
    /// When the descriptor refuses the options. Must be called on a shard.
    pub(super) fn new(socket: socket2::Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Socket {
            fd: Some(PollableFd::new(socket).map_err(to_io)?),
            read: Readiness::new(Direction::Read),
            write: Readiness::new(Direction::Write),
        })
    }

    /// Reads into memory that need not be initialised. Zero: the peer has closed its side.
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut [MaybeUninit<u8>],
    ) -> Poll<io::Result<usize>> {
        let wanted = buffer.len();
        self.read.poll_call(
            cx,
            self.fd(),
            |socket| socket.recv(buffer),
            |&count| count < wanted && count > 0,
        )
    }

    /// Reads what is there. Zero: the peer has closed its side (or `buffer` is empty).
    pub fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let wanted = buffer.len();
        self.read.poll_call(
            cx,
            self.fd(),
            |mut socket| socket.read(buffer),
            |&count| count < wanted && count > 0,
        )
    }

    /// Reads what is there now, without waiting and without having the kernel call: for a task
    /// that looks again by itself.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing; else what the kernel says.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut socket = self.as_socket();
        socket.read(buffer)
    }

    /// Reads into several buffers, in order, with one call.
    pub fn poll_read_vectored(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let wanted: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        self.read.poll_call(
            cx,
            self.fd(),
            |mut socket| socket.read_vectored(buffers),
            |&count| count < wanted && count > 0,
        )
    }

    /// Writes what fits.
    pub fn poll_write(&self, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        self.write.poll_call(
            cx,
            self.fd(),
            |socket| socket.send_with_flags(buffer, libc::MSG_NOSIGNAL),
            |&count| count < buffer.len(),
        )
    }

    /// Writes what fits of several buffers, in order, with one call.
    pub fn poll_write_vectored(
        &self,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let offered: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        self.write.poll_call(
            cx,
            self.fd(),
            |socket| socket.send_vectored_with_flags(buffers, libc::MSG_NOSIGNAL),
            |&count| count < offered,
        )
    }

    /// Reads what is there, waiting until something is. Zero: the peer has closed its side.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        poll_fn(|cx| self.poll_read(cx, buffer)).await
    }

    /// Reads into several buffers, in order; see [`Socket::read`].
    pub async fn read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        poll_fn(|cx| self.poll_read_vectored(cx, buffers)).await
    }

    /// Fills `buffer` whole.
    ///
    /// # Errors
    /// `UnexpectedEof` when the peer closes before; the caller bounds the wait with a deadline.
    pub async fn read_exact(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read(buffer).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => buffer = &mut buffer[count..],
            }
        }
        Ok(())
    }

    /// Writes what fits, waiting until something does.
    pub async fn write(&self, buffer: &[u8]) -> io::Result<usize> {
        poll_fn(|cx| self.poll_write(cx, buffer)).await
    }

    /// Writes all of `buffer`. The caller bounds the wait with a deadline.
    pub async fn write_all(&self, mut buffer: &[u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.write(buffer).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => buffer = &buffer[count..],
            }
        }
        Ok(())
    }

    /// Writes all of `buffers`, in order. The caller bounds the wait with a deadline.
    pub async fn write_vectored_all(&self, mut buffers: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut buffers, 0);
        while !buffers.is_empty() {
            match poll_fn(|cx| self.poll_write_vectored(cx, buffers)).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => IoSlice::advance_slices(&mut buffers, count),
            }
        }
        Ok(())
    }

    /// Closes one or both directions; a peer that is already gone is no error.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self.as_socket().shutdown(how) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => other,
        }
    }

    /// Breaks the connection off at once: nothing unsent is kept, and a TCP peer sees an error
    /// and not a clean end.
    pub fn reset(&self) {
        let unspecified = libc::sockaddr {
            sa_family: libc::AF_UNSPEC as libc::sa_family_t,
            sa_data: [0; 14],
        };
        let length = std::mem::size_of::<libc::sockaddr>() as libc::socklen_t;
        // SAFETY: the address is valid and of that length for the call, the descriptor is open.
        // Connecting a TCP socket to "nowhere" is how Linux aborts its connection.
        let failed = unsafe { libc::connect(self.as_raw_fd(), &unspecified, length) } != 0;
        if failed {
            // A Unix socket, or one that is broken already: an end is all there is to give.
            let _ = self.shutdown(Shutdown::Both);
        }
    }

    /// Whether the peer has closed its side or the connection has failed, found without
    /// reading: bytes not read yet do not hide it.
    pub fn hung_up(&self) -> bool {
        let mut entry = libc::pollfd {
            fd: self.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: `entry` is one valid pollfd for the whole call, which waits for nothing
        // (time-out 0); the descriptor is open as long as `self` is.
        let count = unsafe { libc::poll(&mut entry, 1, 0) };
        count > 0 && entry.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    }

    /// Looks at an idle connection without consuming anything.
    pub fn peek(&self) -> Peeked {
        let mut byte = [MaybeUninit::uninit()];
        match self.as_socket().peek(&mut byte) {
            Ok(0) => Peeked::Closed,
            Ok(_) => Peeked::Bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Peeked::Quiet,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Peeked::Quiet,
            Err(_) => Peeked::Closed,
        }
    }

    /// Whether an event on the read side (data, end, failure) will wake a task by itself.
    pub(crate) fn read_waiting(&self) -> bool {
        self.read.waiting()
    }

    pub(super) async fn wait_writable(&self) -> io::Result<()> {
        poll_fn(|cx| self.write.poll(cx, self.fd())).await
    }

    /// The plain socket, for options and addresses.
    pub fn as_socket(&self) -> &socket2::Socket {
        self.fd().get_ref()
    }

    fn fd(&self) -> &PollableFd<socket2::Socket> {
        match &self.fd {
            Some(fd) => fd,
            None => unreachable!("only `into_socket` takes the descriptor, and it consumes self"),
        }
    }

    pub(super) fn into_socket(mut self) -> socket2::Socket {
        match self.fd.take() {
            Some(fd) => fd.into_inner(),
            None => unreachable!("only `into_socket` takes the descriptor, and it consumes self"),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.fd.is_some() && (self.read.armed.get() || self.write.armed.get()) {
            // A peer that is gone already needs no telling.
            let _ = self.shutdown(Shutdown::Both);
        }
    }
}

/// What [`Socket::peek`] saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peeked {
    /// Open, nothing to read.
    Quiet,
    /// Bytes wait to be read.
    Bytes,
    /// The peer has closed, or the connection has failed.
    Closed,
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_socket().as_raw_fd()
    }
}
