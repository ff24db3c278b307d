//! What happens to the whole process: a panic on a shard or lane ends it, a wedge ends it at
//! the hard limit, a freeze does not, signals drain it, and idle it costs next to nothing.
//! Each test runs this binary again as the process in question.

mod support;

use kvserve_runtime::completion::{ChannelId, ChannelKind, WorkId};
use kvserve_runtime::lane::{Lane, LaneConfig};
use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use kvserve_runtime::shard::{AbortOnUnwind, ShardHandle};
use kvserve_runtime::signals::{self, Drain};
use kvserve_runtime::{Shard, ShardConfig};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};
use support::{child, is_child, shard, wait_until};

/// How long a child may take for what it should do; it is killed then.
const LIMIT: Duration = Duration::from_secs(60);

fn end_of(mut child: Child) -> (ExitStatus, String) {
    let ended = wait_until(LIMIT, || child.try_wait().unwrap().is_some());
    if ended.is_none() {
        child.kill().unwrap();
    }
    let mut errors = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut errors)
        .unwrap();
    assert!(ended.is_some(), "the child goes on for ever: {errors}");
    (child.wait().unwrap(), errors)
}

fn signal(child: &Child, number: i32) {
    // SAFETY: a signal to our own child, which has not been waited for.
    let code = unsafe { libc::kill(child.id() as i32, number) };
    assert_eq!(code, 0);
}

/// Reads the child's output until it says `word`.
fn wait_for_word(child: &mut Child, word: &str) {
    let output = BufReader::new(child.stdout.as_mut().unwrap());
    for line in output.lines() {
        if line.unwrap().contains(word) {
            return;
        }
    }
    panic!("the child ended without saying `{word}`");
}

fn idle_shards(count: usize, drain: &Drain) -> Vec<ShardHandle<()>> {
    let configs: Vec<ShardConfig> = (0..count).map(|i| shard(&format!("shard{i}"))).collect();
    let drain = drain.clone();
    Shard::launch_all(&configs, move |_| async move { drain.wait().await }).unwrap()
}

fn sentinel_with(limit: Duration) -> Sentinel {
    Sentinel::start(SentinelConfig {
        shard_abort_after: limit,
        lane_abort_after: limit,
        ..SentinelConfig::default()
    })
    .unwrap()
}

#[test]
fn a_panic_on_a_shard_ends_the_process_and_says_why() {
    if is_child("panic") {
        let drain = Drain::new();
        let _others = idle_shards(1, &drain);
        let bad = Shard::launch(shard("bad"), |shard| async move {
            shard
                .spawn(async { panic!("seven is not a bound") })
                .detach();
            shard.sleep(LIMIT).await;
        })
        .unwrap();
        bad.join().unwrap();
        return;
    }
    let (status, errors) = end_of(child(
        "a_panic_on_a_shard_ends_the_process_and_says_why",
        "panic",
    ));
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{errors}");
    assert!(
        errors.contains("bad panicked: seven is not a bound"),
        "{errors}"
    );
}

#[test]
fn a_panic_in_an_engine_job_ends_the_process() {
    if is_child("lane-panic") {
        let mut lane = Lane::spawn(LaneConfig::new("engine0"), |job: &mut u32| {
            assert!(*job > 0, "no such layer");
        })
        .unwrap();
        let channel = ChannelId {
            kind: ChannelKind::EngineLane,
            index: 0,
        };
        lane.submit(WorkId::new(channel, 0), 0).unwrap();
        std::thread::sleep(LIMIT);
        return;
    }
    let (status, errors) = end_of(child(
        "a_panic_in_an_engine_job_ends_the_process",
        "lane-panic",
    ));
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{errors}");
    assert!(
        errors.contains("`engine0` panicked: no such layer"),
        "{errors}"
    );
}

#[test]
fn a_guarded_plain_thread_that_panics_ends_the_process() {
    let test = "a_guarded_plain_thread_that_panics_ends_the_process";
    if is_child("guard") {
        let body = std::thread::spawn(|| {
            let _guard = AbortOnUnwind::new("the body of a plain thread");
            panic!("out of range");
        });
        assert!(body.join().is_err(), "not reached");
        return;
    }
    let (status, errors) = end_of(child(test, "guard"));
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{errors}");
    assert!(
        errors.contains("the body of a plain thread panicked"),
        "{errors}"
    );
}

#[test]
fn a_wedged_shard_ends_the_process_at_the_hard_limit() {
    if is_child("wedge") {
        let sentinel = sentinel_with(Duration::from_secs(1));
        let bad = Shard::launch(shard("bad"), |_| async {
            std::thread::sleep(LIMIT);
        })
        .unwrap();
        sentinel.watch_shard(bad.remote());
        bad.join().unwrap();
        return;
    }
    let start = Instant::now();
    let (status, errors) = end_of(child(
        "a_wedged_shard_ends_the_process_at_the_hard_limit",
        "wedge",
    ));
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{errors}");
    assert!(
        errors.contains("a watched shard has stood still"),
        "{errors}"
    );
    assert!(start.elapsed() > Duration::from_millis(900));
}

