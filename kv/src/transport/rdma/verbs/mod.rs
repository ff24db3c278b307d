//! Safe owners of verbs objects: the only `unsafe` of the RDMA transport.
//!
//! ```text
//!   Library ── Device (context, protection domain) ──┬── Region (memory region over a pool)
//!                                                    ├── CompletionQueue (queue, its channel)
//!                                                    └── QueuePair ── holds Region + CompletionQueue
//! ```
//!
//! **Invariants**, each kept here and nowhere else:
//! * V1 An object is destroyed before what it was made of: each holds a counted reference downwards.
//! * V2 A [`QueuePair`] that cannot be destroyed keeps its [`Region`], and with it the pool's
//!   mapping, for the life of the process: what may still be written is never unmapped.
//! * V3 A work request names local memory only as page numbers of its region, checked against the
//!   pool; whoever posts it has guarded those pages (the ledger) until the request has ended.
//! * V4 Nothing remote may write: access flags are made here of two booleans, and neither
//!   REMOTE_WRITE nor REMOTE_ATOMIC is among what they can give.
//! * V5 Nothing here leaves its thread (`Rc` everywhere): one set per shard, so that no call into
//!   the library takes a lock that another shard holds.
//! * V6 Of a failed completion only `wr_id`, `status`, `qp_num`, `vendor_err` are read.
//!
//! Descriptors of the library are made non-blocking here, so that no call waits.

mod batch;
mod device;
mod pair;
mod queue;
mod region;

pub use batch::{ReadWork, WorkBatch};
pub use device::{AsyncEvent, Device, DeviceLimits, GidEntry, Library, PortFacts};
pub use pair::{PairLimits, PairPath, PostFailed, QueuePair, Responder};
pub use queue::{CompletionQueue, Ended};
pub use region::{Access, Region};

use std::fmt;

/// A verb that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbError {
    /// Its name.
    pub verb: &'static str,
    /// The errno it gave.
    pub errno: i32,
    /// What to look at, when that is known.
    pub hint: &'static str,
}

impl VerbError {
    fn new(verb: &'static str, errno: i32) -> Self {
        let hint = match (verb, errno) {
            ("ibv_reg_mr", libc::ENOMEM) => {
                "; the locked-memory limit is too low (ulimit -l, or LimitMEMLOCK= of the service)"
            }
            (_, libc::EACCES | libc::EPERM) => {
                "; the process may not open /dev/infiniband/uverbs*: add it to the group that owns it"
            }
            (_, libc::ENOMEM) => "; the device has no more of it: ask for less",
            (_, _) => "",
        };
        VerbError { verb, errno, hint }
    }

    /// Of a verb that answers null and sets `errno`.
    fn last(verb: &'static str) -> Self {
        let errno = std::io::Error::last_os_error().raw_os_error();
        VerbError::new(verb, errno.unwrap_or(0))
    }

    /// Of a verb that answers an errno, or -1 and sets `errno`.
    fn check(verb: &'static str, answer: libc::c_int) -> Result<(), Self> {
        match answer {
            0 => Ok(()),
            -1 => Err(VerbError::last(verb)),
            errno => Err(VerbError::new(verb, errno.abs())),
        }
    }
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "{} failed: {reason}{}", self.verb, self.hint)
    }
}

impl std::error::Error for VerbError {}

/// Makes a descriptor of the library non-blocking.
fn make_nonblocking(descriptor: libc::c_int) -> Result<(), VerbError> {
    // SAFETY: plain calls on a descriptor that its owner keeps open; no pointer is passed.
    let done = unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFL);
        flags >= 0 && libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
    };
    match done {
        true => Ok(()),
        false => Err(VerbError::last("fcntl")),
    }
}
