//! What every transport must show, whatever it is made of. A transport's test file implements
//! [`Rig`] and calls the macro `conformance_suite!`; each case is then a test of its own.
//!
//! A case drives both sides by hand, turn by turn, on one thread: nothing sleeps, and a wait that
//! does not end is a failure after [`PATIENCE`].

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

pub mod rdma_rig;
pub mod shm_rig;
pub mod tcp_rig;

use kvserve_kv::transport::{Posted, Read, Transport, code};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::Deadline;
use kvserve_runtime::completion::{Order, Slab, SlotId, SourceId};
use kvserve_runtime::{
    ChannelId, Completed, CompletionStatus, Nanos, Reap, WorkId, source::COMPLETIONS_PER_POLL_MAX,
};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// A liveness bound, not a speed: two busy cores must make it too.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What a target page holds before anything lands in it.
const UNTOUCHED: u8 = 0xEE;

/// What a case writes into pages that must be quiet.
const QUIET: u8 = 0x77;

/// The code that a rig's peer refuses unknown leases with.
pub const REFUSED: u32 = 404;

/// How a rig is to be built.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Pages of each of the two pools.
    pub pages: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Move as little as can be in each turn, so that a case meets many half-way points.
    pub narrow: bool,
}

/// A transport, its peer, and the peer's leases.
pub trait Rig: Sized {
    /// The code that unknown, stale and too long reads fail with.
    const REFUSED: u32 = REFUSED;
    /// Whether a killed channel touches nothing from that moment on; else it drains first.
    const QUIET_AT_ONCE: bool = true;
    /// Whether a narrow rig stands still between two turns, so that a case meets half-way points.
    fn stands_still(&self) -> bool {
        true
    }
    /// Both sides, without a channel.
    fn new(shape: Shape) -> Self;
    /// The side under test.
    fn transport(&mut self) -> &mut dyn Transport;
    /// Opens a channel to the peer.
    fn connect(&mut self, index: u16) -> ChannelId;
    /// Leases these pages of the peer's pool, in this order.
    fn grant(&mut self, pages: &[PageId]) -> Lease;
    /// One turn of the peer.
    fn serve(&mut self);
    /// The peer is gone, as after SIGKILL.
    fn kill_peer(&mut self);
    /// Guards that the peer holds for reads.
    fn peer_guards(&self) -> usize;
    /// The peer's pool.
    fn source(&self) -> &Arc<PoolMemory>;
    /// The pool that reads land in.
    fn target(&self) -> &Arc<PoolMemory>;
    /// The most pages one read may name.
    fn pages_per_read_max(&self) -> usize;
}

/// A lease as the reading side knows it.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    /// Id.
    pub id: u64,
    /// Epoch.
    pub epoch: u32,
}

/// One test's two sides and what has been told so far.
pub struct World<R: Rig> {
    pub rig: R,
    pub shape: Shape,
    pub told: Vec<Completed>,
    next: u64,
}

impl<R: Rig> World<R> {
    pub fn new(shape: Shape) -> Self {
        World::of(R::new(shape), shape)
    }

    /// The same with a rig of the test's own.
    pub fn of(rig: R, shape: Shape) -> Self {
        for page in 0..shape.pages {
            fill(rig.source(), page, shape.page_bytes, |place| {
                byte_of(page, place)
            });
            fill(rig.target(), page, shape.page_bytes, |_| UNTOUCHED);
        }
        World {
            rig,
            shape,
            told: Vec::new(),
            next: 0,
        }
    }

    /// Posts reads and returns the work of the first.
    pub fn post(&mut self, channel: ChannelId, reads: Vec<Read>) -> WorkId {
        let count = reads.len();
        let first = WorkId::new(channel, self.next);
        let posted = self.rig.transport().post(channel, first, reads);
        assert_eq!(posted, Ok(()));
        self.next += count as u64;
        first
    }

