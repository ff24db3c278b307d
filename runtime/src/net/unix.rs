//! Unix sockets: the admin listener that only this user may open.

use super::socket::{Direction, Readiness, Socket};
use super::to_io;
use glommio::io::PollableFd;
use std::fs::{File, Permissions};
use std::future::poll_fn;
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};

/// Waiting connections: an admin socket has a handful of callers.
const BACKLOG: i32 = 16;

/// A connected Unix stream socket of this shard; reads and writes are those of [`Socket`].
pub struct UnixStream {
    socket: Socket,
}

impl UnixStream {
    /// Takes over a connected socket; makes it non-blocking.
    ///
    /// # Errors
    /// When the descriptor refuses the option. Must be called on a shard.
    pub fn from_std(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        Ok(UnixStream {
            socket: Socket::new(stream.into())?,
        })
    }

    /// The stream without its protocol's name.
    pub fn into_inner(self) -> Socket {
        self.socket
    }
}

impl Deref for UnixStream {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

/// A listening Unix socket: with mode 0600 and a file that goes away with it, or of an abstract
/// name.
pub struct UnixListener {
    fd: PollableFd<socket2::Socket>,
    readiness: Readiness,
    file: Option<SocketFile>,
}

struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl UnixListener {
    /// Binds `path` so that only this user can connect. A socket file that nobody listens on
    /// any more is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when somebody listens there or the path is no socket; what the file system
    /// says otherwise. Must be called on a shard.
    pub fn bind(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        // The mode is set on the descriptor *before* the bind: Linux gives it to the file, so
        // there is no moment at which another user could connect.
        let file = File::from(OwnedFd::from(socket));
        file.set_permissions(Permissions::from_mode(0o600))?;
        let socket = socket2::Socket::from(OwnedFd::from(file));
        socket.set_nonblocking(true)?;
        socket.bind(&socket2::SockAddr::unix(path)?)?;
        let metadata = std::fs::symlink_metadata(path)?;
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            let _ = std::fs::remove_file(path);
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "{} got mode {mode:o} and not 600: put it on a file system that keeps modes",
                    path.display()
                ),
            ));
        }
        socket.listen(BACKLOG)?;
        Ok(UnixListener {
            fd: PollableFd::new(socket).map_err(to_io)?,
            readiness: Readiness::new(Direction::Read),
            file: Some(SocketFile {
                path: path.to_owned(),
                inode: metadata.ino(),
            }),
        })
    }

    /// Binds an abstract name, which leaves nothing behind when the process is killed. It has no
    /// mode: anybody of this network namespace can connect, so the caller checks who does
    /// (`SO_PEERCRED`) before it reads a byte.
    ///
    /// # Errors
    /// `AddrInUse`, or `InvalidInput` for a name that is too long. Must be called on a shard.
    pub fn bind_abstract(name: &str) -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&socket2::SockAddr::unix(format!("\0{name}"))?)?;
        socket.listen(BACKLOG)?;
        Ok(UnixListener {
            fd: PollableFd::new(socket).map_err(to_io)?,
            readiness: Readiness::new(Direction::Read),
            file: None,
        })
    }

    /// Where it listens; `None` for an abstract name.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Takes a connection, or waits for one.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.readiness
            .poll_call(cx, &self.fd, |socket| socket.accept(), |_| false)
            .map(|accepted| {
                let (socket, _) = accepted?;
                Ok(UnixStream {
                    socket: Socket::new(socket)?,
                })
            })
    }

    /// Waits for a connection.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        // As for TCP: a registration may hold the kernel's file open.
        let _ = self.fd.get_ref().shutdown(std::net::Shutdown::Both);
        let Some(file) = &self.file else {
            return;
        };
        // Only our own file: a successor may have bound the path again.
        let ours = std::fs::symlink_metadata(&file.path)
            .is_ok_and(|metadata| metadata.ino() == file.inode);
        if ours {
            // Nothing can be done about a failure here: the next bind replaces a stale file.
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let in_use = |what: &str| {
        io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("{}: {what}; choose another path", path.display()),
        )
    };
    if !metadata.file_type().is_socket() {
        return Err(in_use("a file that is no socket is in the way"));
    }
    // A blocking connect, yet it cannot wait: Unix sockets answer at once (full: EAGAIN on a
    // non-blocking one), and this runs before the shard serves anything.
    let probe = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    probe.set_nonblocking(true)?;
    match probe.connect(&socket2::SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        _ => Err(in_use("another process listens there")),
    }
}
