//! B: old identities after a restart.

use crate::harness::{
    Act, Fleet, Pair, PeerEnd, Spec, eventually, free_port, ids_of, tiny_qwen2, two_at_a_time,
};
use crate::load::Clients;
use crate::steps::{
    WITHIN, identity, long_body, migration_steps, pair_and_text, reference, short_body,
};
use kvserve_kv::session::Role;
use kvserve_kv::session::frame::{Challenge, Frame, RefuseReason};
use kvserve_kv::session::seal::{FrameStream, open_plain, plain};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Restarts every kind of process on its address, under load; after each the next request is
/// answered, with the right text.
fn restarts_under_load(rounds: usize) {
    let bodies = vec![short_body(1), long_body(2)];
    let texts = reference(&bodies);
    let (body, expected) = (bodies[0].clone(), texts[0].clone());
    let requests: Vec<_> = bodies.into_iter().zip(texts).collect();
    let mut fleet = Fleet::start(1, 1);
    let api = fleet.proxy.api();
    for round in 0..rounds {
        let clients = Clients::start(api, 2, usize::MAX, requests.clone(), 0);
        std::thread::sleep(Duration::from_millis(60 + 13 * (round as u64 % 7)));
        let name = match round % 3 {
            0 => {
                fleet.prefill[0].restart();
                "prefill"
            }
            1 => {
                fleet.decode[0].restart();
                "decode"
            }
            _ => {
                fleet.proxy.restart();
                "proxy"
            }
        };
        // One second is promised; the bound is one of liveness.
        let back = Instant::now();
        eventually(
            &format!("a request after the restart of {name}"),
            Duration::from_secs(6),
            || {
                let answer = fleet.proxy.try_ask(&body).ok()?;
                (answer.status == 200).then(|| assert_eq!(ids_of(&answer.json()), expected))
            },
        );
        if rounds > 50 {
            println!("round {round}: {name} back after {:?}", back.elapsed());
        }
        // Wrong texts and requests without an end panic in the clients.
        let tally = clients.stop();
        assert!(tally.right + tally.refused.len() + tally.cut > 0);
        fleet.wait_whole();
    }
    // The migrations of the last incarnations work.
    let before = fleet.decode[0].metric("kvserve_migrations_committed_total");
    assert_eq!(fleet.proxy.ids(&body), expected);
    let after = fleet.decode[0].metric("kvserve_migrations_committed_total");
    assert_eq!(after, before + 1.0, "a request migrates after all restarts");
    fleet.wait_restored("after the restarts");
}

#[test]
fn fault_17_a_restart_on_the_same_address_under_load_uses_nothing_old() {
    let _turn = two_at_a_time();
    restarts_under_load(6);
}

#[test]
#[ignore = "a hundred restarts"]
fn fault_17_a_hundred_restarts_on_the_same_address_under_load() {
    let _turn = two_at_a_time();
    restarts_under_load(100);
}

#[test]
fn fault_17_an_older_life_of_a_node_is_told_so_and_not_heard() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let older = identity().local("twin", Role::Decode, "");
    // Lives are told apart by their start, to 66 us.
    std::thread::sleep(Duration::from_millis(1));
    let newer = identity().local("twin", Role::Decode, "");
    assert!(older.incarnation < newer.incarnation);
    let mut first = PeerEnd::dial(prefill.spec.peer, older.clone()).expect("the first life");
    let mut second = PeerEnd::dial(prefill.spec.peer, newer).expect("the second life");
    assert!(first.is_ended(Duration::from_secs(3)), "the older goes on");
    let refused = PeerEnd::dial(prefill.spec.peer, older)
        .err()
        .expect("an older life came back");
    assert_eq!(refused.reason, RefuseReason::Superseded, "{}", refused.text);
    assert!(!second.is_ended(Duration::from_millis(500)));
}

#[test]
fn fault_18_three_of_four_decode_nodes_die_and_traffic_goes_on() {
    let _turn = two_at_a_time();
    let bodies = vec![short_body(1), short_body(2)];
    let texts = reference(&bodies);
    let requests: Vec<_> = bodies.into_iter().zip(texts).collect();
    let mut fleet = Fleet::start(4, 1);
    let clients = Clients::start(fleet.proxy.api(), 4, usize::MAX, requests.clone(), 0);
    std::thread::sleep(Duration::from_millis(300));
    for node in &mut fleet.decode[1..] {
        node.kill();
    }
    // Requests that the dead had are lost at most; after their leases everything is served.
    std::thread::sleep(Duration::from_millis(3500));
    let tally = clients.stop();
    assert!(tally.right > 0 && tally.cut == 0, "{tally:?}");
    let after = Clients::start(fleet.proxy.api(), 4, 40, requests, 0).join();
    assert_eq!(after.right, 40, "{after:?}");
    assert!(fleet.proxy.ready());
    fleet.wait_restored("after three deaths");
}

