//! The table of leases and every event on it.

use crate::pool::PageId;
use crate::session::frame::{CHECKSUMS_PER_FRAME_MAX, LEASE_PAGES_MAX, RENEW_LIST_MAX};
use crate::session::{AbortReason, AttemptId, CommitOutcome, Frame, RefuseReason, RequestId};
use kvserve_runtime::Nanos;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Producer {
    /// Computing, or still holding its handle.
    Live,
    /// Told to stop.
    Told,
    /// Its handle is gone.
    Gone,
}

#[derive(Debug)]
struct Entry {
    phase: LeasePhase,
    producer: Producer,
    lease: u64,
    epoch: u32,
    pages: Vec<PageId>,
    ready: u32,
    /// Last watermark, queue heartbeat or served read.
    moved_at: Nanos,
    expires_at: Nanos,
    request_deadline: Nanos,
}

type Key = (PeerSession, AttemptId);

struct Tombstone {
    key: Key,
    epoch: u32,
    pages: u32,
    outcome: CommitOutcome,
}

/// All leases of this node.
pub struct LeaseTable {
    incarnation: u64,
    limits: LeaseLimits,
    entries: BTreeMap<Key, Entry>,
    by_lease: BTreeMap<u64, Key>,
    tombstones: BTreeMap<u64, Tombstone>,
    tombstone_ends: VecDeque<(Nanos, u64)>,
    lease_last: u64,
    counters: LeaseCounters,
}

impl LeaseTable {
    /// An empty table of the node with this incarnation.
    pub fn new(incarnation: u64, limits: LeaseLimits) -> Self {
        LeaseTable {
            incarnation,
            limits,
            entries: BTreeMap::new(),
            by_lease: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            tombstone_ends: VecDeque::new(),
            lease_last: 0,
            counters: LeaseCounters::default(),
        }
    }

    /// Counters since the start.
    pub fn counters(&self) -> LeaseCounters {
        self.counters
    }

    /// Entries, the lingering ones included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is asked for or leased.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every entry.
    pub fn views(&self) -> Vec<LeaseView> {
        self.entries
            .iter()
            .map(|((session, id), entry)| LeaseView {
                session: *session,
                id: *id,
                lease: entry.lease,
                phase: entry.phase,
                pages: entry.pages.len(),
                pages_ready: entry.ready,
            })
            .collect()
    }

    // ---- the producer's side ------------------------------------------------------------

    /// A `Prefill` frame came. A higher attempt of the same request cancels the lower ones.
    pub fn ask(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        deadline: Nanos,
        out: &mut Vec<LeaseEffect>,
    ) -> AskVerdict {
        let tries = attempts_of(session, id.request);
        let newest = self.entries.range(tries.clone()).next_back();
        if newest.is_some_and(|((_, known), _)| known.attempt >= id.attempt) {
            self.counters.stale_frames += 1;
            return AskVerdict::Old;
        }
        let older: Vec<Key> = self.entries.range(tries).map(|(key, _)| *key).collect();
        for key in older {
            self.give_up(now, key, Some(AbortReason::LaterAttempt), out);
        }
        if self.entries.len() >= self.limits.leases_max {
            return AskVerdict::Full;
        }
        self.entries.insert(
            (session, id),
            Entry {
                phase: LeasePhase::Asked,
                producer: Producer::Live,
                lease: 0,
                epoch: 0,
                pages: Vec::new(),
                ready: 0,
                moved_at: now,
                expires_at: deadline.after(self.limits.ttl),
                request_deadline: deadline,
            },
        );
        AskVerdict::Fresh
    }

    /// The service did not take an asked attempt (the shell has answered the peer).
    pub fn refused(&mut self, session: PeerSession, id: AttemptId) {
        let key = (session, id);
        if let Some(entry) = self.entries.get(&key) {
            match entry.phase {
                LeasePhase::Asked | LeasePhase::Draining if entry.pages.is_empty() => {
                    self.entries.remove(&key);
                }
                LeasePhase::Asked
                | LeasePhase::Building
                | LeasePhase::Complete
                | LeasePhase::Aborted
                | LeasePhase::Fencing { .. }
                | LeasePhase::Draining => {}
            }
        }
    }

