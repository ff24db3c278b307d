//! D: wrong answers.

use crate::harness::{
    Act, DataEnd, Flow, Liar, Node, Pair, PeerEnd, Spec, Way, eventually, fixture, free_port,
    ids_of, ids_request, model_path, post, skipped, two_at_a_time,
};
use crate::load::Clients;
use crate::steps::{
    WITHIN, identity, kind, long_body, pair_and_text, prompt, reference, short_body,
};
use kvserve_kv::ChecksumMode;
use kvserve_kv::checksum::checksum;
use kvserve_kv::session::Role;
use kvserve_kv::session::frame::{AttemptId, CommitOutcome, Frame, RequestId};
use kvserve_kv::transport::tcp::wire::ReadRequest;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Greedy, as the decode node writes it for its prefill nodes.
fn greedy_payload() -> Vec<u8> {
    let mut sampling = vec![0; 8];
    sampling.extend(1f32.to_le_bytes());
    sampling.extend(0f32.to_le_bytes());
    sampling.extend(0u64.to_le_bytes());
    sampling.push(0xFF);
    // No tokens generated before, no rules.
    sampling.extend(0u32.to_le_bytes());
    sampling.push(0);
    sampling
}

/// A decode node by hand.
struct ByHand {
    end: PeerEnd,
    data: DataEnd,
    position: u64,
}

/// A migration whose pages are all published.
struct Held {
    id: AttemptId,
    lease: u64,
    epoch: u32,
    pages: u32,
    sums: Vec<u64>,
}

impl ByHand {
    fn of(prefill: &crate::harness::Node, name: &str) -> ByHand {
        let local = identity().local(name, Role::Decode, "");
        let mut end = PeerEnd::dial(prefill.spec.peer, local).expect("session");
        let data = end.open_data().expect("data connection");
        ByHand {
            end,
            data,
            position: 0,
        }
    }

    fn ask(&mut self, counter: u64, tokens: Vec<u32>) -> AttemptId {
        let id = AttemptId {
            request: RequestId {
                incarnation: self.end.incarnation,
                counter,
            },
            attempt: 1,
        };
        self.end.send(&Frame::Prefill {
            id,
            left_ns: 60_000_000_000,
            held_pages: 0,
            prompt: tokens,
            payload: greedy_payload(),
        });
        id
    }

    /// Asks and waits until it is whole.
    fn complete(&mut self, counter: u64, tokens: Vec<u32>) -> Held {
        let id = self.ask(counter, tokens);
        let (mut lease, mut epoch, mut sums) = (0, 0, Vec::new());
        self.end.wait_for("Complete", |frame| match frame {
            Frame::Granted {
                lease: l, epoch: e, ..
            } => {
                (lease, epoch) = (l, e);
                None
            }
            Frame::Watermark { checksums, .. } => {
                sums.extend(checksums);
                None
            }
            Frame::Complete { checksums, .. } => {
                sums.extend(checksums);
                Some(())
            }
            _ => None,
        });
        Held {
            id,
            lease,
            epoch,
            pages: sums.len() as u32,
            sums,
        }
    }

    fn read(&mut self, held: &Held, bend: impl FnOnce(&mut ReadRequest)) -> Result<Vec<u8>, u32> {
        let mut request = ReadRequest {
            incarnation: self.end.peer.incarnation,
            lease: held.lease,
            epoch: held.epoch,
            first: 0,
            count: held.pages,
            page_bytes: identity().page_bytes as u32,
            position: self.position,
        };
        bend(&mut request);
        self.position += 1;
        self.data.read(&request).expect("an answer")
    }

    fn commit(
        &mut self,
        held: &Held,
        bend: impl FnOnce(&mut (u64, u64, u32, u32)),
    ) -> CommitOutcome {
        let mut what = (
            self.end.peer.incarnation,
            held.lease,
            held.epoch,
            held.pages,
        );
        bend(&mut what);
        let (grantor, lease, epoch, pages) = what;
        self.end.send(&Frame::Commit {
            id: held.id,
            grantor,
            lease,
            epoch,
            pages,
        });
        self.end.wait_for("commit answer", |frame| match frame {
            Frame::CommitAnswer { outcome, .. } => Some(outcome),
            _ => None,
        })
    }
}

