//! The scheduler with a prefix cache: where sequences start, what they leave behind.

use super::*;
use crate::engine::SamplingParams;
use kvserve_kv::PageId;
use kvserve_kv::ledger::{AllocateAs, Ledger};
use kvserve_kv::prefix::PrefixConfig;
use kvserve_model::{Sampled, Step};
use kvserve_runtime::{Deadline, Nanos};
use std::time::Duration;

const PAGE_TOKENS: usize = 4;

/// A model whose token is a hash of all the tokens that it reads through the pages: wrong pages
/// show as wrong tokens. Never a stop token.
struct Bench {
    scheduler: Scheduler,
    ledger: Ledger,
    /// What an engine has written: the token at each place of each page.
    memory: Vec<[u32; PAGE_TOKENS]>,
    step: Step,
    members: Vec<SequenceId>,
    events: Vec<SchedulerEvent>,
    computed: usize,
}

impl Bench {
    fn new(pages: usize, cached: bool) -> Self {
        let limits = SchedulerLimits {
            running_max: 4,
            queued_max: 32,
            chunk_tokens_max: 8,
            page_tokens: PAGE_TOKENS,
        };
        let config = PrefixConfig {
            page_tokens: PAGE_TOKENS,
            seed: 11,
        };
        let ledger = Ledger::new(pages);
        Bench {
            scheduler: Scheduler::new(limits),
            ledger: match cached {
                true => ledger.with_prefix_cache(config),
                false => ledger,
            },
            memory: vec![[0; PAGE_TOKENS]; pages],
            step: Step::default(),
            members: Vec::new(),
            events: Vec::new(),
            computed: 0,
        }
    }

    fn spec(tokens: &[u32], new: u32) -> SequenceSpec {
        SequenceSpec {
            tokens: tokens.to_vec(),
            new_tokens_max: new,
            stop_token_ids: Vec::new(),
            generated: 0,
            sampling: SamplingParams::default(),
            cache_salt: Vec::new(),
            deadline: Deadline::after(Nanos(0), Duration::from_secs(60)),
            pages: PagesFrom::Scheduler,
        }
    }

    fn submit(&mut self, tokens: &[u32], new: u32) -> SequenceId {
        let spec = Self::spec(tokens, new);
        self.scheduler.submit(spec).expect("room in the queue")
    }

    /// Plans, computes and ends one step.
    fn turn(&mut self) {
        let (ledger, step) = (&mut self.ledger, &mut self.step);
        let (members, events) = (&mut self.members, &mut self.events);
        (self.scheduler).plan(ledger, usize::MAX, step, members, events);
        let guard = ledger.guard(step.pages.iter().copied());
        for number in 0..step.sequences.len() {
            let row = step.sequences[number].clone();
            let pages = &step.pages[row.pages.clone()];
            for (place, token) in step.tokens[row.tokens.clone()].iter().enumerate() {
                let at = row.start + place;
                let page = pages[at / PAGE_TOKENS];
                assert_eq!(self.ledger.owners(page), 1, "a shared page is written");
                self.memory[page.0 as usize][at % PAGE_TOKENS] = *token;
                self.computed += 1;
            }
            let end = row.start + row.tokens.len();
            let read: Vec<u32> = (0..end)
                .map(|at| self.memory[pages[at / PAGE_TOKENS].0 as usize][at % PAGE_TOKENS])
                .collect();
            let sampled = row.sample.map(|_| Sampled {
                token: next_token(&read),
                logprob: f32::NAN,
                top: Vec::new(),
            });
            step.sampled.push(sampled);
        }
        (self.scheduler).finish_step(
            &self.members,
            &self.step,
            &mut self.ledger,
            &mut self.events,
        );
        self.ledger.release(guard);
        self.ledger.assert_consistent();
    }

    fn drain(&mut self) {
        for _ in 0..2_000 {
            if !self.scheduler.has_work() {
                return;
            }
            self.turn();
        }
        panic!("the load does not drain");
    }

    fn tokens_of(&self, id: SequenceId) -> Vec<u32> {
        let token = |event: &SchedulerEvent| match event {
            SchedulerEvent::Token {
                sequence, sampled, ..
            } if *sequence == id => Some(sampled.token),
            _ => None,
        };
        self.events.iter().filter_map(token).collect()
    }

