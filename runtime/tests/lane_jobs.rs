//! Engine lanes: order, bounds, kill and reap, completions by descriptor, and the sentinel's
//! eye on them.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod support;

use kvserve_runtime::completion::{ChannelId, ChannelKind, Completed, CompletionStatus, WorkId};
use kvserve_runtime::lane::{Lane, LaneConfig, LanePulse, LaneRefusal};
use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use kvserve_runtime::source::{CompletionSource, Reap};
use kvserve_runtime::time::Nanos;
use std::os::fd::RawFd;
use std::sync::mpsc;
use std::time::Duration;
use support::{health, wait_until};

const CHANNEL: ChannelId = ChannelId {
    kind: ChannelKind::EngineLane,
    index: 1,
};

fn work(position: u64) -> WorkId {
    WorkId::new(CHANNEL, position)
}

fn poll<J: Send + 'static>(lane: &mut Lane<J>) -> Vec<Completed> {
    let mut out = Vec::new();
    let count = lane.poll(Nanos::now(), &mut out);
    assert_eq!(count, out.len());
    out
}

fn readable(descriptor: RawFd, limit: Duration) -> bool {
    let mut wait = libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd for the whole call.
    unsafe { libc::poll(&mut wait, 1, limit.as_millis() as i32) == 1 }
}

/// Ends jobs one by one: a job waits until its word comes.
fn gated(jobs_max: usize) -> (Lane<u32>, mpsc::Sender<()>) {
    let (go, gate) = mpsc::channel();
    let config = LaneConfig {
        jobs_max,
        ..LaneConfig::new("gated")
    };
    let lane = Lane::spawn(config, move |job: &mut u32| {
        gate.recv().expect("the test opens the gate");
        *job += 1000;
    })
    .unwrap();
    (lane, go)
}

#[test]
fn a_hundred_thousand_jobs_end_in_order_and_wake_by_descriptor() {
    let config = LaneConfig {
        jobs_max: 8,
        ..LaneConfig::new("counts")
    };
    let mut lane = Lane::spawn(config, |job: &mut u64| *job *= 2).unwrap();
    const JOBS: u64 = 100_000;
    let (mut submitted, mut completed, mut parks) = (0, 0, 0);
    while completed < JOBS {
        while submitted < JOBS {
            match lane.submit(work(submitted), submitted) {
                Ok(()) => submitted += 1,
                Err((job, LaneRefusal::Full { held: 8, max: 8 })) => {
                    assert_eq!(job, submitted);
                    break;
                }
                Err((_, refusal)) => panic!("{refusal}"),
            }
        }
        let mut ended = poll(&mut lane);
        if ended.is_empty() {
            // As the poll loop does: arm, poll once more, park.
            let descriptor = lane.arm().expect("work is in flight");
            ended = poll(&mut lane);
            if ended.is_empty() {
                parks += 1;
                assert!(readable(descriptor, Duration::from_secs(20)), "a lost wake");
            }
        }
        for end in ended {
            assert_eq!(end.work, work(completed));
            assert_eq!(end.status, CompletionStatus::Success);
            assert_eq!(lane.collect(), Some(completed * 2));
            completed += 1;
        }
    }
    assert_eq!((lane.in_flight(), lane.collect()), (0, None));
    assert_eq!(lane.arm(), None);
    println!("{parks} parks");
}

#[test]
fn uncollected_jobs_count_against_the_bound() {
    let (mut lane, go) = gated(2);
    lane.submit(work(0), 0).unwrap();
    lane.submit(work(1), 1).unwrap();
    let full = LaneRefusal::Full { held: 2, max: 2 };
    assert_eq!(lane.submit(work(2), 2), Err((2, full)));
    go.send(()).unwrap();
    wait_until(Duration::from_secs(10), || !poll(&mut lane).is_empty()).unwrap();
    assert_eq!(lane.submit(work(2), 2), Err((2, full)));
    assert_eq!(lane.collect(), Some(1000));
    lane.submit(work(2), 2).unwrap();
    go.send(()).unwrap();
    go.send(()).unwrap();
    wait_until(Duration::from_secs(10), || {
        poll(&mut lane);
        lane.in_flight() == 0
    })
    .unwrap();
}

