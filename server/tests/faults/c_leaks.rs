//! C: leaks of pages, credits, memory.

use crate::harness::{
    Act, Fleet, Flow, Pair, PeerEnd, Spec, Way, eventually, free_port, ids_request, two_at_a_time,
};
use crate::load::Clients;
use crate::steps::{
    WITHIN, computes_nothing, identity, kind, pair_and_text, pair_and_text_over, prompt, reference,
    short_body, steps_over,
};
use kvserve_kv::session::Role;
use kvserve_kv::session::frame::{AttemptId, CommitOutcome, Frame, RequestId};
use kvserve_kv::transport::tcp::wire::ReadRequest;
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// A request under way whose client can leave.
fn open_request(pair: &Pair, body: &serde_json::Value) -> TcpStream {
    let text = body.to_string();
    let mut stream = TcpStream::connect(pair.decode.api()).expect("connect");
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{text}",
        text.len()
    )
    .expect("request is sent");
    stream
}

#[test]
fn fault_21_a_client_that_leaves_at_each_step_leaves_nothing_behind() {
    let _turn = two_at_a_time();
    client_leaves_at_each_step("tcp");
}

#[test]
fn fault_21_a_client_that_leaves_at_each_step_beside_shared_memory_neither() {
    let _turn = two_at_a_time();
    client_leaves_at_each_step("shm");
}

fn client_leaves_at_each_step(transport: &str) {
    let (pair, body, expected) = pair_and_text_over(transport);
    let mut body = body;
    body["stream"] = json!(true);
    // Computed to its end for nobody, it would take far longer than the waits below.
    body["max_tokens"] = json!(30_000);
    for (name, flow) in steps_over(transport) {
        let (client, left) = std::sync::mpsc::channel::<TcpStream>();
        let struck = pair.relay.once(flow, move || {
            // The client is gone before the step goes on.
            drop(left.recv());
            std::thread::sleep(Duration::from_millis(60));
            Act::Pass
        });
        client.send(open_request(&pair, &body)).expect("relay");
        eventually(name, WITHIN, || struck.load(SeqCst).then_some(()));
        pair.relay.pass();
        for node in [&pair.decode, &pair.prefill] {
            node.wait_restored(name, Duration::from_secs(3));
        }
        eventually("nothing is computed for nobody", WITHIN, || {
            (computes_nothing(&pair.decode) && computes_nothing(&pair.prefill)).then_some(())
        });
    }
    let mut whole = body;
    whole["stream"] = json!(false);
    whole["max_tokens"] = json!(12);
    pair.serves_by_migration(&whole, &expected, "after all clients left");
}

#[test]
fn fault_22_what_decode_rejects_costs_the_prefill_node_nothing() {
    let _turn = two_at_a_time();
    // 40 pages: a prompt of 30 pages and a pull of 30 more do not fit together.
    let pair = Pair::over("tcp", "--kv-cache 640KiB", "");
    let total = pair.decode.pages("total");
    assert!((20..=40).contains(&total), "{total} pages");
    let too_long = ids_request(&prompt(total as usize * 16 + 1, 1), 4);
    let answer = pair.decode.ask(&too_long);
    assert_eq!(answer.status, 400, "{}", answer.body);
    let bodies: Vec<_> = (0..6)
        .map(|seed| ids_request(&prompt(total as usize * 10, seed), 8))
        .collect();
    let texts = reference(&bodies);
    let requests: Vec<_> = bodies.into_iter().zip(texts).collect();
    let tally = Clients::start(pair.decode.api(), 6, 18, requests, 0).join();
    assert_eq!(tally.right, 18, "{tally:?}");
    pair.wait_restored("after a full pool");
}

/// Aborts at every moment, `count` times.
fn aborts(count: usize) {
    let pair = Pair::start();
    let mut body = ids_request(&prompt(600, 2), 400);
    body["stream"] = json!(true);
    for number in 0..count {
        let stream = open_request(&pair, &body);
        std::thread::sleep(Duration::from_micros(700 * (number as u64 % 29)));
        drop(stream);
    }
    pair.wait_restored("after the aborts");
    let short = short_body(2);
    let expected = reference(std::slice::from_ref(&short)).remove(0);
    pair.serves_by_migration(&short, &expected, "after the aborts");
}

