//! The prefill side: the lease table, the producer behind each attempt, reads of leased pages.

use super::engine::Owner;
use super::{Key, LEASES, LIVENESS, Node, RENEW};
use crate::engine::{SamplingParams, SequenceEvent};
use crate::node::payload;
use crate::scheduler::{PagesFrom, SequenceId, SequenceSpec};
use crate::sim::check::Invariant;
use crate::sim::context::Context;
use crate::sim::keeper::LeaseShadow;
use crate::sim::model::PAGE_TOKENS;
use kvserve_kv::PageId;
use kvserve_kv::checksum::checksum;
use kvserve_kv::lease::{AskVerdict, LeaseEffect, LeasePhase, LeaseTable, PeerSession};
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::session::{AbortReason, AttemptId, CommitOutcome, Frame};
use kvserve_kv::transport::sim::Ask;
use kvserve_runtime::{Deadline, Nanos};
use std::time::Duration;

/// When a busy node asks a peer to come again.
const BUSY_RETRY_MS: u32 = 20;

/// Pages hashed and published at once.
const HASH_PAGES_MAX: usize = 2;

/// At most one queue heartbeat per attempt in this time.
const QUEUED_EVERY: Duration = Duration::from_millis(300);

/// A prefill for a peer and the publishing of its pages.
pub struct Producer {
    sequence: Option<SequenceId>,
    pages: Vec<PageId>,
    prompt: usize,
    ready: usize,
    hashed: usize,
    tail_tokens: Option<u32>,
    /// The service has let go; what is ready is still being published.
    gone: bool,
    cancelled: bool,
    queued_at: Nanos,
}

impl Producer {
    fn has_work(&self) -> bool {
        self.cancelled || self.hashed < self.ready || self.tail_tokens.is_some()
    }
}