#[test]
fn fault_26_stale_forged_and_replayed_references_get_a_code_and_no_bytes() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let mut hand = ByHand::of(&prefill, "by-hand");
    let held = hand.complete(1, prompt(100, 1));
    assert_eq!(held.pages, 7);
    let page_bytes = identity().page_bytes as usize;
    let bytes = hand.read(&held, |_| {}).expect("the honest read");
    for (page, sum) in bytes.chunks(page_bytes).zip(&held.sums) {
        assert_eq!(checksum(ChecksumMode::Full, page), *sum);
    }
    // Bent in one field each, on live pages.
    type Bend = fn(&mut ReadRequest);
    let bends: [(&str, Bend); 6] = [
        ("incarnation", |read| read.incarnation ^= 1),
        ("lease", |read| read.lease += 1),
        ("epoch", |read| read.epoch += 1),
        ("first", |read| read.first = 1),
        ("count", |read| read.count += 1),
        ("far first", |read| read.first = u32::MAX),
    ];
    for (name, bend) in bends {
        let refused = hand.read(&held, bend);
        assert!(refused.is_err(), "a read with another {name} got bytes");
    }
    // Another peer's lease is nobody's.
    let mut thief = ByHand::of(&prefill, "thief");
    assert!(
        thief
            .read(&held, |read| read.incarnation = prefill_incarnation(&hand))
            .is_err()
    );
    assert_eq!(thief.commit(&held, |_| {}), CommitOutcome::Unknown);
    // COMMIT of another life, epoch or length.
    assert_eq!(
        hand.commit(&held, |what| what.0 ^= 1),
        CommitOutcome::Mismatch
    );
    assert_eq!(
        hand.commit(&held, |what| what.2 += 1),
        CommitOutcome::Mismatch
    );
    assert_eq!(
        hand.commit(&held, |what| what.3 -= 1),
        CommitOutcome::Mismatch
    );
    assert_eq!(hand.commit(&held, |_| {}), CommitOutcome::Ok);
    // Replayed: the same answer, and pages that are over.
    assert_eq!(hand.commit(&held, |_| {}), CommitOutcome::Ok);
    assert!(hand.read(&held, |_| {}).is_err(), "a read after COMMIT");
    prefill.wait_restored("after COMMIT", Duration::from_secs(3));
    // A released one.
    let held = hand.complete(2, prompt(100, 2));
    hand.end.send(&Frame::Release {
        id: held.id,
        lease: held.lease,
        epoch: held.epoch,
    });
    assert_eq!(hand.commit(&held, |_| {}), CommitOutcome::Released);
    assert!(hand.read(&held, |_| {}).is_err(), "a read after RELEASE");
    prefill.wait_restored("after RELEASE", Duration::from_secs(3));
}

fn prefill_incarnation(hand: &ByHand) -> u64 {
    hand.end.peer.incarnation
}

#[test]
#[ignore = "a lease time of 10 s"]
fn fault_26_an_expired_lease_is_fenced_and_gives_nothing() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let mut hand = ByHand::of(&prefill, "by-hand");
    let held = hand.complete(1, prompt(100, 1));
    // Heartbeats go on, renewals do not.
    let mut asked = false;
    for _ in 0..140 {
        let heard = hand.end.stay(Duration::from_millis(100));
        if heard
            .iter()
            .any(|frame| matches!(frame, Frame::FenceQuery { .. }))
        {
            asked = true;
            break;
        }
    }
    assert!(asked, "no fence was asked for within 14 s");
    assert!(
        hand.read(&held, |_| {}).is_err(),
        "a read of an expired lease"
    );
    assert_eq!(hand.commit(&held, |_| {}), CommitOutcome::Expired);
    // Expiry alone frees nothing; the answer does.
    assert_eq!(prefill.pages("leased"), 7);
    hand.end.send(&Frame::FenceAnswer {
        id: held.id,
        lease: held.lease,
    });
    prefill.wait_restored("after the fence", Duration::from_secs(3));
    // Unanswered, the session ends, and then the pages are free.
    let _held = hand.complete(2, prompt(100, 2));
    for _ in 0..160 {
        hand.end.stay(Duration::from_millis(100));
    }
    prefill.wait_restored("after an unanswered fence", Duration::from_secs(5));
}

