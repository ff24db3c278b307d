//! Two nodes move pages by RDMA: on the fake wire, and with `KVSERVE_TEST_VERBS=system` on
//! soft-RoCE. Queue pairs are lost and made anew; a frozen peer's migration fails at COMMIT; a node
//! that may take TCP does so when RDMA cannot be.

mod peer_bed;

use fake_verbs::Wire;
use kvserve_kv::peer::{FailReason, MigrationEvent, PeerConfig, Role, Stage, TransportChoice};
use kvserve_kv::transport::rdma::RdmaConfig;
use kvserve_kv::transport::rdma::verbs::Library;
use kvserve_runtime::Shard;
use peer_bed::relay::Relay;
use peer_bed::*;
use std::time::Duration;

fn on_system_verbs() -> bool {
    std::env::var("KVSERVE_TEST_VERBS").is_ok_and(|value| value == "system")
}

/// What the two nodes' devices hang on.
struct Fabric {
    wire: Option<Wire>,
    near: String,
    far: String,
}

impl Fabric {
    fn new() -> Self {
        if on_system_verbs() {
            return Fabric {
                wire: None,
                near: "rxe1".into(),
                far: "rxe0".into(),
            };
        }
        let wire = Wire::new();
        Fabric {
            near: wire.near().into(),
            far: wire.far().into(),
            wire: Some(wire),
        }
    }

    fn library(&self) -> Library {
        match on_system_verbs() {
            true => Library::system().expect("the system's verbs"),
            false => Library::of(fake_verbs::verbs()),
        }
    }

    fn node(&self, shard: &Shard, config: PeerConfig, device: &str) -> Node {
        let config = PeerConfig {
            rdma: RdmaConfig {
                device: Some(device.into()),
                ..RdmaConfig::default()
            },
            ..config
        };
        Node::with_verbs(shard, config, Some(self.library()))
    }

    async fn pair(&self, shard: &Shard) -> (Node, Node) {
        let p = self.node(
            shard,
            choose("p", Role::Prefill, TransportChoice::Rdma),
            &self.far,
        );
        let d = self.node(
            shard,
            choose("d", Role::Decode, TransportChoice::Rdma),
            &self.near,
        );
        d.peers.dial(p.addr());
        until(shard, 4 * SOON, "the pair comes up", || {
            d.can_pull_from("p")
        })
        .await;
        (d, p)
    }
}

fn choose(node_id: &str, role: Role, transport: TransportChoice) -> PeerConfig {
    PeerConfig {
        transport,
        ..config(node_id, role)
    }
}

fn path(node: &Node, peer: &str) -> &'static str {
    let peers = node.peers.peers();
    let peer = peers.iter().find(|view| view.node_id == peer);
    peer.expect("a session").path
}

#[test]
fn a_pair_reads_its_pages_by_the_card() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let (d, p) = fabric.pair(&shard).await;
        assert_eq!((path(&d, "p"), path(&p, "d")), ("rdma", "rdma"));
        for count in [10, 1, 120] {
            migrate(&d, "p", &prompt(count)).await;
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        let moved = d.peers.rdma_counters().expect("RDMA");
        assert!(moved.bytes >= 131 * PAGE_BYTES as u64, "{moved:?}");
        assert_eq!(p.peers.transport_counters().1.pages, 0, "none went by TCP");
        assert_eq!(
            (moved.strays, moved.duplicates, moved.completions_lost),
            (0, 0, 0)
        );
        let told = d.log.paths.borrow().clone();
        let [(peer, path, rate)] = told.as_slice() else {
            panic!("{told:?}");
        };
        assert_eq!((peer.as_str(), *path), ("p", "rdma"));
        assert!(rate.contains("MB/s"), "{rate}");
        stop(&[&d, &p]);
    });
}

