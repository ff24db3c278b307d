//! The completion core of one shard, sans-IO: slots, channels, ladder and wheel together.
//!
//! Every method takes the time, changes the state and leaves its effects in [`Slab::effects`];
//! it never calls out. Slots and their two ends are in this file, channels and posts in `posts`,
//! the stopping of channels in `stop`, what is posted again after it in `again`. What it keeps:
//!
//! * I1 every slot ends logically at the first look after its deadline, and physically within
//!   the ladder's bounds after that;
//! * I4 posts made = retired + lost with their channel + never posted + outstanding;
//! * I6 a slot ends exactly once, whatever comes twice, late or from nowhere;
//! * guards come out once, at the physical end: released, or quarantined if that could not be
//!   proven.

use crate::completion::channel::{Channel, Entry};
use crate::completion::counters::{HubCounters, SlotView};
use crate::completion::effects::{Effects, GuardEnd, Order};
use crate::completion::errors::BeginError;
use crate::completion::ids::{EndReason, GuardToken, SlotId, WorkId};
use crate::completion::slot::{Outcome, SlotTable, State};
use crate::completion::wheel::Wheel;
use crate::time::{Deadline, Nanos};
use std::collections::VecDeque;
use std::task::{Poll, Waker};

mod again;
mod posts;
mod stop;

/// A registered completion source of this shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceId(pub u16);

/// The core. See the module's text.
pub struct Slab {
    slots: SlotTable,
    slots_max: u32,
    channels: Vec<Channel>,
    channels_free: VecDeque<u16>,
    channels_quarantined: usize,
    /// Channels in grace or draining: looked at each turn. At most one entry a channel.
    stopping: Vec<u16>,
    wheel: Wheel,
    counters: HubCounters,
    /// What the shell has to carry out.
    pub effects: Effects,
}

impl Slab {
    /// An empty core that holds at most `slots_max` slots at once.
    pub fn new(slots_max: u32, now: Nanos) -> Self {
        Slab {
            slots: SlotTable::new(slots_max),
            slots_max,
            channels: Vec::new(),
            channels_free: VecDeque::new(),
            channels_quarantined: 0,
            stopping: Vec::new(),
            wheel: Wheel::new(now),
            counters: HubCounters::default(),
            effects: Effects::default(),
        }
    }

    /// Begins a slot. It is held until [`Slab::forget`] or a taken result.
    ///
    /// # Errors
    /// [`BeginError`] when all slots are in use.
    pub fn begin(
        &mut self,
        label: &'static str,
        deadline: Deadline,
        guards: Option<GuardToken>,
        now: Nanos,
    ) -> Result<SlotId, BeginError> {
        let Some(index) = self.slots.take() else {
            return Err(BeginError {
                guards,
                slots_max: self.slots_max,
            });
        };
        let slot = self.slots.at(index);
        slot.state = State::Waiting;
        slot.held = true;
        slot.stuck = false;
        slot.guards = guards;
        slot.label = label;
        slot.owner = 0;
        slot.owed = 0;
        slot.reposts_left = None;
        slot.begun_at = now;
        slot.deadline = deadline;
        self.wheel.arm(index, deadline.at());
        self.counters.begun += 1;
        Ok(self.slots.name(index))
    }

    /// The waiter asks. `Ready` at the logical end, once; the slot is then held no more.
    /// A stale name (the result was taken before) is answered like a cancelled wait.
    pub fn poll(&mut self, name: SlotId, waker: &Waker) -> Poll<Outcome> {
        let Some(index) = self.slots.find(name) else {
            return Poll::Ready(Err(EndReason::Cancelled));
        };
        let slot = self.slots.at(index);
        match slot.state {
            State::Free => Poll::Ready(Err(EndReason::Cancelled)),
            State::Waiting => {
                let known = matches!(&slot.waker, Some(kept) if kept.will_wake(waker));
                if !known {
                    let replaced = slot.waker.replace(waker.clone());
                    self.effects.spent_wakers.extend(replaced);
                }
                Poll::Pending
            }
            State::Stopping(outcome) => {
                slot.held = false;
                Poll::Ready(outcome)
            }
            State::Ended(outcome) => {
                slot.held = false;
                self.slots.give_back(index);
                Poll::Ready(outcome)
            }
        }
    }

    /// The waiter is gone: cancels the slot if it has not ended.
    pub fn forget(&mut self, name: SlotId, now: Nanos) {
        let Some(index) = self.slots.find(name) else {
            return;
        };
        let slot = self.slots.at(index);
        slot.held = false;
        match slot.state {
            State::Free | State::Stopping(_) => {}
            State::Waiting => {
                self.effects.spent_wakers.extend(slot.waker.take());
                self.end_logically(index, Err(EndReason::Cancelled), now);
            }
            State::Ended(_) => self.slots.give_back(index),
        }
    }

    /// Ends a slot for a reason from outside; `false` when it had ended already.
    pub fn end(&mut self, name: SlotId, outcome: Outcome, now: Nanos) -> bool {
        let Some(index) = self.slots.find(name) else {
            return false;
        };
        match self.slots.at(index).state {
            State::Waiting => {
                self.end_logically(index, outcome, now);
                true
            }
            State::Free | State::Stopping(_) | State::Ended(_) => false,
        }
    }

