//! The node's side of the cluster: it reports to proxies, and dials the prefill nodes that a
//! proxy names.

use super::codec::{NodeReport, Roster};
use super::{KIND_REPORT, KIND_ROSTER, REPORT_EVERY};
use crate::log::FAILED_HANDSHAKES;
use crate::node::NodeContext;
use kvserve_kv::peer::{PeerEvents, PeerState, PeerView};
use kvserve_kv::session::handshake::Refusal;
use kvserve_kv::session::{RefuseReason, Role};
use kvserve_runtime::{Deadline, Nanos};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// How long a prefill node may be missing from the roster before it is no longer dialled: longer
/// than any restart of the proxy, whose first roster may be empty.
const FORGET_AFTER: Duration = Duration::from_secs(10);

/// Prefill nodes one decode node dials at most.
const DIALLED_MAX: usize = 256;

/// Exit status of a process whose node id was started again elsewhere.
const EXIT_SUPERSEDED: i32 = 3;

/// What a node says of itself and does not change.
pub struct Agent {
    /// Where peers reach it; empty when it does not listen.
    pub peer_address: String,
    /// Name of its model.
    pub model: String,
    /// Whether a supervisor starts this node again when it ends.
    pub supervised: bool,
}

impl Agent {
    fn report(&self, node: &NodeContext) -> NodeReport {
        let (counts, free, total, worn_out) = node.ledger.with(|ledger| {
            let (counts, free) = (ledger.counts(), ledger.free_pages());
            (counts, free, ledger.pages(), ledger.not_ready())
        });
        NodeReport {
            role: node.role as u8,
            ready: !node.readiness.draining() && !worn_out,
            paired: node.role != Role::Decode || node.has_prefill_peer(),
            unfinished: node.unfinished() as u32,
            queued: (node.admission.queued() + node.core.load().queued) as u32,
            pages_free: free as u32,
            pages_total: total as u32,
            pages_quarantined: counts.quarantined as u32,
            model: self.model.clone(),
            peer_address: self.peer_address.clone(),
            paths: node.paths(),
        }
    }
}

/// Reports to every proxy, and keeps `/ready` true, until the shard ends. A report also goes
/// out at once when a proxy's session comes up.
pub async fn report(node: Rc<NodeContext>, agent: Agent) {
    let mut sent: BTreeMap<String, (u64, Nanos, (bool, bool))> = BTreeMap::new();
    let mut worn_out = false;
    loop {
        let now = node.shard.now();
        if !worn_out && node.ledger.with(|ledger| ledger.not_ready()) {
            worn_out = true;
            wear_out(&node, &agent);
        }
        if let Some(peers) = node.peers.get() {
            let up = peers.peers();
            let proxies = up
                .iter()
                .filter(|peer| peer.role == Some(Role::Proxy) && peer.state == PeerState::Up);
            sent.retain(|id, _| up.iter().any(|peer| peer.node_id == *id));
            for proxy in proxies {
                let report = agent.report(&node);
                let due = match sent.get(&proxy.node_id) {
                    Some((incarnation, at, standing)) => {
                        *incarnation != proxy.incarnation
                            || *standing != (report.ready, report.paired)
                            || now.since(*at) >= REPORT_EVERY
                    }
                    None => true,
                };
                // A proxy whose session has just ended hears the next report.
                if due
                    && peers
                        .send_app(&proxy.node_id, KIND_REPORT, report.encode())
                        .is_ok()
                {
                    let standing = (report.ready, report.paired);
                    let entry = (proxy.incarnation, now, standing);
                    sent.insert(proxy.node_id.clone(), entry);
                }
            }
        }
        node.readiness.set_missing(missing(&node));
        let at_most = Deadline::after(node.shard.now(), TURN);
        // Rung when a peer comes, goes or changes its way; the rest may wait for the turn.
        let _either = node.shard.until(at_most, node.standing.notified()).await;
    }
}

/// How often the loop looks at what nobody rings for: data connections that come up, pages, load.
const TURN: Duration = Duration::from_millis(250);

/// Too many pages are in quarantine for the life of the process: tells it, and where a supervisor
/// starts the node again, drains it.
fn wear_out(node: &NodeContext, agent: &Agent) {
    let counts = node.ledger.with(|ledger| ledger.counts());
    node.log.warn(
        "more than 1 % of the KV pages are quarantined",
        &[
            ("quarantined", &counts.quarantined),
            ("pages", &counts.total()),
            ("supervised", &agent.supervised),
        ],
    );
    if agent.supervised {
        // SAFETY: a signal to this very process; its handler asks for the drain.
        unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
    }
}