    pub fn try_post(&mut self, channel: ChannelId, reads: Vec<Read>) -> Result<(), Posted> {
        let count = reads.len() as u64;
        let first = WorkId::new(channel, self.next);
        let outcome = self.rig.transport().post(channel, first, reads);
        self.next += match outcome {
            Ok(()) => count,
            Err(posted) => posted.posted as u64,
        };
        outcome
    }

    /// One poll of the side under test.
    pub fn poll(&mut self) {
        let before = self.told.len();
        let count = self.rig.transport().poll(Nanos::now(), &mut self.told);
        assert_eq!(
            self.told.len() - before,
            count,
            "poll counts what it hands out"
        );
        assert!(count <= COMPLETIONS_PER_POLL_MAX);
    }

    /// Turns of both sides until `enough` of what was told.
    pub fn run_until(&mut self, what: &str, mut enough: impl FnMut(&[Completed]) -> bool) {
        let begun = Instant::now();
        while !enough(&self.told) {
            self.rig.serve();
            self.poll();
            assert!(
                begun.elapsed() < PATIENCE,
                "{what}: not after {PATIENCE:?}; told so far: {:?}",
                self.told
            );
        }
    }

    /// Turns of both sides until all of `count` works from `first` are told, each once, in order.
    pub fn finish(&mut self, first: WorkId, count: usize) -> Vec<CompletionStatus> {
        let works: Vec<_> = (0..count as u64).map(|at| first.offset(at)).collect();
        let of = |told: &[Completed]| {
            let told = told.iter();
            told.filter(|completed| works.contains(&completed.work))
                .copied()
                .collect::<Vec<_>>()
        };
        self.run_until("completions", |told| of(told).len() >= count);
        // A few more turns would show a duplicate.
        for _ in 0..5 {
            self.rig.serve();
            self.poll();
        }
        let mine = of(&self.told);
        let order: Vec<_> = mine.iter().map(|completed| completed.work).collect();
        assert_eq!(order, works, "each once, in order of position");
        mine.iter().map(|completed| completed.status).collect()
    }

    /// A channel whose peer is gone takes no more reads, soon.
    fn await_refusal(&mut self, channel: ChannelId, lease: Lease) {
        let begun = Instant::now();
        while self.try_post(channel, vec![read(lease, 63, [63])]).is_ok() {
            self.poll();
            assert!(
                begun.elapsed() < PATIENCE,
                "a dead peer's channel stays open"
            );
        }
    }

    /// A killed channel is quiet: at once, or when it has drained.
    pub fn assert_reaped(&mut self, channel: ChannelId) {
        let begun = Instant::now();
        while let Reap::Draining(_) = self.rig.transport().reap(channel) {
            assert!(!R::QUIET_AT_ONCE, "it is not quiet at once");
            assert!(begun.elapsed() < PATIENCE, "it drains for ever");
            self.poll();
            std::thread::yield_now();
        }
        assert_eq!(self.rig.transport().reap(channel), Reap::Quiet);
    }

    /// The peer gives every guard back once its turns have gone on for a while.
    pub fn peer_comes_to_rest(&mut self) {
        let begun = Instant::now();
        while self.rig.peer_guards() > 0 {
            self.rig.serve();
            assert!(begun.elapsed() < PATIENCE, "the peer keeps guards");
        }
    }

    pub fn assert_holds(&self, target: usize, source: usize) {
        check(self.rig.target(), target, self.shape.page_bytes, |place| {
            byte_of(source, place)
        });
    }

    pub fn assert_untouched(&self, target: usize) {
        check(self.rig.target(), target, self.shape.page_bytes, |_| {
            UNTOUCHED
        });
    }

    fn assert_quiet(&self, target: usize) {
        check(self.rig.target(), target, self.shape.page_bytes, |_| QUIET);
    }

    fn make_quiet(&self, target: usize) {
        fill(self.rig.target(), target, self.shape.page_bytes, |_| QUIET);
    }

    /// A lease of the source pages `0..pages` in order.
    pub fn grant_all(&mut self) -> Lease {
        let pages: Vec<_> = (0..self.shape.pages as u32).map(PageId).collect();
        self.rig.grant(&pages)
    }
}

