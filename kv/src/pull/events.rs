//! The words of an attempt: limits, events, effects, news, phases.

use super::failure::MigrationError;
use crate::credits::CreditError;
use crate::session::frame::RefusedKind;
use crate::session::{AbortReason, CommitOutcome, Frame};
use kvserve_runtime::{EndReason, Nanos};
use std::time::Duration;

/// Stage limits (PROTOCOL R4) and bounds of an attempt.
#[derive(Clone, Copy, Debug)]
pub struct PullLimits {
    /// From asking to the grant.
    pub pair: Duration,
    /// Without a watermark or a queue heartbeat.
    pub prefill_silence: Duration,
    /// Without a byte while reads are out.
    pub pull_silence: Duration,
    /// For the answer to COMMIT, at most a quarter of what is left.
    pub commit: Duration,
    /// Reads out at once: 16 of 1 MiB keep a 100 Gbit/s path busy over 1 ms of latency.
    pub reads_out_max: usize,
}

impl Default for PullLimits {
    fn default() -> Self {
        PullLimits {
            pair: Duration::from_secs(1),
            prefill_silence: Duration::from_secs(3),
            pull_silence: Duration::from_secs(1),
            commit: Duration::from_millis(500),
            reads_out_max: 16,
        }
    }
}

/// What happens to an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the frames' own fields
pub enum PullEvent {
    /// From the peer.
    Granted { lease: u64, epoch: u32, pages: u32 },
    /// From the peer.
    Busy { retry_ms: u32 },
    /// From the peer.
    Refused { refusal: RefusedKind, code: u16 },
    /// From the peer.
    Queued,
    /// From the peer.
    Watermark {
        lease: u64,
        first: u32,
        checksums: Vec<u64>,
    },
    /// From the peer.
    FirstToken(Vec<u8>),
    /// From the peer.
    Complete {
        lease: u64,
        pages: u32,
        first: u32,
        checksums: Vec<u64>,
    },
    /// From the peer.
    Aborted(AbortReason),
    /// From the peer.
    CommitAnswer { lease: u64, outcome: CommitOutcome },
    /// From the peer.
    FenceQuery { lease: u64 },
    /// A posted read has all its bytes in place.
    ReadDone(u64),
    /// A posted read ended otherwise.
    ReadEnded(u64, EndReason),
    /// A read could not be posted.
    NotPosted(u64),
    /// A read got no place in the credit queue.
    NoCredit(u64, CreditError),
    /// Bytes last moved at this time: of this transfer, or of one ahead of it (PROTOCOL L2). Told
    /// before a `Tick`, and when a read was posted again.
    Moved(Nanos),
    /// These pages were compared with their checksums; the first that differs, if any.
    Checked { count: u32, wrong: Option<u32> },
    /// The migration was dropped.
    Cancel,
    /// The session ended.
    SessionEnded,
    /// No post names the target pages any more.
    Quiet,
    /// Nor ever will anybody know: a channel could not be proven quiet, and the pages that its
    /// posts name are quarantined.
    Stuck,
    /// Time has passed.
    Tick,
}

/// News for whoever waits for the migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullNews {
    /// The prefill node has reserved the pages.
    Granted,
    /// The first token.
    FirstToken(Vec<u8>),
    /// All pages are in place and checked; COMMIT is under way.
    Placed,
    /// COMMIT was answered OK.
    Committed,
    /// It failed. The last news.
    Failed(MigrationError),
}

/// What the shell is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullEffect {
    /// Send a frame on the session.
    Send(Frame),
    /// Post a read of these pages.
    Post {
        /// Its number in this attempt.
        read: u64,
        /// First page, counted within the prompt.
        first: u32,
        /// How many.
        count: u32,
        /// Lease and epoch to name.
        lease: u64,
        /// Lease and epoch to name.
        epoch: u32,
    },
    /// Compare placed pages with these checksums and say `Checked`.
    Check {
        /// First page, counted within the prompt.
        first: u32,
        /// One for each page.
        checksums: Vec<u64>,
    },
    /// Cancel all reads that are out and all checks; say `Quiet` when no post names a target.
    StopReads,
    /// Tell the waiter.
    News(PullNews),
    /// End the session with the peer: see `Attempt`'s way out when stuck.
    EndSession,
    /// The attempt is over. `free`: give the target pages back to the ledger; otherwise they
    /// are the waiter's.
    Ended {
        /// Whether the targets are to be freed.
        free: bool,
    },
}

/// Where an attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptPhase {
    /// The `Prefill` frame is out.
    Asked,
    /// Granted.
    Pulling,
    /// COMMIT is out.
    Committing,
    /// Failed or cancelled; reads may still be out.
    Stopping,
    /// Over.
    Ended,
}

impl AttemptPhase {
    /// A short stable label.
    pub fn label(self) -> &'static str {
        match self {
            AttemptPhase::Asked => "asked",
            AttemptPhase::Pulling => "pulling",
            AttemptPhase::Committing => "committing",
            AttemptPhase::Stopping => "stopping",
            AttemptPhase::Ended => "ended",
        }
    }
}
