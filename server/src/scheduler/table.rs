//! The table of sequences and everything that happens to one between steps.

use super::limits::SchedulerLimits;
use super::sequence::{
    PagesFrom, Phase, Sequence, SequenceId, SequenceSpec, SequenceView, Standing,
};
use crate::engine::FinishReason;
use kvserve_kv::{PageId, ledger::Ledger};
use kvserve_model::{Sampled, Step};
use kvserve_runtime::Nanos;
use std::collections::VecDeque;

/// The queue is at its bound; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// Sequences waiting.
    pub queued: usize,
    /// The bound.
    pub queued_max: usize,
}

/// What a finished step brought, in the order of its sequences.
#[derive(Clone, Debug, PartialEq)]
pub enum SchedulerEvent {
    /// It runs for the first time and starts after a prefix that was in the cache.
    Cached {
        /// Which sequence.
        sequence: SequenceId,
        /// Tokens whose keys and values were there.
        tokens: usize,
    },
    /// More of a prompt is in pages.
    Computed {
        /// Which sequence.
        sequence: SequenceId,
        /// Tokens whose keys and values are in its pages now.
        computed: usize,
    },
    /// A token was sampled. With `finish` the sequence is gone from the scheduler.
    Token {
        /// Which sequence.
        sequence: SequenceId,
        /// The token. It counts as text unless `finish` is `Some(Stop)`.
        sampled: Sampled,
        /// Set when it was the last one.
        finish: Option<FinishReason>,
    },
    /// No page is left for it and nobody can be preempted; it is gone from the scheduler.
    OutOfPages {
        /// Which sequence.
        sequence: SequenceId,
    },
}

struct Place {
    generation: u32,
    sequence: Option<Sequence>,
}

/// Sequences of one model replica. See the module docs.
pub struct Scheduler {
    pub(super) limits: SchedulerLimits,
    places: Vec<Place>,
    free: VecDeque<u32>,
    pub(super) waiting: VecDeque<SequenceId>,
    /// In order of arrival.
    pub(super) running: Vec<SequenceId>,
    arrivals: u64,
    preemptions: u64,
}

impl Scheduler {
    /// An empty scheduler.
    pub fn new(limits: SchedulerLimits) -> Self {
        Scheduler {
            limits,
            places: Vec::new(),
            free: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(limits.running_max),
            arrivals: 0,
            preemptions: 0,
        }
    }

    /// Takes a new sequence into the queue.
    ///
    /// # Errors
    /// [`QueueFull`] at the bound; given pages are still the giver's.
    pub fn submit(&mut self, spec: SequenceSpec) -> Result<SequenceId, QueueFull> {
        debug_assert!(!spec.tokens.is_empty() && spec.new_tokens_max > 0);
        if self.waiting.len() >= self.limits.queued_max {
            return Err(QueueFull {
                queued: self.waiting.len(),
                queued_max: self.limits.queued_max,
            });
        }
        self.arrivals += 1;
        let (pages, held, computed, standing) = match spec.pages {
            PagesFrom::Scheduler => (Vec::new(), 0, 0, Standing::Own),
            PagesFrom::Lease {
                pages,
                held,
                computed,
            } => (pages, held, computed, Standing::Leased),
            PagesFrom::Migration {
                pages,
                held,
                computed,
            } => (pages, held, computed, Standing::Unproven),
        };
        debug_assert!(computed < spec.tokens.len());
        let (others, cached) = match standing {
            Standing::Own => (0..0, 0),
            // Its leading computed pages came from the cache, whether the peer holds them or not.
            Standing::Leased => (held..pages.len(), computed / self.limits.page_tokens),
            Standing::Unproven => (0..pages.len(), held),
        };
        let id = self.place(Sequence {
            answer_from: spec.tokens.len().saturating_sub(spec.generated),
            tokens: spec.tokens,
            computed,
            pages,
            others,
            cached,
            started: standing != Standing::Own,
            cache_salt: spec.cache_salt,
            new_tokens_left: spec.new_tokens_max,
            stop_token_ids: spec.stop_token_ids,
            sampling: spec.sampling,
            deadline: spec.deadline,
            standing,
            phase: Phase::Waiting,
            arrival: self.arrivals,
            in_step: 0,
        });
        match standing {
            Standing::Own | Standing::Leased => self.waiting.push_back(id),
            // Its pages hold computed tokens already: letting it wait only wastes them.
            Standing::Unproven => self.waiting.push_front(id),
        }
        Ok(id)
    }

