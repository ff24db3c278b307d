//! What a node tells of itself: gauges for `/metrics`, `/progress`, `/debug/transfers`,
//! `/debug/pages`, and the switch of the chaos hook.
//!
//! Pages and slots live on the engine's shard; other shards ask it over a bounded bridge
//! ([`DebugQuery`]), and read gauges that it publishes ten times a second.

use super::NodeContext;
use super::transfers::Transfers;
use crate::metrics::gauge;
use crate::perf::KINDS;
use crate::proxy::path_json;
use kvserve_kv::transport::chaos::{ChaosHandle, ChaosSpec};
use kvserve_runtime::bridge;
use kvserve_runtime::completion::SlotView;
use kvserve_runtime::trace::chrome_trace;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often gauges are published while something runs, and while nothing does.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);
const PUBLISH_EVERY_IDLE: Duration = Duration::from_millis(500);

/// Slots that one answer lists at most; the oldest first.
const SLOTS_SHOWN_MAX: usize = 1000;

/// A question for the engine's shard.
pub enum DebugQuestion {
    /// `/debug/transfers`
    Transfers,
    /// `/debug/pages`
    Pages,
    /// `/debug/trace`: the latest events in the Chrome trace format.
    Trace,
    /// `GET /debug/chaos`
    Chaos,
    /// `POST /debug/chaos`
    SetChaos(ChaosSpec),
}

/// A question and where its answer goes.
pub struct DebugQuery {
    /// What is asked.
    pub question: DebugQuestion,
    /// For exactly one answer.
    pub answer: bridge::Sender<Value>,
}

/// What the engine's shard publishes for the others.
#[derive(Debug, Default)]
pub struct StatusBoard {
    published: Mutex<Published>,
}

#[derive(Debug, Default, Clone)]
struct Published {
    gauges: String,
    progress: Value,
    nodes: Value,
}

impl StatusBoard {
    /// Appends the node's gauges in Prometheus' text format.
    pub fn write_gauges(&self, out: &mut String) {
        out.push_str(&self.read().gauges);
    }

    /// `/progress`: age of the oldest waiter per stage, in seconds.
    pub fn progress(&self) -> Value {
        self.read().progress
    }

    /// `/nodes/status` of this node: how pages come to it from each peer.
    pub fn nodes(&self) -> Value {
        self.read().nodes
    }

