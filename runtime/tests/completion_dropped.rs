//! Dropping a future at each point where it may be dropped: it cancels, never blocks, ends the
//! slot once, and the guards come back once, not before the posts have ended.

mod completion_support;

use completion_support::{Rig, counting_waker, token};
use kvserve_runtime::{ChannelKind, Completion, GuardKeeper, GuardToken, Hub, HubLimits, WorkId};
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

fn begin(rig: &Rig, posts: usize) -> (Completion, Option<WorkId>) {
    let completion = rig.hub.begin("test", rig.in_ms(100), token(1));
    let completion = completion.expect("room");
    let work = (posts > 0).then(|| {
        (rig.hub)
            .reserve(completion.slot(), rig.channel, posts)
            .expect("room")
    });
    (completion, work)
}

fn poll(completion: &mut Completion) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    Pin::new(completion).poll(&mut cx).is_ready()
}

fn check_one_cancel(rig: &Rig) {
    let counted = rig.hub.counters();
    assert_eq!((counted.ended(), counted.ended_cancelled), (1, 1));
    assert_eq!(counted.slots_live, 0);
    assert_eq!(rig.released(), [1]);
    assert!(rig.quarantined().is_empty());
}

#[test]
fn before_it_was_polled_and_before_anything_was_posted() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (completion, _) = begin(&rig, 0);
    drop(completion);
    rig.turn();
    check_one_cancel(&rig);
}

#[test]
fn before_it_was_polled_with_posts_outstanding() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (completion, work) = begin(&rig, 2);
    drop(completion);
    rig.turn();
    assert!(rig.released().is_empty());
    rig.complete(work.expect("posted").offset(1));
    check_one_cancel(&rig);
}

#[test]
fn while_it_waits() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (mut completion, work) = begin(&rig, 1);
    assert!(!poll(&mut completion));
    drop(completion);
    rig.turn();
    assert!(rig.released().is_empty());
    rig.complete(work.expect("posted"));
    check_one_cancel(&rig);
}

#[test]
fn between_two_of_its_completions() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (mut completion, work) = begin(&rig, 2);
    let work = work.expect("posted");
    rig.complete(work);
    assert!(!poll(&mut completion));
    drop(completion);
    rig.turn();
    assert!(rig.released().is_empty());
    rig.complete(work.offset(1));
    check_one_cancel(&rig);
}

#[test]
fn after_it_was_woken_and_before_it_took_its_result() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (mut completion, work) = begin(&rig, 1);
    assert!(!poll(&mut completion));
    rig.complete(work.expect("posted"));
    assert_eq!(rig.hub.counters().slots_live, 1, "held by the future");
    drop(completion);
    rig.turn();
    let counted = rig.hub.counters();
    assert_eq!((counted.ended_ok, counted.ended()), (1, 1));
    assert_eq!(counted.slots_live, 0);
    assert_eq!(rig.released(), [1]);
}

#[test]
fn after_its_deadline_with_posts_outstanding() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (completion, work) = begin(&rig, 1);
    rig.pass_ms(101);
    drop(completion);
    rig.turn();
    assert!(rig.released().is_empty());
    rig.complete(work.expect("posted"));
    let counted = rig.hub.counters();
    assert_eq!((counted.ended_deadline, counted.ended()), (1, 1));
    assert_eq!(counted.slots_live, 0);
    assert_eq!(rig.released(), [1]);
}

#[test]
fn after_it_took_its_result() {
    let rig = Rig::new(ChannelKind::Rdma);
    let (mut completion, work) = begin(&rig, 1);
    rig.complete(work.expect("posted"));
    assert!(poll(&mut completion));
    let (other, _) = begin(&rig, 0);
    drop(completion);
    rig.turn();
    assert_eq!(rig.hub.counters().ended(), 1, "the other waits on");
    drop(other);
}

#[test]
fn either_half_of_a_oneshot() {
    let rig = Rig::new(ChannelKind::Tcp);
    let (wakes, waker) = counting_waker();
    let pair = rig.hub.oneshot::<u32>("test", rig.in_ms(100));
    let (completer, mut wait) = pair.expect("room");
    let mut cx = Context::from_waker(&waker);
    assert!(Pin::new(&mut wait).poll(&mut cx).is_pending());
    drop(wait);
    assert!(completer.is_abandoned());
    assert_eq!(completer.complete(1), Err(1));
    assert_eq!(wakes.count(), 0, "nobody is woken for nothing");
    assert_eq!(rig.hub.counters().slots_live, 0);
}

/// A keeper that, from within its call, drops futures and begins waits on the same hub.
#[derive(Default)]
struct Meddler {
    hub: RefCell<Option<Hub>>,
    others: RefCell<Vec<Completion>>,
    released: RefCell<Vec<u32>>,
}

impl GuardKeeper for Meddler {
    fn release(&self, guards: GuardToken) {
        self.released.borrow_mut().push(guards.number().get());
        let others: Vec<Completion> = self.others.borrow_mut().drain(..).collect();
        drop(others);
        if let Some(hub) = self.hub.borrow_mut().take() {
            let deadline = kvserve_runtime::Deadline::after(hub.now(), Default::default());
            let begun = hub.begin("meddler", deadline, token(7));
            drop(begun);
            hub.counters();
        }
    }

    fn quarantine(&self, _guards: GuardToken) {}
}

#[test]
fn inside_a_keeper_that_calls_back_into_the_hub() {
    let keeper = Rc::new(Meddler::default());
    let limits = HubLimits { slots_max: 8 };
    let hub = Hub::with_clock(limits, keeper.clone(), completion_support::clock);
    let deadline = kvserve_runtime::Deadline::after(hub.now(), std::time::Duration::from_secs(1));
    let first = hub.begin("first", deadline, token(1)).expect("room");
    let second = hub.begin("second", deadline, token(2)).expect("room");
    keeper.others.borrow_mut().push(second);
    keeper.hub.replace(Some(hub.clone()));
    drop(first);
    hub.turn(hub.now());
    hub.turn(hub.now());
    assert_eq!(keeper.released.borrow().as_slice(), [1, 2, 7]);
    assert_eq!(hub.counters().slots_live, 0);
}

/// A waker whose drop drops a future of the same hub, as the last waker of a dead task does.
struct LastWaker {
    _held: std::sync::Mutex<SendAnyway>,
}

struct SendAnyway {
    _completion: Completion,
}

// SAFETY: the test runs on one thread; the waker never leaves it.
unsafe impl Send for SendAnyway {}

impl Wake for LastWaker {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn inside_the_drop_of_a_waker_that_the_hub_held() {
    let rig = Rig::new(ChannelKind::Tcp);
    let (inner, _) = begin(&rig, 0);
    let outer = rig.hub.begin("outer", rig.in_ms(100), token(2));
    let mut outer = outer.expect("room");
    let held = SendAnyway { _completion: inner };
    let waker = Waker::from(Arc::new(LastWaker { _held: held.into() }));
    assert!(
        Pin::new(&mut outer)
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    );
    drop(waker);
    drop(outer);
    rig.turn();
    assert_eq!(rig.hub.counters().slots_live, 0);
    assert_eq!(rig.hub.counters().ended_cancelled, 2);
}