    /// The service has reserved all pages of the prompt (PROTOCOL L1). From an `Ok` on the
    /// pages are the table's until it frees them.
    ///
    /// # Errors
    /// [`GrantError`]; the pages stay the caller's.
    pub fn grant(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        pages: &[PageId],
        out: &mut Vec<LeaseEffect>,
    ) -> Result<u64, GrantError> {
        if pages.len() > LEASE_PAGES_MAX {
            return Err(GrantError::Pages(pages.len(), LEASE_PAGES_MAX));
        }
        let key = (session, id);
        let entry = self.entries.get_mut(&key).ok_or(GrantError::Ended)?;
        match entry.phase {
            LeasePhase::Asked => {}
            LeasePhase::Building | LeasePhase::Complete => return Err(GrantError::Twice),
            LeasePhase::Aborted | LeasePhase::Fencing { .. } | LeasePhase::Draining => {
                return Err(GrantError::Ended);
            }
        }
        self.lease_last += 1;
        entry.phase = LeasePhase::Building;
        entry.lease = self.lease_last;
        entry.epoch = 1;
        entry.pages = pages.to_vec();
        entry.moved_at = now;
        entry.expires_at = renewed(now, entry.request_deadline, self.limits.ttl);
        self.by_lease.insert(entry.lease, key);
        self.counters.granted += 1;
        out.push(LeaseEffect::Send(
            session,
            Frame::Granted {
                id,
                lease: entry.lease,
                epoch: entry.epoch,
                pages: pages.len() as u32,
            },
        ));
        Ok(entry.lease)
    }

