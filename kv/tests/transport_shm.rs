//! The shared-memory transport: the suite that every transport must pass, and what only shared
//! memory can show.

mod conformance;

use conformance::shm_rig::ShmRig;
use conformance::{Rig, Shape, World, read};
use kvserve_kv::checksum::{ChecksumMode, checksum};
use kvserve_kv::copy::Stores;
use kvserve_kv::ledger::{AllocateAs, Ledger};
use kvserve_kv::transport::chaos::{ChaosHandle, ChaosTransport};
use kvserve_kv::transport::shm::{LearnError, Place, ShmConfig};
use kvserve_kv::transport::{Transport, code};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{CompletionSource, CompletionStatus, Nanos, WorkId};

conformance_suite!(one_sided ShmRig);

const NARROW: Shape = Shape {
    pages: 8,
    page_bytes: 16 * 1024,
    narrow: true,
};

fn bytes_of(pool: &PoolMemory, page: u32, count: usize) -> Vec<u8> {
    // SAFETY: the page has that many bytes, and one thread runs all of a test.
    unsafe { std::slice::from_raw_parts(pool.page(PageId(page)), count) }.to_vec()
}

/// Whenever the page is reused, before, at any piece of the copy or at its end, the read fails
/// with its own code; reused after the end, the copy was whole.
#[test]
fn a_generation_that_moves_during_a_copy_is_noticed_at_every_piece() {
    for step in 0..18 {
        let mut world = World::<ShmRig>::new(NARROW);
        let channel = world.rig.connect(0);
        let lease = world.grant_all();
        let first = world.post(channel, vec![read(lease, 2, [2]), read(lease, 3, [3])]);
        for _ in 0..step {
            world.poll();
        }
        let told_before = !world.told.is_empty();
        let source = world.rig.source().clone();
        source.raise_generation(PageId(2));
        // SAFETY: the page is the test's to reuse.
        unsafe { source.page(PageId(2)).write_bytes(0xAB, NARROW.page_bytes) };
        let told = world.finish(first, 2);
        let expected = match told_before {
            true => CompletionStatus::Success,
            false => CompletionStatus::Error(code::GENERATION),
        };
        assert_eq!(told, [expected, CompletionStatus::Success], "step {step}");
        if told_before {
            world.assert_holds(2, 2);
        }
        // Its neighbour is as good as ever.
        world.assert_holds(3, 3);
        let moved = world.rig.transport.counters().generations_moved;
        assert_eq!(moved, u64::from(!told_before));
    }
}

/// The ledger raises a page's generation whenever it leaves a lease and whenever it is handed
/// out: a reader that comes late always loses.
#[test]
fn every_reuse_by_the_ledger_is_noticed() {
    let mut world = World::<ShmRig>::new(NARROW);
    let source = world.rig.source().clone();
    let mut ledger = Ledger::of_pool(source.clone());
    assert!(ledger.raises_generations_of(&source));
    assert!(!ledger.raises_generations_of(world.rig.target()));
    assert!(!Ledger::new(8).raises_generations_of(&source));
    let mut pages = Vec::new();
    ledger
        .allocate(4, AllocateAs::Building, &mut pages)
        .unwrap();
    ledger.lease(&pages).unwrap();
    let channel = world.rig.connect(0);
    let lease = world.rig.grant(&pages);
    let good = world.post(channel, vec![read(lease, 0, 0..4)]);
    assert_eq!(world.finish(good, 1), [CompletionStatus::Success]);
    // One stays with its owner, one is free, one is free and handed out again; one is still
    // read by somebody else when its owner gives it up.
    let guards = ledger.guard([pages[3]]);
    ledger.unlease(&pages[..1]).unwrap();
    ledger.end_lease(&pages[1..]);
    let late: Vec<_> = (0..4).map(|at| read(lease, at, [4 + at])).collect();
    let first = world.post(channel, late);
    let lost = CompletionStatus::Error(code::GENERATION);
    assert_eq!(world.finish(first, 4), [lost; 4]);
    ledger.release(guards);
    let before: Vec<_> = (0..8).map(|page| source.generation(PageId(page))).collect();
    let mut again = Vec::new();
    ledger.allocate(7, AllocateAs::Pulling, &mut again).unwrap();
    for page in again {
        assert!(source.generation(page) > before[page.0 as usize]);
    }
}

