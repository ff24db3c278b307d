//! The scheduler's rules, each by its name.

use super::*;
use crate::engine::{FinishReason, SamplingParams};
use kvserve_kv::ledger::{AllocateAs, Ledger};
use kvserve_model::{Sampled, Step};
use kvserve_runtime::{Deadline, Nanos};
use std::time::Duration;

const PAGE_TOKENS: usize = 4;

struct Bench {
    scheduler: Scheduler,
    ledger: Ledger,
    step: Step,
    members: Vec<SequenceId>,
    events: Vec<SchedulerEvent>,
}

impl Bench {
    fn new(pages: usize, running_max: usize) -> Self {
        let limits = SchedulerLimits {
            running_max,
            queued_max: 8,
            chunk_tokens_max: 8,
            page_tokens: PAGE_TOKENS,
        };
        Bench {
            scheduler: Scheduler::new(limits),
            ledger: Ledger::new(pages),
            step: Step::default(),
            members: Vec::new(),
            events: Vec::new(),
        }
    }

    fn spec(prompt: usize, new: u32) -> SequenceSpec {
        SequenceSpec {
            tokens: (0..prompt as u32).collect(),
            generated: 0,
            new_tokens_max: new,
            stop_token_ids: vec![999],
            sampling: SamplingParams {
                seed: 0,
                ..SamplingParams::default()
            },
            cache_salt: Vec::new(),
            deadline: Deadline::after(Nanos(0), Duration::from_secs(60)),
            pages: PagesFrom::Scheduler,
        }
    }

    fn submit(&mut self, prompt: usize, new: u32) -> SequenceId {
        self.scheduler.submit(Self::spec(prompt, new)).unwrap()
    }

    fn plan(&mut self) {
        self.scheduler.plan(
            &mut self.ledger,
            usize::MAX,
            &mut self.step,
            &mut self.members,
            &mut self.events,
        );
        self.check_plan();
    }

    /// Every row's pages cover its tokens, and no page serves two sequences.
    fn check_plan(&self) {
        let mut seen = std::collections::HashSet::new();
        for row in &self.step.sequences {
            let end = row.start + row.tokens.len();
            assert!(row.pages.len() * PAGE_TOKENS >= end);
            for page in &self.step.pages[row.pages.clone()] {
                assert!(seen.insert(*page), "page {page:?} serves two sequences");
            }
        }
    }

    /// Ends the step; each sampled token is its position's number, or the stop token.
    fn finish(&mut self, stop: bool) {
        self.step.sampled = self
            .step
            .sequences
            .iter()
            .map(|row| {
                row.sample.as_ref().map(|spec| Sampled {
                    token: if stop { 999 } else { spec.position },
                    logprob: f32::NAN,
                    top: Vec::new(),
                })
            })
            .collect();
        self.scheduler.finish_step(
            &self.members,
            &self.step,
            &mut self.ledger,
            &mut self.events,
        );
    }

    /// A sequence of 9 tokens with 8 of them in two migrated pages.
    fn migrated(&mut self, new: u32) -> SequenceId {
        let mut pages = Vec::new();
        let taken = self.ledger.allocate(2, AllocateAs::Pulling, &mut pages);
        taken.expect("two pages");
        let mut spec = Self::spec(8, new);
        spec.tokens.push(77);
        spec.pages = PagesFrom::Migration {
            pages,
            held: 0,
            computed: 8,
        };
        self.scheduler.submit(spec).expect("room in the queue")
    }

    /// COMMIT's OK for a sequence of [`Bench::migrated`].
    fn prove(&mut self, id: SequenceId) {
        let pulled = self.scheduler.pages(id)[..2].to_vec();
        assert!(self.scheduler.prove(id, &pulled, &mut self.ledger));
    }