#[test]
fn fault_28_a_prefill_that_aborts_half_way_never_becomes_text() {
    let _turn = two_at_a_time();
    // Real pages up to a watermark, then the prefill node is asked no more: the relay closes,
    // and the decode node starts over from what it has told.
    let (pair, body, expected) = pair_and_text();
    for after in 1..4 {
        let seen = Arc::new(AtomicUsize::new(0));
        let count = seen.clone();
        pair.relay.script(move |flow| match flow {
            Flow::Data(Way::Back) if count.fetch_add(1, SeqCst) + 1 == after => Act::Half,
            Flow::Data(Way::Back) if count.load(SeqCst) > after => Act::Close,
            Flow::Data(_) | Flow::Frame(..) => Act::Pass,
        });
        assert_eq!(pair.decode.ids(&body), expected, "after {after} pieces");
        assert!(seen.load(SeqCst) >= after);
        pair.relay.pass();
        pair.wait_restored("after an abort");
        pair.serves_by_migration(&body, &expected, "after an abort");
    }
}

/// `total` requests with `clients` at once through a migration: the texts of one process alone,
/// with clients that leave and a prefill node that is restarted every `restart_every`.
fn equal_texts(
    transport: &str,
    total: usize,
    clients: usize,
    leave_every: usize,
    restart_every: usize,
) {
    let bodies: Vec<_> = (0..50)
        .map(|number| ids_request(&prompt(1 + (number * 37) % 700, number), 4 + number % 24))
        .collect();
    let flags = "--max-running 64";
    let plan = Load {
        total,
        clients,
        leave_every,
        restart_every,
    };
    let pair = equal_texts_of(bodies, transport, flags, plan);
    drop(pair);
}

/// How many requests, how many at once, how often a client leaves, how often prefill restarts.
#[derive(Clone, Copy)]
struct Load {
    total: usize,
    clients: usize,
    leave_every: usize,
    restart_every: usize,
}