    /// The attempt waits in the engine's queue: a sign of life.
    pub fn queued(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        ahead: u32,
        out: &mut Vec<LeaseEffect>,
    ) {
        let Some(entry) = self.entries.get_mut(&(session, id)) else {
            return;
        };
        match entry.phase {
            LeasePhase::Asked | LeasePhase::Building => {
                entry.moved_at = now;
                out.push(LeaseEffect::Send(session, Frame::Queued { id, ahead }));
            }
            LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. }
            | LeasePhase::Draining => {}
        }
    }

    /// The pages after the last watermark are ready, as many as there are checksums. Says
    /// whether the lease still lives.
    pub fn watermark(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        checksums: &[u64],
        out: &mut Vec<LeaseEffect>,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&(session, id)) else {
            return false;
        };
        match entry.phase {
            LeasePhase::Building => {
                let room = entry.pages.len() - entry.ready as usize;
                debug_assert!(checksums.len() <= room, "watermark beyond the lease");
                for chunk in checksums[..checksums.len().min(room)].chunks(CHECKSUMS_PER_FRAME_MAX)
                {
                    out.push(LeaseEffect::Send(
                        session,
                        Frame::Watermark {
                            id,
                            lease: entry.lease,
                            first: entry.ready,
                            checksums: chunk.to_vec(),
                        },
                    ));
                    entry.ready += chunk.len() as u32;
                }
                entry.moved_at = now;
                true
            }
            LeasePhase::Asked => false,
            LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. }
            | LeasePhase::Draining => false,
        }
    }

    /// The prefill is whole: the last pages' checksums, and the tokens in the last page. The
    /// prompt may have filled fewer pages than were granted, never more.
    pub fn complete(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        checksums: &[u64],
        tail_tokens: u32,
        out: &mut Vec<LeaseEffect>,
    ) -> bool {
        let most = checksums.len().saturating_sub(CHECKSUMS_PER_FRAME_MAX);
        let (early, last) = checksums.split_at(most);
        if !early.is_empty() && !self.watermark(now, session, id, early, out) {
            return false;
        }
        let Some(entry) = self.entries.get_mut(&(session, id)) else {
            return false;
        };
        match entry.phase {
            LeasePhase::Building => {
                let first = entry.ready;
                entry.ready = (first + last.len() as u32).min(entry.pages.len() as u32);
                entry.phase = LeasePhase::Complete;
                entry.moved_at = now;
                out.push(LeaseEffect::Send(
                    session,
                    Frame::Complete {
                        id,
                        lease: entry.lease,
                        pages: entry.ready,
                        tail_tokens,
                        first,
                        checksums: last.to_vec(),
                    },
                ));
                true
            }
            LeasePhase::Asked
            | LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. }
            | LeasePhase::Draining => false,
        }
    }

    /// This side gives the attempt up.
    pub fn abort(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        reason: AbortReason,
        out: &mut Vec<LeaseEffect>,
    ) {
        self.give_up(now, (session, id), Some(reason), out);
    }

    /// The producer's handle is gone: it computes nothing for this attempt any more.
    pub fn producer_gone(
        &mut self,
        session: PeerSession,
        id: AttemptId,
        out: &mut Vec<LeaseEffect>,
    ) {
        let key = (session, id);
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        entry.producer = Producer::Gone;
        match entry.phase {
            LeasePhase::Draining => self.remove(key, out),
            LeasePhase::Asked
            | LeasePhase::Building
            | LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. } => {}
        }
    }

    /// Whether the attempt is still wanted by the peer and by this table.
    pub fn is_live(&self, session: PeerSession, id: AttemptId) -> bool {
        self.entries
            .get(&(session, id))
            .is_some_and(|entry| match entry.phase {
                LeasePhase::Asked | LeasePhase::Building | LeasePhase::Complete => true,
                LeasePhase::Aborted | LeasePhase::Fencing { .. } | LeasePhase::Draining => false,
            })
    }

    /// The pages that `first .. first + count` of a lease are, if this session may read them.
    ///
    /// # Errors
    /// [`ReadRefusal`].
    pub fn read(
        &mut self,
        now: Nanos,
        session: PeerSession,
        lease: u64,
        epoch: u32,
        first: u32,
        count: u32,
    ) -> Result<&[PageId], ReadRefusal> {
        let key = self.by_lease.get(&lease).ok_or(ReadRefusal::Unknown)?;
        if key.0 != session {
            return Err(ReadRefusal::Unknown);
        }
        let entry = self.entries.get_mut(key).ok_or(ReadRefusal::Unknown)?;
        match entry.phase {
            LeasePhase::Building | LeasePhase::Complete => {}
            LeasePhase::Asked
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. }
            | LeasePhase::Draining => return Err(ReadRefusal::Over),
        }
        if entry.epoch != epoch {
            return Err(ReadRefusal::Epoch);
        }
        let end = first.saturating_add(count);
        if end > entry.ready {
            return Err(ReadRefusal::NotReady(end, entry.ready));
        }
        entry.moved_at = now;
        Ok(&entry.pages[first as usize..end as usize])
    }

    // ---- the peer's frames --------------------------------------------------------------

    /// COMMIT (PROTOCOL L5): the answer, and the end of the lease if it is OK.
    #[allow(clippy::too_many_arguments)] // the frame's own fields
    pub fn commit(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        grantor: u64,
        lease: u64,
        epoch: u32,
        pages: u32,
        out: &mut Vec<LeaseEffect>,
    ) {
        let outcome = self.judge(now, session, id, grantor, lease, epoch, pages);
        let live = self.by_lease.contains_key(&lease);
        out.push(LeaseEffect::Send(
            session,
            Frame::CommitAnswer { id, lease, outcome },
        ));
        match outcome {
            CommitOutcome::Ok if live => {
                self.counters.committed += 1;
                self.end(now, (session, id), CommitOutcome::Ok, out);
            }
            CommitOutcome::Ok => {}
            CommitOutcome::Unknown
            | CommitOutcome::NotComplete
            | CommitOutcome::Expired
            | CommitOutcome::Aborted
            | CommitOutcome::Released
            | CommitOutcome::Mismatch => self.counters.commits_refused += 1,
        }
    }

    #[allow(clippy::too_many_arguments)] // the frame's own fields
    fn judge(
        &self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        grantor: u64,
        lease: u64,
        epoch: u32,
        pages: u32,
    ) -> CommitOutcome {
        if grantor != self.incarnation {
            return CommitOutcome::Mismatch;
        }
        let key = (session, id);
        if let Some(tombstone) = self.tombstones.get(&lease) {
            return match tombstone.outcome {
                _ if tombstone.key != key => CommitOutcome::Unknown,
                CommitOutcome::Ok if tombstone.epoch != epoch || tombstone.pages != pages => {
                    CommitOutcome::Mismatch
                }
                outcome => outcome,
            };
        }
        if self.by_lease.get(&lease) != Some(&key) {
            return CommitOutcome::Unknown;
        }
        let Some(entry) = self.entries.get(&key) else {
            return CommitOutcome::Unknown;
        };
        match entry.phase {
            LeasePhase::Asked => CommitOutcome::Unknown,
            LeasePhase::Building => CommitOutcome::NotComplete,
            LeasePhase::Aborted => CommitOutcome::Aborted,
            LeasePhase::Fencing { .. } => CommitOutcome::Expired,
            LeasePhase::Draining => CommitOutcome::Unknown,
            LeasePhase::Complete if now >= entry.expires_at => CommitOutcome::Expired,
            LeasePhase::Complete if entry.epoch != epoch || entry.ready != pages => {
                CommitOutcome::Mismatch
            }
            LeasePhase::Complete => CommitOutcome::Ok,
        }
    }

    /// RELEASE (PROTOCOL L7): no post of the peer names the lease. Always answered.
    pub fn release(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        lease: u64,
        out: &mut Vec<LeaseEffect>,
    ) {
        out.push(LeaseEffect::Send(
            session,
            Frame::ReleaseAnswer { id, lease },
        ));
        let key = (session, id);
        if self.by_lease.get(&lease) == Some(&key) {
            self.counters.released += 1;
            self.end(now, key, CommitOutcome::Released, out);
        } else if !self.tombstones.contains_key(&lease) {
            self.counters.stale_frames += 1;
        }
    }

    /// The peer wants nothing more computed; leased pages wait for its release.
    pub fn cancel(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        out: &mut Vec<LeaseEffect>,
    ) {
        if self.entries.contains_key(&(session, id)) {
            self.give_up(now, (session, id), None, out);
        } else {
            self.counters.stale_frames += 1;
        }
    }

    /// The peer's list of live leases (PROTOCOL L2). A lease of this session granted up to
    /// `grant_highest` and not listed counts as released.
    pub fn renew(
        &mut self,
        now: Nanos,
        session: PeerSession,
        grant_highest: u64,
        live: &[(AttemptId, u64)],
        out: &mut Vec<LeaseEffect>,
    ) {
        let listed: BTreeSet<u64> = live.iter().map(|(_, lease)| *lease).collect();
        let mut unlisted = Vec::new();
        let ttl = self.limits.ttl;
        for (key, entry) in self.entries.range_mut(keys_of(session)) {
            match entry.phase {
                LeasePhase::Asked | LeasePhase::Draining => continue,
                LeasePhase::Building
                | LeasePhase::Complete
                | LeasePhase::Aborted
                | LeasePhase::Fencing { .. } => {}
            }
            if entry.lease > grant_highest {
                continue;
            }
            if !listed.contains(&entry.lease) {
                unlisted.push(*key);
                continue;
            }
            match entry.phase {
                LeasePhase::Building | LeasePhase::Complete => {
                    if now < entry.expires_at && now.since(entry.moved_at) <= ttl {
                        entry.expires_at = renewed(now, entry.request_deadline, ttl);
                    }
                }
                // Nothing renews what is given up or being asked for.
                LeasePhase::Asked
                | LeasePhase::Aborted
                | LeasePhase::Fencing { .. }
                | LeasePhase::Draining => {}
            }
        }
        for key in unlisted {
            self.counters.unlisted += 1;
            self.end(now, key, CommitOutcome::Released, out);
        }
    }

    /// The peer says that nothing of it names the lease.
    pub fn fence_answer(
        &mut self,
        now: Nanos,
        session: PeerSession,
        id: AttemptId,
        lease: u64,
        out: &mut Vec<LeaseEffect>,
    ) {
        let key = (session, id);
        let ours = self.by_lease.get(&lease) == Some(&key);
        let Some(entry) = self.entries.get(&key).filter(|_| ours) else {
            self.counters.stale_frames += 1;
            return;
        };
        match entry.phase {
            LeasePhase::Fencing { .. } => self.end(now, key, CommitOutcome::Expired, out),
            // An answer that was not asked for proves nothing about later reads.
            LeasePhase::Asked
            | LeasePhase::Building
            | LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Draining => self.counters.stale_frames += 1,
        }
    }

    /// The session is over and this node's data channels to it are destroyed: nothing can read
    /// its leases any more.
    pub fn session_ended(&mut self, now: Nanos, session: PeerSession, out: &mut Vec<LeaseEffect>) {
        let keys: Vec<Key> = self
            .entries
            .range(keys_of(session))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            self.counters.session_ended += 1;
            self.end(now, key, CommitOutcome::Expired, out);
        }
    }

    /// Expires what is due. Call it at least every 200 ms, and first thing after a long sleep.
    pub fn tick(&mut self, now: Nanos, out: &mut Vec<LeaseEffect>) {
        while let Some((ends, lease)) = self.tombstone_ends.front().copied() {
            if ends > now && self.tombstone_ends.len() <= self.limits.tombstones_max {
                break;
            }
            self.tombstone_ends.pop_front();
            self.tombstones.remove(&lease);
        }
        let mut asked_too_long = Vec::new();
        let mut unanswered = BTreeSet::new();
        for ((session, id), entry) in &mut self.entries {
            match entry.phase {
                LeasePhase::Draining => {}
                LeasePhase::Asked => {
                    if now >= entry.request_deadline {
                        asked_too_long.push((*session, *id));
                    }
                }
                LeasePhase::Building | LeasePhase::Complete | LeasePhase::Aborted => {
                    if now >= entry.expires_at {
                        entry.phase = LeasePhase::Fencing {
                            answer_by: now.after(self.limits.fence),
                        };
                        self.counters.fences += 1;
                        tell(entry, *session, *id, out);
                        out.push(LeaseEffect::Send(
                            *session,
                            Frame::FenceQuery {
                                id: *id,
                                lease: entry.lease,
                            },
                        ));
                    }
                }
                LeasePhase::Fencing { answer_by } => {
                    if now >= answer_by {
                        unanswered.insert(*session);
                        // Said once; what is left ends with the session.
                        entry.phase = LeasePhase::Fencing {
                            answer_by: now.after(self.limits.ttl),
                        };
                    }
                }
            }
        }
        for key in asked_too_long {
            self.give_up(now, key, Some(AbortReason::Deadline), out);
        }
        for session in unanswered {
            self.counters.fences_unanswered += 1;
            out.push(LeaseEffect::EndSession(
                session,
                RefuseReason::FenceUnanswered,
            ));
        }
    }

    // ---- ends ---------------------------------------------------------------------------

    /// Stops an attempt from this side or on the peer's wish (`say` = `None`). Leased pages
    /// wait for the release, their epoch has moved.
    fn give_up(
        &mut self,
        now: Nanos,
        key: Key,
        say: Option<AbortReason>,
        out: &mut Vec<LeaseEffect>,
    ) {
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        let (session, id) = key;
        match entry.phase {
            LeasePhase::Asked => {
                if let Some(reason) = say {
                    self.counters.aborted += 1;
                    out.push(LeaseEffect::Send(session, Frame::Aborted { id, reason }));
                }
                self.end(now, key, CommitOutcome::Aborted, out);
            }
            LeasePhase::Building | LeasePhase::Complete => {
                entry.phase = LeasePhase::Aborted;
                entry.epoch += 1;
                entry.expires_at = now.after(self.limits.fence);
                tell(entry, session, id, out);
                self.counters.aborted += 1;
                if let Some(reason) = say {
                    out.push(LeaseEffect::Send(session, Frame::Aborted { id, reason }));
                }
            }
            LeasePhase::Aborted | LeasePhase::Fencing { .. } | LeasePhase::Draining => {}
        }
    }

    /// The lease is over for the peer: a tombstone is left, the pages go free as soon as the
    /// producer has let go as well.
    fn end(&mut self, now: Nanos, key: Key, outcome: CommitOutcome, out: &mut Vec<LeaseEffect>) {
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        match entry.phase {
            LeasePhase::Draining => return,
            LeasePhase::Asked
            | LeasePhase::Building
            | LeasePhase::Complete
            | LeasePhase::Aborted
            | LeasePhase::Fencing { .. } => {}
        }
        entry.phase = LeasePhase::Draining;
        if entry.lease != 0 {
            self.by_lease.remove(&entry.lease);
            let tombstone = Tombstone {
                key,
                epoch: entry.epoch,
                pages: entry.ready,
                outcome,
            };
            self.tombstones.insert(entry.lease, tombstone);
            self.tombstone_ends
                .push_back((now.after(self.limits.ttl * 2), entry.lease));
        }
        tell(entry, key.0, key.1, out);
        match entry.producer {
            Producer::Gone => self.remove(key, out),
            Producer::Live | Producer::Told => {}
        }
    }

    fn remove(&mut self, key: Key, out: &mut Vec<LeaseEffect>) {
        if let Some(entry) = self.entries.remove(&key)
            && !entry.pages.is_empty()
        {
            out.push(LeaseEffect::Free(entry.pages));
        }
    }
}

/// Tells a producer once that it computes for nobody.
fn tell(entry: &mut Entry, session: PeerSession, id: AttemptId, out: &mut Vec<LeaseEffect>) {
    match entry.producer {
        Producer::Live => {
            entry.producer = Producer::Told;
            out.push(LeaseEffect::CancelProducer(session, id));
        }
        Producer::Told | Producer::Gone => {}
    }
}

/// A renewal reaches at most one ttl beyond the request's own deadline (PROTOCOL L2).
fn renewed(now: Nanos, request_deadline: Nanos, ttl: Duration) -> Nanos {
    now.after(ttl).min(request_deadline.after(ttl))
}

fn attempts_of(session: PeerSession, request: RequestId) -> std::ops::RangeInclusive<Key> {
    let at = |attempt| (session, AttemptId { request, attempt });
    at(0)..=at(u32::MAX)
}

fn keys_of(session: PeerSession) -> std::ops::RangeInclusive<Key> {
    let at = |number: u64, attempt: u32| {
        let request = RequestId {
            incarnation: number,
            counter: number,
        };
        (session, AttemptId { request, attempt })
    };
    at(0, 0)..=at(u64::MAX, u32::MAX)
}