    fn tokens_of(&self, id: SequenceId) -> Vec<u32> {
        self.events
            .iter()
            .filter_map(|event| match event {
                SchedulerEvent::Token {
                    sequence, sampled, ..
                } if *sequence == id => Some(sampled.token),
                SchedulerEvent::Token { .. }
                | SchedulerEvent::Cached { .. }
                | SchedulerEvent::Computed { .. }
                | SchedulerEvent::OutOfPages { .. } => None,
            })
            .collect()
    }
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_sampled_once() {
    let mut bench = Bench::new(16, 4);
    let id = bench.submit(19, 2);
    let mut chunks = Vec::new();
    for _ in 0..3 {
        bench.plan();
        chunks.push((
            bench.step.tokens.len(),
            bench.step.sequences[0].sample.is_some(),
        ));
        bench.finish(false);
    }
    assert_eq!(chunks, [(8, false), (8, false), (3, true)]);
    assert_eq!(bench.tokens_of(id), [19]);
    bench.plan();
    assert_eq!(bench.step.tokens, [19]);
    bench.finish(false);
    assert_eq!(bench.tokens_of(id), [19, 20]);
    assert!(!bench.scheduler.has_work());
    assert_eq!(bench.ledger.counts().free, 16);
}

#[test]
fn the_stop_token_ends_a_sequence_and_gives_its_pages_back() {
    let mut bench = Bench::new(16, 4);
    bench.submit(3, 100);
    bench.plan();
    bench.finish(true);
    assert!(matches!(
        bench.events[..],
        [SchedulerEvent::Token {
            finish: Some(FinishReason::Stop),
            ..
        }]
    ));
    assert_eq!(bench.ledger.counts().free, 16);
}

#[test]
fn decode_rows_share_the_step_with_a_prefill_chunk() {
    let mut bench = Bench::new(16, 4);
    bench.submit(3, 10);
    bench.plan();
    bench.finish(false);
    bench.submit(20, 1);
    bench.plan();
    let lengths: Vec<_> = bench
        .step
        .sequences
        .iter()
        .map(|s| s.tokens.len())
        .collect();
    assert_eq!(lengths, [1, 8]);
}

#[test]
fn a_full_pool_preempts_the_youngest_and_everybody_still_ends() {
    // Two sequences of up to 16 tokens in 5 pages of 4: they cannot both stay.
    let mut bench = Bench::new(5, 4);
    let old = bench.submit(6, 10);
    let young = bench.submit(6, 10);
    for _ in 0..200 {
        if !bench.scheduler.has_work() {
            break;
        }
        bench.plan();
        bench.finish(false);
    }
    assert!(bench.scheduler.preemptions() > 0);
    let expected: Vec<u32> = (6..16).collect();
    assert_eq!(bench.tokens_of(old), expected);
    assert_eq!(
        bench.tokens_of(young),
        expected,
        "a preempted sequence samples nothing twice"
    );
    assert_eq!(bench.ledger.counts().free, 5);
}

#[test]
fn a_sequence_that_outgrows_the_whole_pool_is_told_so() {
    let mut bench = Bench::new(2, 4);
    let id = bench.submit(6, 10);
    for _ in 0..10 {
        bench.plan();
        bench.finish(false);
    }
    assert!(
        bench
            .events
            .contains(&SchedulerEvent::OutOfPages { sequence: id })
    );
    assert!(!bench.scheduler.has_work());
    assert_eq!(bench.ledger.counts().free, 2);
}

#[test]
fn a_sequence_removed_in_mid_step_keeps_its_pages_out_of_reach_until_the_step_ends() {
    let mut bench = Bench::new(4, 4);
    let id = bench.submit(6, 10);
    bench.plan();
    let guard = bench.ledger.guard(bench.step.pages.iter().copied());
    assert!(bench.scheduler.remove(id, &mut bench.ledger));
    assert_eq!(bench.ledger.counts().stopping, 2);
    bench.finish(false);
    assert!(bench.events.is_empty(), "a removed sequence says nothing");
    bench.ledger.release(guard);
    assert_eq!(bench.ledger.counts().free, 4);
    assert!(!bench.scheduler.remove(id, &mut bench.ledger));
}

#[test]
fn the_queue_has_a_bound_and_first_come_is_first_served() {
    let mut bench = Bench::new(64, 1);
    let first = bench.submit(3, 2);
    for _ in 0..7 {
        bench.submit(3, 2);
    }
    assert_eq!(
        bench.scheduler.submit(Bench::spec(3, 2)),
        Err(QueueFull {
            queued: 8,
            queued_max: 8
        })
    );
    bench.plan();
    assert_eq!(bench.members, [first]);
}

#[test]
fn a_lease_ends_with_its_first_token_and_its_pages_are_the_leases() {
    let mut bench = Bench::new(8, 4);
    let mut pages = Vec::new();
    bench
        .ledger
        .allocate(3, AllocateAs::Building, &mut pages)
        .unwrap();
    bench.ledger.lease(&pages).unwrap();
    let mut spec = Bench::spec(10, 5);
    spec.pages = PagesFrom::Lease {
        pages: pages.clone(),
        held: 0,
        computed: 0,
    };
    let id = bench.scheduler.submit(spec).unwrap();
    for _ in 0..2 {
        bench.plan();
        bench.finish(false);
    }
    assert_eq!(bench.tokens_of(id), [10]);
    assert!(!bench.scheduler.has_work());
    assert_eq!(
        bench.ledger.counts().leased,
        3,
        "the lease frees its pages, not the scheduler"
    );
}

#[test]
fn a_migrated_sequence_decodes_before_proof_but_frees_only_its_own_growth() {
    let mut bench = Bench::new(8, 4);
    let mut pages = Vec::new();
    bench
        .ledger
        .allocate(2, AllocateAs::Pulling, &mut pages)
        .unwrap();
    let migrated = |pages: &[kvserve_kv::PageId]| {
        let mut spec = Bench::spec(8, 10);
        spec.tokens.push(77);
        spec.pages = PagesFrom::Migration {
            pages: pages.to_vec(),
            held: 0,
            computed: 8,
        };
        spec
    };
    let id = bench.scheduler.submit(migrated(&pages)).unwrap();
    bench.plan();
    assert_eq!(bench.step.tokens, [77]);
    assert_eq!(bench.step.sequences[0].start, 8);
    bench.finish(false);
    assert_eq!(bench.tokens_of(id), [9]);
    // The migration fails: growth comes back, migrated pages stay the migration's.
    bench.scheduler.remove(id, &mut bench.ledger);
    assert_eq!(bench.ledger.counts().pulling, 2);
    assert_eq!(bench.ledger.counts().free, 6);

    let id = bench.scheduler.submit(migrated(&pages)).unwrap();
    assert!(bench.scheduler.prove(id, &pages, &mut bench.ledger));
    bench.scheduler.remove(id, &mut bench.ledger);
    assert_eq!(bench.ledger.counts().free, 8);
}

/// Found by the simulator, seed 5016.
#[test]
fn pages_of_one_that_waits_do_not_stop_one_that_runs() {
    let mut bench = Bench::new(5, 8);
    let running = bench.submit(8, 8);
    bench.plan();
    bench.finish(false);
    // A migrated sequence is proven and finds no page to go on with: 3 + 2 pages are all.
    let waiting = bench.migrated(10);
    bench.prove(waiting);
    for _ in 0..64 {
        bench.plan();
        bench.finish(false);
    }
    assert_eq!(bench.tokens_of(running).len(), 8);
    assert_eq!(bench.tokens_of(waiting).len(), 10);
    assert_eq!(bench.ledger.counts().free, 5);
}

#[test]
fn two_that_wait_with_pages_do_not_wait_for_each_other() {
    let mut bench = Bench::new(4, 8);
    let ids = [bench.migrated(7), bench.migrated(7)];
    for id in ids {
        bench.prove(id);
    }
    for _ in 0..64 {
        bench.plan();
        bench.finish(false);
    }
    for id in ids {
        assert_eq!(bench.tokens_of(id).len(), 7);
    }
    assert_eq!(bench.ledger.counts().free, 4);
}

/// A hybrid node: its own decode waits for a page that a lease holds, and the lease waits behind
/// one that waits for pages, too. Leases lack nothing, so they go on (seed 26692).
#[test]
fn a_lease_does_not_wait_behind_those_that_wait_for_its_pages() {
    let mut bench = Bench::new(5, 8);
    let running = bench.submit(7, 8);
    bench.plan();
    bench.finish(false);
    let mut leased = Vec::new();
    let taken = (bench.ledger).allocate(3, AllocateAs::Building, &mut leased);
    taken.expect("three pages");
    bench.ledger.lease(&leased).expect("built pages");
    let waiting = bench.submit(5, 2);
    let mut spec = Bench::spec(12, 1);
    spec.pages = PagesFrom::Lease {
        pages: leased.clone(),
        held: 0,
        computed: 0,
    };
    let lease = bench.scheduler.submit(spec).expect("room in the queue");
    for _ in 0..4 {
        bench.plan();
        bench.finish(false);
    }
    assert_eq!(bench.tokens_of(lease).len(), 1);
    assert!(bench.tokens_of(waiting).is_empty());
    bench.ledger.end_lease(&leased);
    for _ in 0..16 {
        bench.plan();
        bench.finish(false);
    }
    assert_eq!(bench.tokens_of(running).len(), 8);
    assert_eq!(bench.tokens_of(waiting).len(), 2);
    assert_eq!(bench.ledger.counts().free, 5);
}

#[test]
fn expired_sequences_are_named_wherever_they_are() {
    let mut bench = Bench::new(64, 1);
    let running = bench.submit(3, 2);
    let waiting = bench.submit(3, 2);
    bench.plan();
    let mut expired = Vec::new();
    bench.scheduler.expired(Nanos(0), &mut expired);
    assert!(expired.is_empty());
    bench.scheduler.expired(Nanos(61_000_000_000), &mut expired);
    assert_eq!(expired, [running, waiting]);
}

/// Random arrivals, cancels and pool sizes: every sequence ends, tokens are each position's own
/// exactly once, and all pages come back.
#[test]
fn random_loads_always_drain() {
    for seed in 0..300u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let pages = 6 + next(20) as usize;
        let mut bench = Bench::new(pages, 1 + next(5) as usize);
        let mut alive = Vec::new();
        for round in 0..400 {
            if round < 100 && next(3) == 0 {
                let prompt = 1 + next(12) as usize;
                let new = 1 + next(10) as u32;
                if let Ok(id) = bench.scheduler.submit(Bench::spec(prompt, new)) {
                    alive.push((id, prompt as u32));
                }
            }
            if next(20) == 0 && !alive.is_empty() {
                let (id, _) = alive[next(alive.len() as u64) as usize];
                bench.scheduler.remove(id, &mut bench.ledger);
            }
            bench.plan();
            let guard = bench.ledger.guard(bench.step.pages.iter().copied());
            bench.finish(false);
            bench.ledger.release(guard);
        }
        assert!(!bench.scheduler.has_work(), "seed {seed} does not drain");
        assert_eq!(bench.ledger.counts().free, pages, "seed {seed} leaks");
        for (id, prompt) in alive {
            let tokens = bench.tokens_of(id);
            let expected: Vec<u32> = (prompt..prompt + tokens.len() as u32).collect();
            assert_eq!(tokens, expected, "seed {seed}");
        }
    }
}
