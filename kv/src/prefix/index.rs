//! The tree of whole pages, its hash table and its queue of idle entries.

use super::salts::Salts;
use crate::pool::PageId;

/// "No entry".
const NONE: u32 = u32::MAX;

/// Candidates of one bucket that a lookup compares at most. With twice as many buckets as pages
/// and a seed that no client knows, a bucket of 16 does not come by chance; a client that finds
/// collisions all the same makes others miss, never wait.
const CANDIDATES_MAX: usize = 16;

/// How a prefix cache is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixConfig {
    /// Tokens a page holds.
    pub page_tokens: usize,
    /// Mixed into every hash; a number that clients do not know.
    pub seed: u64,
}

/// What became of a page that was offered to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is in.
    New,
    /// These tokens after this parent are in already, in that page.
    Known(PageId),
    /// Its parent is not in (any more), or its bucket is full: it stays out.
    Refused,
}

#[derive(Clone)]
struct Entry {
    live: bool,
    idle: bool,
    hash: u64,
    /// The entry before it, [`NONE`] for the first page of a prompt.
    parent: u32,
    /// Number of its salt; only for entries without a parent.
    salt: u32,
    bucket_next: u32,
    child: u32,
    sibling_prev: u32,
    sibling_next: u32,
    idle_prev: u32,
    idle_next: u32,
}

const EMPTY: Entry = Entry {
    live: false,
    idle: false,
    hash: 0,
    parent: NONE,
    salt: 0,
    bucket_next: NONE,
    child: NONE,
    sibling_prev: NONE,
    sibling_next: NONE,
    idle_prev: NONE,
    idle_next: NONE,
};

pub(crate) struct PrefixIndex {
    config: PrefixConfig,
    /// By page number.
    entries: Vec<Entry>,
    /// `page_tokens` ids for each page.
    tokens: Vec<u32>,
    /// First entry of each bucket; a power of two of them.
    buckets: Vec<u32>,
    salts: Salts,
    live: usize,
    idle: usize,
    /// Longest idle, and latest.
    idle_first: u32,
    idle_last: u32,
}

impl PrefixIndex {
    pub(crate) fn new(pages: usize, config: PrefixConfig) -> Self {
        let buckets = (pages * 2).next_power_of_two();
        PrefixIndex {
            config,
            entries: vec![EMPTY; pages],
            tokens: vec![0; pages * config.page_tokens],
            buckets: vec![NONE; buckets],
            salts: Salts::default(),
            live: 0,
            idle: 0,
            idle_first: NONE,
            idle_last: NONE,
        }
    }

    pub(crate) fn page_tokens(&self) -> usize {
        self.config.page_tokens
    }