#[test]
fn a_killed_lane_drains_its_running_job_and_runs_no_other() {
    let (mut lane, go) = gated(4);
    for position in 0..3 {
        lane.submit(work(position), position as u32).unwrap();
    }
    // The first one runs: it has been taken from the queue.
    wait_until(Duration::from_secs(10), || lane.pulse().progress() > 0).unwrap();
    lane.kill(CHANNEL);
    lane.kill(CHANNEL);
    assert_eq!(lane.reap(CHANNEL), Reap::Draining(3));
    assert_eq!(lane.submit(work(3), 3), Err((3, LaneRefusal::Killed)));
    go.send(()).unwrap();
    let mut ended = Vec::new();
    wait_until(Duration::from_secs(10), || {
        ended.extend(poll(&mut lane));
        ended.len() == 3
    })
    .unwrap();
    let cancelled = CompletionStatus::Error(libc::ECANCELED as u32);
    assert_eq!(ended[0].status, CompletionStatus::Success);
    assert_eq!((ended[1].status, ended[2].status), (cancelled, cancelled));
    assert_eq!(lane.reap(CHANNEL), Reap::Quiet);
    let jobs: Vec<_> = std::iter::from_fn(|| lane.collect()).collect();
    assert_eq!(jobs, [1000, 1, 2], "the last two were not run");
    // The lane lives on under another channel.
    let next = ChannelId {
        index: 2,
        ..CHANNEL
    };
    lane.submit(WorkId::new(next, 0), 7).unwrap();
    go.send(()).unwrap();
    wait_until(Duration::from_secs(10), || !poll(&mut lane).is_empty()).unwrap();
    assert_eq!(lane.collect(), Some(1007));
    lane.shut_down().join().unwrap();
}

#[test]
fn a_worker_can_fail_its_work() {
    let mut lane = Lane::spawn(LaneConfig::new("fails"), |job: &mut u32| match *job {
        0 => CompletionStatus::Success,
        code => CompletionStatus::Error(code),
    })
    .unwrap();
    lane.submit(work(0), 42).unwrap();
    let mut ended = Vec::new();
    wait_until(Duration::from_secs(10), || {
        ended = poll(&mut lane);
        !ended.is_empty()
    })
    .unwrap();
    assert_eq!(ended[0].status, CompletionStatus::Error(42));
}

#[test]
fn a_core_that_does_not_exist_is_an_error_that_names_it() {
    let config = LaneConfig {
        core: Some(1023),
        ..LaneConfig::new("nowhere")
    };
    let error = Lane::spawn(config, |_: &mut ()| ()).err().unwrap();
    assert!(error.to_string().contains("1023"), "{error}");
}

#[test]
fn a_wedged_lane_is_told_a_slow_one_that_moves_is_not() {
    let sentinel = Sentinel::start(SentinelConfig {
        health_listen: Some("127.0.0.1:0".parse().unwrap()),
        ..SentinelConfig::default()
    })
    .unwrap();
    let address = sentinel.health_addr().unwrap();
    let slow = LaneConfig::new("slow");
    let pulse = slow.pulse.clone();
    let (stop, stopped) = mpsc::channel::<()>();
    let mut slow = Lane::spawn(slow, move |_: &mut u32| {
        while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            LanePulse::advance(&pulse);
            std::thread::sleep(Duration::from_millis(20));
        }
    })
    .unwrap();
    let (mut wedged, go) = gated(1);
    sentinel.watch_lane("slow", slow.pulse());
    sentinel.watch_lane("wedged", wedged.pulse());
    slow.submit(work(0), 0).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(health(address).0, 200, "a lane without a job is healthy");
    wedged.submit(work(0), 0).unwrap();
    let took = wait_until(Duration::from_secs(5), || health(address).0 == 503)
        .expect("a wedged lane is told");
    let (_, body) = health(address);
    println!("503 after {took:?}: {body}");
    assert!(body.contains(r#""kind":"lane","name":"wedged""#), "{body}");
    assert!(!body.contains("slow"), "{body}");
    assert!(took > Duration::from_millis(900), "{took:?}");
    go.send(()).unwrap();
    wait_until(Duration::from_secs(5), || health(address).0 == 200).expect("it heals");
    drop(stop);
    slow.shut_down().join().unwrap();
    drop(wedged);
    wait_until(Duration::from_secs(5), || {
        sentinel.health().standings().is_empty()
    })
    .expect("lanes that are gone are watched no more");
}
