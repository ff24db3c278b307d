//! A: waits that nobody ends.

use crate::harness::{
    Act, Fleet, Flow, Liar, Node, Pair, PeerEnd, Spec, Way, eventually, free_port, get, ids_of,
    ids_request, post_stream, post_with, two_at_a_time,
};
use crate::load::{Clients, typed_error};
use crate::steps::{
    WITHIN, computes_nothing, identity, kind, long_body, migration_steps, pair_and_text,
    pair_and_text_over, prompt, reference, short_body, steps_over,
};
use kvserve::cluster::{KIND_REPORT, NodeReport};
use kvserve_kv::ChecksumMode;
use kvserve_kv::checksum::checksum;
use kvserve_kv::session::frame::{AbortReason, AttemptId, CommitOutcome, Frame, RefusedKind};
use kvserve_kv::session::{RefuseReason, Role};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn send_signal(pid: i32, signal: i32) {
    // SAFETY: a signal to a process that this test started.
    unsafe { libc::kill(pid, signal) };
}

/// Freezes a process; when this returns, none of its threads runs any more.
pub fn freeze(pid: i32) {
    send_signal(pid, libc::SIGSTOP);
    let state = |task: &std::path::Path| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        after.trim_start().starts_with('T')
    };
    eventually("the process is frozen", Duration::from_secs(5), || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let mut tasks = tasks.filter_map(|entry| Some(entry.ok()?.path()));
        tasks.all(|task| state(&task)).then_some(())
    });
}

/// Runs the request while `act` strikes at `flow`; the text must be right all the same.
pub fn struck_at(
    pair: &Pair,
    body: &Value,
    expected: &[u32],
    name: &str,
    flow: Flow,
    act: impl FnOnce() -> Act + Send + 'static,
) {
    let struck = pair.relay.once(flow, act);
    let began = Instant::now();
    let answer = pair.decode.ask(body);
    assert_eq!(answer.status, 200, "{name}: {}", answer.body);
    assert_eq!(ids_of(&answer.json()), expected, "{name}");
    assert!(struck.load(SeqCst), "{name} never passed");
    let took = began.elapsed();
    assert!(took < WITHIN, "{name}: took {took:?}");
    assert!(pair.decode.healthy(), "{name}: decode is unhealthy");
    pair.relay.pass();
}

#[test]
fn fault_02_a_frame_is_lost_at_each_step() {
    let _turn = two_at_a_time();
    let (pair, body, expected) = pair_and_text();
    let mut steps = migration_steps();
    steps.retain(|(_, flow)| matches!(flow, Flow::Frame(..)));
    for (name, flow) in steps {
        struck_at(&pair, &body, &expected, name, flow, || Act::Drop);
        pair.wait_restored(name);
        pair.serves_by_migration(&body, &expected, name);
    }
}

#[test]
fn fault_03_the_prefill_node_dies_at_each_step_of_a_migration() {
    let _turn = two_at_a_time();
    prefill_dies_at_each_step("tcp");
}

#[test]
fn fault_03_the_prefill_node_dies_at_each_step_beside_shared_memory() {
    let _turn = two_at_a_time();
    prefill_dies_at_each_step("shm");
}

fn prefill_dies_at_each_step(transport: &str) {
    let (mut pair, body, expected) = pair_and_text_over(transport);
    for (name, flow) in steps_over(transport) {
        let pid = pair.prefill.pid();
        struck_at(&pair, &body, &expected, name, flow, move || {
            send_signal(pid, libc::SIGKILL);
            Act::Half
        });
        pair.decode.wait_restored(name, Duration::from_secs(3));
        pair.prefill.restart();
        pair.serves_by_migration(&body, &expected, name);
    }
}

#[test]
fn fault_03_the_prefill_node_dies_at_each_step_of_the_handshake() {
    let _turn = two_at_a_time();
    let body = short_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let mut pair = Pair::start();
    let kinds = kind::HANDSHAKE.iter().copied().chain([kind::welcome()]);
    for frame in kinds {
        let what = format!("handshake frame {frame}");
        let pid = pair.prefill.pid();
        let struck = pair.relay.once(Flow::Frame(Way::Back, frame), move || {
            send_signal(pid, libc::SIGKILL);
            Act::Half
        });
        pair.relay.cut();
        eventually(&what, WITHIN, || struck.load(SeqCst).then_some(()));
        assert_eq!(pair.decode.ids(&body), expected, "{what}");
        pair.prefill.restart();
        pair.serves_by_migration(&body, &expected, &what);
        pair.wait_restored(&what);
    }
}

