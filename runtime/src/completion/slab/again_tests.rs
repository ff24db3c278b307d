//! Posted again after the loss of a channel (PROTOCOL E5), one rule a test.

use super::tests::{SOURCE, begin, core_with, done, ms, outcome, token};
use super::*;
use crate::completion::ids::{ChannelId, ChannelKind, Completed, CompletionStatus};
use crate::source::Reap;
use std::time::Duration;

/// A slot without guards that ends at 100 ms.
fn begin_unguarded(core: &mut Slab) -> SlotId {
    let deadline = Deadline::after(ms(0), Duration::from_millis(100));
    core.begin("test", deadline, None, ms(0)).expect("room")
}

fn quiet(core: &mut Slab, channel: ChannelId, at: Nanos) {
    core.reaped(channel, Reap::Quiet, at);
}

#[test]
fn a_lost_post_is_owed_only_once_its_channel_is_quiet() {
    let (mut core, first) = core_with(ChannelKind::Simulated);
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    let work = core.reserve(slot, first, 2, ms(0)).expect("room");
    core.complete(done(work), ms(1));
    assert_eq!(outcome(&mut core, slot), Poll::Pending);
    core.close_channel(first, ms(2));
    assert_eq!(outcome(&mut core, slot), Poll::Pending, "it waits on");
    core.reaped(first, Reap::Draining(1), ms(3));
    assert_eq!(core.posts_owed(slot), 0, "the old channel may still write");
    assert!(core.effects.wakes.is_empty());
    quiet(&mut core, first, ms(4));
    assert_eq!(core.posts_owed(slot), 1);
    assert_eq!(core.effects.wakes.len(), 1);
    assert!(core.effects.guards.is_empty(), "the slot keeps its memory");
    let second = core
        .open_channel(ChannelKind::Simulated, SOURCE, 8, ms(4))
        .expect("open");
    let again = core.reserve(slot, second, 1, ms(4)).expect("room");
    assert_eq!(core.posts_owed(slot), 0);
    core.complete(done(again), ms(5));
    assert_eq!(outcome(&mut core, slot), Poll::Ready(Ok(())));
    assert_eq!(core.effects.guards, [GuardEnd::Release(token(1))]);
    let counters = core.counters();
    assert_eq!((counters.posts_owed, counters.posts_reposted), (1, 1));
}

#[test]
fn a_slot_that_owes_is_not_done_whatever_else_completes() {
    let (mut core, first) = core_with(ChannelKind::Simulated);
    let second = core
        .open_channel(ChannelKind::Tcp, SOURCE, 8, ms(0))
        .expect("open");
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    core.reserve(slot, first, 1, ms(0)).expect("room");
    let on_second = core.reserve(slot, second, 1, ms(0)).expect("room");
    core.close_channel(first, ms(1));
    quiet(&mut core, first, ms(2));
    core.complete(done(on_second), ms(3));
    assert_eq!(outcome(&mut core, slot), Poll::Pending);
    let again = core.reserve(slot, second, 1, ms(4)).expect("room");
    core.complete(done(again), ms(5));
    assert_eq!(outcome(&mut core, slot), Poll::Ready(Ok(())));
}

#[test]
fn a_completion_that_comes_while_the_channel_drains_still_counts() {
    let (mut core, channel) = core_with(ChannelKind::Rdma);
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    let work = core.reserve(slot, channel, 1, ms(0)).expect("room");
    core.close_channel(channel, ms(1));
    core.complete(done(work), ms(2));
    assert_eq!(outcome(&mut core, slot), Poll::Ready(Ok(())));
    quiet(&mut core, channel, ms(3));
    assert_eq!(core.counters().posts_owed, 0);
}

