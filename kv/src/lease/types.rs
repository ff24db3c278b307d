//! The words of the lease table: limits, phases, effects, refusals.

use crate::pool::PageId;
use crate::session::frame::RENEW_LIST_MAX;
use crate::session::{AttemptId, Frame, RefuseReason};
use kvserve_runtime::Nanos;
use std::time::Duration;

/// One session with a peer, numbered by the shell and never reused: what a lease is granted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerSession(pub u64);

/// Times and bounds of the table.
#[derive(Clone, Copy, Debug)]
pub struct LeaseLimits {
    /// Life of a lease since its last renewal (PROTOCOL L2).
    pub ttl: Duration,
    /// How long an answer to a fence query may take (PROTOCOL L3); also how long an aborted
    /// lease waits for its release before it asks.
    pub fence: Duration,
    /// Attempts asked for and leases held at once. One `Renew` must be able to list them.
    pub leases_max: usize,
    /// Outcomes remembered: four times the leases; the oldest goes first, and a COMMIT that
    /// asks for a forgotten one is refused, which is safe.
    pub tombstones_max: usize,
}

impl Default for LeaseLimits {
    fn default() -> Self {
        LeaseLimits {
            ttl: Duration::from_secs(10),
            fence: Duration::from_secs(2),
            leases_max: RENEW_LIST_MAX,
            tombstones_max: 4 * RENEW_LIST_MAX,
        }
    }
}

/// Where an attempt stands on the prefill side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeasePhase {
    /// The service has it; no pages yet.
    Asked,
    /// Granted, being filled.
    Building,
    /// Whole; waits for COMMIT.
    Complete,
    /// Given up; the pages wait until the peer says that it is quiet.
    Aborted,
    /// The peer was asked whether it is quiet.
    Fencing {
        /// When the session ends without an answer.
        answer_by: Nanos,
    },
    /// Over for the peer; the producer has not let go yet.
    Draining,
}

impl LeasePhase {
    /// A short stable label.
    pub fn label(self) -> &'static str {
        match self {
            LeasePhase::Asked => "asked",
            LeasePhase::Building => "building",
            LeasePhase::Complete => "complete",
            LeasePhase::Aborted => "aborted",
            LeasePhase::Fencing { .. } => "fencing",
            LeasePhase::Draining => "draining",
        }
    }
}

/// What the shell is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum LeaseEffect {
    /// Send a frame to this session.
    Send(PeerSession, Frame),
    /// Tell the producer of this attempt to stop and let go.
    CancelProducer(PeerSession, AttemptId),
    /// Nothing of the peer and nothing of the producer names these pages any more: give them to
    /// the ledger (which still waits for guards of its own, e.g. a read being served).
    Free(Vec<PageId>),
    /// End this session; its data channels must be destroyed before `session_ended` is called.
    EndSession(PeerSession, RefuseReason),
}

/// What became of an `ask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskVerdict {
    /// Hand it to the service.
    Fresh,
    /// An attempt not newer than one known: drop the frame.
    Old,
    /// The table is full.
    Full,
}

/// Why a grant was not made; the pages stay the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantError {
    /// The attempt was cancelled or its session has ended.
    Ended,
    /// It has a grant already.
    Twice,
    /// More pages than a lease may have: wanted, most.
    Pages(usize, usize),
    /// The ledger does not have them as reserved pages.
    NotReserved,
}

/// Why a read of leased pages is refused (PROTOCOL L6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRefusal {
    /// No such lease of this session.
    Unknown,
    /// The epoch has moved.
    Epoch,
    /// Beyond the watermark: asked for up to, ready.
    NotReady(u32, u32),
    /// The lease is over, or being fenced.
    Over,
}

/// Counters; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounters {
    /// Leases granted.
    pub granted: u64,
    /// Ended by COMMIT.
    pub committed: u64,
    /// Ended by RELEASE.
    pub released: u64,
    /// Ended by not being listed in a renewal.
    pub unlisted: u64,
    /// Given up by this side.
    pub aborted: u64,
    /// Fence queries sent.
    pub fences: u64,
    /// Fences not answered: sessions ended.
    pub fences_unanswered: u64,
    /// Ended with their session.
    pub session_ended: u64,
    /// COMMITs refused.
    pub commits_refused: u64,
    /// Frames about attempts or leases not known here (any more).
    pub stale_frames: u64,
}

/// One entry, for `/debug/transfers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// Whose.
    pub session: PeerSession,
    /// Which attempt.
    pub id: AttemptId,
    /// Lease number; 0 while asked.
    pub lease: u64,
    /// Where it stands.
    pub phase: LeasePhase,
    /// Pages held.
    pub pages: usize,
    /// Of which the peer may read so many.
    pub pages_ready: u32,
}
