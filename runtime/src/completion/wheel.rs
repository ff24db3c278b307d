//! The deadline wheel: which of many deadlines have passed, without a clock of its own.
//!
//! One timer per slab place, named by the place's index; arming, cancelling and firing are O(1)
//! and allocate nothing once the table has grown to the slab's size. A timer fires never before
//! its deadline and at the first look one tick after it at the latest.
//!
//! Eight levels of 64 buckets. A timer lies at the level of the highest six-bit digit in which
//! its tick differs from `current`; when `current` reaches the start of its bucket it moves to a
//! lower level. So everything on a lower level is due before everything on a higher one.

use crate::time::Nanos;
use std::time::Duration;

/// The wheel's resolution (PROTOCOL 9).
pub const TICK: Duration = Duration::from_millis(1);

const TICK_NS: u64 = TICK.as_nanos() as u64;
const DIGIT_BITS: u32 = 6;
const BUCKETS: usize = 1 << DIGIT_BITS;
/// 8 digits of 6 bits count 2^48 ms: 8,900 years of uptime, so ticks never overflow the wheel.
const LEVELS: usize = 8;
const TICK_MAX: u64 = (1 << (DIGIT_BITS as u64 * LEVELS as u64)) - 1;
/// The list of timers whose tick had come when they were armed.
const DUE: u16 = (LEVELS * BUCKETS) as u16;
const NIL: u32 = u32::MAX;
const UNARMED: u16 = u16::MAX;

#[derive(Clone, Copy)]
struct Timer {
    tick: u64,
    list: u16,
    prev: u32,
    next: u32,
}

const IDLE: Timer = Timer {
    tick: 0,
    list: UNARMED,
    prev: NIL,
    next: NIL,
};

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
}

/// Deadlines of slab places, by index.
pub struct Wheel {
    current: u64,
    armed: usize,
    timers: Vec<Timer>,
    lists: Box<[List]>,
    occupied: [u64; LEVELS],
}

impl Wheel {
    /// An empty wheel whose time starts at `now`.
    pub fn new(now: Nanos) -> Self {
        let empty = List {
            head: NIL,
            tail: NIL,
        };
        Wheel {
            current: tick_at(now),
            armed: 0,
            timers: Vec::new(),
            lists: vec![empty; DUE as usize + 1].into_boxed_slice(),
            occupied: [0; LEVELS],
        }
    }

    /// Arms the timer of place `index`, which must not be armed.
    pub fn arm(&mut self, index: u32, deadline: Nanos) {
        if index as usize >= self.timers.len() {
            self.timers.resize(index as usize + 1, IDLE);
        }
        debug_assert_eq!(
            self.timers[index as usize].list, UNARMED,
            "one timer a place"
        );
        self.timers[index as usize].tick = deadline.0.div_ceil(TICK_NS).min(TICK_MAX);
        self.link(index);
        self.armed += 1;
    }

    /// Takes the timer of place `index` off the wheel; nothing happens if it is not armed.
    pub fn cancel(&mut self, index: u32) {
        match self.timers.get(index as usize) {
            Some(timer) if timer.list != UNARMED => {
                self.unlink(index);
                self.armed -= 1;
            }
            Some(_) | None => {}
        }
    }

    /// Timers armed.
    pub fn armed(&self) -> usize {
        self.armed
    }

    /// Takes one timer off whose deadline has passed at `now`; `None` when there is none. The
    /// caller bounds how many it takes in one turn; the rest stays due.
    pub fn pop_expired(&mut self, now: Nanos) -> Option<u32> {
        let now_tick = tick_at(now);
        loop {
            let due = self.lists[DUE as usize].head;
            if due != NIL {
                self.cancel(due);
                return Some(due);
            }
            let Some((level, bucket, start)) = self.next_bucket() else {
                self.current = self.current.max(now_tick);
                return None;
            };
            if start > now_tick {
                self.current = self.current.max(now_tick);
                return None;
            }
            self.current = self.current.max(start);
            let head = self.lists[list_of(level, bucket) as usize].head;
            if level == 0 {
                self.cancel(head);
                return Some(head);
            }
            self.cascade(level, bucket);
        }
    }

