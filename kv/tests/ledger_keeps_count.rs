//! The page ledger against a naive model, over thousands of seeds: no page is handed out while a
//! guard names it, the counts add up, nothing leaks (invariants I2, I3). Pages with one owner;
//! those that are shared are in the crate's own tests, beside the prefix cache.

use kvserve_kv::PageId;
use kvserve_kv::ledger::{AllocateAs, Ledger, NeedPages, PageState};
use kvserve_runtime::GuardToken;
use std::collections::VecDeque;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// Everything the ledger knows, kept in the most obvious way.
struct Model {
    state: Vec<PageState>,
    free: VecDeque<u32>,
    /// Pages of each live guard; counted from scratch whenever it matters.
    guards: Vec<(GuardToken, Vec<PageId>)>,
    /// Pages of each owner that has not given them up, and whether it is a lease.
    owners: Vec<(Vec<PageId>, bool)>,
}

impl Model {
    fn named(&self, page: PageId) -> usize {
        let guards = self.guards.iter();
        guards
            .map(|(_, pages)| pages.iter().filter(|named| **named == page).count())
            .sum()
    }

    fn settle(&mut self, page: PageId) {
        if self.state[page.0 as usize] == PageState::Stopping && self.named(page) == 0 {
            self.state[page.0 as usize] = PageState::Free;
            self.free.push_back(page.0);
        }
    }

    fn compare(&self, ledger: &Ledger, seed: u64) {
        ledger.assert_consistent();
        let mut of_each = [0; PageState::COUNT];
        for (place, state) in self.state.iter().enumerate() {
            let page = PageId(place as u32);
            assert_eq!(ledger.state(page), *state, "page {place}, seed {seed}");
            assert_eq!(
                ledger.named(page) as usize,
                self.named(page),
                "page {place}, seed {seed}"
            );
            of_each[state.index()] += 1;
        }
        let counts = ledger.counts();
        assert_eq!(counts.total(), self.state.len(), "seed {seed}");
        assert_eq!(
            [
                counts.free,
                counts.building,
                counts.ready,
                counts.leased,
                counts.pulling,
                counts.stopping,
                counts.quarantined
            ],
            of_each,
            "seed {seed}"
        );
        assert_eq!(ledger.guards_live(), self.guards.len());
        assert_eq!(
            ledger.not_ready(),
            counts.quarantined * 100 > self.state.len()
        );
        assert_eq!(ledger.snapshot().len(), self.state.len() - counts.free);
    }
}

