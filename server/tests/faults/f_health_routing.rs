//! F: health, routing, admission.

use crate::harness::{
    Fleet, Node, Pair, Spec, StoppedThread, cpus, eventually, get, ids_of, ids_request,
    post_stream, two_at_a_time,
};
use crate::load::{Clients, typed_error};
use crate::steps::{WITHIN, computes_nothing, long_body, prompt, reference, short_body};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn fault_38_when_prefill_nodes_die_decode_stays_healthy_and_says_what_is_missing() {
    let _turn = two_at_a_time();
    let bodies = vec![short_body(1), long_body(2)];
    let texts = reference(&bodies);
    let requests: Vec<_> = bodies.iter().cloned().zip(texts.clone()).collect();
    let mut fleet = Fleet::start(1, 2);
    let clients = Clients::start(fleet.proxy.api(), 2, usize::MAX, requests, 0);
    // One of two.
    fleet.prefill[0].kill();
    for _ in 0..20 {
        assert!(fleet.decode[0].healthy());
        assert!(fleet.decode[0].ready(), "one prefill node is left");
        std::thread::sleep(Duration::from_millis(20));
    }
    // All.
    fleet.prefill[1].kill();
    let decode = &fleet.decode[0];
    eventually("decode says what is missing", WITHIN, || {
        let answer = get(decode.api(), "/ready").ok()?;
        (answer.status == 503 && answer.body.contains("prefill")).then_some(())
    });
    assert!(decode.healthy() && fleet.proxy.healthy());
    eventually("the proxy says so, too", WITHIN, || {
        let answer = get(fleet.proxy.api(), "/ready").ok()?;
        (answer.status == 503).then_some(())
    });
    // It computes prompts itself meanwhile.
    assert_eq!(decode.ids(&bodies[0]), texts[0]);
    // They come back: it recovers by itself.
    for node in &mut fleet.prefill {
        node.start();
    }
    fleet.wait_whole();
    let tally = clients.stop();
    assert!(tally.cut == 0 && tally.right > 0, "{tally:?}");
    let decode = &fleet.decode[0];
    let before = decode.metric("kvserve_migrations_committed_total");
    assert_eq!(fleet.proxy.ids(&bodies[1]), texts[1]);
    assert!(decode.metric("kvserve_migrations_committed_total") > before);
    fleet.wait_restored("after all prefill nodes died");
}

/// What the sentinel says: status and text.
fn health(node: &Node) -> (u16, String) {
    let answer = get(node.spec.health, "/health").expect("the sentinel always answers");
    (answer.status, answer.body)
}

/// Asks the API port until a shard that turns takes the connection.
fn some_shard_answers(api: SocketAddr) {
    eventually("another shard serves", Duration::from_secs(5), || {
        let mut stream = TcpStream::connect(api).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_millis(200)))
            .ok()?;
        stream
            .write_all(b"GET /version HTTP/1.0\r\nhost: t\r\n\r\n")
            .ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.contains("200 OK").then_some(())
    });
}

/// One second is promised; twice that is room for a busy machine.
const WEDGE_SEEN: Duration = Duration::from_secs(3);

#[test]
fn fault_39_a_wedged_shard_is_seen_while_the_other_serves() {
    let _turn = two_at_a_time();
    let [first, second] = cpus();
    if first == second {
        return eprintln!("SKIPPED: two shards need two CPUs");
    }
    let serve = Spec::new("serve", "serve")
        .arg(&format!("--cores {first},{second}"))
        .start();
    assert_eq!(health(&serve).0, 200);
    let Some(stopped) = StoppedThread::of(serve.pid(), "serve-shard-1") else {
        return eprintln!("SKIPPED: a parent may not stop a thread of its child here");
    };
    eventually("the wedged shard is told", WEDGE_SEEN, || {
        let (status, text) = health(&serve);
        (status == 503 && text.contains("serve-shard-1")).then_some(())
    });
    some_shard_answers(serve.api());
    drop(stopped);
    eventually("it turns again", WEDGE_SEEN, || {
        (health(&serve).0 == 200).then_some(())
    });
    assert_eq!(serve.ask(&short_body(1)).status, 200);
}

