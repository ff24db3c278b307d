//! Nodes that are killed or frozen in mid-request: texts stay right, ledgers come back, the
//! cluster heals by itself.

use crate::harness::{
    Cluster, Options, eventually, fixture, ids_of, ids_request, model_path, one_at_a_time, post,
    post_stream, runs, skipped,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Detection of a frozen peer (3 s) or a dead one (at once), one recompute, and room for a
/// loaded machine.
const HEALED: Duration = Duration::from_secs(20);

/// A prompt long enough that a signal hits its prefill, with the text of an undisturbed run.
fn long_request(cluster: &Cluster) -> (Value, Vec<u32>) {
    let case = &fixture("smollm2-q4_1-greedy.json")[0];
    let prompt: Vec<u32> = (0..120)
        .flat_map(|_| case.prompt_ids.iter().copied())
        .collect();
    let body = ids_request(&prompt, 12);
    let ids = ids_of(&cluster.complete(&body));
    assert_eq!(ids.len(), 12);
    (body, ids)
}

fn a_prefill_gets(signal: i32) {
    let Some(model) = model_path() else {
        return skipped("a prefill node dies");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model).arg("--prefill 2"));
    let (body, expected) = long_request(&cluster);
    for run in 0..runs() {
        cluster.wait_ready();
        let victim = format!("prefill-{}", run % 2);
        let api = cluster.api;
        let request = body.clone();
        let client = std::thread::spawn(move || post(api, "/v1/completions", &request));
        std::thread::sleep(Duration::from_millis(30 + 40 * run as u64));
        let began = Instant::now();
        let pid = cluster.signal(&victim, signal);
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "run {run}: {}", answer.body);
        assert_eq!(ids_of(&answer.json()), expected, "run {run}");
        assert!(
            began.elapsed() < HEALED,
            "run {run} took {:?}",
            began.elapsed()
        );
        if signal == libc::SIGSTOP {
            // SAFETY: a signal to a process of this test.
            unsafe { libc::kill(pid, libc::SIGCONT) };
        }
        eventually("both prefill nodes are back", HEALED, || {
            (cluster.role(2).len() == 2).then_some(())
        });
        cluster.ledgers_restored("ledgers after a prefill node's fall");
    }
}

#[test]
fn a_killed_prefill_node_costs_no_request() {
    a_prefill_gets(libc::SIGKILL);
}

#[test]
fn a_frozen_prefill_node_costs_no_request() {
    a_prefill_gets(libc::SIGSTOP);
}

/// The stream of a node that fell in its middle never claims an end. When decode falls, the
/// proxy says so in an error event; when the proxy itself falls, there is nobody to say it: the
/// connection ends without the finish and `[DONE]` that every whole stream has.
fn stream_broke_honestly(lines: &[String], in_order: bool, node: &str) {
    let finished = lines
        .iter()
        .any(|line| line.contains("\"finish_reason\":\"length\""));
    let error = lines.iter().any(|line| line.contains("\"error\""));
    assert!(
        !finished,
        "a broken stream must not claim a finish: {lines:?}"
    );
    if node != "proxy" {
        assert!(error || !in_order, "a broken stream must say so: {lines:?}");
    }
    assert!(!lines.iter().any(|line| line == "[DONE]"), "{lines:?}");
}

fn heals_after(node: &str, signal: i32) {
    let Some(model) = model_path() else {
        return skipped("decode or proxy dies in mid-stream");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model));
    let (body, expected) = long_request(&cluster);
    let mut streaming = body.clone();
    streaming["stream"] = json!(true);
    streaming["max_tokens"] = json!(400);
    let mut stream = post_stream(cluster.api, "/v1/completions", &streaming).expect("stream");
    assert_eq!(stream.status, 200);
    stream
        .next_data()
        .expect("first token")
        .expect("first token");
    let pid = cluster.signal(node, signal);
    if signal == libc::SIGSTOP {
        std::thread::sleep(Duration::from_secs(5));
        // SAFETY: a signal to a process of this test.
        unsafe { libc::kill(pid, libc::SIGCONT) };
        // A node that only slept may well finish its stream; it must do so rightly or say so.
        drop(stream);
    } else {
        let (lines, in_order) = stream.rest();
        stream_broke_honestly(&lines, in_order, node);
    }
    eventually("the cluster serves again", HEALED, || {
        let answer = crate::harness::try_post(cluster.api, "/v1/completions", &body).ok()?;
        (answer.status == 200).then(|| assert_eq!(ids_of(&answer.json()), expected))
    });
    cluster.ledgers_restored("ledgers after a node's fall");
}

#[test]
fn decode_killed_in_mid_stream_is_told_and_heals() {
    heals_after("decode-0", libc::SIGKILL);
}

#[test]
fn decode_frozen_in_mid_stream_heals_after_its_thaw() {
    heals_after("decode-0", libc::SIGSTOP);
}

#[test]
fn the_proxy_killed_in_mid_stream_heals() {
    heals_after("proxy", libc::SIGKILL);
}

#[test]
fn the_proxy_frozen_in_mid_stream_heals_after_its_thaw() {
    heals_after("proxy", libc::SIGSTOP);
}
