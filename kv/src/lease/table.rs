//! The table of leases: the producer's events, time, and how leases end. The peer's frames are
//! in `frames`.

use super::types::{
    AskVerdict, GrantError, LeaseCounters, LeaseEffect, LeaseLimits, LeasePhase, LeaseView,
    PeerSession, ReadRefusal,
};
use crate::pool::PageId;
use crate::session::frame::{CHECKSUMS_PER_FRAME_MAX, LEASE_PAGES_MAX};
use crate::session::{AbortReason, AttemptId, CommitOutcome, Frame, RefuseReason, RequestId};
use kvserve_runtime::Nanos;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Producer {
    /// Computing, or still holding its handle.
    Live,
    /// Told to stop.
    Told,
    /// Its handle is gone.
    Gone,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) phase: LeasePhase,
    pub(super) producer: Producer,
    pub(super) lease: u64,
    pub(super) epoch: u32,
    pub(super) pages: Vec<PageId>,
    pub(super) ready: u32,
    /// Last watermark, queue heartbeat or served read.
    pub(super) moved_at: Nanos,
    pub(super) expires_at: Nanos,
    pub(super) request_deadline: Nanos,
}

pub(super) type Key = (PeerSession, AttemptId);

pub(super) struct Tombstone {
    pub(super) key: Key,
    pub(super) epoch: u32,
    pub(super) pages: u32,
    pub(super) outcome: CommitOutcome,
}

/// All leases of this node.
pub struct LeaseTable {
    pub(super) incarnation: u64,
    pub(super) limits: LeaseLimits,
    pub(super) entries: BTreeMap<Key, Entry>,
    pub(super) by_lease: BTreeMap<u64, Key>,
    pub(super) tombstones: BTreeMap<u64, Tombstone>,
    pub(super) tombstone_ends: VecDeque<(Nanos, u64)>,
    pub(super) lease_last: u64,
    pub(super) counters: LeaseCounters,
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

    /// Where an attempt stands; `None` when it is not in the table.
    pub fn phase(&self, session: PeerSession, id: AttemptId) -> Option<LeasePhase> {
        self.entries.get(&(session, id)).map(|entry| entry.phase)
    }

    /// Where the attempt that this lease was granted to stands; `None` when it is over.
    pub fn phase_of_lease(&self, lease: u64) -> Option<LeasePhase> {
        let (session, id) = self.by_lease.get(&lease)?;
        self.phase(*session, *id)
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

    // ---- time -----------------------------------------------------------------------------

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
    pub(super) fn give_up(
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
    pub(super) fn end(
        &mut self,
        now: Nanos,
        key: Key,
        outcome: CommitOutcome,
        out: &mut Vec<LeaseEffect>,
    ) {
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
pub(super) fn renewed(now: Nanos, request_deadline: Nanos, ttl: Duration) -> Nanos {
    now.after(ttl).min(request_deadline.after(ttl))
}

fn attempts_of(session: PeerSession, request: RequestId) -> std::ops::RangeInclusive<Key> {
    let at = |attempt| (session, AttemptId { request, attempt });
    at(0)..=at(u32::MAX)
}

pub(super) fn keys_of(session: PeerSession) -> std::ops::RangeInclusive<Key> {
    let at = |number: u64, attempt: u32| {
        let request = RequestId {
            incarnation: number,
            counter: number,
        };
        (session, AttemptId { request, attempt })
    };
    at(0, 0)..=at(u64::MAX, u32::MAX)
}
