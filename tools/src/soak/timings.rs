//! How exactly stage limits are kept (issue 3: the stage's limit + 10 ms, pages back within
//! 0.4 s; a killed node within 50 ms). Each case has a fresh pair of nodes, so that the maxima
//! that those count are of this case alone.

use super::client::post;
use super::cluster::{Node, Workshop, until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A case and what it showed.
#[derive(Clone, Debug)]
pub struct Timing {
    /// What was done.
    pub case: &'static str,
    /// The way of pages.
    pub transport: String,
    /// How long after the limit the attempt ended, in ms; for kills and freezes, how long after
    /// the signal.
    pub late_ms: f64,
    /// From the attempt's end to its pages being quiet, in ms.
    pub pages_back_ms: f64,
    /// What its end was measured from.
    pub since: &'static str,
    /// Whether the request was answered all the same.
    pub right: bool,
}

/// A prompt that takes a while: watermarks come in many turns.
fn long_body() -> Value {
    let ids: Vec<u64> = (0..6000).map(|place| place * 7 % 509 + 1).collect();
    json!({
        "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    /// Nothing that was read is ever told: no byte, as far as the attempt can see.
    Pull,
    /// COMMIT is lost, and its repetition.
    Commit,
    Frozen,
    Killed,
}

/// All cases over one way of pages.
///
/// # Errors
/// A sentence for the user.
pub fn measure(shop: &Workshop, transport: &str) -> Result<Vec<Timing>, String> {
    let cases = [Case::Pull, Case::Commit, Case::Frozen, Case::Killed];
    cases
        .into_iter()
        .map(|case| measure_one(shop, transport, case))
        .collect()
}

fn measure_one(shop: &Workshop, transport: &str, case: Case) -> Result<Timing, String> {
    let flags = ["--transport", transport];
    // Its own proxy is nowhere: it keeps dialling, which does not matter.
    let nowhere = kvserve::up::free_port()?;
    let mut prefill = Node::start(shop, "prefill", "timed-prefill", Some(nowhere), &flags)?;
    let decode = Node::start(shop, "decode", "timed-decode", Some(prefill.peer), &flags)?;
    until(Duration::from_secs(20), || decode.ready()).ok_or("the pair does not come together")?;
    let failed = || decode.metric("kvserve_migrations_failed_total");
    if case == Case::Pull && !decode.chaos("completion=lose@1") {
        return Err("the chaos hook does not answer".into());
    }
    let (api, body) = (decode.api, long_body());
    let client = std::thread::spawn(move || post(api, "/v1/completions", &body));
    // In the middle of its prefill and pull.
    until(Duration::from_secs(20), || {
        let page = decode.page("/debug/transfers");
        page["transfers"][0]["pages_checked"].as_u64() > Some(0)
            || case == Case::Pull && page["transfers"][0]["reads_out"].as_u64() > Some(0)
    });
    let began = Instant::now();
    match case {
        Case::Pull => {}
        Case::Commit => {
            decode.chaos("message=lose@1");
        }
        Case::Frozen => prefill.signal("STOP"),
        Case::Killed => prefill.kill(),
    }
    until(Duration::from_secs(20), || failed() > 0.0);
    let seen_ms = began.elapsed().as_secs_f64() * 1e3;
    decode.chaos("off");
    let answer = client.join().map_err(|_| "a client panicked")?;
    let right = answer.is_ok_and(|answer| answer.status == 200);
    // Maxima are published up to half a second later.
    let named = |name: &str| decode.metric(name) * 1e3;
    let at_limit = matches!(case, Case::Pull | Case::Commit);
    let counted = || !at_limit || named("kvserve_attempts_at_limit_total") > 0.0;
    until(Duration::from_secs(3), counted);
    std::thread::sleep(Duration::from_millis(700));
    let (name, since) = match case {
        Case::Pull => ("no byte told for 1 s", "limit"),
        Case::Commit => ("COMMIT lost twice", "limit"),
        Case::Frozen => ("prefill frozen (SIGSTOP)", "signal"),
        Case::Killed => ("prefill killed (SIGKILL)", "signal"),
    };
    prefill.signal("CONT");
    Ok(Timing {
        case: name,
        transport: transport.to_string(),
        late_ms: match at_limit {
            true => named("kvserve_attempt_limit_late_seconds_max"),
            false => seen_ms,
        },
        pages_back_ms: named("kvserve_attempt_pages_back_seconds_max"),
        since,
        right,
    })
}
