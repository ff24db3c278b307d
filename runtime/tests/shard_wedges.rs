//! A shard that stands still turns the health port 503 within a second, while the others go
//! on; when it moves again, so does the health.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod support;

use kvserve_runtime::Shard;
use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::{health, shard, wait_until};

fn sentinel() -> Sentinel {
    let config = SentinelConfig {
        health_listen: Some("127.0.0.1:0".parse().unwrap()),
        ..SentinelConfig::default()
    };
    Sentinel::start(config).unwrap()
}

/// For how long the one that stands still has done so, as the health page tells.
fn still_ms(body: &str) -> u64 {
    let digits = body
        .split("\"still_ms\":")
        .nth(1)
        .expect("the page tells how long");
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    digits[..end].parse().expect("a number")
}

#[test]
fn a_wedged_shard_is_told_within_a_second_while_the_other_goes_on() {
    let wedge = Arc::new(AtomicBool::new(false));
    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicU64::new(0));
    let (wedged, wedge_stop) = (wedge.clone(), stop.clone());
    let bad = Shard::launch(shard("bad"), move |shard| async move {
        while !wedge_stop.load(Ordering::Relaxed) {
            while wedged.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            shard.sleep(Duration::from_millis(1)).await;
        }
    })
    .unwrap();
    let (counts, good_stop) = (served.clone(), stop.clone());
    let good = Shard::launch(shard("good"), move |shard| async move {
        while !good_stop.load(Ordering::Relaxed) {
            counts.fetch_add(1, Ordering::Relaxed);
            shard.sleep(Duration::from_millis(1)).await;
        }
    })
    .unwrap();

    let sentinel = sentinel();
    let address = sentinel.health_addr().unwrap();
    sentinel.watch_shard(bad.remote());
    sentinel.watch_shard(good.remote());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(health(address), (200, r#"{"status":"ok"}"#.to_owned()));

    wedge.store(true, Ordering::Relaxed);
    let before = served.load(Ordering::Relaxed);
    let took = wait_until(Duration::from_secs(5), || health(address).0 == 503)
        .expect("a wedged shard is told");
    let (status, body) = health(address);
    println!("503 after {took:?}: {body}");
    assert_eq!(status, 503);
    assert!(body.contains(r#""kind":"shard","name":"bad""#), "{body}");
    assert!(!body.contains("good"), "{body}");
    // By the sentinel's own count: it does not count time in which it was not run itself, so
    // that this holds on a machine with too much to do (0.75 s by the clock on a quiet one).
    assert!(still_ms(&body) < 1000, "{body}");
    assert!(took > Duration::from_millis(300), "not at any hiccup");
    assert!(served.load(Ordering::Relaxed) > before, "the other goes on");
    let mut metrics = String::new();
    sentinel.health().write_metrics("", &mut metrics);
    assert!(
        metrics.contains("shard_stall_seconds{shard=\"bad\"} 0."),
        "{metrics}"
    );

    wedge.store(false, Ordering::Relaxed);
    wait_until(Duration::from_secs(5), || health(address).0 == 200).expect("it heals");
    stop.store(true, Ordering::Relaxed);
    bad.join().unwrap();
    good.join().unwrap();
    wait_until(Duration::from_secs(5), || {
        sentinel.health().standings().is_empty()
    })
    .expect("shards that ended are watched no more");
}

/// No CPU is used, no ping was due: only the slow ping finds it.
#[test]
fn a_shard_that_blocks_while_it_seemed_idle_is_told_within_a_second() {
    let (block, blocked) = std::sync::mpsc::channel::<()>();
    let bad = Shard::launch(shard("blocks"), move |shard| async move {
        shard.sleep(Duration::from_millis(400)).await;
        // A blocking call on a shard, which nobody should make.
        let _hung_up = blocked.recv();
    })
    .unwrap();
    let sentinel = sentinel();
    let address = sentinel.health_addr().unwrap();
    sentinel.watch_shard(bad.remote());
    let took = wait_until(Duration::from_secs(5), || health(address).0 == 503).unwrap();
    let (_, body) = health(address);
    println!("503 after {took:?}, 400 ms of which it slept: {body}");
    assert!(still_ms(&body) < 1000, "{body}");
    drop(block);
    bad.join().unwrap();
}

#[test]
fn many_pings_of_a_sleeping_shard_are_all_answered() {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let idle = Shard::launch(shard("idle"), move |shard| async move {
        while !stopped.load(Ordering::Relaxed) {
            shard.sleep(Duration::from_millis(20)).await;
        }
    })
    .unwrap();
    let remote = idle.remote().clone();
    wait_until(Duration::from_secs(5), || remote.pulse().turns() > 0).unwrap();
    for _ in 0..200 {
        let before = remote.pulse().turns();
        remote.ping();
        wait_until(Duration::from_secs(5), || remote.pulse().turns() > before)
            .expect("a ping makes the shard turn");
    }
    stop.store(true, Ordering::Relaxed);
    idle.join().unwrap();
}
