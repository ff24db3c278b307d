//! The state machine of one attempt: every event in every phase.

use super::events::{AttemptPhase, PullEffect, PullEvent, PullLimits, PullNews};
use super::failure::{FailReason, MigrationError, Stage};
use super::runs::Runs;
use crate::session::frame::RefusedKind;
use crate::session::{AttemptId, CommitOutcome, Frame};
use kvserve_runtime::Nanos;
use std::time::Duration;

/// How often a stopping attempt is looked at again, should its quiet not be told: the ladder's
/// own bounds (20 ms grace, 250 ms drain) end far earlier.
const STOPPING_LOOK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Lease {
    number: u64,
    epoch: u32,
    pages: u32,
}

/// One attempt.
#[derive(Debug)]
pub struct Attempt {
    id: AttemptId,
    grantor: u64,
    targets: u32,
    limits: PullLimits,
    deadline: Nanos,
    phase: AttemptPhase,
    lease: Option<Lease>,
    runs: Runs,
    checksums: Vec<u64>,
    complete: bool,
    first_token_seen: bool,
    /// Limit of the present stage, moved on by signs of life.
    sign_by: Nanos,
    byte_by: Nanos,
    answer_by: Nanos,
    /// When something last moved for it: a frame of its prefill, a byte of its pages, or of what
    /// is ahead of them.
    moved_at: Nanos,
    /// How late the limit that ended it was noticed.
    limit_late: Option<Duration>,
    resend_at: Option<Nanos>,
    fence_asked: Option<u64>,
    session_up: bool,
}

impl Attempt {
    /// An attempt whose `Prefill` frame is being sent at `now` to the node of incarnation
    /// `grantor`; the prompt fills exactly `targets` pages of `page_bytes`.
    pub fn new(
        now: Nanos,
        id: AttemptId,
        grantor: u64,
        targets: u32,
        page_bytes: usize,
        deadline: Nanos,
        limits: PullLimits,
    ) -> Self {
        Attempt {
            id,
            grantor,
            targets,
            limits,
            deadline,
            phase: AttemptPhase::Asked,
            lease: None,
            runs: Runs::new(page_bytes, limits.reads_out_max),
            checksums: Vec::new(),
            complete: false,
            first_token_seen: false,
            sign_by: now.after(limits.pair),
            byte_by: now,
            answer_by: now,
            moved_at: now,
            limit_late: None,
            resend_at: None,
            fence_asked: None,
            session_up: true,
        }
    }

    /// Which attempt this is.
    pub fn id(&self) -> AttemptId {
        self.id
    }

    /// Where it stands.
    pub fn phase(&self) -> AttemptPhase {
        self.phase
    }

    /// The lease that a renewal must list: granted, and not yet released or committed. One that
    /// is not listed counts as released (PROTOCOL L2), so it is listed for as long as a read may
    /// be out; that something moves for it is what the stage limits see to: they are below any
    /// ttl, and without a sign of life, a byte of its own or of what is ahead of it in the
    /// credit queue they end the attempt.
    pub fn lease_live(&self) -> Option<u64> {
        match self.phase {
            AttemptPhase::Pulling | AttemptPhase::Committing | AttemptPhase::Stopping => {
                self.lease.map(|lease| lease.number)
            }
            AttemptPhase::Asked | AttemptPhase::Ended => None,
        }
    }

    /// How long after its limit (a stage's or the request's) it was ended, if one ended it.
    pub fn limit_late(&self) -> Option<Duration> {
        self.limit_late
    }

    /// When something last moved for it.
    pub fn moved_at(&self) -> Nanos {
        self.moved_at
    }

    /// Reads that are posted or wait for a credit.
    pub fn reads_out(&self) -> usize {
        self.runs.reads_out()
    }

    /// When the present stage ends at the latest, as far as is known now.
    pub fn limit(&self, now: Nanos) -> Nanos {
        match self.phase {
            AttemptPhase::Asked | AttemptPhase::Pulling => self.next_tick(now),
            AttemptPhase::Committing => self.answer_by.min(self.deadline),
            AttemptPhase::Stopping | AttemptPhase::Ended => self.deadline,
        }
    }

    /// Lease and epoch whose pages may be read now.
    pub fn lease_granted(&self) -> Option<(u64, u32)> {
        match self.phase {
            AttemptPhase::Pulling => self.lease.map(|lease| (lease.number, lease.epoch)),
            AttemptPhase::Asked
            | AttemptPhase::Committing
            | AttemptPhase::Stopping
            | AttemptPhase::Ended => None,
        }
    }

