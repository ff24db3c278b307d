//! One channel: a fixed ring `position -> post`, retired cumulatively (PROTOCOL P2, P3).
//!
//! ```text
//!   positions  0 ....... next_retire ......... next_post ....
//!              retired    in the ring           never posted
//! ```
//!
//! Owns the counts of what is outstanding. It knows slots only by their index.

use super::ids::{ChannelId, WorkId};
use super::ladder::{Event, Phase, StopRule};
use super::slab::SourceId;
use crate::time::Nanos;

/// Posts a ring can hold: 2^16 reads of 1 MiB are 64 GiB in flight on one channel, more than
/// any pool here; the ring then takes 512 KiB.
pub const RING_MAX: usize = 1 << 16;

/// One ring entry. It needs no generation: a place of the slab is not used again while posts
/// of its slot are outstanding, and an entry is gone once its post is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Outstanding work of the slot at this place of the slab.
    Posted(u32),
    /// Outstanding work whose slot has let go of it: it names no memory any more.
    TakenBack,
    /// A position that was reserved and never posted, or is not in use.
    Void,
}

/// What a position means to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Position {
    /// Retired before.
    Retired,
    /// Outstanding.
    Outstanding,
    /// Never posted.
    NeverPosted,
}

/// One place of the channel table.
pub(super) struct Channel {
    pub id: ChannelId,
    pub source: SourceId,
    pub rule: StopRule,
    pub phase: Phase,
    ring: Box<[Entry]>,
    next_post: u64,
    next_retire: u64,
    /// Entries that are not void.
    pub outstanding: u64,
    /// Of these, posts whose waiter has ended and whose memory is still named.
    pub pinned: u64,
    /// Of these, posts whose waiter has ended and that name no memory.
    pub taken_back: u64,
    /// From this position on nothing took place: the channel is over, for this reason.
    pub broken: Option<(u64, u32)>,
    busy_since: Nanos,
    busy_retired: u64,
    retired_at: Nanos,
}

impl Channel {
    /// A closed place.
    pub fn closed(id: ChannelId, source: SourceId) -> Self {
        Channel {
            id,
            source,
            rule: StopRule::of(id.kind),
            phase: Phase::Free,
            ring: Box::new([]),
            next_post: 0,
            next_retire: 0,
            outstanding: 0,
            pinned: 0,
            taken_back: 0,
            broken: None,
            busy_since: Nanos(0),
            busy_retired: 0,
            retired_at: Nanos(0),
        }
    }

    /// Takes the place into use. Positions go on from those of its last tenant, so that a work
    /// id of that one never names work of this one.
    pub fn open(&mut self, id: ChannelId, source: SourceId, ring: usize) {
        debug_assert_eq!(
            self.outstanding, 0,
            "a free channel has nothing outstanding"
        );
        self.id = id;
        self.source = source;
        self.rule = StopRule::of(id.kind);
        self.ring = vec![Entry::Void; ring.next_power_of_two()].into_boxed_slice();
        self.busy_retired = 0;
        self.broken = None;
    }

    /// Gives the ring's memory back; nothing may be outstanding.
    pub fn close(&mut self) {
        debug_assert_eq!(self.outstanding, 0);
        self.ring = Box::new([]);
        self.next_retire = self.next_post;
    }

    /// Positions that can be reserved now.
    pub fn room(&self) -> usize {
        self.ring.len() - (self.next_post - self.next_retire) as usize
    }

    /// Whether `posts` more positions can still be numbered.
    pub fn can_number(&self, posts: usize) -> bool {
        self.next_post + posts as u64 <= WorkId::POSITION_MAX
    }

    /// Gives the next `posts` positions to the slot at `slot`; there must be room.
    pub fn reserve(&mut self, slot: u32, posts: usize, now: Nanos) -> WorkId {
        debug_assert!(posts <= self.room());
        if self.outstanding == 0 {
            self.busy_since = now;
            self.busy_retired = 0;
        }
        let first = WorkId::new(self.id, self.next_post);
        for _ in 0..posts {
            let place = self.place(self.next_post);
            self.ring[place] = Entry::Posted(slot);
            self.next_post += 1;
        }
        self.outstanding += posts as u64;
        first
    }

    /// What `position` means now. A void entry was never posted.
    pub fn position(&self, position: u64) -> Position {
        if position < self.next_retire {
            Position::Retired
        } else if position >= self.next_post || self.entry(position) == Entry::Void {
            Position::NeverPosted
        } else {
            Position::Outstanding
        }
    }

    /// The source said that nothing from `position` on took place; the first such word counts.
    pub fn break_at(&mut self, position: u64, code: u32) {
        self.broken.get_or_insert((position, code));
    }

    /// Whether the post at `position` is known not to have taken place.
    pub fn is_flushed(&self, position: u64) -> bool {
        self.broken.is_some_and(|(first, _)| position >= first)
    }

    /// The entry at an unretired position.
    pub fn entry(&self, position: u64) -> Entry {
        debug_assert!(self.unretired().contains(&position));
        self.ring[self.place(position)]
    }

    /// Positions in the ring.
    pub fn unretired(&self) -> std::ops::Range<u64> {
        self.next_retire..self.next_post
    }