/// A read of lease pages `first..` into these target pages.
pub fn read(lease: Lease, first: usize, into: impl IntoIterator<Item = usize>) -> Read {
    Read {
        lease: lease.id,
        epoch: lease.epoch,
        first: first as u32,
        into: into.into_iter().map(|page| PageId(page as u32)).collect(),
    }
}

fn byte_of(page: usize, place: usize) -> u8 {
    // No two pages share a long run: the page's number goes into every byte's mix.
    ((page * 131 + place * 7 + (place >> 8) * 13) % 251) as u8
}

fn fill(pool: &PoolMemory, page: usize, bytes: usize, value: impl Fn(usize) -> u8) {
    let start = pool.page(PageId(page as u32));
    for place in 0..bytes {
        // SAFETY: inside the page; tests run both sides on one thread and touch a page only
        // between two turns.
        unsafe { start.add(place).write(value(place)) };
    }
}

fn check(pool: &PoolMemory, page: usize, bytes: usize, value: impl Fn(usize) -> u8) {
    let start = pool.page(PageId(page as u32));
    for place in 0..bytes {
        // SAFETY: as in `fill`.
        let found = unsafe { start.add(place).read() };
        assert_eq!(found, value(place), "page {page}, byte {place}");
    }
}

/// Whether a descriptor is readable within `wait`.
pub fn readable(fd: RawFd, wait: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd for the length of the call.
    let count = unsafe { libc::poll(&raw mut poll, 1, wait.as_millis() as libc::c_int) };
    assert!(count >= 0, "{}", std::io::Error::last_os_error());
    count == 1
}

const SMALL: Shape = Shape {
    pages: 64,
    page_bytes: 1024,
    narrow: false,
};

pub fn moves_few_and_many_pages_and_no_other<R: Rig>() {
    for count in [1, 24, 4096] {
        let shape = Shape {
            pages: 4100,
            page_bytes: 1024,
            narrow: false,
        };
        let mut world = World::<R>::new(shape);
        let channel = world.rig.connect(3);
        let lease = world.grant_all();
        // Backwards into the target, so that every page has its own place.
        let all: Vec<_> = (0..count).collect();
        let reads: Vec<_> = all
            .chunks(world.rig.pages_per_read_max())
            .map(|part| read(lease, part[0], part.iter().map(|page| 4099 - page)))
            .collect();
        let number = reads.len();
        let first = world.post(channel, reads);
        assert_eq!(world.rig.transport().in_flight(), number);
        let told = world.finish(first, number);
        assert!(
            told.iter()
                .all(|status| *status == CompletionStatus::Success)
        );
        assert_eq!(world.rig.transport().in_flight(), 0);
        for page in 0..shape.pages {
            if page < count {
                world.assert_holds(4099 - page, page);
            } else {
                world.assert_untouched(4099 - page);
            }
        }
        world.peer_comes_to_rest();
    }
}

pub fn moves_pages_that_no_power_of_two_divides<R: Rig>() {
    let mut world = World::<R>::new(Shape {
        pages: 40,
        page_bytes: 3000,
        narrow: true,
    });
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let first = world.post(
        channel,
        vec![
            read(lease, 3, [1, 3, 5, 7, 9]),
            read(lease, 20, 20..31),
            read(lease, 39, [0]),
        ],
    );
    let told = world.finish(first, 3);
    assert_eq!(told, [CompletionStatus::Success; 3]);
    for (at, target) in [1, 3, 5, 7, 9].into_iter().enumerate() {
        world.assert_holds(target, 3 + at);
    }
    (20..31).for_each(|page| world.assert_holds(page, page));
    world.assert_holds(0, 39);
    world.assert_untouched(2);
    world.assert_untouched(31);
    world.peer_comes_to_rest();
}

