//! Prefill for peers: the producer behind each attempt, from the prompt to the last page.

use super::engine::Owner;
use super::{Key, Node};
use crate::engine::{SamplingParams, SequenceEvent};
use crate::node::payload;
use crate::scheduler::{PagesFrom, SequenceId, SequenceSpec};
use crate::sim::context::Context;
use crate::sim::keeper::LeaseShadow;
use crate::sim::model::PAGE_TOKENS;
use kvserve_kv::PageId;
use kvserve_kv::checksum::checksum;
use kvserve_kv::lease::{AskVerdict, PeerSession};
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::session::{AbortReason, AttemptId, Frame};
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
    pub(super) cancelled: bool,
    queued_at: Nanos,
}

impl Producer {
    pub(super) fn has_work(&self) -> bool {
        self.cancelled || self.hashed < self.ready || self.tail_tokens.is_some()
    }
}

impl Node {
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
        let taken = payload::decode_sampling(sampling).is_ok_and(|(sampling, _)| {
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

    pub(super) fn take_prompt(
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
            generated: 0,
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
}
