//! The control face, and the thread that is the two cards.

use crate::card::{Card, Cards, Side, tell};
use crate::device::{FakeDevice, LAST_COMPLETION_NS, locked};
use rdma_core_sys::{self as sys, ibv_async_element};
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How many times shorter acknowledgement timers are than the verbs'.
pub const TIME_SCALE: u64 = 100;

/// How long the thread sleeps when nothing is due: a bound for what a missed signal would cost.
const IDLE: Duration = Duration::from_millis(500);

/// What becomes of one work request, whatever else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// It fails with this status; what follows is flushed.
    Fail(u32),
    /// It takes place, and its completion never comes.
    LoseCompletion,
    /// It takes place, and completes twice.
    DoubleCompletion,
}

/// What a wire has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounters {
    /// Requests taken.
    pub posted: u64,
    /// Requests that succeeded.
    pub completed: u64,
    /// Bytes moved.
    pub bytes: u64,
}

pub(crate) struct Shared {
    pub cards: Mutex<Cards>,
    /// Something may be due.
    pub bell: Condvar,
    over: Mutex<bool>,
}

impl Shared {
    /// Changes something and lets the cards see it.
    pub fn with<T>(&self, change: impl FnOnce(&mut Cards) -> T) -> T {
        let result = change(&mut locked(&self.cards));
        self.bell.notify_all();
        result
    }
}

/// When the newest completion of any queue in this process was put there, in nanoseconds of
/// `CLOCK_MONOTONIC`: for benches, with one read at a time.
pub fn last_completion_ns() -> u64 {
    LAST_COMPLETION_NS.load(Ordering::Acquire)
}

/// All devices there are.
static DEVICES: Mutex<Vec<Arc<FakeDevice>>> = Mutex::new(Vec::new());

pub(crate) fn devices() -> Vec<Arc<FakeDevice>> {
    locked(&DEVICES).clone()
}

