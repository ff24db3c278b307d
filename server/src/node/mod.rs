//! A serving node on its engine's shard: `serve` (hybrid), `prefill`, `decode`.
//!
//! [`NodeContext`] is everything the tasks of that shard share. Requests come over the command
//! bridge ([`accept`]); each runs as one task to exactly one end; dropping the task cancels it
//! at every stage.

mod accept;
mod admission;
pub mod attempts;
mod decode;
mod local;
pub(crate) mod payload;
pub(crate) mod prefill;
mod request;
mod status;
mod transfers;

pub use accept::accept;
pub use admission::{Admission, AdmissionFull};
pub use prefill::PeerPrefills;
pub use status::{DebugQuery, DebugQuestion, StatusBoard, answer, publish};

use crate::cluster::{PATHS_MAX, PathReport};
use crate::engine::{EngineCore, Notify};
use crate::log::Log;
use crate::metrics::Metrics;
use crate::perf::Perf;
use crate::readiness::Readiness;
use crate::scheduler::SchedulerLimits;
use kvserve_kv::ledger::LedgerCell;
use kvserve_kv::peer::{PeerHub, PeerState, PeerView};
use kvserve_kv::session::{RequestId, Role};
use kvserve_runtime::Shard;
use kvserve_runtime::completion::Hub;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// What the tasks of the engine's shard share.
pub struct NodeContext {
    /// Hybrid, prefill or decode.
    pub role: Role,
    /// Start of this process; names its requests together with a counter.
    pub incarnation: u64,
    /// Requests numbered so far.
    pub requests_numbered: Cell<u64>,
    /// The shard.
    pub shard: Shard,
    /// Its completions.
    pub hub: Hub,
    /// Its pages.
    pub ledger: Rc<LedgerCell>,
    /// Its engine.
    pub core: EngineCore,
    /// Its peers; unset on a node without a cluster.
    pub peers: OnceCell<PeerHub>,
    /// The scheduler's bounds.
    pub limits: SchedulerLimits,
    /// Longest sequence in tokens.
    pub context_max: usize,
    /// Admission of requests that migrate.
    pub admission: Rc<Admission>,
    /// Counters of the process.
    pub metrics: Arc<Metrics>,
    /// Where time goes.
    pub perf: Arc<Perf>,
    /// Nanoseconds an attempt took per prompt token, smoothed; 0 before the first.
    pub prompt_token_ns: Cell<f64>,
    /// What all shards know.
    pub readiness: Arc<Readiness>,
    /// Rung when a peer comes, goes or changes its way: what the node reports has changed.
    pub standing: Notify,
    /// Prefills for peers under way.
    pub peer_prefills_live: Cell<usize>,
    /// The log.
    pub log: Log,
}

impl NodeContext {
    /// The prefill node with the least in flight among those that are up, leaving out `not`.
    pub(crate) fn choose_prefill(&self, not: &[String]) -> Option<String> {
        self.peers
            .get()?
            .peers()
            .into_iter()
            .filter(|peer| peer.role == Some(Role::Prefill) && peer.state == PeerState::Up)
            .filter(|peer| peer.can_pull)
            .filter(|peer| !not.contains(&peer.node_id))
            .min_by_key(|peer| peer.in_flight)
            .map(|peer| peer.node_id)
    }

    /// Whether a prefill node is up.
    pub fn has_prefill_peer(&self) -> bool {
        self.choose_prefill(&[]).is_some()
    }

    /// Learns from an attempt, a recompute or a prefill that `tokens` of prompt took `span`.
    ///
    /// Short prompts say nothing: their time is overhead and waiting.
    pub(crate) fn learn_prompt_pace(&self, tokens: usize, span: Duration) {
        const TOKENS_MIN: usize = 64;
        if tokens < TOKENS_MIN {
            return;
        }
        let sample = span.as_nanos() as f64 / tokens.max(1) as f64;
        let known = self.prompt_token_ns.get();
        self.prompt_token_ns.set(if known > 0.0 {
            0.75 * known + 0.25 * sample
        } else {
            sample
        });
    }

    /// What computing `tokens` of prompt will take, from what it took before (PROTOCOL R4).
    pub(crate) fn estimate(&self, tokens: usize) -> Duration {
        Duration::from_nanos((self.prompt_token_ns.get() * tokens as f64) as u64)
    }

    pub(crate) fn next_request_id(&self) -> RequestId {
        let counter = self.requests_numbered.get() + 1;
        self.requests_numbered.set(counter);
        RequestId {
            incarnation: self.incarnation,
            counter,
        }
    }

    /// How pages come to this node from each prefill node.
    pub fn paths(&self) -> Vec<PathReport> {
        let Some(peers) = self.peers.get() else {
            return Vec::new();
        };
        let pulled =
            |peer: &PeerView| self.role == Role::Decode && peer.role == Some(Role::Prefill);
        let peers = peers.peers().into_iter().filter(pulled);
        let path = |peer: PeerView| PathReport {
            node_id: peer.node_id,
            path: peer.path.to_string(),
            moved: peer.moved,
            credit_reads: peer.credits.reads,
            credit_bytes: peer.credits.bytes,
            waiting: peer.credits.waiting as u32,
        };
        peers.map(path).take(PATHS_MAX).collect()
    }

    /// Requests and prefills for peers that have not ended.
    pub fn unfinished(&self) -> usize {
        self.readiness.active() + self.peer_prefills_live.get()
    }
}
