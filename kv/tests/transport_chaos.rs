//! The chaos wrapper over the TCP transport: silent when it is off, and each fault as it is named.

mod conformance;

use conformance::tcp_rig::TcpRig;
use conformance::{Lease, PATIENCE, Rig, Shape, World, read, readable};
use kvserve_kv::transport::chaos::{ChaosHandle, ChaosTransport};
use kvserve_kv::transport::tcp::TcpTransport;
use kvserve_kv::transport::{Transport, code};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{ChannelId, CompletionStatus, Nanos, Reap, WorkId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A [`TcpRig`] whose transport is wrapped.
struct ChaosRig {
    /// Its own transport is a stand-in; the real one is in `chaos`.
    tcp: TcpRig,
    chaos: ChaosTransport<TcpTransport>,
    handle: ChaosHandle,
}

impl ChaosRig {
    fn set(&self, spec: &str) {
        self.handle.set(spec.parse().unwrap());
    }
}

impl Rig for ChaosRig {
    fn new(shape: Shape) -> Self {
        let mut tcp = TcpRig::new(shape);
        let stand_in =
            TcpTransport::new(tcp.target().clone(), shape.page_bytes, Default::default()).unwrap();
        let transport = std::mem::replace(&mut tcp.transport, stand_in);
        let handle = ChaosHandle::new("off".parse().unwrap(), 42);
        let chaos = ChaosTransport::new(transport, handle.clone()).unwrap();
        ChaosRig { tcp, chaos, handle }
    }

    fn transport(&mut self) -> &mut dyn Transport {
        &mut self.chaos
    }

    fn connect(&mut self, index: u16) -> ChannelId {
        std::mem::swap(&mut self.tcp.transport, self.chaos.inner_mut());
        let channel = self.tcp.connect(index);
        std::mem::swap(&mut self.tcp.transport, self.chaos.inner_mut());
        channel
    }

    fn grant(&mut self, pages: &[PageId]) -> Lease {
        self.tcp.grant(pages)
    }

    fn serve(&mut self) {
        self.tcp.serve();
    }

    fn kill_peer(&mut self) {
        self.tcp.kill_peer();
    }

    fn peer_guards(&self) -> usize {
        self.tcp.peer_guards()
    }

    fn source(&self) -> &Arc<PoolMemory> {
        self.tcp.source()
    }

    fn target(&self) -> &Arc<PoolMemory> {
        self.tcp.target()
    }

    fn pages_per_read_max(&self) -> usize {
        self.chaos.inner().pages_per_read_max()
    }
}

// Off, it is not there.
conformance_suite!(ChaosRig);

const SHAPE: Shape = Shape {
    pages: 64,
    page_bytes: 1024,
    narrow: false,
};

const GOOD: CompletionStatus = CompletionStatus::Success;

fn world(spec: &str) -> (World<ChaosRig>, ChannelId, Lease) {
    let mut world = World::<ChaosRig>::new(SHAPE);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    world.rig.set(spec);
    (world, channel, lease)
}

/// Turns until everything posted has landed: what chaos hides, the inner transport still counts.
fn land(world: &mut World<ChaosRig>) {
    let begun = Instant::now();
    while world.rig.chaos.inner().counters().bytes == 0
        || kvserve_runtime::CompletionSource::in_flight(world.rig.chaos.inner()) > 0
    {
        world.rig.serve();
        world.poll();
        assert!(begun.elapsed() < PATIENCE);
    }
    world.peer_comes_to_rest();
}

#[test]
fn a_lost_completion_has_landed_and_nobody_hears_of_it() {
    let (mut world, channel, lease) = world("completion=lose");
    let lost = world.post(channel, vec![read(lease, 0, 0..8)]);
    land(&mut world);
    (0..8).for_each(|page| world.assert_holds(page, page));
    assert!(world.told.is_empty());
    assert_eq!(world.rig.handle.counters().completions_lost, 1);
    assert!(!world.rig.transport().take_back(lost), "nobody knows of it");
    // Switched off, the next ones are told again; the lost one never.
    world.rig.set("off");
    let next = world.post(channel, vec![read(lease, 8, [8])]);
    assert_eq!(world.finish(next, 1), [GOOD]);
    assert!(world.told.iter().all(|told| told.work != lost));
    assert!(
        world.rig.transport().take_back(lost),
        "the next one retired it"
    );
    // Its channel can still be proven quiet.
    world.rig.transport().kill(channel);
    assert_eq!(world.rig.transport().reap(channel), Reap::Quiet);
}

#[test]
fn a_failed_completion_is_told_as_an_error_though_its_bytes_are_there() {
    let (mut world, channel, lease) = world("completion=fail");
    let first = world.post(channel, vec![read(lease, 0, 0..8)]);
    let told = world.finish(first, 1);
    assert_eq!(told, [CompletionStatus::Error(code::CHAOS)]);
    world.assert_holds(7, 7);
}

#[test]
fn a_duplicated_completion_is_told_twice() {
    let (mut world, channel, lease) = world("completion=duplicate");
    let first = world.post(channel, (0..50).map(|at| read(lease, at, [at])).collect());
    world.run_until("duplicates", |told| told.len() == 100);
    for (at, told) in world.told.iter().enumerate() {
        assert_eq!(told.work, first.offset(at as u64 / 2));
        assert_eq!(told.status, GOOD);
    }
}

#[test]
fn a_late_completion_is_held_in_order_and_wakes_its_shard_when_it_is_due() {
    let delay = Duration::from_millis(60);
    let (mut world, channel, lease) = world("completion=late:60ms");
    let late = world.post(channel, vec![read(lease, 0, [0])]);
    let posted_at = Nanos::now();
    land(&mut world);
    assert!(world.told.is_empty());
    world.assert_holds(0, 0);
    assert_eq!(world.rig.transport().in_flight(), 1, "it has not been told");
    assert!(
        !world.rig.transport().take_back(late),
        "it is still to come"
    );
    // Chaos is over, and yet what comes after the late one on its channel waits behind it.
    world.rig.set("off");
    let behind = world.post(channel, vec![read(lease, 1, [1])]);
    land(&mut world);
    let begun = Instant::now();
    while world.told.is_empty() {
        let fd = world.rig.transport().arm().expect("a completion is held");
        world.poll();
        if world.told.is_empty() {
            assert!(readable(fd, PATIENCE), "nothing wakes the shard");
            world.rig.serve();
            world.poll();
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    assert!(Nanos::now().since(posted_at) >= delay);
    assert_eq!(world.finish(late, 1), [GOOD]);
    assert_eq!(world.finish(behind, 1), [GOOD]);
    assert_eq!(world.told[0].work, late);
    assert_eq!(world.rig.transport().in_flight(), 0);
}

#[test]
fn nothing_late_comes_after_its_channel_was_reaped() {
    let (mut world, channel, lease) = world("completion=late:30ms");
    world.post(channel, vec![read(lease, 0, [0])]);
    land(&mut world);
    world.rig.transport().kill(channel);
    assert_eq!(world.rig.transport().reap(channel), Reap::Quiet);
    assert_eq!(world.rig.transport().in_flight(), 0);
    std::thread::sleep(Duration::from_millis(40));
    world.poll();
    assert!(world.told.is_empty());
}

#[test]
fn a_lost_flush_is_stuck_for_ever_and_a_new_channel_of_its_number_is_not() {
    let (mut world, channel, lease) = world("flush=lose");
    world.post(channel, vec![read(lease, 0, 0..8)]);
    world.rig.transport().kill(channel);
    for _ in 0..3 {
        assert_eq!(world.rig.transport().reap(channel), Reap::Stuck);
    }
    assert_eq!(world.rig.handle.counters().flushes_lost, 1);
    // Even with the chaos off: what was lost stays lost.
    world.rig.set("off");
    world.rig.transport().kill(channel);
    assert_eq!(world.rig.transport().reap(channel), Reap::Stuck);
    let channel = world.rig.connect(channel.index);
    let first = world.post(channel, vec![read(lease, 9, [9])]);
    assert_eq!(world.finish(first, 1), [GOOD]);
    world.rig.transport().kill(channel);
    assert_eq!(world.rig.transport().reap(channel), Reap::Quiet);
}

/// P3: the completion behind a hidden error would make the failed read look good.
#[test]
fn an_error_is_never_hidden() {
    let (mut world, channel, lease) = world("completion=lose");
    let unknown = Lease { id: 1, epoch: 1 };
    let reads = vec![
        read(lease, 0, [0]),
        read(unknown, 0, [1]),
        read(lease, 2, [2]),
    ];
    let first = world.post(channel, reads);
    land(&mut world);
    let told: Vec<_> = world
        .told
        .iter()
        .map(|told| (told.work, told.status))
        .collect();
    let refused = CompletionStatus::Error(conformance::REFUSED);
    assert_eq!(told, [(first.offset(1), refused)]);
}

#[test]
fn the_same_seed_loses_the_same_completions() {
    let lost = || -> Vec<WorkId> {
        let (mut world, channel, lease) = world("completion=lose@0.4");
        let first = world.post(channel, (0..60).map(|at| read(lease, at, [at])).collect());
        land(&mut world);
        let told: Vec<_> = world.told.iter().map(|told| told.work).collect();
        let all = (0..60).map(|at| first.offset(at));
        all.filter(|work| !told.contains(work)).collect()
    };
    let (one, two) = (lost(), lost());
    assert_eq!(one, two);
    assert!((10..40).contains(&one.len()), "{} of 60 at 0.4", one.len());
}
