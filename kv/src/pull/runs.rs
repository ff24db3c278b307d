//! Which pages are posted, placed and checked. A leaf: no state machine, no peer.

use std::collections::BTreeMap;

/// Bytes of one read at most (PROTOCOL L4): 1 MiB takes 80 µs at 100 Gbit/s, so a read is long
/// enough to hide its fixed cost and short enough for the ladder's grace.
pub const READ_BYTES_MAX: usize = 1 << 20;

/// A run of pages, counted within the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub first: u32,
    pub count: u32,
}

#[derive(Debug)]
pub(super) struct Runs {
    run_pages_max: u32,
    reads_out_max: usize,
    posted: u32,
    checked: u32,
    read_next: u64,
    out: BTreeMap<u64, Run>,
}

impl Runs {
    pub(super) fn new(page_bytes: usize, reads_out_max: usize) -> Self {
        Runs {
            run_pages_max: (READ_BYTES_MAX / page_bytes.max(1)).max(1) as u32,
            reads_out_max,
            posted: 0,
            checked: 0,
            read_next: 0,
            out: BTreeMap::new(),
        }
    }

    /// The next read up to `ready`, if there is one and not too many are out.
    pub(super) fn next(&mut self, ready: u32) -> Option<(u64, Run)> {
        if self.posted >= ready || self.out.len() >= self.reads_out_max {
            return None;
        }
        let run = Run {
            first: self.posted,
            count: (ready - self.posted).min(self.run_pages_max),
        };
        let read = self.read_next;
        self.read_next += 1;
        self.posted += run.count;
        self.out.insert(read, run);
        Some((read, run))
    }

    /// A read is over, either way; its run, if it was out.
    pub(super) fn over(&mut self, read: u64) -> Option<Run> {
        self.out.remove(&read)
    }

    pub(super) fn checked(&mut self, count: u32) {
        self.checked += count;
    }

    pub(super) fn pages_checked(&self) -> u32 {
        self.checked
    }

    pub(super) fn pages_posted(&self) -> u32 {
        self.posted
    }

    pub(super) fn reads_out(&self) -> usize {
        self.out.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_long_bounded_and_cover_each_page_once() {
        let mut runs = Runs::new(300 * 1024, 2);
        assert_eq!(runs.next(0), None);
        assert_eq!(runs.next(8), Some((0, Run { first: 0, count: 3 })));
        assert_eq!(runs.next(8), Some((1, Run { first: 3, count: 3 })));
        assert_eq!(runs.next(8), None, "two are out");
        assert_eq!(runs.over(1), Some(Run { first: 3, count: 3 }));
        assert_eq!(runs.over(1), None);
        assert_eq!(runs.next(8), Some((2, Run { first: 6, count: 2 })));
        runs.over(0);
        assert_eq!(runs.next(8), None, "all is posted");
        assert_eq!(Runs::new(5 << 20, 1).next(9).unwrap().1.count, 1);
    }
}