    /// Whether a slot's logical end is still to come.
    pub fn is_waiting(&mut self, name: SlotId) -> bool {
        (self.slots.find(name)).is_some_and(|index| self.slots.at(index).state == State::Waiting)
    }

    /// Gives a slot the number of its owner, for those who look at it.
    pub fn set_owner(&mut self, name: SlotId, owner: u64) {
        if let Some(index) = self.slots.find(name) {
            self.slots.at(index).owner = owner;
        }
    }

    /// Fires one slot whose deadline has passed; `false` when there is none. The caller bounds
    /// how many it fires in a turn.
    pub fn fire_deadline(&mut self, now: Nanos) -> bool {
        let Some(index) = self.wheel.pop_expired(now) else {
            return false;
        };
        debug_assert_eq!(
            self.slots.at(index).state,
            State::Waiting,
            "the end of a slot takes its timer off the wheel"
        );
        self.end_logically(index, Err(EndReason::Deadline), now);
        true
    }

    /// When the wheel wants to be looked at.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.wheel.next()
    }

    /// The one way from Waiting (E1, I6).
    fn end_logically(&mut self, index: u32, outcome: Outcome, now: Nanos) {
        self.wheel.cancel(index);
        self.counters.count_end(outcome);
        let slot = self.slots.at(index);
        debug_assert_eq!(slot.state, State::Waiting, "a slot ends once");
        slot.state = State::Stopping(outcome);
        if let Some(waker) = slot.waker.take() {
            self.effects.wakes.push_back(waker);
        }
        if slot.outstanding == 0 {
            self.end_physically(index);
            return;
        }
        for share in slot.shares {
            if share.outstanding > 0 {
                self.orphan(index, share.channel, share.outstanding, now);
            }
        }
    }

    /// The one way to the release of guards (E1): no post of the slot is outstanding anywhere.
    fn end_physically(&mut self, index: u32) {
        let slot = self.slots.at(index);
        debug_assert_eq!(slot.outstanding, 0);
        let State::Stopping(outcome) = slot.state else {
            debug_assert!(false, "the logical end comes first");
            return;
        };
        if let Some(guards) = slot.guards.take() {
            self.effects.guards.push_back(if slot.stuck {
                self.counters.guards_quarantined += 1;
                GuardEnd::Quarantine(guards)
            } else {
                self.counters.guards_released += 1;
                GuardEnd::Release(guards)
            });
        }
        slot.state = State::Ended(outcome);
        if !slot.held {
            self.slots.give_back(index);
        }
    }

    /// A waiter ended and `posts` of its posts on `channel` did not: the ladder's first rung.
    fn orphan(&mut self, index: u32, channel: u16, posts: u32, now: Nanos) {
        let orphaned_on = &mut self.channels[channel as usize];
        orphaned_on.pinned += u64::from(posts);
        if orphaned_on.phase.takes_posts() && orphaned_on.rule.can_take_back {
            for position in orphaned_on.unretired() {
                if orphaned_on.entry(position) == Entry::Posted(index) {
                    self.effects.orders.push_back(Order::TakeBack {
                        source: orphaned_on.source,
                        work: WorkId::new(orphaned_on.id, position),
                    });
                }
            }
        }
        let event = orphaned_on.orphaned();
        self.climb(channel, event, now);
    }

    /// One post of a slot is outstanding no more: retired, voided, taken back or lost.
    fn release_post(&mut self, index: u32, channel: u16) -> State {
        let slot = self.slots.at(index);
        slot.share_remove(channel);
        let state = slot.state;
        match state {
            State::Waiting => {}
            State::Stopping(_) => self.channels[channel as usize].pinned -= 1,
            State::Free | State::Ended(_) => {
                debug_assert!(false, "an ended slot has no posts outstanding");
            }
        }
        state
    }
}

impl Slab {
    /// All live slots, for people.
    pub fn live(&self, now: Nanos) -> Vec<SlotView> {
        self.slots
            .iter()
            .filter_map(|(index, slot)| {
                let (phase, reason) = slot.phase()?;
                Some(SlotView {
                    slot: SlotId {
                        index,
                        generation: slot.generation,
                    },
                    label: slot.label,
                    owner: slot.owner,
                    phase,
                    reason,
                    age: now.since(slot.begun_at),
                    deadline_left: slot.deadline.left(now),
                    posts_outstanding: slot.outstanding,
                    posts_owed: slot.owed,
                    holds_guards: slot.guards.is_some(),
                })
            })
            .collect()
    }

    /// Slots not free.
    pub fn slots_live(&self) -> usize {
        self.slots.live()
    }

    /// Posts outstanding on all channels.
    pub fn posts_outstanding(&self) -> u64 {
        self.counters.posts_outstanding
    }

    /// What has been counted.
    pub fn counters(&self) -> HubCounters {
        HubCounters {
            slots_live: self.slots.live() as u64,
            ..self.counters
        }
    }
}

#[cfg(test)]
mod again_tests;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) mod testing;
