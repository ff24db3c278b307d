//! The prefix cache as its users see it: who starts after a cached prefix, what enters it.
//!
//! Every call is a no-op on a ledger without a cache, so that callers need not ask.

use super::Ledger;
use crate::pool::PageId;
use crate::prefix::{Inserted, PrefixIndex};

/// What the prefix cache has done; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounters {
    /// Pages that new sequences found and did not compute again.
    pub hit_pages: u64,
    /// Pages given up for an allocation.
    pub evictions: u64,
}

/// What a prompt would find in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixFit {
    /// Leading whole pages.
    pub pages: usize,
    /// How many of them an allocation could take away: they count as free until taken.
    pub idle: usize,
}

impl Ledger {
    /// Whole pages in the prefix cache.
    pub fn cached_pages(&self) -> usize {
        self.books.prefix.as_ref().map_or(0, PrefixIndex::len)
    }

    /// Cached pages that an allocation could take.
    pub fn evictable_pages(&self) -> usize {
        self.books.idle()
    }

    /// What was counted since the start.
    pub fn prefix_counters(&self) -> PrefixCounters {
        PrefixCounters {
            hit_pages: self.hit_pages,
            evictions: self.books.evictions,
        }
    }

    /// What `tokens` would find, without taking it. Never the page with the last token: that
    /// one must be computed for its logits.
    pub fn prefix_fit(&self, salt: &[u8], tokens: &[u32]) -> PrefixFit {
        let mut fit = PrefixFit::default();
        let Some(prefix) = &self.books.prefix else {
            return fit;
        };
        walk(prefix, salt, tokens, |page| {
            fit.pages += 1;
            fit.idle += usize::from(prefix.is_idle(page));
        });
        fit
    }

    /// Whether a sequence of `tokens` that wants `pages` pages could be had now, the cached
    /// prefix counted in.
    pub fn prefix_fits(&self, salt: &[u8], tokens: &[u32], pages: usize) -> bool {
        if self.free_pages() >= pages {
            return true;
        }
        let fit = self.prefix_fit(salt, tokens);
        self.free_pages() - fit.idle >= pages.saturating_sub(fit.pages)
    }

    /// Takes the cached prefix of `tokens`: appends its pages to `out`, and the caller owns each
    /// with the others that do. Gives the number of pages.
    pub fn take_prefix(&mut self, salt: &[u8], tokens: &[u32], out: &mut Vec<PageId>) -> usize {
        let Some(prefix) = &self.books.prefix else {
            return 0;
        };
        let from = out.len();
        walk(prefix, salt, tokens, |page| out.push(page));
        // A cached page is whole; one that cannot be shared all the same ends the prefix.
        for at in from..out.len() {
            if self.share(&out[at..=at]).is_err() {
                debug_assert!(false, "a cached page could not be shared");
                out.truncate(at);
                break;
            }
        }
        let pages = out.len() - from;
        self.hit_pages += pages as u64;
        pages
    }

    /// Offers the whole pages of one sequence to the cache: `pages[i]` holds the tokens
    /// `tokens[i * page_tokens ..]`, all of them computed, by steps that have ended, from pages
    /// that are proven (PROTOCOL C2: who calls this answers for that).
    ///
    /// `known` leading pages were taken in or found before. Where the cache has another page of
    /// the same content, `swap` says to take that one and give the own one up, so that it is
    /// kept once. Gives the new number of leading pages that are the cache's as well.
    pub fn cache_pages(
        &mut self,
        salt: &[u8],
        tokens: &[u32],
        pages: &mut [PageId],
        mut known: usize,
        swap: bool,
    ) -> usize {
        let Some(page_tokens) = self.books.prefix.as_ref().map(PrefixIndex::page_tokens) else {
            return known;
        };
        let mut parent = known.checked_sub(1).map(|last| pages[last]);
        let new = known..pages.len().min(tokens.len() / page_tokens);
        for at in new {
            let of_page = &tokens[at * page_tokens..(at + 1) * page_tokens];
            let page = pages[at];
            let Some(prefix) = &mut self.books.prefix else {
                return known;
            };
            let entry = match prefix.find(parent, salt, of_page) {
                Some(entry) => entry,
                None => match self.enter(parent, salt, of_page, page) {
                    true => page,
                    false => return known,
                },
            };
            if entry != page && swap && self.share(&[entry]).is_ok() {
                self.free(&[page]);
                pages[at] = entry;
            }
            // Behind a page that is not the cache's own the next call looks again from here.
            if pages[at] == entry && known == at {
                known += 1;
            }
            parent = Some(entry);
        }
        known
    }

    /// Takes one page in; the cache owns it, too, from now on.
    fn enter(&mut self, parent: Option<PageId>, salt: &[u8], tokens: &[u32], page: PageId) -> bool {
        // Whoever wrote it is through, or it is in a state in which nobody may share it.
        let whole = self.books.page(page).whole || self.mark_ready(&[page]).is_ok();
        if !whole || self.share(&[page]).is_err() {
            return false;
        }
        let inserted = match &mut self.books.prefix {
            Some(prefix) => prefix.insert(parent, salt, tokens, page),
            None => Inserted::Refused,
        };
        match inserted {
            Inserted::New => true,
            Inserted::Known(_) | Inserted::Refused => {
                self.free(&[page]);
                false
            }
        }
    }
}

/// Visits the cached pages of a prompt in order, up to the last that may be used.
fn walk(prefix: &PrefixIndex, salt: &[u8], tokens: &[u32], mut found: impl FnMut(PageId)) {
    let page_tokens = prefix.page_tokens();
    let usable = tokens.len().saturating_sub(1) / page_tokens * page_tokens;
    let mut parent = None;
    for of_page in tokens[..usable].chunks_exact(page_tokens) {
        let Some(page) = prefix.find(parent, salt, of_page) else {
            return;
        };
        found(page);
        parent = Some(page);
    }
}
