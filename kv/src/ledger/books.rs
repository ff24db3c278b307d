//! The record of each page: its state, who owns it, who names it; the queue of free pages and
//! the counts. A leaf under [`super::Ledger`].
//!
//! Owners are counted, not named: a sequence, a lease, an attempt and the prefix cache own a
//! page alike. `leases` says how many of the owners are leases.

use super::state::{self, IllegalEvent, PageEvent, PageState};
use crate::pool::{PageId, PoolMemory};
use crate::prefix::PrefixIndex;
use std::collections::VecDeque;
use std::sync::Arc;

pub(super) struct Page {
    pub state: PageState,
    /// Guards that name it.
    pub named: u32,
    /// Who would have to give it up before it is Free; leases included.
    pub owners: u32,
    /// Owners that are leases.
    pub leases: u32,
    /// Nobody writes it any more: it may be shared. Always so in state Ready.
    pub whole: bool,
}

pub(super) struct Books {
    pub pages: Vec<Page>,
    /// Free pages, the one freed longest ago in front.
    pub free: VecDeque<PageId>,
    pub counts: [usize; PageState::COUNT],
    /// The pool whose generations are raised, if a peer may map it.
    pub pool: Option<Arc<PoolMemory>>,
    /// The prefix cache's index; `None` when it is off.
    pub prefix: Option<PrefixIndex>,
    /// Entries given up for want of free pages; only grows.
    pub evictions: u64,
}

impl Books {
    pub(super) fn page(&self, page: PageId) -> &Page {
        &self.pages[page.0 as usize]
    }

    /// Applies an event that the caller's contract makes legal. Counts of owners are the
    /// caller's; this keeps state, counts, free queue and generations.
    pub(super) fn must(&mut self, page: PageId, event: PageEvent) {
        let entry = &mut self.pages[page.0 as usize];
        let state = entry.state;
        let Some(after) = state::next(state, event) else {
            panic!("{}", IllegalEvent { page, state, event });
        };
        let lease_ends = state == PageState::Leased && after != PageState::Leased;
        let handed_out = state == PageState::Free;
        if let Some(pool) = self.pool.as_ref().filter(|_| lease_ends || handed_out) {
            pool.raise_generation(page);
        }
        self.counts[state.index()] -= 1;
        self.counts[after.index()] += 1;
        entry.state = after;
        match after {
            PageState::Free => {
                debug_assert_eq!((entry.named, entry.owners, entry.leases), (0, 0, 0));
                self.free.push_back(page);
            }
            PageState::Ready => entry.whole = true,
            PageState::Building | PageState::Pulling => entry.whole = false,
            PageState::Leased | PageState::Stopping | PageState::Quarantined => {}
        }
    }

    /// One owner that is no lease gives the page up.
    pub(super) fn give_up(&mut self, page: PageId) {
        let entry = &mut self.pages[page.0 as usize];
        let state = entry.state;
        let (shared, named) = (entry.owners > 1, entry.named > 0);
        let event = PageEvent::Free { shared, named };
        if entry.owners == entry.leases {
            // Given up before, or by somebody who never owned it: it may by now be another's.
            panic!("{}", IllegalEvent { page, state, event });
        }
        entry.owners -= 1;
        self.must(page, event);
    }

    /// One lease ends and gives the page up with it.
    pub(super) fn end_lease(&mut self, page: PageId) {
        let entry = &mut self.pages[page.0 as usize];
        let state = entry.state;
        let event = PageEvent::EndLease {
            shared: entry.owners > 1,
            leased: entry.leases > 1,
            named: entry.named > 0,
        };
        if entry.leases == 0 {
            panic!("{}", IllegalEvent { page, state, event });
        }
        entry.leases -= 1;
        entry.owners -= 1;
        self.must(page, event);
    }

    /// One more owner for a page that is whole.
    pub(super) fn share(&mut self, page: PageId) -> Result<(), IllegalEvent> {
        let entry = &mut self.pages[page.0 as usize];
        let event = PageEvent::Share;
        let state = entry.state;
        if state::next(state, event).is_none() || !entry.whole {
            return Err(IllegalEvent { page, state, event });
        }
        entry.owners += 1;
        Ok(())
    }

    // ---- the prefix cache as an owner -----------------------------------------------------

    /// Whether the cache may give this page up for somebody else: nobody but the cache owns it
    /// and no operation names it. The one place that keeps leased, held and running pages out
    /// of eviction's reach (PROTOCOL L1, C2).
    fn evictable(page: &Page) -> bool {
        page.state == PageState::Ready && page.owners == 1 && page.leases == 0 && page.named == 0
    }

    /// Owners or names of a page have changed: moves it in or out of the queue for eviction.
    pub(super) fn settle(&mut self, page: PageId) {
        let evictable = Self::evictable(&self.pages[page.0 as usize]);
        if let Some(prefix) = &mut self.prefix {
            prefix.set_idle(page, evictable);
        }
    }

    /// Pages that the cache would give up for an allocation.
    pub(super) fn idle(&self) -> usize {
        self.prefix.as_ref().map_or(0, PrefixIndex::idle)
    }

    /// Evicts until `wanted` pages are free or nothing is left to evict: least recently used
    /// first, a leaf before its parent.
    pub(super) fn make_room(&mut self, wanted: usize) {
        // Each round takes one entry out of the index, so there are at most as many as pages.
        while self.free.len() < wanted {
            let Some(prefix) = &mut self.prefix else {
                return;
            };
            let Some(oldest) = prefix.oldest_idle() else {
                return;
            };
            let leaf = prefix.leaf_below(oldest);
            prefix.remove_leaf(leaf);
            self.evictions += 1;
            // A leaf in use below an idle entry (its owner brought its own copy of the parent)
            // only leaves the index: the page stays with its owner.
            self.give_up(leaf);
        }
    }

    /// Takes an entry and all that is computed on top of it out of the cache.
    pub(super) fn uncache(&mut self, page: PageId) {
        loop {
            let Some(prefix) = self.prefix.as_mut().filter(|prefix| prefix.contains(page)) else {
                return;
            };
            let leaf = prefix.leaf_below(page);
            prefix.remove_leaf(leaf);
            self.give_up(leaf);
        }
    }

    pub(super) fn check_counts(&self) {
        debug_assert_eq!(self.counts.iter().sum::<usize>(), self.pages.len(), "I3");
        debug_assert_eq!(self.counts[PageState::Free.index()], self.free.len(), "I3");
    }
}
