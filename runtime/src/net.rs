//! Sockets by readiness: non-blocking descriptors whose readiness io_uring reports. No buffer
//! of ours is ever in the kernel's hands (PROTOCOL E6): closing is the physical end.

use glommio::io::PollableFd;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};

/// A connected TCP socket of this shard.
pub struct TcpStream {
    fd: PollableFd<std::net::TcpStream>,
}

impl TcpStream {
    /// Takes over a connected socket; makes it non-blocking and sets `TCP_NODELAY`.
    pub fn from_std(stream: std::net::TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(TcpStream {
            fd: PollableFd::new(stream).map_err(to_io)?,
        })
    }

    /// Connects without blocking the shard. The caller bounds the wait with a deadline.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let stream = TcpStream::from_std(socket.into())?;
        stream.fd.writable().await.map_err(to_io)?;
        match stream.fd.get_ref().take_error()? {
            Some(error) => Err(error),
            None => Ok(stream),
        }
    }

    /// Reads what is there, waiting until something is. Zero: the peer has closed.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.fd.get_ref().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.fd.readable().await.map_err(to_io)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Writes all of `buffer`. The caller bounds the wait with a deadline.
    pub async fn write_all(&self, mut buffer: &[u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.fd.get_ref().write(buffer) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => buffer = &buffer[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.fd.writable().await.map_err(to_io)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.fd.get_ref().peer_addr()
    }

    /// Gives the plain (still non-blocking) socket back, e.g. to a transport.
    pub fn into_std(self) -> std::net::TcpStream {
        self.fd.into_inner()
    }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.get_ref().as_raw_fd()
    }
}

/// A listening TCP socket of this shard.
pub struct TcpListener {
    fd: PollableFd<std::net::TcpListener>,
}

impl TcpListener {
    /// Binds with `SO_REUSEADDR` and, for listeners that several shards share, `SO_REUSEPORT`.
    pub fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(1024)?;
        Ok(TcpListener {
            fd: PollableFd::new(socket.into()).map_err(to_io)?,
        })
    }

    /// The bound address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.get_ref().local_addr()
    }

    /// Waits for a connection.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            match self.fd.get_ref().accept() {
                Ok((stream, address)) => return Ok((TcpStream::from_std(stream)?, address)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.fd.readable().await.map_err(to_io)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn to_io(error: glommio::GlommioError<()>) -> io::Error {
    error.into()
}
