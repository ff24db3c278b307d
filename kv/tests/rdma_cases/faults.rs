//! Faults with READs outstanding: each wait ends by its limit with a typed end, the ledger is
//! restored, the next transfer on a fresh queue pair succeeds. On the fake wire and on soft-RoCE.

use super::bed::{Bed, SHAPE};
use crate::conformance::Shape;
use crate::conformance::rdma_rig::{SYSTEM_DEVICES, on_system_verbs};
use kvserve_kv::transport::code;
use kvserve_kv::transport::rdma::PeerPlaces;
use kvserve_runtime::EndReason;
use rdma_core_sys as sys;
use std::process::Command;
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// By hand on the fake wire, so that nothing has moved when the fault comes.
const HELD: Shape = Shape {
    narrow: true,
    ..SHAPE
};

fn failed(status: u32) -> Result<(), EndReason> {
    Err(EndReason::Failed(code::VERBS | status))
}

/// Runs a shell command in the VM.
fn shell(command: &str) {
    let done = Command::new("sh").args(["-c", command]).status();
    assert!(done.is_ok_and(|status| status.success()), "{command}");
}

/// All packets of both ends are lost, or none.
fn lose_all(bed: &Bed, lost: bool) {
    match (on_system_verbs(), lost) {
        (true, true) => shell("tc qdisc add dev veth1 root netem loss 100%"),
        (true, false) => shell("tc qdisc del dev veth1 root"),
        (false, _) => bed.fabric(|fabric| fabric.wire().lose_all(lost)),
    }
}

/// Nothing moves: requests are on their way, and stay so. (On the fake wire a turn moves one,
/// unless this was called.)
fn hold(bed: &Bed) {
    match on_system_verbs() {
        true => shell("tc qdisc add dev veth1 root netem loss 100%"),
        false => bed.stepping.set(false),
    }
}

/// It moves again.
fn release(bed: &Bed) {
    match on_system_verbs() {
        true => shell("tc qdisc del dev veth1 root"),
        false => bed.stepping.set(true),
    }
}

/// What puts the VM's link back up.
const LINK_UP: &str = "ip link set veth1 up; \
    ip neigh replace 10.77.0.1 lladdr 02:00:00:00:77:01 dev veth1 nud permanent; \
    ip neigh replace 10.77.0.2 lladdr 02:00:00:00:77:02 dev veth0 nud permanent; \
    ip route replace 10.77.0.0/24 dev veth1 src 10.77.0.2 table 102; \
    ip route replace 10.77.0.0/24 dev veth0 src 10.77.0.1 table 101";

#[test]
fn a_peer_that_is_gone_ends_the_wait_by_its_retries() {
    let bed = Bed::new(HELD);
    let channel = bed.connect();
    hold(&bed);
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    bed.rig.borrow_mut().0.peer = None;
    if !on_system_verbs() {
        bed.fabric(|fabric| fabric.wire().kill());
    }
    release(&bed);
    assert_eq!(bed.wait(&mut pull), failed(sys::IBV_WC_RETRY_EXC_ERR));
    bed.give_back(pull);
    bed.restored();
    bed.rig.borrow_mut().0.peer_starts_again();
    bed.next_transfer_succeeds();
}

/// Fault 9, 19: the peer's queue pair goes, its process lives on.
#[test]
fn a_queue_pair_that_the_peer_destroys_ends_the_wait_and_another_is_made() {
    let bed = Bed::new(HELD);
    let channel = bed.connect();
    hold(&bed);
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    {
        let rig = &mut bed.rig.borrow_mut().0;
        let served = rig.served.pop().unwrap();
        let peer = rig.peer.as_mut().unwrap();
        assert!(peer.serves(served));
        peer.stop_serving(served);
        assert!(!peer.serves(served));
    }
    release(&bed);
    assert_eq!(bed.wait(&mut pull), failed(sys::IBV_WC_RETRY_EXC_ERR));
    bed.give_back(pull);
    bed.restored();
    bed.next_transfer_succeeds();
}

/// R4: the waiter's own limit comes long before the card's retries. The ladder does the rest.
#[test]
fn a_wait_ends_by_its_own_limit_and_its_pages_when_the_queue_is_flushed() {
    let bed = Bed::new(HELD);
    let channel = bed.connect();
    lose_all(&bed, true);
    let begun = Instant::now();
    let mut pull = bed.pull(channel, 48, 8, Duration::from_millis(3));
    assert_eq!(bed.wait(&mut pull), Err(EndReason::Deadline));
    bed.give_back(pull);
    bed.restored();
    assert!(begun.elapsed() < 10 * SECOND, "a liveness bound");
    assert!(!bed.hub.channel_is_open(channel), "the ladder killed it");
    lose_all(&bed, false);
    bed.next_transfer_succeeds();
}

