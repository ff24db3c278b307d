//! One awaited thing (PROTOCOL P4), and the table of them with its free list.
//!
//! ```text
//!   Free ─begin─► Waiting ─logical end─► Stopping ─physical end─► Ended ─result taken─► Free
//!                    └────── logical end, nothing outstanding ──────►┘
//! ```
//! A slot whose future is gone passes Ended without stopping there.

use super::counters::SlotPhase;
use super::ids::{EndReason, GuardToken, SlotId};
use crate::time::{Deadline, Nanos};
use std::task::Waker;

/// Channels on which one slot can have posts at once. A transfer spreads over one data channel
/// per core pair, and a node pair shares few: 8 leave room for 8 cores a side.
pub const CHANNELS_PER_SLOT_MAX: usize = 8;

/// Times that the work of one slot is posted at most (PROTOCOL E5): once, and again after the
/// loss of two channels. A path that loses three within one transfer is no path.
pub const POSTS_PER_SLOT_MAX: u8 = 3;

/// Places a slab grows by: few growths on the way to thousands, and no place is reused before
/// its neighbours, so that a stale name needs 2^32 x 256 reuses to fit again.
const GROWTH: u32 = 256;

const NIL: u32 = u32::MAX;

/// How a wait ended.
pub(super) type Outcome = Result<(), EndReason>;

/// Where a slot stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not in use.
    Free,
    /// Begun; its logical end is to come.
    Waiting,
    /// Logically ended, with posts outstanding: the guards stay.
    Stopping(Outcome),
    /// Physically ended; the future has not taken its result.
    Ended(Outcome),
}

/// Posts of one slot on one channel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    pub channel: u16,
    pub outstanding: u32,
}

/// One place of the slab.
pub(super) struct Slot {
    pub generation: u32,
    pub state: State,
    /// Whether a future still names it. Its place is not reused before that future is gone.
    pub held: bool,
    /// Whether one of its posts was on a channel that got stuck.
    pub stuck: bool,
    pub outstanding: u32,
    /// Posts that ended with their channel and have to be made again before the slot is done.
    pub owed: u32,
    /// Rounds of posting that are left after the present one; `None`: it is never posted again.
    pub reposts_left: Option<u8>,
    pub shares: [Share; CHANNELS_PER_SLOT_MAX],
    pub guards: Option<GuardToken>,
    pub waker: Option<Waker>,
    pub label: &'static str,
    pub owner: u64,
    pub begun_at: Nanos,
    pub deadline: Deadline,
    next_free: u32,
}

impl Slot {
    fn vacant() -> Self {
        Slot {
            generation: 0,
            state: State::Free,
            held: false,
            stuck: false,
            outstanding: 0,
            owed: 0,
            reposts_left: None,
            shares: Default::default(),
            guards: None,
            waker: None,
            label: "",
            owner: 0,
            begun_at: Nanos(0),
            deadline: Deadline::after(Nanos(0), std::time::Duration::ZERO),
            next_free: NIL,
        }
    }

    /// Counts `posts` more on `channel`; `false` if it has posts on too many channels already.
    pub fn share_add(&mut self, channel: u16, posts: u32) -> bool {
        let place = (self.shares.iter())
            .position(|share| share.outstanding > 0 && share.channel == channel)
            .or_else(|| self.shares.iter().position(|share| share.outstanding == 0));
        let Some(place) = place else {
            return false;
        };
        self.shares[place].channel = channel;
        self.shares[place].outstanding += posts;
        self.outstanding += posts;
        true
    }

    /// Counts one post less on `channel`.
    pub fn share_remove(&mut self, channel: u16) {
        let share = (self.shares.iter_mut())
            .find(|share| share.outstanding > 0 && share.channel == channel);
        debug_assert!(share.is_some(), "a post is counted in its slot");
        if let Some(share) = share {
            share.outstanding -= 1;
            self.outstanding -= 1;
        }
    }

    /// The phase as the world sees it, with the reason of a bad end; `None` when free.
    pub fn phase(&self) -> Option<(SlotPhase, Option<EndReason>)> {
        match self.state {
            State::Free => None,
            State::Waiting => Some((SlotPhase::Waiting, None)),
            State::Stopping(outcome) => Some((SlotPhase::Stopping, outcome.err())),
            State::Ended(outcome) => Some((SlotPhase::Ended, outcome.err())),
        }
    }
}

/// All slots of a shard. Free places are reused oldest first.
pub(super) struct SlotTable {
    slots: Vec<Slot>,
    slots_max: u32,
    free_head: u32,
    free_tail: u32,
    live: usize,
}

impl SlotTable {
    /// An empty table that grows to at most `slots_max` places.
    pub fn new(slots_max: u32) -> Self {
        SlotTable {
            slots: Vec::new(),
            slots_max,
            free_head: NIL,
            free_tail: NIL,
            live: 0,
        }
    }

    /// Takes the place that has been free longest; `None` when all are in use.
    pub fn take(&mut self) -> Option<u32> {
        if self.free_head == NIL {
            self.grow();
        }
        let index = self.free_head;
        if index == NIL {
            return None;
        }
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.state, State::Free);
        self.free_head = std::mem::replace(&mut slot.next_free, NIL);
        if self.free_head == NIL {
            self.free_tail = NIL;
        }
        self.live += 1;
        Some(index)
    }

    /// Gives a place back; its old name is stale from now on.
    pub fn give_back(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.outstanding == 0 && slot.guards.is_none() && !slot.held);
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.waker = None;
        self.live -= 1;
        self.push_free(index);
    }

    /// The index behind a name, unless the name is stale.
    pub fn find(&self, name: SlotId) -> Option<u32> {
        let slot = self.slots.get(name.index as usize)?;
        (slot.state != State::Free && slot.generation == name.generation).then_some(name.index)
    }

    /// The slot at a place.
    pub fn at(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// The name of the slot at a place.
    pub fn name(&self, index: u32) -> SlotId {
        SlotId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// Slots in use.
    pub fn live(&self) -> usize {
        self.live
    }

    /// All places with their index.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..).zip(&self.slots)
    }

    fn grow(&mut self) {
        let from = self.slots.len() as u32;
        let to = from.saturating_add(GROWTH).min(self.slots_max);
        for index in from..to {
            self.slots.push(Slot::vacant());
            self.push_free(index);
        }
    }

    fn push_free(&mut self, index: u32) {
        self.slots[index as usize].next_free = NIL;
        match self.free_tail {
            NIL => self.free_head = index,
            tail => self.slots[tail as usize].next_free = index,
        }
        self.free_tail = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_places_are_reused_oldest_first_under_new_names() {
        let mut table = SlotTable::new(3);
        let all: Vec<u32> = std::iter::from_fn(|| table.take()).collect();
        assert_eq!(all, [0, 1, 2]);
        for index in all {
            table.at(index).state = State::Waiting;
        }
        let stale = table.name(1);
        table.give_back(1);
        table.give_back(0);
        assert_eq!(table.find(stale), None);
        assert_eq!((table.take(), table.take()), (Some(1), Some(0)));
        table.at(1).state = State::Waiting;
        assert_eq!(table.find(stale), None);
        assert_eq!(table.find(table.name(1)), Some(1));
        assert_eq!(table.live(), 3);
    }
}