#[test]
fn fault_07_a_prefill_node_frozen_at_each_stage_ends_the_attempt_there() {
    let _turn = two_at_a_time();
    prefill_freezes(
        "tcp",
        &[
            ("prefill", Flow::Frame(Way::Forth, kind::prefill())),
            ("bytes", Flow::Data(Way::Back)),
            ("commit", Flow::Frame(Way::Forth, kind::commit())),
        ],
    );
}

/// A frozen node's pages can still be read in shared memory: the migration must fail at COMMIT.
#[test]
fn fault_07_the_pages_of_a_frozen_prefill_node_in_shared_memory_are_not_enough() {
    let _turn = two_at_a_time();
    prefill_freezes(
        "shm",
        &[
            ("complete", Flow::Frame(Way::Back, kind::complete())),
            ("commit", Flow::Frame(Way::Forth, kind::commit())),
        ],
    );
}

fn prefill_freezes(transport: &str, steps: &[(&str, Flow)]) {
    let (pair, body, expected) = pair_and_text_over(transport);
    for &(name, flow) in steps {
        let committed = pair.decode.metric("kvserve_migrations_committed_total");
        let pid = pair.prefill.pid();
        struck_at(&pair, &body, &expected, name, flow, move || {
            freeze(pid);
            Act::Pass
        });
        pair.decode.wait_restored(name, Duration::from_secs(3));
        let now = pair.decode.metric("kvserve_migrations_committed_total");
        assert_eq!(
            now, committed,
            "{name}: a frozen node cannot have committed"
        );
        pair.prefill.signal(libc::SIGCONT);
        pair.serves_by_migration(&body, &expected, name);
        pair.wait_restored(name);
    }
}

/// Freezes decode in a pull and in COMMIT; both ledgers come back, the text is right, and it
/// serves again without a restart.
fn decode_frozen_for(transport: &str, span: Duration) {
    let (pair, body, expected) = pair_and_text_over(transport);
    let pulling = match transport {
        "tcp" => Flow::Data(Way::Back),
        _ => Flow::Frame(Way::Back, kind::watermark()),
    };
    for (name, flow) in [
        ("pull", pulling),
        ("commit", Flow::Frame(Way::Forth, kind::commit())),
    ] {
        let pid = pair.decode.pid();
        let struck = pair.relay.once(flow, move || {
            freeze(pid);
            Act::Pass
        });
        let (api, request) = (pair.decode.api(), body.clone());
        let client =
            std::thread::spawn(move || crate::harness::post(api, "/v1/completions", &request));
        eventually(name, WITHIN, || struck.load(SeqCst).then_some(()));
        // The prefill node does not wait for the thaw: a silent peer is dead after 3 s.
        pair.prefill.wait_restored(name, Duration::from_secs(8));
        std::thread::sleep(span);
        pair.decode.signal(libc::SIGCONT);
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{name}: {}", answer.body);
        assert_eq!(ids_of(&answer.json()), expected, "{name}");
        pair.relay.pass();
        pair.wait_restored(name);
        pair.serves_by_migration(&body, &expected, name);
        assert!(pair.decode.healthy());
    }
}

#[test]
fn fault_07_a_decode_node_frozen_in_pull_and_commit_thaws_whole() {
    let _turn = two_at_a_time();
    decode_frozen_for("tcp", Duration::from_millis(500));
}

#[test]
fn fault_07_a_decode_node_frozen_beside_shared_memory_thaws_whole() {
    let _turn = two_at_a_time();
    decode_frozen_for("shm", Duration::from_millis(500));
}

#[test]
#[ignore = "two lease times of 10 s, four times"]
fn fault_07_a_decode_node_frozen_for_two_lease_times_thaws_whole() {
    let _turn = two_at_a_time();
    decode_frozen_for("tcp", Duration::from_secs(20));
    decode_frozen_for("shm", Duration::from_secs(20));
}