    fn cached_of(&self, id: SequenceId) -> Vec<usize> {
        let cached = |event: &SchedulerEvent| match event {
            SchedulerEvent::Cached { sequence, tokens } if *sequence == id => Some(*tokens),
            _ => None,
        };
        self.events.iter().filter_map(cached).collect()
    }
}

fn next_token(read: &[u32]) -> u32 {
    let hash = |sum: u64, token: &u32| {
        (sum ^ u64::from(*token)).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (sum >> 29)
    };
    (read.iter().fold(7, hash) >> 40) as u32 % 1000
}

fn text(prompt: &[u32], new: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..new {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

fn prompt(length: usize, seed: u32) -> Vec<u32> {
    (0..length as u32).map(|at| at * 31 + seed).collect()
}

#[test]
fn the_next_turn_of_a_chat_starts_after_prompt_and_answer() {
    let mut bench = Bench::new(16, true);
    let mut chat = prompt(9, 1);
    let first = bench.submit(&chat, 6);
    bench.drain();
    chat.extend(bench.tokens_of(first));
    chat.extend([5, 6, 7]);
    let before = bench.computed;
    let second = bench.submit(&chat, 2);
    bench.drain();
    // 9 + 6 tokens, of which the last was never computed: three whole pages of four.
    assert_eq!(bench.cached_of(second), [12]);
    assert_eq!(bench.computed - before, chat.len() - 12 + 1);
    assert_eq!(bench.tokens_of(second), text(&chat, 2));
    assert_eq!(bench.cached_of(first), [] as [usize; 0]);
    assert_eq!(bench.ledger.free_pages(), 16);
}

#[test]
fn the_page_with_the_last_token_is_computed_again() {
    let mut bench = Bench::new(16, true);
    let all = prompt(8, 1);
    bench.submit(&all, 3);
    bench.drain();
    let again = bench.submit(&all, 3);
    bench.drain();
    assert_eq!(bench.cached_of(again), [4]);
    assert_eq!(bench.tokens_of(again), text(&all, 3));
}

#[test]
fn another_salt_shares_nothing() {
    let mut bench = Bench::new(16, true);
    let all = prompt(12, 1);
    bench.submit(&all, 1);
    bench.drain();
    let mut spec = Bench::spec(&all, 1);
    spec.cache_salt = b"tenant".to_vec();
    let salted = bench.scheduler.submit(spec.clone()).unwrap();
    bench.drain();
    assert_eq!(bench.cached_of(salted), [] as [usize; 0]);
    let again = bench.scheduler.submit(spec).unwrap();
    bench.drain();
    assert_eq!(bench.cached_of(again), [8]);
}

#[test]
fn a_preempted_sequence_comes_back_to_the_pages_it_left() {
    // Two sequences of up to 18 tokens in 8 pages of 4: they cannot both stay.
    let mut bench = Bench::new(8, true);
    let (a, b) = (prompt(7, 1), prompt(7, 2));
    let (old, young) = (bench.submit(&a, 11), bench.submit(&b, 11));
    bench.drain();
    assert!(bench.scheduler.preemptions() > 0);
    assert_eq!(bench.tokens_of(old), text(&a, 11));
    assert_eq!(bench.tokens_of(young), text(&b, 11));
    assert!(
        bench.ledger.prefix_counters().hit_pages > 0,
        "it found some"
    );
    assert_eq!(bench.cached_of(young), [] as [usize; 0], "not usage");
    assert_eq!(bench.ledger.free_pages(), 8);
}

#[test]
fn a_shared_prefix_lets_more_run_than_would_fit_apart() {
    let mut bench = Bench::new(8, true);
    let base = prompt(16, 1);
    bench.submit(&base, 1);
    bench.drain();
    let ids: Vec<_> = (0..3)
        .map(|seed| {
            let mut all = base.clone();
            all.push(900 + seed);
            (bench.submit(&all, 2), all)
        })
        .collect();
    bench.turn();
    assert_eq!(bench.scheduler.running(), 3, "4 shared pages and 3 tails");
    bench.drain();
    for (id, all) in ids {
        assert_eq!(bench.tokens_of(id), text(&all, 2));
    }
}

#[test]
fn equal_prompts_that_start_together_end_on_the_same_pages() {
    let mut bench = Bench::new(16, true);
    let all = prompt(13, 1);
    let ids = [bench.submit(&all, 4), bench.submit(&all, 4)];
    for _ in 0..4 {
        bench.turn();
    }
    let pages = |bench: &Bench, id| bench.scheduler.pages(id)[..3].to_vec();
    assert_eq!(pages(&bench, ids[0]), pages(&bench, ids[1]));
    bench.drain();
    for id in ids {
        assert_eq!(bench.tokens_of(id), text(&all, 4));
    }
}

/// A migration: pages are pulled, steps run, COMMIT comes or does not.
fn migrated(bench: &mut Bench, tokens: &[u32], held: usize) -> (SequenceId, Vec<PageId>) {
    let mut pages = Vec::new();
    let found = bench.ledger.take_prefix(b"", tokens, &mut pages);
    assert_eq!(found, held);
    let missing = tokens.len().div_ceil(PAGE_TOKENS) - held;
    let taken = bench
        .ledger
        .allocate(missing, AllocateAs::Pulling, &mut pages);
    taken.expect("pages to pull into");
    for (at, token) in tokens.iter().enumerate().skip(held * PAGE_TOKENS) {
        bench.memory[pages[at / PAGE_TOKENS].0 as usize][at % PAGE_TOKENS] = *token;
    }
    let mut all = tokens.to_vec();
    all.push(next_token(tokens));
    let mut spec = Bench::spec(&all, 9);
    spec.pages = PagesFrom::Migration {
        pages: pages.clone(),
        held,
        computed: tokens.len(),
    };
    let id = bench.scheduler.submit(spec).expect("room in the queue");
    (id, pages)
}

#[test]
fn nothing_of_a_migration_enters_before_commit_nor_what_is_computed_on_it() {
    let mut bench = Bench::new(16, true);
    let all = prompt(9, 1);
    let (id, pages) = migrated(&mut bench, &all, 0);
    for _ in 0..5 {
        bench.turn();
    }
    assert_eq!(bench.ledger.cached_pages(), 0);
    assert!(bench.scheduler.prove(id, &pages, &mut bench.ledger));
    // 9 + 5 tokens in pages: three whole ones, proven now.
    assert_eq!(bench.ledger.cached_pages(), 3);
    bench.drain();
    let mut whole = all.clone();
    whole.extend(text(&all, 10));
    assert_eq!(bench.ledger.prefix_fit(b"", &whole).pages, 4);
    assert_eq!(bench.ledger.free_pages(), 16);
}

#[test]
fn a_failed_migration_leaves_nothing_and_keeps_what_was_held() {
    let mut bench = Bench::new(16, true);
    let all = prompt(17, 1);
    bench.submit(&all[..9], 1);
    bench.drain();
    let (id, pages) = migrated(&mut bench, &all, 2);
    for _ in 0..5 {
        bench.turn();
    }
    // Refused: the sequence goes, then the migration's pages, then the pins.
    bench.scheduler.remove(id, &mut bench.ledger);
    bench.ledger.free(&pages[2..]);
    bench.ledger.free(&pages[..2]);
    bench.ledger.assert_consistent();
    assert_eq!(bench.ledger.cached_pages(), 2);
    assert_eq!(bench.ledger.prefix_fit(b"", &all).pages, 2);
    assert_eq!(bench.ledger.free_pages(), 16);
    // The next attempt succeeds, on other pages, behind the same ones.
    let (id, again) = migrated(&mut bench, &all, 2);
    assert_eq!(again[..2], pages[..2]);
    assert!(bench.scheduler.prove(id, &again[2..], &mut bench.ledger));
    bench.drain();
    assert_eq!(bench.ledger.prefix_fit(b"", &all).pages, 4);
}

#[test]
fn held_pages_outlive_every_pressure_until_the_attempt_ends() {
    let mut bench = Bench::new(8, true);
    let all = prompt(13, 1);
    bench.submit(&all[..9], 1);
    bench.drain();
    let (id, pages) = migrated(&mut bench, &all, 2);
    // Others want more than there is.
    for seed in 2..6 {
        bench.submit(&prompt(10, seed), 6);
    }
    for _ in 0..40 {
        bench.turn();
        assert_eq!(bench.memory[pages[0].0 as usize], all[..4]);
        assert_eq!(bench.memory[pages[1].0 as usize], all[4..8]);
    }
    // Its own text may have been complete before COMMIT's answer: then they are the waiter's.
    if !(bench.scheduler).prove(id, &pages[2..], &mut bench.ledger) {
        bench.ledger.free(&pages);
    }
    bench.drain();
    assert_eq!(bench.ledger.free_pages(), 8);
}

#[test]
fn a_lease_starts_after_the_cached_prefix_and_frees_only_what_it_was_granted() {
    let mut bench = Bench::new(12, true);
    let all = prompt(18, 1);
    bench.submit(&all[..13], 1);
    bench.drain();
    let mut pages = Vec::new();
    let found = bench.ledger.take_prefix(b"", &all, &mut pages);
    assert_eq!(found, 3);
    bench
        .ledger
        .allocate(2, AllocateAs::Building, &mut pages)
        .unwrap();
    // The peer holds two pages; the lease is over three, one of them shared with the cache.
    bench.ledger.lease(&pages[2..]).unwrap();
    let mut spec = Bench::spec(&all, 1);
    spec.pages = PagesFrom::Lease {
        pages: pages.clone(),
        held: 2,
        computed: 12,
    };
    let id = bench.scheduler.submit(spec).unwrap();
    let before = bench.computed;
    bench.drain();
    assert_eq!(bench.computed - before, 6);
    assert_eq!(bench.tokens_of(id), text(&all, 1));
    assert_eq!(bench.ledger.counts().leased, 3);
    assert_eq!(
        bench.ledger.cached_pages(),
        4,
        "its own whole page has entered"
    );
    // Pressure takes all that is not leased, and nothing else.
    let mut rest = Vec::new();
    let free = bench.ledger.free_pages();
    assert_eq!(free, 9);
    bench
        .ledger
        .allocate(free, AllocateAs::Building, &mut rest)
        .unwrap();
    assert!(rest.iter().all(|page| !pages[2..].contains(page)));
    bench.ledger.end_lease(&pages[2..]);
    bench.ledger.free(&rest);
    bench.ledger.assert_consistent();
    assert_eq!(bench.ledger.free_pages(), 12);
}

/// Random chats with shared beginnings, cancels and failed steps, in pools that are too small:
/// every text is what it is without a cache, and all pages come back.
#[test]
fn random_chats_say_the_same_with_and_without_a_cache() {
    let mut hits = 0;
    for seed in 0..300u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let pages = 7 + next(16) as usize;
        let mut bench = Bench::new(pages, seed % 8 != 0);
        let mut alive: Vec<(SequenceId, Vec<u32>, usize, bool)> = Vec::new();
        for round in 0..300 {
            if round < 150 && next(3) == 0 {
                // One of two beginnings, or a chat's next turn.
                let mut all = match alive.is_empty() || next(2) == 0 {
                    true => prompt(1 + next(12) as usize, next(2) as u32),
                    false => {
                        let (id, before, ..) = &alive[next(alive.len() as u64) as usize];
                        let mut all = before.clone();
                        all.extend(bench.tokens_of(*id));
                        all
                    }
                };
                all.push(next(3) as u32);
                let new = 1 + next(8) as usize;
                if (all.len() + new).div_ceil(PAGE_TOKENS) < pages {
                    let spec = Bench::spec(&all, new as u32);
                    if let Ok(id) = bench.scheduler.submit(spec) {
                        alive.push((id, all, new, true));
                    }
                }
            }
            if next(25) == 0 && !alive.is_empty() {
                let at = next(alive.len() as u64) as usize;
                bench.scheduler.remove(alive[at].0, &mut bench.ledger);
                alive[at].3 = false;
            }
            bench.turn();
        }
        bench.drain();
        assert_eq!(bench.ledger.free_pages(), pages, "seed {seed} leaks");
        for (id, all, new, to_its_end) in alive {
            let (got, wanted) = (bench.tokens_of(id), text(&all, new));
            assert_eq!(got[..], wanted[..got.len()], "seed {seed}");
            assert!(!to_its_end || got.len() == new, "seed {seed}");
        }
        hits += bench.ledger.prefix_counters().hit_pages;
    }
    assert!(
        hits > 1_000,
        "{hits} pages were found: the cache takes part"
    );
}
