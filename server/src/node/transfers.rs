//! Transfers while they run: `/debug/transfers`, `/progress`, `/metrics` (DESIGN 6).
//!
//! A transfer that is stuck is seen as such before its limit ends it: its stage, age and owner,
//! how long nothing has moved for it, and when its stage's limit strikes.

use super::NodeContext;
use kvserve_kv::peer::AttemptView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Transfers that one answer lists at most; the oldest first.
const SHOWN_MAX: usize = 1000;

/// The oldest transfer of a stage.
#[derive(Clone, Debug)]
pub struct Oldest {
    /// How many are in that stage.
    count: usize,
    view: AttemptView,
}

impl Oldest {
    /// As `/progress` shows it.
    pub fn json(&self) -> Value {
        let mut value = attempt_json(&self.view);
        value["count"] = json!(self.count);
        value
    }
}

/// The transfers of a moment, by stage.
#[derive(Debug, Default)]
pub struct Transfers {
    /// By stage.
    pub oldest: BTreeMap<&'static str, Oldest>,
    leases: usize,
}

impl Transfers {
    /// Looks at all of them.
    pub fn look(node: &NodeContext) -> Self {
        let mut transfers = Transfers::default();
        let Some(peers) = node.peers.get() else {
            return transfers;
        };
        transfers.leases = peers.leases().len();
        for view in peers.attempts() {
            match transfers.oldest.get_mut(view.stage) {
                Some(oldest) => {
                    oldest.count += 1;
                    if view.age > oldest.view.age {
                        oldest.view = view;
                    }
                }
                None => {
                    let stage = view.stage;
                    transfers.oldest.insert(stage, Oldest { count: 1, view });
                }
            }
        }
        transfers
    }

    /// Whether any runs, into this node or out of it.
    pub fn any(&self) -> bool {
        !self.oldest.is_empty() || self.leases > 0
    }

    /// Appends them, the paths and the credits in Prometheus' text format.
    pub fn gauges(&self, node: &NodeContext, out: &mut String) {
        type Of = fn(&Oldest) -> f64;
        let of_stage: [(&str, Of); 4] = [
            ("kvserve_transfers", |oldest| oldest.count as f64),
            ("kvserve_transfer_oldest_seconds", |oldest| {
                oldest.view.age.as_secs_f64()
            }),
            ("kvserve_transfer_still_seconds", |oldest| {
                oldest.view.still_for.as_secs_f64()
            }),
            ("kvserve_transfer_limit_left_seconds", |oldest| {
                oldest.view.limit_left.as_secs_f64()
            }),
        ];
        for (name, of) in of_stage {
            typed(out, name, "gauge");
            for (stage, oldest) in &self.oldest {
                line(out, name, &format!("stage=\"{stage}\""), of(oldest));
            }
        }
        let Some(peers) = node.peers.get() else {
            return;
        };
        let counted = peers.counters();
        let (credits, (reads, bytes), waiting) = peers.credits();
        let hub = node.hub.counters();
        for (name, kind, value) in [
            (
                "kvserve_attempts_at_limit_total",
                "counter",
                counted.attempts_at_limit as f64,
            ),
            (
                "kvserve_attempt_limit_late_seconds_max",
                "gauge",
                counted.limit_late_max.as_secs_f64(),
            ),
            (
                "kvserve_attempt_pages_back_seconds_max",
                "gauge",
                counted.pages_back_max.as_secs_f64(),
            ),
            (
                "kvserve_reads_reposted_total",
                "counter",
                counted.reads_reposted as f64,
            ),
            ("kvserve_posts_owed_total", "counter", hub.posts_owed as f64),
            (
                "kvserve_slots_out_of_posts_total",
                "counter",
                hub.slots_out_of_posts as f64,
            ),
            (
                "kvserve_slots_ended_channel_stuck_total",
                "counter",
                hub.ended_channel_stuck as f64,
            ),
            ("kvserve_credit_reads_in_use", "gauge", f64::from(reads)),
            ("kvserve_credit_bytes_in_use", "gauge", bytes as f64),
            ("kvserve_credit_reads_waiting", "gauge", waiting as f64),
            (
                "kvserve_credits_taken_total",
                "counter",
                credits.taken as f64,
            ),
            (
                "kvserve_credits_given_back_total",
                "counter",
                credits.given_back as f64,
            ),
            (
                "kvserve_reads_refused_hopeless_total",
                "counter",
                credits.hopeless as f64,
            ),
            (
                "kvserve_reads_refused_queue_full_total",
                "counter",
                credits.queue_full as f64,
            ),
        ] {
            typed(out, name, kind);
            line(out, name, "", value);
        }
        let (tcp, _) = peers.transport_counters();
        let name = "kvserve_pulled_bytes_total";
        typed(out, name, "counter");
        line(out, name, "path=\"tcp\"", tcp.bytes as f64);
        line(out, name, "path=\"shm\"", peers.shm_counters().bytes as f64);
        if let Some(rdma) = peers.rdma_counters() {
            line(out, name, "path=\"rdma\"", rdma.bytes as f64);
        }
        if let Some(rdma) = peers.rdma_counters() {
            for (name, value) in [
                ("kvserve_rdma_pairs_total", counted.rdma_pairs),
                ("kvserve_rdma_pairs_served_total", counted.rdma_pairs_served),
                ("kvserve_rdma_pairs_lost_total", counted.rdma_pairs_lost),
                ("kvserve_rdma_pairs_stuck_total", rdma.pairs_stuck),
                ("kvserve_rdma_requests_total", rdma.requests),
                ("kvserve_rdma_bytes_total", rdma.bytes),
                ("kvserve_rdma_posts_refused_total", rdma.posts_refused),
                ("kvserve_rdma_completions_total", rdma.completions),
                ("kvserve_rdma_completions_lost_total", rdma.completions_lost),
                (
                    "kvserve_rdma_completions_stray_total",
                    rdma.strays + rdma.duplicates,
                ),
                ("kvserve_rdma_events_total", rdma.events),
            ] {
                typed(out, name, "counter");
                line(out, name, "", value as f64);
            }
        }
        let paths = node.paths();
        type Counted = fn(&crate::cluster::PathReport) -> f64;
        let of_path: [(&str, &str, Counted); 8] = [
            ("kvserve_path_reads_total", "counter", |path| {
                path.moved.reads as f64
            }),
            ("kvserve_path_bytes_total", "counter", |path| {
                path.moved.bytes as f64
            }),
            ("kvserve_path_reposts_total", "counter", |path| {
                path.moved.reposts as f64
            }),
            ("kvserve_path_mismatches_total", "counter", |path| {
                path.moved.mismatches as f64
            }),
            ("kvserve_path_fallbacks_total", "counter", |path| {
                path.moved.fallbacks as f64
            }),
            ("kvserve_path_credit_reads", "gauge", |path| {
                f64::from(path.credit_reads)
            }),
            ("kvserve_path_credit_bytes", "gauge", |path| {
                path.credit_bytes as f64
            }),
            ("kvserve_path_waiting", "gauge", |path| {
                f64::from(path.waiting)
            }),
        ];
        for (name, kind, of) in of_path {
            typed(out, name, kind);
            for path in &paths {
                let way = match path.path.as_str() {
                    "" => "none",
                    way => way,
                };
                let labels = format!("peer=\"{}\",path=\"{way}\"", label(&path.node_id));
                line(out, name, &labels, of(path));
            }
        }
    }
}