#[test]
fn the_fused_checksum_is_the_one_that_the_peer_publishes() {
    for (mode, stores, page_bytes) in [
        (ChecksumMode::Full, Stores::Streaming, 16 * 1024),
        (ChecksumMode::Full, Stores::Plain, 20_000),
        (ChecksumMode::Full, Stores::Streaming, 200),
        (ChecksumMode::Sampled, Stores::Streaming, 16 * 1024),
        (ChecksumMode::Off, Stores::Plain, 3000),
    ] {
        let shape = Shape {
            pages: 8,
            page_bytes,
            narrow: false,
        };
        let mut world = World::<ShmRig>::new(shape);
        world.rig = ShmRig::with(
            shape,
            ShmConfig {
                turn_bytes: 5000,
                stores,
                checksums: mode,
            },
        );
        let source = world.rig.source().clone();
        for page in 0..8 {
            for at in 0..page_bytes {
                // SAFETY: inside the page, which is the test's.
                unsafe {
                    source
                        .page(PageId(page))
                        .add(at)
                        .write((at * 7 + at / 256) as u8 ^ page as u8)
                };
            }
        }
        let channel = world.rig.connect(0);
        let lease = world.grant_all();
        assert_eq!(world.rig.transport.landed_sum(PageId(1)), None);
        let first = world.post(channel, vec![read(lease, 0, [7, 6, 5, 4])]);
        assert_eq!(world.finish(first, 1), [CompletionStatus::Success]);
        for from in 0..4 {
            let into = 7 - from;
            let bytes = bytes_of(&source, from, page_bytes);
            assert!(bytes == bytes_of(world.rig.target(), into, page_bytes));
            let expected = (mode == ChecksumMode::Full).then(|| checksum(mode, &bytes));
            assert_eq!(world.rig.transport.landed_sum(PageId(into)), expected);
        }
        // A sum never outlives its bytes.
        world.rig.transport.forget_sums(&[PageId(7)]);
        assert_eq!(world.rig.transport.landed_sum(PageId(7)), None);
        let again = world.post(channel, vec![read(lease, 0, [6])]);
        source.raise_generation(PageId(0));
        assert_ne!(world.finish(again, 1), [CompletionStatus::Success]);
        let stale = world.rig.transport.landed_sum(PageId(6));
        assert_eq!(stale.is_some(), mode == ChecksumMode::Full, "never begun");
        assert_eq!(world.rig.transport.landed_sum(PageId(99)), None);
    }
}

/// A copy of more than a turn's bytes needs nobody but the shard, which must not park on it.
#[test]
fn a_copy_in_pieces_keeps_its_shard_busy_to_its_end() {
    let shape = Shape {
        pages: 8,
        page_bytes: 16 * 1024,
        narrow: false,
    };
    let mut world = World::<ShmRig>::new(shape);
    let config = ShmConfig {
        turn_bytes: 16 * 1024,
        ..ShmConfig::default()
    };
    world.rig = ShmRig::with(shape, config);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    assert!(!world.rig.transport.busy());
    let first = world.post(channel, vec![read(lease, 0, [7, 6, 5, 4])]);
    assert!(world.rig.transport.busy(), "nothing is copied yet");
    world.poll();
    assert!(world.rig.transport.busy(), "a page of four");
    assert_eq!(world.finish(first, 1), [CompletionStatus::Success]);
    assert!(!world.rig.transport.busy());
}

#[test]
fn a_frozen_peers_pages_are_copied_and_a_dead_ones_are_not() {
    let mut world = World::<ShmRig>::new(NARROW);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    // Nothing of the peer runs: `serve` is never called.
    let first = world.post(channel, vec![read(lease, 0, 0..8)]);
    while world.told.is_empty() {
        world.poll();
    }
    (0..8).for_each(|page| world.assert_holds(page, page));
    assert_eq!(world.told[0].work, first);
    world.rig.kill_peer();
    let dead = world.post(channel, vec![read(lease, 0, 0..8)]);
    let lost = CompletionStatus::Flushed(code::PEER_CLOSED);
    assert_eq!(world.finish(dead, 1), [lost]);
    assert_eq!(world.rig.transport.counters().channels_failed, 1);
}

