//! The other side dies or freezes at each stage: the attempt ends in time, the books are
//! restored, and the same pair works again.

mod peer_bed;

use kvserve_kv::peer::{
    FailReason, Migration, MigrationEvent, PeerConfig, PeerState, RefuseReason, Role, Stage,
    TransportChoice,
};
use kvserve_runtime::{Nanos, Shard};
use peer_bed::relay::Relay;
use peer_bed::*;
use std::time::Duration;

async fn relayed_pair(shard: &Shard) -> (Node, Node, Relay) {
    relay_between(shard, config("p", Role::Prefill), config("d", Role::Decode)).await
}

/// The same with pages over TCP, whatever the run asks for.
async fn relayed_tcp_pair(shard: &Shard) -> (Node, Node, Relay) {
    let over_tcp = |node_id, role| PeerConfig {
        transport: TransportChoice::Tcp,
        ..config(node_id, role)
    };
    relay_between(
        shard,
        over_tcp("p", Role::Prefill),
        over_tcp("d", Role::Decode),
    )
    .await
}

async fn relay_between(shard: &Shard, p: PeerConfig, d: PeerConfig) -> (Node, Node, Relay) {
    let (p, d) = (Node::with(shard, p), Node::with(shard, d));
    let relay = Relay::to(p.addr());
    d.peers.dial(relay.address);
    until(shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
    (d, p, relay)
}

#[derive(Clone, Copy, Debug)]
enum When {
    Asked,
    Granted,
    Pulled,
    Placed,
}

fn script_of(when: When) -> Script {
    match when {
        When::Asked => Script::NeverGrant,
        When::Granted => Script::StopAfterGrant,
        When::Pulled => Script::StopAfter { pages: 5 },
        When::Placed => Script::Serve { step: 4 },
    }
}

async fn reach(shard: &Shard, d: &Node, p: &Node, migration: &mut Migration, when: When) {
    match when {
        When::Asked => until(shard, SOON, "asked", || p.service.asked.get() > 0).await,
        When::Granted | When::Pulled | When::Placed => loop {
            let event = migration.next().await;
            let there = match (when, &event) {
                (When::Granted, MigrationEvent::Granted)
                | (When::Placed, MigrationEvent::Placed) => true,
                (When::Pulled, MigrationEvent::FirstToken(_)) => {
                    until(shard, SOON, "five pages pulled", || {
                        d.peers.attempts()[0].pages_checked == 5
                    })
                    .await;
                    true
                }
                (_, MigrationEvent::Failed(error)) => panic!("{error}"),
                _ => false,
            };
            if there {
                return;
            }
        },
    }
}

#[test]
fn a_peer_that_dies_is_noticed_at_once_at_every_stage() {
    for when in [When::Asked, When::Granted, When::Pulled] {
        on_shard(move |shard| async move {
            let (d, p, relay) = relayed_pair(&shard).await;
            p.service.script.set(script_of(when));
            let mut migration = d.ask("p", &prompt(12), Duration::from_secs(30));
            reach(&shard, &d, &p, &mut migration, when).await;
            let cut_at = Nanos::now();
            relay.cut();
            let error = follow(&mut migration).await.failed.expect("it died");
            // A closed data connection may be noticed before the closed session.
            let expected = match error.reason {
                FailReason::SessionEnded => true,
                FailReason::Read(_) => matches!(when, When::Pulled),
                _ => false,
            };
            assert!(expected, "{when:?}: {error}");
            let took = Nanos::now().since(cut_at);
            assert!(took < Duration::from_secs(1), "{when:?}: {took:?}");
            drop(migration);
            at_rest(&shard, &[&d, &p], SOON).await;
            p.service.script.set(Script::Serve { step: 2 });
            until(&shard, SOON, "it works again", || d.can_pull_from("p")).await;
            migrate(&d, "p", &prompt(12)).await;
            at_rest(&shard, &[&d, &p], SOON).await;
            stop(&[&d, &p]);
        });
    }
}

#[test]
fn a_frozen_peer_ends_the_attempt_at_its_stage_limit() {
    for (when, stage, limit_ms) in [
        (When::Asked, Stage::Pair, 1000),
        (When::Granted, Stage::Prefill, 3000),
        (When::Pulled, Stage::Prefill, 3000),
        (When::Placed, Stage::Commit, 500),
    ] {
        on_shard(move |shard| async move {
            let (d, p, relay) = relayed_pair(&shard).await;
            p.service.script.set(script_of(when));
            let asked_at = Nanos::now();
            let mut migration = d.ask("p", &prompt(12), Duration::from_secs(30));
            if matches!(when, When::Placed) {
                // COMMIT must not be answered: freeze as soon as the pages are in.
                loop {
                    let placed = matches!(migration.next().await, MigrationEvent::Placed);
                    if placed {
                        break;
                    }
                }
                relay.freeze();
            } else {
                reach(&shard, &d, &p, &mut migration, when).await;
                relay.freeze();
            }
            let story = follow(&mut migration).await;
            let took = Nanos::now().since(asked_at);
            match story.failed {
                Some(error) => {
                    assert_eq!(error.stage, stage, "{error}");
                    let reasons = [FailReason::StageLimit, FailReason::SessionEnded];
                    assert!(reasons.contains(&error.reason), "{error}");
                    let most = Duration::from_millis(limit_ms + 1000);
                    assert!(took < most, "{when:?}: {took:?}");
                }
                // The answer was on its way before the relay froze.
                None if matches!(when, When::Placed) => {
                    d.take(&story.committed.expect("an end"), &prompt(12));
                }
                None => panic!("{story:?}"),
            }
            // Silence ends the session on both sides, which restores the books.
            drop(migration);
            at_rest(&shard, &[&d, &p], Duration::from_secs(10)).await;
            relay.thaw();
            p.service.script.set(Script::Serve { step: 2 });
            until(&shard, Duration::from_secs(10), "it works again", || {
                d.can_pull_from("p")
            })
            .await;
            migrate(&d, "p", &prompt(12)).await;
            at_rest(&shard, &[&d, &p], SOON).await;
            stop(&[&d, &p]);
        });
    }
}

#[test]
fn a_service_that_stands_still_behind_live_heartbeats_ends_at_the_stage_limit() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        for (script, stage, limit_ms) in [
            (Script::NeverGrant, Stage::Pair, 1000),
            (Script::StopAfterGrant, Stage::Prefill, 3000),
        ] {
            p.service.script.set(script);
            let asked_at = Nanos::now();
            let mut migration = d.ask("p", &prompt(4), Duration::from_secs(30));
            let error = follow(&mut migration).await.failed.expect("a limit");
            let took = Nanos::now().since(asked_at);
            assert_eq!((error.stage, error.reason), (stage, FailReason::StageLimit));
            assert!(took >= Duration::from_millis(limit_ms), "{took:?}");
            assert!(took < Duration::from_millis(limit_ms + 1000), "{took:?}");
            // The cancel reaches the service at once: its pages are back long before any ttl.
            drop(migration);
            at_rest(&shard, &[&d, &p], Duration::from_secs(1)).await;
        }
        // A short request ends at its own deadline.
        let asked_at = Nanos::now();
        let mut migration = d.ask("p", &prompt(4), Duration::from_millis(300));
        let error = follow(&mut migration).await.failed.expect("a deadline");
        let took = Nanos::now().since(asked_at);
        assert_eq!(error.reason, FailReason::RequestDeadline);
        assert!(took < Duration::from_millis(800), "{took:?}");
        drop(migration);
        at_rest(&shard, &[&d, &p], Duration::from_secs(1)).await;
        assert!(d.sees("p", PeerState::Up));
        stop(&[&d, &p]);
    });
}

