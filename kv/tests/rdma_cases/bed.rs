//! A decode node's half by hand: hub, ledger and RDMA transport, with a rig's far end.

use crate::conformance::rdma_rig::{Fabric, RdmaRig, test_config};
use crate::conformance::{Lease, PATIENCE, Rig, Shape};
use kvserve_kv::ledger::{AllocateAs, Ledger, LedgerCell};
use kvserve_kv::transport::rdma::{RdmaConfig, RdmaTransport};
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, Completion, CompletionSource, Deadline, EndReason, Hub,
    HubLimits, Nanos, Reap, SourceId, WorkId,
};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::RawFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

pub const SHAPE: Shape = Shape {
    pages: 64,
    page_bytes: 4096,
    narrow: false,
};

/// A rig whose transport is a source of a hub.
pub struct Shared(pub RdmaRig);

impl CompletionSource for Shared {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        self.0.transport.poll(now, out)
    }
    fn arm(&mut self) -> Option<RawFd> {
        self.0.transport.arm()
    }
    fn in_flight(&self) -> usize {
        self.0.transport.in_flight()
    }
    fn kill(&mut self, channel: ChannelId) {
        self.0.transport.kill(channel);
    }
    fn reap(&mut self, channel: ChannelId) -> Reap {
        self.0.transport.reap(channel)
    }
    fn moved(&self, channel: ChannelId) -> u64 {
        self.0.transport.moved(channel)
    }
}

pub struct Bed {
    pub hub: Hub,
    pub ledger: Rc<LedgerCell>,
    pub rig: Rc<RefCell<Shared>>,
    pub source: SourceId,
    pub lease: Lease,
    /// Whether a turn lets the wire's requests move.
    pub stepping: Cell<bool>,
}

/// A pull under way, and the pages that it owns.
pub struct Pull {
    pub completion: Completion,
    pub pages: Vec<PageId>,
}

impl Bed {
    pub fn new(shape: Shape) -> Self {
        Bed::with(shape, test_config())
    }

    pub fn with(shape: Shape, config: RdmaConfig) -> Self {
        let mut rig = RdmaRig::with(shape, config);
        fill(rig.source(), shape.page_bytes);
        let all: Vec<_> = (0..shape.pages as u32).map(PageId).collect();
        let lease = rig.grant(&all);
        let ledger = Rc::new(LedgerCell::new(Ledger::new(shape.pages)));
        let hub = Hub::new(HubLimits::default(), ledger.clone());
        let rig = Rc::new(RefCell::new(Shared(rig)));
        let source = hub.add_source(rig.clone());
        Bed {
            hub,
            ledger,
            rig,
            source,
            lease,
            stepping: Cell::new(true),
        }
    }

    pub fn fabric<T>(&self, use_it: impl FnOnce(&Fabric) -> T) -> T {
        use_it(&self.rig.borrow().0.fabric)
    }

    pub fn transport<T>(&self, use_it: impl FnOnce(&mut RdmaTransport) -> T) -> T {
        use_it(&mut self.rig.borrow_mut().0.transport)
    }

    /// A queue pair to the far end, known to the hub.
    pub fn connect(&self) -> ChannelId {
        let opened = self.hub.open_channel(ChannelKind::Rdma, self.source, 512);
        let channel = opened.unwrap();
        let connected = self.rig.borrow_mut().0.try_connect(channel.index);
        assert_eq!(connected.unwrap_or_else(|error| panic!("{error}")), channel);
        channel
    }

