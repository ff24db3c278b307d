//! Two nodes on one host move pages by shared memory; when that cannot be, by TCP, and say why.

mod peer_bed;

use kvserve_kv::PageId;
use kvserve_kv::ledger::PageState;
use kvserve_kv::peer::{
    FailReason, MigrationEvent, NotBegun, PeerConfig, PrefillAsk, Role, Stage, TransportChoice,
};
use kvserve_kv::transport::code;
use kvserve_runtime::{Deadline, EndReason, Nanos, Shard};
use peer_bed::relay::Relay;
use peer_bed::*;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::Duration;

fn choose(node_id: &str, role: Role, transport: TransportChoice) -> PeerConfig {
    PeerConfig {
        transport,
        ..config(node_id, role)
    }
}

async fn pair_of(shard: &Shard, d: TransportChoice, p: TransportChoice) -> (Node, Node) {
    let p = Node::with(shard, choose("p", Role::Prefill, p));
    let d = Node::with(shard, choose("d", Role::Decode, d));
    d.peers.dial(p.addr());
    until(shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
    (d, p)
}

async fn shm_pair(shard: &Shard) -> (Node, Node) {
    pair_of(shard, TransportChoice::Auto, TransportChoice::Auto).await
}

fn path(node: &Node, peer: &str) -> &'static str {
    let peers = node.peers.peers();
    let peer = peers.iter().find(|view| view.node_id == peer);
    peer.expect("a session").path
}

#[test]
fn a_pair_on_one_host_copies_its_pages() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
        assert_eq!((path(&d, "p"), path(&p, "d")), ("shm", "shm"));
        for count in [10, 1, 120] {
            migrate(&d, "p", &prompt(count)).await;
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        assert_eq!(d.peers.shm_counters().pages, 131);
        assert_eq!(p.peers.transport_counters().1.pages, 0, "none went by TCP");
        let (mapped, given) = (d.peers.counters(), p.peers.counters());
        assert_eq!((mapped.pools_mapped, mapped.path_fallbacks), (1, 0));
        assert_eq!((given.pools_given, given.pools_refused), (1, 0));
        let told = d.log.paths.borrow();
        assert_eq!(*told, [("p".to_owned(), "shm", String::new())]);
        stop(&[&d, &p]);
    });
}

#[test]
fn hybrids_copy_from_each_other_over_one_session() {
    on_shard(|shard| async move {
        let a = Node::with(&shard, choose("a", Role::Hybrid, TransportChoice::Shm));
        let b = Node::with(&shard, choose("b", Role::Hybrid, TransportChoice::Auto));
        a.peers.dial(b.addr());
        until(&shard, SOON, "both can pull", || {
            a.can_pull_from("b") && b.can_pull_from("a")
        })
        .await;
        for _ in 0..5 {
            migrate(&a, "b", &prompt(7)).await;
            migrate(&b, "a", &prompt(9)).await;
        }
        assert_eq!((path(&a, "b"), path(&b, "a")), ("shm", "shm"));
        assert_eq!(a.peers.shm_counters().pages, 35);
        assert_eq!(b.peers.shm_counters().pages, 45);
        at_rest(&shard, &[&a, &b], SOON).await;
        stop(&[&a, &b]);
    });
}

/// Pages are reused all the time while another pull is under way and cancelled at any moment.
#[test]
fn cancels_at_any_moment_restore_both_books_and_nothing_wrong_arrives() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
        p.service.script.set(Script::Serve { step: 1 });
        for round in 0..60u64 {
            let migration = d.ask("p", &prompt(20), Duration::from_secs(30));
            shard.sleep(Duration::from_micros(round * 450)).await;
            drop(migration);
            if round % 10 == 0 {
                migrate(&d, "p", &prompt(33)).await;
            }
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        migrate(&d, "p", &prompt(20)).await;
        assert_eq!(path(&d, "p"), "shm");
        stop(&[&d, &p]);
    });
}

#[test]
fn forty_migrations_share_a_copy_queue() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
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

