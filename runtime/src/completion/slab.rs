//! The completion core of one shard, sans-IO: slots, channels, ladder and wheel together.
//!
//! Every method takes the time, changes the state and leaves its effects in [`Slab::effects`];
//! it never calls out. What it keeps:
//!
//! * I1 every slot ends logically at the first look after its deadline, and physically within
//!   the ladder's bounds after that;
//! * I4 posts made = retired + lost with their channel + never posted + outstanding;
//! * I6 a slot ends exactly once, whatever comes twice, late or from nowhere;
//! * guards come out once, at the physical end: released, or quarantined if that could not be
//!   proven.

use super::channel::{Channel, Entry, Position, RING_MAX};
use super::counters::{HubCounters, SlotView};
use super::effects::{Effects, GuardEnd, Order};
use super::errors::{BeginError, OpenError, PostError};
use super::ids::{
    ChannelId, ChannelKind, Completed, CompletionStatus, EndReason, GuardToken, SlotId, WorkId,
};
use super::ladder::{self, Action, Event, Phase};
use super::slot::{CHANNELS_PER_SLOT_MAX, Outcome, SlotTable, State};
use super::wheel::Wheel;
use crate::source::Reap;
use crate::time::{Deadline, Nanos};
use std::collections::VecDeque;
use std::task::{Poll, Waker};

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

// --- slots ---------------------------------------------------------------------------------

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

// --- channels and posts --------------------------------------------------------------------

impl Slab {
    /// Opens a channel of `source` whose ring holds at least `ring` posts.
    ///
    /// # Errors
    /// [`OpenError`] when numbers are used up or the ring's size is out of bounds.
    pub fn open_channel(
        &mut self,
        kind: ChannelKind,
        source: SourceId,
        ring: usize,
        now: Nanos,
    ) -> Result<ChannelId, OpenError> {
        if ring == 0 || ring > RING_MAX {
            return Err(OpenError::RingSize {
                wanted: ring,
                ring_max: RING_MAX,
            });
        }
        // Numbers never used come first, then the one that has been free longest: completions
        // that come late for a closed channel then meet a free number and change nothing.
        let index = if self.channels.len() < ChannelId::COUNT_MAX {
            self.channels.len() as u16
        } else if let Some(index) = self.channels_free.pop_front() {
            index
        } else {
            return Err(OpenError::ChannelsExhausted {
                channels_max: ChannelId::COUNT_MAX,
                quarantined: self.channels_quarantined,
            });
        };
        let id = ChannelId { kind, index };
        if index as usize == self.channels.len() {
            self.channels.push(Channel::closed(id, source));
        }
        self.channels[index as usize].open(id, source, ring);
        self.climb(index, Event::Opened, now);
        self.counters.channels_open += 1;
        Ok(id)
    }

    /// Takes a channel down the ladder; nothing happens if it is on its way already.
    pub fn close_channel(&mut self, channel: ChannelId, now: Nanos) {
        if let Some(index) = self.find_channel(channel) {
            self.climb(index, Event::Kill, now);
        }
    }

    /// Whether posts may be made on `channel`.
    pub fn takes_posts(&self, channel: ChannelId) -> bool {
        self.find_channel(channel)
            .is_some_and(|index| self.channels[index as usize].phase.takes_posts())
    }

    /// Whether any channel of `source` is in use.
    pub fn uses_source(&self, source: SourceId) -> bool {
        self.channels.iter().any(|channel| {
            channel.source == source && (channel.phase.takes_posts() || channel.phase.is_stopping())
        })
    }

    /// Gives `posts` positions of `channel` to a waiting slot; returns the first.
    ///
    /// # Errors
    /// [`PostError`]; nothing has changed then.
    pub fn reserve(
        &mut self,
        name: SlotId,
        channel: ChannelId,
        posts: usize,
        now: Nanos,
    ) -> Result<WorkId, PostError> {
        if posts == 0 {
            return Err(PostError::NoPosts);
        }
        let index = self.slots.find(name).ok_or(PostError::SlotEnded)?;
        match self.slots.at(index).state {
            State::Waiting => {}
            State::Free | State::Stopping(_) | State::Ended(_) => return Err(PostError::SlotEnded),
        }
        let number = (self.find_channel(channel))
            .filter(|&number| self.channels[number as usize].phase.takes_posts())
            .ok_or(PostError::ChannelClosed(channel))?;
        let posted_on = &mut self.channels[number as usize];
        if !posted_on.can_number(posts) {
            return Err(PostError::PositionsUsedUp);
        }
        if posts > posted_on.room() {
            return Err(PostError::RingFull {
                wanted: posts,
                free: posted_on.room(),
            });
        }
        if !self.slots.at(index).share_add(number, posts as u32) {
            return Err(PostError::TooManyChannels {
                channels_max: CHANNELS_PER_SLOT_MAX,
            });
        }
        self.counters.posts_posted += posts as u64;
        self.counters.posts_outstanding += posts as u64;
        Ok(posted_on.reserve(index, posts, now))
    }

