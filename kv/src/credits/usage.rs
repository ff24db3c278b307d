//! What is in flight against an allowance. A leaf.

use kvserve_runtime::ChannelId;

/// Reads and bytes that may be in flight at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Reads.
    pub reads: u32,
    /// Bytes of their pages.
    pub bytes: u64,
}

/// The right to have one read in flight. Give it back once, when the read has ended physically
/// ([`super::Credits::give_back`]).
#[derive(Debug)]
#[must_use = "a credit that is not given back is lost to its peer"]
pub struct Credit<P> {
    pub(super) peer: P,
    pub(super) channel: ChannelId,
    pub(super) bytes: u64,
}

impl<P: Copy> Credit<P> {
    /// The channel that the read is to be posted on.
    pub fn channel(&self) -> ChannelId {
        self.channel
    }

    /// The peer it is read from.
    pub fn peer(&self) -> P {
        self.peer
    }

    /// Bytes it counts for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Which allowance a waiting read is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Short {
    /// The peer has no channel, or that has no room.
    Channel,
    /// The peer's reads in flight.
    Peer,
    /// Everybody's reads in flight.
    Shard,
}

/// What is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub reads: u32,
    pub bytes: u64,
}

impl Usage {
    /// Whether a read of `bytes` fits beside what is in flight. A single one always does: a read
    /// that is longer than an allowance must not wait for ever.
    pub fn has_room(&self, bytes: u64, allowance: &Allowance) -> bool {
        let fits =
            self.reads < allowance.reads && self.bytes.saturating_add(bytes) <= allowance.bytes;
        self.reads == 0 || fits
    }

    pub fn take(&mut self, bytes: u64) {
        self.reads += 1;
        self.bytes += bytes;
    }

    pub fn give_back(&mut self, bytes: u64) {
        debug_assert!(self.reads > 0 && self.bytes >= bytes, "given back once");
        self.reads = self.reads.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}