    /// COMMIT came back OK: the held pages and `pulled` ones are the scheduler's now, and what
    /// is whole may enter the prefix cache. False for a sequence that is gone; the pages then
    /// still are the waiter's.
    pub fn prove(&mut self, id: SequenceId, pulled: &[PageId], ledger: &mut Ledger) -> bool {
        let Some(sequence) = self.get_mut(id) else {
            return false;
        };
        debug_assert_eq!(sequence.standing, Standing::Unproven);
        debug_assert!(sequence.pages[..sequence.others.end].ends_with(pulled));
        // The engine goes on writing into the tail.
        let adopted = ledger.adopt(pulled);
        debug_assert!(adopted.is_ok(), "{adopted:?}");
        sequence.standing = Standing::Own;
        sequence.others = 0..0;
        self.offer_to_cache(id, ledger);
        true
    }

    /// Whole pages of what a sequence has computed, by steps that have ended, enter the cache.
    fn offer_to_cache(&mut self, id: SequenceId, ledger: &mut Ledger) {
        let page_tokens = self.limits.page_tokens;
        let Some(sequence) = self.get_mut(id).filter(|s| s.may_be_cached()) else {
            return;
        };
        let whole = sequence.computed / page_tokens;
        if whole <= sequence.cached {
            return;
        }
        // A lease's peer knows its pages by place: those stay what they are.
        let swap = sequence.standing == Standing::Own;
        sequence.cached = ledger.cache_pages(
            &sequence.cache_salt,
            &sequence.tokens[..whole * page_tokens],
            &mut sequence.pages[..whole],
            sequence.cached,
            swap,
        );
    }

    /// Takes a sequence out at once. Pages it owns go back to the ledger (which keeps those that
    /// a running step names until it ends); pages of a lease or migration are their owner's.
    /// False when it is gone already.
    pub fn remove(&mut self, id: SequenceId, ledger: &mut Ledger) -> bool {
        let Some(sequence) = self.take(id) else {
            return false;
        };
        self.running.retain(|other| *other != id);
        self.waiting.retain(|other| *other != id);
        ledger.free(&sequence.pages[..sequence.others.start]);
        ledger.free(&sequence.pages[sequence.others.end..]);
        true
    }

    /// Appends the sequences whose deadline has passed at `now`; the caller removes them.
    pub fn expired(&self, now: Nanos, out: &mut Vec<SequenceId>) {
        out.extend(
            self.running
                .iter()
                .chain(&self.waiting)
                .copied()
                .filter(|id| self.get(*id).is_some_and(|s| s.deadline.passed(now))),
        );
    }

    /// Takes in what a step computed. `members` is what [`Scheduler::plan`] gave; sequences
    /// removed meanwhile are passed over.
    pub fn finish_step(
        &mut self,
        members: &[SequenceId],
        step: &Step,
        ledger: &mut Ledger,
        events: &mut Vec<SchedulerEvent>,
    ) {
        debug_assert_eq!(members.len(), step.sampled.len());
        for (id, sampled) in members.iter().zip(&step.sampled) {
            let Some(sequence) = self.get_mut(*id) else {
                continue;
            };
            sequence.computed += std::mem::take(&mut sequence.in_step);
            let computed = sequence.computed;
            self.offer_to_cache(*id, ledger);
            let Some(sequence) = self.get_mut(*id) else {
                continue;
            };
            let Some(sampled) = sampled else {
                events.push(SchedulerEvent::Computed {
                    sequence: *id,
                    computed,
                });
                continue;
            };
            let finish = sequence.accept(sampled.token);
            if sequence.standing == Standing::Leased {
                events.push(SchedulerEvent::Computed {
                    sequence: *id,
                    computed,
                });
            }
            let leaves = finish.is_some() || sequence.standing == Standing::Leased;
            events.push(SchedulerEvent::Token {
                sequence: *id,
                sampled: sampled.clone(),
                finish,
            });
            if leaves {
                self.remove(*id, ledger);
            }
        }
    }

    /// A step failed whole: its sequences stay as they were before it.
    pub fn abandon_step(&mut self, members: &[SequenceId]) {
        for id in members {
            if let Some(sequence) = self.get_mut(*id) {
                sequence.in_step = 0;
            }
        }
    }

