//! Prefill for peers: the producer behind each attempt, from the prompt to the last page.

use super::engine::Owner;
use super::{Key, Node};
use crate::engine::{SamplingParams, SequenceEvent};
use crate::node::payload;
use crate::node::prefill::{REFUSED_HELD, REFUSED_PAYLOAD, REFUSED_SIZE};
use crate::scheduler::{PagesFrom, SequenceId, SequenceSpec};
use crate::sim::clock::ms;
use crate::sim::context::Context;
use crate::sim::keeper::LeaseShadow;
use crate::sim::model::PAGE_TOKENS;
use kvserve_kv::PageId;
use kvserve_kv::checksum::checksum;
use kvserve_kv::lease::{AskVerdict, LeaseView, PeerSession};
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::session::frame::RefusedKind;
use kvserve_kv::session::{AbortReason, AttemptId, Frame, ServiceRefusal};
use kvserve_runtime::{Deadline, Nanos};
use std::time::Duration;

/// So many of a hundred prompts are not answered at once.
const SLOW_ANSWERS_PERCENT: u64 = 8;

/// So many of a hundred producers notice late that they are cancelled.
const LATE_PERCENT: u64 = 15;

/// When a busy node asks a peer to come again.
const BUSY_RETRY_MS: u32 = 20;

/// Pages hashed and published at once.
const HASH_PAGES_MAX: usize = 2;

/// At most one queue heartbeat per attempt in this time.
const QUEUED_EVERY: Duration = Duration::from_millis(300);

/// A prompt that waits for the service's answer.
pub struct Ask {
    key: Key,
    prompt: Vec<u32>,
    /// Leading pages that the peer holds.
    held: usize,
    sampling: SamplingParams,
    deadline: Deadline,
    answer_at: Nanos,
    queued_at: Nanos,
}

/// A prefill for a peer and the publishing of its pages.
pub struct Producer {
    sequence: Option<SequenceId>,
    /// Those that the lease is over, and the tokens in them.
    pages: Vec<PageId>,
    prompt: usize,
    /// Leading pages that the peer holds.
    held: usize,
    ready: usize,
    hashed: usize,
    tail_tokens: Option<u32>,
    /// The service has let go; what is ready is still being published.
    gone: bool,
    pub(super) cancelled: bool,
    /// How long its task takes to notice that.
    pub(super) late: Duration,
    /// Once cancelled it lets go then.
    pub(super) lets_go_at: Nanos,
    queued_at: Nanos,
}

impl Producer {
    pub(super) fn has_work(&self) -> bool {
        let publishes = self.hashed < self.ready || self.tail_tokens.is_some();
        publishes && !self.cancelled || self.cancelled && self.late.is_zero()
    }
}

impl Node {
    pub(super) fn on_prefill(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        id: AttemptId,
        left_ns: u64,
        held: u32,
        prompt: Vec<u32>,
        sampling: &[u8],
    ) {
        let named = |s: &super::Session| s.identity.incarnation == id.request.incarnation;
        if !self.sessions.get(&number).is_some_and(named) {
            return;
        }
        let now = self.turned_at;
        let deadline = Deadline::after(now, Duration::from_nanos(left_ns));
        // It gives the request's earlier attempts up (R1).
        let earlier = |key: &LeaseView| key.session == number && key.id.request == id.request;
        for view in self.leases.views().into_iter().filter(earlier) {
            (context.coverage).pair("lease", view.phase.label(), "later attempt");
        }
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
        let key = (number, id);
        let Ok((sampling, _)) = payload::decode_sampling(sampling) else {
            let code = REFUSED_PAYLOAD;
            return self.refuse(context, key, ServiceRefusal::Invalid(code));
        };
        let ask = Ask {
            key,
            prompt,
            held: held as usize,
            sampling,
            deadline,
            answer_at: now,
            queued_at: now,
        };
        // A service may take its time before it answers, within the peer's limit or not.
        if context.rng.percent(SLOW_ANSWERS_PERCENT) {
            let span = Duration::from_nanos(context.rng.range(10_000, ms(900)));
            let answer_at = now.after(span);
            return self.asks.push(Ask { answer_at, ..ask });
        }
        self.answer(context, ask);
    }