/// `/debug/transfers`: migrations into this node, the oldest first.
pub fn pulled(node: &NodeContext) -> Vec<Value> {
    let mut views = (node.peers.get()).map_or_else(Vec::new, |peers| peers.attempts());
    views.sort_by_key(|view| std::cmp::Reverse(view.age));
    views.iter().take(SHOWN_MAX).map(attempt_json).collect()
}

/// `/debug/transfers`: what peers are granted here.
pub fn leased(node: &NodeContext) -> Vec<Value> {
    let views = (node.peers.get()).map_or_else(Vec::new, |peers| peers.leases());
    let json = |view: &kvserve_kv::lease::LeaseView| {
        json!({
            "request": view.id.request.counter, "attempt": view.id.attempt,
            "lease": view.lease, "state": view.phase.label(),
            "pages": view.pages, "pages_ready": view.pages_ready,
        })
    };
    views.iter().take(SHOWN_MAX).map(json).collect()
}

fn attempt_json(view: &AttemptView) -> Value {
    let seconds = |span: Duration| json!(span.as_secs_f64());
    json!({
        "stage": view.stage, "state": view.phase, "from": view.node_id,
        "owner": view.id.request.counter, "attempt": view.id.attempt, "lease": view.lease,
        "age_s": seconds(view.age), "still_s": seconds(view.still_for),
        "limit_left_s": seconds(view.limit_left),
        "deadline_left_s": seconds(view.deadline_left),
        "pages_checked": view.pages_checked, "pages": view.pages,
        "bytes_checked": view.bytes_checked, "reads_out": view.reads_out,
    })
}

fn typed(out: &mut String, name: &str, kind: &str) {
    // Writing into a String never fails.
    let _ = writeln!(out, "# TYPE {name} {kind}");
}

fn line(out: &mut String, name: &str, labels: &str, value: f64) {
    let _ = match labels {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

/// A label's value as Prometheus wants it.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
