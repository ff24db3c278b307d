//! Pages move between two nodes and arrive as they were sent.

mod peer_bed;

use kvserve_kv::peer::{NotBegun, PeerState, PrefillAsk, Role, SendError};
use kvserve_runtime::{Deadline, Nanos};
use peer_bed::*;
use std::time::Duration;

#[test]
fn a_prompt_is_computed_there_and_its_pages_arrive_here() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        migrate(&d, "p", &prompt(10)).await;
        migrate(&d, "p", &prompt(1)).await;
        migrate(&d, "p", &prompt(120)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        let counters = d.peers.counters();
        assert_eq!((counters.attempts, counters.attempts_committed), (3, 3));
        assert_eq!(p.peers.lease_counters().committed, 3);
        let copied = d.peers.shm_counters().pages;
        assert_eq!(p.peers.transport_counters().1.pages + copied, 131);
        stop(&[&d, &p]);
    });
}

#[test]
fn the_two_nodes_may_live_on_two_shards() {
    let (address_tx, address_rx) = std::sync::mpsc::channel();
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let prefill_over = over.clone();
    let prefill = std::thread::spawn(move || {
        on_shard(|shard| async move {
            let p = Node::start(&shard, "p", Role::Prefill);
            address_tx.send(p.addr()).expect("the test waits for it");
            let done = || prefill_over.load(std::sync::atomic::Ordering::SeqCst);
            until(
                &shard,
                Duration::from_secs(30),
                "the other is through",
                done,
            )
            .await;
            at_rest(&shard, &[&p], SOON).await;
            assert_eq!(p.peers.lease_counters().committed, 20);
            stop(&[&p]);
        });
    });
    let address = address_rx.recv().expect("a node");
    on_shard(move |shard| async move {
        let d = Node::start(&shard, "d", Role::Decode);
        d.peers.dial(address);
        until(&shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
        for round in 0..20 {
            migrate(&d, "p", &prompt(1 + round * 5)).await;
        }
        at_rest(&shard, &[&d], SOON).await;
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        stop(&[&d]);
    });
    prefill.join().expect("the prefill node");
}

#[test]
fn forty_migrations_share_a_data_connection() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        let prompts: Vec<Vec<u32>> = (1..=40u32)
            .map(|number| (0..6).map(|at| number * 100 + at).collect())
            .collect();
        let mut migrations: Vec<_> = prompts
            .iter()
            .map(|prompt| d.ask("p", prompt, Duration::from_secs(20)))
            .collect();
        for (migration, prompt) in migrations.iter_mut().zip(&prompts) {
            let story = follow(migration).await;
            d.take(&story.committed.expect("committed"), prompt);
        }
        drop(migrations);
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn hybrids_pull_from_each_other_over_one_session() {
    on_shard(|shard| async move {
        let a = Node::start(&shard, "a", Role::Hybrid);
        let b = Node::start(&shard, "b", Role::Hybrid);
        a.peers.dial(b.addr());
        b.peers.dial(a.addr());
        until(&shard, SOON, "both can pull", || {
            a.can_pull_from("b") && b.can_pull_from("a")
        })
        .await;
        // Two connections met: one stays, and it goes on staying.
        shard.sleep(Duration::from_millis(500)).await;
        for _ in 0..3 {
            until(&shard, SOON, "both can pull", || {
                a.can_pull_from("b") && b.can_pull_from("a")
            })
            .await;
            migrate(&a, "b", &prompt(7)).await;
            migrate(&b, "a", &prompt(9)).await;
        }
        assert_eq!(a.peers.peers().len(), 1);
        assert_eq!(b.peers.peers().len(), 1);
        at_rest(&shard, &[&a, &b], SOON).await;
        stop(&[&a, &b]);
    });
}

#[test]
fn a_proxy_hears_its_nodes_and_answers_them() {
    on_shard(|shard| async move {
        let x = Node::start(&shard, "x", Role::Proxy);
        let p = Node::start(&shard, "p", Role::Prefill);
        p.peers.dial(x.addr());
        until(&shard, SOON, "the node is joined", || {
            x.sees("p", PeerState::Up) && p.sees("x", PeerState::Up)
        })
        .await;
        p.peers.send_app("x", 5, vec![1, 2, 3]).expect("a session");
        x.peers.send_app("p", 6, vec![4]).expect("a session");
        assert_eq!(
            x.peers.send_app("nobody", 6, vec![4]),
            Err(SendError::NoSession)
        );
        until(&shard, SOON, "both have heard", || {
            !x.log.apps.borrow().is_empty() && !p.log.apps.borrow().is_empty()
        })
        .await;
        assert_eq!(x.log.apps.borrow()[0], ("p".into(), 5, vec![1, 2, 3]));
        assert_eq!(p.log.apps.borrow()[0], ("x".into(), 6, vec![4]));
        assert_eq!(x.log.ups.borrow()[0].api_url, "http://p");
        // A proxy neither serves nor pulls.
        let view = &x.peers.peers()[0];
        assert!(!view.can_pull && view.path.is_empty());
        p.peers.forget(x.addr());
        until(&shard, SOON, "forgotten", || {
            x.peers.peers().is_empty() && p.peers.peers().is_empty()
        })
        .await;
        stop(&[&x, &p]);
    });
}

#[test]
fn a_migration_that_cannot_begin_gives_its_pages_back() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        let ask = |left: Duration, attempt: u32| PrefillAsk {
            request: d.peers.next_request_id(),
            attempt,
            held_pages: 0,
            prompt: vec![1],
            payload: Vec::new(),
            into: d.targets(1),
            deadline: Deadline::after(Nanos::now(), left),
        };
        let minute = Duration::from_secs(60);
        for (peer, left, reason) in [
            ("nobody", minute, NotBegun::NoSession.into_reason()),
            (
                "p",
                Duration::ZERO,
                kvserve_kv::peer::FailReason::RequestDeadline,
            ),
        ] {
            let Err(error) = d.peers.prefill(peer, ask(left, 1)) else {
                panic!("{reason:?} expected");
            };
            assert_eq!(error.error.reason, reason);
            d.ledger.with(|ledger| ledger.free(&error.into));
        }
        // A second ask with the same number is refused, a higher one replaces the first.
        p.service.script.set(Script::StopAfterGrant);
        let mut first = ask(minute, 1);
        let request = first.request;
        let mut again = ask(minute, 1);
        (again.request, first.attempt) = (request, 1);
        let mut one = d.peers.prefill("p", first).expect("the first");
        let Err(error) = d.peers.prefill("p", again) else {
            panic!("asked twice");
        };
        assert_eq!(error.error.reason, NotBegun::OldAttempt.into_reason());
        d.ledger.with(|ledger| ledger.free(&error.into));
        let mut second = ask(minute, 2);
        second.request = request;
        p.service.script.set(Script::Serve { step: 1 });
        let mut two = d.peers.prefill("p", second).expect("the second");
        assert!(follow(&mut one).await.failed.is_some());
        drop(one);
        let story = follow(&mut two).await;
        d.take(&story.committed.expect("committed"), &[1]);
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

trait IntoReason {
    fn into_reason(self) -> kvserve_kv::peer::FailReason;
}

impl IntoReason for NotBegun {
    fn into_reason(self) -> kvserve_kv::peer::FailReason {
        kvserve_kv::peer::FailReason::NotBegun(self)
    }
}
