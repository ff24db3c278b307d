//! The poller: completions against arming, over the fake wire. No wake-up is ever lost.

use crate::conformance::rdma_rig::{RdmaRig, on_system_verbs};
use crate::conformance::{PATIENCE, Rig, Shape, World, read, readable};
use kvserve_runtime::{CompletionSource, Nanos};

const SHAPE: Shape = Shape {
    pages: 64,
    page_bytes: 64,
    narrow: false,
};

/// A shard's loop in small: poll, and park by the descriptor when nothing came. The card's thread
/// completes at whatever moment it does: between the poll and the arming, between the arming and
/// the second poll, after it.
fn races(rounds: u64) {
    if on_system_verbs() {
        eprintln!("NOT RUN on the system's verbs: it is a race with the fake card's thread");
        return;
    }
    let mut world = World::<RdmaRig>::new(SHAPE);
    let channel = world.rig.connect(0);
    let lease = world.grant_all();
    let (mut parks, mut told) = (0_u64, Vec::new());
    for round in 0..rounds {
        let page = (round % 64) as usize;
        world.post(channel, vec![read(lease, page, [page])]);
        // A little later each time, so that the races differ.
        for _ in 0..round % 97 {
            std::hint::spin_loop();
        }
        let transport = &mut world.rig.transport;
        told.clear();
        while transport.poll(Nanos::now(), &mut told) == 0 {
            let fd = transport.arm().expect("a read is on its way");
            if transport.poll(Nanos::now(), &mut told) > 0 {
                break;
            }
            parks += 1;
            assert!(
                readable(fd, PATIENCE),
                "round {round}: parked for good, with a completion in the queue"
            );
        }
        assert_eq!(told.len(), 1);
    }
    println!("{rounds} races, {parks} parks");
    assert!(parks > 0, "it never parked");
}

#[test]
fn a_hundred_thousand_races_of_arming_and_completing_lose_no_wake_up() {
    races(100_000);
}

#[test]
#[ignore = "minutes: the long form of the test above"]
fn ten_million_races_of_arming_and_completing_lose_no_wake_up() {
    races(10_000_000);
}
