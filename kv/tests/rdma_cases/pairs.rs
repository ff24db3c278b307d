//! Access flags, credits and refusals: what is made of queue pairs and regions.

use crate::conformance::rdma_rig::{Fabric, RdmaRig, on_system_verbs, open, test_config};
use crate::conformance::{PATIENCE, Rig, Shape, World, read, readable};
use kvserve_kv::PoolMemory;
use kvserve_kv::transport::code;
use kvserve_kv::transport::rdma::verbs::{Access, Library};
use kvserve_kv::transport::rdma::{RdmaConfig, RdmaError};
use kvserve_runtime::{CompletionSource, CompletionStatus, Reap};
use rdma_core_sys as sys;
use std::sync::Arc;

const SHAPE: Shape = Shape {
    pages: 64,
    page_bytes: 1024,
    narrow: false,
};

/// Fault 44: remote read where a node serves, local write where pulls land, never more; and only
/// the pages, never the pool's head.
#[test]
fn a_region_is_never_remotely_writable() {
    for serves in [false, true] {
        for lands in [false, true] {
            let flags = Access { serves, lands }.flags();
            let forbidden = sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
            assert_eq!(flags & forbidden, 0);
            assert_eq!(flags & sys::IBV_ACCESS_REMOTE_READ != 0, serves);
            assert_eq!(flags & sys::IBV_ACCESS_LOCAL_WRITE != 0, lands);
        }
    }
    if on_system_verbs() {
        return;
    }
    let rig = RdmaRig::new(SHAPE);
    let (near, far) = rig.wire().access();
    let relaxed = sys::IBV_ACCESS_RELAXED_ORDERING;
    assert_eq!(near, [sys::IBV_ACCESS_LOCAL_WRITE | relaxed]);
    assert_eq!(far, [sys::IBV_ACCESS_REMOTE_READ | relaxed]);
    assert!(rig.transport.relaxed_ordering());
}

/// A pool that serves nobody cannot be read, whatever a peer knows of it.
#[test]
fn a_pool_that_only_lands_cannot_be_read() {
    let fabric = Fabric::new();
    let pool = |_| Arc::new(PoolMemory::memfd(8, 1024).unwrap());
    let (near_pool, far_pool) = (pool(0), pool(1));
    let lands = Access {
        serves: false,
        lands: true,
    };
    let config = test_config();
    let near = open(&fabric, &fabric.near, &near_pool, 1024, lands, &config);
    let far = open(&fabric, &fabric.far, &far_pool, 1024, lands, &config);
    let (mut near, far) = (near.ok().unwrap(), far.ok().unwrap());
    let prepared = near.prepare(1).unwrap();
    // What it tells of itself gives nothing away.
    assert_eq!((prepared.endpoint().key, prepared.endpoint().base), (0, 0));
    drop(prepared);
    drop(far);
}

/// A queue pair that could overrun the completion queue is refused, and its share comes back.
#[test]
fn a_queue_pair_without_room_for_its_completions_is_refused() {
    let config = RdmaConfig {
        completions: 70,
        ..test_config()
    };
    let mut world = World::of(RdmaRig::with(SHAPE, config), SHAPE);
    // A library may round the queue up; what it holds is what counts.
    let mut channels = Vec::new();
    let refused = loop {
        match world.rig.try_connect(channels.len() as u16) {
            Ok(channel) => channels.push(channel),
            Err(error) => break error,
        }
        assert!(channels.len() < 64, "never refused");
    };
    let RdmaError::Completions(33, free) = refused else {
        panic!("{refused}");
    };
    assert!(free < 33 && channels.len() >= 2);
    let gone = channels[0];
    world.rig.transport.kill(gone);
    assert_eq!(world.rig.reaped(gone), Reap::Quiet);
    // Its last completions could still lie in the queue: only a look that finds it empty counts.
    world.poll();
    let again = world.rig.try_connect(gone.index);
    assert!(again.is_ok(), "{}", again.unwrap_err());
}

/// All queue pairs fail at once, with all their queues full: the completion queue holds it all.
#[test]
fn a_storm_of_flushes_never_overruns_the_completion_queue() {
    let config = RdmaConfig {
        completions: 4 * 33,
        scatter_max: 1,
        ..test_config()
    };
    let narrow = Shape {
        narrow: true,
        ..SHAPE
    };
    let mut world = World::of(RdmaRig::with(narrow, config), narrow);
    let channels: Vec<_> = (0..4).map(|index| world.rig.connect(index)).collect();
    let lease = world.grant_all();
    for channel in &channels {
        // Backwards: a request a page.
        world.post(*channel, vec![read(lease, 0, (0..64).rev())]);
    }
    for channel in &channels {
        world.rig.transport.kill(*channel);
    }
    for channel in channels {
        assert_eq!(world.rig.reaped(channel), Reap::Quiet);
    }
    let counters = world.rig.transport.counters();
    assert_eq!(counters.completions_lost, 0);
    if let Some(wire) = &world.rig.fabric.wire {
        assert_eq!(wire.overruns(), 0);
    }
}