fn run(seed: u64) {
    let mut random = Random(seed ^ 0x5eed);
    let pages = 1 + random.below(24);
    let quarantines = random.below(4) == 0;
    let mut ledger = Ledger::new(pages);
    let mut model = Model {
        state: vec![PageState::Free; pages],
        free: (0..pages as u32).collect(),
        guards: Vec::new(),
        owners: Vec::new(),
    };
    for _ in 0..120 {
        match random.below(8) {
            0 | 1 => {
                let wanted = random.below(6);
                let (what, state) = if random.below(2) == 0 {
                    (AllocateAs::Building, PageState::Building)
                } else {
                    (AllocateAs::Pulling, PageState::Pulling)
                };
                let mut taken = Vec::new();
                let free = model.free.len();
                match ledger.allocate(wanted, what, &mut taken) {
                    Ok(()) => {
                        // Oldest freed first, and exactly as many.
                        let expected: Vec<_> = model.free.drain(..wanted).map(PageId).collect();
                        assert_eq!(taken, expected, "seed {seed}");
                        for page in &taken {
                            assert_eq!(model.named(*page), 0, "I2, seed {seed}");
                            model.state[page.0 as usize] = state;
                        }
                        model.owners.push((taken, false));
                    }
                    Err(error) => {
                        assert_eq!(error, NeedPages { wanted, free });
                        assert!(wanted > free && taken.is_empty());
                    }
                }
            }
            2 | 3 => {
                // An operation names any pages that somebody owns.
                let mut named = Vec::new();
                for (owner, _) in &model.owners {
                    for page in owner {
                        if random.below(3) == 0 {
                            named.push(*page);
                        }
                    }
                }
                let token = ledger.guard(named.iter().copied());
                model.guards.push((token, named));
            }
            4 if !model.guards.is_empty() => {
                let place = random.below(model.guards.len());
                let (token, named) = model.guards.swap_remove(place);
                if quarantines && random.below(4) == 0 {
                    ledger.quarantine(token);
                    for page in named {
                        model.state[page.0 as usize] = PageState::Quarantined;
                    }
                } else {
                    ledger.release(token);
                    for page in named {
                        model.settle(page);
                    }
                }
            }
            5 | 6 if !model.owners.is_empty() => {
                let place = random.below(model.owners.len());
                let (owned, leased) = model.owners.swap_remove(place);
                match leased {
                    true => ledger.end_lease(&owned),
                    false => ledger.free(&owned),
                }
                for page in owned {
                    if model.state[page.0 as usize] != PageState::Quarantined {
                        model.state[page.0 as usize] = PageState::Stopping;
                        model.settle(page);
                    }
                }
            }
            7 if !model.owners.is_empty() => {
                // A change of state of all of an owner's pages: it takes place for all or none.
                let place = random.below(model.owners.len());
                let (owned, leased) = model.owners[place].clone();
                use PageState::{Building, Leased, Pulling, Ready};
                let (result, from, to): (_, &[PageState], _) = match random.below(4) {
                    0 if leased => (ledger.unlease(&owned), &[Leased], Ready),
                    0 => (ledger.mark_ready(&owned), &[Building], Ready),
                    1 if !leased => (ledger.lease(&owned), &[Building, Ready], Leased),
                    2 => (ledger.commit(&owned), &[Pulling], Ready),
                    _ => (ledger.adopt(&owned), &[Pulling], Building),
                };
                let legal = owned
                    .iter()
                    .all(|page| from.contains(&model.state[page.0 as usize]));
                assert_eq!(result.is_ok(), legal, "seed {seed}: {result:?}");
                if !legal {
                    continue;
                }
                model.owners[place].1 = to == Leased;
                for page in owned {
                    model.state[page.0 as usize] = to;
                }
            }
            4..=7 => {}
            _ => unreachable!("eight cases"),
        }
        model.compare(&ledger, seed);
    }
    // Everybody leaves: all but the quarantined pages are free again.
    for (owned, leased) in model.owners.drain(..) {
        match leased {
            true => ledger.end_lease(&owned),
            false => ledger.free(&owned),
        }
    }
    for (token, _) in model.guards.drain(..) {
        ledger.release(token);
    }
    ledger.assert_consistent();
    assert_eq!(ledger.free_pages(), ledger.usable_pages(), "seed {seed}");
    if !quarantines {
        assert_eq!(ledger.free_pages(), pages, "seed {seed}");
    }
}

#[test]
fn the_ledger_agrees_with_a_naive_model_over_thousands_of_seeds() {
    for seed in 0..4_000 {
        run(seed);
    }
}

#[test]
fn a_given_up_page_waits_for_the_last_of_its_names() {
    let mut ledger = Ledger::new(2);
    let mut pages = Vec::new();
    ledger.allocate(2, AllocateAs::Pulling, &mut pages).unwrap();
    let pull = ledger.guard(pages.iter().copied());
    let step = ledger.guard([pages[0]]);
    ledger.free(&pages);
    assert_eq!(ledger.counts().stopping, 2);
    ledger.release(pull);
    assert_eq!((ledger.counts().stopping, ledger.counts().free), (1, 1));
    let mut again = Vec::new();
    ledger
        .allocate(1, AllocateAs::Building, &mut again)
        .unwrap();
    assert_eq!(again, [pages[1]], "the named page is not handed out");
    ledger.release(step);
    assert_eq!(ledger.counts().free, 1);
}

#[test]
#[should_panic(expected = "not allowed there")]
fn giving_a_page_up_twice_never_passes() {
    let mut ledger = Ledger::new(1);
    let mut pages = Vec::new();
    ledger
        .allocate(1, AllocateAs::Building, &mut pages)
        .unwrap();
    ledger.free(&pages);
    ledger.free(&pages);
}

#[test]
#[should_panic(expected = "which is free")]
fn naming_a_free_page_never_passes() {
    let mut ledger = Ledger::new(1);
    let _never = ledger.guard([PageId(0)]);
}

#[test]
fn one_page_in_a_hundred_may_be_quarantined() {
    let mut ledger = Ledger::new(200);
    for expected in [false, false, true] {
        let mut pages = Vec::new();
        ledger.allocate(1, AllocateAs::Pulling, &mut pages).unwrap();
        let token = ledger.guard(pages.iter().copied());
        ledger.quarantine(token);
        ledger.free(&pages);
        assert_eq!(ledger.not_ready(), expected);
    }
    assert_eq!(ledger.usable_pages(), 197);
    assert!(ledger.commit(&[PageId(0)]).is_err());
}