    /// Pages checked, of so many granted.
    pub fn progress(&self) -> (u32, u32) {
        (
            self.runs.pages_checked(),
            self.lease.map_or(self.targets, |lease| lease.pages),
        )
    }

    /// When `Tick` is due next, at the latest.
    pub fn next_tick(&self, now: Nanos) -> Nanos {
        match self.phase {
            AttemptPhase::Asked => self.sign_by.min(self.deadline),
            AttemptPhase::Pulling => {
                let mut at = self.deadline;
                if !self.complete {
                    at = at.min(self.sign_by);
                }
                if self.runs.reads_out() > 0 {
                    at = at.min(self.byte_by);
                }
                at
            }
            AttemptPhase::Committing => {
                let by = self.answer_by.min(self.deadline);
                self.resend_at.map_or(by, |at| at.min(by))
            }
            AttemptPhase::Stopping | AttemptPhase::Ended => now.after(STOPPING_LOOK),
        }
    }

    /// The stage an error at this point belongs to.
    pub fn stage(&self) -> Stage {
        match self.phase {
            AttemptPhase::Asked => Stage::Pair,
            AttemptPhase::Pulling => {
                if self.runs.pages_checked() < self.checksums.len() as u32 {
                    Stage::Pull
                } else {
                    Stage::Prefill
                }
            }
            AttemptPhase::Committing => Stage::Commit,
            AttemptPhase::Stopping | AttemptPhase::Ended => Stage::Commit,
        }
    }

    /// Takes one event.
    pub fn on(&mut self, now: Nanos, event: PullEvent, out: &mut Vec<PullEffect>) {
        match self.phase {
            AttemptPhase::Asked => self.on_asked(now, event, out),
            AttemptPhase::Pulling => self.on_pulling(now, event, out),
            AttemptPhase::Committing => self.on_committing(now, event, out),
            AttemptPhase::Stopping => self.on_stopping(event, out),
            AttemptPhase::Ended => {}
        }
    }

    fn on_asked(&mut self, now: Nanos, event: PullEvent, out: &mut Vec<PullEffect>) {
        match event {
            PullEvent::Granted {
                lease,
                epoch,
                pages,
            } => {
                self.lease = Some(Lease {
                    number: lease,
                    epoch,
                    pages,
                });
                self.phase = AttemptPhase::Pulling;
                self.sign(now);
                if pages != self.targets {
                    // Fewer would leave pages that nobody wrote; more have no place.
                    let reason = FailReason::Violation("granted other than the prompt's pages");
                    return self.fail(reason, out);
                }
                out.push(PullEffect::News(PullNews::Granted));
            }
            PullEvent::Busy { retry_ms } => self.fail(FailReason::Busy { retry_ms }, out),
            PullEvent::Refused { refusal, code } => self.fail(refused(refusal, code), out),
            PullEvent::Aborted(reason) => self.fail(FailReason::Aborted(reason), out),
            PullEvent::FirstToken(payload) => self.first_token(payload, out),
            PullEvent::Queued => self.sign(now),
            // Only possible when the grant was lost or is late: the pair limit decides.
            PullEvent::Watermark { .. }
            | PullEvent::Complete { .. }
            | PullEvent::CommitAnswer { .. } => {}
            PullEvent::FenceQuery { lease } => {
                // Granted, but we never heard of it: nothing of ours names it.
                out.push(PullEffect::Send(Frame::FenceAnswer { id: self.id, lease }));
                self.fail(FailReason::Fenced, out);
            }
            PullEvent::Cancel => self.fail(FailReason::Cancelled, out),
            PullEvent::SessionEnded => self.session_ended(out),
            PullEvent::Tick => {
                if let Some(reason) = self.overdue(now, self.sign_by) {
                    self.fail(reason, out);
                }
            }
            // Nothing has been posted.
            PullEvent::ReadDone(_)
            | PullEvent::ReadEnded(..)
            | PullEvent::NotPosted(_)
            | PullEvent::NoCredit(..)
            | PullEvent::Moved(_)
            | PullEvent::Checked { .. }
            | PullEvent::Quiet
            | PullEvent::Stuck => {}
        }
    }

