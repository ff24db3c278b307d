//! The index alone: what is found, what is not, and in which order entries go.

use super::*;
use crate::pool::PageId;

const PAGE_TOKENS: usize = 3;

fn index(pages: usize) -> PrefixIndex {
    let config = PrefixConfig {
        page_tokens: PAGE_TOKENS,
        seed: 7,
    };
    PrefixIndex::new(pages, config)
}

const A: [u32; 3] = [1, 2, 3];
const B: [u32; 3] = [4, 5, 6];

#[test]
fn a_hit_has_the_same_parent_tokens_and_salt() {
    // Blind: every entry is a candidate for every lookup, only the comparison tells them apart.
    for blind in [false, true] {
        let mut index = index(16);
        if blind {
            index.blind();
        }
        let (p, c, salted) = (PageId(4), PageId(9), PageId(2));
        assert_eq!(index.insert(None, b"", &A, p), Inserted::New);
        assert_eq!(index.insert(Some(p), b"", &B, c), Inserted::New);
        assert_eq!(index.insert(None, b"x", &A, salted), Inserted::New);
        assert_eq!(index.insert(None, b"", &B, PageId(1)), Inserted::New);

        assert_eq!(index.find(None, b"", &A), Some(p));
        assert_eq!(index.find(None, b"x", &A), Some(salted));
        assert_eq!(index.find(None, b"y", &A), None);
        assert_eq!(index.find(None, b"x", &B), None);
        assert_eq!(index.find(Some(p), b"", &B), Some(c));
        assert_eq!(index.find(Some(salted), b"x", &B), None, "another parent");
        for place in 0..PAGE_TOKENS {
            let mut other = A;
            other[place] ^= 1 << (place * 9);
            assert_eq!(index.find(None, b"", &other), None, "token {place}");
        }
        assert_eq!(index.insert(None, b"", &A, PageId(8)), Inserted::Known(p));
        assert_eq!(index.len(), 4);
    }
}

#[test]
fn an_entry_goes_only_after_its_children_and_takes_its_salt_along() {
    let mut index = index(8);
    let pages = [PageId(0), PageId(1), PageId(2), PageId(3)];
    index.insert(None, b"salt", &A, pages[0]);
    index.insert(Some(pages[0]), b"salt", &A, pages[1]);
    index.insert(Some(pages[0]), b"salt", &B, pages[2]);
    index.insert(Some(pages[2]), b"salt", &B, pages[3]);
    assert_eq!(index.salts(), 1);
    let mut gone = Vec::new();
    while index.contains(pages[0]) {
        let leaf = index.leaf_below(pages[0]);
        index.remove_leaf(leaf);
        gone.push(leaf.0);
    }
    assert_eq!(gone, [3, 2, 1, 0]);
    assert_eq!((index.len(), index.salts()), (0, 0));
    // Its parent is gone: what was computed on top of it is neither found nor taken in.
    assert_eq!(index.find(Some(pages[0]), b"salt", &A), None);
    let orphan = index.insert(Some(pages[0]), b"salt", &A, pages[1]);
    assert_eq!(orphan, Inserted::Refused);
}

#[test]
fn idle_entries_queue_in_the_order_in_which_they_became_idle() {
    let mut index = index(8);
    for page in 0..4 {
        index.insert(None, &[page as u8], &A, PageId(page));
    }
    for page in [2, 0, 3, 1] {
        index.set_idle(PageId(page), true);
    }
    index.set_idle(PageId(3), false);
    index.set_idle(PageId(2), true); // again: keeps its place
    assert_eq!(index.idle(), 3);
    let mut order = Vec::new();
    while let Some(page) = index.oldest_idle() {
        order.push(page.0);
        index.remove_leaf(page);
    }
    assert_eq!(order, [2, 0, 1]);
    assert_eq!((index.idle(), index.len()), (0, 1));
    index.set_idle(PageId(0), true);
    assert_eq!(index.idle(), 0, "what is not in the index is not idle");
}

#[test]
fn a_full_bucket_refuses_and_forgets_nothing() {
    let mut index = index(64);
    index.blind();
    let mut taken = 0;
    for page in 0..64 {
        match index.insert(None, b"", &[page, 0, 0], PageId(page)) {
            Inserted::New => taken += 1,
            Inserted::Refused => {}
            Inserted::Known(other) => panic!("{other:?} has other tokens"),
        }
    }
    assert_eq!(taken, 16, "a lookup compares so many at most");
    for page in 0..taken {
        let found = index.find(None, b"", &[page, 0, 0]);
        assert_eq!(found, Some(PageId(page)));
    }
    assert_eq!(index.salts(), 1);
}

/// Random trees against a list of (parent, salt, tokens): found exactly what is in.
#[test]
fn random_trees_agree_with_a_list() {
    for seed in 0..200u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let mut index = index(24);
        let mut list: Vec<(Option<PageId>, u64, [u32; 3], PageId)> = Vec::new();
        for _ in 0..300 {
            let parent =
                (!list.is_empty() && next(3) > 0).then(|| list[next(list.len() as u64) as usize].3);
            let salt = match parent {
                Some(_) => 0,
                None => next(3),
            };
            let tokens = [next(2) as u32, next(2) as u32, 0];
            let known = list
                .iter()
                .find(|entry| (entry.0, entry.1, entry.2) == (parent, salt, tokens))
                .map(|entry| entry.3);
            assert_eq!(index.find(parent, &[salt as u8], &tokens), known, "{seed}");
            let page = PageId(next(24) as u32);
            if next(3) == 0 {
                if index.contains(page) {
                    let leaf = index.leaf_below(page);
                    assert!(!list.iter().any(|entry| entry.0 == Some(leaf)), "{seed}");
                    index.remove_leaf(leaf);
                    list.retain(|entry| entry.3 != leaf);
                }
                continue;
            }
            match index.insert(parent, &[salt as u8], &tokens, page) {
                Inserted::New => list.push((parent, salt, tokens, page)),
                Inserted::Known(other) => assert_eq!(Some(other), known, "{seed}"),
                Inserted::Refused => assert!(list.iter().any(|entry| entry.3 == page)),
            }
            assert_eq!(index.len(), list.len());
            let roots = list.iter().filter(|entry| entry.0.is_none());
            let salts: std::collections::BTreeSet<_> = roots.map(|entry| entry.1).collect();
            assert_eq!(index.salts(), salts.len());
        }
    }
}
