//! The lease table of a node: what it asks for, the peer's frames, reads of leased pages, time.

use super::{Key, LIVENESS, Node, RENEW};
use crate::sim::check::Invariant;
use crate::sim::context::Context;
use crate::sim::keeper::LeaseShadow;
use kvserve_kv::PageId;
use kvserve_kv::lease::{LeaseEffect, LeasePhase, LeaseTable, PeerSession};
use kvserve_kv::session::{AttemptId, CommitOutcome, Frame};
use kvserve_kv::transport::sim::Ask;
use kvserve_runtime::Nanos;

impl Node {
    /// One step of the lease table, then what it asks for.
    pub(super) fn with_leases<T>(
        &mut self,
        context: &mut Context,
        step: impl FnOnce(&mut LeaseTable, Nanos, &mut Vec<LeaseEffect>) -> T,
    ) -> T {
        let mut effects = Vec::new();
        let result = step(&mut self.leases, self.turned_at, &mut effects);
        for effect in effects {
            self.perform_lease(context, effect);
        }
        result
    }

    pub(super) fn perform_lease(&mut self, context: &mut Context, effect: LeaseEffect) {
        match effect {
            LeaseEffect::Send(number, frame) => {
                self.note_lease_frame(context, number, &frame);
                self.send(context, number, &frame);
            }
            LeaseEffect::CancelProducer(number, id) => {
                if let Some(producer) = self.producers.get_mut(&(number, id)) {
                    producer.cancelled = true;
                    producer.lets_go_at = self.turned_at.after(producer.late);
                }
            }
            LeaseEffect::Free(pages) => {
                self.note_freed(context, &pages);
                self.keeper.ledger.with(|ledger| ledger.end_lease(&pages));
            }
            LeaseEffect::EndSession(number, reason) => self.end_session(number, reason, false),
        }
    }

    /// What the peer is told is what may be read: the shadows follow the frames.
    pub(super) fn note_lease_frame(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        frame: &Frame,
    ) {
        let now = self.turned_at;
        let moment = match frame {
            Frame::Granted { .. } => Some("lease granted"),
            Frame::Watermark { .. } => Some("lease watermark"),
            Frame::Complete { .. } => Some("lease complete"),
            Frame::Aborted { .. } => Some("lease aborted"),
            Frame::FenceQuery { .. } => Some("lease fenced"),
            _ => None,
        };
        if let Some(moment) = moment {
            context.moment(self.plan.index, None, None, moment);
        }
        let mut leases = self.keeper.leases.borrow_mut();
        match frame {
            Frame::Granted { lease, .. } => {
                let known = leases.contains_key(lease);
                if !known {
                    context.broke(Invariant::I10, format!("lease {lease} granted unprepared"));
                }
            }
            Frame::Watermark {
                lease,
                first,
                checksums,
                ..
            } => {
                if let Some(shadow) = leases.get_mut(lease) {
                    if *first != shadow.ready {
                        let ready = shadow.ready;
                        let what = format!("lease {lease}: watermark from {first} after {ready}");
                        context.broke(Invariant::I12, what);
                    }
                    shadow.ready = first + checksums.len() as u32;
                    shadow.moved_at = now;
                }
            }
            Frame::Complete { lease, pages, .. } => {
                if let Some(shadow) = leases.get_mut(lease) {
                    shadow.ready = shadow.ready.max(*pages);
                    shadow.complete = true;
                    shadow.moved_at = now;
                }
            }
            Frame::Aborted { id, .. } | Frame::FenceQuery { id, .. } => {
                let of = |shadow: &&mut LeaseShadow| shadow.session == number && shadow.id == *id;
                leases.values_mut().filter(of).for_each(|s| s.over = true);
            }
            Frame::Queued { id, .. } => {
                let of = |shadow: &&mut LeaseShadow| shadow.session == number && shadow.id == *id;
                leases
                    .values_mut()
                    .filter(of)
                    .for_each(|s| s.moved_at = now);
            }
            _ => {}
        }
    }

