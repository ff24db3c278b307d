//! What a slot posts again after the loss of a channel (PROTOCOL E5).
//!
//! ```text
//!   posted on A ─► A killed: the slot waits on, A may still touch its memory
//!                   ├─ A quiet ──► the slot *owes* the post: its owner posts it on another channel
//!                   └─ A stuck ──► the slot ends `ChannelStuck`, its memory is quarantined
//! ```
//! Owns: which slots may post again, how often, and from when on. **The one place where a post
//! becomes owed is [`Slab::post_lost`], and it is reached only once a channel's source has
//! proven it quiet or stuck.** A slot that owes is not done, whatever else completes.

use super::Slab;
use crate::completion::ids::{EndReason, SlotId};
use crate::completion::slot::{POSTS_PER_SLOT_MAX, State};
use crate::time::Nanos;

impl Slab {
    /// The work of this slot may be posted again after the loss of a channel, up to
    /// [`POSTS_PER_SLOT_MAX`] posts in all: what reading twice leaves as reading once does.
    pub fn allow_reposts(&mut self, name: SlotId) {
        if let Some(index) = self.slots.find(name) {
            self.slots.at(index).reposts_left = Some(POSTS_PER_SLOT_MAX - 1);
        }
    }

    /// Posts that a waiting slot has to make again before it can be done; 0 for any other. The
    /// slot's waker is called when there are some.
    pub fn posts_owed(&mut self, name: SlotId) -> u32 {
        let Some(index) = self.slots.find(name) else {
            return 0;
        };
        let slot = self.slots.at(index);
        match slot.state {
            State::Waiting => slot.owed,
            State::Free | State::Stopping(_) | State::Ended(_) => 0,
        }
    }

    /// Whether a waiter whose post is on a channel that is being killed goes on waiting.
    pub(super) fn may_post_again(&mut self, index: u32) -> bool {
        match self.slots.at(index).reposts_left {
            Some(1..) => true,
            Some(0) => {
                self.counters.slots_out_of_posts += 1;
                false
            }
            None => false,
        }
    }

    /// `posts` were made for a slot: first of all, those it owed.
    pub(super) fn pay_owed(&mut self, index: u32, posts: u32) {
        let slot = self.slots.at(index);
        let paid = slot.owed.min(posts);
        slot.owed -= paid;
        self.counters.posts_reposted += u64::from(paid);
    }

    /// A post ended with its channel, which is quiet now, or stuck for good.
    pub(super) fn post_lost(&mut self, index: u32, number: u16, stuck: bool, now: Nanos) {
        self.slots.at(index).stuck |= stuck;
        match self.release_post(index, number) {
            State::Stopping(_) => self.end_physically_if_quiet(index),
            State::Waiting if stuck => {
                self.end_logically(index, Err(EndReason::ChannelStuck), now);
            }
            State::Waiting => self.owe(index, now),
            // Reported by `release_post`; a release build changes nothing.
            State::Free | State::Ended(_) => {}
        }
    }

    /// A waiting slot's post is to be made again, if it may.
    fn owe(&mut self, index: u32, now: Nanos) {
        let slot = self.slots.at(index);
        match slot.reposts_left {
            Some(left) if slot.owed > 0 || left > 0 => {
                if slot.owed == 0 {
                    slot.reposts_left = Some(left - 1);
                }
                slot.owed += 1;
                self.effects.wakes.extend(slot.waker.take());
                self.counters.posts_owed += 1;
            }
            // Two channels of it were lost at once, and the first took its last round.
            Some(_) | None => self.end_logically(index, Err(EndReason::ChannelKilled), now),
        }
    }
}
