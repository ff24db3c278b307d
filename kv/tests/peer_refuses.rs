//! Sessions and prompts that are not taken, and what each side learns of it.

mod peer_bed;

use kvserve_kv::peer::{FailReason, PeerKey, PeerState, RefuseReason, Retry, Role, Stage};
use peer_bed::*;
use std::io::{Read, Write};
use std::time::Duration;

/// Two nodes that must not come together, and the reason on both sides.
fn never_up(bend: fn(&mut kvserve_kv::peer::PeerConfig), reason: RefuseReason) {
    on_shard(move |shard| async move {
        let p = Node::start(&shard, "p", Role::Prefill);
        let mut other = config("d", Role::Decode);
        bend(&mut other);
        let d = Node::with(&shard, other);
        d.peers.dial(p.addr());
        until(&shard, SOON, "both have refused", || {
            !d.log.refusals.borrow().is_empty() && !p.log.refusals.borrow().is_empty()
        })
        .await;
        for node in [&d, &p] {
            for refusal in node.log.refusals.borrow().iter() {
                assert_eq!(refusal.reason, reason, "{refusal:?}");
            }
            assert!(node.log.ups.borrow().is_empty());
        }
        assert!(d.log.refusals.borrow().len() < 20, "no back-off");
        stop(&[&d, &p]);
    });
}

#[test]
fn another_key() {
    never_up(
        |config| config.key = PeerKey::new([4; 32]),
        RefuseReason::BadProof,
    );
}

#[test]
fn another_model_layout_page_size_or_checksum() {
    never_up(|config| config.fingerprint = 9, RefuseReason::Fingerprint);
    never_up(|config| config.layout_hash = 9, RefuseReason::Layout);
    never_up(|config| config.page_bytes = 10_000, RefuseReason::PageBytes);
    never_up(
        |config| config.checksums = kvserve_kv::ChecksumMode::Off,
        RefuseReason::Settings,
    );
}

#[test]
fn a_node_that_dials_itself_or_its_namesake() {
    never_up(|config| config.node_id = "p".into(), RefuseReason::SameNode);
}

#[test]
fn a_later_start_of_a_node_supersedes_the_earlier() {
    on_shard(|shard| async move {
        let p = Node::start(&shard, "p", Role::Prefill);
        let old = Node::start(&shard, "d", Role::Decode);
        old.peers.dial(p.addr());
        until(&shard, SOON, "the old one is up", || old.can_pull_from("p")).await;
        let mut later = config("d", Role::Decode);
        later.incarnation += 1;
        let new = Node::with(&shard, later);
        new.peers.dial(p.addr());
        until(&shard, SOON, "the new one is up", || new.can_pull_from("p")).await;
        until(&shard, SOON, "the old one is told", || {
            old.log.downs.borrow().as_slice() == [("p".into(), RefuseReason::Superseded, true)]
        })
        .await;
        // It dials again, and is refused for the same reason.
        until(&shard, SOON, "the old one is refused", || {
            let refusals = old.log.refusals.borrow();
            refusals
                .iter()
                .any(|refusal| refusal.reason == RefuseReason::Superseded && refusal.by_peer)
        })
        .await;
        migrate(&new, "p", &prompt(5)).await;
        assert_eq!(p.peers.peers().len(), 1);
        at_rest(&shard, &[&new, &p, &old], SOON).await;
        stop(&[&new, &old, &p]);
    });
}

