//! A million messages between shards and from plain threads, none lost, none out of order, in
//! channels far smaller than that; and what becomes of waits when an end leaves.

mod support;

use kvserve_runtime::bridge::{self, Received, SendError};
use kvserve_runtime::mailbox;
use kvserve_runtime::shard::DeadlinePassed;
use kvserve_runtime::{Deadline, Nanos};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::launch;

const MILLION: u64 = 1_000_000;
const LONG: Duration = Duration::from_secs(120);

fn within(span: Duration) -> Deadline {
    Deadline::after(Nanos::now(), span)
}

#[test]
fn a_million_messages_from_plain_threads_to_a_shard() {
    let (sender, mut receiver) = bridge::channel::<(u64, u64)>(64);
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for number in 0..MILLION / 4 {
                    sender.send_timeout((thread, number), LONG).unwrap();
                }
            })
        })
        .collect();
    drop(sender);
    let receiving = launch("receiver", move |_| async move {
        let mut next = [0u64; 4];
        while let Some((thread, number)) = receiver.recv().await {
            assert_eq!(number, next[thread as usize], "in order per sender");
            next[thread as usize] += 1;
        }
        next.iter().sum::<u64>()
    });
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(receiving.join().unwrap(), MILLION);
}

#[test]
fn a_million_messages_between_two_shards() {
    let (sender, mut receiver) = mailbox::channel::<u64>(64);
    let sending = launch("sender", move |_| async move {
        for number in 0..MILLION {
            sender.send(number, within(LONG)).await.unwrap();
        }
    });
    let receiving = launch("receiver", move |_| async move {
        let mut next = 0;
        while let Some(number) = receiver.recv().await {
            assert_eq!(number, next);
            next += 1;
        }
        next
    });
    sending.join().unwrap();
    assert_eq!(receiving.join().unwrap(), MILLION);
}