    /// The service answers: a grant, or a refusal with its reason.
    fn answer(&mut self, context: &mut Context, ask: Ask) {
        let key = ask.key;
        if let Err(refusal) = self.take_prompt(context, ask) {
            self.refuse(context, key, refusal);
        }
    }

    fn refuse(&mut self, context: &mut Context, key: Key, refusal: ServiceRefusal) {
        let (number, id) = key;
        self.lease_pair(context, key, "refused");
        self.leases.refused(number, id);
        if self.leases.is_live(number, id) {
            self.lease_pair(context, key, "abort");
            self.with_leases(context, |leases, now, out| {
                leases.abort(now, number, id, AbortReason::Engine, out);
            });
        } else {
            let refused = |refusal, code| Frame::PrefillRefused { id, refusal, code };
            let frame = match refusal {
                ServiceRefusal::Busy { retry_ms } => Frame::Busy { id, retry_ms },
                ServiceRefusal::Invalid(code) => refused(RefusedKind::Invalid, code),
                ServiceRefusal::Draining => refused(RefusedKind::Draining, 0),
            };
            self.send(context, number, &frame);
        }
        self.producer_gone(context, key);
    }

    /// Answers that are due; those that wait say that they live.
    fn turn_asks(&mut self, context: &mut Context) {
        let now = self.turned_at;
        for mut ask in std::mem::take(&mut self.asks) {
            let (number, id) = ask.key;
            if !self.leases.is_live(number, id) {
                self.producer_gone(context, ask.key);
            } else if now >= ask.answer_at {
                self.answer(context, ask);
            } else {
                if now.since(ask.queued_at) >= QUEUED_EVERY {
                    ask.queued_at = now;
                    self.lease_pair(context, ask.key, "queued");
                    self.with_leases(context, |leases, now, out| {
                        leases.queued(now, number, id, 0, out);
                    });
                }
                self.asks.push(ask);
            }
        }
    }

    /// When the service next does something by itself.
    pub(super) fn next_service(&self) -> Nanos {
        let late = |producer: &Producer| match producer.cancelled {
            true => producer.lets_go_at,
            false => Nanos(u64::MAX),
        };
        let asks = self.asks.iter().map(|ask| ask.answer_at);
        let at = asks.chain(self.producers.values().map(late));
        at.min().unwrap_or(Nanos(u64::MAX))
    }

    /// A fault makes this node give a lease up, whatever has become of it (L1).
    fn give_up_one(&mut self, context: &mut Context) {
        let live: Vec<Key> = (self.leases.views().iter())
            .filter(|view| self.leases.is_live(view.session, view.id))
            .map(|view| (view.session, view.id))
            .collect();
        if live.is_empty() {
            return;
        }
        let key = context.rng.pick(&live);
        context.fault("fault: lease given up");
        self.lease_pair(context, key, "abort");
        self.with_leases(context, |leases, now, out| {
            leases.abort(now, key.0, key.1, AbortReason::Engine, out);
        });
    }