fn equal_texts_of(bodies: Vec<Value>, transport: &str, flags: &str, load: Load) -> Pair {
    let Load {
        total,
        clients,
        leave_every,
        restart_every,
    } = load;
    let texts = reference(&bodies);
    let requests: Vec<_> = bodies.into_iter().zip(texts).collect();
    let mut pair = Pair::over(transport, flags, flags);
    let running = Clients::start(
        pair.decode.api(),
        clients,
        total,
        requests.clone(),
        leave_every,
    );
    let mut restarts = 0;
    while running.done() < total {
        if restart_every > 0 && running.done() >= (restarts + 1) * restart_every {
            restarts += 1;
            pair.prefill.restart();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let tally = running.join();
    assert_eq!(tally.right + tally.left, total, "{tally:?}");
    // A prefill node that is restarted every second is dialled with pauses of up to 2 s, and
    // decode computes prompts itself meanwhile.
    let least = total as f64 / if restart_every > 0 { 20.0 } else { 4.0 };
    let migrated = pair.decode.metric("kvserve_migrations_committed_total");
    println!("{transport}: {total} requests, {migrated} migrated, {restarts} restarts: {tally:?}");
    assert!(migrated > least, "only {migrated} of {total} migrated");
    pair.wait_restored("after all requests");
    if !flags.contains("--prefix-cache on") {
        let (body, expected) = &requests[7];
        pair.serves_by_migration(body, expected, "after all requests");
    }
    pair
}

/// Prompts that begin alike, more of them than the pools hold, clients that leave, a prefill
/// node that restarts: with prefix caches on both nodes the texts are those without any.
#[test]
fn fault_29_with_prefix_caches_under_pressure_they_still_do() {
    let _turn = two_at_a_time();
    // 5 beginnings of 16 to 400 tokens, each with 40 tails of 40 to 160.
    let bodies = (0..40)
        .map(|number| {
            let mut ids = prompt(16 + 96 * (number % 5), number % 5);
            ids.extend(prompt(40 + 3 * number, 100 + number));
            ids_request(&ids, 4 + number % 24)
        })
        .collect::<Vec<_>>();
    for (transport, leave_every, restart_every) in [("tcp", 0, 0), ("shm", 7, 60)] {
        let load = Load {
            total: 120,
            clients: 16,
            leave_every,
            restart_every,
        };
        // 128 pages of 16 tokens; the prompts alone are some 800.
        let flags = "--prefix-cache on --kv-cache 2MiB";
        let pair = equal_texts_of(bodies.clone(), transport, flags, load);
        // Published ten times a second; the prefill node's begin again with each of its lives.
        let seen = |node: &Node, name| {
            eventually(name, WITHIN, || (node.metric(name) > 0.0).then_some(()));
        };
        seen(&pair.decode, "kvserve_prefix_hit_tokens_total");
        seen(&pair.decode, "kvserve_prefix_evicted_pages_total");
        if restart_every == 0 {
            seen(&pair.prefill, "kvserve_prefix_hit_tokens_total");
        }
    }
}

#[test]
fn fault_29_texts_through_migrations_equal_those_of_one_process() {
    let _turn = two_at_a_time();
    equal_texts("tcp", 120, 16, 0, 0);
}

#[test]
fn fault_29_with_cancels_and_a_restart_they_still_do() {
    let _turn = two_at_a_time();
    equal_texts("tcp", 120, 16, 7, 60);
}

#[test]
fn fault_29_texts_through_shared_memory_equal_those_of_one_process() {
    let _turn = two_at_a_time();
    equal_texts("shm", 120, 16, 0, 0);
    equal_texts("shm", 120, 16, 7, 60);
}

#[test]
#[ignore = "a thousand requests, ten restarts"]
fn fault_29_a_thousand_requests_at_concurrency_64_with_cancels_and_restarts() {
    let _turn = two_at_a_time();
    for transport in ["tcp", "shm"] {
        equal_texts(transport, 1000, 64, 0, 0);
        equal_texts(transport, 1000, 64, 9, 100);
    }
}

#[test]
fn fault_29_the_default_model_says_the_same_through_a_migration() {
    let _turn = two_at_a_time();
    let Some(model) = model_path() else {
        return skipped("fault_29_the_default_model_says_the_same_through_a_migration");
    };
    let case = &fixture("smollm2-q4_1-greedy.json")[0];
    let mut prefill = Spec::new("prefill", "prefill-0").join(free_port());
    prefill.model = model.clone();
    let prefill = prefill.arg("--kv-cache 64MiB").start();
    let mut decode = Spec::new("decode", "decode-0").join(prefill.spec.peer);
    decode.model = model;
    let decode = decode.arg("--kv-cache 64MiB").start();
    decode.wait_ready();
    let body = ids_request(&case.prompt_ids, 16);
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (api, body) = (decode.api(), body.clone());
            std::thread::spawn(move || post(api, "/v1/completions", &body))
        })
        .collect();
    for client in clients {
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(ids_of(&answer.json()), case.gen_ids[..16]);
    }
    assert_eq!(decode.metric("kvserve_migrations_committed_total"), 4.0);
}

#[test]
fn fault_31_a_flipped_bit_on_any_way_is_noticed_and_never_served() {
    let _turn = two_at_a_time();
    let (pair, body, expected) = pair_and_text();
    for (name, flow) in [
        ("page bytes", Flow::Data(Way::Back)),
        ("a read request", Flow::Data(Way::Forth)),
        ("a watermark", Flow::Frame(Way::Back, kind::watermark())),
        (
            "the first token",
            Flow::Frame(Way::Back, kind::first_token()),
        ),
        ("the prompt", Flow::Frame(Way::Forth, kind::prefill())),
        ("a commit", Flow::Frame(Way::Forth, kind::commit())),
    ] {
        let struck = pair.relay.once(flow, || Act::Flip);
        // A connection on which nonsense was read is closed: its reads are posted again on the
        // next one, and the attempt lives.
        let noticed = || {
            pair.decode.metric("kvserve_migrations_failed_total")
                + pair.decode.metric("kvserve_posts_owed_total")
        };
        let before = noticed();
        assert_eq!(pair.decode.ids(&body), expected, "{name}");
        assert!(struck.load(SeqCst), "{name} never passed");
        eventually(
            &format!("{name} is noticed"),
            Duration::from_secs(3),
            || (noticed() > before).then_some(()),
        );
        pair.relay.pass();
        pair.wait_restored(name);
        pair.serves_by_migration(&body, &expected, name);
    }
}

