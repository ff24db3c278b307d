//! Cutting a read into work requests: remote runs merged, local pages scattered.

use crate::pool::PageId;
use crate::transport::places::Place;

/// Bytes of one work request at most (PROTOCOL L4), unless a single page is longer.
pub(super) const REQUEST_BYTES_MAX: usize = 1 << 20;

/// What a cut has to respect on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutRule {
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Bytes from one of our pages to the next.
    pub stride: usize,
    /// Bytes from one of the peer's pages to the next.
    pub stride_remote: usize,
    /// Scatter entries of one request.
    pub scatter_max: usize,
    /// Bytes of one request.
    pub bytes_max: usize,
}

/// One work request of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Pages that it covers, from where the cut began.
    pub pages: usize,
    /// Bytes that it reads.
    pub bytes: usize,
}

/// One entry of its scatter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its first page.
    pub page: PageId,
    /// Its bytes.
    pub bytes: usize,
}

/// Cuts the next request off a read whose pages lie at `from` and go to `into` (equally long, not
/// empty): pages that follow on each other at the peer go into one request; those that follow on
/// each other here into one entry. `entries` is filled with its scatter list.
///
/// Where pages are padded to their stride, the padding between two of them is read along: into
/// our padding, which is as long.
pub(super) fn next_request(
    rule: &CutRule,
    from: &[Place],
    into: &[PageId],
    entries: &mut Vec<Entry>,
) -> Cut {
    debug_assert!(!from.is_empty() && from.len() == into.len());
    entries.clear();
    entries.push(Entry {
        page: into[0],
        bytes: rule.page_bytes,
    });
    let (mut pages, mut bytes) = (1, rule.page_bytes);
    let mergeable = rule.stride == rule.stride_remote;
    while mergeable && pages < from.len() && bytes + rule.stride <= rule.bytes_max {
        let follows = |before: u32, after: u32| before.checked_add(1) == Some(after);
        if !follows(from[pages - 1].page, from[pages].page) {
            break;
        }
        let adjacent = follows(into[pages - 1].0, into[pages].0);
        if !adjacent && entries.len() == rule.scatter_max {
            break;
        }
        // The padding of the page before, and this page.
        let padding = rule.stride - rule.page_bytes;
        if let Some(last) = entries.last_mut() {
            last.bytes += padding;
            if adjacent {
                last.bytes += rule.page_bytes;
            }
        }
        if !adjacent {
            entries.push(Entry {
                page: into[pages],
                bytes: rule.page_bytes,
            });
        }
        pages += 1;
        bytes += rule.stride;
    }
    Cut { pages, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: CutRule = CutRule {
        page_bytes: 3000,
        stride: 3008,
        stride_remote: 3008,
        scatter_max: 2,
        bytes_max: 10 * 3008,
    };

    fn cut_all(rule: &CutRule, from: &[u32], into: &[u32]) -> Vec<(usize, Vec<(u32, usize)>)> {
        let place = |page: &u32| Place {
            page: *page,
            generation: 0,
        };
        let from: Vec<_> = from.iter().map(place).collect();
        let into: Vec<_> = into.iter().map(|page| PageId(*page)).collect();
        let (mut at, mut cuts, mut entries) = (0, Vec::new(), Vec::new());
        while at < from.len() {
            let cut = next_request(rule, &from[at..], &into[at..], &mut entries);
            let sum: usize = entries.iter().map(|entry| entry.bytes).sum();
            assert_eq!(sum, cut.bytes, "the scatter list takes all bytes");
            let list = entries.iter().map(|entry| (entry.page.0, entry.bytes));
            cuts.push((cut.pages, list.collect()));
            at += cut.pages;
        }
        cuts
    }

    #[test]
    fn runs_on_both_sides_are_one_request_with_one_entry() {
        let cuts = cut_all(&RULE, &[5, 6, 7], &[1, 2, 3]);
        assert_eq!(cuts, [(3, vec![(1, 2 * 3008 + 3000)])]);
    }

    #[test]
    fn scattered_local_pages_take_entries_up_to_the_cards_limit() {
        let cuts = cut_all(&RULE, &[5, 6, 7, 8], &[9, 3, 4, 1]);
        assert_eq!(
            cuts,
            [(3, vec![(9, 3008), (3, 3008 + 3000)]), (1, vec![(1, 3000)])]
        );
    }

    #[test]
    fn scattered_remote_pages_and_unequal_strides_take_a_request_each() {
        assert_eq!(cut_all(&RULE, &[5, 7, 6], &[1, 2, 3]).len(), 3);
        let unequal = CutRule {
            stride_remote: 4096,
            ..RULE
        };
        assert_eq!(cut_all(&unequal, &[5, 6, 7], &[1, 2, 3]).len(), 3);
    }

    #[test]
    fn no_request_is_longer_than_its_bound_unless_a_page_is() {
        let run: Vec<u32> = (0..25).collect();
        let cuts = cut_all(&RULE, &run, &run);
        assert_eq!(
            cuts.iter().map(|cut| cut.0).collect::<Vec<_>>(),
            [10, 10, 5]
        );
        let short = CutRule {
            bytes_max: 100,
            ..RULE
        };
        assert_eq!(cut_all(&short, &run, &run).len(), 25);
    }
}