#[test]
fn fault_11_a_request_that_moves_nothing_waits_for_nothing() {
    let _turn = two_at_a_time();
    let body = ids_request(&prompt(700, 3), 1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let pair = Pair::start();
    // Not one byte of a page comes through; the first token is the last one, so none is needed.
    pair.relay.script(|flow| match flow {
        Flow::Data(_) => Act::Drop,
        Flow::Frame(..) => Act::Pass,
    });
    let before = pair.decode.metric("kvserve_local_recomputes_total");
    assert_eq!(pair.decode.ids(&body), expected);
    assert_eq!(pair.decode.metric("kvserve_local_recomputes_total"), before);
    pair.wait_restored("a request of one token");
}

/// What the lying prefill node does with a prompt.
#[derive(Clone, Copy, Debug)]
enum Lie {
    RefusesInvalid,
    RefusesDraining,
    AlwaysBusy,
    Silent,
    Aborts,
    Leaves,
    WrongChecksums,
    CompletesBeyondItsGrant,
    WatermarkBeyondItsGrant,
    NoFirstToken,
    UnknownToken,
    GarbledToken,
    CommitSays(CommitOutcome),
    CommitOkOfAnotherLease,
    CommitOkOfAnotherAttempt,
    CommitSilent,
    UnknownFrame,
}

/// Serves a prompt of one page up to where the lie is.
fn lie(end: &mut PeerEnd, id: AttemptId, lie: Lie, first_token: u32, page_bytes: usize) {
    let lease = 77 + u64::from(id.attempt);
    let zeros = checksum(ChecksumMode::Full, &vec![0; page_bytes]);
    let sum = match lie {
        Lie::WrongChecksums => zeros ^ 1,
        _ => zeros,
    };
    match lie {
        Lie::RefusesInvalid => {
            end.send(&Frame::PrefillRefused {
                id,
                refusal: RefusedKind::Invalid,
                code: 400,
            });
            return;
        }
        Lie::RefusesDraining => {
            end.send(&Frame::PrefillRefused {
                id,
                refusal: RefusedKind::Draining,
                code: 0,
            });
            return;
        }
        Lie::AlwaysBusy => {
            end.send(&Frame::Busy { id, retry_ms: 1 });
            return;
        }
        Lie::Silent => return,
        Lie::UnknownFrame => {
            // A kind that no version knows, rightly sealed: the tag is of the kind byte, too.
            let mut bytes = end.channel.lock().expect("channel").seal(&Frame::Heartbeat);
            bytes[4] = 200;
            end.send_bytes(&bytes);
            return;
        }
        _ => {}
    }
    end.send(&Frame::Granted {
        id,
        lease,
        epoch: 1,
        pages: 1,
    });
    match lie {
        Lie::Aborts => {
            end.send(&Frame::Aborted {
                id,
                reason: AbortReason::Engine,
            });
            return;
        }
        Lie::Leaves => {
            end.send(&Frame::Bye {
                reason: RefuseReason::ShuttingDown,
            });
            return;
        }
        Lie::WatermarkBeyondItsGrant => {
            end.send(&Frame::Watermark {
                id,
                lease,
                first: 0,
                checksums: vec![sum; 900],
            });
            return;
        }
        _ => {}
    }
    let mut token = match lie {
        Lie::UnknownToken => u32::MAX,
        _ => first_token,
    }
    .to_le_bytes()
    .to_vec();
    token.extend(0f32.to_le_bytes());
    token.push(0);
    match lie {
        Lie::NoFirstToken => {}
        Lie::GarbledToken => {
            end.send(&Frame::FirstToken {
                id,
                payload: vec![1, 2, 3],
            });
        }
        _ => {
            end.send(&Frame::FirstToken { id, payload: token });
        }
    }
    let (pages, checksums) = match lie {
        Lie::CompletesBeyondItsGrant => (5, vec![sum; 5]),
        _ => (1, vec![sum]),
    };
    end.send(&Frame::Complete {
        id,
        lease,
        pages,
        tail_tokens: 12,
        first: 0,
        checksums,
    });
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        match end.next(Duration::from_millis(200)) {
            Some(Frame::Commit { .. }) => break,
            // The attempt is over already.
            Some(Frame::Release { .. } | Frame::Cancel { .. }) => return,
            Some(_) | None => {}
        }
    }
    let ok = CommitOutcome::Ok;
    let (id, lease, outcome) = match lie {
        Lie::CommitSays(outcome) => (id, lease, outcome),
        Lie::CommitOkOfAnotherLease => (id, lease + 1000, ok),
        Lie::CommitOkOfAnotherAttempt => {
            let attempt = id.attempt + 1;
            (AttemptId { attempt, ..id }, lease, ok)
        }
        _ => return,
    };
    end.send(&Frame::CommitAnswer { id, lease, outcome });
}