#[test]
fn a_service_that_refuses_says_why_and_gets_nothing_of_the_books() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        for (kind, reason, retry) in [
            (
                RefusalKind::Busy,
                FailReason::Busy { retry_ms: 7 },
                Retry::OtherPair,
            ),
            (RefusalKind::Invalid, FailReason::Refused(42), Retry::Fail),
            (
                RefusalKind::Draining,
                FailReason::Draining,
                Retry::OtherPair,
            ),
        ] {
            p.service.script.set(Script::Refuse(kind));
            let mut migration = d.ask("p", &prompt(3), Duration::from_secs(30));
            let error = follow(&mut migration).await.failed.expect("refused");
            assert_eq!(
                (error.stage, error.reason, error.retry),
                (Stage::Pair, reason, retry)
            );
            let busy = kind == RefusalKind::Busy;
            assert_eq!(error.retry_after.is_some(), busy);
        }
        // A pool that is full is busy too, at once.
        p.service.script.set(Script::StopAfterGrant);
        let hold = d.ask("p", &prompt(200), Duration::from_secs(30));
        until(&shard, SOON, "200 pages are leased", || {
            p.free_pages() == 56
        })
        .await;
        p.service.script.set(Script::Serve { step: 1 });
        let mut migration = d.ask("p", &prompt(56), Duration::from_secs(30));
        let story = follow(&mut migration).await;
        d.take(&story.committed.expect("56 pages fit"), &prompt(56));
        drop(migration);
        let others = {
            let mut pages = Vec::new();
            let free = p.free_pages() - 2;
            p.ledger
                .with(|ledger| {
                    ledger.allocate(free, kvserve_kv::ledger::AllocateAs::Building, &mut pages)
                })
                .expect("free pages");
            pages
        };
        let mut migration = d.ask("p", &prompt(3), Duration::from_secs(30));
        let error = follow(&mut migration).await.failed.expect("busy");
        assert_eq!(error.reason, FailReason::Busy { retry_ms: 5 });
        p.ledger.with(|ledger| ledger.free(&others));
        drop((hold, migration));
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn a_publisher_that_is_dropped_aborts_and_wrong_bytes_are_noticed() {
    on_shard(|shard| async move {
        let p = Node::start(&shard, "p", Role::Prefill);
        let mut patient = config("d", Role::Decode);
        patient.limits.mismatches_max = u32::MAX;
        let d = Node::with(&shard, patient);
        d.peers.dial(p.addr());
        until(&shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
        p.service.script.set(Script::DropAfterGrant);
        let mut migration = d.ask("p", &prompt(3), Duration::from_secs(30));
        let error = follow(&mut migration).await.failed.expect("aborted");
        assert!(matches!(error.reason, FailReason::Aborted(_)), "{error:?}");
        // The first page is written over after its checksum is out: whether that happens
        // before or after it is pulled, never are other bytes committed.
        p.service.script.set(Script::Spoil);
        for _ in 0..10 {
            let prompt = prompt(8);
            let mut migration = d.ask("p", &prompt, Duration::from_secs(30));
            let story = follow(&mut migration).await;
            match (story.committed, story.failed) {
                (Some(pages), None) => d.take(&pages, &prompt),
                (None, Some(error)) => {
                    assert!(matches!(error.reason, FailReason::Checksum(0)), "{error:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        drop(migration);
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn strangers_garbage_and_silence_cost_little_and_end_nothing() {
    on_shard(|shard| async move {
        let mut patient = config("p", Role::Prefill);
        patient.limits.half_open_max = 8;
        patient.limits.handshake = Duration::from_millis(300);
        let p = Node::with(&shard, patient);
        let address = p.addr();
        let strangers = std::thread::spawn(move || {
            let mut held = Vec::new();
            for number in 0..40u8 {
                let Ok(mut stream) = std::net::TcpStream::connect(address) else {
                    continue;
                };
                let bytes: Vec<u8> = (0..200).map(|at: u8| at.wrapping_mul(number)).collect();
                if number % 2 == 0 {
                    // It may be closed on us already.
                    let _sent: std::io::Result<()> = stream.write_all(&bytes);
                }
                held.push(stream);
            }
            // Each ends by the other side's doing.
            for mut stream in held {
                stream
                    .set_read_timeout(Some(Duration::from_secs(5)))
                    .unwrap();
                let mut sink = [0; 4096];
                loop {
                    match stream.read(&mut sink) {
                        Ok(0) => break,
                        Ok(_) => {}
                        Err(error) => {
                            let late = error.kind() == std::io::ErrorKind::WouldBlock;
                            assert!(!late, "a stranger is kept");
                            break;
                        }
                    }
                }
            }
        });
        until(&shard, SOON, "strangers are gone", || {
            strangers.is_finished()
        })
        .await;
        strangers.join().expect("no stranger is kept");
        let counters = p.peers.counters();
        assert!(counters.half_open_refused > 0, "{counters:?}");
        assert!(counters.handshakes_failed > 0);
        assert_eq!(counters.sessions_up, 0);
        let d = Node::start(&shard, "d", Role::Decode);
        d.peers.dial(address);
        until(&shard, SOON, "a friend still gets in", || {
            d.can_pull_from("p") && d.sees("p", PeerState::Up)
        })
        .await;
        migrate(&d, "p", &prompt(4)).await;
        stop(&[&d, &p]);
    });
}