#[test]
fn a_silent_peer_is_suspect_then_dead_and_comes_back() {
    on_shard(|shard| async move {
        let (d, p, relay) = relayed_pair(&shard).await;
        relay.freeze();
        until(&shard, SOON, "suspect", || d.sees("p", PeerState::Suspect)).await;
        assert!(!d.can_pull_from("p"), "no new work for a suspect");
        until(&shard, SOON, "dead on both sides", || {
            let silent = |node: &Node| {
                let downs = node.log.downs.borrow();
                downs
                    .first()
                    .is_some_and(|down| down.1 == RefuseReason::Silent)
            };
            silent(&d) && silent(&p)
        })
        .await;
        relay.thaw();
        until(&shard, SOON, "back again", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(3)).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn a_hub_that_is_stopped_says_so_and_everything_ends() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        p.service.script.set(Script::StopAfterGrant);
        let mut migration = d.ask("p", &prompt(3), Duration::from_secs(30));
        assert!(matches!(migration.next().await, MigrationEvent::Granted));
        p.peers.stop();
        let error = follow(&mut migration).await.failed.expect("an end");
        assert_eq!(error.reason, FailReason::SessionEnded);
        drop(migration);
        at_rest(&shard, &[&d, &p], SOON).await;
        assert_eq!(
            d.log.downs.borrow().as_slice(),
            [("p".into(), RefuseReason::ShuttingDown, true)]
        );
        stop(&[&d, &p]);
    });
}

/// E5: the data connection is lost under reads; they are posted again on the next one, and the
/// attempt does not even notice. After three posts it is the path's fault.
#[test]
fn reads_of_a_lost_data_connection_are_posted_again_three_times_at_most() {
    for losses in [1, 2, 3] {
        on_shard(move |shard| async move {
            let (d, p, relay) = relayed_tcp_pair(&shard).await;
            let prompt = prompt(12);
            relay.hold_data(true);
            p.service.script.set(Script::Serve { step: 12 });
            let mut migration = d.ask("p", &prompt, Duration::from_secs(30));
            for loss in 0..losses {
                // Two cuts of one connection would be one loss.
                let posted = || {
                    let counters = d.peers.counters();
                    counters.reads_reposted >= loss
                        && d.peers.attempts().first().is_some_and(|a| a.reads_out > 0)
                        && d.hub.in_flight()
                };
                until(&shard, SOON, "a read is under way", posted).await;
                relay.hold_data(loss + 1 < losses || losses == 3);
                relay.cut_data();
                let lost = || d.hub.counters().posts_lost > loss;
                until(&shard, SOON, "its connection is lost", lost).await;
            }
            let story = follow(&mut migration).await;
            let counters = d.peers.counters();
            assert_eq!(counters.attempts, 1);
            assert_eq!(counters.reads_reposted, losses.min(2), "{counters:?}");
            match (story.committed, story.failed) {
                (Some(pages), None) if losses < 3 => d.take(&pages, &prompt),
                (None, Some(error)) if losses == 3 => {
                    assert!(matches!(error.reason, FailReason::Read(_)), "{error}");
                    assert_eq!(d.hub.counters().slots_out_of_posts, 1);
                }
                (committed, failed) => panic!("{losses} losses: {committed:?} {failed:?}"),
            }
            drop(migration);
            relay.hold_data(false);
            at_rest(&shard, &[&d, &p], SOON).await;
            until(&shard, SOON, "a data connection", || d.can_pull_from("p")).await;
            migrate(&d, "p", &prompt).await;
            at_rest(&shard, &[&d, &p], SOON).await;
            stop(&[&d, &p]);
        });
    }
}