#[test]
fn all_packets_lost_ends_the_wait_by_its_retries() {
    let bed = Bed::new(HELD);
    let channel = bed.connect();
    lose_all(&bed, true);
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    let end = bed.wait(&mut pull);
    lose_all(&bed, false);
    assert_eq!(end, failed(sys::IBV_WC_RETRY_EXC_ERR));
    bed.give_back(pull);
    bed.restored();
    bed.next_transfer_succeeds();
}

/// Only flushes, no primary error: the event or the first flush ends it, whichever comes first.
#[test]
fn a_link_that_goes_down_ends_the_wait_at_once() {
    let bed = Bed::new(HELD);
    let channel = bed.connect();
    hold(&bed);
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    let begun = Instant::now();
    match on_system_verbs() {
        true => shell("ip link set veth1 down"),
        false => bed.fabric(|fabric| fabric.wire().link_down()),
    }
    let end = bed.wait(&mut pull);
    let event = code::VERBS_EVENT | sys::IBV_EVENT_PORT_ERR;
    let flush = code::VERBS | sys::IBV_WC_WR_FLUSH_ERR;
    assert!(
        end == Err(EndReason::Failed(event)) || end == Err(EndReason::Failed(flush)),
        "{end:?}"
    );
    assert!(begun.elapsed() < 8 * SECOND, "a liveness bound");
    bed.give_back(pull);
    bed.restored();
    // A port that is down is refused by name.
    let refused = bed.rig.borrow_mut().0.try_connect(99);
    assert!(refused.is_err_and(|error| error.to_string().contains("not ACTIVE")));
    match on_system_verbs() {
        true => shell(LINK_UP),
        false => bed.fabric(|fabric| fabric.wire().link_up()),
    }
    release(&bed);
    bed.next_transfer_succeeds();
}

/// A memory region that goes, and faults 7: a key that is wrong kills one queue pair, not the
/// peer: another one to the same peer works on.
#[test]
fn a_wrong_key_kills_one_queue_pair_and_not_the_peer() {
    let bed = Bed::new(SHAPE);
    let good = bed.connect();
    // A queue pair whose peer told a key that is not its own.
    let opened = bed
        .hub
        .open_channel(kvserve_runtime::ChannelKind::Rdma, bed.source, 64);
    let channel = opened.unwrap();
    {
        let rig = &mut bed.rig.borrow_mut().0;
        let prepared = rig.transport.prepare(5).unwrap();
        let peer = rig.peer.as_mut().unwrap();
        let (_id, mut theirs) = peer.serve(prepared.endpoint(), 6).unwrap();
        theirs.key ^= 0x5A00;
        rig.transport
            .connect(channel, prepared, &theirs, &PeerPlaces::default())
            .unwrap();
    }
    teach(&bed, channel);
    let mut wrong = bed.pull(channel, 16, 4, 10 * SECOND);
    assert_eq!(bed.wait(&mut wrong), failed(sys::IBV_WC_REM_ACCESS_ERR));
    let mut right = bed.pull(good, 16, 4, 10 * SECOND);
    assert_eq!(bed.wait(&mut right), Ok(()));
    bed.assert_landed(&right);
    bed.give_back(wrong);
    bed.give_back(right);
    bed.restored();
    bed.next_transfer_succeeds();
}

/// A read beyond the peer's region: its own words lied.
#[test]
fn a_read_beyond_the_region_fails_and_nothing_lands() {
    let bed = Bed::new(SHAPE);
    let opened = bed
        .hub
        .open_channel(kvserve_runtime::ChannelKind::Rdma, bed.source, 64);
    let channel = opened.unwrap();
    {
        let rig = &mut bed.rig.borrow_mut().0;
        let prepared = rig.transport.prepare(5).unwrap();
        let peer = rig.peer.as_mut().unwrap();
        let (_id, mut theirs) = peer.serve(prepared.endpoint(), 6).unwrap();
        theirs.base += 64 * SHAPE.page_bytes as u64;
        rig.transport
            .connect(channel, prepared, &theirs, &PeerPlaces::default())
            .unwrap();
    }
    teach(&bed, channel);
    let mut pull = bed.pull(channel, 16, 4, 10 * SECOND);
    assert_eq!(bed.wait(&mut pull), failed(sys::IBV_WC_REM_ACCESS_ERR));
    bed.give_back(pull);
    bed.restored();
    bed.next_transfer_succeeds();
}

