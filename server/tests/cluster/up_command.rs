//! The README's curl, and that one signal ends everything.

use crate::harness::{Cluster, Options, eventually, get, model_path, one_at_a_time, post, skipped};
use serde_json::json;
use std::time::Duration;

#[test]
fn the_readme_curl_is_answered_and_one_signal_ends_all_processes() {
    let Some(model) = model_path() else {
        return skipped("the_readme_curl_is_answered_and_one_signal_ends_all_processes");
    };
    let _turn = one_at_a_time();
    let mut options = Options::up(model);
    options.args.clear();
    let cluster = Cluster::start(&options);
    let answer = post(
        cluster.api,
        "/v1/chat/completions",
        &json!({
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 16, "temperature": 0,
        }),
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(
        answer.json()["choices"][0]["message"]["content"],
        "The capital of France is Paris."
    );
    let pids: Vec<_> = ["proxy", "prefill-0", "decode-0"]
        .iter()
        .map(|name| cluster.child(name).expect("child runs"))
        .collect();
    assert_eq!(cluster.nodes().len(), 2);
    assert_eq!(get(cluster.api, "/health").expect("health").status, 200);
    drop(cluster);
    for pid in pids {
        eventually("the child has ended", Duration::from_secs(5), || {
            (!std::path::Path::new(&format!("/proc/{pid}")).exists()).then_some(())
        });
    }
}