/// Whatever the prefill node says, the client gets the right text: pages of zeros are pulled
/// again and again, and no token computed from them leaves.
#[test]
fn fault_12_the_prefill_leg_fails_or_lies_in_every_way() {
    let _turn = two_at_a_time();
    let body = short_body(4);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let identity = identity();
    let port = free_port();
    let current = Arc::new(Mutex::new(Lie::Silent));
    let (mine, first) = (current.clone(), expected[0]);
    let liar = Liar::prefill(port, identity, move |end, frame| {
        if let Frame::Prefill { id, .. } = frame {
            let now = *mine.lock().expect("lie");
            lie(end, id, now, first, identity.page_bytes as usize);
        }
    });
    let decode = Spec::new("decode", "decode-0").join(port).start();
    for lie in [
        Lie::RefusesInvalid,
        Lie::RefusesDraining,
        Lie::AlwaysBusy,
        Lie::Silent,
        Lie::Aborts,
        Lie::Leaves,
        Lie::WrongChecksums,
        Lie::CompletesBeyondItsGrant,
        Lie::WatermarkBeyondItsGrant,
        Lie::NoFirstToken,
        Lie::UnknownToken,
        Lie::GarbledToken,
        Lie::CommitSays(CommitOutcome::Unknown),
        Lie::CommitSays(CommitOutcome::Expired),
        Lie::CommitSays(CommitOutcome::Mismatch),
        Lie::CommitSays(CommitOutcome::Released),
        Lie::CommitOkOfAnotherLease,
        Lie::CommitOkOfAnotherAttempt,
        Lie::CommitSilent,
        Lie::UnknownFrame,
    ] {
        *current.lock().expect("lie") = lie;
        let before = liar.asked.load(SeqCst);
        // After a lie that ends the session, a request may come before the next one is up.
        eventually(&format!("{lie:?} is told"), WITHIN, || {
            let began = Instant::now();
            let answer = decode.ask(&body);
            assert_eq!(answer.status, 200, "{lie:?}: {}", answer.body);
            assert_eq!(ids_of(&answer.json()), expected, "{lie:?}");
            assert!(began.elapsed() < WITHIN, "{lie:?}: {:?}", began.elapsed());
            (liar.asked.load(SeqCst) > before).then_some(())
        });
        decode.wait_restored(&format!("{lie:?}"), Duration::from_secs(3));
        assert!(decode.healthy(), "{lie:?}");
    }
    assert_eq!(decode.metric("kvserve_migrations_committed_total"), 0.0);
}

#[test]
fn fault_12_the_decode_leg_fails_and_the_prefill_is_cancelled() {
    let _turn = two_at_a_time();
    let mut pair = Pair::start();
    // Long enough that the prefill is far from done when decode dies.
    let body = ids_request(&prompt(12_000, 5), 4);
    let pid = pair.decode.pid();
    let struck = pair
        .relay
        .once(Flow::Frame(Way::Back, kind::watermark()), move || {
            send_signal(pid, libc::SIGKILL);
            Act::Pass
        });
    assert!(pair.decode.try_ask(&body).is_err(), "decode was killed");
    assert!(struck.load(SeqCst));
    // 100 ms and one step are promised; the bound is one of liveness.
    eventually(
        "nothing is computed for nobody",
        Duration::from_secs(2),
        || (pair.prefill.restored() && computes_nothing(&pair.prefill)).then_some(()),
    );
    pair.decode.restart();
    let short = short_body(5);
    let expected = reference(std::slice::from_ref(&short)).remove(0);
    pair.serves_by_migration(&short, &expected, "after the decode node's death");
}

/// What a decode node's API does with a forwarded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    Refuses,
    Resets,
    Answers(u16),
    Garbage,
    HalfAnAnswer,
    Silent,
}

fn fake_api(leg: Leg, address: SocketAddr, stop: Arc<AtomicBool>) {
    if leg == Leg::Refuses {
        return;
    }
    let listener = TcpListener::bind(address).expect("the fake's port");
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            if stop.load(SeqCst) {
                return;
            }
            let Ok(mut stream) = stream else { continue };
            let mut buffer = [0; 65_536];
            if !matches!(stream.read(&mut buffer), Ok(1..)) {
                continue;
            }
            let body = r#"{"error":{"message":"no","type":"t","param":null,"code":"c"}}"#;
            // The proxy may have left; nothing else is to be told.
            let _ = match leg {
                Leg::Refuses | Leg::Resets => Ok(()),
                Leg::Answers(status) => write!(
                    stream,
                    "HTTP/1.1 {status} no\r\ncontent-type: application/json\r\n\
                     content-length: {}\r\n\r\n{body}",
                    body.len()
                ),
                Leg::Garbage => write!(stream, "this is no HTTP at all\r\n\r\n"),
                Leg::HalfAnAnswer => write!(
                    stream,
                    "HTTP/1.1 200 ok\r\ncontent-type: application/json\r\n\
                     content-length: 5000\r\n\r\n{{\"choices\":"
                ),
                Leg::Silent => {
                    kept.push(stream);
                    continue;
                }
            };
        }
    });
}