#[test]
fn a_frozen_process_that_goes_on_does_not_end_itself() {
    if is_child("freeze") {
        let drain = Drain::new();
        signals::install(&drain).unwrap();
        let sentinel = sentinel_with(Duration::from_millis(500));
        let shards = idle_shards(2, &drain);
        let mut lane = Lane::spawn(LaneConfig::new("engine0"), |_: &mut u32| {
            std::thread::sleep(Duration::from_millis(100));
        })
        .unwrap();
        sentinel.watch_lane("engine0", lane.pulse());
        for shard in &shards {
            sentinel.watch_shard(shard.remote());
        }
        let channel = ChannelId {
            kind: ChannelKind::EngineLane,
            index: 0,
        };
        println!("ready");
        let mut position = 0;
        while !drain.wait_timeout(Duration::from_millis(20)) {
            // The lane always has a job, also at the moment of the freeze.
            let mut ended = Vec::new();
            kvserve_runtime::CompletionSource::poll(&mut lane, Default::default(), &mut ended);
            while lane.collect().is_some() {}
            if lane.submit(WorkId::new(channel, position), 0).is_ok() {
                position += 1;
            }
        }
        for shard in shards {
            shard.join().unwrap();
        }
        return;
    }
    let mut child = child(
        "a_frozen_process_that_goes_on_does_not_end_itself",
        "freeze",
    );
    wait_for_word(&mut child, "ready");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        signal(&child, libc::SIGSTOP);
        // Three times the hard limit.
        std::thread::sleep(Duration::from_millis(1500));
        signal(&child, libc::SIGCONT);
    }
    std::thread::sleep(Duration::from_millis(700));
    signal(&child, libc::SIGTERM);
    let (status, errors) = end_of(child);
    assert!(status.success(), "{status}: {errors}");
}

#[test]
fn sigterm_and_sigint_drain_and_a_second_sigint_ends_at_once() {
    if is_child("drain") || is_child("stuck") {
        let drain = Drain::new();
        signals::install(&drain).unwrap();
        assert!(signals::install(&drain).is_err(), "once per process");
        let shards = idle_shards(2, &drain);
        println!("ready");
        for shard in shards {
            shard.join().unwrap();
        }
        assert!(drain.requested());
        println!("drained");
        if is_child("stuck") {
            std::thread::sleep(LIMIT);
        }
        return;
    }
    let test = "sigterm_and_sigint_drain_and_a_second_sigint_ends_at_once";
    for number in [libc::SIGTERM, libc::SIGINT] {
        let mut child = child(test, "drain");
        wait_for_word(&mut child, "ready");
        signal(&child, number);
        let (status, errors) = end_of(child);
        assert!(status.success(), "{status}: {errors}");
    }
    let mut child = child(test, "stuck");
    wait_for_word(&mut child, "ready");
    signal(&child, libc::SIGINT);
    wait_for_word(&mut child, "drained");
    signal(&child, libc::SIGINT);
    let (status, errors) = end_of(child);
    assert_eq!(status.code(), Some(130), "{errors}");
}

#[test]
fn an_idle_process_uses_less_than_one_percent_of_a_cpu() {
    if is_child("idle") {
        let drain = Drain::new();
        let sentinel = Sentinel::start(SentinelConfig {
            health_listen: Some("127.0.0.1:0".parse().unwrap()),
            ..SentinelConfig::default()
        })
        .unwrap();
        let shards = idle_shards(2, &drain);
        let lane = Lane::spawn(LaneConfig::new("engine0"), |_: &mut u32| ()).unwrap();
        sentinel.watch_lane("engine0", lane.pulse());
        for shard in &shards {
            sentinel.watch_shard(shard.remote());
        }
        std::thread::sleep(Duration::from_millis(500));
        let (start, before) = (Instant::now(), cpu_time());
        std::thread::sleep(Duration::from_secs(3));
        let used = cpu_time() - before;
        let share = used.as_secs_f64() / start.elapsed().as_secs_f64();
        println!("idle: {used:?} of CPU, {:.3} %", share * 100.0);
        let healthy = sentinel.health().healthy();
        drain.request();
        for shard in shards {
            shard.join().unwrap();
        }
        assert!(
            healthy && share < 0.01,
            "idle it uses {:.2} %",
            share * 100.0
        );
        return;
    }
    let mut child = child(
        "an_idle_process_uses_less_than_one_percent_of_a_cpu",
        "idle",
    );
    let mut said = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    let (status, errors) = end_of(child);
    print!(
        "{}",
        said.lines()
            .filter(|l| l.contains("idle:"))
            .collect::<String>()
    );
    assert!(status.success(), "{status}: {said} {errors}");
}

/// User and system time of this process so far.
fn cpu_time() -> Duration {
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable for the whole call.
    let code = unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    assert_eq!(code, 0);
    let span = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    span(usage.ru_utime) + span(usage.ru_stime)
}
