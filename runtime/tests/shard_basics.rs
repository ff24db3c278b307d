//! Launching, spawning, sleeping, deadlines: what everything else on a shard stands on.

mod support;

use kvserve_runtime::shard::{DeadlinePassed, Seat};
use kvserve_runtime::{Deadline, Nanos, Shard, ShardConfig};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use support::shard;

#[test]
fn shards_launch_from_one_list_and_may_share_a_cpu() {
    let configs: Vec<ShardConfig> = (0..4)
        .map(|i| ShardConfig {
            name: format!("a-rather-long-name-{i}"),
            core: Some(0),
        })
        .collect();
    let shards = Shard::launch_all(&configs, |shard| async move {
        shard.sleep(Duration::from_millis(1)).await;
        (shard.index(), shard.name().to_owned())
    })
    .unwrap();
    for (index, shard) in shards.into_iter().enumerate() {
        let expected = (index, format!("a-rather-long-name-{index}"));
        assert_eq!(shard.join().unwrap(), expected);
    }
}

#[test]
fn a_list_with_an_impossible_cpu_starts_nothing_and_names_the_shard() {
    let configs = [
        shard("fine"),
        ShardConfig {
            name: "nowhere".into(),
            core: Some(100_000),
        },
    ];
    let error = Shard::launch_all(&configs, |_| async { panic!("no body may run") })
        .map(|_: Vec<kvserve_runtime::ShardHandle<()>>| ())
        .unwrap_err();
    assert!(error.to_string().contains("`nowhere`"), "{error}");
}

#[test]
fn sleepers_wake_in_their_order_and_cancelled_ones_do_not() {
    let run = Shard::launch(shard("sleeps"), |shard| async move {
        let order = Rc::new(Cell::new(Vec::new()));
        let tasks: Vec<_> = [30u64, 10, 20, 5]
            .into_iter()
            .map(|millis| {
                let (order, own) = (order.clone(), shard.clone());
                shard.spawn(async move {
                    own.sleep(Duration::from_millis(millis)).await;
                    let mut all = order.take();
                    all.push(millis);
                    order.set(all);
                })
            })
            .collect();
        let own = shard.clone();
        let cancelled = shard.spawn(async move {
            own.sleep(Duration::from_millis(1)).await;
            panic!("a cancelled sleeper does not wake");
        });
        drop(cancelled);
        for task in tasks {
            task.await;
        }
        order.take()
    })
    .unwrap();
    assert_eq!(run.join().unwrap(), [5, 10, 20, 30]);
}

#[test]
fn ten_thousand_limits_that_are_not_reached_leave_nothing() {
    let run = Shard::launch(shard("limits"), |shard| async move {
        let far = Deadline::after(shard.now(), Duration::from_secs(3600));
        for i in 0..10_000 {
            let own = shard.clone();
            let wait = async move {
                if i % 10 == 0 {
                    own.sleep(Duration::from_micros(10)).await;
                } else {
                    own.yield_now().await;
                }
                i
            };
            assert_eq!(shard.until(far, wait).await, Ok(i));
        }
        let soon = Deadline::after(shard.now(), Duration::from_millis(20));
        let never = shard.until(soon, std::future::pending::<()>()).await;
        (never, soon.passed(Nanos::now()))
    })
    .unwrap();
    assert_eq!(run.join().unwrap(), (Err(DeadlinePassed), true));
}

#[test]
fn a_result_that_is_there_at_the_deadline_wins() {
    let run = Shard::launch(shard("wins"), |shard| async move {
        let past = Deadline::after(Nanos(0), Duration::ZERO);
        (
            shard.until(past, async { 5 }).await,
            shard.until(past, std::future::pending::<()>()).await,
        )
    })
    .unwrap();
    assert_eq!(run.join().unwrap(), (Ok(5), Err(DeadlinePassed)));
}

#[test]
fn a_cancelled_task_drops_its_future() {
    struct Flag(Rc<Cell<bool>>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let run = Shard::launch(shard("cancels"), |shard| async move {
        let dropped = Rc::new(Cell::new(false));
        let flag = Flag(dropped.clone());
        let task = shard.spawn(async move {
            let _flag = flag;
            std::future::pending::<u32>().await
        });
        shard.yield_now().await;
        (task.cancel().await, dropped.get())
    })
    .unwrap();
    assert_eq!(run.join().unwrap(), (None, true));
}

#[test]
fn seats_are_used_again_and_survive_being_dropped_elsewhere() {
    let run = Shard::launch(shard("seats"), |shard| async move {
        for round in 0..1000 {
            let mut seat = Seat::on(&shard);
            let notice = seat.notice().clone();
            let ringer = std::thread::spawn(move || {
                notice.ring();
                notice
            });
            seat.rung().await;
            let notice = ringer.join().unwrap();
            if round % 2 == 0 {
                drop(seat);
            } else {
                std::thread::spawn(move || drop(seat)).join().unwrap();
            }
            // Ringing what is gone is nothing.
            notice.ring();
            if round % 100 == 0 {
                shard.sleep(Duration::from_millis(1)).await;
            }
        }
    })
    .unwrap();
    run.join().unwrap();
}

#[test]
fn rings_after_the_shards_end_are_nothing() {
    let run = Shard::launch(shard("ends"), |shard| async move { Seat::on(&shard) }).unwrap();
    let remote = run.remote().clone();
    let seat = run.join().unwrap();
    assert!(remote.pulse().ended());
    seat.notice().ring();
    seat.notice().ring();
    remote.ping();
    drop(seat);
}
