//! The ledger itself: states, names, the queue of free pages and the counts.

use super::guards::GuardTable;
use super::state::{self, AllocateAs, IllegalEvent, PageEvent, PageState};
use crate::pool::{PageId, PoolMemory};
use kvserve_runtime::GuardToken;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// A pool with more than one page in this many quarantined is not ready (PROTOCOL E2: 1 %).
const QUARANTINED_PART_MAX: usize = 100;

/// Pages of each state. They add up to the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Ready to be handed out.
    pub free: usize,
    /// Being written by an engine.
    pub building: usize,
    /// Whole.
    pub ready: usize,
    /// Granted to a peer.
    pub leased: usize,
    /// Being written by a migration.
    pub pulling: usize,
    /// Given up, still named by an operation.
    pub stopping: usize,
    /// Out of use for the life of the process.
    pub quarantined: usize,
}

impl PageCounts {
    /// Their sum: the pages of the pool.
    pub fn total(&self) -> usize {
        self.free
            + self.building
            + self.ready
            + self.leased
            + self.pulling
            + self.stopping
            + self.quarantined
    }
}

/// There are not enough free pages; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeedPages {
    /// Pages asked for.
    pub wanted: usize,
    /// Pages free.
    pub free: usize,
}

impl fmt::Display for NeedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} KV pages are needed and {} are free; wait for running requests, or raise --kv-cache",
            self.wanted, self.free
        )
    }
}

impl std::error::Error for NeedPages {}

/// One page as `/debug/pages` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageView {
    /// Which page.
    pub page: PageId,
    /// Its state.
    pub state: PageState,
    /// How many guards name it.
    pub named: u32,
}

struct Page {
    state: PageState,
    named: u32,
}

/// The states of all pages of one pool, and who names them. One per engine shard.
pub struct Ledger {
    pages: Vec<Page>,
    /// Free pages, the one freed longest ago in front.
    free: VecDeque<PageId>,
    counts: [usize; PageState::COUNT],
    guards: GuardTable,
    /// The pool whose generations are raised, if a peer may map it.
    pool: Option<Arc<PoolMemory>>,
}

impl Ledger {
    /// The ledger of a pool that peers on this host may map (PROTOCOL X2): a page's generation
    /// is raised when it leaves a lease and when it is handed out, so before any reuse.
    pub fn of_pool(pool: Arc<PoolMemory>) -> Self {
        Ledger {
            pool: Some(pool.clone()),
            ..Ledger::new(pool.pages())
        }
    }

    /// Whether this ledger raises the generations of that pool.
    pub fn raises_generations_of(&self, pool: &Arc<PoolMemory>) -> bool {
        self.pool.as_ref().is_some_and(|own| Arc::ptr_eq(own, pool))
    }

    /// A ledger of `pages` free pages, ids `0..pages`.
    pub fn new(pages: usize) -> Self {
        assert!(
            u32::try_from(pages).is_ok(),
            "{pages} pages: ids have 32 bits"
        );
        let mut counts = [0; PageState::COUNT];
        counts[PageState::Free.index()] = pages;
        Ledger {
            pages: (0..pages)
                .map(|_| Page {
                    state: PageState::Free,
                    named: 0,
                })
                .collect(),
            free: (0..pages as u32).map(PageId).collect(),
            counts,
            guards: GuardTable::new(),
            pool: None,
        }
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Takes `count` pages, those freed longest ago first, and appends them to `out`.
    ///
    /// # Errors
    /// [`NeedPages`] when fewer are free; then nothing was taken.
    pub fn allocate(
        &mut self,
        count: usize,
        what: AllocateAs,
        out: &mut Vec<PageId>,
    ) -> Result<(), NeedPages> {
        if count > self.free.len() {
            return Err(NeedPages {
                wanted: count,
                free: self.free.len(),
            });
        }
        for _ in 0..count {
            let page = self.free.pop_front().expect("counted above");
            assert_eq!(
                self.pages[page.0 as usize].named, 0,
                "free page {} is named by an operation (invariant I2)",
                page.0
            );
            self.must(page, PageEvent::Allocate(what));
            out.push(page);
        }
        self.check_counts();
        Ok(())
    }

    /// Names each of `pages` once more: none of them is handed out before the token comes back
    /// by [`Ledger::release`] (or never, by [`Ledger::quarantine`]). A page may appear twice.
    ///
    /// Panics when a page is Free: who names a page owns it or holds another name of it.
    pub fn guard(&mut self, pages: impl IntoIterator<Item = PageId>) -> GuardToken {
        let table = &mut self.pages;
        self.guards.issue(pages, |page| {
            let entry = &mut table[page.0 as usize];
            assert!(
                entry.state != PageState::Free,
                "an operation names page {}, which is free (invariant I2)",
                page.0
            );
            entry.named += 1;
        })
    }

    /// The operation behind the token has ended physically: its pages lose that name, and those
    /// that were only waiting for it become Free.
    pub fn release(&mut self, token: GuardToken) {
        self.end(token, false);
    }

    /// The operation behind the token could not be proven quiet: its pages are out of use for
    /// the life of the process, whatever state they were in.
    pub fn quarantine(&mut self, token: GuardToken) {
        self.end(token, true);
    }

    /// The owner gives `pages` up: each is Free at once if nobody names it, else Stopping until
    /// its last guard ends. Quarantined pages stay quarantined.
    ///
    /// Panics when a page is Free or already given up: a page freed twice may by then be another
    /// owner's, so this must never pass.
    pub fn free(&mut self, pages: &[PageId]) {
        for &page in pages {
            let named = self.pages[page.0 as usize].named > 0;
            self.must(page, PageEvent::Free { named });
        }
        self.check_counts();
    }

    /// Building pages are whole now: Ready.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not Building; then nothing was changed.
    pub fn mark_ready(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::MarkReady)
    }

