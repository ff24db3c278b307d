//! Credits for reads in flight, and the queue of those that wait for one. Sans-IO.
//!
//! Owns: how many reads and bytes are in flight per channel, per peer and per shard, and in
//! which order waiting reads get their turn. It is given the time, and answers.
//! Never does: post, cancel or free anything; it knows neither slots nor pages.
//!
//! ```text
//!   queue(read) ──hopeless, or the queue is full──▶ refused at once, with the numbers
//!        │
//!        ▼ waits, earliest deadline first
//!   next(): the earliest read whose peer has a channel and all three allowances have room
//!        │ Credit
//!        ▼ the read is posted, ends physically
//!   give_back(Credit)
//! ```
//!
//! Keeps:
//! * I4 a [`Credit`] is neither `Copy` nor `Clone` and comes back once, so credits taken are
//!   those given back plus those in use, per channel, peer and shard;
//! * I7 a dead or frozen peer holds no more than its own allowance: the reads of others pass by
//!   its waiting ones;
//! * a read that cannot be in place by its deadline is not begun: it would only take the room of
//!   one that can.
//!
//! Bounded by [`CreditLimits::waiting_max`]. Once a peer's queue has grown to its usual length,
//! nothing here allocates.

mod queue;
mod rate;
mod usage;

pub use queue::{CreditCounters, Credits, PeerCredits, Want};
pub use usage::{Allowance, Credit, Short};

use std::fmt;
use std::time::Duration;

/// Bounds of one shard's reads.
#[derive(Clone, Copy, Debug)]
pub struct CreditLimits {
    /// In flight on one channel.
    pub channel: Allowance,
    /// In flight from one peer.
    pub peer: Allowance,
    /// In flight on the shard.
    pub shard: Allowance,
    /// Reads that wait, over all peers: 320 requests (64 running and 256 queued) of 16 reads
    /// each are 5,120.
    pub waiting_max: usize,
}

impl Default for CreditLimits {
    /// A peer may have four attempts of 16 reads of 1 MiB out: 64 MiB keep a 100 Gbit/s path
    /// busy for 5 ms, so the order of deadlines is never further away than that. The shard takes
    /// four such peers at full speed. A TCP connection takes 256 reads, so short ones fit, too.
    fn default() -> Self {
        let peer = Allowance {
            reads: 192,
            bytes: 64 << 20,
        };
        CreditLimits {
            channel: peer,
            peer,
            shard: Allowance {
                reads: 4 * peer.reads,
                bytes: 4 * peer.bytes,
            },
            waiting_max: 8192,
        }
    }
}

/// Why a read was not even queued; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreditError {
    /// It could not be in place by its deadline.
    Hopeless {
        /// Bytes of the same peer in flight or queued before it.
        ahead_bytes: u64,
        /// Its own bytes.
        bytes: u64,
        /// What the peer's path has moved per second of late.
        bytes_per_s: u64,
        /// The time it had left.
        left: Duration,
    },
    /// As many reads wait as may.
    QueueFull {
        /// Reads that wait.
        waiting: usize,
        /// The bound.
        waiting_max: usize,
    },
}

impl CreditError {
    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            CreditError::Hopeless { .. } => "hopeless",
            CreditError::QueueFull { .. } => "credit_queue_full",
        }
    }
}

impl fmt::Display for CreditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CreditError::Hopeless {
                ahead_bytes,
                bytes,
                bytes_per_s,
                left,
            } => write!(
                f,
                "{bytes} bytes behind {ahead_bytes} others at {bytes_per_s} bytes/s do not come \
                 in the {} ms that are left; lower the load or raise the request's timeout",
                left.as_millis()
            ),
            CreditError::QueueFull {
                waiting,
                waiting_max,
            } => write!(
                f,
                "{waiting} of {waiting_max} reads wait for credits already; lower the load"
            ),
        }
    }
}

impl std::error::Error for CreditError {}

#[cfg(test)]
mod tests;
