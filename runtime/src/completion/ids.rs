//! Names of the completion contract: work, channels, slots, guards, and how a wait ends.

use std::num::NonZeroU32;

/// What kind of thing completes work in order (PROTOCOL P1). Four bits of a [`WorkId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChannelKind {
    /// A TCP data connection.
    Tcp = 1,
    /// A shared-memory copy queue.
    SharedMemory = 2,
    /// An RDMA queue pair's send queue.
    Rdma = 3,
    /// A GPU stream.
    GpuStream = 4,
    /// An engine lane: a pinned thread that takes a step and gives a completion.
    EngineLane = 5,
    /// A control exchange with a peer (a request frame that is answered by a frame).
    Control = 6,
    /// The simulator's transport.
    Simulated = 7,
}

impl ChannelKind {
    fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            1 => ChannelKind::Tcp,
            2 => ChannelKind::SharedMemory,
            3 => ChannelKind::Rdma,
            4 => ChannelKind::GpuStream,
            5 => ChannelKind::EngineLane,
            6 => ChannelKind::Control,
            7 => ChannelKind::Simulated,
            _ => return None,
        })
    }
}

/// One channel of a shard: its kind and a 12-bit number given by the shard's slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelId {
    /// What completes the work.
    pub kind: ChannelKind,
    /// Number in the shard's channel table, below [`ChannelId::COUNT_MAX`].
    pub index: u16,
}

impl ChannelId {
    /// Channels a shard can have at once: what 12 bits name.
    pub const COUNT_MAX: usize = 1 << 12;
}

/// One posted unit of work: `[kind:4][channel:12][position:48]` (PROTOCOL P2).
///
/// Positions of a channel only grow and never wrap (2^48 posts at 10^7 a second last 325 days
/// per channel; the slab closes a channel before the end). Never a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkId(u64);

impl WorkId {
    /// The largest position a channel can number.
    pub const POSITION_MAX: u64 = (1 << 48) - 1;

    /// Packs a channel and a position; `position` must not exceed [`WorkId::POSITION_MAX`].
    pub fn new(channel: ChannelId, position: u64) -> Self {
        debug_assert!(position <= Self::POSITION_MAX);
        debug_assert!((channel.index as usize) < ChannelId::COUNT_MAX);
        WorkId(((channel.kind as u64) << 60) | ((channel.index as u64) << 48) | position)
    }

    /// The 64 bits a device or a wire carries.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Reads 64 bits that came back from a device or a wire; `None` when the kind is unknown.
    pub fn from_bits(bits: u64) -> Option<Self> {
        ChannelKind::from_bits((bits >> 60) as u8)?;
        Some(WorkId(bits))
    }

    /// The channel this work was posted on.
    pub fn channel(self) -> ChannelId {
        let kind = ChannelKind::from_bits((self.0 >> 60) as u8);
        ChannelId {
            // A `WorkId` is only built with a known kind.
            kind: kind.expect("kind checked at construction"),
            index: ((self.0 >> 48) & 0xFFF) as u16,
        }
    }

    /// The position on that channel.
    pub fn position(self) -> u64 {
        self.0 & Self::POSITION_MAX
    }

    /// The work `count` positions later on the same channel.
    pub fn offset(self, count: u64) -> Self {
        WorkId::new(self.channel(), self.position() + count)
    }
}

/// One awaited thing of a shard (PROTOCOL P4). A stale generation names nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// Place in the shard's slab.
    pub index: u32,
    /// Raised each time the place is used again.
    pub generation: u32,
}

/// The right to keep a set of memory regions from reuse, named by a number that only the
/// issuer of guards (a page ledger) can read. It is neither `Copy` nor `Clone`: whoever holds
/// it decides, once, whether the regions are released or quarantined.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a guard token leaks its regions; give it to a slot or back to its issuer"]
pub struct GuardToken(NonZeroU32);

impl GuardToken {
    /// Made by the issuer of guards only.
    pub fn issue(number: NonZeroU32) -> Self {
        GuardToken(number)
    }

    /// The issuer's number.
    pub fn number(&self) -> NonZeroU32 {
        self.0
    }
}

/// How one posted unit of work ended, as its source tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionStatus {
    /// It took place whole.
    Success,
    /// It failed; the code is the source's own (an errno, a verbs status, a frame's reason).
    Error(u32),
    /// It did not take place because its channel is over, and neither did any post after it on
    /// that channel; the code says why the channel ended. The source may say so of each of them
    /// or only of the first. The memory it named is quiet only once the channel is (PROTOCOL
    /// E5): until then the slab counts it as outstanding.
    Flushed(u32),
}

/// One completion out of a source's poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The work that ended, and by PROTOCOL P3 all before it on the channel.
    pub work: WorkId,
    /// How it ended.
    pub status: CompletionStatus,
}

/// Why a wait ended without its result (PROTOCOL E1). Success is not a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// A post failed with the source's code.
    Failed(u32),
    /// The deadline passed.
    Deadline,
    /// The future was dropped.
    Cancelled,
    /// The session it belonged to ended.
    SessionEnded,
    /// The completer was dropped without completing.
    CompleterDropped,
    /// Its channel was killed by the ladder and the work could not be posted again.
    ChannelKilled,
    /// Its channel was killed and could not be proven quiet: the memory is quarantined, and the
    /// work may only be begun anew with other memory (PROTOCOL E5).
    ChannelStuck,
}

impl EndReason {
    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            EndReason::Failed(_) => "failed",
            EndReason::Deadline => "deadline",
            EndReason::Cancelled => "cancelled",
            EndReason::SessionEnded => "session_ended",
            EndReason::CompleterDropped => "completer_dropped",
            EndReason::ChannelKilled => "channel_killed",
            EndReason::ChannelStuck => "channel_stuck",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_id_packs_and_unpacks_every_field() {
        let channel = ChannelId {
            kind: ChannelKind::EngineLane,
            index: 0xABC,
        };
        let work = WorkId::new(channel, WorkId::POSITION_MAX);
        assert_eq!(work.channel(), channel);
        assert_eq!(work.position(), WorkId::POSITION_MAX);
        assert_eq!(WorkId::from_bits(work.bits()), Some(work));
        assert_eq!(WorkId::from_bits(0), None);
        assert_eq!(WorkId::from_bits(15 << 60), None);
    }
}
