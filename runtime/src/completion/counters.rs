//! What can be seen of a shard's slots from outside: `/debug/transfers` and `/metrics`.

use super::ids::{EndReason, SlotId};
use std::time::Duration;

/// Where a live slot stands between its two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotPhase {
    /// The waiter waits.
    Waiting,
    /// The waiter has been told; posts are outstanding and hold the guards.
    Stopping,
    /// Both ends have come; the future has not taken its result yet.
    Ended,
}

impl SlotPhase {
    /// A short stable label.
    pub fn label(self) -> &'static str {
        match self {
            SlotPhase::Waiting => "waiting",
            SlotPhase::Stopping => "stopping",
            SlotPhase::Ended => "ended",
        }
    }
}

/// One live slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// Its name.
    pub slot: SlotId,
    /// What it was begun as.
    pub label: &'static str,
    /// Whose it is: the number its owner gave it, 0 if none.
    pub owner: u64,
    /// Where it stands.
    pub phase: SlotPhase,
    /// Why it ended, if it ended without its result.
    pub reason: Option<EndReason>,
    /// Since it was begun.
    pub age: Duration,
    /// Until its deadline; zero once that has passed.
    pub deadline_left: Duration,
    /// Posts not retired yet, over all channels.
    pub posts_outstanding: u32,
    /// Posts that ended with their channel and wait to be made again.
    pub posts_owed: u32,
    /// Whether it still holds guards.
    pub holds_guards: bool,
}

/// Everything the completion core has counted since its start; only grows, except the gauges
/// at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubCounters {
    /// Slots begun.
    pub begun: u64,
    /// Logical ends with a result.
    pub ended_ok: u64,
    /// Logical ends by a failed post.
    pub ended_failed: u64,
    /// Logical ends by the deadline.
    pub ended_deadline: u64,
    /// Logical ends by a dropped future.
    pub ended_cancelled: u64,
    /// Logical ends by the end of a session.
    pub ended_session: u64,
    /// Logical ends by a dropped completer.
    pub ended_completer_dropped: u64,
    /// Logical ends by the death of a channel.
    pub ended_channel_killed: u64,
    /// Logical ends by a channel that could not be proven quiet.
    pub ended_channel_stuck: u64,
    /// Completions whose slot had already ended, or whose channel is closed: changed nothing.
    pub completions_late: u64,
    /// Completions of a position already retired: changed nothing, killed the channel.
    pub completions_duplicate: u64,
    /// Completions of a position never posted: changed nothing, killed the channel.
    pub completions_stray: u64,
    /// Posts given a position.
    pub posts_posted: u64,
    /// Posts retired by a completion.
    pub posts_retired: u64,
    /// Posts that were reserved and then not posted.
    pub posts_unposted: u64,
    /// Posts that ended with their killed channel, without a completion.
    pub posts_lost: u64,
    /// Posts that their slot owes again since they ended with a channel that is quiet now.
    pub posts_owed: u64,
    /// Of these, posted again.
    pub posts_reposted: u64,
    /// Slots that ended because their work had been posted as often as it may.
    pub slots_out_of_posts: u64,
    /// Posts their source took back after their waiter had ended.
    pub posts_taken_back: u64,
    /// Channels killed.
    pub channels_killed: u64,
    /// Channels that came into grace: a waiter ended and its posts had not.
    pub channels_graced: u64,
    /// Channels in grace that went on, all such posts having ended.
    pub channels_recovered: u64,
    /// Of the killed ones, those that were killed in grace.
    pub channels_killed_in_grace: u64,
    /// Killed channels that were proven quiet.
    pub channels_quiet: u64,
    /// Killed channels that were not: their slots' guards are quarantined.
    pub channels_stuck: u64,
    /// Guards released.
    pub guards_released: u64,
    /// Guards quarantined.
    pub guards_quarantined: u64,
    /// Gauge: slots not free.
    pub slots_live: u64,
    /// Gauge: posts outstanding on all channels.
    pub posts_outstanding: u64,
    /// Gauge: channels in use, stopping ones included.
    pub channels_open: u64,
}

impl HubCounters {
    /// All logical ends.
    pub fn ended(&self) -> u64 {
        self.ended_ok
            + self.ended_failed
            + self.ended_deadline
            + self.ended_cancelled
            + self.ended_session
            + self.ended_completer_dropped
            + self.ended_channel_killed
            + self.ended_channel_stuck
    }

    pub(super) fn count_end(&mut self, outcome: Result<(), EndReason>) {
        let counter = match outcome {
            Ok(()) => &mut self.ended_ok,
            Err(EndReason::Failed(_)) => &mut self.ended_failed,
            Err(EndReason::Deadline) => &mut self.ended_deadline,
            Err(EndReason::Cancelled) => &mut self.ended_cancelled,
            Err(EndReason::SessionEnded) => &mut self.ended_session,
            Err(EndReason::CompleterDropped) => &mut self.ended_completer_dropped,
            Err(EndReason::ChannelKilled) => &mut self.ended_channel_killed,
            Err(EndReason::ChannelStuck) => &mut self.ended_channel_stuck,
        };
        *counter += 1;
    }
}