/// Reads of which nothing is on its way can be taken back, and no other.
#[test]
fn a_read_is_taken_back_only_before_the_card_has_it() {
    if on_system_verbs() {
        return; // how far the card has come cannot be held still
    }
    let narrow = Shape {
        narrow: true,
        ..SHAPE
    };
    let config = RdmaConfig {
        queue_depth: 4,
        signal_every: 4,
        scatter_max: 1,
        ..test_config()
    };
    let mut world = World::of(RdmaRig::with(narrow, config), narrow);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    // Backwards: 6 requests; the queue takes 4 of them.
    let reads = vec![
        read(lease, 0, (0..6).rev()),
        read(lease, 6, [40]),
        read(lease, 7, [41]),
    ];
    let first = world.post(channel, reads);
    let transport = &mut world.rig.transport;
    assert!(!transport.take_back(first), "the card has some of it");
    assert!(transport.take_back(first.offset(1)));
    assert!(
        transport.take_back(first.offset(1)),
        "twice changes nothing"
    );
    let told = world.finish(first, 3);
    let good = CompletionStatus::Success;
    let abandoned = CompletionStatus::Error(code::ABANDONED);
    assert_eq!(told, [good, abandoned, good]);
    world.assert_untouched(40);
}

#[test]
fn every_refusal_to_open_says_what_to_do() {
    let fabric = Fabric::new();
    let pool = Arc::new(PoolMemory::memfd(8, 1024).unwrap());
    let lands = Access {
        serves: false,
        lands: true,
    };
    let refused = |device: &str, config: &RdmaConfig| {
        let opened = open(&fabric, device, &pool, 1024, lands, config);
        opened
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    let text = refused("mlx5_99", &test_config());
    assert!(
        text.contains("mlx5_99") && text.contains(&fabric.near),
        "{text}"
    );
    let for_ever = RdmaConfig {
        retry_cnt: 7,
        ..test_config()
    };
    assert!(refused(&fabric.near, &for_ever).contains("for ever"));
}

/// The same functions by way of the dynamic loader, as in production.
#[test]
fn the_loader_finds_every_function() {
    if on_system_verbs() {
        let library = Library::system().unwrap();
        assert!(!library.devices().unwrap().is_empty());
        return;
    }
    let mut file = std::env::current_exe().unwrap();
    file.pop();
    file.push("libfake_verbs.so");
    let name = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    let verbs = sys::Verbs::load(&name).unwrap_or_else(|error| panic!("{error}"));
    let library = Library::of(verbs);
    // Another image of the library, with a list of its own: no test's wires are in it.
    assert_eq!(library.devices(), Ok(Vec::new()));
}

/// An idle transport tells nothing, and its descriptor stays quiet.
#[test]
fn an_idle_connection_is_quiet() {
    let mut world = World::<RdmaRig>::new(SHAPE);
    world.rig.connect(0);
    world.poll();
    for _ in 0..10 {
        let fd = world.rig.transport.arm().expect("events may come");
        world.poll();
        assert!(!readable(fd, std::time::Duration::from_millis(5)));
    }
    assert!(world.told.is_empty() && PATIENCE.as_secs() > 0);
}

/// Every line of the doctor names the thing; a device that works, one that is not there, a port
/// that is down.
#[test]
fn the_doctor_says_what_there_is_and_what_is_missing() {
    use kvserve_kv::transport::rdma::address::Wish;
    use kvserve_kv::transport::rdma::doctor::{Weight, look};
    let fabric = Fabric::new();
    let wish = |device: &str| Wish {
        device: Some(device.into()),
        ..Wish::default()
    };
    let bad = |device: &str| {
        let findings = look(Ok(fabric.library.clone()), &wish(device));
        let bad = findings
            .iter()
            .filter(|finding| finding.weight == Weight::Bad && !finding.text.contains("locked"));
        let bad: Vec<_> = bad.map(|finding| finding.text.clone()).collect();
        (findings, bad)
    };
    let (findings, none) = bad(&fabric.near);
    assert!(none.is_empty(), "{none:?}");
    let used = format!("nodes would use {} port 1", fabric.near);
    assert!(findings.iter().any(|finding| finding.text.contains(&used)));
    let (_, missing) = bad("mlx5_9");
    assert!(
        missing.len() == 1 && missing[0].contains("mlx5_9"),
        "{missing:?}"
    );
    if let Some(wire) = &fabric.wire {
        wire.link_down();
        let (_, down) = bad(&fabric.near);
        assert!(down.len() == 1 && down[0].contains("ACTIVE"), "{down:?}");
    }
}