    /// Sequences waiting.
    pub fn queued(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that take part in steps.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether a plan could find something to do.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// How often a sequence lost its pages to an older one.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Looks at one sequence.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        self.get(id).map(|s| SequenceView {
            tokens: s.tokens.len(),
            computed: s.computed,
            pages: s.pages.len(),
            running: s.phase == Phase::Running,
            in_step: s.in_step > 0,
        })
    }

    /// The page table of a sequence; empty for one that is gone.
    pub fn pages(&self, id: SequenceId) -> &[PageId] {
        self.get(id).map_or(&[], |s| &s.pages)
    }

    /// Gives the youngest preemptible sequence's pages back, unless it is the oldest of all or
    /// older than `than`. True if one was found.
    pub(super) fn preempt_younger(&mut self, than: SequenceId, ledger: &mut Ledger) -> bool {
        let than_arrival = self.get(than).map_or(u64::MAX, |s| s.arrival);
        let oldest = self
            .running
            .iter()
            .filter_map(|id| self.get(*id))
            .map(|s| s.arrival)
            .min();
        let victim = self
            .running
            .iter()
            .copied()
            .filter(|id| {
                self.get(*id).is_some_and(|s| {
                    s.preemptible() && s.arrival >= than_arrival && Some(s.arrival) != oldest
                })
            })
            .max_by_key(|id| self.get(*id).map_or(0, |s| s.arrival));
        let Some(victim) = victim else {
            return self.strip_waiting(than, ledger);
        };
        self.running.retain(|id| *id != victim);
        self.preemptions += 1;
        if let Some(sequence) = self.get_mut(victim) {
            sequence.give_pages_up(ledger);
            sequence.phase = Phase::Waiting;
        }
        self.waiting.push_front(victim);
        true
    }

    /// Takes the pages of the youngest sequence that waits with pages of its own (a migrated one
    /// that was proven before it was admitted), other than `keep`. While it waits nothing comes
    /// of them, and those that run, or would be admitted before it, may wait for just these.
    pub(super) fn strip_waiting(&mut self, keep: SequenceId, ledger: &mut Ledger) -> bool {
        let holds = |id: &SequenceId| {
            self.get(*id)
                .is_some_and(|s| s.standing == Standing::Own && !s.pages.is_empty())
        };
        let victim = (self.waiting.iter().copied())
            .filter(|id| *id != keep && holds(id))
            .max_by_key(|id| self.get(*id).map_or(0, |s| s.arrival));
        let Some(sequence) = victim.and_then(|victim| self.get_mut(victim)) else {
            return false;
        };
        sequence.give_pages_up(ledger);
        self.preemptions += 1;
        true
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        let place = self.places.get(id.index as usize)?;
        (place.generation == id.generation)
            .then_some(place.sequence.as_ref())
            .flatten()
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        let place = self.places.get_mut(id.index as usize)?;
        (place.generation == id.generation)
            .then_some(place.sequence.as_mut())
            .flatten()
    }

    fn place(&mut self, sequence: Sequence) -> SequenceId {
        // Places are as many as sequences were alive at once: queued_max + running_max.
        let index = self.free.pop_front().unwrap_or_else(|| {
            self.places.push(Place {
                generation: 0,
                sequence: None,
            });
            (self.places.len() - 1) as u32
        });
        let place = &mut self.places[index as usize];
        debug_assert!(place.sequence.is_none());
        place.sequence = Some(sequence);
        SequenceId {
            index,
            generation: place.generation,
        }
    }

    fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        let place = self.places.get_mut(id.index as usize)?;
        if place.generation != id.generation {
            return None;
        }
        let sequence = place.sequence.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push_back(id.index);
        Some(sequence)
    }
}

impl Sequence {
    /// Its whole pages are in the prefix cache already; there they wait for its return, unless
    /// somebody needs the room more.
    fn give_pages_up(&mut self, ledger: &mut Ledger) {
        ledger.free(&self.pages);
        self.pages.clear();
        self.computed = 0;
        self.cached = 0;
    }

    /// Adds a sampled token; says whether it was the last.
    fn accept(&mut self, token: u32) -> Option<FinishReason> {
        if self.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        self.tokens.push(token);
        self.new_tokens_left -= 1;
        (self.new_tokens_left == 0).then_some(FinishReason::Length)
    }
}
