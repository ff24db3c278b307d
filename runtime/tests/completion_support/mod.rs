//! Shared by the `completion_*` tests: a keeper that remembers, a source that does as it is told.
#![allow(dead_code)] // each test file uses its part

use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, CompletionStatus, Deadline, GuardKeeper,
    GuardToken, Hub, HubLimits, Nanos, Reap, SourceId, WorkId,
};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

thread_local! {
    static CLOCK: Cell<u64> = const { Cell::new(1_000_000_000) };
}

/// The virtual clock of the calling test.
pub fn clock() -> Nanos {
    Nanos(CLOCK.get())
}

/// Guards that came back, in order.
#[derive(Default)]
pub struct Ledger {
    pub released: RefCell<Vec<u32>>,
    pub quarantined: RefCell<Vec<u32>>,
}

impl GuardKeeper for Ledger {
    fn release(&self, guards: GuardToken) {
        self.released.borrow_mut().push(guards.number().get());
    }

    fn quarantine(&self, guards: GuardToken) {
        self.quarantined.borrow_mut().push(guards.number().get());
    }
}

/// A source that completes what the test tells it to.
#[derive(Default)]
pub struct Scripted {
    pub due: VecDeque<Completed>,
    pub killed: Vec<ChannelId>,
    pub taken_back: Vec<WorkId>,
    pub takes_back: bool,
    pub reap: Option<Reap>,
}

impl CompletionSource for Scripted {
    fn poll(&mut self, _now: Nanos, out: &mut Vec<Completed>) -> usize {
        let count = self.due.len().min(64);
        out.extend(self.due.drain(..count));
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn kill(&mut self, channel: ChannelId) {
        self.killed.push(channel);
    }

    fn reap(&mut self, _channel: ChannelId) -> Reap {
        self.reap.unwrap_or(Reap::Draining(1))
    }

    fn take_back(&mut self, work: WorkId) -> bool {
        self.taken_back.push(work);
        self.takes_back
    }
}

/// A hub on the virtual clock with one scripted source and one channel.
pub struct Rig {
    pub hub: Hub,
    pub ledger: Rc<Ledger>,
    pub source: Rc<RefCell<Scripted>>,
    pub source_id: SourceId,
    pub channel: ChannelId,
}

impl Rig {
    pub fn new(kind: ChannelKind) -> Self {
        let ledger = Rc::new(Ledger::default());
        let hub = Hub::with_clock(HubLimits { slots_max: 64 }, ledger.clone(), clock);
        let source = Rc::new(RefCell::new(Scripted::default()));
        let source_id = hub.add_source(source.clone());
        let channel = hub.open_channel(kind, source_id, 16).expect("room");
        Rig {
            hub,
            ledger,
            source,
            source_id,
            channel,
        }
    }

    pub fn in_ms(&self, span_ms: u64) -> Deadline {
        Deadline::after(clock(), Duration::from_millis(span_ms))
    }

    /// Lets `span_ms` pass in steps of 1 ms, each with a turn.
    pub fn pass_ms(&self, span_ms: u64) {
        for _step in 0..span_ms {
            CLOCK.set(CLOCK.get() + 1_000_000);
            self.hub.turn(clock());
        }
    }

    /// Lets time pass without a turn.
    pub fn sleep_ms(&self, span_ms: u64) {
        CLOCK.set(CLOCK.get() + span_ms * 1_000_000);
    }

    pub fn turn(&self) {
        self.hub.turn(clock());
    }

    pub fn complete(&self, work: WorkId) {
        self.complete_as(work, CompletionStatus::Success);
    }

    pub fn complete_as(&self, work: WorkId, status: CompletionStatus) {
        let completed = Completed { work, status };
        self.source.borrow_mut().due.push_back(completed);
        self.turn();
    }

    pub fn released(&self) -> Vec<u32> {
        self.ledger.released.borrow().clone()
    }

    pub fn quarantined(&self) -> Vec<u32> {
        self.ledger.quarantined.borrow().clone()
    }
}

pub fn token(number: u32) -> Option<GuardToken> {
    NonZeroU32::new(number).map(GuardToken::issue)
}

/// A waker that counts.
#[derive(Default)]
pub struct Wakes(AtomicUsize);

impl Wakes {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub fn counting_waker() -> (Arc<Wakes>, Waker) {
    let wakes = Arc::new(Wakes::default());
    (wakes.clone(), Waker::from(wakes))
}
