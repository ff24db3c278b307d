//! How an exchange fails.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Where an exchange stood when its deadline came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientStage {
    /// Connecting.
    Connect,
    /// Sending the request and waiting for the answer's head.
    Head,
    /// Waiting for the next piece of the body.
    Body,
}

/// Why an exchange failed.
#[derive(Debug)]
pub enum ClientError {
    /// Nobody listens there.
    Refused {
        /// Whom we called.
        address: SocketAddr,
    },
    /// No connection for another reason.
    Unreachable {
        /// Whom we called.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// No connection within the connect limit.
    ConnectTimeout {
        /// Whom we called.
        address: SocketAddr,
        /// The limit.
        limit: Duration,
    },
    /// This client has as many connections open as it may.
    TooManyConnections {
        /// The limit.
        open_max: usize,
    },
    /// The connection ended before the answer was complete.
    Closed {
        /// Whom we called.
        address: SocketAddr,
        /// Bytes of the answer (head included) that had come; 0: it may not have been handled.
        bytes_received: u64,
    },
    /// The caller's deadline came.
    Deadline {
        /// Whom we called.
        address: SocketAddr,
        /// What was waited for.
        stage: ClientStage,
    },
    /// What came is not HTTP/1.1.
    Protocol {
        /// Whom we called.
        address: SocketAddr,
        /// What the parser said.
        source: hyper::Error,
    },
    /// The body is longer than the caller allows.
    TooLarge {
        /// Whom we called.
        address: SocketAddr,
        /// The limit.
        bytes_max: usize,
    },
}

impl ClientError {
    pub(super) fn from_hyper(
        address: SocketAddr,
        bytes_received: u64,
        source: hyper::Error,
    ) -> Self {
        if is_close(&source) {
            ClientError::Closed {
                address,
                bytes_received,
            }
        } else {
            ClientError::Protocol { address, source }
        }
    }

    pub(super) fn from_connect(address: SocketAddr, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::ConnectionRefused {
            ClientError::Refused { address }
        } else {
            ClientError::Unreachable { address, source }
        }
    }

    /// A short name for metrics.
    pub fn label(&self) -> &'static str {
        match self {
            ClientError::Refused { .. } => "refused",
            ClientError::Unreachable { .. } => "unreachable",
            ClientError::ConnectTimeout { .. } => "connect_timeout",
            ClientError::TooManyConnections { .. } => "too_many_connections",
            ClientError::Closed { .. } => "closed",
            ClientError::Deadline { .. } => "deadline",
            ClientError::Protocol { .. } => "protocol",
            ClientError::TooLarge { .. } => "too_large",
        }
    }
}

/// Whether hyper's error only says that the connection ended.
fn is_close(error: &hyper::Error) -> bool {
    if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        return true;
    }
    let mut cause = Error::source(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return !matches!(
                io.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput
            );
        }
        if let Some(inner) = error.downcast_ref::<hyper::Error>()
            && inner.is_incomplete_message()
        {
            return true;
        }
        cause = error.source();
    }
    false
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Refused { address } => {
                write!(f, "{address} refused the connection: nobody listens there")
            }
            ClientError::Unreachable { address, source } => {
                write!(f, "{address} cannot be reached: {source}")
            }
            ClientError::ConnectTimeout { address, limit } => write!(
                f,
                "{address} did not accept the connection within {} ms",
                limit.as_millis()
            ),
            ClientError::TooManyConnections { open_max } => {
                write!(f, "{open_max} connections are open, which is the limit")
            }
            ClientError::Closed {
                address,
                bytes_received,
            } => write!(
                f,
                "{address} closed the connection after {bytes_received} bytes of its answer"
            ),
            ClientError::Deadline { address, stage } => {
                let what = match stage {
                    ClientStage::Connect => "connecting",
                    ClientStage::Head => "waiting for the answer to begin",
                    ClientStage::Body => "waiting for more of the answer",
                };
                write!(f, "the deadline came while {what} ({address})")
            }
            ClientError::Protocol { address, source } => {
                write!(f, "{address} does not speak proper HTTP/1.1: {source}")
            }
            ClientError::TooLarge { address, bytes_max } => write!(
                f,
                "the answer of {address} is longer than the limit of {bytes_max} bytes"
            ),
        }
    }
}

impl Error for ClientError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            ClientError::Unreachable { source, .. } => Some(source),
            ClientError::Protocol { source, .. } => Some(source),
            ClientError::Refused { .. }
            | ClientError::ConnectTimeout { .. }
            | ClientError::TooManyConnections { .. }
            | ClientError::Closed { .. }
            | ClientError::Deadline { .. }
            | ClientError::TooLarge { .. } => None,
        }
    }
}
