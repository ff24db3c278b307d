//! The side pool: results, its bound, deadlines, abandoned and panicking jobs.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod support;

use kvserve_runtime::side_pool::{SidePool, SidePoolError};
use kvserve_runtime::{Deadline, Nanos, Shard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use support::{launch, shard};

fn within(span: Duration) -> Deadline {
    Deadline::after(Nanos::now(), span)
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn ten_thousand_jobs_of_two_shards_each_get_their_own_result() {
    let pool = SidePool::new(2, 64).unwrap();
    let configs = [shard("one"), shard("two")];
    let shards = Shard::launch_all(&configs, move |shard| async move {
        let tasks: Vec<_> = (0..50)
            .map(|lane| {
                let pool = pool.clone();
                shard.spawn(async move {
                    for number in 0..100u64 {
                        let key = lane * 1000 + number;
                        let double = move || key * 2;
                        let mut result = pool.run(within(LONG), double).await;
                        while let Err(SidePoolError::Full { max: 64, .. }) = result {
                            Shard::current()
                                .unwrap()
                                .sleep(Duration::from_micros(100))
                                .await;
                            result = pool.run(within(LONG), double).await;
                        }
                        assert_eq!(result, Ok(key * 2));
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    })
    .unwrap();
    for shard in shards {
        shard.join().unwrap();
    }
}

#[test]
fn a_full_pool_says_so_at_once_and_deadlines_end_waits() {
    let pool = SidePool::new(1, 1).unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let begun = Arc::new(AtomicBool::new(false));
    let second_ran = Arc::new(AtomicBool::new(false));
    let (begins, runs) = (begun.clone(), second_ran.clone());
    let run = launch("asks", move |shard| async move {
        let first = shard.spawn({
            let pool = pool.clone();
            async move {
                let work = move || {
                    begins.store(true, Ordering::Release);
                    gate.recv().unwrap();
                    1
                };
                pool.run(within(LONG), work).await
            }
        });
        while !begun.load(Ordering::Acquire) {
            shard.sleep(Duration::from_millis(1)).await;
        }
        let second = shard.spawn({
            let pool = pool.clone();
            async move {
                let work = move || runs.store(true, Ordering::Release);
                pool.run(within(Duration::from_millis(50)), work).await
            }
        });
        while pool.queued() == 0 {
            shard.sleep(Duration::from_millis(1)).await;
        }
        let third = pool.run(within(LONG), || 3).await;
        assert_eq!(third, Err(SidePoolError::Full { queued: 1, max: 1 }));
        assert_eq!(second.await, Err(SidePoolError::Deadline));
        go.send(()).unwrap();
        assert_eq!(first.await, Ok(1));
        // The thread still has to throw the second job away.
        while pool.queued() > 0 {
            shard.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(pool.run(within(LONG), || 4).await, Ok(4));
    });
    run.join().unwrap();
    assert!(
        !second_ran.load(Ordering::Acquire),
        "a job whose caller left is not begun"
    );
}

#[test]
fn a_panicking_job_is_its_callers_error_and_the_thread_lives_on() {
    let pool = SidePool::new(1, 4).unwrap();
    let run = launch("asks", move |_| async move {
        for _ in 0..3 {
            let result = pool
                .run::<()>(within(LONG), || panic!("bad template"))
                .await;
            let message = "bad template".to_owned();
            assert_eq!(result, Err(SidePoolError::Panicked { message }));
        }
        assert_eq!(pool.run(within(LONG), || 5).await, Ok(5));
    });
    run.join().unwrap();
}

#[test]
fn dropped_waits_leave_nothing_behind() {
    let pool = SidePool::new(1, 1024).unwrap();
    let ran = Arc::new(AtomicU64::new(0));
    let counts = ran.clone();
    let run = launch("asks", move |shard| async move {
        for _ in 0..500 {
            let (pool, counts) = (pool.clone(), counts.clone());
            let task = shard.spawn(async move {
                let work = move || counts.fetch_add(1, Ordering::Relaxed);
                pool.run(within(LONG), work).await
            });
            shard.yield_now().await;
            drop(task);
        }
        while pool.queued() > 0 {
            shard.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(pool.run(within(LONG), || 6).await, Ok(6));
    });
    run.join().unwrap();
    assert_eq!(
        Arc::strong_count(&ran),
        1,
        "every job and its captures are gone"
    );
}
