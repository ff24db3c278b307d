//! How much is pulled, and where it lies.

use kvserve_kv::{PageId, PoolMemory};

/// Bytes of each pool at least: several times the largest pull (24 MiB) and any cache's share.
const POOL_BYTES: usize = 128 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub pages: usize,
    pub page_bytes: usize,
}

const fn size(pages: usize, kib: usize) -> Size {
    Size {
        pages,
        page_bytes: kib << 10,
    }
}

pub const SIZES: [Size; 5] = [
    size(1, 16),
    size(24, 16),
    size(240, 16),
    size(24, 64),
    size(24, 1024),
];

impl Size {
    pub fn bytes(self) -> usize {
        self.pages * self.page_bytes
    }

    /// Pages of each side's pool.
    pub fn pool_pages(self) -> usize {
        (POOL_BYTES / self.page_bytes).max(4 * self.pages)
    }

    /// A pool of known bytes, every page touched.
    pub fn pool(self, salt: u64) -> PoolMemory {
        let pool = PoolMemory::memfd(self.pool_pages(), self.page_bytes).expect("a pool");
        for page in 0..pool.pages() as u64 {
            let words = pool.page(PageId(page as u32)).cast::<u64>();
            for at in 0..self.page_bytes / 8 {
                let word = (salt + page) << 32 ^ (at as u64).wrapping_mul(0x9E37_79B9);
                // SAFETY: inside the page; nobody else has the pool yet.
                unsafe { words.add(at).write(word) };
            }
        }
        pool
    }
}

/// The same numbers in each run and in both processes.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// All pages of a pool in an order without order: page `n` of the one lease lies at `[n]`, as
/// pages of a pool in use do.
pub fn scattered(pages: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..pages as u32).collect();
    let mut random = Random(0x5DEE_CE66_D1CE_4E5B);
    for at in (1..pages).rev() {
        all.swap(at, random.below(at + 1));
    }
    all
}
