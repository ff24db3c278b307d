//! The prefix cache as an owner of pages: who may take what, what is evicted, what never is.

use super::*;
use crate::pool::PageId;
use crate::prefix::PrefixConfig;
use kvserve_runtime::GuardToken;

const PAGE_TOKENS: usize = 2;

fn ledger(pages: usize) -> Ledger {
    Ledger::new(pages).with_prefix_cache(PrefixConfig {
        page_tokens: PAGE_TOKENS,
        seed: 3,
    })
}

fn building(ledger: &mut Ledger, pages: usize) -> Vec<PageId> {
    let mut out = Vec::new();
    let taken = ledger.allocate(pages, AllocateAs::Building, &mut out);
    taken.expect("pages for the test");
    out
}

/// A sequence has computed `tokens`, given its pages to the cache and ended.
fn computed(ledger: &mut Ledger, salt: &[u8], tokens: &[u32]) -> Vec<PageId> {
    let mut pages = building(ledger, tokens.len() / PAGE_TOKENS);
    let known = ledger.cache_pages(salt, tokens, &mut pages, 0, true);
    assert_eq!(known, pages.len());
    ledger.free(&pages);
    ledger.assert_consistent();
    pages
}

fn hit(ledger: &mut Ledger, salt: &[u8], tokens: &[u32]) -> Vec<PageId> {
    let mut pages = Vec::new();
    let fit = ledger.prefix_fit(salt, tokens);
    let count = ledger.take_prefix(salt, tokens, &mut pages);
    assert_eq!((count, count), (pages.len(), fit.pages));
    ledger.assert_consistent();
    pages
}

#[test]
fn a_prompt_finds_its_whole_pages_but_never_the_one_with_its_last_token() {
    let mut ledger = ledger(8);
    let pages = computed(&mut ledger, b"", &[1, 2, 3, 4, 5, 6]);
    for (tokens, found) in [
        (&[1, 2, 3, 4, 5, 6, 7][..], 3),
        (&[1, 2, 3, 4, 5, 6], 2),
        (&[1, 2, 3, 4, 5], 2),
        (&[1, 2, 3, 9, 5, 6, 7], 1),
        (&[1, 2], 0),
        (&[1], 0),
        (&[9, 2, 3, 4, 5, 6, 7], 0),
    ] {
        assert_eq!(hit(&mut ledger, b"", tokens), pages[..found]);
        ledger.free(&pages[..found]);
    }
    assert_eq!(hit(&mut ledger, b"other", &[1, 2, 3, 4, 5]), []);
    assert_eq!(ledger.prefix_counters().hit_pages, 8);
    assert_eq!(ledger.free_pages(), 8);
}

#[test]
fn a_page_is_free_only_when_no_owner_and_no_guard_is_left() {
    let mut ledger = ledger(4);
    let pages = computed(&mut ledger, b"", &[1, 2, 3, 4]);
    let first = hit(&mut ledger, b"", &[1, 2, 3, 4, 5]);
    let second = hit(&mut ledger, b"", &[1, 2, 3, 4, 5]);
    assert_eq!((&first, &second), (&pages, &pages));
    assert_eq!(ledger.owners(pages[0]), 3);
    assert_eq!(ledger.free_pages(), 2);
    let step = ledger.guard(first.iter().copied());
    ledger.free(&first);
    ledger.free(&second);
    assert_eq!(ledger.free_pages(), 2, "a step still reads them");
    assert_eq!(ledger.state(pages[0]), PageState::Ready);
    ledger.release(step);
    assert_eq!((ledger.free_pages(), ledger.evictable_pages()), (4, 2));
    let all = building(&mut ledger, 4);
    assert_eq!((ledger.cached_pages(), all.len()), (0, 4));
    assert_eq!(ledger.prefix_counters().evictions, 2);
    ledger.assert_consistent();
}