impl Node {
    /// One step of the lease table, then what it asks for.
    fn with_leases<T>(
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

    fn perform_lease(&mut self, context: &mut Context, effect: LeaseEffect) {
        match effect {
            LeaseEffect::Send(number, frame) => {
                self.note_lease_frame(context, number, &frame);
                self.send(context, number, &frame);
            }
            LeaseEffect::CancelProducer(number, id) => {
                if let Some(producer) = self.producers.get_mut(&(number, id)) {
                    producer.cancelled = true;
                }
            }
            LeaseEffect::Free(pages) => {
                self.note_freed(context, &pages);
                (self.keeper.ledger).with(|ledger| ledger.end_lease(&pages));
            }
            LeaseEffect::EndSession(number, reason) => self.end_session(number, reason, false),
        }
    }

    /// What the peer is told is what may be read: the shadows follow the frames.
    fn note_lease_frame(&mut self, context: &mut Context, number: PeerSession, frame: &Frame) {
        let now = self.turned_at;
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
    fn note_freed(&mut self, context: &mut Context, pages: &[PageId]) {
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

    // ---- a peer's prompt ----------------------------------------------------------------------

    pub(super) fn on_prefill(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        id: AttemptId,
        left_ns: u64,
        prompt: Vec<u32>,
        sampling: &[u8],
    ) {
        let named = |s: &super::Session| s.identity.incarnation == id.request.incarnation;
        if !self.sessions.get(&number).is_some_and(named) {
            return;
        }
        let now = self.turned_at;
        let deadline = Deadline::after(now, Duration::from_nanos(left_ns));
        let verdict = self.with_leases(context, |leases, now, out| {
            leases.ask(now, number, id, deadline.at(), out)
        });
        match verdict {
            AskVerdict::Fresh => {}
            AskVerdict::Old => return,
            AskVerdict::Full => {
                let retry_ms = 100;
                return self.send(context, number, &Frame::Busy { id, retry_ms });
            }
        }
        let taken = payload::decode_sampling(sampling).is_ok_and(|sampling| {
            self.take_prompt(context, (number, id), prompt, sampling, deadline)
        });
        if !taken {
            self.leases.refused(number, id);
            if self.leases.is_live(number, id) {
                self.with_leases(context, |leases, now, out| {
                    leases.abort(now, number, id, AbortReason::Engine, out);
                });
            } else {
                let retry_ms = BUSY_RETRY_MS;
                self.send(context, number, &Frame::Busy { id, retry_ms });
            }
            self.producer_gone(context, (number, id));
        }
    }

    fn take_prompt(
        &mut self,
        context: &mut Context,
        key: Key,
        prompt: Vec<u32>,
        sampling: SamplingParams,
        deadline: Deadline,
    ) -> bool {
        let (number, id) = key;
        let tokens = prompt.len();
        let wanted = tokens.div_ceil(PAGE_TOKENS);
        let Some(pages) = self.keeper.reserve(wanted, AllocateAs::Building) else {
            return false;
        };
        let spec = SequenceSpec {
            tokens: prompt,
            new_tokens_max: 1,
            stop_token_ids: Vec::new(),
            sampling,
            deadline,
            pages: PagesFrom::Lease(pages.clone()),
        };
        let ledger = self.keeper.ledger.clone();
        let Some(sequence) = self.engine.submit(spec, Owner::Prefill(key)) else {
            ledger.with(|ledger| ledger.free(&pages));
            return false;
        };
        let leased = ledger.with(|ledger| ledger.lease(&pages));
        debug_assert!(leased.is_ok(), "{leased:?}");
        let mut effects = Vec::new();
        let granted = self
            .leases
            .grant(self.turned_at, number, id, &pages, &mut effects);
        match granted {
            Ok(lease) => {
                let shadow = LeaseShadow {
                    session: number,
                    id,
                    pages: pages.clone(),
                    ready: 0,
                    freed: false,
                    complete: false,
                    over: false,
                    moved_at: self.turned_at,
                    deadline: deadline.at(),
                };
                self.keeper.leases.borrow_mut().insert(lease, shadow);
                (self.fabric.borrow_mut()).export(self.endpoint, lease, pages.clone());
            }
            Err(_) => {
                self.engine.remove(&self.keeper, sequence);
                ledger.with(|ledger| ledger.end_lease(&pages));
                return false;
            }
        }
        let producer = Producer {
            sequence: Some(sequence),
            pages,
            prompt: tokens,
            ready: 0,
            hashed: 0,
            tail_tokens: None,
            gone: false,
            cancelled: false,
            queued_at: Nanos(0),
        };
        self.producers.insert(key, producer);
        for effect in effects {
            self.perform_lease(context, effect);
        }
        true
    }

    /// The producer's handle is dropped.
    fn producer_gone(&mut self, context: &mut Context, key: Key) {
        if let Some(producer) = self.producers.get_mut(&key) {
            producer.gone = true;
            if let Some(sequence) = producer.sequence.take() {
                self.engine.remove(&self.keeper, sequence);
            }
            if !producer.has_work() || producer.cancelled {
                self.producers.remove(&key);
            }
        }
        self.with_leases(context, |leases, _, out| {
            leases.producer_gone(key.0, key.1, out)
        });
    }

    pub(super) fn on_producer_event(
        &mut self,
        context: &mut Context,
        key: Key,
        event: SequenceEvent,
    ) {
        let Some(producer) = self.producers.get_mut(&key) else {
            return;
        };
        match event {
            SequenceEvent::Computed(tokens) => {
                producer.ready = producer.ready.max(tokens / PAGE_TOKENS);
            }
            SequenceEvent::Token(sampled, _) => {
                producer.sequence = None;
                producer.ready = producer.pages.len();
                let tail = producer.prompt - (producer.pages.len() - 1) * PAGE_TOKENS;
                producer.tail_tokens = Some(tail as u32);
                let frame = Frame::FirstToken {
                    id: key.1,
                    payload: payload::encode_token(&sampled),
                };
                if self.leases.is_live(key.0, key.1) {
                    self.send(context, key.0, &frame);
                }
                self.producer_gone(context, key);
            }
            SequenceEvent::Failed(error) => {
                producer.sequence = None;
                let reason = match error.reason {
                    "deadline_exceeded" => AbortReason::Deadline,
                    _ => AbortReason::Engine,
                };
                self.with_leases(context, |leases, now, out| {
                    leases.abort(now, key.0, key.1, reason, out);
                });
                self.producers.remove(&key);
                self.producer_gone(context, key);
            }
        }
    }

    pub(super) fn has_producer_work(&self) -> bool {
        self.producers.values().any(Producer::has_work)
    }

    /// Cancelled producers let go; ready pages are hashed and published; waiting ones say so.
    pub(super) fn turn_producers(&mut self, context: &mut Context) {
        let keys: Vec<Key> = self.producers.keys().copied().collect();
        for key in keys {
            let live = self.leases.is_live(key.0, key.1);
            let Some(producer) = self.producers.get_mut(&key) else {
                continue;
            };
            if producer.cancelled && !producer.gone {
                self.with_leases(context, |leases, now, out| {
                    leases.abort(now, key.0, key.1, AbortReason::Dropped, out);
                });
                self.producer_gone(context, key);
            } else if !live {
                // Nobody wants what is ready.
                if producer.gone {
                    self.producers.remove(&key);
                }
            } else if producer.hashed < producer.ready || producer.tail_tokens.is_some() {
                self.publish(context, key);
            } else if self.turned_at.since(producer.queued_at) >= QUEUED_EVERY {
                producer.queued_at = self.turned_at;
                self.with_leases(context, |leases, now, out| {
                    leases.queued(now, key.0, key.1, 0, out);
                });
            }
        }
    }

    fn publish(&mut self, context: &mut Context, key: Key) {
        let Some(producer) = self.producers.get_mut(&key) else {
            return;
        };
        let to = producer.ready.min(producer.hashed + HASH_PAGES_MAX);
        let mode = self.plan.checksums;
        let memory = &self.memory;
        let sum = |page: &PageId| memory.with_page(*page, |bytes| checksum(mode, bytes));
        let sums: Vec<u64> = producer.pages[producer.hashed..to]
            .iter()
            .map(sum)
            .collect();
        producer.hashed = to;
        let tail = producer.tail_tokens.filter(|_| to == producer.ready);
        match tail {
            Some(tail) => {
                self.producers.remove(&key);
                self.with_leases(context, |leases, now, out| {
                    leases.complete(now, key.0, key.1, &sums, tail, out);
                });
            }
            None => {
                self.with_leases(context, |leases, now, out| {
                    leases.watermark(now, key.0, key.1, &sums, out);
                });
            }
        }
    }

    // ---- the peer's frames --------------------------------------------------------------------

    fn lease_pair(&self, context: &mut Context, key: Key, event: &'static str) {
        let views = self.leases.views();
        let of = views.iter().find(|view| (view.session, view.id) == key);
        let phase = of.map_or("gone", |view| view.phase.label());
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

    fn note_over(&mut self, number: PeerSession, id: AttemptId) {
        let mut leases = self.keeper.leases.borrow_mut();
        let of = |shadow: &&mut LeaseShadow| shadow.session == number && shadow.id == id;
        leases.values_mut().filter(of).for_each(|s| s.over = true);
    }

    /// L5: OK only if this very grant is whole, never given up and never fenced.
    fn judge_answer(
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
            if idle > LEASES.ttl * 2 + slack || over > LEASES.ttl + slack {
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
        let number = PeerSession(ask.session);
        let id = (self.leases.views().iter())
            .find(|view| view.session == number && view.lease == ask.lease && ask.lease != 0)
            .map(|view| view.phase.label());
        (context.coverage).pair("lease", id.unwrap_or("gone"), "read");
        let read = (self.leases).read(now, number, ask.lease, ask.epoch, ask.first, ask.count);
        let pages = read.map_err(|_| 1u32)?.to_vec();
        if let Some(shadow) = self.keeper.leases.borrow_mut().get_mut(&ask.lease) {
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