    fn on_pulling(&mut self, now: Nanos, event: PullEvent, out: &mut Vec<PullEffect>) {
        match event {
            PullEvent::Watermark {
                lease,
                first,
                checksums,
            } => self.watermark(now, lease, first, &checksums, out),
            PullEvent::Complete {
                lease,
                pages,
                first,
                checksums,
            } => self.completed(now, lease, pages, first, &checksums, out),
            PullEvent::Queued => self.sign(now),
            PullEvent::FirstToken(payload) => {
                self.sign(now);
                self.first_token(payload, out);
            }
            PullEvent::ReadDone(read) => {
                if let Some(run) = self.runs.over(read) {
                    self.bytes_moved(now);
                    let from = run.first as usize;
                    out.push(PullEffect::Check {
                        first: run.first,
                        checksums: self.checksums[from..from + run.count as usize].to_vec(),
                    });
                    self.post_ready(now, out);
                }
            }
            PullEvent::ReadEnded(read, reason) => {
                if self.runs.over(read).is_some() {
                    self.fail(FailReason::Read(reason), out);
                }
            }
            PullEvent::NotPosted(read) => {
                if self.runs.over(read).is_some() {
                    self.fail(FailReason::NoPost, out);
                }
            }
            PullEvent::NoCredit(read, error) => {
                if self.runs.over(read).is_some() {
                    self.fail(FailReason::NoCredit(error), out);
                }
            }
            PullEvent::Moved(at) => self.bytes_moved(at),
            PullEvent::Checked {
                wrong: Some(page), ..
            } => self.fail(FailReason::Checksum(page), out),
            PullEvent::Checked { count, wrong: None } => {
                self.runs.checked(count);
                self.commit_if_whole(now, out);
            }
            PullEvent::Aborted(reason) => self.fail(FailReason::Aborted(reason), out),
            PullEvent::FenceQuery { lease } => self.fenced(lease, out),
            PullEvent::Cancel => self.fail(FailReason::Cancelled, out),
            PullEvent::SessionEnded => self.session_ended(out),
            PullEvent::Tick => {
                let mut limit = self.deadline;
                if !self.complete {
                    limit = limit.min(self.sign_by);
                }
                if self.runs.reads_out() > 0 {
                    limit = limit.min(self.byte_by);
                }
                if let Some(reason) = self.overdue(now, limit) {
                    self.fail(reason, out);
                }
            }
            PullEvent::Granted { .. } => {
                self.fail(FailReason::Violation("granted twice"), out);
            }
            PullEvent::Busy { .. } | PullEvent::Refused { .. } => {
                self.fail(FailReason::Violation("refused after the grant"), out);
            }
            PullEvent::CommitAnswer { .. } => {
                self.fail(FailReason::Violation("COMMIT answered, not sent"), out);
            }
            PullEvent::Quiet | PullEvent::Stuck => {}
        }
    }

    fn on_committing(&mut self, now: Nanos, event: PullEvent, out: &mut Vec<PullEffect>) {
        match event {
            PullEvent::CommitAnswer { lease, outcome } => {
                if self.lease.is_none_or(|ours| ours.number != lease) {
                    return;
                }
                match outcome {
                    // In time or not at all: past the deadline the waiter has been promised an
                    // error, and the timer that says so may be late (PROTOCOL S4).
                    CommitOutcome::Ok => match self.overdue(now, self.answer_by) {
                        Some(reason) => self.fail(reason, out),
                        None => {
                            self.phase = AttemptPhase::Ended;
                            out.push(PullEffect::News(PullNews::Committed));
                            out.push(PullEffect::Ended { free: false });
                        }
                    },
                    CommitOutcome::Unknown
                    | CommitOutcome::NotComplete
                    | CommitOutcome::Expired
                    | CommitOutcome::Aborted
                    | CommitOutcome::Released
                    | CommitOutcome::Mismatch => {
                        self.fail(FailReason::CommitRefused(outcome), out);
                    }
                }
            }
            PullEvent::FirstToken(payload) => self.first_token(payload, out),
            PullEvent::Aborted(reason) => self.fail(FailReason::Aborted(reason), out),
            PullEvent::FenceQuery { lease } => self.fenced(lease, out),
            PullEvent::Cancel => self.fail(FailReason::Cancelled, out),
            PullEvent::SessionEnded => self.session_ended(out),
            PullEvent::Tick => {
                if let Some(reason) = self.overdue(now, self.answer_by) {
                    self.fail(reason, out);
                } else if self.resend_at.is_some_and(|at| now >= at) {
                    self.resend_at = None;
                    self.send_commit(out);
                }
            }
            PullEvent::Granted { .. } | PullEvent::Busy { .. } | PullEvent::Refused { .. } => {
                self.fail(FailReason::Violation("an answer after COMMIT"), out);
            }
            // Repeats of what has been taken in.
            PullEvent::Queued
            | PullEvent::Watermark { .. }
            | PullEvent::Complete { .. }
            | PullEvent::ReadDone(_)
            | PullEvent::ReadEnded(..)
            | PullEvent::NotPosted(_)
            | PullEvent::NoCredit(..)
            | PullEvent::Moved(_)
            | PullEvent::Checked { .. }
            | PullEvent::Quiet
            | PullEvent::Stuck => {}
        }
    }