#[test]
fn fault_39_a_wedged_engine_is_seen_and_ends_its_request_in_time() {
    let _turn = two_at_a_time();
    let serve = Spec::new("serve", "serve")
        .arg("--request-timeout 2s")
        .start();
    let Some(stopped) = StoppedThread::of(serve.pid(), "engine") else {
        return eprintln!("SKIPPED: a parent may not stop a thread of its child here");
    };
    // An engine that has nothing to do is not wedged.
    std::thread::sleep(Duration::from_millis(1300));
    assert_eq!(health(&serve).0, 200);
    let (api, body) = (serve.api(), short_body(1));
    let client = std::thread::spawn(move || crate::harness::post(api, "/v1/completions", &body));
    eventually("the wedged engine is told", WEDGE_SEEN, || {
        let (status, text) = health(&serve);
        (status == 503 && text.contains("engine")).then_some(())
    });
    // The shard serves on, and the request ends by its time.
    assert_eq!(get(serve.api(), "/version").expect("version").status, 200);
    let answer = client.join().expect("client");
    assert_eq!(typed_error(&answer).0, 504);
    drop(stopped);
    eventually("it works again", WEDGE_SEEN, || {
        (health(&serve).0 == 200).then_some(())
    });
    serve.wait_restored("after the wedge", Duration::from_secs(3));
    assert_eq!(serve.ask(&short_body(1)).status, 200);
}

#[test]
fn fault_39_waiting_for_a_peer_is_not_wedged() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    pair.prefill.signal(libc::SIGSTOP);
    let (api, body) = (pair.decode.api(), short_body(1));
    let client = std::thread::spawn(move || crate::harness::post(api, "/v1/completions", &body));
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(health(&pair.decode).0, 200);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(client.join().expect("client").status, 200);
    pair.prefill.signal(libc::SIGCONT);
}

/// `count` requests at once, all connected before the first answer is read.
fn storm(count: usize, threads: usize, args: &str) {
    // Both ends of all connections of this process, and room.
    let fds = libc::rlimit {
        rlim_cur: 20_000,
        rlim_max: 20_000,
    };
    // SAFETY: a plain struct; a refusal shows when connecting.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &fds) };
    let body = ids_request(&prompt(20, 1), 16);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let fleet = Fleet::with(1, 1, args);
    let api = fleet.proxy.api();
    // The peak: as many at once as run.
    let began = Instant::now();
    let calm = Clients::start(api, 16, 160, vec![(body.clone(), expected.clone())], 0).join();
    let peak = calm.right as f64 / began.elapsed().as_secs_f64();
    assert_eq!(calm.right, 160, "{calm:?}");
    let text = body.to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.0\r\nhost: t\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{text}",
        text.len()
    );
    let used = |node: &Node| node.cpu_time();
    let before = [&fleet.proxy, &fleet.decode[0], &fleet.prefill[0]].map(used);
    let began = Instant::now();
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let (request, expected) = (request.clone(), expected.clone());
            std::thread::spawn(move || share(api, count / threads, &request, &expected))
        })
        .collect();
    let mut served = 0;
    let mut shed = 0;
    let mut slowest = Duration::ZERO;
    for worker in workers {
        let (ok, refused, latest) = worker.join().expect("clients");
        served += ok;
        shed += refused;
        slowest = slowest.max(latest);
    }
    let took = began.elapsed();
    let goodput = served as f64 / took.as_secs_f64();
    println!(
        "{count} at once: {served} served, {shed} shed in {took:?}, slowest admitted {slowest:?}; \
         goodput {goodput:.0}/s, peak {peak:.0}/s"
    );
    for (node, before) in [&fleet.proxy, &fleet.decode[0], &fleet.prefill[0]]
        .into_iter()
        .zip(before)
    {
        println!("  CPU of {}: {:?}", node.spec.id, used(node) - before);
    }
    assert_eq!(
        served + shed,
        threads * (count / threads),
        "every request has its end"
    );
    assert!(served > 0 && shed > 0);
    // Admitted ones are bounded by the request's own time.
    assert!(slowest < Duration::from_secs(62), "{slowest:?}");
    for node in [&fleet.proxy, &fleet.decode[0], &fleet.prefill[0]] {
        assert!(
            node.healthy(),
            "{} is unhealthy after the storm",
            node.spec.id
        );
    }
    assert_eq!(fleet.proxy.ids(&body), expected);
    fleet.wait_restored("after the storm");
}