#[test]
fn fault_23_aborts_at_any_moment_leave_the_pools_whole() {
    let _turn = two_at_a_time();
    aborts(150);
}

#[test]
#[ignore = "ten thousand aborts"]
fn fault_23_ten_thousand_aborts_leave_the_pools_whole() {
    let _turn = two_at_a_time();
    aborts(10_000);
}

#[test]
fn fault_24_forged_ids_are_refused_and_tables_stay_bounded() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let body = short_body(3);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let local = identity().local("forger", Role::Decode, "");
    let mut end = PeerEnd::dial(pair.prefill.spec.peer, local).expect("session");
    let mut data = end.open_data().expect("data connection");
    let forged = |counter: u64| AttemptId {
        request: RequestId {
            incarnation: end.incarnation,
            counter,
        },
        attempt: 1,
    };
    let ids: Vec<_> = (0..4000).map(forged).collect();
    let grantor = end.peer.incarnation;
    let before = pair.prefill.resident();
    for (number, id) in ids.iter().enumerate() {
        let lease = number as u64 * 0x9E37_79B9;
        end.send(&Frame::Commit {
            id: *id,
            grantor,
            lease,
            epoch: 1,
            pages: 1,
        });
        for frame in [
            Frame::Release {
                id: *id,
                lease,
                epoch: 1,
            },
            Frame::Cancel { id: *id },
            Frame::FenceAnswer { id: *id, lease },
            Frame::Watermark {
                id: *id,
                lease,
                first: 0,
                checksums: vec![1; 8],
            },
        ] {
            assert!(end.send(&frame), "the session ended at {frame:?}");
        }
        // Each question has its answer: COMMIT unknown, RELEASE taken.
        let outcome = end.wait_for("commit answer", |frame| match frame {
            Frame::CommitAnswer {
                id: of, outcome, ..
            } if of == *id => Some(outcome),
            _ => None,
        });
        assert_eq!(outcome, CommitOutcome::Unknown);
        if number % 100 == 0 {
            let read = ReadRequest {
                incarnation: grantor,
                lease,
                epoch: 1,
                first: 0,
                count: 1,
                page_bytes: identity().page_bytes as u32,
                position: number as u64 / 100,
            };
            let code = data.read(&read).expect("an answer").expect_err("no pages");
            assert_ne!(code, 0);
        }
    }
    let live: Vec<_> = ids.iter().map(|id| (*id, 1 << 40)).take(4000).collect();
    end.send(&Frame::Renew {
        grant_highest: u64::MAX,
        live,
    });
    end.stay(Duration::from_millis(300));
    let grown = pair.prefill.resident().saturating_sub(before);
    assert!(grown < 32 << 20, "forged ids cost {grown} bytes");
    assert!(pair.prefill.restored() && pair.prefill.healthy());
    pair.serves_by_migration(&body, &expected, "beside the forger");
}

/// Requests in constant memory.
fn constant_memory(warm: usize, requests: usize) {
    let bodies: Vec<_> = (0..8).map(short_body).collect();
    let texts = reference(&bodies);
    let pairs: Vec<_> = bodies.into_iter().zip(texts).collect();
    let fleet = Fleet::start(1, 1);
    let api = fleet.proxy.api();
    let warmed = Clients::start(api, 8, warm, pairs.clone(), 0).join();
    assert_eq!(warmed.right, warm, "{warmed:?}");
    let processes = || [&fleet.proxy, &fleet.decode[0], &fleet.prefill[0]];
    let before: Vec<_> = processes().map(|node| node.resident()).to_vec();
    let tally = Clients::start(api, 8, requests, pairs, 0).join();
    assert_eq!(tally.right, requests, "{tally:?}");
    fleet.wait_restored("after the requests");
    for (node, before) in processes().into_iter().zip(before) {
        let grown = node.resident().saturating_sub(before);
        // Histograms and rings are bounded; 8 MiB are some bytes a request in the long form.
        assert!(
            grown < 8 << 20,
            "{} grew by {grown} bytes over {requests} requests",
            node.spec.id
        );
        println!(
            "{}: {grown} bytes more after {requests} requests",
            node.spec.id
        );
    }
}

