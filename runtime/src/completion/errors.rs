//! Refusals of the completion core: nothing has changed when one is given.

use super::ids::{ChannelId, GuardToken};
use super::slab::SourceId;

/// A slot could not be begun: the shard's slab is full. The guards come back to the caller.
#[derive(Debug, PartialEq, Eq)]
pub struct BeginError {
    /// What the slot would have held.
    pub guards: Option<GuardToken>,
    /// Slots the shard can have at once.
    pub slots_max: u32,
}

impl std::fmt::Display for BeginError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "all {} completion slots of this shard are in use; admit less at once",
            self.slots_max
        )
    }
}

impl std::error::Error for BeginError {}

/// Why posts could not be reserved; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// The slot has ended, or the name is stale: nothing may be posted for it any more.
    SlotEnded,
    /// The channel is closed, or being stopped.
    ChannelClosed(ChannelId),
    /// The channel's ring has no room for that many: wait for completions.
    RingFull {
        /// Posts asked for.
        wanted: usize,
        /// Posts that fit now.
        free: usize,
    },
    /// The slot has posts outstanding on as many channels as it may.
    TooManyChannels {
        /// The bound.
        channels_max: usize,
    },
    /// Zero posts were asked for.
    NoPosts,
    /// The channel has used up its 2^48 positions: close it and open another.
    PositionsUsedUp,
}

impl std::fmt::Display for PostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PostError::SlotEnded => write!(f, "the slot has ended; begin another to post again"),
            PostError::ChannelClosed(channel) => write!(
                f,
                "channel {} ({:?}) is closed or stopping; open another",
                channel.index, channel.kind
            ),
            PostError::RingFull { wanted, free } => write!(
                f,
                "{wanted} posts do not fit into the channel's ring, {free} do; wait for completions"
            ),
            PostError::TooManyChannels { channels_max } => write!(
                f,
                "the slot has posts on {channels_max} channels already; use one of them"
            ),
            PostError::NoPosts => write!(f, "zero posts were asked for"),
            PostError::PositionsUsedUp => {
                write!(f, "the channel has numbered 2^48 posts; open another")
            }
        }
    }
}

impl std::error::Error for PostError {}

/// Why a channel could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// All numbers are in use or lost to channels that could not be proven quiet.
    ChannelsExhausted {
        /// Numbers there are.
        channels_max: usize,
        /// Of these, lost for the life of the process.
        quarantined: usize,
    },
    /// The ring must hold between 1 and [`RING_MAX`](super::RING_MAX) posts.
    RingSize {
        /// What was asked for.
        wanted: usize,
        /// The bound.
        ring_max: usize,
    },
    /// No such source is registered.
    UnknownSource(SourceId),
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::ChannelsExhausted {
                channels_max,
                quarantined,
            } => write!(
                f,
                "no channel number is free: {channels_max} in use, {quarantined} of them lost \
                 to channels that could not be proven quiet; close channels or restart the process"
            ),
            OpenError::RingSize { wanted, ring_max } => write!(
                f,
                "a channel ring of {wanted} posts was asked for; it must hold 1 to {ring_max}"
            ),
            OpenError::UnknownSource(source) => write!(
                f,
                "completion source {} is not registered with this hub; add it first",
                source.0
            ),
        }
    }
}

impl std::error::Error for OpenError {}
