//! How bytes of pages move. One face for shared memory, TCP, RDMA and the simulator.

use crate::pool::PageId;
use kvserve_runtime::{ChannelId, CompletionSource, WorkId};

/// One unit of work of a pull: a run of whole pages of one lease, read from the peer into pages
/// of ours. The transport may move it in any order; it completes when all of it is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The lease on the prefill side that holds the source pages (PROTOCOL L6).
    pub lease: u64,
    /// Its epoch.
    pub epoch: u32,
    /// First page of the run, counted within the lease.
    pub first: u32,
    /// Target pages in this node's pool; source page `first + i` lands in `into[i]`.
    pub into: Vec<PageId>,
}

/// A post that failed after some of its work had been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// How many reads, from the front, were posted; they complete like any other.
    pub posted: usize,
    /// The source's error code for the one that was not.
    pub code: u32,
}

/// Moves pages. Completions come out of [`CompletionSource::poll`], one for each read, in order
/// of position per channel.
pub trait Transport: CompletionSource {
    /// Posts `reads` on `channel` as positions `first, first + 1, ...`.
    ///
    /// # Errors
    /// [`Posted`] when the channel took only a part (back-pressure or failure).
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted>;
}