#[test]
fn flushed_posts_end_with_their_channel_and_those_before_them_were_done() {
    let (mut core, channel) = core_with(ChannelKind::Tcp);
    let slots: Vec<_> = (0..3).map(|_| begin_unguarded(&mut core)).collect();
    let works: Vec<_> = slots
        .iter()
        .map(|slot| {
            core.allow_reposts(*slot);
            core.reserve(*slot, channel, 1, ms(0)).expect("room")
        })
        .collect();
    let flushed = |work| Completed {
        work,
        status: CompletionStatus::Flushed(104),
    };
    core.complete(flushed(works[1]), ms(1));
    core.complete(flushed(works[2]), ms(1));
    // A source that says more than it may changes nothing.
    core.complete(done(works[2]), ms(1));
    assert_eq!(outcome(&mut core, slots[0]), Poll::Ready(Ok(())));
    assert!(!core.takes_posts(channel));
    assert_eq!(core.posts_owed(slots[1]) + core.posts_owed(slots[2]), 0);
    quiet(&mut core, channel, ms(2));
    for slot in &slots[1..] {
        assert_eq!(outcome(&mut core, *slot), Poll::Pending);
        assert_eq!(core.posts_owed(*slot), 1);
    }
    let counters = core.counters();
    assert_eq!((counters.posts_lost, counters.posts_outstanding), (2, 0));
    assert_eq!(counters.completions_duplicate, 0);
}

#[test]
fn a_flushed_post_of_a_slot_that_may_not_post_again_fails_with_its_code() {
    let (mut core, channel) = core_with(ChannelKind::Tcp);
    let slot = begin(&mut core);
    let work = core.reserve(slot, channel, 1, ms(0)).expect("room");
    let status = CompletionStatus::Flushed(104);
    core.complete(Completed { work, status }, ms(1));
    assert_eq!(
        outcome(&mut core, slot),
        Poll::Ready(Err(EndReason::Failed(104)))
    );
    assert!(core.effects.guards.is_empty(), "not quiet yet");
    quiet(&mut core, channel, ms(2));
    assert_eq!(core.effects.guards, [GuardEnd::Release(token(1))]);
}

#[test]
fn work_is_posted_three_times_at_most() {
    let (mut core, mut channel) = core_with(ChannelKind::Simulated);
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    for post in 1..=3 {
        core.reserve(slot, channel, 1, ms(0)).expect("room");
        core.close_channel(channel, ms(1));
        if post < 3 {
            quiet(&mut core, channel, ms(1));
            assert_eq!(outcome(&mut core, slot), Poll::Pending, "post {post}");
            channel = core
                .open_channel(ChannelKind::Simulated, SOURCE, 8, ms(1))
                .expect("open");
        }
    }
    let ended = Poll::Ready(Err(EndReason::ChannelKilled));
    assert_eq!(outcome(&mut core, slot), ended);
    assert_eq!(core.counters().slots_out_of_posts, 1);
    assert!(core.effects.guards.is_empty(), "the third channel drains");
    quiet(&mut core, channel, ms(2));
    assert_eq!(core.effects.guards, [GuardEnd::Release(token(1))]);
}

#[test]
fn a_stuck_channel_ends_the_slot_and_quarantines_its_memory() {
    let (mut core, channel) = core_with(ChannelKind::Rdma);
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    core.reserve(slot, channel, 2, ms(0)).expect("room");
    core.close_channel(channel, ms(1));
    core.reaped(channel, Reap::Stuck, ms(2));
    let ended = Poll::Ready(Err(EndReason::ChannelStuck));
    assert_eq!(outcome(&mut core, slot), ended);
    assert_eq!(core.effects.guards, [GuardEnd::Quarantine(token(1))]);
    assert_eq!(core.slots_live(), 0);
}

#[test]
fn a_slot_that_owes_ends_by_its_deadline_with_its_memory_free() {
    let (mut core, channel) = core_with(ChannelKind::Simulated);
    let slot = begin(&mut core);
    core.allow_reposts(slot);
    core.reserve(slot, channel, 1, ms(0)).expect("room");
    core.close_channel(channel, ms(1));
    quiet(&mut core, channel, ms(2));
    assert!(core.fire_deadline(ms(100)));
    let ended = Poll::Ready(Err(EndReason::Deadline));
    assert_eq!(outcome(&mut core, slot), ended);
    assert_eq!(core.effects.guards, [GuardEnd::Release(token(1))]);
}