pub fn takes_a_part_when_it_has_no_room_and_the_rest_later<R: Rig>() {
    let mut world = World::<R>::new(SMALL);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let reads: Vec<_> = (0..2000)
        .map(|at| read(lease, at % 64, [at % 64]))
        .collect();
    let posted = world.try_post(channel, reads).unwrap_err();
    assert_eq!(posted.code, code::BUSY);
    assert!(posted.posted > 0 && posted.posted < 2000);
    let told = world.finish(WorkId::new(channel, 0), posted.posted);
    assert!(
        told.iter()
            .all(|status| *status == CompletionStatus::Success)
    );
    let again = world.post(channel, vec![read(lease, 5, [6])]);
    assert_eq!(world.finish(again, 1), [CompletionStatus::Success]);
    world.assert_holds(6, 5);
    world.peer_comes_to_rest();
}

pub fn refused_reads_fail_alone<R: Rig>() {
    let mut world = World::<R>::new(SMALL);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let unknown = Lease { id: 999, epoch: 1 };
    let stale = Lease {
        epoch: lease.epoch + 1,
        ..lease
    };
    let first = world.post(
        channel,
        vec![
            read(lease, 0, [0]),
            read(unknown, 0, 1..9),
            read(stale, 0, [9]),
            read(lease, 60, 10..15),
            read(lease, 1, [20]),
        ],
    );
    let told = world.finish(first, 5);
    let refused = CompletionStatus::Error(R::REFUSED);
    let good = CompletionStatus::Success;
    assert_eq!(told, [good, refused, refused, refused, good]);
    world.assert_holds(0, 0);
    (1..15).for_each(|page| world.assert_untouched(page));
    world.assert_holds(20, 1);
    world.peer_comes_to_rest();
}

pub fn impossible_reads_are_not_posted<R: Rig>() {
    let mut world = World::<R>::new(Shape {
        pages: 2100,
        page_bytes: 1024,
        narrow: false,
    });
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let bad = |posted| {
        Err(Posted {
            posted,
            code: code::BAD_READ,
        })
    };
    assert_eq!(world.try_post(channel, vec![read(lease, 0, [])]), bad(0));
    let many = world.rig.pages_per_read_max() + 1;
    let reads = vec![
        read(lease, 7, [7]),
        read(lease, 0, 0..many),
        read(lease, 8, [8]),
    ];
    assert_eq!(world.try_post(channel, reads), bad(1));
    assert_eq!(
        world.finish(WorkId::new(channel, 0), 1),
        [CompletionStatus::Success]
    );
    world.assert_holds(7, 7);
    world.assert_untouched(8);
    let nowhere = ChannelId {
        index: 9,
        ..channel
    };
    let outcome =
        world
            .rig
            .transport()
            .post(nowhere, WorkId::new(nowhere, 0), vec![read(lease, 0, [0])]);
    assert_eq!(
        outcome,
        Err(Posted {
            posted: 0,
            code: code::NOT_CONNECTED
        })
    );
    world.peer_comes_to_rest();
}