    /// Building or Ready pages are granted to a peer: Leased.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page in another state; then nothing was changed.
    pub fn lease(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::Lease)
    }

    /// The lease ended and its owner keeps the pages: Ready. (Who does not keep them calls
    /// [`Ledger::free`].)
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not Leased; then nothing was changed.
    pub fn unlease(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::Unlease)
    }

    /// COMMIT was answered OK: these pulled pages are proven whole: Ready.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not Pulling; then nothing was changed.
    pub fn commit(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::Commit)
    }

    /// COMMIT was answered OK: these pulled pages (the tail) go on being written: Building.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not Pulling; then nothing was changed.
    pub fn adopt(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::Adopt)
    }

    /// State of one page.
    pub fn state(&self, page: PageId) -> PageState {
        self.pages[page.0 as usize].state
    }

    /// How many guards name one page.
    pub fn named(&self, page: PageId) -> u32 {
        self.pages[page.0 as usize].named
    }

    /// Guard tokens given out and not yet back.
    pub fn guards_live(&self) -> usize {
        self.guards.live()
    }

    /// Pages that can be handed out now.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Pages that can ever be handed out again: all but the quarantined (PROTOCOL C3).
    pub fn usable_pages(&self) -> usize {
        self.pages.len() - self.counts[PageState::Quarantined.index()]
    }

    /// Pages by state.
    pub fn counts(&self) -> PageCounts {
        let of = |state: PageState| self.counts[state.index()];
        PageCounts {
            free: of(PageState::Free),
            building: of(PageState::Building),
            ready: of(PageState::Ready),
            leased: of(PageState::Leased),
            pulling: of(PageState::Pulling),
            stopping: of(PageState::Stopping),
            quarantined: of(PageState::Quarantined),
        }
    }

    /// Every page that is not Free, in order of id, for `/debug/pages`.
    pub fn snapshot(&self) -> Vec<PageView> {
        self.pages
            .iter()
            .enumerate()
            .filter(|(_, page)| page.state != PageState::Free)
            .map(|(place, page)| PageView {
                page: PageId(place as u32),
                state: page.state,
                named: page.named,
            })
            .collect()
    }

    /// Whether so many pages are quarantined (over 1 % of the pool) that this shard must not
    /// take work (PROTOCOL E2).
    pub fn not_ready(&self) -> bool {
        self.counts[PageState::Quarantined.index()] * QUARANTINED_PART_MAX > self.pages.len()
    }

    /// Checks everything that must hold, in time linear in the pool. For tests and simulators.
    pub fn assert_consistent(&self) {
        let mut counts = [0; PageState::COUNT];
        for page in &self.pages {
            counts[page.state.index()] += 1;
            if page.state == PageState::Free {
                assert_eq!(page.named, 0, "a free page is named");
            }
            if page.state == PageState::Stopping {
                assert!(page.named > 0, "a stopping page waits for nobody");
            }
        }
        assert_eq!(counts, self.counts);
        assert_eq!(self.free.len(), counts[PageState::Free.index()]);
        for page in &self.free {
            assert_eq!(self.pages[page.0 as usize].state, PageState::Free);
        }
    }

    fn end(&mut self, token: GuardToken, quarantine: bool) {
        let Ledger {
            pages,
            free,
            counts,
            guards,
            pool,
        } = self;
        guards.end(token, |page| {
            let entry = &mut pages[page.0 as usize];
            entry.named -= 1;
            let event = match (quarantine, entry.named) {
                (true, _) => PageEvent::Quarantine,
                (false, 0) => PageEvent::LastGuardEnded,
                (false, _) => return,
            };
            step(entry, page, event, free, counts, pool.as_deref());
        });
        self.check_counts();
    }

    /// Applies `event` to all of `pages` or, if one does not allow it, to none. A page that
    /// appears twice is illegal the second time.
    fn all(&mut self, pages: &[PageId], event: PageEvent) -> Result<(), IllegalEvent> {
        for (done, &page) in pages.iter().enumerate() {
            let state = self.pages[page.0 as usize].state;
            if state::next(state, event).is_none() {
                return Err(IllegalEvent { page, state, event });
            }
            debug_assert!(
                !pages[..done].contains(&page),
                "page {} appears twice in one {event:?}",
                page.0
            );
        }
        for &page in pages {
            self.must(page, event);
        }
        self.check_counts();
        Ok(())
    }

    /// Applies an event that the caller's contract makes legal.
    fn must(&mut self, page: PageId, event: PageEvent) {
        let entry = &mut self.pages[page.0 as usize];
        let pool = self.pool.as_deref();
        step(entry, page, event, &mut self.free, &mut self.counts, pool);
    }

    fn check_counts(&self) {
        debug_assert_eq!(self.counts.iter().sum::<usize>(), self.pages.len(), "I3");
        debug_assert_eq!(self.counts[PageState::Free.index()], self.free.len(), "I3");
    }
}

fn step(
    entry: &mut Page,
    page: PageId,
    event: PageEvent,
    free: &mut VecDeque<PageId>,
    counts: &mut [usize; PageState::COUNT],
    pool: Option<&PoolMemory>,
) {
    let state = entry.state;
    let Some(after) = state::next(state, event) else {
        panic!("{}", IllegalEvent { page, state, event });
    };
    let lease_ends = state == PageState::Leased && after != PageState::Leased;
    let handed_out = state == PageState::Free;
    if let Some(pool) = pool.filter(|_| lease_ends || handed_out) {
        pool.raise_generation(page);
    }
    counts[state.index()] -= 1;
    counts[after.index()] += 1;
    entry.state = after;
    if after == PageState::Free {
        free.push_back(page);
    }
}