    fn on_stopping(&mut self, event: PullEvent, out: &mut Vec<PullEffect>) {
        match event {
            PullEvent::Quiet => self.end_quiet(out),
            PullEvent::Stuck => {
                // RELEASE is the fence where reads are one-sided (PROTOCOL L7), and a post that
                // was never proven over may still read the peer's pages. So neither RELEASE nor
                // an answer to FENCE? is sent: the session ends, the peer destroys its channels
                // to us first and frees its pages then (S3). Our pages are quarantined.
                if self.session_up {
                    self.session_up = false;
                    out.push(PullEffect::EndSession);
                }
                self.end_quiet(out);
            }
            PullEvent::FenceQuery { lease } => self.fence_asked = Some(lease),
            PullEvent::SessionEnded => self.session_up = false,
            // The waiter has had its answer; nothing changes it.
            PullEvent::Granted { .. }
            | PullEvent::Busy { .. }
            | PullEvent::Refused { .. }
            | PullEvent::Queued
            | PullEvent::Watermark { .. }
            | PullEvent::FirstToken(_)
            | PullEvent::Complete { .. }
            | PullEvent::Aborted(_)
            | PullEvent::CommitAnswer { .. }
            | PullEvent::ReadDone(_)
            | PullEvent::ReadEnded(..)
            | PullEvent::NotPosted(_)
            | PullEvent::NoCredit(..)
            | PullEvent::Moved(_)
            | PullEvent::Checked { .. }
            | PullEvent::Cancel
            | PullEvent::Tick => {}
        }
    }

    fn first_token(&mut self, payload: Vec<u8>, out: &mut Vec<PullEffect>) {
        // Tokens are facts: one first token per attempt, whatever the peer repeats.
        if !self.first_token_seen {
            self.first_token_seen = true;
            out.push(PullEffect::News(PullNews::FirstToken(payload)));
        }
    }

    fn watermark(
        &mut self,
        now: Nanos,
        lease: u64,
        first: u32,
        checksums: &[u64],
        out: &mut Vec<PullEffect>,
    ) {
        let Some(ours) = self.lease.filter(|ours| ours.number == lease) else {
            return;
        };
        let known = self.checksums.len();
        if first as usize > known {
            let reason = FailReason::Violation("a watermark left pages out");
            return self.fail(reason, out);
        }
        let Some(fresh) = checksums.get(known - first as usize..) else {
            return; // a repeat
        };
        if known + fresh.len() > ours.pages as usize || (self.complete && !fresh.is_empty()) {
            return self.fail(FailReason::Violation("a watermark beyond the lease"), out);
        }
        self.sign(now);
        self.checksums.extend_from_slice(fresh);
        self.post_ready(now, out);
    }

    fn completed(
        &mut self,
        now: Nanos,
        lease: u64,
        pages: u32,
        first: u32,
        checksums: &[u64],
        out: &mut Vec<PullEffect>,
    ) {
        if self.complete || self.lease.is_none_or(|ours| ours.number != lease) {
            return;
        }
        self.watermark(now, lease, first, checksums, out);
        if self.phase != AttemptPhase::Pulling {
            return; // the watermark has failed it
        }
        let all = pages == self.targets && self.checksums.len() == pages as usize;
        if !all {
            let reason = FailReason::Violation("complete, but not with all pages");
            return self.fail(reason, out);
        }
        self.complete = true;
        self.commit_if_whole(now, out);
    }

    fn post_ready(&mut self, now: Nanos, out: &mut Vec<PullEffect>) {
        let Some(lease) = self.lease else {
            return;
        };
        if self.runs.reads_out() == 0 {
            self.byte_by = now.after(self.limits.pull_silence);
        }
        while let Some((read, run)) = self.runs.next(self.checksums.len() as u32) {
            out.push(PullEffect::Post {
                read,
                first: run.first,
                count: run.count,
                lease: lease.number,
                epoch: lease.epoch,
            });
        }
    }

