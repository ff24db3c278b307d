//! A client that leaves, at any stage: nothing computes for it any more, everything comes back.

use crate::harness::{
    Cluster, Options, eventually, fixture, ids_request, model_path, one_at_a_time, post_stream,
    skipped,
};
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

#[test]
fn a_client_that_leaves_at_any_moment_leaves_nothing_behind() {
    let Some(model) = model_path() else {
        return skipped("a_client_that_leaves_at_any_moment_leaves_nothing_behind");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model));
    let case = &fixture("smollm2-q4_1-greedy.json")[0];
    let prompt: Vec<u32> = (0..80)
        .flat_map(|_| case.prompt_ids.iter().copied())
        .collect();
    let mut body = ids_request(&prompt, 600);
    body["stream"] = json!(true);
    let text = body.to_string();
    // Before the answer's head: queued, pairing, prefilling, pulling, committing.
    for delay_ms in [0, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1000] {
        let mut stream = TcpStream::connect(cluster.api).expect("connect");
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{text}",
            text.len()
        )
        .expect("request is sent");
        std::thread::sleep(Duration::from_millis(delay_ms));
        drop(stream);
    }
    // In mid-stream.
    for tokens in [1, 2, 7] {
        let mut stream = post_stream(cluster.api, "/v1/completions", &body).expect("stream");
        for _ in 0..tokens {
            stream.next_data().expect("token").expect("token");
        }
    }
    cluster.ledgers_restored("ledgers after clients left");
    // Nothing computes: the engines' step counters stand still.
    let steps = || -> f64 {
        cluster
            .nodes()
            .iter()
            .map(|(node, _)| cluster.metric(*node, "kvserve_engine_steps_total"))
            .sum()
    };
    eventually("no engine steps for nobody", Duration::from_secs(5), || {
        let before = steps();
        std::thread::sleep(Duration::from_millis(300));
        (steps() == before).then_some(())
    });
}
