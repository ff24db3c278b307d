//! Starting clusters and single nodes, talking to them, looking at their ledgers; and what
//! stands between nodes or lies to them.

// Two test binaries share this; each uses its part.
#![allow(dead_code, unused_imports)]

mod client;
mod fixture;
mod node;
mod peer;
mod process;
mod relay;
mod thread_stop;

pub use client::{Answer, Stream, get, post, post_stream, post_with, try_post};
pub use fixture::{Case, fixture, tiny_qwen2};
pub use node::{Fleet, Node, Pair, Spec, cpus, free_port, key_file};
pub use peer::{DataEnd, Identity, Liar, PeerEnd, closed_by_peer, identity_of};
pub use process::{Cluster, Options, model_path, one_at_a_time, skipped, two_at_a_time};
pub use relay::{Act, Flow, Relay, Way};
pub use thread_stop::StoppedThread;

use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs of a fault test: a few in `cargo test`, more when asked for.
pub fn runs() -> usize {
    std::env::var("KVSERVE_TEST_RUNS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(3)
}

/// A greedy completion request over token ids.
pub fn ids_request(ids: &[u32], max_tokens: usize) -> Value {
    json!({
        "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// The generated ids of a completion answer.
pub fn ids_of(answer: &Value) -> Vec<u32> {
    answer["choices"][0]["token_ids"]
        .as_array()
        .map(|ids| {
            ids.iter()
                .filter_map(|id| id.as_u64())
                .map(|id| id as u32)
                .collect()
        })
        .unwrap_or_default()
}

/// Waits until `check` gives something, at most for `limit`; panics with `what` after it.
pub fn eventually<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