    /// I10: nothing that could still read these pages is under way.
    pub(super) fn note_freed(&mut self, context: &mut Context, pages: &[PageId]) {
        let mut leases = self.keeper.leases.borrow_mut();
        let of = |(_, shadow): &(&u64, &mut LeaseShadow)| !shadow.freed && shadow.pages == pages;
        if let Some((lease, shadow)) = leases.iter_mut().find(of) {
            shadow.freed = true;
            if self.fabric.borrow().names_lease(self.endpoint, *lease) {
                let what = format!("lease {lease} is given back while a read of it is under way");
                context.broke(Invariant::I10, what);
            }
        }
    }

    // ---- the peer's frames --------------------------------------------------------------------

    pub(super) fn lease_pair(&self, context: &mut Context, key: Key, event: &'static str) {
        let phase = self.leases.phase(key.0, key.1);
        let phase = phase.map_or("gone", LeasePhase::label);
        context.coverage.pair("lease", phase, event);
    }

    pub(super) fn on_lease_frame(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        frame: Frame,
    ) {
        match frame {
            Frame::Commit {
                id,
                grantor,
                lease,
                epoch,
                pages,
            } => {
                self.lease_pair(context, (number, id), "commit");
                context.moment(self.plan.index, None, None, "lease commit heard");
                let mut effects = Vec::new();
                let now = self.turned_at;
                (self.leases).commit(now, number, id, grantor, lease, epoch, pages, &mut effects);
                for effect in effects {
                    if let LeaseEffect::Send(_, Frame::CommitAnswer { outcome, .. }) = &effect {
                        self.judge_answer(
                            context,
                            (number, id),
                            (grantor, lease, epoch, pages),
                            *outcome,
                        );
                    }
                    self.perform_lease(context, effect);
                }
            }
            Frame::Release { id, lease, .. } => {
                self.lease_pair(context, (number, id), "release");
                self.with_leases(context, |leases, now, out| {
                    leases.release(now, number, id, lease, out);
                });
            }
            Frame::Cancel { id } => {
                self.lease_pair(context, (number, id), "cancel");
                self.with_leases(context, |leases, now, out| {
                    leases.cancel(now, number, id, out);
                });
                self.note_over(number, id);
            }
            Frame::Renew {
                grant_highest,
                live,
            } => {
                for view in self.leases.views() {
                    if view.session == number && view.lease != 0 && view.lease <= grant_highest {
                        let listed = live.iter().any(|(_, lease)| *lease == view.lease);
                        let event = if listed {
                            "renew, listed"
                        } else {
                            "renew, not listed"
                        };
                        context.coverage.pair("lease", view.phase.label(), event);
                    }
                }
                self.with_leases(context, |leases, now, out| {
                    leases.renew(now, number, grant_highest, &live, out);
                });
            }
            Frame::FenceAnswer { id, lease } => {
                self.lease_pair(context, (number, id), "fence answer");
                self.with_leases(context, |leases, now, out| {
                    leases.fence_answer(now, number, id, lease, out);
                });
            }
            _ => {}
        }
    }

    pub(super) fn note_over(&mut self, number: PeerSession, id: AttemptId) {
        let mut leases = self.keeper.leases.borrow_mut();
        let of = |shadow: &&mut LeaseShadow| shadow.session == number && shadow.id == id;
        leases.values_mut().filter(of).for_each(|s| s.over = true);
    }

