//! The bytes of a simulated pool.

use crate::pool::PageId;
use std::cell::RefCell;

/// A pool in ordinary memory. Single-threaded, so it needs no raw pointers.
pub struct SimMemory {
    page_bytes: usize,
    bytes: RefCell<Vec<u8>>,
}

impl SimMemory {
    /// A zeroed pool.
    pub fn new(pages: usize, page_bytes: usize) -> Self {
        SimMemory {
            page_bytes,
            bytes: RefCell::new(vec![0; pages * page_bytes]),
        }
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Looks at a page's bytes.
    pub fn with_page<T>(&self, page: PageId, look: impl FnOnce(&[u8]) -> T) -> T {
        let bytes = self.bytes.borrow();
        let from = page.0 as usize * self.page_bytes;
        look(&bytes[from..from + self.page_bytes])
    }

    /// Changes a page's bytes.
    pub fn change_page<T>(&self, page: PageId, change: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut bytes = self.bytes.borrow_mut();
        let from = page.0 as usize * self.page_bytes;
        change(&mut bytes[from..from + self.page_bytes])
    }

    /// Copies one page from another pool: the first `count` bytes of it.
    pub fn copy_from(&self, into: PageId, source: &SimMemory, page: PageId, count: usize) {
        source.with_page(page, |from| {
            self.change_page(into, |to| to[..count].copy_from_slice(&from[..count]));
        });
    }
}