    fn take_prompt(&mut self, context: &mut Context, ask: Ask) -> Result<(), ServiceRefusal> {
        let Ask {
            key,
            prompt,
            held,
            sampling,
            deadline,
            ..
        } = ask;
        let (number, id) = key;
        if self.draining {
            return Err(ServiceRefusal::Draining);
        }
        let busy = ServiceRefusal::Busy {
            retry_ms: BUSY_RETRY_MS,
        };
        let tokens = prompt.len();
        let wanted = tokens.div_ceil(PAGE_TOKENS);
        let usable = self.keeper.ledger.with(|ledger| ledger.usable_pages());
        if wanted > usable {
            return Err(ServiceRefusal::Invalid(REFUSED_SIZE));
        }
        if held >= wanted {
            return Err(ServiceRefusal::Invalid(REFUSED_HELD));
        }
        // As the product: what is cached here, then room for the rest.
        let ledger = self.keeper.ledger.clone();
        let mut pages = Vec::new();
        let fits = ledger.with(|ledger| ledger.prefix_fits(b"", &prompt, wanted));
        if !fits {
            return Err(busy);
        }
        let found = ledger.with(|ledger| ledger.take_prefix(b"", &prompt, &mut pages));
        match self.keeper.reserve(wanted - found, AllocateAs::Building) {
            Some(rest) => pages.extend(rest),
            None => {
                ledger.with(|ledger| ledger.free(&pages));
                return Err(busy);
            }
        }
        if found > 0 {
            context
                .coverage
                .hit("prefill: started after a cached prefix");
        }
        let spec = SequenceSpec {
            tokens: prompt,
            generated: 0,
            new_tokens_max: 1,
            stop_token_ids: Vec::new(),
            sampling,
            cache_salt: Vec::new(),
            deadline,
            pages: PagesFrom::Lease {
                pages: pages.clone(),
                held,
                computed: found * PAGE_TOKENS,
            },
        };
        let Some(sequence) = self.engine.submit(spec, Owner::Prefill(key)) else {
            ledger.with(|ledger| ledger.free(&pages));
            return Err(busy);
        };
        // The lease is over what the peer does not hold.
        let pages = pages.split_off(held);
        let leased = ledger.with(|ledger| ledger.lease(&pages));
        debug_assert!(leased.is_ok(), "{leased:?}");
        let mut effects = Vec::new();
        self.lease_pair(context, key, "grant");
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
                (self.fabric.borrow_mut()).export(self.endpoint, lease, &pages);
            }
            Err(_) => {
                self.engine.remove(&self.keeper, sequence);
                ledger.with(|ledger| ledger.end_lease(&pages));
                return Err(busy);
            }
        }
        let producer = Producer {
            sequence: Some(sequence),
            pages,
            prompt: tokens - held * PAGE_TOKENS,
            held,
            ready: found.saturating_sub(held),
            hashed: 0,
            tail_tokens: None,
            gone: false,
            cancelled: false,
            late: match context.rng.percent(LATE_PERCENT) {
                true => Duration::from_nanos(context.rng.below(ms(500))),
                false => Duration::ZERO,
            },
            lets_go_at: Nanos(0),
            queued_at: Nanos(0),
        };
        self.producers.insert(key, producer);
        for effect in effects {
            self.perform_lease(context, effect);
        }
        Ok(())
    }

    /// The producer's handle is dropped.
    pub(super) fn producer_gone(&mut self, context: &mut Context, key: Key) {
        if let Some(producer) = self.producers.get_mut(&key) {
            producer.gone = true;
            if let Some(sequence) = producer.sequence.take() {
                self.engine.remove(&self.keeper, sequence);
            }
            if !producer.has_work() || producer.cancelled {
                self.producers.remove(&key);
            }
        }
        self.lease_pair(context, key, "producer gone");
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
            SequenceEvent::Cached(_) => {}
            SequenceEvent::Computed(tokens) => {
                let ready = (tokens / PAGE_TOKENS).saturating_sub(producer.held);
                producer.ready = producer.ready.max(ready);
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
                self.lease_pair(context, key, "abort");
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
        if std::mem::take(&mut self.gives_up) {
            self.give_up_one(context);
        }
        self.turn_asks(context);
        let keys: Vec<Key> = self.producers.keys().copied().collect();
        for key in keys {
            let live = self.leases.is_live(key.0, key.1);
            let Some(producer) = self.producers.get_mut(&key) else {
                continue;
            };
            if producer.cancelled && self.turned_at < producer.lets_go_at {
                continue;
            }
            if producer.cancelled && !producer.gone {
                self.lease_pair(context, key, "abort");
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
                self.lease_pair(context, key, "queued");
                self.with_leases(context, |leases, now, out| {
                    leases.queued(now, key.0, key.1, 0, out);
                });
            }
        }
    }

    pub(super) fn publish(&mut self, context: &mut Context, key: Key) {
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
                self.lease_pair(context, key, "complete");
                self.with_leases(context, |leases, now, out| {
                    leases.complete(now, key.0, key.1, &sums, tail, out);
                });
            }
            None => {
                self.lease_pair(context, key, "watermark");
                self.with_leases(context, |leases, now, out| {
                    leases.watermark(now, key.0, key.1, &sums, out);
                });
            }
        }
    }
}
