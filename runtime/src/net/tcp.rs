//! TCP: streams and listeners of this shard.

use super::socket::{Direction, Readiness, Socket};
use super::to_io;
use glommio::io::PollableFd;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::task::{Context, Poll};

/// Connections the kernel holds for us before they are accepted: several times what arrives
/// in one scheduling stall (10 ms at 100,000 connections/s). The kernel may cut it (somaxconn).
const BACKLOG: i32 = 1024;

/// A connected TCP socket of this shard; reads and writes are those of [`Socket`].
pub struct TcpStream {
    socket: Socket,
}

impl TcpStream {
    /// Takes over a connected socket; makes it non-blocking and sets `TCP_NODELAY`.
    ///
    /// # Errors
    /// When the descriptor refuses the options. Must be called on a shard.
    pub fn from_std(stream: std::net::TcpStream) -> io::Result<Self> {
        Self::from_socket(stream.into())
    }

    fn from_socket(socket: socket2::Socket) -> io::Result<Self> {
        socket.set_tcp_nodelay(true)?;
        Ok(TcpStream {
            socket: Socket::new(socket)?,
        })
    }

    /// Connects without blocking the shard. The caller bounds the wait with a deadline.
    ///
    /// # Errors
    /// What the kernel reports: refused, unreachable, timed out.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let stream = TcpStream::from_socket(socket)?;
        loop {
            let plain = stream.socket.as_socket();
            if let Some(error) = plain.take_error()? {
                return Err(error);
            }
            // Being woken proves nothing; a peer's address proves the connection.
            match plain.peer_addr() {
                Ok(_) => return Ok(stream),
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(error) => return Err(error),
            }
            stream.socket.wait_writable().await?;
        }
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        to_address(self.socket.as_socket().peer_addr()?)
    }

    /// The local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        to_address(self.socket.as_socket().local_addr()?)
    }

    /// Gives the plain (still non-blocking) socket back, e.g. to a transport.
    pub fn into_std(self) -> std::net::TcpStream {
        self.socket.into_socket().into()
    }

    /// The stream without its protocol's name.
    pub fn into_inner(self) -> Socket {
        self.socket
    }
}

impl Deref for TcpStream {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// A listening TCP socket of this shard.
pub struct TcpListener {
    fd: PollableFd<socket2::Socket>,
    readiness: Readiness,
}

impl TcpListener {
    /// Binds with `SO_REUSEADDR` and, for listeners that several shards share, `SO_REUSEPORT`.
    ///
    /// # Errors
    /// Address in use or not ours, no permission. Must be called on a shard.
    pub fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Self::from_std(socket.into())
    }

    /// Takes over a listening socket; makes it non-blocking.
    ///
    /// # Errors
    /// When the descriptor refuses the options. Must be called on a shard.
    pub fn from_std(listener: std::net::TcpListener) -> io::Result<Self> {
        let socket = socket2::Socket::from(listener);
        socket.set_nonblocking(true)?;
        Ok(TcpListener {
            fd: PollableFd::new(socket).map_err(to_io)?,
            readiness: Readiness::new(Direction::Read),
        })
    }

    /// The bound address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        to_address(self.fd.get_ref().local_addr()?)
    }

    /// Takes a connection, or waits for one.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        self.readiness
            .poll_call(cx, &self.fd, |socket| socket.accept(), |_| false)
            .map(|accepted| {
                let (socket, address) = accepted?;
                Ok((TcpStream::from_socket(socket)?, to_address(address)?))
            })
    }

    /// Waits for a connection.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        // A registration may hold the kernel's file open for a while: stop listening at once,
        // or connections would go on being completed that nobody accepts.
        let _ = self.fd.get_ref().shutdown(std::net::Shutdown::Both);
    }
}

impl AsRawFd for TcpListener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.get_ref().as_raw_fd()
    }
}

fn to_address(address: socket2::SockAddr) -> io::Result<SocketAddr> {
    address.as_socket().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel gave an address that is neither IPv4 nor IPv6",
        )
    })
}
