//! The ledger itself: states, owners, names, the queue of free pages and the counts.

use super::books::{Books, Page};
use super::guards::GuardTable;
use super::state::{self, AllocateAs, IllegalEvent, PageEvent, PageState};
use crate::pool::{PageId, PoolBacking, PoolMemory};
use crate::prefix::{PrefixConfig, PrefixIndex};
use kvserve_runtime::GuardToken;
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
    /// How many own it: sequences, leases, attempts, the prefix cache.
    pub owners: u32,
}

/// The states of all pages of one pool, who owns and who names them, and the prefix cache over
/// them. One per engine shard.
pub struct Ledger {
    pub(super) books: Books,
    guards: GuardTable,
    pub(super) hit_pages: u64,
}

impl Ledger {
    /// The ledger of a pool that peers on this host may map (PROTOCOL X2): a page's generation
    /// is raised when it leaves its last lease and when it is handed out, so before any reuse.
    pub fn of_pool(pool: Arc<PoolMemory>) -> Self {
        let mut ledger = Ledger::new(pool.pages());
        ledger.books.pool = Some(pool);
        ledger
    }

    /// The same ledger with a prefix cache over its pages.
    pub fn with_prefix_cache(mut self, config: PrefixConfig) -> Self {
        debug_assert_eq!(self.books.free.len(), self.books.pages.len());
        self.books.prefix = Some(PrefixIndex::new(self.books.pages.len(), config));
        self
    }

    /// What backs the pool of this ledger, if it has one.
    pub fn backing(&self) -> Option<PoolBacking> {
        self.books.pool.as_ref().map(|pool| pool.backing())
    }

