//! Transfers of real processes: seen while they are stuck, ended at their limits, posted again
//! after the loss of a connection. Bounds are of liveness; exact times are measured in release by
//! `tools` bin `soak`, from the same counters.

use crate::a_waits::{freeze, struck_at};
use crate::harness::{
    Act, Fleet, Flow, Node, Pair, Way, eventually, get, ids_of, post, two_at_a_time,
};
use crate::steps::{WITHIN, kind, long_body, pair_and_text_over, reference};
use serde_json::Value;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// The way of pages, and where the prefill node is frozen so that this stage hangs: half of the
/// first bytes come, the rest is still in the frozen process.
const STUCK: [(&str, &str, Flow, Act); 2] = [
    ("tcp", "pull", Flow::Data(Way::Back), Act::Half),
    ("shm", "commit", Flow::Frame(Way::Forth, 0), Act::Pass),
];

fn flow_of(flow: Flow) -> Flow {
    match flow {
        // Kinds are known at run time only.
        Flow::Frame(way, 0) => Flow::Frame(way, kind::commit()),
        other => other,
    }
}

/// The first transfer of this stage for which nothing has moved for a while.
fn stuck_transfer(node: &Node, stage: &str) -> Option<Value> {
    let page = get(node.api(), "/debug/transfers").ok()?.json();
    let transfers = page["transfers"].as_array()?.clone();
    let stuck = |view: &Value| {
        view["stage"] == stage && view["still_s"].as_f64().is_some_and(|still| still > 0.1)
    };
    transfers.into_iter().find(stuck)
}

#[test]
fn a_stuck_transfer_is_seen_while_it_is_stuck() {
    let _turn = two_at_a_time();
    for (transport, stage, flow, act) in STUCK {
        let (pair, body, expected) = pair_and_text_over(transport);
        let pid = pair.prefill.pid();
        let struck = pair.relay.once(flow_of(flow), move || {
            freeze(pid);
            act
        });
        let (api, request) = (pair.decode.api(), body.clone());
        let client = std::thread::spawn(move || post(api, "/v1/completions", &request));
        eventually(transport, WITHIN, || struck.load(SeqCst).then_some(()));
        let view = eventually(
            "the stuck transfer is listed",
            Duration::from_secs(3),
            || stuck_transfer(&pair.decode, stage),
        );
        for field in ["age_s", "limit_left_s", "deadline_left_s"] {
            assert!(
                view[field].as_f64().is_some_and(|value| value > 0.0),
                "{field}: {view}"
            );
        }
        assert!(view["limit_left_s"].as_f64() <= Some(1.0), "{view}");
        assert_eq!(view["from"], "prefill-0", "{view}");
        assert!(
            view["owner"].as_u64().is_some_and(|owner| owner > 0),
            "{view}"
        );
        assert!(view["bytes_checked"].is_u64(), "{view}");
        assert!(!client.is_finished(), "seen only after its end");
        // Published ten times a second while something runs; a second stuck attempt (the retry
        // of a frozen node) is as good.
        let stuck = |transport: &str| {
            eventually(transport, Duration::from_secs(3), || {
                let progress = get(pair.decode.api(), "/progress").ok()?.json();
                let oldest = progress["oldest_transfer"]
                    .as_object()?
                    .values()
                    .next()?
                    .clone();
                let age = oldest["age_s"].as_f64()?;
                let metric = pair.decode.metric("kvserve_transfer_oldest_seconds");
                (age > 0.0 && metric > 0.0).then_some(())
            });
        };
        stuck("the page and the metrics show it");
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(ids_of(&answer.json()), expected);
        pair.decode
            .wait_restored("after the stuck transfer", Duration::from_secs(3));
        eventually("the limit is counted", Duration::from_secs(3), || {
            (pair.decode.metric("kvserve_attempts_at_limit_total") >= 1.0).then_some(())
        });
        // Ten milliseconds and 0.4 s are promised on an idle machine; these are of liveness.
        assert!(pair.decode.metric("kvserve_attempt_limit_late_seconds_max") < 2.0);
        assert!(pair.decode.metric("kvserve_attempt_pages_back_seconds_max") < 2.0);
        pair.prefill.signal(libc::SIGCONT);
        pair.serves_by_migration(&body, &expected, transport);
        pair.wait_restored(transport);
    }
}

/// E5 on real processes: the connection that pages come over is lost under a pull, and nobody
/// has to try again.
#[test]
fn a_lost_data_connection_costs_no_attempt() {
    let _turn = two_at_a_time();
    let (pair, body, expected) = pair_and_text_over("tcp");
    let failed = || pair.decode.metric("kvserve_migrations_failed_total");
    let before = failed();
    let (mut reposted, mut tries) = (0.0, 0);
    // A connection that is closed just between two reads loses none.
    while reposted == 0.0 && tries < 5 {
        struck_at(
            &pair,
            &body,
            &expected,
            "data",
            Flow::Data(Way::Back),
            || Act::Close,
        );
        // Counters are published within half a second.
        let until = Instant::now() + Duration::from_secs(2);
        while reposted == 0.0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
            reposted = pair.decode.metric("kvserve_reads_reposted_total");
        }
        pair.wait_restored("after the loss of a connection");
        tries += 1;
    }
    assert!(reposted >= 1.0, "no read was posted again in {tries} tries");
    assert_eq!(failed(), before, "an attempt failed for it");
}