/// Sends all, then reads all: served, shed, and when the last served one was whole.
fn share(
    api: SocketAddr,
    count: usize,
    request: &str,
    expected: &[u32],
) -> (usize, usize, Duration) {
    let began = Instant::now();
    let mut streams = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(api).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(90)))
            .expect("limit");
        stream.write_all(request.as_bytes()).expect("sent");
        streams.push(stream);
    }
    let (mut served, mut shed, mut slowest) = (0, 0, Duration::ZERO);
    for mut stream in streams {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
        let status = head.split_whitespace().nth(1).expect("status");
        match status {
            "200" => {
                let answer: Value = serde_json::from_str(body).expect("JSON");
                assert_eq!(ids_of(&answer), expected);
                served += 1;
                slowest = began.elapsed();
            }
            "429" | "503" => {
                let head = head.to_ascii_lowercase();
                assert!(head.contains("retry-after: "), "{head}");
                shed += 1;
            }
            _ => panic!("{head}\n{body}"),
        }
    }
    (served, shed, slowest)
}

#[test]
fn fault_40_a_storm_is_shed_with_a_word_when_to_come_again() {
    let _turn = two_at_a_time();
    storm(600, 6, "--max-running 16 --max-queued 64");
}

#[test]
#[ignore = "twelve thousand connections"]
fn fault_40_twelve_thousand_requests_at_once() {
    let _turn = two_at_a_time();
    storm(12_000, 12, "");
}

#[test]
fn fault_41_ten_long_prompts_cancelled_do_not_delay_a_short_one() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let short = short_body(1);
    let expected = reference(std::slice::from_ref(&short)).remove(0);
    assert_eq!(pair.decode.ids(&short), expected);
    let mut long = ids_request(&prompt(14_000, 2), 4);
    long["stream"] = json!(true);
    // What one of them takes, undisturbed.
    let began = Instant::now();
    let first = post_stream(pair.decode.api(), "/v1/completions", &long).expect("stream");
    assert_eq!(first.status, 200);
    drop(first);
    let one = began.elapsed();
    let tokens = || pair.prefill.metric("kvserve_engine_tokens_total");
    let before = tokens();
    let text = long.to_string();
    let streams: Vec<_> = (0..10)
        .map(|_| {
            let mut stream = TcpStream::connect(pair.decode.api()).expect("connect");
            write!(
                stream,
                "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{text}",
                text.len()
            )
            .expect("sent");
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(150));
    drop(streams);
    let began = Instant::now();
    assert_eq!(pair.decode.ids(&short), expected);
    let took = began.elapsed();
    // 100 ms are promised on an idle machine. Ten long ones would have taken ten times `one`.
    assert!(
        took < Duration::from_secs(2) && took < 5 * one + Duration::from_millis(300),
        "the short one took {took:?}, one long one takes {one:?}"
    );
    let computed = tokens() - before;
    assert!(
        computed < 7.0 * 14_000.0,
        "{computed} tokens were computed for nobody"
    );
    eventually("nothing is computed for nobody", WITHIN, || {
        (computes_nothing(&pair.decode) && computes_nothing(&pair.prefill)).then_some(())
    });
    pair.wait_restored("after ten cancels");
}