/// E3: abandoned reads leave their pages alone from that moment on, whatever had come of them,
/// and the channel lives.
pub fn abandoned_pages_are_quiet_at_once_at_every_step<R: Rig>() {
    const PART: usize = 16;
    let mut cut_short = 0;
    for step in 0..40 {
        let mut world = World::<R>::new(Shape {
            pages: 4 * PART,
            page_bytes: 4096,
            narrow: true,
        });
        let channel = world.rig.connect(0);
        let lease = world.grant_all();
        let reads = (0..3).map(|part| {
            let pages = part * PART..(part + 1) * PART;
            read(lease, pages.start, pages)
        });
        let first = world.post(channel, reads.collect());
        for _ in 0..step {
            world.rig.serve();
            world.poll();
        }
        let before: Vec<_> = world.told.iter().map(|completed| completed.work).collect();
        // The first on even steps, the middle one on odd ones.
        let which = step % 2;
        let gone = first.offset(which as u64);
        if step % 4 < 2 {
            world.rig.transport().abandon(gone, 1);
        }
        // As the slab does it; and doing so twice changes nothing.
        assert!(world.rig.transport().take_back(gone), "step {step}");
        let was_told = before.contains(&gone);
        let pages = which * PART..(which + 1) * PART;
        if !was_told {
            pages.clone().for_each(|page| world.make_quiet(page));
        }
        let told = world.finish(first, 3);
        for (part, status) in told.iter().enumerate() {
            let pages = part * PART..(part + 1) * PART;
            match status {
                CompletionStatus::Success if part == which && !was_told => {
                    // All of it had landed before the abandonment, only nobody had been told.
                    pages.for_each(|page| world.assert_quiet(page));
                }
                CompletionStatus::Success => {
                    pages.for_each(|page| world.assert_holds(page, page));
                }
                CompletionStatus::Error(found) => {
                    assert_eq!((part, *found), (which, code::ABANDONED));
                    pages.for_each(|page| world.assert_quiet(page));
                    cut_short += 1;
                }
                CompletionStatus::Flushed(code) => {
                    panic!("step {step}: the channel ended with {code}");
                }
            }
        }
        let last = 3 * PART..4 * PART;
        let again = world.post(channel, vec![read(lease, last.start, last.clone())]);
        assert_eq!(
            world.finish(again, 1),
            [CompletionStatus::Success],
            "step {step}"
        );
        last.for_each(|page| world.assert_holds(page, page));
        world.peer_comes_to_rest();
    }
    assert!(cut_short >= 2, "no step met a read in flight");
}

/// E3: an abandoned read at the head of the queue is over for its slot at the next poll, without
/// a byte from the peer.
pub fn an_abandoned_read_completes_without_its_peer<R: Rig>() {
    let mut world = World::<R>::new(SMALL);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let first = world.post(channel, vec![read(lease, 0, 0..8), read(lease, 8, 8..16)]);
    // The second is behind the first: in order means that it waits.
    world.rig.transport().abandon(first.offset(1), 1);
    world.poll();
    assert!(world.told.is_empty());
    world.rig.transport().abandon(first, 1);
    let fd = world
        .rig
        .transport()
        .arm()
        .expect("completions are waiting");
    assert!(readable(fd, PATIENCE), "armed with completions in hand");
    world.poll();
    let abandoned = CompletionStatus::Error(code::ABANDONED);
    let told: Vec<_> = world
        .told
        .iter()
        .map(|told| (told.work, told.status))
        .collect();
    assert_eq!(told, [(first, abandoned), (first.offset(1), abandoned)]);
    assert_eq!(world.rig.transport().in_flight(), 0);
    (0..16).for_each(|page| world.assert_untouched(page));
    let again = world.post(channel, vec![read(lease, 0, [63])]);
    assert_eq!(world.finish(again, 1), [CompletionStatus::Success]);
    world.assert_holds(63, 0);
    (0..16).for_each(|page| world.assert_untouched(page));
    world.peer_comes_to_rest();
}

pub fn a_peer_killed_in_mid_read_fails_every_read_or_is_reaped<R: Rig>() {
    let (mut cut_short, mut stands_still) = (0, true);
    for step in [0, 1, 2, 3, 5, 8, 13] {
        let mut world = World::<R>::new(Shape {
            pages: 64,
            page_bytes: 4096,
            narrow: true,
        });
        stands_still &= world.rig.stands_still();
        let channel = world.rig.connect(0);
        let lease = world.grant_all();
        let parts = [0..20, 20..40, 40..63];
        let reads = parts
            .iter()
            .map(|pages| read(lease, pages.start, pages.clone()));
        let first = world.post(channel, reads.collect());
        for _ in 0..step {
            world.rig.serve();
            world.poll();
        }
        world.rig.kill_peer();
        assert_eq!(world.rig.peer_guards(), 0, "a dead peer's guards are back");
        let told = world.finish(first, 3);
        for (status, pages) in told.iter().zip(parts) {
            match status {
                // What is called good is whole.
                CompletionStatus::Success => {
                    pages.for_each(|page| world.assert_holds(page, page));
                }
                CompletionStatus::Error(_) | CompletionStatus::Flushed(_) => cut_short += 1,
            }
        }
        world.await_refusal(channel, lease);
        world.rig.transport().kill(channel);
        world.assert_reaped(channel);
    }
    assert!(
        cut_short >= 2 || !stands_still,
        "no step met a read in flight"
    );
}

