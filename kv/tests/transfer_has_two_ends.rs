//! Ledger, slab, chaos and TCP put together: whatever ends a pull for its waiter, its pages come
//! back exactly when nothing can write them any more, or never (PROTOCOL 2).

mod conformance;

use conformance::tcp_rig::{INCARNATION, TcpRig, socket_pair};
use conformance::{Lease, PATIENCE, Rig, Shape, read};
use kvserve_kv::ledger::{AllocateAs, Ledger, LedgerCell, PageCounts};
use kvserve_kv::transport::chaos::{ChaosHandle, ChaosTransport};
use kvserve_kv::transport::tcp::TcpTransport;
use kvserve_kv::{PageId, Transport};
use kvserve_runtime::{
    ChannelId, ChannelKind, Completion, Deadline, EndReason, Hub, HubLimits, Nanos, SourceId,
};
use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

const PAGES: usize = 64;
const PULL: usize = 32;

const SHAPE: Shape = Shape {
    pages: PAGES,
    page_bytes: 4096,
    narrow: true,
};

/// A decode node's half by hand, and a prefill node's rig at the other end.
struct Node {
    rig: TcpRig,
    ledger: Rc<LedgerCell>,
    hub: Hub,
    chaos: Rc<RefCell<ChaosTransport<TcpTransport>>>,
    source: SourceId,
    channel: ChannelId,
    handle: ChaosHandle,
    lease: Lease,
}

/// One pull: what waits for it, and the pages that it owns until it gives them up.
struct Pull {
    completion: Completion,
    pages: Vec<PageId>,
}

impl Node {
    fn new(spec: &str) -> Self {
        let mut rig = TcpRig::new(SHAPE);
        let stand_in =
            TcpTransport::new(rig.target().clone(), SHAPE.page_bytes, Default::default()).unwrap();
        let transport = std::mem::replace(&mut rig.transport, stand_in);
        let handle = ChaosHandle::new(spec.parse().unwrap(), 1);
        let chaos = ChaosTransport::new(transport, handle.clone()).unwrap();
        let chaos = Rc::new(RefCell::new(chaos));
        let ledger = Rc::new(LedgerCell::new(Ledger::new(PAGES)));
        let hub = Hub::new(HubLimits::default(), ledger.clone());
        let source = hub.add_source(chaos.clone());
        let all: Vec<_> = (0..PAGES as u32).map(PageId).collect();
        let lease = rig.grant(&all);
        let channel = ChannelId {
            kind: ChannelKind::Tcp,
            index: 0,
        };
        let mut node = Node {
            rig,
            ledger,
            hub,
            chaos,
            source,
            channel,
            handle,
            lease,
        };
        node.connect();
        node
    }

    fn connect(&mut self) {
        let opened = self.hub.open_channel(ChannelKind::Tcp, self.source, 64);
        self.channel = opened.unwrap();
        let (near, far) = socket_pair();
        let mut chaos = self.chaos.borrow_mut();
        let added = chaos
            .inner_mut()
            .add_channel(self.channel, near, INCARNATION);
        added.unwrap();
        self.rig.peer().add_connection(far).unwrap();
    }

    /// Starts to pull `PULL` pages, in two reads.
    fn pull(&mut self, limit: Duration) -> Pull {
        let mut pages = Vec::new();
        let guards = self.ledger.with(|ledger| {
            ledger
                .allocate(PULL, AllocateAs::Pulling, &mut pages)
                .unwrap();
            ledger.guard(pages.iter().copied())
        });
        let deadline = Deadline::after(Nanos::now(), limit);
        let begun = self.hub.begin("test.pull", deadline, Some(guards));
        let completion = begun.unwrap_or_else(|_| panic!("no slot"));
        let first = self
            .hub
            .reserve(completion.slot(), self.channel, 2)
            .unwrap();
        let halves = [&pages[..PULL / 2], &pages[PULL / 2..]];
        let reads = halves.iter().enumerate().map(|(half, pages)| {
            let into = pages.iter().map(|page| page.0 as usize);
            read(self.lease, half * PULL / 2, into)
        });
        let reads = reads.collect();
        let posted = self.chaos.borrow_mut().post(self.channel, first, reads);
        assert_eq!(posted, Ok(()));
        Pull { completion, pages }
    }

    fn turn(&mut self) {
        self.hub.turn(Nanos::now());
    }

    fn serve(&mut self) {
        self.rig.serve();
    }

    fn counts(&self) -> PageCounts {
        self.ledger.with(|ledger| {
            ledger.assert_consistent();
            ledger.counts()
        })
    }

    fn wait(&mut self, completion: Completion) -> Result<(), EndReason> {
        let mut completion = pin!(completion);
        let mut cx = Context::from_waker(Waker::noop());
        let begun = Instant::now();
        loop {
            if let Poll::Ready(outcome) = completion.as_mut().poll(&mut cx) {
                return outcome;
            }
            self.serve();
            self.turn();
            assert!(begun.elapsed() < PATIENCE, "a pull that does not end");
        }
    }

    /// Both sides turn until no page is stopping and no channel either.
    fn settle(&mut self) {
        let begun = Instant::now();
        while self.counts().stopping > 0 {
            self.serve();
            self.turn();
            assert!(begun.elapsed() < PATIENCE, "{:?}", self.counts());
        }
    }