#[test]
fn a_talking_peer_breaks_the_protocol() {
    use std::io::Write;
    let mut world = World::<ShmRig>::new(NARROW);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    world.rig.peer[0].write_all(b"x").unwrap();
    let first = world.post(channel, vec![read(lease, 0, 0..8)]);
    let lost = CompletionStatus::Flushed(code::PROTOCOL);
    assert_eq!(world.finish(first, 1), [lost]);
}

#[test]
fn abandoned_reads_complete_in_order_and_nothing_more_lands() {
    let mut world = World::<ShmRig>::new(NARROW);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let first = world.post(channel, (0..3).map(|at| read(lease, at, [at])).collect());
    world.poll();
    assert!(world.told.is_empty(), "the first is half-way");
    world.rig.transport().abandon(first.offset(1), 1);
    world.poll();
    assert!(world.told.is_empty(), "in order means that it waits");
    world.rig.transport().abandon(first, 1);
    let fd = world.rig.transport().arm().expect("completions wait");
    assert!(conformance::readable(fd, conformance::PATIENCE));
    let told = world.finish(first, 3);
    let abandoned = CompletionStatus::Error(code::ABANDONED);
    assert_eq!(told, [abandoned, abandoned, CompletionStatus::Success]);
    world.assert_untouched(1);
    world.assert_holds(2, 2);
    assert_eq!(world.rig.transport.counters().abandoned, 2);
}

#[test]
fn lying_places_are_refused_by_name() {
    let mut world = World::<ShmRig>::new(NARROW);
    let channel = world.rig.connect(0);
    let transport = &mut world.rig.transport;
    let place = |page| Place {
        page,
        generation: 0,
    };
    let mut learn = |channel, lease, first, places: &[Place]| {
        transport.learn_lease(channel, lease, 1, first, places)
    };
    assert_eq!(
        learn(channel, 1, 0, &[place(0), place(8)]),
        Err(LearnError::Page(8, 8))
    );
    assert_eq!(
        learn(channel, 1, 1, &[place(0)]),
        Err(LearnError::Gap(0, 1))
    );
    assert_eq!(learn(channel, 1, 0, &[place(0); 8]), Ok(()));
    assert_eq!(
        learn(channel, 1, 9, &[place(0)]),
        Err(LearnError::Gap(8, 9))
    );
    let most = 64 * 1024;
    assert_eq!(
        learn(channel, 2, 0, &vec![place(0); most + 1]),
        Err(LearnError::TooMany(most + 1))
    );
    let nowhere = kvserve_runtime::ChannelId {
        index: 7,
        ..channel
    };
    assert_eq!(learn(nowhere, 1, 0, &[]), Err(LearnError::NotConnected));
    // A lease that is over has no places any more.
    let lease = conformance::Lease { id: 1, epoch: 1 };
    let good = world.post(channel, vec![read(lease, 0, [0])]);
    assert_eq!(world.finish(good, 1), [CompletionStatus::Success]);
    world.rig.transport.forget_lease(channel, 1);
    let late = world.post(channel, vec![read(lease, 0, [0])]);
    let lost = CompletionStatus::Error(code::NO_PLACE);
    assert_eq!(world.finish(late, 1), [lost]);
}

/// The chaos wrapper goes around this transport as around any other.
#[test]
fn chaos_loses_completions_here_too() {
    let mut world = World::<ShmRig>::new(NARROW);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let target = world.rig.target().clone();
    let stand_in = ShmRig::with(NARROW, ShmConfig::default()).transport;
    let transport = std::mem::replace(&mut world.rig.transport, stand_in);
    let handle = ChaosHandle::new("completion=lose@1".parse().unwrap(), 1);
    let mut chaos = ChaosTransport::new(transport, handle).unwrap();
    let first = WorkId::new(channel, 0);
    let posted = chaos.post(channel, first, vec![read(lease, 0, [1])]);
    assert_eq!(posted, Ok(()));
    let mut told = Vec::new();
    for _ in 0..100 {
        chaos.poll(Nanos::now(), &mut told);
    }
    assert!(told.is_empty(), "it is lost");
    assert!(!chaos.take_back(first), "nobody can promise anything");
    let landed = bytes_of(&target, 1, NARROW.page_bytes);
    assert!(landed == bytes_of(world.rig.source(), 0, NARROW.page_bytes));
}