/// Two devices and what joins them. Dropping it takes the devices off the list; what was opened
/// of them lives on until it is closed.
pub struct Wire {
    shared: Arc<Shared>,
    names: [String; 2],
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// Two fresh devices.
    pub fn new() -> Wire {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared {
            cards: Mutex::default(),
            bell: Condvar::new(),
            over: Mutex::new(false),
        });
        let names = [format!("fake{number}near"), format!("fake{number}far")];
        for (name, side) in names.iter().zip([Side::Near, Side::Far]) {
            locked(&DEVICES).push(Arc::new(FakeDevice {
                shared: shared.clone(),
                side,
                name: CString::new(name.as_str()).unwrap_or_default(),
            }));
        }
        let weak = Arc::downgrade(&shared);
        let thread = std::thread::Builder::new()
            .name("fake-verbs".into())
            .spawn(move || cards_loop(&weak))
            .ok();
        Wire {
            shared,
            names,
            thread,
        }
    }

    /// Name of the device that a test's own side opens.
    pub fn near(&self) -> &str {
        &self.names[0]
    }

    /// Name of its peer's.
    pub fn far(&self) -> &str {
        &self.names[1]
    }

    fn near_card<T>(&self, change: impl FnOnce(&mut Card) -> T) -> T {
        self.shared.with(|cards| change(cards.side(Side::Near)))
    }

    /// The far process is dead: its device answers nothing any more.
    pub fn kill(&self) {
        self.shared.with(|cards| cards.far.dead = true);
    }

    /// A process lives there again (with no queue pair of the old one).
    pub fn revive(&self) {
        self.shared.with(|cards| cards.far.dead = false);
    }

    /// All packets are lost, until `false`.
    pub fn lose_all(&self, lossy: bool) {
        self.shared.with(|cards| cards.lossy = lossy);
    }

    /// The link is down: flushes without a primary error, PORT_ERR on both devices.
    pub fn link_down(&self) {
        self.shared.with(|cards| {
            for side in [Side::Near, Side::Far] {
                let card = cards.side(side);
                card.link_down = true;
                let element = ibv_async_element { port_num: 1 };
                tell(&card.contexts, element, sys::IBV_EVENT_PORT_ERR);
            }
        });
    }

    /// And up again.
    pub fn link_up(&self) {
        self.shared.with(|cards| {
            cards.near.link_down = false;
            cards.far.link_down = false;
        });
    }

    /// The near device dies: DEVICE_FATAL.
    pub fn device_fatal(&self) {
        self.near_card(|card| {
            let element = ibv_async_element { port_num: 0 };
            tell(&card.contexts, element, sys::IBV_EVENT_DEVICE_FATAL);
        });
    }

    /// The far pool is deregistered, whatever its owner thinks.
    pub fn forget_far_memory(&self) {
        self.shared.with(|cards| cards.far.memory.clear());
    }

    /// The `nth` work request from now on that is posted on the near device (0: the next one)
    /// goes by `rule`.
    pub fn rule(&self, nth: u64, rule: Rule) {
        self.near_card(|card| {
            let at = card.posted + nth;
            card.rules.push((at, rule));
        });
    }

    /// Posts on the near device get `ENOMEM` once `requests` more were taken; `None`: no more.
    pub fn enomem_after(&self, requests: Option<u64>) {
        self.near_card(|card| card.enomem_after = requests);
    }

    /// Destroying queue pairs of the near device fails.
    pub fn destroy_fails(&self, fails: bool) {
        self.near_card(|card| card.destroy_fails = fails);
    }

    /// Flushes on the near device never come.
    pub fn lose_flushes(&self, lost: bool) {
        self.near_card(|card| card.flushes_lost = lost);
    }

    /// From now on requests move only by [`Wire::step`] (timers and flushes go on).
    pub fn by_hand(&self, by_hand: bool) {
        self.shared.with(|cards| cards.by_hand = by_hand);
    }

    /// Lets up to `requests` move, and sees to it that they have when this returns.
    pub fn step(&self, requests: u64) {
        self.shared.with(|cards| {
            cards.may_move = requests;
            cards.turn(Instant::now());
            cards.may_move = 0;
        });
    }

    /// What was counted.
    pub fn counters(&self) -> WireCounters {
        locked(&self.shared.cards).counters
    }

    /// Queue pairs of near and far that exist.
    pub fn pairs(&self) -> (usize, usize) {
        let cards = locked(&self.shared.cards);
        (cards.near.pairs.len(), cards.far.pairs.len())
    }

    /// Access flags of the near and far regions that are registered.
    pub fn access(&self) -> (Vec<i32>, Vec<i32>) {
        let cards = locked(&self.shared.cards);
        let flags = |card: &Card| card.memory.values().map(|memory| memory.flags).collect();
        (flags(&cards.near), flags(&cards.far))
    }

    /// Completions that found their queue full, over both devices.
    pub fn overruns(&self) -> u64 {
        let cards = locked(&self.shared.cards);
        let pairs = cards.near.pairs.values().chain(cards.far.pairs.values());
        pairs
            .map(|pair| locked(&pair.queue.entries).overruns)
            .max()
            .unwrap_or(0)
    }
}

impl Default for Wire {
    fn default() -> Self {
        Wire::new()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        locked(&DEVICES).retain(|device| !Arc::ptr_eq(&device.shared, &self.shared));
        *locked(&self.shared.over) = true;
        // Under the lock, so that the thread is either before its look at `over` or asleep.
        drop(locked(&self.shared.cards));
        self.shared.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            // It ends by itself: a panic there has failed the test by its missing completions.
            let _ended = thread.join();
        }
    }
}

fn cards_loop(shared: &Weak<Shared>) {
    loop {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut cards = locked(&shared.cards);
        if *locked(&shared.over) {
            return;
        }
        let now = Instant::now();
        let due = cards.turn(now);
        let sleep = due.map_or(IDLE, |due| due.saturating_duration_since(now).min(IDLE));
        let _woken = shared
            .bell
            .wait_timeout(cards, sleep.max(Duration::from_micros(50)))
            .unwrap_or_else(PoisonError::into_inner);
    }
}
