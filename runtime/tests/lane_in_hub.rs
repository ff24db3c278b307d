//! A lane under the completion contract: a hub's slots complete through it, a deadline ends a
//! wait while the job runs on, and its guards come back only when the job has ended.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod support;

use kvserve_runtime::lane::{Lane, LaneConfig};
use kvserve_runtime::{
    ChannelKind, Deadline, EndReason, GuardKeeper, GuardToken, Hub, HubLimits, Nanos, PollPolicy,
};
use std::cell::{Cell, RefCell};
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;
use support::launch;

#[derive(Default)]
struct Released(Cell<u32>);

impl GuardKeeper for Released {
    fn release(&self, guards: GuardToken) {
        self.0.set(self.0.get() + guards.number().get());
    }
    fn quarantine(&self, _guards: GuardToken) {
        panic!("a lane's job ends, so nothing is quarantined");
    }
}

fn within(span: Duration) -> Deadline {
    Deadline::after(Nanos::now(), span)
}

#[test]
fn thousands_of_steps_complete_their_slots() {
    let run = launch("steps", |shard| async move {
        let hub = Hub::new(HubLimits::default(), Rc::new(Released::default()));
        let lane = Lane::spawn(LaneConfig::new("steps"), |job: &mut u64| *job += 1).unwrap();
        let lane = Rc::new(RefCell::new(lane));
        let source = hub.add_source(lane.clone());
        let channel = hub
            .open_channel(ChannelKind::EngineLane, source, 8)
            .unwrap();
        let polling = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Armed));
        for number in 0..5_000 {
            let step = hub
                .begin("step", within(Duration::from_secs(30)), None)
                .unwrap();
            let work = hub.reserve(step.slot(), channel, 1).unwrap();
            lane.borrow_mut().submit(work, number).unwrap();
            step.await.unwrap();
            assert_eq!(lane.borrow_mut().collect(), Some(number + 1));
        }
        hub.stop();
        polling.await;
    });
    run.join().unwrap();
}

#[test]
fn a_deadline_ends_the_wait_and_the_jobs_end_frees_its_memory() {
    let (go, gate) = mpsc::channel::<()>();
    let run = launch("deadline", move |shard| async move {
        let keeper = Rc::new(Released::default());
        let hub = Hub::new(HubLimits::default(), keeper.clone());
        let lane = Lane::spawn(LaneConfig::new("slow"), move |_: &mut u64| {
            gate.recv().unwrap();
        })
        .unwrap();
        let lane = Rc::new(RefCell::new(lane));
        let source = hub.add_source(lane.clone());
        let channel = hub
            .open_channel(ChannelKind::EngineLane, source, 8)
            .unwrap();
        let polling = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Adaptive));
        let guards = GuardToken::issue(NonZeroU32::new(7).unwrap());
        let limit = within(Duration::from_millis(30));
        let step = hub.begin("step", limit, Some(guards)).unwrap();
        let work = hub.reserve(step.slot(), channel, 1).unwrap();
        lane.borrow_mut().submit(work, 1).unwrap();
        assert_eq!(step.await, Err(EndReason::Deadline));
        shard.sleep(Duration::from_millis(50)).await;
        assert_eq!(keeper.0.get(), 0, "the job may still touch the memory");
        go.send(()).unwrap();
        let patience = within(Duration::from_secs(10));
        while keeper.0.get() == 0 && !patience.passed(Nanos::now()) {
            shard.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(keeper.0.get(), 7, "released at the physical end");
        hub.stop();
        polling.await;
    });
    run.join().unwrap();
}