    /// When to look again: never later than the earliest deadline plus a tick. It may be earlier
    /// (the start of a bucket), at most once per level and timer.
    pub fn next(&self) -> Option<Nanos> {
        if self.lists[DUE as usize].head != NIL {
            return Some(Nanos(self.current.saturating_mul(TICK_NS)));
        }
        let (_, _, start) = self.next_bucket()?;
        Some(Nanos(start.saturating_mul(TICK_NS)))
    }

    /// The first occupied bucket in time: level, bucket, first tick it covers.
    fn next_bucket(&self) -> Option<(usize, usize, u64)> {
        for (level, &occupied) in self.occupied.iter().enumerate() {
            if occupied == 0 {
                continue;
            }
            // A bucket below the current digit would lie in the past; none does, because a
            // timer differs from `current` first at its own level, and there it is larger.
            let bucket = occupied.trailing_zeros() as usize;
            let shift = DIGIT_BITS * level as u32;
            debug_assert!(bucket as u64 >= digit(self.current, level));
            let above = self.current >> (shift + DIGIT_BITS) << (shift + DIGIT_BITS);
            return Some((level, bucket, above | ((bucket as u64) << shift)));
        }
        None
    }

    /// Moves a bucket's timers down, now that `current` shares its digit with them. Bounded by
    /// the timers armed; each timer moves at most once per level.
    fn cascade(&mut self, level: usize, bucket: usize) {
        let list = list_of(level, bucket);
        let mut index = self.lists[list as usize].head;
        while index != NIL {
            let next = self.timers[index as usize].next;
            self.unlink(index);
            self.link(index);
            debug_assert_ne!(self.timers[index as usize].list, list, "moves down");
            index = next;
        }
    }

    fn link(&mut self, index: u32) {
        let tick = self.timers[index as usize].tick;
        let list = if tick <= self.current {
            DUE
        } else {
            let level = ((63 - (tick ^ self.current).leading_zeros()) / DIGIT_BITS) as usize;
            let bucket = digit(tick, level) as usize;
            self.occupied[level] |= 1 << bucket;
            list_of(level, bucket)
        };
        let tail = self.lists[list as usize].tail;
        let timer = &mut self.timers[index as usize];
        timer.list = list;
        timer.prev = tail;
        timer.next = NIL;
        match tail {
            NIL => self.lists[list as usize].head = index,
            _ => self.timers[tail as usize].next = index,
        }
        self.lists[list as usize].tail = index;
    }

    fn unlink(&mut self, index: u32) {
        let Timer {
            list, prev, next, ..
        } = self.timers[index as usize];
        match prev {
            NIL => self.lists[list as usize].head = next,
            _ => self.timers[prev as usize].next = next,
        }
        match next {
            NIL => self.lists[list as usize].tail = prev,
            _ => self.timers[next as usize].prev = prev,
        }
        if list != DUE && self.lists[list as usize].head == NIL {
            self.occupied[list as usize / BUCKETS] &= !(1 << (list as usize % BUCKETS));
        }
        self.timers[index as usize].list = UNARMED;
    }
}

fn tick_at(now: Nanos) -> u64 {
    (now.0 / TICK_NS).min(TICK_MAX)
}

fn digit(tick: u64, level: usize) -> u64 {
    (tick >> (DIGIT_BITS * level as u32)) & (BUCKETS as u64 - 1)
}