    fn commit_if_whole(&mut self, now: Nanos, out: &mut Vec<PullEffect>) {
        let whole = self.complete && self.runs.pages_checked() as usize == self.checksums.len();
        if !whole {
            return;
        }
        debug_assert_eq!(self.runs.pages_posted(), self.runs.pages_checked());
        if now >= self.deadline {
            return self.fail(FailReason::RequestDeadline, out);
        }
        self.phase = AttemptPhase::Committing;
        let span = self.limits.commit.min(self.deadline.since(now) / 4);
        self.answer_by = now.after(span);
        self.resend_at = Some(now.after(span / 2));
        self.send_commit(out);
        out.push(PullEffect::News(PullNews::Placed));
    }

    fn send_commit(&self, out: &mut Vec<PullEffect>) {
        if let Some(lease) = self.lease {
            out.push(PullEffect::Send(Frame::Commit {
                id: self.id,
                grantor: self.grantor,
                lease: lease.number,
                epoch: lease.epoch,
                pages: self.runs.pages_checked(),
            }));
        }
    }

    /// The prefill node has shown a sign of life.
    fn sign(&mut self, now: Nanos) {
        self.sign_by = now.after(self.limits.prefill_silence);
        self.moved_at = self.moved_at.max(now);
    }

    /// Bytes moved at `at`, which may lie in the past.
    fn bytes_moved(&mut self, at: Nanos) {
        self.byte_by = self.byte_by.max(at.after(self.limits.pull_silence));
        self.moved_at = self.moved_at.max(at);
    }

    fn overdue(&mut self, now: Nanos, limit: Nanos) -> Option<FailReason> {
        let limit = limit.min(self.deadline);
        if now >= limit {
            self.limit_late = Some(now.since(limit));
        }
        if now >= self.deadline {
            Some(FailReason::RequestDeadline)
        } else if now >= limit {
            Some(FailReason::StageLimit)
        } else {
            None
        }
    }

    fn fenced(&mut self, lease: u64, out: &mut Vec<PullEffect>) {
        self.fence_asked = Some(lease);
        self.fail(FailReason::Fenced, out);
    }

    fn session_ended(&mut self, out: &mut Vec<PullEffect>) {
        self.session_up = false;
        self.fail(FailReason::SessionEnded, out);
    }

    /// The logical end without success: the waiter is told now, the peer is told to stop
    /// computing, the reads are stopped. RELEASE follows when they are quiet.
    fn fail(&mut self, reason: FailReason, out: &mut Vec<PullEffect>) {
        let error = MigrationError::new(self.stage(), reason);
        let answered = match reason {
            FailReason::Busy { .. }
            | FailReason::Refused(_)
            | FailReason::Draining
            | FailReason::Aborted(_) => true,
            FailReason::StageLimit
            | FailReason::RequestDeadline
            | FailReason::SessionEnded
            | FailReason::Read(_)
            | FailReason::NoPost
            | FailReason::NoCredit(_)
            | FailReason::Checksum(_)
            | FailReason::CommitRefused(_)
            | FailReason::Fenced
            | FailReason::Violation(_)
            | FailReason::Cancelled
            | FailReason::NotBegun(_)
            | FailReason::NoPages { .. } => false,
        };
        let computing = match self.phase {
            AttemptPhase::Asked | AttemptPhase::Pulling => true,
            AttemptPhase::Committing | AttemptPhase::Stopping | AttemptPhase::Ended => false,
        };
        if self.session_up && computing && !answered {
            out.push(PullEffect::Send(Frame::Cancel { id: self.id }));
        }
        self.phase = AttemptPhase::Stopping;
        out.push(PullEffect::News(PullNews::Failed(error)));
        if self.runs.pages_posted() == 0 {
            self.end_quiet(out);
        } else {
            // Only the shell knows of physical ends: a read that ended by its deadline may
            // still be writing.
            out.push(PullEffect::StopReads);
        }
    }

    fn end_quiet(&mut self, out: &mut Vec<PullEffect>) {
        self.phase = AttemptPhase::Ended;
        if self.session_up {
            if let Some(lease) = self.fence_asked {
                out.push(PullEffect::Send(Frame::FenceAnswer { id: self.id, lease }));
            }
            if let Some(lease) = self.lease {
                out.push(PullEffect::Send(Frame::Release {
                    id: self.id,
                    lease: lease.number,
                    epoch: lease.epoch,
                }));
            }
        }
        out.push(PullEffect::Ended { free: true });
    }
}

fn refused(refusal: RefusedKind, code: u16) -> FailReason {
    match refusal {
        RefusedKind::Invalid => FailReason::Refused(code),
        RefusedKind::Draining => FailReason::Draining,
    }
}