#[test]
fn fault_12_the_proxys_leg_fails_and_the_client_gets_a_typed_error() {
    let _turn = two_at_a_time();
    let proxy = Spec::new("proxy", "proxy")
        .arg("--request-timeout 1500ms")
        .start();
    for leg in [
        Leg::Refuses,
        Leg::Resets,
        Leg::Answers(400),
        Leg::Answers(500),
        Leg::Garbage,
        Leg::HalfAnAnswer,
        Leg::Silent,
    ] {
        let api = free_port();
        let stop = Arc::new(AtomicBool::new(false));
        fake_api(leg, api, stop.clone());
        let local = identity().local("fake", Role::Decode, &format!("http://{api}"));
        let mut end = PeerEnd::dial(proxy.spec.peer, local).expect("the proxy takes it");
        let report = NodeReport {
            role: 3,
            ready: true,
            paired: true,
            unfinished: 0,
            queued: 0,
            pages_free: 1,
            pages_total: 1,
            pages_quarantined: 0,
            model: "fake".into(),
            peer_address: String::new(),
            paths: Vec::new(),
        };
        end.send(&Frame::App {
            kind: KIND_REPORT,
            bytes: report.encode(),
        });
        eventually("the fake node is known", WITHIN, || {
            let status = get(proxy.api(), "/nodes/status").ok()?.json();
            let known = status.get(format!("http://{api}"))?;
            (known["ready"] == true).then_some(())
        });
        let began = Instant::now();
        let answer = proxy.ask(&short_body(1));
        let code = answer.error_code();
        let wanted: &[u16] = match leg {
            Leg::Answers(status) => &[status],
            Leg::Silent => &[504],
            Leg::Refuses | Leg::Resets | Leg::Garbage | Leg::HalfAnAnswer => &[502, 503],
        };
        assert!(
            wanted.contains(&answer.status) && !code.is_empty(),
            "{leg:?}: {} {}",
            answer.status,
            answer.body
        );
        assert!(began.elapsed() < Duration::from_secs(8), "{leg:?}");
        stop.store(true, SeqCst);
        assert!(proxy.healthy());
        // Its place in the table ends with the next life of the same name.
    }
}

#[test]
fn fault_13_full_queues_push_back_in_time_and_do_not_spin() {
    let _turn = two_at_a_time();
    let serve = Spec::new("serve", "serve")
        .arg("--max-running 2 --max-queued 2 --kv-cache 96MiB")
        .start();
    let mut endless = ids_request(&prompt(4, 1), 30_000);
    endless["stream"] = json!(true);
    let mut running: Vec<_> = (0..2)
        .map(|_| post_stream(serve.api(), "/v1/completions", &endless).expect("stream"))
        .collect();
    for stream in &mut running {
        assert_eq!(stream.status, 200);
        assert!(stream.next_data().expect("token").is_some());
    }
    // Two wait, each for its own time and no longer.
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let (api, body) = (serve.api(), short_body(2));
            std::thread::spawn(move || {
                post_with(
                    api,
                    "/v1/completions",
                    "x-kvserve-timeout-ms: 700\r\n",
                    &body,
                )
            })
        })
        .collect();
    eventually("two requests wait", Duration::from_secs(5), || {
        (serve.metric("kvserve_requests_active") == 4.0).then_some(())
    });
    let refused = serve.ask(&short_body(3));
    assert_eq!(refused.status, 429, "{}", refused.body);
    let again = refused.header("retry-after").expect("retry-after");
    assert!(again.parse::<u32>().is_ok_and(|seconds| seconds >= 1));
    for client in waiting {
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 504, "{}", answer.body);
    }
    drop(running);
    serve.wait_restored("after the clients left", Duration::from_secs(3));
    eventually("nothing spins", Duration::from_secs(5), || {
        let before = serve.cpu_time();
        std::thread::sleep(Duration::from_millis(400));
        (serve.cpu_time() - before < Duration::from_millis(100)).then_some(())
    });
    assert_eq!(serve.ask(&short_body(3)).status, 200);
}

