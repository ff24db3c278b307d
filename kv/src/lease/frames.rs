//! What the peer's frames do to the table (PROTOCOL L2, L3, L5, L7).

use super::table::{Key, LeaseTable, keys_of, renewed};
use super::types::{LeaseEffect, LeasePhase, PeerSession};
use crate::session::{AttemptId, CommitOutcome, Frame};
use kvserve_runtime::Nanos;
use std::collections::BTreeSet;

impl LeaseTable {
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
}