/// A frozen peer's memory can be read on: the pages arrive, and only COMMIT tells.
#[test]
fn a_peer_that_hears_nothing_any_more_fails_the_migration_at_commit() {
    on_shard(|shard| async move {
        let p = Node::with(&shard, choose("p", Role::Prefill, TransportChoice::Auto));
        let d = Node::with(&shard, choose("d", Role::Decode, TransportChoice::Shm));
        let relay = Relay::to(p.addr());
        d.peers.dial(relay.address);
        until(&shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
        p.service.script.set(Script::Serve { step: 1 });
        let mut migration = d.ask("p", &prompt(40), Duration::from_secs(30));
        let granted = migration.next().await;
        assert!(matches!(granted, MigrationEvent::Granted), "{granted:?}");
        relay.deafen();
        let story = follow(&mut migration).await;
        let ended_at = Nanos::now();
        assert!(story.placed, "every page was copied and checked");
        let error = story.failed.expect("no answer to COMMIT");
        drop(migration);
        assert_eq!(error.stage, Stage::Commit);
        assert_eq!(error.reason, FailReason::StageLimit);
        assert_eq!(d.peers.shm_counters().pages, 40);
        // Its target pages are quiet by themselves: they come back at once.
        until(&shard, Duration::from_millis(400), "pages back", || {
            d.free_pages() == POOL_PAGES
        })
        .await;
        assert!(Nanos::now().since(ended_at) < Duration::from_millis(400));
        at_rest(&shard, &[&d, &p], Duration::from_secs(10)).await;
        relay.thaw();
        // Dials that waited in the relay come through now; the last of them stays.
        shard.sleep(Duration::from_secs(1)).await;
        until(&shard, Duration::from_secs(10), "it works again", || {
            d.can_pull_from("p")
        })
        .await;
        migrate(&d, "p", &prompt(12)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn a_peer_that_dies_ends_the_attempt_and_a_new_session_copies_again() {
    on_shard(|shard| async move {
        let p = Node::with(&shard, choose("p", Role::Prefill, TransportChoice::Auto));
        let d = Node::with(&shard, choose("d", Role::Decode, TransportChoice::Auto));
        let relay = Relay::to(p.addr());
        d.peers.dial(relay.address);
        until(&shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
        p.service.script.set(Script::StopAfter { pages: 5 });
        let mut migration = d.ask("p", &prompt(12), Duration::from_secs(30));
        while !matches!(migration.next().await, MigrationEvent::FirstToken(_)) {}
        let cut_at = Nanos::now();
        relay.cut();
        let error = follow(&mut migration).await.failed.expect("it died");
        drop(migration);
        assert_eq!(error.reason, FailReason::SessionEnded, "{error}");
        assert!(Nanos::now().since(cut_at) < Duration::from_secs(1));
        at_rest(&shard, &[&d, &p], SOON).await;
        p.service.script.set(Script::Serve { step: 2 });
        until(&shard, SOON, "it works again", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(12)).await;
        assert_eq!(path(&d, "p"), "shm");
        assert_eq!(d.peers.counters().pools_mapped, 2);
        stop(&[&d, &p]);
    });
}

/// The integrity rule: the second page that does not match takes the way out of use, shared
/// memory first, then TCP; no wrong page is ever committed.
#[test]
fn a_way_with_two_wrong_pages_is_left() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
        p.service.script.set(Script::SpoilEarly);
        let mut wrong = 0;
        for _ in 0..400 {
            if !d.can_pull_from("p") {
                break;
            }
            let prompt = prompt(3);
            let mut migration = d.ask("p", &prompt, Duration::from_secs(30));
            let story = follow(&mut migration).await;
            match (story.committed, story.failed) {
                (Some(pages), None) => d.take(&pages, &prompt),
                (None, Some(error)) => {
                    assert!(matches!(error.reason, FailReason::Checksum(0)), "{error:?}");
                    wrong += 1;
                }
                other => panic!("{other:?}"),
            }
            let expected = match wrong {
                0 | 1 => "shm",
                2 | 3 => "tcp",
                _ => "",
            };
            assert_eq!(path(&d, "p"), expected, "{wrong} wrong pages");
        }
        assert_eq!(wrong, 4, "too few pages were spoilt in time");
        let counters = d.peers.counters();
        assert_eq!(counters.checksum_mismatches, 4);
        assert_eq!((counters.path_fallbacks, counters.paths_out_of_use), (1, 2));
        let told: Vec<_> = d.log.paths.borrow().iter().map(|told| told.1).collect();
        assert_eq!(told, ["shm", "tcp", ""]);
        assert!(d.log.paths.borrow()[1].2.contains("did not match"));
        // The peer is not asked any more in this session, which ends; the caller is told so.
        let ask = PrefillAsk {
            request: d.peers.next_request_id(),
            attempt: 1,
            held_pages: 0,
            prompt: vec![1],
            payload: Vec::new(),
            into: d.targets(1),
            deadline: Deadline::after(Nanos::now(), Duration::from_secs(9)),
        };
        let Err(refused) = d.peers.prefill("p", ask) else {
            panic!("a way out of use");
        };
        assert!(
            matches!(
                refused.error.reason,
                FailReason::NotBegun(NotBegun::NoDataConnection | NotBegun::NoSession)
            ),
            "{:?}",
            refused.error.reason
        );
        d.ledger.with(|ledger| ledger.free(&refused.into));
        // A new session probes the ways anew: the pair works again by itself (I11).
        let end = Deadline::after(shard.now(), SOON);
        while !d.can_pull_from("p") {
            assert!(!end.passed(shard.now()), "no way came back");
            shard.sleep(Duration::from_millis(10)).await;
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn either_side_may_insist_on_tcp_and_the_reason_is_told() {
    for (d, p, why) in [
        (
            TransportChoice::Tcp,
            TransportChoice::Auto,
            "--transport is tcp",
        ),
        (TransportChoice::Auto, TransportChoice::Tcp, "offers no"),
    ] {
        on_shard(move |shard| async move {
            let (d, p) = pair_of(&shard, d, p).await;
            migrate(&d, "p", &prompt(6)).await;
            assert_eq!((path(&d, "p"), path(&p, "d")), ("tcp", "tcp"));
            assert_eq!(d.peers.shm_counters().pages, 0);
            assert_eq!(d.peers.counters().path_fallbacks, 0, "it was not tried");
            let told = d.log.paths.borrow()[0].clone();
            assert_eq!(told.1, "tcp");
            assert!(told.2.contains(why), "{}", told.2);
            drop(told);
            stop(&[&d, &p]);
        });
    }
}

#[test]
fn a_node_that_insists_on_shared_memory_never_pulls_by_tcp() {
    on_shard(|shard| async move {
        let p = Node::with(&shard, choose("p", Role::Prefill, TransportChoice::Tcp));
        let d = Node::with(&shard, choose("d", Role::Decode, TransportChoice::Shm));
        d.peers.dial(p.addr());
        until(&shard, SOON, "told", || !d.log.paths.borrow().is_empty()).await;
        shard.sleep(Duration::from_millis(300)).await;
        assert!(!d.can_pull_from("p"));
        assert_eq!(path(&d, "p"), "");
        assert_eq!(d.log.paths.borrow()[0].1, "");
        stop(&[&d, &p]);
    });
}

/// A stranger of the same user who finds the socket gets no descriptor, whatever it says.
#[test]
fn strangers_get_no_pool() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
        let name = p.peers.pool_socket().expect("an offer").to_owned();
        assert_eq!(d.peers.pool_socket(), None, "it serves nobody");
        let strangers = std::thread::spawn(move || {
            let address = UnixAddr::from_abstract_name(&name).expect("a name");
            // A `DataOpen` that nobody has signed.
            let mut forged = vec![59, 0, 0, 0, 6];
            forged.resize(4 + 59, 7);
            for bytes in [vec![0xFF; 100], forged, Vec::new()] {
                let mut stream = UnixStream::connect_addr(&address).expect("it listens");
                stream.write_all(&bytes).expect("room");
                stream
                    .set_read_timeout(Some(Duration::from_secs(20)))
                    .expect("a timeout");
                // Closed without a byte; a request that was not read shows as a reset.
                match stream.read(&mut [0; 64]) {
                    Ok(count) => assert_eq!(count, 0, "an answer to a stranger"),
                    Err(error) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                    }
                }
            }
        });
        until(
            &shard,
            Duration::from_secs(60),
            "strangers are gone",
            || strangers.is_finished(),
        )
        .await;
        strangers.join().expect("no answer");
        let counters = p.peers.counters();
        assert_eq!(counters.pools_refused, 3, "{counters:?}");
        assert_eq!(counters.pools_given, 1);
        migrate(&d, "p", &prompt(4)).await;
        stop(&[&d, &p]);
    });
}

/// The owner's books go wrong and pages of a live lease are used anew: the reader is told, before
/// or after whatever it copied, and the next lease of the same pages is good.
#[test]
fn pages_that_are_reused_under_a_reader_fail_its_attempt() {
    on_shard(|shard| async move {
        let (d, p) = shm_pair(&shard).await;
        p.service.script.set(Script::Serve { step: 1 });
        let mut migration = d.ask("p", &prompt(200), Duration::from_secs(30));
        while !matches!(migration.next().await, MigrationEvent::Granted) {}
        until(&shard, SOON, "some pages are in", || {
            d.peers.attempts()[0].pages_checked >= 5
        })
        .await;
        for page in (0..POOL_PAGES as u32).map(PageId) {
            if p.ledger.with(|ledger| ledger.state(page)) == PageState::Leased {
                p.pool.raise_generation(page);
            }
        }
        let error = follow(&mut migration).await.failed.expect("it must fail");
        drop(migration);
        let moved = FailReason::Read(EndReason::Failed(code::GENERATION));
        assert_eq!(error.reason, moved, "{error}");
        assert_eq!(d.peers.shm_counters().generations_moved, 1);
        at_rest(&shard, &[&d, &p], SOON).await;
        assert_eq!(path(&d, "p"), "shm", "the way is as good as before");
        migrate(&d, "p", &prompt(200)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}