fn missing(node: &NodeContext) -> Option<String> {
    if node.ledger.with(|ledger| ledger.not_ready()) {
        return Some("more than 1 % of the KV pages are quarantined; restart this node".into());
    }
    if node.role == Role::Decode && !node.has_prefill_peer() {
        return Some("no prefill node is up; prompts are computed here meanwhile".into());
    }
    None
}

/// Hears of peers.
pub struct AgentEvents {
    node: Weak<NodeContext>,
    dialled: RefCell<BTreeMap<SocketAddr, Nanos>>,
}

impl AgentEvents {
    /// For a node that is still being put together.
    pub fn new(node: Weak<NodeContext>) -> Rc<Self> {
        Rc::new(AgentEvents {
            node,
            dialled: RefCell::default(),
        })
    }

    /// Dials whom the roster names; forgets who has been missing for long.
    fn follow(&self, node: &NodeContext, roster: &Roster) {
        let Some(peers) = node.peers.get() else {
            return;
        };
        let now = node.shard.now();
        let mut dialled = self.dialled.borrow_mut();
        for entry in &roster.prefill {
            let Some(address) = resolve(&entry.peer_address) else {
                node.log.warn(
                    "a prefill node's address cannot be resolved",
                    &[("node", &entry.node_id), ("address", &entry.peer_address)],
                );
                continue;
            };
            let known = dialled.contains_key(&address);
            if known || dialled.len() < DIALLED_MAX {
                dialled.insert(address, now);
            }
            if !known {
                peers.dial(address);
            }
        }
        dialled.retain(|address, seen| {
            let keep = now.since(*seen) < FORGET_AFTER;
            if !keep {
                peers.forget(*address);
            }
            keep
        });
    }
}

/// An address as text, usually numbers. A name is resolved by the system, which can take a
/// moment: rosters change seldom, and only nodes that authenticated are in them.
fn resolve(text: &str) -> Option<SocketAddr> {
    text.parse()
        .ok()
        .or_else(|| text.to_socket_addrs().ok()?.next())
}

impl PeerEvents for AgentEvents {
    fn up(&self, peer: PeerView) {
        if let Some(node) = self.node.upgrade() {
            node.standing.notify();
            node.log.info(
                "peer up",
                &[("peer", &peer.node_id), ("address", &peer.address)],
            );
        }
    }

    fn down(&self, node_id: &str, reason: RefuseReason, by_peer: bool) {
        let Some(node) = self.node.upgrade() else {
            return;
        };
        node.standing.notify();
        let reason_text = format!("{reason:?}");
        node.log
            .info("peer down", &[("peer", &node_id), ("reason", &reason_text)]);
        if by_peer && reason == RefuseReason::Superseded {
            node.log.warn(
                "another process with this node id was started later; this one ends",
                &[("told_by", &node_id)],
            );
            std::process::exit(EXIT_SUPERSEDED);
        }
    }

    fn path(&self, node_id: &str, path: &'static str, reason: &str) {
        let Some(node) = self.node.upgrade() else {
            return;
        };
        node.standing.notify();
        let path = if path.is_empty() { "none" } else { path };
        let fields: [(&str, &dyn std::fmt::Display); 3] =
            [("peer", &node_id), ("path", &path), ("reason", &reason)];
        let known = fields.len() - usize::from(reason.is_empty());
        node.log.info("path of pages", &fields[..known]);
    }

    fn app(&self, node_id: &str, kind: u16, bytes: &[u8]) {
        let Some(node) = self.node.upgrade() else {
            return;
        };
        if kind != KIND_ROSTER || node.role != Role::Decode {
            return;
        }
        let from_proxy = node.peers.get().is_some_and(|peers| {
            peers
                .peers()
                .iter()
                .any(|peer| peer.node_id == node_id && peer.role == Some(Role::Proxy))
        });
        // Only a proxy is believed about addresses.
        if !from_proxy {
            node.log.warn(
                "a roster came from a peer that is no proxy",
                &[("peer", &node_id)],
            );
            return;
        }
        match Roster::decode(bytes) {
            Ok(roster) => self.follow(&node, &roster),
            Err(error) => node
                .log
                .warn("bad roster", &[("peer", &node_id), ("error", &error)]),
        }
    }

    fn refused(&self, address: SocketAddr, refusal: &Refusal) {
        if let Some(node) = self.node.upgrade() {
            let fields: [(&str, &dyn std::fmt::Display); 2] =
                [("address", &address), ("why", &refusal.text)];
            // Not there (yet): dialling goes on by itself.
            if refusal.reason == RefuseReason::Disconnected {
                node.log.info("peer not reached", &fields);
            } else {
                node.log
                    .warn_gated(&FAILED_HANDSHAKES, "handshake failed", &fields);
            }
        }
    }
}