/// P3 with E4, on the fake wire and on soft-RoCE: of an unsignalled run whose `nth` request fails,
/// those before it succeeded, whatever no completion said.
#[test]
fn an_error_in_the_middle_of_an_unsignalled_run_closes_those_before_it() {
    for nth in [0, 1, 4, 7, 8, 20] {
        let bed = Bed::new(SHAPE);
        let opened = bed
            .hub
            .open_channel(kvserve_runtime::ChannelKind::Rdma, bed.source, 64);
        let channel = opened.unwrap();
        {
            let rig = &mut bed.rig.borrow_mut().0;
            let prepared = rig.transport.prepare(5).unwrap();
            let peer = rig.peer.as_mut().unwrap();
            let (_id, mut theirs) = peer.serve(prepared.endpoint(), 6).unwrap();
            // It says that its pool is longer than what it has registered.
            theirs.pages += 1;
            rig.transport
                .connect(channel, prepared, &theirs, &PeerPlaces::default())
                .unwrap();
        }
        let wrong = SHAPE.pages as u32;
        let places: Vec<_> = (0..48)
            .map(|at| kvserve_kv::transport::shm::Place {
                page: if at == nth { wrong } else { at },
                generation: 0,
            })
            .collect();
        let learnt = bed.transport(|transport| {
            transport.learn_lease(channel, bed.lease.id, bed.lease.epoch, 0, &places)
        });
        learnt.unwrap();
        let mut pull = bed.pull(channel, 48, 1, 10 * SECOND);
        assert_eq!(bed.wait(&mut pull), failed(sys::IBV_WC_REM_ACCESS_ERR));
        let counters = bed.hub.counters();
        assert_eq!(counters.posts_retired, u64::from(nth), "no more, no less");
        let odd = (counters.completions_stray, counters.completions_duplicate);
        assert_eq!(odd, (0, 0));
        bed.give_back(pull);
        bed.restored();
        bed.next_transfer_succeeds();
    }
}

fn teach(bed: &Bed, channel: kvserve_runtime::ChannelId) {
    let places: Vec<_> = (0..SHAPE.pages as u32)
        .map(|page| kvserve_kv::transport::shm::Place {
            page,
            generation: 0,
        })
        .collect();
    let learnt = bed.transport(|transport| {
        transport.learn_lease(channel, bed.lease.id, bed.lease.epoch, 0, &places)
    });
    learnt.unwrap();
}

/// Own cancel: the future is dropped with READs outstanding; an ordinary cancel of reads that end
/// does not flap the channel.
#[test]
fn a_cancel_waits_for_the_card_and_spares_a_channel_that_moves() {
    let bed = Bed::new(SHAPE);
    let mut channel = bed.connect();
    for _ in 0..20 {
        if on_system_verbs() && !bed.hub.channel_is_open(channel) {
            channel = bed.connect();
        }
        let pull = bed.pull(channel, 48, 4, 10 * SECOND);
        bed.give_back(pull);
        bed.restored();
    }
    if !on_system_verbs() {
        // Under emulation a read may well stand still for longer than the grace.
        assert!(bed.hub.channel_is_open(channel));
    }
    let counters = bed.hub.counters();
    assert_eq!(
        (counters.completions_stray, counters.completions_duplicate),
        (0, 0)
    );
    bed.next_transfer_succeeds();
}

/// Fault 7: one-sided reads of a frozen peer succeed, so nothing here may take them for a proof
/// of life: that is COMMIT's business.
#[test]
fn a_frozen_peers_reads_succeed() {
    let bed = Bed::new(SHAPE);
    let channel = bed.connect();
    // Nothing of the far end's code runs from here on.
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    assert_eq!(bed.wait(&mut pull), Ok(()));
    bed.assert_landed(&pull);
    bed.give_back(pull);
    bed.restored();
}

/// Fault 19: queue pairs that are killed with reads under way, again and again.
#[test]
fn a_killed_queue_pair_is_rebuilt_and_nothing_is_lost() {
    let rounds = if on_system_verbs() { 5 } else { 50 };
    let bed = Bed::new(SHAPE);
    for _ in 0..rounds {
        let channel = bed.connect();
        let mut pull = bed.pull(channel, 48, 4, 10 * SECOND);
        bed.turn();
        bed.hub.close_channel(channel);
        match bed.wait(&mut pull) {
            Ok(()) | Err(EndReason::ChannelKilled) => {}
            Err(other) => panic!("{other:?}"),
        }
        bed.give_back(pull);
        bed.restored();
    }
    bed.next_transfer_succeeds();
    let counters = bed.transport(|transport| transport.counters());
    assert_eq!(counters.pairs_stuck, 0);
}

#[test]
fn the_vms_devices_are_named_in_one_place() {
    // So that a run on the system's library cannot pass without it.
    let bed = Bed::new(SHAPE);
    let device = bed.transport(|transport| transport.choice().device.clone());
    assert_eq!(device == SYSTEM_DEVICES[0], on_system_verbs());
}