    /// Takes back `count` reserved positions from `first` on that were not posted after all,
    /// and fails their slots with `code`.
    pub fn unpost(&mut self, first: WorkId, count: usize, code: u32, now: Nanos) {
        let Some(number) = self.find_channel(first.channel()) else {
            return;
        };
        for position in first.position()..first.position().saturating_add(count as u64) {
            let channel = &mut self.channels[number as usize];
            if position >= channel.unretired().end {
                break;
            }
            if let Some(index) = channel.void(position) {
                self.counters.posts_unposted += 1;
                self.counters.posts_outstanding -= 1;
                self.after_post(index, number, CompletionStatus::Error(code), now);
            }
        }
        self.channels[number as usize].skip_void();
        let event = self.channels[number as usize].retired();
        self.climb(number, event, now);
    }

    /// The source has promised that `work`, of an ended waiter, touches no memory any more.
    pub fn taken_back(&mut self, work: WorkId) {
        let Some(number) = self.find_channel(work.channel()) else {
            return;
        };
        if let Some(index) = self.channels[number as usize].take_back(work.position()) {
            self.counters.posts_taken_back += 1;
            let state = self.release_post(index, number);
            debug_assert!(matches!(state, State::Stopping(_)), "only orphans are");
            self.end_physically_if_quiet(index);
        }
    }

    /// Applies one completion (P3).
    pub fn complete(&mut self, completed: Completed, now: Nanos) {
        let position = completed.work.position();
        let Some(number) = self.find_channel(completed.work.channel()) else {
            // No channel of that number and kind was ever open, or another kind has it now.
            self.counters.completions_late += 1;
            return;
        };
        let channel = &self.channels[number as usize];
        match channel.phase {
            Phase::Free | Phase::Quarantined => self.counters.completions_late += 1,
            Phase::Open | Phase::Grace(_) | Phase::Draining { .. } => {
                match channel.position(position) {
                    Position::Outstanding => self.retire(number, position, completed.status, now),
                    Position::Retired => {
                        self.counters.completions_duplicate += 1;
                        self.climb(number, Event::Kill, now);
                    }
                    Position::NeverPosted => {
                        self.counters.completions_stray += 1;
                        self.climb(number, Event::Kill, now);
                    }
                }
            }
        }
    }

    /// Retires all posts of a channel up to `last`. Those before it, having said nothing,
    /// succeeded; `status` is the last one's.
    fn retire(&mut self, number: u16, last: u64, status: CompletionStatus, now: Nanos) {
        loop {
            let channel = &mut self.channels[number as usize];
            let position = channel.unretired().start;
            let Some(entry) = channel.retire_next(last, now) else {
                break;
            };
            let own_status = if position == last {
                status
            } else {
                CompletionStatus::Success
            };
            match entry {
                Entry::Void => {}
                Entry::TakenBack => {
                    self.count_retired();
                    self.counters.completions_late += 1;
                }
                Entry::Posted(index) => {
                    self.count_retired();
                    self.after_post(index, number, own_status, now);
                }
            }
        }
        let channel = &mut self.channels[number as usize];
        channel.skip_void();
        let event = channel.retired();
        let terminal = channel.rule.error_is_terminal && status != CompletionStatus::Success;
        self.climb(number, event, now);
        if terminal {
            self.climb(number, Event::Kill, now);
        }
    }

    /// What the end of one post means to its slot.
    fn after_post(&mut self, index: u32, number: u16, status: CompletionStatus, now: Nanos) {
        match (self.release_post(index, number), status) {
            (State::Waiting, CompletionStatus::Error(code)) => {
                self.end_logically(index, Err(EndReason::Failed(code)), now);
            }
            (State::Waiting, CompletionStatus::Success) => {
                if self.slots.at(index).outstanding == 0 {
                    self.end_logically(index, Ok(()), now);
                }
            }
            (State::Stopping(_), CompletionStatus::Success | CompletionStatus::Error(_)) => {
                self.counters.completions_late += 1;
                self.end_physically_if_quiet(index);
            }
            // Reported by `release_post`; a release build changes nothing.
            (
                State::Free | State::Ended(_),
                CompletionStatus::Success | CompletionStatus::Error(_),
            ) => {}
        }
    }

