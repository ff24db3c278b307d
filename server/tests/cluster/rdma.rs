//! Whole clusters whose pages go by RDMA READ on real verbs: in the VM of `tools/rdma-vm`, which
//! runs these with `--ignored`; elsewhere there is no device.

use crate::harness::{
    Cluster, Options, eventually, get, ids_of, ids_request, one_at_a_time, post, tiny_qwen2,
};
use serde_json::Value;
use std::time::Duration;

/// Emulated, everything takes some twenty times as long.
const SLOW: Duration = Duration::from_secs(60);

fn cluster() -> Cluster {
    // Every request moves its pages: none is held already.
    let flags = "--transport rdma --kv-cache 16MiB --prefix-cache off";
    let options = Options::up(tiny_qwen2()).arg(flags);
    Cluster::start(&options)
}

fn long_body() -> Value {
    let prompt: Vec<u32> = (0..300).map(|at| at * 7 % 500 + 3).collect();
    ids_request(&prompt, 8)
}

/// The decode node's way to its prefill node, as the proxy tells it.
fn named(cluster: &Cluster) -> Option<Value> {
    let page = get(cluster.api, "/nodes/status").ok()?.json();
    let nodes = page.as_object()?;
    let peers = nodes.values().filter_map(|node| node["peers"].as_array());
    let mut peers = peers.flatten();
    let by_rdma = |peer: &&Value| {
        peer["path"] == "rdma" && peer["bytes"].as_u64().is_some_and(|bytes| bytes > 0)
    };
    peers.find(by_rdma).cloned()
}

/// The text of `serve`, where nothing is moved, from a request of its own.
fn text_of_one_process(body: &Value) -> Vec<u32> {
    let serve = Cluster::start(&Options::serve(tiny_qwen2()).arg("--kv-cache 16MiB"));
    let ids = ids_of(&serve.complete(body));
    assert_eq!(ids.len(), 8);
    ids
}

#[test]
#[ignore = "real verbs: tools/rdma-vm/test"]
fn a_cluster_moves_its_pages_by_rdma_and_says_so() {
    let _turn = one_at_a_time();
    let body = long_body();
    let expected = text_of_one_process(&body);
    let cluster = cluster();
    for _ in 0..3 {
        assert_eq!(ids_of(&cluster.complete(&body)), expected);
    }
    let peer = eventually("the proxy names the way", SLOW, || named(&cluster));
    assert_eq!(peer["mismatches"].as_u64(), Some(0), "{peer}");
    assert_eq!(peer["fallbacks"].as_u64(), Some(0), "{peer}");
}

/// SIGKILL of the prefill node in mid-request: the request is answered with the right text, and
/// the pair heals by itself, on RDMA again.
#[test]
#[ignore = "real verbs: tools/rdma-vm/test"]
fn a_killed_prefill_node_heals_by_rdma() {
    let _turn = one_at_a_time();
    let body = long_body();
    let cluster = cluster();
    let expected = ids_of(&cluster.complete(&body));
    for run in 0..2 {
        let (api, request) = (cluster.api, body.clone());
        let client = std::thread::spawn(move || post(api, "/v1/completions", &request));
        std::thread::sleep(Duration::from_millis(20 + 60 * run));
        cluster.signal("prefill-0", libc::SIGKILL);
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(ids_of(&answer.json()), expected, "run {run}");
        cluster.wait_ready();
        eventually("the next request moves its pages by rdma", SLOW, || {
            let before = named(&cluster).and_then(|peer| peer["bytes"].as_u64());
            assert_eq!(ids_of(&cluster.complete(&body)), expected);
            let after = named(&cluster).and_then(|peer| peer["bytes"].as_u64());
            after.filter(|after| before.is_none_or(|before| *after > before))
        });
        cluster.ledgers_restored("ledgers after the prefill node's fall");
    }
}
