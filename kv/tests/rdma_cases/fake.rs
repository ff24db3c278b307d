//! Faults that only a fake library makes. On the system's library they say that they do not run.

use super::bed::{Bed, SHAPE};
use crate::conformance::rdma_rig::{on_system_verbs, test_config};
use crate::conformance::{PATIENCE, Shape};
use fake_verbs::Rule;
use kvserve_kv::transport::code;
use kvserve_kv::transport::rdma::RdmaConfig;
use kvserve_runtime::EndReason;
use rdma_core_sys as sys;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

const HELD: Shape = Shape {
    narrow: true,
    ..SHAPE
};

/// A bed on the fake wire, or nothing.
fn fake(shape: Shape) -> Option<Bed> {
    if on_system_verbs() {
        eprintln!("NOT RUN on the system's verbs: it needs the fake library's faults");
        return None;
    }
    Some(Bed::new(shape))
}

/// P3 with E4: of an unsignalled run whose fifth request fails, the four before it succeeded,
/// whatever no completion said.
#[test]
fn any_status_in_the_middle_of_an_unsignalled_run_closes_those_before_it() {
    for nth in [0, 1, 4, 7, 8, 20] {
        let Some(bed) = fake(HELD) else { return };
        let channel = bed.connect();
        bed.fabric(|fabric| {
            let rule = Rule::Fail(sys::IBV_WC_REM_OP_ERR);
            fabric.wire().rule(nth, rule);
        });
        let mut pull = bed.pull(channel, 48, 1, 10 * SECOND);
        let failed = Err(EndReason::Failed(code::VERBS | sys::IBV_WC_REM_OP_ERR));
        assert_eq!(bed.wait(&mut pull), failed, "request {nth}");
        let counters = bed.hub.counters();
        assert_eq!(counters.posts_retired, nth, "those before it, and no other");
        assert_eq!(
            (counters.completions_stray, counters.completions_duplicate),
            (0, 0)
        );
        bed.give_back(pull);
        bed.restored();
        bed.next_transfer_succeeds();
    }
}

/// The last request's completion is lost: the waiter ends by its deadline, the marker proves the
/// rest, the pages come back.
#[test]
fn a_lost_completion_costs_the_channel_and_no_page() {
    let Some(bed) = fake(SHAPE) else { return };
    let channel = bed.connect();
    // As many as the queue takes at once.
    for nth in 0..32 {
        bed.fabric(|fabric| fabric.wire().rule(nth, Rule::LoseCompletion));
    }
    let mut pull = bed.pull(channel, 48, 1, Duration::from_millis(30));
    assert_eq!(bed.wait(&mut pull), Err(EndReason::Deadline));
    bed.give_back(pull);
    bed.restored();
    let lost = bed.transport(|transport| transport.counters().completions_lost);
    assert!(lost > 0, "they are counted");
    bed.next_transfer_succeeds();
}

/// P3: a doubled completion retires nothing twice; it is counted and kills the channel.
#[test]
fn a_doubled_completion_changes_nothing_and_ends_the_channel() {
    let Some(bed) = fake(SHAPE) else { return };
    let channel = bed.connect();
    bed.fabric(|fabric| fabric.wire().rule(0, Rule::DoubleCompletion));
    let mut pull = bed.pull(channel, 1, 1, 10 * SECOND);
    let first = bed.wait(&mut pull);
    assert!(first.is_ok(), "{first:?}");
    bed.assert_landed(&pull);
    bed.give_back(pull);
    bed.restored();
    let begun = std::time::Instant::now();
    while bed.transport(|transport| transport.counters().duplicates) == 0 {
        assert!(begun.elapsed() < PATIENCE);
        bed.turn();
    }
    assert_eq!(bed.transport(|transport| transport.room(channel)), 0);
    bed.hub.close_channel(channel);
    bed.next_transfer_succeeds();
}

