//! The prefix cache: texts are the same with and without it, on one process and over a
//! migration; only what is not held is computed and pulled; usage says what was found.

use crate::harness::{
    Cluster, Options, eventually, get, ids_of, ids_request, one_at_a_time, post, tiny_qwen2,
};
use serde_json::{Value, json};
use std::time::Duration;

/// Tokens of a page.
const PAGE: usize = 16;

fn prompt(count: usize, seed: usize) -> Vec<u32> {
    let id = |place: usize| ((place * 11 + seed * 137 + place * place / 5) % 509 + 1) as u32;
    (0..count).map(id).collect()
}

fn cached(answer: &Value) -> u64 {
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().expect("a count")
}

/// Chats over shared beginnings: each turn's prompt holds the earlier turns and their answers.
/// Gives every text, asked for one at a time.
fn chats(cluster: &Cluster) -> Vec<(Value, Vec<u32>)> {
    let mut all = Vec::new();
    for chat in 0..4 {
        let mut ids = prompt(100, chat % 2);
        for turn in 0..4 {
            ids.extend(prompt(7 + 40 * (turn % 2), 10 + chat * 4 + turn));
            let body = ids_request(&ids, 9 + turn);
            let text = ids_of(&cluster.complete(&body));
            ids.extend(&text);
            all.push((body, text));
        }
    }
    all
}

/// Everything is back but for what the caches alone own.
fn restored(cluster: &Cluster, what: &str) {
    let pages = get(cluster.api, "/debug/pages").expect("an answer");
    if pages.status != 200 {
        return cluster.ledgers_restored(what);
    }
    eventually(what, Duration::from_secs(10), || {
        let pages = cluster.pages(cluster.api);
        let count = |name: &str| pages[name].as_u64().expect("a count");
        let whole = count("free") + count("evictable") == count("total");
        (whole && count("cached") == count("evictable")).then_some(())
    });
}

fn all_at_once(cluster: &Cluster, requests: &[(Value, Vec<u32>)]) {
    let clients: Vec<_> = (0..3 * requests.len())
        .map(|number| {
            let (body, _) = requests[number % requests.len()].clone();
            let api = cluster.api;
            std::thread::spawn(move || post(api, "/v1/completions", &body))
        })
        .collect();
    for (number, client) in clients.into_iter().enumerate() {
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{}", answer.body);
        let expected = &requests[number % requests.len()].1;
        assert_eq!(&ids_of(&answer.json()), expected, "request {number}");
    }
}

#[test]
fn texts_are_the_same_with_and_without_a_cache_here_and_over_a_migration() {
    let _turn = one_at_a_time();
    let without = {
        let off = Options::serve(tiny_qwen2()).arg("--prefix-cache off");
        let cluster = Cluster::start(&off);
        let texts = chats(&cluster);
        let again = cluster.complete(&texts[0].0);
        assert_eq!(cached(&again), 0, "the cache is off");
        texts
    };
    for options in [Options::serve(tiny_qwen2()), Options::up(tiny_qwen2())] {
        let what = options.command;
        let cluster = Cluster::start(&options);
        assert_eq!(chats(&cluster), without, "{what}: one at a time");
        all_at_once(&cluster, &without);
        restored(&cluster, what);
    }
    // Cold: all of them at once, the shared beginnings race.
    for options in [Options::serve(tiny_qwen2()), Options::up(tiny_qwen2())] {
        let cluster = Cluster::start(&options);
        all_at_once(&cluster, &without);
        restored(&cluster, "after cold chats");
    }
}

#[test]
fn usage_says_what_was_found_and_another_salt_finds_nothing() {
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::serve(tiny_qwen2()));
    let ids = prompt(5 * PAGE, 3);
    let body = ids_request(&ids, 8);
    let first = cluster.complete(&body);
    assert_eq!(cached(&first), 0);
    // The page with the last token is computed again.
    let again = cluster.complete(&body);
    assert_eq!(cached(&again), 4 * PAGE as u64);
    assert_eq!(again["usage"]["prompt_tokens"], ids.len());
    assert_eq!(ids_of(&again), ids_of(&first));
    let mut salted = body.clone();
    salted["cache_salt"] = json!("tenant-a");
    assert_eq!(cached(&cluster.complete(&salted)), 0);
    assert_eq!(cached(&cluster.complete(&salted)), 4 * PAGE as u64);
    salted["cache_salt"] = json!("tenant-b");
    assert_eq!(cached(&cluster.complete(&salted)), 0);
    salted["cache_salt"] = json!("x".repeat(129));
    let refused = post(cluster.api, "/v1/completions", &salted);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("cache_salt"), "{}", refused.body);
    salted["cache_salt"] = json!(7);
    let refused = post(cluster.api, "/v1/completions", &salted);
    assert_eq!(refused.status, 400, "{}", refused.body);
    // A stream says it in its usage chunk.
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let answer = post(cluster.api, "/v1/completions", &streamed);
    let wanted = format!("\"cached_tokens\":{}", 4 * PAGE);
    assert!(answer.body.contains(&wanted), "{}", answer.body);
    let metrics = get(cluster.api, "/metrics").expect("metrics").body;
    assert!(metrics.contains("kvserve_kv_pages_cached"), "{metrics}");
}

#[test]
fn only_the_suffix_that_decode_does_not_hold_is_pulled() {
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(tiny_qwen2()));
    let (prefill, decode) = (cluster.role(2)[0], cluster.role(3)[0]);
    let committed = || cluster.metric(decode, "kvserve_migrations_committed_total");
    // Gauges of the engine's shard are published ten times a second.
    let hits = |node, tokens: usize| {
        let name = "kvserve_prefix_hit_tokens_total";
        eventually("the tokens found", Duration::from_secs(5), || {
            (cluster.metric(node, name) == tokens as f64).then_some(())
        });
    };
    let rests = || cluster.metric(decode, "kvserve_prefix_rests_here_total");
    let settled = |what: &str| cluster.ledgers_restored(what);

    let mut ids = prompt(10 * PAGE + 3, 5);
    cluster.complete(&ids_request(&ids, 20));
    settled("the first");
    assert_eq!((committed(), rests()), (1.0, 0.0));
    // The same again: 10 pages are held, 3 tokens are left, no migration.
    let again = cluster.complete(&ids_request(&ids, 20));
    settled("the same");
    assert_eq!((committed(), rests()), (1.0, 1.0));
    assert_eq!(cached(&again), 10 * PAGE as u64);
    hits(decode, 10 * PAGE);
    // Six pages more: what is held stays, the rest migrates; prefill has the beginning, too.
    ids.extend(prompt(6 * PAGE, 6));
    let longer = cluster.complete(&ids_request(&ids, 20));
    settled("the longer");
    assert_eq!((committed(), rests()), (2.0, 1.0));
    assert_eq!(cached(&longer), 10 * PAGE as u64);
    hits(decode, 2 * 10 * PAGE);
    hits(prefill, 10 * PAGE);
    assert_eq!(
        cluster.metric(decode, "kvserve_migrations_failed_total"),
        0.0
    );
    let alone = Cluster::start(&Options::serve(tiny_qwen2()).arg("--prefix-cache off"));
    let expected = alone.complete(&ids_request(&ids, 20));
    assert_eq!(ids_of(&longer), ids_of(&expected));
}
