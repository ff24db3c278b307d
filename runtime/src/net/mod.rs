//! Sockets by readiness: non-blocking descriptors whose readiness io_uring reports.
//!
//! **Owns** the descriptors and their readiness registrations. **Never** gives the kernel a
//! buffer of ours (PROTOCOL E6): a read or write is one non-blocking call, so closing the
//! descriptor is the physical end of everything on it.
//!
//! The rule that keeps readiness from being lost: a wait is only ever begun after a call said
//! "would block" (or came back short), the kernel's poll is level-triggered, and whoever is
//! woken calls again before it waits again. A wake-up is a hint, never a promise.
//!
//! ```text
//! poll_read -- recv --> data                    -> Ready
//!                  \--> would block -> Readiness -- first poll --> io_uring POLL_ADD (once)
//!                                          |                            |
//!                              later polls: only a flag          Relay::wake: flag, wake tasks
//! ```

mod relay;
mod socket;
mod tcp;
mod unix;

pub(crate) use relay::Relay;
pub use socket::{Peeked, Socket};
pub use tcp::{TcpListener, TcpStream};
pub use unix::{UnixListener, UnixStream};

use std::io;

fn to_io(error: glommio::GlommioError<()>) -> io::Error {
    error.into()
}