#[test]
fn fault_14_an_absent_then_slow_peer_at_start_is_dialled_with_growing_pauses() {
    let _turn = two_at_a_time();
    let body = short_body(6);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let prefill = Spec::new("prefill", "prefill-0").join(free_port());
    let decode = Spec::new("decode", "decode-0").join(prefill.peer).start();
    // Absent: up and healthy, not ready, and it answers by itself.
    assert!(decode.healthy());
    assert!(!decode.ready());
    assert_eq!(decode.ids(&body), expected);
    // There, but every handshake is cut (fault 42): the pauses grow and differ.
    let listener = TcpListener::bind(prefill.peer).expect("the peer's port");
    listener.set_nonblocking(true).expect("non-blocking");
    let mut dialled = Vec::new();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        match listener.accept() {
            Ok(_dropped) => dialled.push(began.elapsed()),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    drop(listener);
    assert!(
        (1..=16).contains(&dialled.len()),
        "dialled {} times in 4 s: {dialled:?}",
        dialled.len()
    );
    assert!(decode.healthy() && !decode.ready());
    // There at last: ready by itself.
    let prefill = prefill.start();
    decode.wait_ready();
    assert_eq!(decode.ids(&body), expected);
    assert!(decode.metric("kvserve_migrations_committed_total") >= 1.0);
    drop(prefill);
}

/// Nodes leave, dead or drained, and come again, while clients ask.
fn joins_and_leaves(rounds: usize) {
    let bodies = vec![short_body(1), long_body(2), short_body(3)];
    let texts = reference(&bodies);
    let requests: Vec<_> = bodies.into_iter().zip(texts).collect();
    let mut fleet = Fleet::start(2, 2);
    let clients = Clients::start(fleet.proxy.api(), 4, usize::MAX, requests, 0);
    for round in 0..rounds {
        let index = (round / 2) % 2;
        let node: &mut Node = match round % 2 {
            0 => &mut fleet.prefill[index],
            _ => &mut fleet.decode[index],
        };
        if round % 3 == 0 {
            node.terminate();
        } else {
            node.kill();
        }
        node.start();
        fleet.wait_whole();
    }
    let tally = clients.stop();
    assert!(tally.right > rounds, "{tally:?}");
    assert_eq!(tally.cut, 0, "the proxy cut requests: {tally:?}");
    fleet.wait_restored("after joins and leaves");
}

#[test]
fn fault_15_joins_and_leaves_under_load_leave_no_request_without_an_end() {
    let _turn = two_at_a_time();
    joins_and_leaves(6);
}

#[test]
#[ignore = "two hundred restarts"]
fn fault_15_two_hundred_joins_and_leaves_under_load() {
    let _turn = two_at_a_time();
    joins_and_leaves(200);
}

#[test]
fn fault_16_no_shard_is_blocked_by_a_frozen_peer() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let metric = "kvserve_shard_stall_seconds_longest";
    let text = get(pair.decode.api(), "/metrics").expect("metrics").body;
    assert!(
        text.contains(metric),
        "the watchdog reports its stalls:\n{text}"
    );
    pair.prefill.signal(libc::SIGSTOP);
    let (api, body) = (pair.decode.api(), long_body(7));
    let client = std::thread::spawn(move || crate::harness::post(api, "/v1/completions", &body));
    // The shard serves others all the while that a request waits for the frozen peer.
    let mut served = 0;
    while !client.is_finished() {
        let began = Instant::now();
        assert_eq!(get(api, "/health").expect("health").status, 200);
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "a shard stood still"
        );
        served += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.join().expect("client").status, 200);
    assert!(served > 10, "the request did not wait: {served}");
    let longest = pair.decode.metric(metric);
    assert!(longest < 2.0, "a shard stood still for {longest} s");
    pair.prefill.signal(libc::SIGCONT);
    pair.wait_restored("after the thaw");
}

#[test]
fn fault_12_a_silent_cluster_is_a_typed_error_in_time() {
    let _turn = two_at_a_time();
    // Every leg is silent: the prefill node is frozen, and the decode node has no time left to
    // compute the prompt itself.
    let pair = Pair::start();
    pair.relay.freeze();
    let body = long_body(8);
    let answer = post_with(
        pair.decode.api(),
        "/v1/completions",
        "x-kvserve-timeout-ms: 600\r\n",
        &body,
    );
    assert_eq!(typed_error(&answer).0, 504, "{}", answer.body);
    pair.relay.thaw();
    pair.decode
        .wait_restored("after the 504", Duration::from_secs(3));
}