#[test]
fn fault_31_many_flipped_bits_are_many_failed_attempts_and_no_wrong_text() {
    let _turn = two_at_a_time();
    let body = short_body(8);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let pair = Pair::start();
    pair.relay.script(|flow| match flow {
        Flow::Data(Way::Back) => Act::Flip,
        Flow::Data(Way::Forth) | Flow::Frame(..) => Act::Pass,
    });
    for _ in 0..8 {
        assert_eq!(pair.decode.ids(&body), expected);
    }
    assert_eq!(
        pair.decode.metric("kvserve_migrations_committed_total"),
        0.0
    );
    pair.relay.pass();
    // Every second mismatch has taken the path out of use and ended its session; a new one
    // probes it anew by itself.
    pair.serves_by_migration(&body, &expected, "after the flips");
    pair.wait_restored("after the flips");
}

#[test]
fn fault_33_prompts_of_every_length_around_a_page_and_a_chunk_have_the_same_text() {
    let _turn = two_at_a_time();
    // A page is 16 tokens, a chunk 512.
    let lengths = (1..=17)
        .chain([31, 32, 33, 47, 48, 49])
        .chain([495, 496, 497, 511, 512, 513, 527, 528, 529])
        .chain([1023, 1024, 1025]);
    let bodies: Vec<_> = lengths
        .map(|length| ids_request(&prompt(length, length), 6))
        .collect();
    let texts = reference(&bodies);
    let pair = Pair::start();
    for (body, expected) in bodies.iter().zip(&texts) {
        let length = body["prompt"].as_array().map_or(0, Vec::len);
        assert_eq!(&pair.decode.ids(body), expected, "{length} tokens");
    }
    assert_eq!(
        pair.decode.metric("kvserve_migrations_committed_total"),
        bodies.len() as f64,
        "every prompt migrated"
    );
    pair.wait_restored("after all lengths");
}

/// Pages of zeros with the right checksums, whose COMMIT is refused late: decode has computed
/// tokens from them by then, and not one of them leaves.
#[test]
fn fault_28_no_token_of_an_uncommitted_migration_leaves_in_a_stream() {
    let _turn = two_at_a_time();
    let body = long_body(5);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let identity = identity();
    let zeros = checksum(ChecksumMode::Full, &vec![0; identity.page_bytes as usize]);
    let (port, first) = (free_port(), expected[0]);
    let liar = Liar::prefill(port, identity, move |end, frame| {
        let Frame::Prefill { id, prompt, .. } = frame else {
            return;
        };
        let pages = prompt.len().div_ceil(16) as u32;
        let tail_tokens = (prompt.len() - (pages as usize - 1) * 16) as u32;
        let lease = 1000 + u64::from(id.attempt);
        let mut token = first.to_le_bytes().to_vec();
        token.extend(0f32.to_le_bytes());
        token.push(0);
        for frame in [
            Frame::Granted {
                id,
                lease,
                epoch: 1,
                pages,
            },
            Frame::FirstToken { id, payload: token },
            Frame::Complete {
                id,
                lease,
                pages,
                tail_tokens,
                first: 0,
                checksums: vec![zeros; pages as usize],
            },
        ] {
            end.send(&frame);
        }
        while let Some(frame) = end.next(Duration::from_secs(2)) {
            if matches!(frame, Frame::Commit { .. }) {
                // Time for some decode steps on zeros.
                std::thread::sleep(Duration::from_millis(150));
                let outcome = CommitOutcome::Expired;
                end.send(&Frame::CommitAnswer { id, lease, outcome });
                return;
            }
        }
    });
    let decode = Spec::new("decode", "decode-0").join(port).start();
    decode.wait_ready();
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    eventually("the liar is asked", WITHIN, || {
        let stream = crate::harness::post_stream(decode.api(), "/v1/completions", &streamed)
            .expect("stream");
        let (lines, in_order) = stream.rest();
        assert!(
            in_order && lines.last().is_some_and(|line| line == "[DONE]"),
            "{lines:?}"
        );
        let ids: Vec<u32> = lines
            .iter()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .flat_map(|chunk| ids_of(&chunk))
            .collect();
        assert_eq!(ids, expected);
        (liar.asked.load(SeqCst) > 0).then_some(())
    });
    assert_eq!(decode.metric("kvserve_migrations_committed_total"), 0.0);
    decode.wait_restored("after the refused COMMIT", Duration::from_secs(3));
}
