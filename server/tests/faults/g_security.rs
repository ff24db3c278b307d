//! G: security.

use crate::harness::{
    Pair, PeerEnd, Spec, closed_by_peer, free_port, ids_of, post_with, two_at_a_time,
};
use crate::steps::{identity, prompt, reference, short_body};
use kvserve_kv::session::frame::{AttemptId, Frame, RefuseReason, RequestId};
use kvserve_kv::session::seal::plain;
use kvserve_kv::session::{PeerKey, Role};
use serde_json::json;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

#[test]
fn fault_43_ports_that_others_reach_need_a_key_or_a_word() {
    let _turn = two_at_a_time();
    let wide = |port: SocketAddr| SocketAddr::from(([0, 0, 0, 0], port.port()));
    let mut serve = Spec::new("serve", "wide");
    serve.api = wide(serve.api);
    let (code, text) = serve.run_to_end();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("--insecure-no-auth"), "{text}");
    // `serve` has no key file on its command line here, so its peer port must stay on loopback.
    let serve = Spec::new("serve", "wide");
    let peer = wide(free_port());
    let (code, text) = serve.arg(&format!("--peer-listen {peer}")).run_to_end();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("--peer-key-file"), "{text}");
    // Faults on purpose are for loopback only.
    let mut chaos = Spec::new("serve", "wide").arg("--insecure-no-auth --chaos completion=lose@1");
    chaos.api = wide(chaos.api);
    let (code, text) = chaos.run_to_end();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("--chaos"), "{text}");
}

/// Frames that would do harm if they were believed.
fn harmful(incarnation: u64) -> Vec<Frame> {
    let id = AttemptId {
        request: RequestId {
            incarnation,
            counter: 1,
        },
        attempt: 1,
    };
    vec![
        Frame::Prefill {
            id,
            left_ns: 9_000_000_000,
            held_pages: 0,
            prompt: prompt(40, 1),
            payload: vec![0; 21],
        },
        Frame::Bye {
            reason: RefuseReason::Superseded,
        },
        Frame::Renew {
            grant_highest: u64::MAX,
            live: Vec::new(),
        },
        Frame::App {
            kind: 1,
            bytes: vec![2, 1, 1],
        },
        Frame::Welcome,
        Frame::Heartbeat,
    ]
}

#[test]
fn fault_43_no_frame_is_acted_on_before_authentication() {
    let _turn = two_at_a_time();
    let mut pair = Pair::start();
    let body = short_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    for port in [pair.prefill.spec.peer, pair.decode.spec.peer] {
        for frame in harmful(1) {
            let mut stream = TcpStream::connect(port).expect("connect");
            // It may be closed while it is being written to.
            let _ = stream.write_all(&plain(&frame));
            assert!(
                closed_by_peer(&mut stream, Duration::from_secs(4)),
                "{frame:?} was listened to"
            );
        }
        // Another key, and a name that is known.
        let local = identity().local("decode-0", Role::Decode, "");
        let refusal = PeerEnd::dial_with(port, local, PeerKey::new([3; 32]))
            .err()
            .expect("another key came up");
        assert!(
            matches!(
                refusal.reason,
                RefuseReason::BadProof | RefuseReason::SameNode
            ),
            "{refusal:?}"
        );
    }
    for node in [&pair.prefill, &pair.decode] {
        assert_eq!(node.pages("leased"), 0);
        assert_eq!(node.pages("building"), 0);
    }
    assert!(
        pair.decode.lives() && pair.prefill.lives(),
        "nobody was superseded"
    );
    pair.serves_by_migration(&body, &expected, "beside strangers");
}

#[test]
fn fault_43_a_recorded_handshake_is_of_no_use() {
    let _turn = two_at_a_time();
    // What an honest dialler says first, sent again: the acceptor's nonce is another one, so the
    // proof that was right once is wrong.
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let local = identity().local("honest", Role::Decode, "");
    let relay = crate::harness::Relay::to(prefill.spec.peer);
    let end = PeerEnd::dial(relay.address, local.clone()).expect("an honest session");
    drop(end);
    let (_, first) = kvserve_kv::session::Handshake::dial(local, PeerKey::new([0x5A; 32]), [9; 32]);
    for _ in 0..3 {
        let mut stream = TcpStream::connect(prefill.spec.peer).expect("connect");
        stream.write_all(&first).expect("sent");
        let _ = stream.write_all(&plain(&Frame::Proof([7; 32])));
        assert!(closed_by_peer(&mut stream, Duration::from_secs(4)));
    }
    assert!(prefill.healthy() && prefill.restored());
}

#[test]
fn fault_45_nothing_that_a_client_sends_names_a_peer_an_address_a_page_or_a_lease() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let body = short_body(2);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let honeypot = TcpListener::bind("127.0.0.1:0").expect("a port");
    honeypot.set_nonblocking(true).expect("non-blocking");
    let trap = honeypot.local_addr().expect("bound");
    let url = format!("http://{trap}");
    let fields = [
        json!({ "kv_transfer_params": {
            "do_remote_prefill": true, "remote_host": "127.0.0.1", "remote_port": trap.port(),
            "remote_block_ids": [1, 2, 3], "remote_engine_id": "x" } }),
        json!({ "bootstrap_host": "127.0.0.1", "bootstrap_port": trap.port(),
                "bootstrap_room": 1 }),
        json!({ "peer": trap.to_string(), "prefill_node": trap.to_string(), "node": url }),
        json!({ "lease": 1, "epoch": 1, "pages": [0, 1], "page": 0, "attempt": 1,
                "incarnation": 1 }),
        json!({ "metadata": { "peer": url }, "user": url }),
    ];
    for extra in fields {
        let mut asked = body.clone();
        for (name, value) in extra.as_object().expect("fields") {
            asked[name] = value.clone();
        }
        let headers = format!(
            "x-kvserve-peer: {trap}\r\nx-kvserve-node: {trap}\r\nx-kvserve-lease: 1\r\n\
             x-forwarded-host: {trap}\r\nx-upstream: {url}\r\n"
        );
        let answer = post_with(pair.decode.api(), "/v1/completions", &headers, &asked);
        // Either a field is unknown and means nothing, or it is known and refused by name.
        match answer.status {
            200 => assert_eq!(ids_of(&answer.json()), expected, "{extra}"),
            400 => {
                let param = answer.json()["error"]["param"].clone();
                assert!(
                    extra.get(param.as_str().unwrap_or_default()).is_some(),
                    "{extra}"
                );
            }
            status => panic!("{status}: {}", answer.body),
        }
        // Nor does an answer tell of them.
        if answer.status == 200 {
            for word in ["lease", "incarnation", "prefill", "peer", "page"] {
                assert!(!answer.body.contains(word), "{}", answer.body);
            }
        }
    }
    assert!(
        honeypot.accept().is_err(),
        "an address from a body was dialled"
    );
    pair.wait_restored("after odd requests");
}
