//! How an attempt fails: stage, reason, and what a retry may try.

use crate::credits::CreditError;
use crate::session::{AbortReason, CommitOutcome};
use kvserve_runtime::EndReason;
use std::fmt;
use std::time::Duration;

/// Where an attempt stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Asked, not granted yet.
    Pair,
    /// Granted; waits for the prefill node to compute.
    Prefill,
    /// Reads are out.
    Pull,
    /// COMMIT is out.
    Commit,
}

impl Stage {
    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Stage::Pair => "pair",
            Stage::Prefill => "prefill",
            Stage::Pull => "pull",
            Stage::Commit => "commit",
        }
    }
}

/// What a failed attempt leaves to try (DESIGN 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// The same two nodes may do it.
    SamePair,
    /// Another prefill node may.
    OtherPair,
    /// This node should compute the prompt itself.
    Recompute,
    /// Nothing: the request ends with an error.
    Fail,
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailReason {
    /// The stage's own limit passed (PROTOCOL R4).
    StageLimit,
    /// The request's time is up.
    RequestDeadline,
    /// The prefill node has no room now.
    Busy {
        /// When to ask again, in milliseconds.
        retry_ms: u32,
    },
    /// The prefill node cannot serve this request.
    Refused(u16),
    /// The prefill node takes nothing new.
    Draining,
    /// The prefill node gave it up.
    Aborted(AbortReason),
    /// The session with the prefill node ended.
    SessionEnded,
    /// A read ended without its bytes.
    Read(EndReason),
    /// No read could be posted: slots, ring or data connection are missing.
    NoPost,
    /// A read got no place in the credit queue.
    NoCredit(CreditError),
    /// A page's bytes are not what the prefill node wrote; the page, counted within the prompt.
    Checksum(u32),
    /// COMMIT was answered, not with OK.
    CommitRefused(CommitOutcome),
    /// The prefill node has taken the lease for expired.
    Fenced,
    /// The peer broke the protocol.
    Violation(&'static str),
    /// The migration was dropped.
    Cancelled,
    /// It was not begun: this is missing.
    NotBegun(NotBegun),
    /// This node has no pages to pull into: wanted, free.
    NoPages {
        /// Pages wanted.
        wanted: usize,
        /// Pages free.
        free: usize,
    },
}

/// Why a migration could not even be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotBegun {
    /// No session with that node is up.
    NoSession,
    /// It has missed heartbeats: no new work for it.
    Suspect,
    /// It computes nothing for peers.
    NotAPrefillNode,
    /// The data connection is not there (yet).
    NoDataConnection,
    /// The prompt, the payload or the target pages are over their cap.
    TooLong,
    /// An attempt of this request with this number, or a higher one, was begun.
    OldAttempt,
    /// This node has no pool, or pulls nothing.
    NotADecodeNode,
}

impl FailReason {
    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            FailReason::StageLimit => "stage_limit",
            FailReason::RequestDeadline => "deadline_exceeded",
            FailReason::Busy { .. } => "busy",
            FailReason::Refused(_) => "refused",
            FailReason::Draining => "draining",
            FailReason::Aborted(_) => "aborted",
            FailReason::SessionEnded => "peer_lost",
            FailReason::Read(_) => "read_failed",
            FailReason::NoPost => "no_post",
            FailReason::NoCredit(error) => error.label(),
            FailReason::Checksum(_) => "checksum",
            FailReason::CommitRefused(_) => "commit_refused",
            FailReason::Fenced => "fenced",
            FailReason::Violation(_) => "violation",
            FailReason::Cancelled => "cancelled",
            FailReason::NotBegun(_) => "not_begun",
            FailReason::NoPages { .. } => "no_pages",
        }
    }

    /// What may be tried next.
    pub fn retry(self) -> Retry {
        match self {
            FailReason::RequestDeadline | FailReason::Refused(_) | FailReason::Cancelled => {
                Retry::Fail
            }
            FailReason::NoPages { .. }
            | FailReason::NotBegun(
                NotBegun::TooLong | NotBegun::NotADecodeNode | NotBegun::OldAttempt,
            ) => Retry::Recompute,
            // The data connection is made anew; the lease was whole.
            FailReason::Read(_) => Retry::SamePair,
            FailReason::StageLimit
            | FailReason::NoPost
            | FailReason::NoCredit(_)
            | FailReason::Busy { .. }
            | FailReason::Draining
            | FailReason::Aborted(_)
            | FailReason::SessionEnded
            | FailReason::Checksum(_)
            | FailReason::CommitRefused(_)
            | FailReason::Fenced
            | FailReason::Violation(_)
            | FailReason::NotBegun(
                NotBegun::NoSession
                | NotBegun::Suspect
                | NotBegun::NotAPrefillNode
                | NotBegun::NoDataConnection,
            ) => Retry::OtherPair,
        }
    }
}

/// A failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationError {
    /// Where it stood.
    pub stage: Stage,
    /// Why it failed.
    pub reason: FailReason,
    /// What may be tried next.
    pub retry: Retry,
    /// When the prefill node wants to be asked again; only with `Busy`.
    pub retry_after: Option<Duration>,
    /// For logs and error bodies.
    pub message: String,
}

impl MigrationError {
    /// An error at `stage` for `reason`.
    pub fn new(stage: Stage, reason: FailReason) -> Self {
        let said = match reason {
            FailReason::NoCredit(error) => error.to_string(),
            other => format!("{other:?}"),
        };
        let retry_after = match reason {
            FailReason::Busy { retry_ms } => Some(Duration::from_millis(retry_ms.into())),
            _ => None,
        };
        MigrationError {
            stage,
            reason,
            retry: reason.retry(),
            retry_after,
            message: format!("migration failed at {}: {said}", stage.label()),
        }
    }

    /// This node has no pages to pull into.
    pub fn no_pages(wanted: usize, free: usize) -> Self {
        MigrationError::new(Stage::Pair, FailReason::NoPages { wanted, free })
    }

    /// The peer sent something that the layer above cannot read.
    pub fn protocol(what: String) -> Self {
        let mut error = MigrationError::new(Stage::Prefill, FailReason::Violation("payload"));
        error.message = format!("migration failed at {}: {what}", error.stage.label());
        error
    }
}

impl fmt::Display for MigrationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for MigrationError {}