    /// Retires the oldest position if it is at most `last`; gives its entry.
    pub fn retire_next(&mut self, last: u64, now: Nanos) -> Option<Entry> {
        if self.next_retire > last || self.next_retire == self.next_post {
            return None;
        }
        let place = self.place(self.next_retire);
        let entry = std::mem::replace(&mut self.ring[place], Entry::Void);
        self.next_retire += 1;
        match entry {
            Entry::Posted(_) => {}
            Entry::TakenBack => self.taken_back -= 1,
            Entry::Void => return Some(entry),
        }
        self.outstanding -= 1;
        self.busy_retired += 1;
        self.retired_at = now;
        Some(entry)
    }

    /// Passes over void positions at the old end, which nothing will ever complete.
    pub fn skip_void(&mut self) {
        while self.next_retire < self.next_post && self.entry(self.next_retire) == Entry::Void {
            self.next_retire += 1;
        }
    }

    /// Makes an outstanding position void; gives the slot that had posted it.
    pub fn void(&mut self, position: u64) -> Option<u32> {
        if self.position(position) != Position::Outstanding {
            return None;
        }
        let place = self.place(position);
        match self.ring[place] {
            Entry::Posted(slot) => {
                self.ring[place] = Entry::Void;
                self.outstanding -= 1;
                Some(slot)
            }
            Entry::TakenBack | Entry::Void => None,
        }
    }

    /// Notes that the post at `position` names no memory any more; gives its slot.
    pub fn take_back(&mut self, position: u64) -> Option<u32> {
        if self.position(position) != Position::Outstanding {
            return None;
        }
        let place = self.place(position);
        match self.ring[place] {
            Entry::Posted(slot) => {
                self.ring[place] = Entry::TakenBack;
                self.taken_back += 1;
                Some(slot)
            }
            Entry::TakenBack | Entry::Void => None,
        }
    }

    /// Whether posts of ended waiters are outstanding.
    pub fn has_orphans(&self) -> bool {
        self.pinned + self.taken_back > 0
    }

    /// The event that tells the ladder about a waiter that ended.
    pub fn orphaned(&self) -> Event {
        Event::Orphaned {
            next_post: self.next_post,
        }
    }

    /// The event that tells the ladder about retired posts.
    pub fn retired(&self) -> Event {
        Event::Retired {
            orphans: self.has_orphans(),
            next_retire: self.next_retire,
            next_post: self.next_post,
        }
    }

    /// The event that tells the ladder how the channel looks now.
    pub fn tick(&self, moved: u64) -> Event {
        let busy = self.retired_at.since(self.busy_since);
        Event::Tick {
            moved,
            pinned: self.pinned > 0,
            allowance: self
                .rule
                .allowance(self.outstanding, self.busy_retired, busy),
        }
    }

    fn place(&self, position: u64) -> usize {
        position as usize & (self.ring.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::completion::ChannelKind;

    fn channel(ring: usize) -> Channel {
        let id = ChannelId {
            kind: ChannelKind::Simulated,
            index: 7,
        };
        let mut channel = Channel::closed(id, SourceId(0));
        channel.open(id, SourceId(0), ring);
        channel
    }

    fn retire_to(channel: &mut Channel, last: u64) -> Vec<Entry> {
        std::iter::from_fn(|| channel.retire_next(last, Nanos(0))).collect()
    }

    #[test]
    fn a_completion_retires_all_posts_up_to_it() {
        let mut channel = channel(4);
        assert_eq!(channel.reserve(1, 2, Nanos(0)).position(), 0);
        assert_eq!(channel.reserve(2, 2, Nanos(0)).position(), 2);
        assert_eq!(channel.room(), 0);
        let entries = retire_to(&mut channel, 2);
        assert_eq!(
            entries,
            [Entry::Posted(1), Entry::Posted(1), Entry::Posted(2)]
        );
        assert_eq!((channel.outstanding, channel.room()), (1, 3));
        assert_eq!(channel.position(2), Position::Retired);
        assert_eq!(channel.position(3), Position::Outstanding);
        assert_eq!(channel.position(4), Position::NeverPosted);
    }

    #[test]
    fn positions_grow_over_the_ring_many_times() {
        let mut channel = channel(3);
        for round in 0..1000u64 {
            let first = channel.reserve(round as u32, 3, Nanos(0)).position();
            assert_eq!(first, round * 3);
            assert_eq!(retire_to(&mut channel, first + 2).len(), 3);
        }
        assert_eq!(channel.outstanding, 0);
    }

    #[test]
    fn a_void_position_counts_as_never_posted_and_frees_its_place() {
        let mut channel = channel(4);
        channel.reserve(1, 4, Nanos(0));
        assert_eq!(channel.void(3), Some(1));
        assert_eq!(channel.void(3), None);
        assert_eq!(channel.position(3), Position::NeverPosted);
        assert_eq!(retire_to(&mut channel, 2).len(), 3);
        channel.skip_void();
        assert_eq!((channel.outstanding, channel.room()), (0, 4));
    }

    #[test]
    fn the_next_tenant_goes_on_where_the_last_one_stopped() {
        let mut channel = channel(4);
        channel.reserve(1, 3, Nanos(0));
        retire_to(&mut channel, 2);
        channel.close();
        let id = channel.id;
        channel.open(id, SourceId(1), 4);
        assert_eq!(channel.position(2), Position::Retired);
        assert_eq!(channel.reserve(1, 1, Nanos(0)).position(), 3);
    }
}