pub fn a_frozen_peers_channel_is_quiet_as_soon_as_it_is_killed<R: Rig>() {
    for turns_before_the_freeze in [0, 1, 4] {
        let mut world = World::<R>::new(Shape {
            pages: 64,
            page_bytes: 4096,
            narrow: true,
        });
        let channel = world.rig.connect(0);
        let lease = world.grant_all();
        world.post(
            channel,
            vec![read(lease, 0, 0..30), read(lease, 30, 30..60)],
        );
        for _ in 0..turns_before_the_freeze {
            world.rig.serve();
            world.poll();
        }
        for _ in 0..50 {
            world.poll();
        }
        world.told.clear();
        assert!(matches!(
            world.rig.transport().reap(channel),
            Reap::Draining(1..)
        ));
        world.rig.transport().kill(channel);
        world.rig.transport().kill(channel);
        world.assert_reaped(channel);
        assert_eq!(world.rig.transport().in_flight(), 0);
        (0..64).for_each(|page| world.make_quiet(page));
        // The peer thaws.
        for _ in 0..50 {
            world.rig.serve();
            world.poll();
        }
        assert!(world.told.is_empty(), "nothing comes after the reaping");
        (0..64).for_each(|page| world.assert_quiet(page));
        world.peer_comes_to_rest();
        // The same number serves again.
        let channel = world.rig.connect(0);
        let first = world.post(channel, vec![read(lease, 2, [2])]);
        assert_eq!(world.finish(first, 1), [CompletionStatus::Success]);
        world.assert_holds(2, 2);
    }
}

pub fn channels_are_apart<R: Rig>() {
    let mut world = World::<R>::new(SMALL);
    let (one, two) = (world.rig.connect(1), world.rig.connect(7));
    let lease = world.grant_all();
    let of_one = world.post(one, vec![read(lease, 0, 0..8)]);
    let of_two = world.post(two, vec![read(lease, 8, 8..16)]);
    world.rig.transport().kill(one);
    world.assert_reaped(one);
    assert_eq!(world.finish(of_two, 1), [CompletionStatus::Success]);
    (8..16).for_each(|page| world.assert_holds(page, page));
    assert!(world.told.iter().all(|told| told.work != of_one));
    world.peer_comes_to_rest();
}

pub fn many_short_reads_come_in_bounded_turns_over_several_channels<R: Rig>() {
    let mut world = World::<R>::new(SMALL);
    let lease = world.grant_all();
    let firsts: Vec<_> = (0..3)
        .map(|index| {
            let channel = world.rig.connect(index);
            let reads = (0..150).map(|at| read(lease, at % 64, [at % 64])).collect();
            world.post(channel, reads)
        })
        .collect();
    for first in firsts {
        let told = world.finish(first, 150);
        assert!(
            told.iter()
                .all(|status| *status == CompletionStatus::Success)
        );
    }
    (0..64).for_each(|page| world.assert_holds(page, page));
    world.peer_comes_to_rest();
}

/// A shard that parks on what `arm` gives, and polls only when it is readable, misses nothing.
pub fn arming_wakes_for_everything<R: Rig>() {
    let mut world = World::<R>::new(Shape {
        pages: 64,
        page_bytes: 4096,
        narrow: true,
    });
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let first = world.post(
        channel,
        vec![read(lease, 0, 0..32), read(lease, 32, 32..64)],
    );
    let begun = Instant::now();
    while world.told.len() < 2 {
        let fd = world.rig.transport().arm().expect("reads are on their way");
        // The turn after arming, before parking.
        world.poll();
        world.rig.serve();
        if readable(fd, Duration::from_millis(2)) {
            world.poll();
        }
        assert!(begun.elapsed() < PATIENCE, "told {:?}", world.told);
    }
    assert_eq!(world.finish(first, 2), [CompletionStatus::Success; 2]);
    (0..64).for_each(|page| world.assert_holds(page, page));
    // With nothing to tell, it does not turn readable.
    if let Some(fd) = world.rig.transport().arm() {
        world.poll();
        assert!(!readable(fd, Duration::from_millis(30)), "a busy idle loop");
    }
    // A peer that goes while nothing is asked of it is noticed too.
    world.rig.kill_peer();
    let begun = Instant::now();
    while world.try_post(channel, Vec::new()).is_ok()
        && world.try_post(channel, vec![read(lease, 0, [0])]).is_ok()
    {
        if let Some(fd) = world.rig.transport().arm() {
            readable(fd, Duration::from_millis(2));
        }
        world.poll();
        assert!(
            begun.elapsed() < PATIENCE,
            "a dead peer's channel stays open"
        );
    }
}

