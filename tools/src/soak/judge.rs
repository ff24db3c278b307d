//! What must hold when the last request has ended.

use super::cluster::{Fleet, Node, until};
use super::load::Tally;
use std::time::Duration;

/// Ledgers are whole again within a fraction of this: a lease of a killed decode node would take
/// 3 s of silence.
const REST_LIMIT: Duration = Duration::from_secs(20);

/// What a run has come to.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// How requests ended.
    pub tally: Tally,
    /// What is left that should not be: one sentence each.
    pub leaks: Vec<String>,
    /// Migrations committed, failed; prompts computed on the decode node.
    pub migrations: (f64, f64, f64),
    /// Reads posted again, attempts ended by a limit.
    pub reposts_and_limits: (f64, f64),
    /// Bytes pulled.
    pub bytes: f64,
    /// The longest that a limit was noticed late, and that pages took to come back, in seconds.
    pub latest: (f64, f64),
}

impl Verdict {
    /// Whether everything is as it must be.
    pub fn is_good(&self) -> bool {
        let tally = &self.tally;
        let untyped = tally.refused.iter().any(|said| said.ends_with("untyped"));
        tally.wrong == 0
            && tally.cut == 0
            && tally.no_end == 0
            && !untyped
            && self.leaks.is_empty()
            && self.migrations.0 > 0.0
    }
}

/// What a node holds that it should not hold at rest.
fn leak_of(node: &Node) -> Option<String> {
    let pages = node.page("/debug/pages");
    let count = |name: &str| pages[name].as_u64().unwrap_or(u64::MAX);
    let held = count("total").wrapping_sub(count("free"));
    // Pages of the prefix cache are held by nobody and given up on demand.
    let cached = pages["cached"].as_u64().unwrap_or(0);
    if held != cached {
        return Some(format!("{}: {held} pages are not free: {pages}", node.id));
    }
    if count("guards_live") != 0 || count("quarantined") != 0 {
        return Some(format!("{}: guards or quarantine: {pages}", node.id));
    }
    let debug = node.page("/debug/transfers");
    for what in ["transfers", "leases"] {
        if debug[what].as_array().is_none_or(|list| !list.is_empty()) {
            return Some(format!("{}: {what} at rest: {}", node.id, debug[what]));
        }
    }
    for name in ["kvserve_credit_reads_in_use", "kvserve_requests_active"] {
        let left = node.metric(name);
        if left != 0.0 {
            return Some(format!("{}: {name} is {left} at rest", node.id));
        }
    }
    None
}

/// Looks at a fleet whose last request has ended.
pub fn judge(fleet: &Fleet, tally: Tally) -> Verdict {
    let leaks = || fleet.nodes().filter_map(leak_of).collect::<Vec<_>>();
    until(REST_LIMIT, || leaks().is_empty());
    let sum = |name: &str| {
        fleet
            .decode
            .iter()
            .map(|node| node.metric(name))
            .sum::<f64>()
    };
    let most = |name: &str| {
        let each = fleet.decode.iter().map(|node| node.metric(name));
        each.fold(0.0, f64::max)
    };
    Verdict {
        tally,
        leaks: leaks(),
        migrations: (
            sum("kvserve_migrations_committed_total"),
            sum("kvserve_migrations_failed_total"),
            sum("kvserve_local_recomputes_total"),
        ),
        reposts_and_limits: (
            sum("kvserve_reads_reposted_total"),
            sum("kvserve_attempts_at_limit_total"),
        ),
        bytes: sum("kvserve_pulled_bytes_total"),
        latest: (
            most("kvserve_attempt_limit_late_seconds_max"),
            most("kvserve_attempt_pages_back_seconds_max"),
        ),
    }
}
