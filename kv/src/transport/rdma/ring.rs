//! The send ring of one queue pair: work requests by number, closed cumulatively (PROTOCOL P3).
//!
//! Requests are numbered apart from reads, since one read may take several: a completion names a
//! request, the ring knows the read. So a duplicate or a stray completion is told from a good one
//! exactly, also in the middle of a read.

use std::collections::VecDeque;

/// One work request on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Posted {
    /// The read that it belongs to (its serial number on the channel).
    pub read: u64,
    /// Pages of it.
    pub pages: usize,
    /// Bytes of it.
    pub bytes: usize,
    /// Whether it gives a completion when it succeeds.
    pub signalled: bool,
}

/// A completion that no request can have given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stray {
    /// Its request was closed before.
    Duplicate,
    /// No request has that number, or the one that has gives no completion of success.
    Unknown,
}

/// The requests on their way, oldest first.
pub(super) struct SendRing {
    requests: VecDeque<Posted>,
    /// Number of the oldest.
    oldest: u64,
    depth: usize,
    since_signal: usize,
}

impl SendRing {
    /// An empty ring of `depth` whose requests are numbered from `first` on.
    pub(super) fn new(depth: usize, first: u64) -> Self {
        SendRing {
            requests: VecDeque::with_capacity(depth),
            oldest: first,
            depth,
            since_signal: 0,
        }
    }

    /// Requests on their way.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests that may still be posted: the send queue's credit.
    pub(super) fn free(&self) -> usize {
        self.depth - self.requests.len()
    }

    /// Number of the next request.
    pub(super) fn next_number(&self) -> u64 {
        self.oldest + self.requests.len() as u64
    }

    /// Whether the next request has to be signalled, `every` so many being one.
    pub(super) fn signal_due(&self, every: usize) -> bool {
        self.since_signal + 1 >= every
    }

    /// Enters a request.
    pub(super) fn push(&mut self, posted: Posted) {
        debug_assert!(self.free() > 0);
        self.since_signal = match posted.signalled {
            true => 0,
            false => self.since_signal + 1,
        };
        self.requests.push_back(posted);
    }

    /// The newest one is signalled after all.
    pub(super) fn signal_last(&mut self) {
        if let Some(last) = self.requests.back_mut() {
            last.signalled = true;
            self.since_signal = 0;
        }
    }

    /// Takes the newest one out again: it was not posted.
    pub(super) fn pop_newest(&mut self) -> Option<Posted> {
        let newest = self.requests.pop_back();
        let unsignalled = self.requests.iter().rev();
        self.since_signal = unsignalled.take_while(|posted| !posted.signalled).count();
        newest
    }

    /// Whether the newest ones will give no completion: something signalled must follow.
    pub(super) fn tail_is_open(&self) -> bool {
        self.requests.back().is_some_and(|last| !last.signalled)
    }

    /// A completion of request `number`: how many requests from the oldest on it closes.
    pub(super) fn closes(&self, number: u64, success: bool) -> Result<usize, Stray> {
        if number < self.oldest {
            return Err(Stray::Duplicate);
        }
        let place = (number - self.oldest) as usize;
        match self.requests.get(place) {
            // A failed one tells so whether signalled or not.
            Some(posted) if posted.signalled || !success => Ok(place + 1),
            Some(_) | None => Err(Stray::Unknown),
        }
    }

    /// Closes the oldest.
    pub(super) fn close_oldest(&mut self) -> Option<Posted> {
        let oldest = self.requests.pop_front()?;
        self.oldest += 1;
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(read: u64, signalled: bool) -> Posted {
        Posted {
            read,
            pages: 1,
            bytes: 64,
            signalled,
        }
    }

    fn ring() -> SendRing {
        let mut ring = SendRing::new(8, 100);
        for read in 0..4 {
            ring.push(posted(read, read == 3));
        }
        ring
    }

    #[test]
    fn a_completion_closes_all_before_it() {
        let mut ring = ring();
        assert_eq!(ring.closes(103, true), Ok(4));
        (0..4).for_each(|read| assert_eq!(ring.close_oldest().map(|p| p.read), Some(read)));
        assert!(ring.is_empty());
        assert_eq!(ring.next_number(), 104);
        assert_eq!(ring.closes(103, true), Err(Stray::Duplicate));
        assert_eq!(ring.closes(104, true), Err(Stray::Unknown));
    }

    #[test]
    fn an_error_in_the_middle_of_an_unsignalled_run_closes_what_was_before_it() {
        let ring = ring();
        assert_eq!(ring.closes(101, false), Ok(2));
        assert_eq!(ring.closes(101, true), Err(Stray::Unknown), "not signalled");
    }

    #[test]
    fn credit_and_signals_follow_what_is_in_it() {
        let mut ring = ring();
        assert_eq!(ring.free(), 4);
        assert!(!ring.tail_is_open());
        ring.push(posted(4, false));
        assert!(ring.tail_is_open());
        assert!(ring.signal_due(2) && !ring.signal_due(3));
        ring.signal_last();
        assert!(!ring.tail_is_open() && !ring.signal_due(2));
        ring.push(posted(5, false));
        ring.push(posted(6, false));
        ring.pop_newest();
        assert!(ring.signal_due(2) && !ring.signal_due(3));
        assert_eq!(ring.next_number(), 106);
    }
}