#[test]
fn a_leased_page_is_shared_and_never_evicted() {
    let mut ledger = ledger(5);
    let pages = computed(&mut ledger, b"", &[1, 2, 3, 4]);
    let mine = hit(&mut ledger, b"", &[1, 2, 3, 4, 5]);
    ledger.lease(&mine).expect("whole pages");
    let other = hit(&mut ledger, b"", &[1, 2, 3, 4, 6]);
    ledger.lease(&other).expect("a second lease");
    assert_eq!(ledger.counts().leased, 2);
    let rest = building(&mut ledger, 3);
    let mut none = Vec::new();
    let refused = ledger.allocate(1, AllocateAs::Pulling, &mut none);
    assert_eq!(refused, Err(NeedPages { wanted: 1, free: 0 }));
    assert_eq!(ledger.cached_pages(), 2, "nothing was unpinned for it");
    // A sequence beside the leases comes and goes.
    let reader = hit(&mut ledger, b"", &[1, 2, 3, 4, 7]);
    ledger.free(&reader);
    assert_eq!(ledger.counts().leased, 2);
    ledger.end_lease(&mine);
    assert_eq!(ledger.counts().leased, 2, "the other lease goes on");
    ledger.end_lease(&other);
    assert_eq!((ledger.counts().ready, ledger.evictable_pages()), (2, 2));
    assert_eq!(pages, mine);
    ledger.free(&rest);
    ledger.assert_consistent();
}

#[test]
fn unlease_keeps_the_share_of_the_one_that_was_granted() {
    let mut ledger = ledger(2);
    let pages = building(&mut ledger, 1);
    ledger.lease(&pages).unwrap();
    assert!(ledger.lease(&pages).is_err(), "one share, one lease");
    assert!(ledger.share(&pages).is_err(), "not whole yet");
    ledger.mark_ready(&pages).unwrap();
    ledger.share(&pages).unwrap();
    ledger.lease(&pages).unwrap();
    ledger.unlease(&pages).unwrap();
    assert_eq!(ledger.state(pages[0]), PageState::Leased);
    ledger.free(&pages);
    ledger.end_lease(&pages);
    assert_eq!(ledger.counts().free, 2);
    assert!(ledger.unlease(&pages).is_err());
}

#[test]
#[should_panic(expected = "not allowed there")]
fn a_lease_is_not_given_up_by_somebody_else() {
    let mut ledger = ledger(1);
    let pages = building(&mut ledger, 1);
    ledger.lease(&pages).unwrap();
    ledger.free(&pages);
}

#[test]
fn an_unproven_page_never_enters() {
    let mut ledger = ledger(4);
    let mut pages = Vec::new();
    ledger.allocate(2, AllocateAs::Pulling, &mut pages).unwrap();
    let tokens = [1, 2, 3, 4];
    assert_eq!(ledger.cache_pages(b"", &tokens, &mut pages, 0, true), 0);
    assert_eq!((ledger.cached_pages(), ledger.counts().pulling), (0, 2));
    ledger.commit(&pages).unwrap();
    assert_eq!(ledger.cache_pages(b"", &tokens, &mut pages, 0, true), 2);
    assert_eq!(ledger.cached_pages(), 2);
    ledger.assert_consistent();
}

#[test]
fn the_least_recently_used_leaf_goes_first() {
    let mut ledger = ledger(6);
    let old = computed(&mut ledger, b"", &[1, 2, 3, 4]);
    let young = computed(&mut ledger, b"", &[5, 6, 7, 8]);
    // The older chain is used again.
    let again = hit(&mut ledger, b"", &[1, 2, 3, 4, 5]);
    ledger.free(&again);
    let mut gone = Vec::new();
    let mut held = building(&mut ledger, 2);
    for _ in 0..4 {
        let before: Vec<_> = [&old[..], &young[..]].concat();
        held.extend(building(&mut ledger, 1));
        ledger.assert_consistent();
        let prefix = ledger.books.prefix.as_ref().unwrap();
        let left = before.into_iter().filter(|page| !prefix.contains(*page));
        gone = left.collect();
        assert_eq!(gone.len() + ledger.cached_pages(), 4);
        let expected = [young[1], young[0], old[1], old[0]];
        assert_eq!(gone.len(), held.len() - 2);
        assert!(
            expected[..gone.len()]
                .iter()
                .all(|page| gone.contains(page))
        );
    }
    assert_eq!(gone.len(), 4);
}

