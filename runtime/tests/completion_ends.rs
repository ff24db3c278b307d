//! Each way in which a wait ends, through the hub: the waiter is told once, with the reason, and
//! the guards come back once, at the physical end.

mod completion_support;

use completion_support::{Rig, counting_waker, token};
use kvserve_runtime::{ChannelKind, CompletionStatus, EndReason, Reap};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

/// Begins a wait of 100 ms with guards 1 and `posts` posts, does `then`, and checks that the
/// waiter is woken exactly once, to `expected`.
fn ends(
    rig: &Rig,
    posts: usize,
    then: impl FnOnce(&Rig, kvserve_runtime::WorkId, kvserve_runtime::SlotId),
    expected: Result<(), EndReason>,
) {
    let completion = rig.hub.begin("test", rig.in_ms(100), token(1));
    let mut completion = pin!(completion.expect("room"));
    let slot = completion.slot();
    let work = (rig.hub).reserve(slot, rig.channel, posts).expect("room");
    let (wakes, waker) = counting_waker();
    let mut cx = Context::from_waker(&waker);
    assert!(completion.as_mut().poll(&mut cx).is_pending());
    assert_eq!(wakes.count(), 0);
    then(rig, work, slot);
    assert_eq!(wakes.count(), 1);
    assert_eq!(completion.as_mut().poll(&mut cx), Poll::Ready(expected));
    assert_eq!(rig.hub.counters().ended(), 1);
}

#[test]
fn by_all_posts_retired() {
    let rig = Rig::new(ChannelKind::Tcp);
    ends(&rig, 3, |b, work, _| b.complete(work.offset(2)), Ok(()));
    assert_eq!(rig.released(), [1]);
    assert_eq!(rig.hub.counters().slots_live, 0);
}

#[test]
fn by_an_error_with_the_sources_own_code() {
    let rig = Rig::new(ChannelKind::Tcp);
    let error = |b: &Rig, work, _| b.complete_as(work, CompletionStatus::Error(104));
    ends(&rig, 1, error, Err(EndReason::Failed(104)));
    assert_eq!(rig.released(), [1]);
}

#[test]
fn by_a_post_that_was_not_taken() {
    let rig = Rig::new(ChannelKind::Tcp);
    let refused = |b: &Rig, work, _| b.hub.unpost(work, 2, 11);
    ends(&rig, 2, refused, Err(EndReason::Failed(11)));
    rig.turn();
    assert_eq!(rig.released(), [1]);
}

#[test]
fn by_the_deadline_and_the_guards_stay_with_the_posts() {
    let rig = Rig::new(ChannelKind::Rdma);
    ends(&rig, 1, |b, _, _| b.pass_ms(101), Err(EndReason::Deadline));
    assert!(rig.released().is_empty());
    rig.source.borrow_mut().reap = Some(Reap::Quiet);
    rig.pass_ms(25);
    assert_eq!(rig.source.borrow().killed, [rig.channel]);
    assert_eq!(rig.released(), [1], "20 ms of grace, then a proof");
    assert!(!rig.hub.channel_is_open(rig.channel));
}

#[test]
fn by_the_end_of_its_session() {
    let rig = Rig::new(ChannelKind::Tcp);
    rig.source.borrow_mut().takes_back = true;
    let end = |b: &Rig, _, slot| b.hub.end(slot, EndReason::SessionEnded);
    ends(&rig, 2, end, Err(EndReason::SessionEnded));
    rig.turn();
    assert_eq!(rig.source.borrow().taken_back.len(), 2);
    assert_eq!(rig.released(), [1], "the source took the posts back");
    assert!(rig.hub.channel_is_open(rig.channel));
}

#[test]
fn by_the_death_of_its_channel() {
    let rig = Rig::new(ChannelKind::Tcp);
    let close = |b: &Rig, _, _| b.hub.close_channel(b.channel);
    ends(&rig, 1, close, Err(EndReason::ChannelKilled));
    rig.turn();
    assert_eq!(rig.source.borrow().killed, [rig.channel]);
    assert!(rig.released().is_empty());
    rig.source.borrow_mut().reap = Some(Reap::Quiet);
    rig.pass_ms(1);
    assert_eq!(rig.released(), [1]);
    assert!(rig.hub.remove_source(rig.source_id));
}

#[test]
fn a_channel_that_never_drains_is_quarantined_within_its_bound() {
    let rig = Rig::new(ChannelKind::Tcp);
    let close = |b: &Rig, _, _| b.hub.close_channel(b.channel);
    ends(&rig, 1, close, Err(EndReason::ChannelKilled));
    assert!(!rig.hub.remove_source(rig.source_id));
    rig.pass_ms(249);
    assert!(rig.quarantined().is_empty());
    rig.pass_ms(2);
    assert_eq!(rig.quarantined(), [1]);
    assert!(rig.released().is_empty());
    assert_eq!(rig.hub.counters().guards_quarantined, 1);
    assert_eq!(rig.hub.counters().slots_live, 0);
}