/// E5: the channel of reads under way is killed at every step; they are posted again on another
/// one, not before the first is quiet, and what lands is right.
pub fn reads_of_a_killed_channel_are_posted_again_once_it_is_quiet<R: Rig>() {
    const PART: usize = 16;
    let mut reposted = 0;
    for step in [0, 1, 2, 3, 5, 8, 13, 21] {
        let mut world = World::<R>::new(Shape {
            pages: 4 * PART,
            page_bytes: 4096,
            narrow: true,
        });
        let first = world.rig.connect(0);
        let lease = world.grant_all();
        let mut slab = SlabOf::new(first);
        let mut waits: Vec<_> = (0..3)
            .map(|part| {
                let pages = part * PART..(part + 1) * PART;
                slab.begin(read(lease, pages.start, pages))
            })
            .collect();
        for wait in &waits {
            slab.post(&mut world, first, wait);
        }
        for _ in 0..step {
            world.rig.serve();
            slab.poll(&mut world);
        }
        slab.slab.close_channel(first, Nanos::now());
        for wait in &waits {
            assert_eq!(slab.slab.posts_owed(wait.slot), 0, "not quiet yet");
        }
        slab.carry_out(&mut world);
        let second = world.rig.connect(1);
        slab.open(second);
        waits.retain(|wait| {
            let owed = slab.slab.posts_owed(wait.slot);
            if owed > 0 {
                slab.post(&mut world, second, wait);
                reposted += owed;
            }
            !slab.is_done(wait.slot)
        });
        let begun = Instant::now();
        while !waits.is_empty() {
            world.rig.serve();
            slab.poll(&mut world);
            waits.retain(|wait| !slab.is_done(wait.slot));
            assert!(
                begun.elapsed() < PATIENCE,
                "step {step}: {} reads wait",
                waits.len()
            );
        }
        (0..3 * PART).for_each(|page| world.assert_holds(page, page));
        (3 * PART..4 * PART).for_each(|page| world.assert_untouched(page));
        let counted = slab.slab.counters();
        assert_eq!(counted.posts_outstanding, 0);
        assert_eq!(counted.posts_owed, counted.posts_reposted);
        world.peer_comes_to_rest();
    }
    assert!(reposted >= 6, "{reposted} reads met the kill");
}

/// A completion slab over a rig's transport, turned by hand.
struct SlabOf {
    slab: Slab,
    told: Vec<Completed>,
}

struct Wait {
    slot: SlotId,
    read: Read,
}

impl SlabOf {
    fn new(channel: ChannelId) -> Self {
        let mut slab = SlabOf {
            slab: Slab::new(16, Nanos::now()),
            told: Vec::new(),
        };
        slab.open(channel);
        slab
    }

    fn open(&mut self, channel: ChannelId) {
        let opened = self
            .slab
            .open_channel(channel.kind, SourceId(0), 64, Nanos::now());
        assert_eq!(opened, Ok(channel));
    }

    fn begin(&mut self, read: Read) -> Wait {
        let now = Nanos::now();
        let deadline = Deadline::after(now, 2 * PATIENCE);
        let slot = self.slab.begin("test", deadline, None, now).expect("room");
        self.slab.allow_reposts(slot);
        Wait { slot, read }
    }