    /// Entries.
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// Entries that nobody uses.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    pub(crate) fn contains(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].live
    }

    /// The page that holds just these tokens after `parent` (under `salt`, for the first page).
    pub(crate) fn find(
        &self,
        parent: Option<PageId>,
        salt: &[u8],
        tokens: &[u32],
    ) -> Option<PageId> {
        debug_assert_eq!(tokens.len(), self.config.page_tokens);
        let number = match parent {
            Some(parent) if !self.contains(parent) => return None,
            Some(_) => 0,
            None => self.salts.find(salt)?,
        };
        let hash = self.hash(parent, number, tokens);
        let mut at = self.buckets[self.bucket(hash)];
        for _ in 0..CANDIDATES_MAX {
            let entry = self.entries.get(at as usize)?;
            let same = entry.parent == parent.map_or(NONE, |page| page.0)
                && entry.salt == number
                && self.tokens_of(at) == tokens;
            if same {
                return Some(PageId(at));
            }
            at = entry.bucket_next;
        }
        None
    }

    /// Enters `page` as holding `tokens` after `parent`.
    pub(crate) fn insert(
        &mut self,
        parent: Option<PageId>,
        salt: &[u8],
        tokens: &[u32],
        page: PageId,
    ) -> Inserted {
        if let Some(known) = self.find(parent, salt, tokens) {
            return Inserted::Known(known);
        }
        if self.contains(page) || parent.is_some_and(|parent| !self.contains(parent)) {
            return Inserted::Refused;
        }
        let number = match parent {
            Some(_) => 0,
            None => self.salts.take(salt),
        };
        let hash = self.hash(parent, number, tokens);
        let bucket = self.bucket(hash);
        if self.bucket_length(bucket) >= CANDIDATES_MAX {
            if parent.is_none() {
                self.salts.drop_one(number);
            }
            return Inserted::Refused;
        }
        let sibling = match parent {
            Some(parent) => std::mem::replace(&mut self.entry(parent.0).child, page.0),
            None => NONE,
        };
        if sibling != NONE {
            self.entry(sibling).sibling_prev = page.0;
        }
        let bucket_next = std::mem::replace(&mut self.buckets[bucket], page.0);
        *self.entry(page.0) = Entry {
            live: true,
            hash,
            parent: parent.map_or(NONE, |parent| parent.0),
            salt: number,
            bucket_next,
            sibling_next: sibling,
            ..EMPTY
        };
        let from = page.0 as usize * self.config.page_tokens;
        self.tokens[from..from + tokens.len()].copy_from_slice(tokens);
        self.live += 1;
        Inserted::New
    }

    /// An entry without children at or below `page`.
    pub(crate) fn leaf_below(&self, page: PageId) -> PageId {
        let mut at = page.0;
        // A child is entered after its parent and never moves, so this ends at a leaf.
        loop {
            match self.entries[at as usize].child {
                NONE => return PageId(at),
                child => at = child,
            }
        }
    }

    /// Takes an entry without children out.
    pub(crate) fn remove_leaf(&mut self, page: PageId) {
        self.set_idle(page, false);
        let gone = std::mem::replace(self.entry(page.0), EMPTY);
        debug_assert!(gone.live && gone.child == NONE);
        let bucket = self.bucket(gone.hash);
        if self.buckets[bucket] == page.0 {
            self.buckets[bucket] = gone.bucket_next;
        } else {
            let mut at = self.buckets[bucket];
            while self.entries[at as usize].bucket_next != page.0 {
                at = self.entries[at as usize].bucket_next;
            }
            self.entry(at).bucket_next = gone.bucket_next;
        }
        if gone.sibling_prev != NONE {
            self.entry(gone.sibling_prev).sibling_next = gone.sibling_next;
        } else if gone.parent != NONE {
            self.entry(gone.parent).child = gone.sibling_next;
        }
        if gone.sibling_next != NONE {
            self.entry(gone.sibling_next).sibling_prev = gone.sibling_prev;
        }
        if gone.parent == NONE {
            self.salts.drop_one(gone.salt);
        }
        self.live -= 1;
    }

    // ---- the queue of idle entries --------------------------------------------------------

    pub(crate) fn is_idle(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].idle
    }

    /// Nobody uses this entry now (it goes to the end of the queue), or somebody does.
    pub(crate) fn set_idle(&mut self, page: PageId, idle: bool) {
        let entry = &self.entries[page.0 as usize];
        if !entry.live || entry.idle == idle {
            return;
        }
        if idle {
            let before = std::mem::replace(&mut self.idle_last, page.0);
            match before {
                NONE => self.idle_first = page.0,
                before => self.entry(before).idle_next = page.0,
            }
            let entry = self.entry(page.0);
            entry.idle = true;
            entry.idle_prev = before;
            entry.idle_next = NONE;
            self.idle += 1;
            return;
        }
        let entry = self.entry(page.0);
        entry.idle = false;
        let (prev, next) = (entry.idle_prev, entry.idle_next);
        match prev {
            NONE => self.idle_first = next,
            prev => self.entry(prev).idle_next = next,
        }
        match next {
            NONE => self.idle_last = prev,
            next => self.entry(next).idle_prev = prev,
        }
        self.idle -= 1;
    }

    /// The entry that nobody has used for the longest time.
    pub(crate) fn oldest_idle(&self) -> Option<PageId> {
        (self.idle_first != NONE).then_some(PageId(self.idle_first))
    }

    // ---- leaves ---------------------------------------------------------------------------

    fn entry(&mut self, page: u32) -> &mut Entry {
        &mut self.entries[page as usize]
    }

    fn tokens_of(&self, page: u32) -> &[u32] {
        let from = page as usize * self.config.page_tokens;
        &self.tokens[from..from + self.config.page_tokens]
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn bucket_length(&self, bucket: usize) -> usize {
        let mut length = 0;
        let mut at = self.buckets[bucket];
        while at != NONE && length < CANDIDATES_MAX {
            length += 1;
            at = self.entries[at as usize].bucket_next;
        }
        length
    }

    /// The hash chain: of the parent's hash, or of the salt, and the page's tokens.
    fn hash(&self, parent: Option<PageId>, salt: u32, tokens: &[u32]) -> u64 {
        let start = match parent {
            Some(parent) => self.entries[parent.0 as usize].hash,
            None => u64::from(salt) ^ 0x6b76_7365_7276_6521,
        };
        let mut hash = folded(start ^ self.config.seed);
        for pair in tokens.chunks(2) {
            let low = u64::from(pair[0]);
            let high = pair.get(1).map_or(0, |token| u64::from(*token) + 1);
            hash = folded(hash.rotate_left(23) ^ low ^ (high << 32) ^ (high >> 32));
        }
        hash
    }
}

/// One round of mixing: both halves of a product by an odd constant.
fn folded(word: u64) -> u64 {
    let product = u128::from(word ^ 0xa5a3_5625_e1a4_7c9b) * 0xd6e8_feb8_6659_fd93;
    (product as u64) ^ (product >> 64) as u64
}

#[cfg(test)]
impl PrefixIndex {
    /// Salts that are known.
    pub(super) fn salts(&self) -> usize {
        self.salts.len()
    }

    /// Makes every hash as good as none: all entries fall into one bucket.
    pub(super) fn blind(&mut self) {
        self.buckets = vec![NONE];
    }
}