/// ENOMEM in the middle of a read, at its border, and for good: back-pressure, not an error.
#[test]
fn a_post_that_is_refused_for_now_waits_and_goes_on() {
    for taken in [0, 1, 2, 3, 5, 8, 13, 21] {
        if fake(SHAPE).is_none() {
            return;
        }
        let config = RdmaConfig {
            scatter_max: 1,
            ..test_config()
        };
        let bed = Bed::with(SHAPE, config);
        let channel = bed.connect();
        bed.fabric(|fabric| fabric.wire().enomem_after(Some(taken)));
        let mut pull = bed.pull(channel, 48, 5, PATIENCE);
        for _ in 0..20 {
            bed.turn();
        }
        bed.fabric(|fabric| fabric.wire().enomem_after(None));
        assert_eq!(bed.wait(&mut pull), Ok(()), "after {taken}");
        bed.assert_landed(&pull);
        assert!(bed.transport(|transport| transport.counters().posts_refused) > 0);
        bed.give_back(pull);
        bed.restored();
    }
}

/// A drain whose flushes never come: after the marker's time the queue pair is destroyed, which
/// is an end too.
#[test]
fn flushes_that_never_come_end_by_the_destroy() {
    let Some(bed) = fake(HELD) else { return };
    let channel = bed.connect();
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    bed.fabric(|fabric| fabric.wire().lose_flushes(true));
    bed.hub.close_channel(channel);
    assert_eq!(bed.wait(&mut pull), Err(EndReason::ChannelKilled));
    bed.give_back(pull);
    bed.restored();
    let counters = bed.transport(|transport| transport.counters());
    assert!(counters.completions_lost > 0 && counters.pairs_stuck == 0);
    bed.fabric(|fabric| fabric.wire().lose_flushes(false));
    bed.next_transfer_succeeds();
}

/// Neither flushes nor a destroy: the pages are quarantined, and only they.
#[test]
fn a_queue_pair_that_cannot_be_destroyed_costs_its_pages_and_nothing_else() {
    let Some(bed) = fake(HELD) else { return };
    let channel = bed.connect();
    let mut pull = bed.pull(channel, 16, 8, 10 * SECOND);
    bed.fabric(|fabric| {
        fabric.wire().lose_flushes(true);
        fabric.wire().destroy_fails(true);
    });
    bed.hub.close_channel(channel);
    assert_eq!(bed.wait(&mut pull), Err(EndReason::ChannelKilled));
    bed.give_back(pull);
    let begun = std::time::Instant::now();
    while bed.ledger.with(|ledger| ledger.counts().quarantined) == 0 {
        assert!(begun.elapsed() < PATIENCE, "they are quarantined");
        bed.turn();
    }
    let counts = bed.ledger.with(|ledger| ledger.counts());
    assert_eq!((counts.quarantined, counts.free), (16, SHAPE.pages - 16));
    assert_eq!(
        bed.transport(|transport| transport.counters().pairs_stuck),
        1
    );
    bed.fabric(|fabric| {
        fabric.wire().lose_flushes(false);
        fabric.wire().destroy_fails(false);
    });
    let channel = bed.connect();
    let mut next = bed.pull(channel, 32, 8, 10 * SECOND);
    assert_eq!(bed.wait(&mut next), Ok(()));
    bed.give_back(next);
}

#[test]
fn a_deregistered_region_is_an_access_error() {
    let Some(bed) = fake(HELD) else { return };
    let channel = bed.connect();
    let mut pull = bed.pull(channel, 48, 8, 10 * SECOND);
    bed.fabric(|fabric| fabric.wire().forget_far_memory());
    let failed = Err(EndReason::Failed(code::VERBS | sys::IBV_WC_REM_ACCESS_ERR));
    assert_eq!(bed.wait(&mut pull), failed);
    bed.give_back(pull);
    bed.restored();
}

/// DEVICE_FATAL ends every channel at once and refuses new ones by name.
#[test]
fn a_device_that_dies_ends_all_its_channels_at_once() {
    let Some(bed) = fake(HELD) else { return };
    let channels = [bed.connect(), bed.connect()];
    let mut pulls = channels.map(|channel| bed.pull(channel, 16, 4, 10 * SECOND));
    bed.stepping.set(false);
    bed.fabric(|fabric| fabric.wire().device_fatal());
    let fatal = EndReason::Failed(code::VERBS_EVENT | sys::IBV_EVENT_DEVICE_FATAL);
    for pull in &mut pulls {
        assert_eq!(bed.wait(pull), Err(fatal));
    }
    pulls.into_iter().for_each(|pull| bed.give_back(pull));
    bed.restored();
    let refused = bed.rig.borrow_mut().0.try_connect(9);
    assert!(refused.is_err_and(|error| error.to_string().contains("broken")));
}
