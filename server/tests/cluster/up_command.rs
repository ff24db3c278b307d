//! The README's curl, and that one signal ends everything.

use crate::harness::{
    Cluster, Options, eventually, get, model_path, one_at_a_time, post, skipped, try_post,
};
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

/// The first Ctrl-C waits for a long answer; the second does not, and leaves nothing behind.
#[test]
fn a_second_interrupt_ends_all_processes_at_once_and_removes_the_key() {
    let Some(model) = model_path() else {
        return skipped("a_second_interrupt_ends_all_processes_at_once_and_removes_the_key");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model));
    let pids: Vec<_> = ["proxy", "prefill-0", "decode-0"]
        .iter()
        .map(|name| cluster.child(name).expect("child runs"))
        .collect();
    let arguments = std::fs::read(format!("/proc/{}/cmdline", pids[0])).expect("a command line");
    let arguments: Vec<_> = arguments.split(|byte| *byte == 0).collect();
    let at = arguments
        .iter()
        .position(|word| *word == b"--peer-key-file");
    let key = String::from_utf8_lossy(arguments[at.expect("a key") + 1]).into_owned();
    assert!(std::path::Path::new(&key).exists());
    let api = cluster.api;
    let body = json!({
        "prompt": "Count from one to a thousand:", "max_tokens": 1500, "temperature": 0,
        "ignore_eos": true, "stream": true,
    });
    // However its answer ends.
    let client = std::thread::spawn(move || try_post(api, "/v1/completions", &body).is_ok());
    eventually("it runs", Duration::from_secs(10), || {
        let nodes = cluster.nodes();
        nodes
            .iter()
            .any(|(_, node)| node["unfinished"] != 0)
            .then_some(())
    });
    let interrupt = || {
        // SAFETY: a signal to our own child.
        assert_eq!(unsafe { libc::kill(cluster.pid(), libc::SIGINT) }, 0);
    };
    let there = |pid: &i32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    interrupt();
    std::thread::sleep(Duration::from_millis(300));
    assert!(pids.iter().all(there), "the first one cuts nothing");
    interrupt();
    eventually("all have ended", Duration::from_secs(5), || {
        (!pids.iter().any(there)).then_some(())
    });
    eventually("the key is gone", Duration::from_secs(5), || {
        let folder = std::path::Path::new(&key).parent()?;
        (!folder.exists()).then_some(())
    });
    client.join().expect("a client that was cut off returns");
}