fn list_of(level: usize, bucket: usize) -> u16 {
    (level * BUCKETS + bucket) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::completion::slab::testing::Random;
    use std::collections::{BTreeMap, HashMap};

    const MS: u64 = 1_000_000;

    fn drain(wheel: &mut Wheel, now: Nanos) -> Vec<u32> {
        std::iter::from_fn(|| wheel.pop_expired(now)).collect()
    }

    #[test]
    fn fires_within_one_tick_and_never_early() {
        let mut wheel = Wheel::new(Nanos(0));
        wheel.arm(0, Nanos(5 * MS + 1));
        assert_eq!(drain(&mut wheel, Nanos(5 * MS)), vec![]);
        assert_eq!(drain(&mut wheel, Nanos(6 * MS - 1)), vec![]);
        assert_eq!(drain(&mut wheel, Nanos(6 * MS)), vec![0]);
        assert_eq!(wheel.armed(), 0);
    }

    #[test]
    fn a_deadline_that_has_passed_when_armed_fires_at_once() {
        let mut wheel = Wheel::new(Nanos(100 * MS));
        wheel.arm(3, Nanos(0));
        assert_eq!(wheel.next(), Some(Nanos(100 * MS)));
        assert_eq!(drain(&mut wheel, Nanos(100 * MS)), vec![3]);
    }

    #[test]
    fn a_cancelled_timer_never_fires() {
        let mut wheel = Wheel::new(Nanos(0));
        wheel.arm(0, Nanos(9 * MS));
        wheel.arm(1, Nanos(9 * MS));
        wheel.cancel(0);
        wheel.cancel(0);
        assert_eq!(drain(&mut wheel, Nanos(3_600_000 * MS)), vec![1]);
        assert_eq!(wheel.next(), None);
    }

    #[test]
    fn after_a_long_sleep_everything_fires_in_bounded_bites() {
        let mut wheel = Wheel::new(Nanos(7 * MS));
        for index in 0..1000 {
            wheel.arm(index, Nanos((8 + index as u64 * 37) * MS));
        }
        let woken = Nanos(100_000 * MS);
        let mut order = Vec::new();
        for _bite in 0..10 {
            order.extend((0..100).filter_map(|_| wheel.pop_expired(woken)));
        }
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
        assert_eq!(wheel.pop_expired(woken), None);
    }

    /// Against a sorted map: the same timers fire at each look, whatever the jumps of time.
    #[test]
    fn equals_a_sorted_map_under_random_events() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut now = Nanos(random.below(1 << 40));
            let mut wheel = Wheel::new(now);
            let mut model: BTreeMap<(u64, u32), ()> = BTreeMap::new();
            let mut tick_of: HashMap<u32, u64> = HashMap::new();
            for _event in 0..400 {
                match random.below(4) {
                    0 | 1 => {
                        let index = random.below(200) as u32;
                        if let std::collections::hash_map::Entry::Vacant(place) =
                            tick_of.entry(index)
                        {
                            let reach = 1u64 << random.below(47);
                            let deadline = Nanos(now.0 + random.below(reach));
                            wheel.arm(index, deadline);
                            let tick = deadline.0.div_ceil(MS);
                            place.insert(tick);
                            model.insert((tick, index), ());
                        }
                    }
                    2 => {
                        let index = random.below(200) as u32;
                        wheel.cancel(index);
                        if let Some(tick) = tick_of.remove(&index) {
                            model.remove(&(tick, index));
                        }
                    }
                    _ => {
                        let reach = 1u64 << random.below(45);
                        now = Nanos(now.0 + random.below(reach));
                        let mut fired = drain(&mut wheel, now);
                        fired.sort_unstable();
                        let now_tick = now.0 / MS;
                        let mut expected: Vec<u32> = model
                            .range(..(now_tick + 1, 0))
                            .map(|((_, index), ())| *index)
                            .collect();
                        expected.sort_unstable();
                        assert_eq!(fired, expected, "seed {seed}");
                        for index in fired {
                            let tick = tick_of.remove(&index).expect("armed");
                            model.remove(&(tick, index));
                        }
                    }
                }
                assert_eq!(wheel.armed(), model.len(), "seed {seed}");
                match (wheel.next(), model.first_key_value()) {
                    (None, None) => {}
                    (Some(look), Some((&(tick, _), ()))) => {
                        assert!(
                            look.0 <= tick.max(now.0 / MS) * MS,
                            "seed {seed}: late look"
                        )
                    }
                    (look, first) => panic!("seed {seed}: {look:?} but {first:?}"),
                }
            }
        }
    }
}
