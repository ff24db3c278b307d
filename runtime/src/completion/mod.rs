//! The completion contract: channels, posts, slots (PROTOCOL 1) and their two ends (PROTOCOL 2).

mod ids;

pub use ids::{
    ChannelId, ChannelKind, Completed, CompletionStatus, EndReason, GuardToken, SlotId, WorkId,
};