/// Each message waits for its answer: every one of them finds the other side parked or about
/// to be, which is where wakes get lost.
#[test]
fn a_hundred_thousand_round_trips_between_parking_shards() {
    const TRIPS: u64 = 100_000;
    let (there, mut inbox) = mailbox::channel::<u64>(1);
    let (back, mut answers) = mailbox::channel::<u64>(1);
    let echo = launch("echo", move |_| async move {
        while let Some(number) = inbox.recv().await {
            back.send(number + 1, within(LONG)).await.unwrap();
        }
    });
    let asking = launch("asking", move |_| async move {
        let mut spans = Vec::with_capacity(TRIPS as usize);
        for number in 0..TRIPS {
            let start = Nanos::now();
            there.send(number, within(LONG)).await.unwrap();
            let answer = answers.recv_until(within(LONG)).await.unwrap();
            assert_eq!(answer, Some(number + 1));
            spans.push(Nanos::now().since(start));
        }
        spans.sort_unstable();
        spans
    });
    let spans = asking.join().unwrap();
    let at = |share: f64| spans[(share * (spans.len() - 1) as f64) as usize];
    let slow = spans.iter().filter(|s| s.as_millis() >= 3).count();
    println!(
        "round trip p50 {:?}, p99 {:?}, p99.9 {:?}, max {:?}; {slow} of {TRIPS} took 3 ms or more",
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
    echo.join().unwrap();
}

#[test]
fn many_senders_that_wait_for_room_all_get_it() {
    let (sender, mut receiver) = mailbox::channel::<u64>(1);
    let sending = launch("senders", move |shard| async move {
        let tasks: Vec<_> = (0..64)
            .map(|_| {
                let sender = sender.clone();
                shard.spawn(async move {
                    for number in 0..200 {
                        sender.send(number, within(LONG)).await.unwrap();
                    }
                })
            })
            .collect();
        // Some that give up, so that calls must be handed on.
        for _ in 0..64 {
            let sender = sender.clone();
            drop(shard.spawn(async move { sender.send(1 << 40, within(LONG)).await }));
            shard.yield_now().await;
        }
        for task in tasks {
            task.await;
        }
    });
    let receiving = launch("receiver", move |shard| async move {
        let mut count = 0;
        while let Some(number) = receiver.recv().await {
            count += u64::from(number < 1 << 40);
            if count % 97 == 0 {
                shard.sleep(Duration::from_micros(200)).await;
            }
        }
        count
    });
    sending.join().unwrap();
    assert_eq!(receiving.join().unwrap(), 64 * 200);
}

#[test]
fn a_full_mailbox_gives_the_item_back_at_the_deadline() {
    let (sender, receiver) = mailbox::channel::<&'static str>(1);
    let run = launch("sender", move |_| async move {
        sender.try_send("first").unwrap();
        assert_eq!(sender.try_send("second"), Err(SendError::Full("second")));
        let waited = sender
            .send("third", within(Duration::from_millis(50)))
            .await;
        assert_eq!(waited, Err(SendError::Full("third")));
        drop(receiver);
        let closed = sender.send("fourth", within(LONG)).await;
        assert_eq!(closed, Err(SendError::Closed("fourth")));
    });
    run.join().unwrap();
}

#[test]
fn waits_end_when_the_other_end_leaves() {
    let (sender, receiver) = mailbox::channel::<u32>(1);
    let sending = launch("sender", move |shard| async move {
        sender.try_send(1).unwrap();
        let waiting = shard.spawn({
            let sender = sender.clone();
            async move { sender.send(2, within(LONG)).await }
        });
        shard.sleep(Duration::from_millis(20)).await;
        // Dropped on another thread than the waiter's.
        std::thread::spawn(move || drop(receiver)).join().unwrap();
        waiting.await
    });
    assert_eq!(sending.join().unwrap(), Err(SendError::Closed(2)));

    let (sender, mut receiver) = bridge::channel::<u32>(4);
    let receiving = launch("receiver", move |_| async move {
        let nothing = receiver.recv_until(within(Duration::from_millis(20))).await;
        assert_eq!(nothing, Err(DeadlinePassed));
        (receiver.recv().await, receiver.recv().await)
    });
    std::thread::sleep(Duration::from_millis(100));
    sender.try_send(7).unwrap();
    drop(sender);
    assert_eq!(receiving.join().unwrap(), (Some(7), None));
}

#[test]
fn dropped_waits_lose_no_item() {
    let (sender, mut receiver) = bridge::channel::<u64>(16);
    let sent = Arc::new(AtomicU64::new(0));
    let counts = sent.clone();
    let sending = std::thread::spawn(move || {
        for number in 0..20_000u64 {
            sender.send_timeout(number, LONG).unwrap();
            counts.fetch_add(1, Ordering::Relaxed);
            if number % 64 == 0 {
                std::thread::sleep(Duration::from_micros(150));
            }
        }
    });
    let receiving = launch("receiver", move |_| async move {
        let (mut next, mut dropped) = (0, 0u64);
        loop {
            match receiver.recv_until(within(Duration::from_micros(50))).await {
                Err(DeadlinePassed) => dropped += 1,
                Ok(None) => return (next, dropped),
                Ok(Some(number)) => {
                    assert_eq!(number, next);
                    next += 1;
                }
            }
        }
    });
    sending.join().unwrap();
    let (received, dropped) = receiving.join().unwrap();
    assert_eq!(received, sent.load(Ordering::Relaxed));
    assert!(dropped > 0, "the test is about dropped waits");
}

#[test]
fn a_mesh_reaches_every_shard_and_oneself() {
    let ends = mailbox::mesh::<(usize, usize)>(3, 4);
    let shards: Vec<_> = ends
        .into_iter()
        .map(|mut end| {
            launch("mesh", move |_| async move {
                for sender in &end.senders {
                    sender.send((end.index, 1), within(LONG)).await.unwrap();
                }
                let mut from = Vec::new();
                for _ in 0..3 {
                    from.push(end.inbox.recv().await.unwrap().0);
                }
                from.sort_unstable();
                (from, end)
            })
        })
        .collect();
    // Ends are kept until all have received: a dropped inbox would refuse its senders.
    let ends: Vec<_> = shards.into_iter().map(|s| s.join().unwrap()).collect();
    assert!(ends.iter().all(|(from, _)| *from == [0, 1, 2]));
}

#[test]
fn shards_reach_a_plain_thread() {
    let (sender, receiver) = bridge::to_thread::<u64>(8);
    let thread = std::thread::spawn(move || {
        let mut sum = 0;
        loop {
            match receiver.recv_timeout(LONG) {
                Received::Item(item) => sum += item,
                Received::TimedOut => panic!("nothing came"),
                Received::Closed => return sum,
            }
        }
    });
    let run = launch("sender", move |shard| async move {
        let mut full = 0;
        for number in 1..=1000 {
            let mut item = number;
            while let Err(error) = sender.try_send(item) {
                full += 1;
                item = error.into_inner();
                shard.sleep(Duration::from_micros(50)).await;
            }
        }
        full
    });
    run.join().unwrap();
    assert_eq!(thread.join().unwrap(), 500_500);
}