#[test]
fn content_that_is_there_already_is_kept_once() {
    let mut ledger = ledger(8);
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut first = building(&mut ledger, 3);
    let mut second = building(&mut ledger, 3);
    assert_eq!(
        ledger.cache_pages(b"", &tokens[..4], &mut first, 0, true),
        2
    );
    assert_eq!(ledger.cache_pages(b"", &tokens, &mut second, 0, true), 3);
    assert_eq!(
        second[..2],
        first[..2],
        "the cache's pages took their place"
    );
    assert_eq!(ledger.cache_pages(b"", &tokens, &mut first, 2, true), 3);
    assert_eq!(first, second);
    assert_eq!(ledger.counts().free, 5);
    ledger.free(&first);
    ledger.free(&second);
    assert_eq!((ledger.cached_pages(), ledger.free_pages()), (3, 8));
    ledger.assert_consistent();
}

#[test]
fn pages_that_may_not_be_swapped_still_carry_the_chain_on() {
    // As a lease's: the peer knows its pages by place. Their parent in the cache is another's.
    let mut ledger = ledger(8);
    let tokens = [1, 2, 3, 4];
    let theirs = computed(&mut ledger, b"", &tokens[..2]);
    let mut leased = building(&mut ledger, 2);
    let own = leased.clone();
    ledger.lease(&leased).unwrap();
    assert_eq!(ledger.cache_pages(b"", &tokens, &mut leased, 0, false), 0);
    assert_eq!(leased, own);
    let found = hit(&mut ledger, b"", &[1, 2, 3, 4, 5]);
    assert_eq!(found, [theirs[0], own[1]]);
    ledger.free(&found);
    // The parent is idle, the child is leased: the parent can go, the child leaves the cache
    // with it and stays the lease's.
    let all = building(&mut ledger, 6);
    assert_eq!((ledger.cached_pages(), all.len()), (0, 6));
    assert_eq!(ledger.counts().leased, 2);
    ledger.end_lease(&leased);
    assert_eq!(ledger.counts().free, 2);
    ledger.assert_consistent();
}

#[test]
fn a_quarantined_page_leaves_the_cache_with_what_is_computed_on_top() {
    let mut ledger = ledger(8);
    let pages = computed(&mut ledger, b"", &[1, 2, 3, 4, 5, 6]);
    let sharer = hit(&mut ledger, b"", &[1, 2, 3, 4, 5, 6, 7]);
    let stuck = ledger.guard([pages[1]]);
    ledger.quarantine(stuck);
    ledger.assert_consistent();
    assert_eq!(ledger.cached_pages(), 1);
    assert_eq!(hit(&mut ledger, b"", &[1, 2, 3, 4, 5]), pages[..1]);
    ledger.free(&pages[..1]);
    // The sharer keeps all of its pages, until it ends.
    assert_eq!(ledger.owners(pages[1]), 1);
    assert_eq!(ledger.state(pages[2]), PageState::Ready);
    ledger.free(&sharer);
    assert_eq!(ledger.state(pages[1]), PageState::Quarantined);
    assert_eq!((ledger.free_pages(), ledger.usable_pages()), (7, 7));
    ledger.assert_consistent();
}

#[test]
fn a_cached_prefix_counts_once_when_a_prompt_is_fitted() {
    let mut ledger = ledger(4);
    computed(&mut ledger, b"", &[1, 2, 3, 4]);
    let tokens = [1, 2, 3, 4, 5, 6, 7];
    assert!(ledger.prefix_fits(b"", &tokens, 4));
    let rest = building(&mut ledger, 1);
    // One page is Free, two are its own prefix: four cannot be had, whatever idle says.
    assert_eq!(ledger.free_pages(), 3);
    assert!(ledger.prefix_fits(b"", &tokens, 3));
    assert!(!ledger.prefix_fits(b"", &tokens, 4));
    let held = hit(&mut ledger, b"", &tokens);
    assert!(
        ledger.prefix_fits(b"", &tokens, 3),
        "held by another: shared"
    );
    ledger.free(&held);
    ledger.free(&rest);
}