    /// A pull over the channel there is works, from the lease's pages to Ready ones.
    fn works(&mut self) {
        let Pull { completion, pages } = self.pull(PATIENCE);
        assert_eq!(self.wait(completion), Ok(()));
        self.settle_guards();
        self.ledger.with(|ledger| {
            assert!(pages.iter().all(|page| ledger.named(*page) == 0));
            ledger.commit(&pages).unwrap();
            ledger.free(&pages);
        });
    }

    fn settle_guards(&mut self) {
        let begun = Instant::now();
        while self.ledger.with(|ledger| ledger.guards_live()) > 0 {
            self.serve();
            self.turn();
            assert!(begun.elapsed() < PATIENCE);
        }
    }
}

#[test]
fn a_whole_pull_gives_its_guards_back_and_commits() {
    let mut node = Node::new("off");
    node.works();
    node.works();
    assert_eq!(node.counts().free, PAGES);
    assert_eq!(node.rig.peer_guards(), 0);
    assert!(node.hub.channel_is_open(node.channel));
}

/// E3: the client has left in mid-read. Its pages are free before the bytes have come, and the
/// channel lives on.
#[test]
fn a_dropped_pull_frees_its_pages_at_once_and_keeps_its_channel() {
    for step in 0..12 {
        let mut node = Node::new("off");
        let Pull { completion, pages } = node.pull(PATIENCE);
        for _ in 0..step {
            node.serve();
            node.turn();
        }
        drop(completion);
        node.ledger.with(|ledger| ledger.free(&pages));
        // Not one more turn of the peer.
        node.turn();
        node.turn();
        assert_eq!(node.counts().free, PAGES, "step {step}");
        node.works();
        assert!(node.hub.channel_is_open(node.channel), "step {step}");
        assert_eq!(node.rig.peer_guards(), 0);
    }
}

#[test]
fn a_lost_completion_ends_by_its_deadline_and_its_pages_by_the_ladder() {
    let mut node = Node::new("completion=lose");
    let Pull { completion, pages } = node.pull(Duration::from_millis(300));
    assert_eq!(node.wait(completion), Err(EndReason::Deadline));
    node.ledger.with(|ledger| ledger.free(&pages));
    assert_eq!(
        node.counts().stopping,
        PULL,
        "not free by the deadline alone"
    );
    node.settle();
    assert_eq!(node.counts().free, PAGES);
    assert!(
        !node.hub.channel_is_open(node.channel),
        "the ladder killed it"
    );
    node.handle.set("off".parse().unwrap());
    node.connect();
    node.works();
}

#[test]
fn a_lost_completion_and_a_lost_flush_leave_the_pages_in_quarantine() {
    let mut node = Node::new("completion=lose,flush=lose");
    let Pull { completion, pages } = node.pull(Duration::from_millis(100));
    assert_eq!(node.wait(completion), Err(EndReason::Deadline));
    node.ledger.with(|ledger| ledger.free(&pages));
    node.settle();
    let counts = node.counts();
    assert_eq!((counts.free, counts.quarantined), (PAGES - PULL, PULL));
    assert_eq!(node.hub.counters().guards_quarantined, 1);
    assert!(node.ledger.with(|ledger| ledger.not_ready()));
    node.handle.set("off".parse().unwrap());
    node.connect();
    node.works();
    assert_eq!(node.counts().free, PAGES - PULL);
}

#[test]
fn failed_late_and_duplicated_completions_end_a_pull_once_and_free_its_pages() {
    for spec in [
        "completion=fail",
        "completion=late:300ms",
        "completion=duplicate",
    ] {
        let mut node = Node::new(spec);
        let Pull { completion, pages } = node.pull(Duration::from_millis(100));
        let outcome = node.wait(completion);
        match spec {
            "completion=fail" => {
                let chaos = kvserve_kv::transport::code::CHAOS;
                assert_eq!(outcome, Err(EndReason::Failed(chaos)));
            }
            "completion=late:300ms" => assert_eq!(outcome, Err(EndReason::Deadline)),
            // The second copy of the first read's kills the channel (P3); whether the pull had
            // ended by then or ends with it, it ends once.
            _ => assert!(
                matches!(outcome, Ok(()) | Err(EndReason::ChannelKilled)),
                "{outcome:?}"
            ),
        }
        node.ledger.with(|ledger| ledger.free(&pages));
        node.settle();
        assert_eq!(node.counts().free, PAGES, "{spec}");
        node.handle.set("off".parse().unwrap());
        if !node.hub.channel_is_open(node.channel) {
            node.connect();
        }
        node.works();
    }
}

#[test]
fn a_frozen_peer_costs_a_pull_its_deadline_and_no_page() {
    let mut node = Node::new("off");
    let Pull { completion, pages } = node.pull(Duration::from_millis(50));
    let mut completion = pin!(completion);
    let mut cx = Context::from_waker(Waker::noop());
    let begun = Instant::now();
    let outcome = loop {
        if let Poll::Ready(outcome) = completion.as_mut().poll(&mut cx) {
            break outcome;
        }
        // Only this side turns.
        node.turn();
        assert!(begun.elapsed() < PATIENCE);
    };
    assert_eq!(outcome, Err(EndReason::Deadline));
    node.ledger.with(|ledger| ledger.free(&pages));
    let begun = Instant::now();
    while node.counts().free < PAGES {
        node.turn();
        assert!(begun.elapsed() < PATIENCE, "{:?}", node.counts());
    }
}