    /// Whether this ledger raises the generations of that pool.
    pub fn raises_generations_of(&self, pool: &Arc<PoolMemory>) -> bool {
        let own = self.books.pool.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, pool))
    }

    /// A ledger of `pages` free pages, ids `0..pages`.
    pub fn new(pages: usize) -> Self {
        assert!(
            u32::try_from(pages).is_ok(),
            "{pages} pages: ids have 32 bits"
        );
        let mut counts = [0; PageState::COUNT];
        counts[PageState::Free.index()] = pages;
        let page = |_| Page {
            state: PageState::Free,
            named: 0,
            owners: 0,
            leases: 0,
            whole: false,
        };
        Ledger {
            books: Books {
                pages: (0..pages).map(page).collect(),
                free: (0..pages as u32).map(PageId).collect(),
                counts,
                pool: None,
                prefix: None,
                evictions: 0,
            },
            guards: GuardTable::new(),
            hit_pages: 0,
        }
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.books.pages.len()
    }

    /// Takes `count` pages, those freed longest ago first, and appends them to `out`. What the
    /// prefix cache alone owns is evicted for it, least recently used first.
    ///
    /// # Errors
    /// [`NeedPages`] when fewer can be had; then nothing was taken and nothing evicted.
    pub fn allocate(
        &mut self,
        count: usize,
        what: AllocateAs,
        out: &mut Vec<PageId>,
    ) -> Result<(), NeedPages> {
        let free = self.free_pages();
        if count > free {
            return Err(NeedPages {
                wanted: count,
                free,
            });
        }
        let books = &mut self.books;
        books.make_room(count);
        for _ in 0..count {
            let page = books.free.pop_front().expect("room was made above");
            let entry = &mut books.pages[page.0 as usize];
            assert_eq!(
                entry.named, 0,
                "free page {} is named by an operation (invariant I2)",
                page.0
            );
            entry.owners = 1;
            books.must(page, PageEvent::Allocate(what));
            out.push(page);
        }
        books.check_counts();
        Ok(())
    }

    /// Names each of `pages` once more: none of them is handed out before the token comes back
    /// by [`Ledger::release`] (or never, by [`Ledger::quarantine`]). A page may appear twice.
    ///
    /// Panics when a page is Free: who names a page owns it or holds another name of it.
    pub fn guard(&mut self, pages: impl IntoIterator<Item = PageId>) -> GuardToken {
        let books = &mut self.books;
        self.guards.issue(pages, |page| {
            let entry = &mut books.pages[page.0 as usize];
            assert!(
                entry.state != PageState::Free,
                "an operation names page {}, which is free (invariant I2)",
                page.0
            );
            entry.named += 1;
            if entry.owners == 1 {
                books.settle(page);
            }
        })
    }

    /// The operation behind the token has ended physically: its pages lose that name, and those
    /// that were only waiting for it become Free.
    pub fn release(&mut self, token: GuardToken) {
        let books = &mut self.books;
        self.guards.end(token, |page| {
            let entry = &mut books.pages[page.0 as usize];
            entry.named -= 1;
            let (named, owners) = (entry.named, entry.owners);
            if named == 0 {
                books.must(page, PageEvent::LastGuardEnded);
                if owners == 1 {
                    books.settle(page);
                }
            }
        });
        books.check_counts();
    }

    /// The operation behind the token could not be proven quiet: its pages are out of use for
    /// the life of the process, whatever state they were in, and out of the prefix cache with
    /// all that was computed on top of them. Owners that share one give it up in their own time.
    pub fn quarantine(&mut self, token: GuardToken) {
        let books = &mut self.books;
        self.guards.end(token, |page| {
            books.pages[page.0 as usize].named -= 1;
            books.must(page, PageEvent::Quarantine);
            books.uncache(page);
        });
        books.check_counts();
    }

    /// An owner that is no lease gives `pages` up. Each stays as it is while somebody else owns
    /// it; else it is Free at once if nobody names it, or Stopping until its last guard ends.
    /// Quarantined pages stay quarantined.
    ///
    /// Panics when a page is given up more often than it was owned: by then it may be another
    /// owner's, so this must never pass.
    pub fn free(&mut self, pages: &[PageId]) {
        self.given_up(pages, Books::give_up);
    }

    /// A lease ends and gives its pages up: as [`Ledger::free`], by an owner that called
    /// [`Ledger::lease`].
    ///
    /// Panics when a page is not leased so often.
    pub fn end_lease(&mut self, pages: &[PageId]) {
        self.given_up(pages, Books::end_lease);
    }

    fn given_up(&mut self, pages: &[PageId], give_up: fn(&mut Books, PageId)) {
        for &page in pages {
            give_up(&mut self.books, page);
        }
        // The last page of a chain is idle before its parent, so it is evicted first.
        for &page in pages.iter().rev() {
            self.books.settle(page);
        }
        self.books.check_counts();
    }

    /// Building pages are whole now: Ready. Leased pages stay so; from now on they may be
    /// shared.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page in another state; then nothing was changed.
    pub fn mark_ready(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        self.all(pages, PageEvent::MarkReady)?;
        for page in pages {
            self.books.pages[page.0 as usize].whole = true;
        }
        Ok(())
    }

    /// One more owner for each of `pages`, which are whole: Ready, or leased and marked ready.
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not; then nothing was changed.
    pub fn share(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        for (done, &page) in pages.iter().enumerate() {
            if let Err(error) = self.books.share(page) {
                self.free(&pages[..done]);
                return Err(error);
            }
            self.books.settle(page);
        }
        Ok(())
    }

    /// Pages that the caller owns (Building, Ready, or leased to others, too) are granted to a
    /// peer: Leased. The caller's share becomes the lease's: it ends by [`Ledger::end_lease`],
    /// or by [`Ledger::unlease`] and [`Ledger::free`].
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page in another state, or with no owner left that is no
    /// lease; then nothing was changed.
    pub fn lease(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        let event = PageEvent::Lease;
        for &page in pages {
            let Page {
                state,
                owners,
                leases,
                ..
            } = *self.books.page(page);
            if owners == leases {
                return Err(IllegalEvent { page, state, event });
            }
        }
        self.all(pages, event)?;
        for page in pages {
            self.books.pages[page.0 as usize].leases += 1;
            self.books.settle(*page);
        }
        Ok(())
    }

    /// A lease ended and its owner keeps the pages: Ready, unless another lease of them goes
    /// on. (Who does not keep them calls [`Ledger::end_lease`].)
    ///
    /// # Errors
    /// [`IllegalEvent`] for the first page that is not Leased; then nothing was changed.
    pub fn unlease(&mut self, pages: &[PageId]) -> Result<(), IllegalEvent> {
        let event = |leases: u32| PageEvent::Unlease { leased: leases > 1 };
        for &page in pages {
            let Page { state, leases, .. } = *self.books.page(page);
            if state::next(state, event(leases)).is_none() || leases == 0 {
                let event = event(leases);
                return Err(IllegalEvent { page, state, event });
            }
        }
        for &page in pages {
            let leases = self.books.page(page).leases;
            self.books.pages[page.0 as usize].leases -= 1;
            self.books.must(page, event(leases));
            self.books.settle(page);
        }
        self.books.check_counts();
        Ok(())
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
        self.books.page(page).state
    }

    /// How many guards name one page.
    pub fn named(&self, page: PageId) -> u32 {
        self.books.page(page).named
    }

    /// How many own one page.
    pub fn owners(&self, page: PageId) -> u32 {
        self.books.page(page).owners
    }

    /// Guard tokens given out and not yet back.
    pub fn guards_live(&self) -> usize {
        self.guards.live()
    }

    /// Pages that can be handed out now: Free, or owned by nobody but the prefix cache.
    pub fn free_pages(&self) -> usize {
        self.books.free.len() + self.books.idle()
    }

    /// Pages that can ever be handed out again: all but the quarantined (PROTOCOL C3).
    pub fn usable_pages(&self) -> usize {
        self.pages() - self.books.counts[PageState::Quarantined.index()]
    }

    /// Pages by state.
    pub fn counts(&self) -> PageCounts {
        let of = |state: PageState| self.books.counts[state.index()];
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
        let pages = (0..).map(PageId).zip(&self.books.pages);
        pages
            .filter(|(_, page)| page.state != PageState::Free)
            .map(|(place, page)| PageView {
                page: place,
                state: page.state,
                named: page.named,
                owners: page.owners,
            })
            .collect()
    }

    /// Whether so many pages are quarantined (over 1 % of the pool) that this shard must not
    /// take work (PROTOCOL E2).
    pub fn not_ready(&self) -> bool {
        let quarantined = self.books.counts[PageState::Quarantined.index()];
        quarantined * QUARANTINED_PART_MAX > self.pages()
    }

    /// Checks everything that must hold, in time linear in the pool. For tests and simulators.
    pub fn assert_consistent(&self) {
        let books = &self.books;
        let mut counts = [0; PageState::COUNT];
        let (mut cached, mut idle) = (0, 0);
        for (place, page) in (0..).map(PageId).zip(&books.pages) {
            counts[page.state.index()] += 1;
            assert!(
                page.leases <= page.owners,
                "{place:?}: more leases than owners"
            );
            let owned = page.owners > 0;
            match page.state {
                PageState::Free => {
                    assert_eq!(
                        (page.named, page.owners),
                        (0, 0),
                        "{place:?} is free, yet used"
                    );
                }
                PageState::Stopping => {
                    assert!(page.named > 0, "stopping {place:?} waits for nobody");
                    assert!(!owned, "stopping {place:?} has an owner");
                }
                PageState::Building | PageState::Pulling => {
                    assert_eq!(page.owners, 1, "{place:?} is shared before it is whole");
                    assert_eq!(page.leases, 0, "{place:?} is leased and does not say so");
                }
                PageState::Ready => assert!(owned && page.whole && page.leases == 0),
                PageState::Leased => assert!(page.leases > 0, "{place:?} is leased to nobody"),
                PageState::Quarantined => {}
            }
            let Some(prefix) = books
                .prefix
                .as_ref()
                .filter(|prefix| prefix.contains(place))
            else {
                continue;
            };
            cached += 1;
            idle += usize::from(prefix.is_idle(place));
            assert!(
                matches!(page.state, PageState::Ready | PageState::Leased) && page.whole,
                "cached {place:?} is {}",
                page.state.label()
            );
            let unused = page.owners == 1 && page.named == 0;
            assert_eq!(prefix.is_idle(place), unused, "{place:?}: evictable or not");
        }
        assert_eq!(counts, books.counts);
        assert_eq!(books.free.len(), counts[PageState::Free.index()]);
        for page in &books.free {
            assert_eq!(books.page(*page).state, PageState::Free);
        }
        assert_eq!(self.cached_pages(), cached);
        assert_eq!(books.idle(), idle);
    }

    /// Applies `event` to all of `pages` or, if one does not allow it, to none. A page that
    /// appears twice is illegal the second time.
    fn all(&mut self, pages: &[PageId], event: PageEvent) -> Result<(), IllegalEvent> {
        for (done, &page) in pages.iter().enumerate() {
            let state = self.books.page(page).state;
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
            self.books.must(page, event);
        }
        self.books.check_counts();
        Ok(())
    }
}