#[test]
fn fault_25_memory_is_constant_over_requests() {
    let _turn = two_at_a_time();
    constant_memory(200, 600);
}

#[test]
#[ignore = "a hundred thousand requests"]
fn fault_25_memory_is_constant_over_a_hundred_thousand_requests() {
    let _turn = two_at_a_time();
    constant_memory(2000, 100_000);
}

#[test]
fn fault_21_a_client_that_leaves_while_its_cancel_is_lost_leaves_nothing_behind() {
    let _turn = two_at_a_time();
    let (pair, body, expected) = pair_and_text();
    for (name, lost) in [("cancel", kind::cancel()), ("release", kind::release())] {
        // The client leaves when the first watermark passes; then the frame that would free the
        // lease is lost (and with it, since a gap is noticed, the session).
        let (client, left) = std::sync::mpsc::channel::<TcpStream>();
        let mut left = Some(left);
        pair.relay.script(move |flow| match flow {
            Flow::Frame(Way::Back, seen) if seen == kind::watermark() && left.is_some() => {
                drop(left.take().map(|left| left.recv()));
                Act::Pass
            }
            Flow::Frame(Way::Forth, seen) if seen == lost => Act::Drop,
            Flow::Frame(..) | Flow::Data(_) => Act::Pass,
        });
        client.send(open_request(&pair, &body)).expect("relay");
        std::thread::sleep(Duration::from_millis(300));
        pair.wait_restored(name);
        pair.relay.pass();
        pair.serves_by_migration(&body, &expected, name);
    }
}

#[test]
fn fault_24_a_flood_of_prompts_from_one_peer_is_bounded() {
    let _turn = two_at_a_time();
    // A decode node that asks and never pulls: its leases are its credit, and no more.
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let local = identity().local("flood", Role::Decode, "");
    let mut end = PeerEnd::dial(prefill.spec.peer, local).expect("session");
    let mut sampling = vec![0; 4 + 4];
    sampling.extend(1f32.to_le_bytes());
    sampling.extend(0f32.to_le_bytes());
    sampling.extend(0u64.to_le_bytes());
    sampling.push(0xFF);
    // No tokens generated before, no rules.
    sampling.extend(0u32.to_le_bytes());
    sampling.push(0);
    let before = prefill.resident();
    for counter in 1..=3000 {
        let id = AttemptId {
            request: RequestId {
                incarnation: end.incarnation,
                counter,
            },
            attempt: 1,
        };
        let sent = end.send(&Frame::Prefill {
            id,
            left_ns: 60_000_000_000,
            held_pages: 0,
            prompt: prompt(40, counter as usize),
            payload: sampling.clone(),
        });
        assert!(sent, "the session ended at prompt {counter}");
    }
    let heard = end.stay(Duration::from_millis(1500));
    let count = |pick: fn(&Frame) -> bool| heard.iter().filter(|frame| pick(frame)).count();
    let granted = count(|frame| matches!(frame, Frame::Granted { .. }));
    let busy = count(|frame| matches!(frame, Frame::Busy { .. }));
    assert!(granted > 0 && busy > 0, "granted {granted}, busy {busy}");
    let total = prefill.pages("total") as usize;
    assert!(
        granted * 3 <= total,
        "{granted} leases of 3 pages in {total}"
    );
    assert!(prefill.healthy());
    // The peer dies without a word: everything comes back.
    drop(end);
    prefill.wait_restored("after the flood", Duration::from_secs(8));
    let grown = prefill.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "the flood cost {grown} bytes");
}