#[test]
fn hybrids_read_from_each_other_over_one_session() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let a = fabric.node(
            &shard,
            choose("a", Role::Hybrid, TransportChoice::Rdma),
            &fabric.near,
        );
        let b = fabric.node(
            &shard,
            choose("b", Role::Hybrid, TransportChoice::Rdma),
            &fabric.far,
        );
        a.peers.dial(b.addr());
        until(&shard, 4 * SOON, "both can pull", || {
            a.can_pull_from("b") && b.can_pull_from("a")
        })
        .await;
        for _ in 0..5 {
            migrate(&a, "b", &prompt(7)).await;
            migrate(&b, "a", &prompt(9)).await;
        }
        assert_eq!((path(&a, "b"), path(&b, "a")), ("rdma", "rdma"));
        at_rest(&shard, &[&a, &b], SOON).await;
        stop(&[&a, &b]);
    });
}

#[test]
fn cancels_at_any_moment_restore_both_books() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let (d, p) = fabric.pair(&shard).await;
        p.service.script.set(Script::Serve { step: 1 });
        let rounds = if on_system_verbs() { 12 } else { 60 };
        for round in 0..rounds {
            let migration = d.ask("p", &prompt(20), Duration::from_secs(30));
            shard.sleep(Duration::from_micros(round * 450)).await;
            drop(migration);
            if round % 10 == 0 {
                migrate(&d, "p", &prompt(33)).await;
            }
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        migrate(&d, "p", &prompt(20)).await;
        stop(&[&d, &p]);
    });
}