    fn read(&self) -> Published {
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn publish(&self, published: Published) {
        *self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = published;
    }
}

/// Publishes gauges until the shard ends.
pub async fn publish(node: Rc<NodeContext>, board: Arc<StatusBoard>) {
    loop {
        let transfers = Transfers::look(&node);
        board.publish(Published {
            gauges: gauges(&node, &transfers),
            progress: progress(&node.hub.live(), &transfers),
            nodes: nodes(&node),
        });
        let busy = node.unfinished() > 0 || transfers.any();
        let pause = match busy {
            true => PUBLISH_EVERY,
            false => PUBLISH_EVERY_IDLE,
        };
        node.shard.sleep(pause).await;
    }
}

/// Answers questions of all shards until the bridge closes.
pub async fn answer(
    node: Rc<NodeContext>,
    chaos: ChaosHandle,
    mut queries: bridge::Receiver<DebugQuery>,
) {
    while let Some(query) = queries.recv().await {
        let value = match query.question {
            DebugQuestion::Transfers => transfers(&node),
            DebugQuestion::Pages => pages(&node),
            DebugQuestion::Trace => {
                let text = chrome_trace(&[node.shard.trace()], &KINDS);
                serde_json::from_str(&text).unwrap_or(Value::Null)
            }
            DebugQuestion::Chaos => json!({ "spec": chaos.spec().to_string() }),
            DebugQuestion::SetChaos(spec) => {
                node.log.warn("CHAOS set", &[("spec", &spec)]);
                chaos.set(spec);
                json!({ "spec": chaos.spec().to_string() })
            }
        };
        // Who asked may have left meanwhile.
        let _ = query.answer.try_send(value);
    }
}

/// Age of the oldest waiter per label, and of the oldest transfer per stage, in seconds.
fn progress(live: &[SlotView], transfers: &Transfers) -> Value {
    let mut oldest: BTreeMap<&str, f64> = BTreeMap::new();
    for slot in live {
        let age = oldest.entry(slot.label).or_default();
        *age = age.max(slot.age.as_secs_f64());
    }
    let ages: Map<String, Value> = oldest
        .into_iter()
        .map(|(label, age)| (label.to_string(), json!(age)))
        .collect();
    let stages: Map<String, Value> = (transfers.oldest.iter())
        .map(|(stage, oldest)| (stage.to_string(), oldest.json()))
        .collect();
    json!({ "oldest_wait_s": ages, "oldest_transfer": stages })
}

fn transfers(node: &NodeContext) -> Value {
    let live = &node.hub.live();
    let mut slots: Vec<_> = live.iter().collect();
    slots.sort_by_key(|slot| std::cmp::Reverse(slot.age));
    let shown: Vec<_> = slots
        .iter()
        .take(SLOTS_SHOWN_MAX)
        .map(|slot| {
            json!({
                "label": slot.label,
                "state": format!("{:?}", slot.phase),
                "reason": slot.reason.map(|reason| reason.label()),
                "owner": slot.owner,
                "age_s": slot.age.as_secs_f64(),
                "deadline_left_s": slot.deadline_left.as_secs_f64(),
                "posts_outstanding": slot.posts_outstanding,
                "posts_owed": slot.posts_owed,
                "holds_pages": slot.holds_guards,
            })
        })
        .collect();
    json!({
        "total": live.len(), "shown": shown.len(), "slots": shown,
        "transfers": super::transfers::pulled(node),
        "leases": super::transfers::leased(node),
    })
}

fn pages(node: &NodeContext) -> Value {
    let backing = node.ledger.with(|ledger| ledger.backing());
    let (counts, total, guards, cached, evictable) = node.ledger.with(|ledger| {
        let (cached, evictable) = (ledger.cached_pages(), ledger.evictable_pages());
        let (counts, guards) = (ledger.counts(), ledger.guards_live());
        (counts, ledger.pages(), guards, cached, evictable)
    });
    json!({
        "total": total, "page_tokens": node.limits.page_tokens,
        "free": counts.free, "building": counts.building, "ready": counts.ready,
        "leased": counts.leased, "pulling": counts.pulling, "stopping": counts.stopping,
        "quarantined": counts.quarantined, "guards_live": guards,
        "cached": cached, "evictable": evictable,
        "memory": backing.map(|backing| backing.label()),
    })
}

fn nodes(node: &NodeContext) -> Value {
    let paths = node.paths();
    let backing = node.ledger.with(|ledger| ledger.backing());
    json!({
        "peers": paths.iter().map(path_json).collect::<Vec<_>>(),
        "kv_memory": backing.map(|backing| backing.label()),
    })
}

fn gauges(node: &NodeContext, transfers: &Transfers) -> String {
    let mut out = String::with_capacity(4096);
    let (counts, total, prefix) = node
        .ledger
        .with(|ledger| (ledger.counts(), ledger.pages(), ledger.prefix_counters()));
    let (cached, evictable) = node
        .ledger
        .with(|ledger| (ledger.cached_pages(), ledger.evictable_pages()));
    let load = node.core.load();
    let hub = node.hub.counters();
    for (name, value) in [
        ("kvserve_kv_pages", total),
        ("kvserve_kv_pages_free", counts.free),
        ("kvserve_kv_pages_leased", counts.leased),
        ("kvserve_kv_pages_pulling", counts.pulling),
        ("kvserve_kv_pages_stopping", counts.stopping),
        ("kvserve_kv_pages_quarantined", counts.quarantined),
        ("kvserve_kv_pages_cached", cached),
        ("kvserve_kv_pages_evictable", evictable),
        ("kvserve_requests_active", node.readiness.active()),
        ("kvserve_requests_admission_queued", node.admission.queued()),
        ("kvserve_sequences_running", load.running),
        ("kvserve_sequences_queued", load.queued),
        (
            "kvserve_peer_prefills_active",
            node.peer_prefills_live.get(),
        ),
    ] {
        gauge(&mut out, name, "", value as f64);
    }
    for (name, value) in [
        ("kvserve_preemptions_total", load.preemptions),
        (
            "kvserve_prefix_hit_tokens_total",
            prefix.hit_pages * node.limits.page_tokens as u64,
        ),
        ("kvserve_prefix_evicted_pages_total", prefix.evictions),
        ("kvserve_slots_begun_total", hub.begun),
        ("kvserve_slots_ended_deadline_total", hub.ended_deadline),
        ("kvserve_slots_ended_cancelled_total", hub.ended_cancelled),
        ("kvserve_slots_ended_failed_total", hub.ended_failed),
        ("kvserve_completions_late_total", hub.completions_late),
        (
            "kvserve_completions_duplicate_total",
            hub.completions_duplicate,
        ),
        ("kvserve_completions_stray_total", hub.completions_stray),
        ("kvserve_channels_killed_total", hub.channels_killed),
        ("kvserve_channels_stuck_total", hub.channels_stuck),
    ] {
        gauge(&mut out, name, "", value as f64);
    }
    transfers.gauges(node, &mut out);
    out
}