#[test]
fn without_a_cache_nothing_is_kept() {
    let mut ledger = Ledger::new(4);
    let mut pages = building(&mut ledger, 2);
    assert_eq!(
        ledger.cache_pages(b"", &[1, 2, 3, 4], &mut pages, 0, true),
        0
    );
    assert_eq!(ledger.take_prefix(b"", &[1, 2, 3], &mut Vec::new()), 0);
    ledger.free(&pages);
    assert_eq!(ledger.counts().free, 4);
}

/// What a random user of the ledger holds.
enum Hold {
    /// Its tokens, its pages, how many are the cache's as well; whether pages are leased.
    Sequence(Vec<u32>, Vec<PageId>, usize, bool),
    Guard(GuardToken),
}

/// Sequences, leases, steps, evictions and quarantines in any order: counts add up after every
/// event, a hit has the content that was asked for, and everything comes back.
#[test]
fn random_sharers_keep_the_books() {
    for seed in 0..2_000u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below) as usize
        };
        let pages = 4 + next(20);
        let mut ledger = ledger(pages);
        // What each page holds, as the engine would have written it: all tokens up to its end.
        let mut content: Vec<Vec<u32>> = vec![Vec::new(); pages];
        let mut holds: Vec<Hold> = Vec::new();
        for _ in 0..120 {
            match next(6) {
                0 | 1 => {
                    let length = PAGE_TOKENS * (1 + next(4)) + 1;
                    let tokens: Vec<u32> = (0..length).map(|_| next(2) as u32).collect();
                    let mut taken = Vec::new();
                    let hits = ledger.take_prefix(b"", &tokens, &mut taken);
                    for (at, page) in taken.iter().enumerate() {
                        let held = &content[page.0 as usize];
                        assert_eq!(held[..], tokens[..(at + 1) * PAGE_TOKENS], "seed {seed}");
                    }
                    let missing = length / PAGE_TOKENS - hits;
                    let kept = ledger.allocate(missing, AllocateAs::Building, &mut taken);
                    match kept {
                        Ok(()) => {
                            for (at, page) in taken.iter().enumerate().skip(hits) {
                                content[page.0 as usize] = tokens[..(at + 1) * PAGE_TOKENS].into();
                            }
                            let leased = next(3) == 0;
                            if leased {
                                ledger.lease(&taken).unwrap();
                            }
                            holds.push(Hold::Sequence(tokens, taken, hits, leased));
                        }
                        Err(_) => ledger.free(&taken),
                    }
                }
                2 => {
                    let mut named = Vec::new();
                    for hold in &holds {
                        if let Hold::Sequence(_, pages, ..) = hold
                            && next(2) == 0
                        {
                            named.extend_from_slice(pages);
                        }
                    }
                    holds.push(Hold::Guard(ledger.guard(named)));
                }
                3 => {
                    if let Some(Hold::Sequence(tokens, pages, known, leased)) = holds.last_mut() {
                        *known = ledger.cache_pages(b"", tokens, pages, *known, !*leased);
                    }
                }
                4 | 5 if !holds.is_empty() => {
                    let at = next(holds.len() as u64);
                    match holds.swap_remove(at) {
                        Hold::Sequence(_, pages, _, true) => ledger.end_lease(&pages),
                        Hold::Sequence(_, pages, _, false) => ledger.free(&pages),
                        Hold::Guard(token) if seed % 4 == 0 && next(4) == 0 => {
                            ledger.quarantine(token);
                        }
                        Hold::Guard(token) => ledger.release(token),
                    }
                }
                _ => {}
            }
            ledger.assert_consistent();
        }
        for hold in holds {
            match hold {
                Hold::Sequence(_, pages, _, true) => ledger.end_lease(&pages),
                Hold::Sequence(_, pages, _, false) => ledger.free(&pages),
                Hold::Guard(token) => ledger.release(token),
            }
        }
        ledger.assert_consistent();
        let counts = ledger.counts();
        assert_eq!(ledger.free_pages(), ledger.usable_pages(), "seed {seed}");
        assert_eq!(counts.leased + counts.building + counts.stopping, 0);
    }
}