/// Fault 7: a frozen peer's memory can be read on; only COMMIT tells.
#[test]
fn a_peer_that_hears_nothing_any_more_fails_the_migration_at_commit() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let p = fabric.node(
            &shard,
            choose("p", Role::Prefill, TransportChoice::Rdma),
            &fabric.far,
        );
        let relay = Relay::to(p.addr());
        let d = fabric.node(
            &shard,
            choose("d", Role::Decode, TransportChoice::Rdma),
            &fabric.near,
        );
        d.peers.dial(relay.address);
        until(&shard, 4 * SOON, "the pair comes up", || {
            d.can_pull_from("p")
        })
        .await;
        p.service.script.set(Script::Serve { step: 1 });
        let mut migration = d.ask("p", &prompt(40), Duration::from_secs(30));
        let granted = migration.next().await;
        assert!(matches!(granted, MigrationEvent::Granted), "{granted:?}");
        relay.deafen();
        let story = follow(&mut migration).await;
        assert!(story.placed, "every page was read and checked");
        let error = story.failed.expect("no answer to COMMIT");
        drop(migration);
        assert_eq!(error.stage, Stage::Commit);
        assert_eq!(error.reason, FailReason::StageLimit);
        until(&shard, SOON, "pages back", || d.free_pages() == POOL_PAGES).await;
        at_rest(&shard, &[&d, &p], 2 * SOON).await;
        relay.thaw();
        shard.sleep(Duration::from_secs(1)).await;
        until(&shard, 4 * SOON, "it works again", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(12)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

/// Faults 9 and 19: queue pairs that die under a pull; its reads are posted again on others, which
/// are made anew by themselves.
#[test]
fn lost_queue_pairs_are_made_anew_and_requests_do_not_notice() {
    if on_system_verbs() {
        return; // it needs the fake library's faults
    }
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let (d, p) = fabric.pair(&shard).await;
        let wire = fabric.wire.as_ref().expect("the fake wire");
        for nth in [0, 3, 1, 7] {
            wire.rule(nth, fake_verbs::Rule::Fail(12));
            migrate(&d, "p", &prompt(40)).await;
        }
        until(&shard, SOON, "queue pairs are made anew", || {
            d.peers.counters().rdma_pairs_lost >= 3 && d.can_pull_from("p")
        })
        .await;
        migrate(&d, "p", &prompt(40)).await;
        assert_eq!(path(&d, "p"), "rdma");
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

/// The card reaches nothing although the control connection does: a node that may take TCP
/// takes it, and says why.
#[test]
fn a_probe_that_fails_falls_back_to_tcp_and_says_why() {
    if on_system_verbs() {
        return; // it needs the fake library's faults
    }
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let wire = fabric.wire.as_ref().expect("the fake wire");
        wire.lose_all(true);
        // One that offers no shared memory, as if it were on another host.
        let p = fabric.node(
            &shard,
            choose("p", Role::Prefill, TransportChoice::Rdma),
            &fabric.far,
        );
        let d = fabric.node(
            &shard,
            choose("d", Role::Decode, TransportChoice::Auto),
            &fabric.near,
        );
        d.peers.dial(p.addr());
        until(&shard, 4 * SOON, "the pair comes up", || {
            d.can_pull_from("p")
        })
        .await;
        assert_eq!(path(&d, "p"), "tcp");
        let told = d.log.paths.borrow().clone();
        let [(_, "tcp", why)] = told.as_slice() else {
            panic!("{told:?}");
        };
        assert!(why.contains("status 12"), "{why}");
        assert_eq!(d.peers.counters().path_fallbacks, 1);
        migrate(&d, "p", &prompt(10)).await;
        assert_eq!(p.peers.transport_counters().1.pages, 10);
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

/// With `--transport rdma` there is no other way: the pair comes up once the card reaches.
#[test]
fn rdma_only_waits_for_rdma_and_says_why() {
    if on_system_verbs() {
        return; // it needs the fake library's faults
    }
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let wire = fabric.wire.as_ref().expect("the fake wire");
        wire.lose_all(true);
        let p = fabric.node(
            &shard,
            choose("p", Role::Prefill, TransportChoice::Rdma),
            &fabric.far,
        );
        let d = fabric.node(
            &shard,
            choose("d", Role::Decode, TransportChoice::Rdma),
            &fabric.near,
        );
        d.peers.dial(p.addr());
        until(&shard, 4 * SOON, "it says why", || {
            let told = d.log.paths.borrow();
            told.iter()
                .any(|(_, path, why)| path.is_empty() && why.contains("status 12"))
        })
        .await;
        assert!(!d.can_pull_from("p"));
        wire.lose_all(false);
        until(&shard, 4 * SOON, "the pair comes up", || {
            d.can_pull_from("p")
        })
        .await;
        migrate(&d, "p", &prompt(10)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

/// S3: a peer that dies takes its session; ours destroys both ways' queue pairs, the leases end,
/// and the same peer works again after its restart.
#[test]
fn a_session_that_ends_destroys_its_queue_pairs() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let (d, p) = fabric.pair(&shard).await;
        let pull = d.ask("p", &prompt(30), Duration::from_secs(20));
        p.peers.stop();
        until(&shard, SOON, "the session ends", || !d.can_pull_from("p")).await;
        drop(pull);
        at_rest(&shard, &[&d, &p], SOON).await;
        if let Some(wire) = &fabric.wire {
            until(&shard, SOON, "no queue pair is left", || {
                wire.pairs() == (0, 0)
            })
            .await;
        }
        stop(&[&d, &p]);
    });
}

/// A session that ends while its probe waits gives the probe's pages and queue pair back.
#[test]
fn a_session_that_ends_in_its_probe_leaves_nothing_behind() {
    if on_system_verbs() {
        return; // it needs the fake library's faults
    }
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let wire = fabric.wire.as_ref().expect("the fake wire");
        wire.lose_all(true);
        let p = fabric.node(
            &shard,
            choose("p", Role::Prefill, TransportChoice::Rdma),
            &fabric.far,
        );
        let d = fabric.node(
            &shard,
            choose("d", Role::Decode, TransportChoice::Rdma),
            &fabric.near,
        );
        d.peers.dial(p.addr());
        until(&shard, 4 * SOON, "a probe is under way", || {
            d.free_pages() < POOL_PAGES
        })
        .await;
        d.peers.stop();
        at_rest(&shard, &[&d, &p], 2 * SOON).await;
        until(&shard, SOON, "no queue pair is left", || {
            wire.pairs() == (0, 0)
        })
        .await;
        stop(&[&d, &p]);
    });
}

#[test]
fn a_node_that_must_have_rdma_and_has_none_does_not_start() {
    on_shard(|shard| async move {
        let fabric = Fabric::new();
        let mut bad = choose("d", Role::Decode, TransportChoice::Rdma);
        bad.rdma.device = Some("mlx5_77".into());
        let refused = start_refused(&shard, bad, fabric.library());
        assert!(refused.contains("--transport rdma"), "{refused}");
        assert!(refused.contains("mlx5_77"), "{refused}");
    });
}