    fn post<R: Rig>(&mut self, world: &mut World<R>, channel: ChannelId, wait: &Wait) {
        let work = self
            .slab
            .reserve(wait.slot, channel, 1, Nanos::now())
            .expect("room");
        let posted = world
            .rig
            .transport()
            .post(channel, work, vec![wait.read.clone()]);
        assert_eq!(posted, Ok(()));
    }

    fn poll<R: Rig>(&mut self, world: &mut World<R>) {
        let now = Nanos::now();
        self.told.clear();
        world.rig.transport().poll(now, &mut self.told);
        for completed in &self.told {
            self.slab.complete(*completed, now);
        }
    }

    /// The hub's part: kills, and what became of them.
    fn carry_out<R: Rig>(&mut self, world: &mut World<R>) {
        while let Some(order) = self.slab.effects.orders.pop_front() {
            match order {
                Order::Kill { channel, .. } => world.rig.transport().kill(channel),
                Order::TakeBack { .. } => {}
            }
        }
        while let Some((_, channel, true)) = self.slab.stopping_at(0) {
            let reap = world.rig.transport().reap(channel);
            self.slab.reaped(channel, reap, Nanos::now());
        }
    }

    fn is_done(&mut self, slot: SlotId) -> bool {
        match self.slab.poll(slot, Waker::noop()) {
            Poll::Ready(outcome) => {
                assert_eq!(outcome, Ok(()));
                true
            }
            Poll::Pending => false,
        }
    }
}

/// Declares the suite for one rig, each case a test.
#[macro_export]
macro_rules! conformance_suite {
    ($rig:ty: $($case:ident),+ $(,)?) => {
        $(
            #[test]
            fn $case() {
                conformance::$case::<$rig>();
            }
        )+
    };
    // A transport whose reads go on without the peer.
    (one_sided $rig:ty) => {
        conformance_suite!($rig:
            moves_few_and_many_pages_and_no_other,
            moves_pages_that_no_power_of_two_divides,
            takes_a_part_when_it_has_no_room_and_the_rest_later,
            refused_reads_fail_alone,
            impossible_reads_are_not_posted,
            abandoned_pages_are_quiet_at_once_at_every_step,
            a_peer_killed_in_mid_read_fails_every_read_or_is_reaped,
            a_frozen_peers_channel_is_quiet_as_soon_as_it_is_killed,
            channels_are_apart,
            reads_of_a_killed_channel_are_posted_again_once_it_is_quiet,
            many_short_reads_come_in_bounded_turns_over_several_channels,
            arming_wakes_for_everything,
        );
    };
    // And whose posted reads cannot be taken back, nor stopped by a peer that is frozen.
    (by_the_card $rig:ty) => {
        conformance_suite!($rig:
            moves_few_and_many_pages_and_no_other,
            moves_pages_that_no_power_of_two_divides,
            takes_a_part_when_it_has_no_room_and_the_rest_later,
            refused_reads_fail_alone,
            impossible_reads_are_not_posted,
            a_peer_killed_in_mid_read_fails_every_read_or_is_reaped,
            channels_are_apart,
            many_short_reads_come_in_bounded_turns_over_several_channels,
            arming_wakes_for_everything,
        );
    };
    ($rig:ty) => {
        conformance_suite!($rig:
            moves_few_and_many_pages_and_no_other,
            moves_pages_that_no_power_of_two_divides,
            takes_a_part_when_it_has_no_room_and_the_rest_later,
            refused_reads_fail_alone,
            impossible_reads_are_not_posted,
            abandoned_pages_are_quiet_at_once_at_every_step,
            an_abandoned_read_completes_without_its_peer,
            a_peer_killed_in_mid_read_fails_every_read_or_is_reaped,
            a_frozen_peers_channel_is_quiet_as_soon_as_it_is_killed,
            channels_are_apart,
            reads_of_a_killed_channel_are_posted_again_once_it_is_quiet,
            many_short_reads_come_in_bounded_turns_over_several_channels,
            arming_wakes_for_everything,
        );
    };
}
