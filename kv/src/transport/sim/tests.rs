//! The slab over the simulator's card: what a killed one-sided link still does, and what may be
//! posted again (PROTOCOL E5).

use super::{
    Fabric, Flush, LinkId, LinkKind, SimMemory, SimTransport, SourceTouch, Stepped, Witness,
};
use crate::pool::PageId;
use crate::transport::{Read, Transport};
use kvserve_runtime::completion::{GuardEnd, Slab, SlotId, SourceId};
use kvserve_runtime::{
    ChannelId, ChannelKind, CompletionSource, Deadline, EndReason, GuardToken, Nanos, Reap,
};
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

const LEASE: u64 = 7;
const PAGES: usize = 4;
const NOW: Nanos = Nanos(1_000_000);

struct AnyTouch;

impl Witness for AnyTouch {
    fn write(&self, _tag: u64, _page: PageId) -> Result<(), String> {
        Ok(())
    }
    fn read(&self, _touch: SourceTouch) -> Result<(), String> {
        Ok(())
    }
    fn is_given_up(&self, _tag: u64) -> bool {
        false
    }
}

struct Bed {
    fabric: Rc<RefCell<Fabric>>,
    transport: SimTransport,
    memory: Rc<SimMemory>,
    slab: Slab,
    slot: SlotId,
}

fn read() -> Read {
    Read {
        lease: LEASE,
        epoch: 1,
        first: 0,
        into: (0..PAGES as u32).map(PageId).collect(),
    }
}

impl Bed {
    /// A read of four pages, posted on a link that comes to rest as `flush` says.
    fn new(flush: Flush) -> (Bed, ChannelId, LinkId) {
        let fabric = Rc::new(RefCell::new(Fabric::default()));
        let memory = Rc::new(SimMemory::new(PAGES, 64));
        let source = Rc::new(SimMemory::new(PAGES, 64));
        for page in 0..PAGES as u32 {
            source.change_page(PageId(page), |bytes| bytes.fill(page as u8 + 1));
        }
        let (reader, server) = {
            let mut fabric = fabric.borrow_mut();
            let reader = fabric.attach(1, memory.clone(), Rc::new(AnyTouch), None);
            let server = fabric.attach(2, source, Rc::new(AnyTouch), None);
            let leased: Vec<PageId> = (0..PAGES as u32).map(PageId).collect();
            fabric.export(server, LEASE, &leased);
            (reader, server)
        };
        assert_eq!((reader, server), (0, 1));
        let mut slab = Slab::new(4, NOW);
        let deadline = Deadline::after(NOW, Duration::from_secs(1));
        let guards = GuardToken::issue(NonZeroU32::MIN);
        let slot = slab
            .begin("test", deadline, Some(guards), NOW)
            .expect("room");
        slab.allow_reposts(slot);
        let mut bed = Bed {
            transport: SimTransport::new(fabric.clone(), reader),
            fabric,
            memory,
            slab,
            slot,
        };
        let (channel, link) = bed.connect(flush);
        bed.post(channel);
        (bed, channel, link)
    }

    fn connect(&mut self, flush: Flush) -> (ChannelId, LinkId) {
        let channel = self
            .slab
            .open_channel(ChannelKind::Rdma, SourceId(0), 8, NOW)
            .expect("a number");
        let mut fabric = self.fabric.borrow_mut();
        let link = fabric.connect(0, channel, 1, 2, 1, LinkKind::OneSided, flush);
        (channel, link)
    }

    fn post(&mut self, channel: ChannelId) {
        let work = self.slab.reserve(self.slot, channel, 1, NOW).expect("room");
        let posted = self.transport.post(channel, work, vec![read()]);
        assert_eq!(posted, Ok(()));
    }

    fn step(&self, link: LinkId) -> Stepped {
        self.fabric.borrow_mut().step(link)
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        let reap = self.transport.reap(channel);
        self.slab.reaped(channel, reap, NOW);
        reap
    }

    fn byte(&self, page: u32) -> u8 {
        self.memory.with_page(PageId(page), |bytes| bytes[0])
    }
}

#[test]
fn a_killed_card_still_writes_and_nothing_is_posted_again_before_its_flush() {
    let (mut bed, first, link) = Bed::new(Flush::After(2));
    assert!(matches!(bed.step(link), Stepped::Moved), "resolved");
    assert!(matches!(bed.step(link), Stepped::Moved), "the first page");
    bed.slab.close_channel(first, NOW);
    bed.transport.kill(first);
    let before = bed.byte(1);
    for _ in 0..2 {
        assert!(matches!(bed.reap(first), Reap::Draining(_)));
        assert_eq!(bed.slab.posts_owed(bed.slot), 0, "it may still write");
        bed.step(link);
    }
    assert_ne!(bed.byte(1), before, "and it did");
    bed.step(link);
    assert_eq!(bed.reap(first), Reap::Quiet);
    assert_eq!(bed.slab.posts_owed(bed.slot), 1);
    assert!(bed.slab.effects.guards.is_empty());
    let (second, link) = bed.connect(Flush::After(0));
    bed.post(second);
    let mut told = Vec::new();
    while bed.transport.poll(NOW, &mut told) == 0 {
        bed.step(link);
    }
    bed.slab.complete(told[0], NOW);
    assert_eq!(bed.slab.poll(bed.slot, Waker::noop()), Poll::Ready(Ok(())));
    (0..PAGES as u32).for_each(|page| assert_eq!(bed.byte(page), page as u8 + 1));
    assert!(matches!(
        bed.slab.effects.guards.pop_front(),
        Some(GuardEnd::Release(_))
    ));
    // When bytes moved was noted at the poll that saw them.
    assert_eq!(bed.transport.moved_at(second), NOW);
}

#[test]
fn a_card_that_cannot_be_destroyed_takes_its_pages_into_quarantine() {
    let (mut bed, first, _) = Bed::new(Flush::DestroyFails);
    bed.slab.close_channel(first, NOW);
    bed.transport.kill(first);
    assert_eq!(bed.reap(first), Reap::Stuck);
    assert_eq!(bed.slab.posts_owed(bed.slot), 0);
    let stuck = Poll::Ready(Err(EndReason::ChannelStuck));
    assert_eq!(bed.slab.poll(bed.slot, Waker::noop()), stuck);
    assert!(matches!(
        bed.slab.effects.guards.pop_front(),
        Some(GuardEnd::Quarantine(_))
    ));
}