#[test]
fn fault_19_a_session_that_dies_at_each_step_comes_again_by_itself() {
    let _turn = two_at_a_time();
    let (pair, body, expected) = pair_and_text();
    for (name, flow) in migration_steps() {
        let struck = pair.relay.once(flow, || Act::Close);
        let began = Instant::now();
        assert_eq!(pair.decode.ids(&body), expected, "{name}");
        assert!(struck.load(SeqCst), "{name} never passed");
        assert!(began.elapsed() < WITHIN, "{name}");
        pair.serves_by_migration(&body, &expected, name);
        pair.wait_restored(name);
    }
}

/// A first word of another version.
fn challenge(protocol_min: u16, protocol_max: u16) -> Vec<u8> {
    plain(&Frame::Challenge(Challenge {
        protocol_min,
        protocol_max,
        nonce: [7; 32],
        node_id: "from-elsewhere".into(),
        incarnation: 1,
        role: Role::Decode,
    }))
}

#[test]
fn fault_20_a_peer_of_another_version_is_refused_with_a_reason_at_once() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    for (min, max) in [(9, 9), (2, 40), (0, 0)] {
        let mut stream = TcpStream::connect(prefill.spec.peer).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("limit");
        let began = Instant::now();
        stream.write_all(&challenge(min, max)).expect("sent");
        let mut bytes = Vec::new();
        stream
            .read_to_end(&mut bytes)
            .expect("an answer, then the end");
        let mut frames = FrameStream::new();
        frames.push(&bytes);
        let frame = frames.next_frame().expect("a frame").expect("a frame");
        match open_plain(frame).expect("a plain frame") {
            Frame::Refused { reason, text } => {
                assert_eq!(reason, RefuseReason::ProtocolRange);
                assert!(text.contains(&format!("protocol {min} to {max}")), "{text}");
            }
            other => panic!("{other:?}"),
        }
        // Long before the handshake's limit of 2 s: it was refused, not forgotten.
        assert!(began.elapsed() < Duration::from_millis(1500));
    }
    // A range that overlaps is taken.
    let mut stream = TcpStream::connect(prefill.spec.peer).expect("connect");
    stream.write_all(&challenge(1, 40)).expect("sent");
    let mut head = [0; 5];
    stream.read_exact(&mut head).expect("their challenge");
    assert_eq!(head[4], 1, "a challenge, not a refusal");
}

#[test]
fn fault_20_nodes_that_do_not_match_are_refused_and_both_serve_on() {
    let _turn = two_at_a_time();
    let body = short_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let prefill = Spec::new("prefill", "prefill-0")
        .join(free_port())
        .arg("--dtype bf16")
        .start();
    let mut decode = Spec::new("decode", "decode-0").join(prefill.spec.peer);
    decode.model = tiny_qwen2();
    let decode = decode.start();
    eventually("the mismatch is logged", WITHIN, || {
        decode.log().contains("differ").then_some(())
    });
    assert!(!decode.ready() && decode.healthy() && prefill.healthy());
    assert_eq!(decode.ids(&body), expected, "it computes the prompt itself");
}

#[test]
fn fault_17_after_a_restart_of_either_side_the_pair_works_within_one_back_off() {
    let _turn = two_at_a_time();
    let body = short_body(9);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let mut pair = Pair::start();
    for round in 0..3 {
        pair.prefill.restart();
        pair.serves_by_migration(&body, &expected, &format!("prefill restart {round}"));
        pair.decode.restart();
        pair.serves_by_migration(&body, &expected, &format!("decode restart {round}"));
    }
    pair.wait_restored("after the restarts");
}

#[test]
fn fault_17_a_node_that_was_killed_starts_again_on_its_ports_at_once() {
    let _turn = two_at_a_time();
    // The kernel lets the ports of a dead process go some milliseconds later.
    let mut prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    for _ in 0..12 {
        prefill.restart();
    }
    assert!(prefill.lives() && prefill.healthy());
    // A second server on a port that is taken says so, and does not share it.
    let mut second = Spec::new("serve", "second");
    second.api = prefill.api();
    let (code, text) = second.run_to_end();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("in use"), "{text}");
}