#[test]
fn by_a_duplicate_elsewhere_on_its_channel_which_changes_nothing_else() {
    let rig = Rig::new(ChannelKind::Tcp);
    let first = rig.hub.begin("first", rig.in_ms(100), token(9));
    let first = first.expect("room");
    let earlier = rig.hub.reserve(first.slot(), rig.channel, 1);
    let earlier = earlier.expect("room");
    rig.complete(earlier);
    assert_eq!(rig.released(), [9]);
    drop(first);
    let completion = rig.hub.begin("test", rig.in_ms(100), token(1));
    let mut completion = pin!(completion.expect("room"));
    (rig.hub)
        .reserve(completion.slot(), rig.channel, 1)
        .expect("room");
    rig.complete(earlier);
    rig.complete(earlier);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert_eq!(
        completion.as_mut().poll(&mut cx),
        Poll::Ready(Err(EndReason::ChannelKilled))
    );
    assert_eq!(rig.released(), [9]);
    assert_eq!(rig.hub.counters().completions_duplicate, 2);
    assert_eq!(rig.hub.counters().channels_killed, 1);
}

#[test]
fn a_late_completion_changes_nothing_and_is_counted() {
    let rig = Rig::new(ChannelKind::Tcp);
    rig.source.borrow_mut().reap = Some(Reap::Quiet);
    let completion = rig.hub.begin("test", rig.in_ms(10), token(1));
    let completion = completion.expect("room");
    let work = rig.hub.reserve(completion.slot(), rig.channel, 1);
    let work = work.expect("room");
    rig.pass_ms(60);
    assert_eq!(rig.released(), [1]);
    drop(completion);
    let before = rig.hub.counters();
    rig.complete(work);
    let after = rig.hub.counters();
    assert_eq!(after.completions_late, before.completions_late + 1);
    assert_eq!(after.ended(), before.ended());
    assert_eq!(rig.released(), [1]);
}

#[test]
fn a_oneshot_ends_by_its_value_its_completer_or_its_deadline() {
    let rig = Rig::new(ChannelKind::Tcp);
    let (wakes, waker) = counting_waker();
    let mut cx = Context::from_waker(&waker);

    let pair = rig.hub.oneshot::<String>("given", rig.in_ms(10));
    let (completer, wait) = pair.expect("room");
    let mut wait = pin!(wait);
    assert!(wait.as_mut().poll(&mut cx).is_pending());
    assert_eq!(completer.complete("value".into()), Ok(()));
    assert_eq!(wakes.count(), 1);
    assert_eq!(wait.as_mut().poll(&mut cx), Poll::Ready(Ok("value".into())));

    let pair = rig.hub.oneshot::<String>("dropped", rig.in_ms(10));
    let (completer, wait) = pair.expect("room");
    drop(completer);
    let dropped = Poll::Ready(Err(EndReason::CompleterDropped));
    assert_eq!(pin!(wait).poll(&mut cx), dropped);

    let pair = rig.hub.oneshot::<String>("failed", rig.in_ms(10));
    let (completer, wait) = pair.expect("room");
    completer.fail(3);
    let failed = Poll::Ready(Err(EndReason::Failed(3)));
    assert_eq!(pin!(wait).poll(&mut cx), failed);

    let pair = rig.hub.oneshot::<String>("late", rig.in_ms(10));
    let (completer, wait) = pair.expect("room");
    rig.pass_ms(11);
    assert!(completer.is_abandoned());
    assert_eq!(completer.complete("late".into()), Err("late".into()));
    let late = Poll::Ready(Err(EndReason::Deadline));
    assert_eq!(pin!(wait).poll(&mut cx), late);
    assert_eq!(rig.hub.counters().slots_live, 0);
}

#[test]
fn after_a_long_sleep_expired_waits_end_before_anything_is_polled() {
    let rig = Rig::new(ChannelKind::Tcp);
    let completion = rig.hub.begin("test", rig.in_ms(500), token(1));
    let mut completion = pin!(completion.expect("room"));
    let work = rig.hub.reserve(completion.slot(), rig.channel, 1);
    let work = work.expect("room");
    rig.sleep_ms(5000);
    rig.complete(work);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert_eq!(
        completion.as_mut().poll(&mut cx),
        Poll::Ready(Err(EndReason::Deadline)),
        "the attempt had expired while the shard was frozen"
    );
    assert_eq!(rig.released(), [1]);
}

#[test]
fn live_slots_can_be_seen() {
    let rig = Rig::new(ChannelKind::Tcp);
    let completion = rig.hub.begin("pull", rig.in_ms(100), token(1));
    let completion = completion.expect("room");
    rig.hub.set_owner(completion.slot(), 42);
    (rig.hub)
        .reserve(completion.slot(), rig.channel, 2)
        .expect("room");
    rig.pass_ms(30);
    let views = rig.hub.live();
    assert_eq!(views.len(), 1);
    let view = &views[0];
    assert_eq!((view.label, view.owner), ("pull", 42));
    assert_eq!(view.phase.label(), "waiting");
    assert_eq!(view.posts_outstanding, 2);
    assert_eq!(view.age.as_millis(), 30);
    assert_eq!(view.deadline_left.as_millis(), 70);
    drop(completion);
    assert_eq!(rig.hub.live()[0].phase.label(), "stopping");
}