/// Nothing passes between the nodes while all sockets stand: the heartbeats say so.
#[test]
fn dropped_packets_end_the_session_by_its_heartbeats() {
    let _turn = two_at_a_time();
    for transport in ["tcp", "shm"] {
        let (pair, body, expected) = pair_and_text_over(transport);
        // Frames of this kind come back in the middle of a migration over either way.
        let watermark = Flow::Frame(Way::Back, kind::watermark());
        let held = pair.relay.once(watermark, || Act::Drop);
        let (api, request) = (pair.decode.api(), body.clone());
        let client = std::thread::spawn(move || post(api, "/v1/completions", &request));
        eventually("a watermark passed", WITHIN, || {
            held.load(SeqCst).then_some(())
        });
        pair.relay.freeze();
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(ids_of(&answer.json()), expected);
        for node in [&pair.decode, &pair.prefill] {
            eventually("the session is dead", Duration::from_secs(8), || {
                node.log().contains("Silent").then_some(())
            });
        }
        pair.wait_restored("while nothing passes");
        pair.relay.thaw();
        pair.serves_by_migration(&body, &expected, transport);
        pair.wait_restored(transport);
    }
}

/// The decode node is frozen for two lives of its leases, in a pull and in COMMIT.
#[test]
fn a_decode_node_frozen_beyond_its_leases_thaws_whole() {
    let _turn = two_at_a_time();
    let body = long_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let ttl = Duration::from_secs(1);
    for transport in ["tcp", "shm"] {
        let pair = Pair::over(transport, "--lease-ttl 1s", "--lease-ttl 1s");
        let pulling = match transport {
            "tcp" => Flow::Data(Way::Back),
            _ => Flow::Frame(Way::Back, kind::watermark()),
        };
        for (name, flow) in [
            ("pull", pulling),
            ("commit", Flow::Frame(Way::Forth, kind::commit())),
        ] {
            let pid = pair.decode.pid();
            let struck = pair.relay.once(flow, move || {
                freeze(pid);
                Act::Pass
            });
            let (api, request) = (pair.decode.api(), body.clone());
            let client = std::thread::spawn(move || post(api, "/v1/completions", &request));
            eventually(name, WITHIN, || struck.load(SeqCst).then_some(()));
            std::thread::sleep(2 * ttl);
            // Its lease has expired meanwhile, and that alone frees nothing (PROTOCOL L3).
            pair.decode.signal(libc::SIGCONT);
            let answer = client.join().expect("client");
            assert_eq!(answer.status, 200, "{name}: {}", answer.body);
            assert_eq!(ids_of(&answer.json()), expected, "{transport} {name}");
            pair.relay.pass();
            pair.wait_restored(name);
            pair.serves_by_migration(&body, &expected, name);
            assert!(pair.decode.healthy());
        }
    }
}

/// The proxy and the node itself name the way of pages, and what it has moved.
#[test]
fn the_way_of_pages_is_named_with_its_counters() {
    let _turn = two_at_a_time();
    let body = long_body(9);
    for transport in ["tcp", "shm"] {
        let fleet = Fleet::with(1, 1, &format!("--transport {transport}"));
        let expected = fleet.proxy.ids(&body);
        assert_eq!(fleet.decode[0].ids(&body), expected);
        let named = |peers: &Value| {
            let peer = peers.as_array().and_then(|peers| peers.first().cloned())?;
            let count = |name: &str| peer[name].as_u64();
            let moved = count("reads")? >= 2 && count("bytes")? > 0;
            let clean = count("mismatches")? == 0 && count("fallbacks")? == 0;
            let at_rest = count("credit_reads")? == 0 && count("waiting")? == 0;
            let right = peer["node"] == "prefill-0" && peer["path"] == transport;
            (right && moved && clean && at_rest && count("reposts")? == 0).then_some(())
        };
        eventually("the node names it", Duration::from_secs(5), || {
            let page = get(fleet.decode[0].api(), "/nodes/status").ok()?.json();
            named(&page["peers"])
        });
        eventually("the proxy names it", Duration::from_secs(5), || {
            let page = get(fleet.proxy.api(), "/nodes/status").ok()?.json();
            let nodes = page.as_object()?;
            let decode = nodes.values().find(|node| node["node"] == "decode-0")?;
            named(&decode["peers"])
        });
        let text = get(fleet.decode[0].api(), "/metrics")
            .expect("metrics")
            .body;
        let wanted = format!("kvserve_path_bytes_total{{peer=\"prefill-0\",path=\"{transport}\"}}");
        assert!(text.contains(&wanted), "{wanted} is not in\n{text}");
    }
}