    /// Starts to pull lease pages `0..count`, `each` a read, into freshly allocated pages.
    pub fn pull(&self, channel: ChannelId, count: usize, each: usize, limit: Duration) -> Pull {
        let mut pages = Vec::new();
        let guards = self.ledger.with(|ledger| {
            let got = ledger.allocate(count, AllocateAs::Pulling, &mut pages);
            got.unwrap();
            ledger.guard(pages.iter().copied())
        });
        // Every second page away from its neighbour, so that a read takes several requests.
        pages.sort_by_key(|page| (page.0 % 2, page.0));
        let deadline = Deadline::after(Nanos::now(), limit);
        let begun = self.hub.begin("test.pull", deadline, Some(guards));
        let completion = begun.unwrap_or_else(|_| panic!("no slot"));
        let reads: Vec<_> = pages
            .chunks(each)
            .enumerate()
            .map(|(at, into)| Read {
                lease: self.lease.id,
                epoch: self.lease.epoch,
                first: (at * each) as u32,
                into: into.to_vec(),
            })
            .collect();
        let first = self
            .hub
            .reserve(completion.slot(), channel, reads.len())
            .unwrap();
        self.post(channel, first, reads);
        Pull { completion, pages }
    }

    fn post(&self, channel: ChannelId, first: WorkId, reads: Vec<Read>) {
        let count = reads.len();
        let posted = self.transport(|transport| transport.post(channel, first, reads));
        if let Err(failed) = posted {
            let rest = count - failed.posted;
            self.hub
                .unpost(first.offset(failed.posted as u64), rest, failed.code);
        }
    }

    pub fn turn(&self) {
        self.hub.turn(Nanos::now());
        if let Some(wire) = &self.rig.borrow().0.fabric.wire
            && self.stepping.get()
        {
            wire.step(1);
        }
        std::thread::yield_now();
    }

    /// Turns until the pull's waiter is told.
    pub fn wait(&self, pull: &mut Pull) -> Result<(), EndReason> {
        let begun = Instant::now();
        loop {
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(end) = pin!(&mut pull.completion).poll(&mut context) {
                return end;
            }
            assert!(begun.elapsed() < PATIENCE, "the waiter is never told");
            self.turn();
        }
    }

    /// Gives the pages back, as an attempt's end does; they are free when nothing names them.
    pub fn give_back(&self, pull: Pull) {
        drop(pull.completion);
        self.ledger.with(|ledger| ledger.free(&pull.pages));
    }

    /// Turns until every page is free.
    pub fn restored(&self) {
        let begun = Instant::now();
        loop {
            let counts = self.ledger.with(|ledger| ledger.counts());
            if counts.free == SHAPE.pages {
                break;
            }
            assert_eq!(counts.quarantined, 0, "pages are lost");
            assert!(
                begun.elapsed() < PATIENCE,
                "pages do not come back: {counts:?}"
            );
            self.turn();
        }
    }

    /// What landed is what the peer holds.
    pub fn assert_landed(&self, pull: &Pull) {
        let rig = self.rig.borrow();
        for (from, into) in pull.pages.iter().enumerate() {
            let wanted = bytes_of(rig.0.source(), PageId(from as u32));
            assert!(wanted == bytes_of(rig.0.target(), *into), "page {from}");
        }
    }

    /// A whole transfer on a fresh queue pair, which then goes again.
    pub fn next_transfer_succeeds(&self) {
        let channel = self.connect();
        let mut pull = self.pull(channel, 32, 8, PATIENCE);
        assert_eq!(self.wait(&mut pull), Ok(()));
        self.assert_landed(&pull);
        self.give_back(pull);
        self.restored();
        self.hub.close_channel(channel);
        let begun = Instant::now();
        while self.transport(|transport| transport.channel_state(channel).is_some()) {
            assert!(begun.elapsed() < PATIENCE, "a closed channel stays");
            self.turn();
        }
        assert_eq!(self.hub.counters().channels_stuck, 0);
    }
}

fn fill(pool: &PoolMemory, page_bytes: usize) {
    for page in 0..pool.pages() {
        let start = pool.page(PageId(page as u32));
        for place in 0..page_bytes {
            // SAFETY: inside the page, which is the test's until a card reads it.
            unsafe {
                start
                    .add(place)
                    .write((page * 89 + place * 7 + (place >> 8)) as u8)
            };
        }
    }
}

fn bytes_of(pool: &PoolMemory, page: PageId) -> Vec<u8> {
    // SAFETY: the page has that many bytes, and no read of it is under way.
    unsafe { std::slice::from_raw_parts(pool.page(page), SHAPE.page_bytes) }.to_vec()
}