    fn end_physically_if_quiet(&mut self, index: u32) {
        if self.slots.at(index).outstanding == 0 {
            self.end_physically(index);
        }
    }

    fn count_retired(&mut self) {
        self.counters.posts_retired += 1;
        self.counters.posts_outstanding -= 1;
    }

    fn find_channel(&self, id: ChannelId) -> Option<u16> {
        let channel = self.channels.get(id.index as usize)?;
        (channel.id == id).then_some(id.index)
    }
}

// --- the ladder ----------------------------------------------------------------------------

impl Slab {
    /// Channels that must be looked at each turn, by place in an internal list that a look may
    /// shorten: go through it from the end.
    pub fn stopping_len(&self) -> usize {
        self.stopping.len()
    }

    /// The stopping channel at `place`: its source, and whether it is killed (so that the
    /// source must be asked what became of it) or in grace (how much it has moved).
    pub fn stopping_at(&self, place: usize) -> Option<(SourceId, ChannelId, bool)> {
        let channel = &self.channels[*self.stopping.get(place)? as usize];
        let killed = !channel.phase.takes_posts();
        Some((channel.source, channel.id, killed))
    }

    /// How much a channel in grace says it has moved.
    pub fn look(&mut self, channel: ChannelId, moved: u64, now: Nanos) {
        if let Some(number) = self.find_channel(channel) {
            let event = self.channels[number as usize].tick(moved);
            self.climb(number, event, now);
        }
    }

    /// What a killed channel's source says became of it.
    pub fn reaped(&mut self, channel: ChannelId, reap: Reap, now: Nanos) {
        if let Some(number) = self.find_channel(channel) {
            self.climb(number, Event::Reaped(reap), now);
        }
    }

    /// One step of a channel on the ladder, with its consequences.
    fn climb(&mut self, number: u16, event: Event, now: Nanos) {
        let channel = &mut self.channels[number as usize];
        let (phase, action) = ladder::step(channel.phase, event, &channel.rule, now);
        let was_stopping = channel.phase.is_stopping();
        channel.phase = phase;
        match (was_stopping, phase.is_stopping()) {
            (false, true) => self.stopping.push(number),
            (true, false) => self.stopping.retain(|&kept| kept != number),
            (false, false) | (true, true) => {}
        }
        match action {
            Action::None => {}
            Action::Kill => self.on_killed(number, now),
            Action::Quiet => {
                self.counters.channels_quiet += 1;
                self.lose_posts(number, false);
                self.channels_free.push_back(number);
            }
            Action::Stuck => {
                self.counters.channels_stuck += 1;
                self.channels_quarantined += 1;
                self.lose_posts(number, true);
            }
        }
    }

    /// Orders the kill and tells every waiter with posts on the channel (E5): it ends at once,
    /// its guards stay until the channel is quiet.
    fn on_killed(&mut self, number: u16, now: Nanos) {
        self.counters.channels_killed += 1;
        let channel = &self.channels[number as usize];
        self.effects.orders.push_back(Order::Kill {
            source: channel.source,
            channel: channel.id,
        });
        for position in channel.unretired() {
            let Entry::Posted(index) = self.channels[number as usize].entry(position) else {
                continue;
            };
            match self.slots.at(index).state {
                State::Waiting => {
                    self.end_logically(index, Err(EndReason::ChannelKilled), now);
                }
                State::Free | State::Stopping(_) | State::Ended(_) => {}
            }
        }
    }

    /// The channel is gone and what it had not completed is lost (I4): quiet memory may go,
    /// memory of a stuck channel is quarantined at its slot's physical end.
    fn lose_posts(&mut self, number: u16, stuck: bool) {
        loop {
            let channel = &mut self.channels[number as usize];
            // Losing is no progress: the time of the last completion does not matter any more.
            let Some(entry) = channel.retire_next(u64::MAX, Nanos(0)) else {
                break;
            };
            match entry {
                Entry::Void => continue,
                Entry::TakenBack => {}
                Entry::Posted(index) => {
                    self.slots.at(index).stuck |= stuck;
                    self.release_post(index, number);
                    self.end_physically_if_quiet(index);
                }
            }
            self.counters.posts_lost += 1;
            self.counters.posts_outstanding -= 1;
        }
        self.channels[number as usize].close();
        self.counters.channels_open -= 1;
    }
}

// --- what can be seen ----------------------------------------------------------------------

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
#[path = "slab_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "testing.rs"]
pub(crate) mod testing;