    /// L5: OK only if this very grant is whole, never given up and never fenced.
    pub(super) fn judge_answer(
        &mut self,
        context: &mut Context,
        key: Key,
        named: (u64, u64, u32, u32),
        outcome: CommitOutcome,
    ) {
        let (grantor, lease, epoch, pages) = named;
        context.coverage.hit(match outcome {
            CommitOutcome::Ok => "commit answered: ok",
            CommitOutcome::Unknown => "commit answered: unknown",
            CommitOutcome::NotComplete => "commit answered: not complete",
            CommitOutcome::Expired => "commit answered: expired",
            CommitOutcome::Aborted => "commit answered: aborted",
            CommitOutcome::Released => "commit answered: released",
            CommitOutcome::Mismatch => "commit answered: mismatch",
        });
        if outcome != CommitOutcome::Ok {
            return;
        }
        let again = context.commits_ok.contains(&(self.incarnation, lease));
        let leases = self.keeper.leases.borrow();
        let wrong = match leases.get(&lease) {
            None => Some("which was never granted".to_owned()),
            Some(_) if grantor != self.incarnation => {
                Some(format!("granted by incarnation {grantor:x}"))
            }
            Some(shadow) if (shadow.session, shadow.id) != key => Some("of another attempt".into()),
            Some(shadow) if !shadow.complete => Some("which is not complete".into()),
            Some(shadow) if shadow.ready != pages => Some(format!("with {pages} pages")),
            Some(_) if epoch != 1 => Some(format!("in epoch {epoch}")),
            Some(shadow) if !again && (shadow.over || shadow.freed) => {
                Some("which was given up, asked for or given back".into())
            }
            Some(_) => None,
        };
        drop(leases);
        if let Some(wrong) = wrong {
            context.broke(
                Invariant::I10,
                format!(
                    "{}: COMMIT OK for lease {lease}, {wrong} (L5)",
                    self.plan.name
                ),
            );
        }
        context.commits_ok.insert((self.incarnation, lease));
    }

    // ---- time, reads, ends --------------------------------------------------------------------

    /// Expires what is due; then nothing may live on without having moved (L2, L3).
    pub(super) fn tick_leases(&mut self, context: &mut Context) {
        let before = self.leases.views();
        self.with_leases(context, |leases, now, out| leases.tick(now, out));
        let now = self.turned_at;
        let slack = LIVENESS.heartbeat * 2 + RENEW;
        for view in before {
            context.coverage.pair("lease", view.phase.label(), "tick");
        }
        for view in self.leases.views() {
            let granted = matches!(view.phase, LeasePhase::Building | LeasePhase::Complete);
            let leases = self.keeper.leases.borrow();
            let Some(shadow) = leases.get(&view.lease).filter(|_| granted) else {
                continue;
            };
            let idle = now.since(shadow.moved_at);
            let over = now.since(shadow.deadline);
            drop(leases);
            let ttl = self.plan.ttl;
            if idle > ttl * 2 + slack || over > ttl + slack {
                let what = format!(
                    "lease {} lives on: nothing moved for {idle:?}, its request is over for {over:?} (L2)",
                    view.lease
                );
                context.broke(Invariant::I10, what);
            }
        }
    }

    /// Answers a read that came over a served link.
    ///
    /// # Errors
    /// The refusal's code.
    pub fn resolve(
        &mut self,
        context: &mut Context,
        now: Nanos,
        ask: &Ask,
    ) -> Result<(Vec<PageId>, u64), u32> {
        if ask.incarnation != self.incarnation {
            return Err(5);
        }
        let mut lease = ask.lease;
        // A stale key is one whose lease is over: one that lives would only be the wrong one.
        if lease != ask.posted && self.leases.phase_of_lease(lease).is_some() {
            lease = 0;
        }
        let number = PeerSession(ask.session);
        let phase = self.leases.phase_of_lease(lease);
        let phase = phase.map_or("gone", LeasePhase::label);
        context.coverage.pair("lease", phase, "read");
        let read = (self.leases).read(now, number, lease, ask.epoch, ask.first, ask.count);
        let pages = read.map_err(|_| 1u32)?.to_vec();
        if let Some(shadow) = self.keeper.leases.borrow_mut().get_mut(&lease) {
            shadow.moved_at = now;
        }
        let (token, shadow) = self.keeper.guard(&pages);
        self.served_guards.insert(shadow, token);
        Ok((pages, shadow))
    }

    pub(super) fn lease_session_ended(&mut self, context: &mut Context, number: PeerSession) {
        for view in self.leases.views() {
            if view.session == number {
                (context.coverage).pair("lease", view.phase.label(), "session ended");
            }
        }
        self.with_leases(context, |leases, now, out| {
            leases.session_ended(now, number, out);
        });
        let over: Vec<Key> = (self.producers.keys())
            .filter(|key| key.0 == number)
            .copied()
            .collect();
        for key in over {
            self.note_over(key.0, key.1);
        }
    }
}
