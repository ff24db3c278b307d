//! The proxy's view of the nodes: each is kept as long as it reports. Sans-IO.

use super::REPORT_TTL;
use super::codec::{NodeReport, Roster, RosterEntry};
use kvserve_runtime::Nanos;
use std::collections::BTreeMap;
use std::time::Duration;

/// Nodes the proxy keeps at most; beyond it new ones are refused (and logged by the caller).
const NODES_MAX: usize = 1024;

/// A node that reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Its incarnation: a report of an older one is not taken.
    pub incarnation: u64,
    /// Where its API listens, as it said at the handshake.
    pub api_url: String,
    /// Its last report.
    pub report: NodeReport,
    /// When that came.
    pub reported_at: Nanos,
}

/// All nodes, by node id.
#[derive(Debug, Default)]
pub struct Registry {
    nodes: BTreeMap<String, Registered>,
}

impl Registry {
    /// Takes a report. False when it is of an older incarnation or the table is full.
    pub fn report(
        &mut self,
        now: Nanos,
        node_id: &str,
        incarnation: u64,
        api_url: &str,
        report: NodeReport,
    ) -> bool {
        let known = self.nodes.get(node_id);
        let stale = known.is_some_and(|known| known.incarnation > incarnation);
        let full = known.is_none() && self.nodes.len() >= NODES_MAX;
        if stale || full {
            return false;
        }
        self.nodes.insert(
            node_id.to_string(),
            Registered {
                incarnation,
                api_url: api_url.to_string(),
                report,
                reported_at: now,
            },
        );
        true
    }

    /// The proxy itself stood still for `span`: reports that came meanwhile still lie in its
    /// sockets, so no node is older for it (PROTOCOL S4).
    pub fn forgive(&mut self, span: Duration) {
        for node in self.nodes.values_mut() {
            node.reported_at = node.reported_at.after(span);
        }
    }

    /// Drops nodes whose last report is too old and whose session is down (`session_is_up`
    /// tells by node id; heartbeats keep it); true if any was.
    pub fn expire(&mut self, now: Nanos, session_is_up: impl Fn(&str) -> bool) -> bool {
        let before = self.nodes.len();
        self.nodes
            .retain(|id, node| now.since(node.reported_at) < REPORT_TTL || session_is_up(id));
        self.nodes.len() != before
    }

    /// Every node.
    pub fn nodes(&self) -> impl Iterator<Item = (&str, &Registered)> {
        self.nodes.iter().map(|(id, node)| (id.as_str(), node))
    }

    /// The prefill nodes that peers can reach.
    pub fn roster(&self) -> Roster {
        Roster {
            prefill: self
                .nodes
                .iter()
                .filter(|(_, node)| node.report.role == 2 && !node.report.peer_address.is_empty())
                .map(|(id, node)| RosterEntry {
                    node_id: id.clone(),
                    peer_address: node.report.peer_address.clone(),
                })
                .collect(),
        }
    }

    /// What is missing before requests can be served; `None` when nothing is.
    pub fn missing(&self) -> Option<&'static str> {
        let ready = |role: u8| {
            self.nodes
                .values()
                .any(|node| node.report.role == role && node.report.ready)
        };
        let paired = self
            .nodes
            .values()
            .any(|node| node.report.role == 3 && node.report.ready && node.report.paired);
        match (ready(1), ready(3), ready(2), paired) {
            (true, _, _, _) | (_, true, true, true) => None,
            (false, false, _, _) => Some("no ready decode node has joined"),
            (false, true, false, _) => Some("no ready prefill node has joined"),
            (false, true, true, false) => Some("no decode node has reached a prefill node yet"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(role: u8) -> NodeReport {
        NodeReport {
            role,
            ready: true,
            paired: true,
            unfinished: 0,
            queued: 0,
            pages_free: 0,
            pages_total: 0,
            pages_quarantined: 0,
            model: "m".into(),
            peer_address: "127.0.0.1:9".into(),
            paths: Vec::new(),
        }
    }

    #[test]
    fn a_cluster_is_ready_with_a_hybrid_or_with_both_halves() {
        let mut registry = Registry::default();
        assert_eq!(registry.missing(), Some("no ready decode node has joined"));
        registry.report(Nanos(0), "d", 1, "u", report(3));
        assert_eq!(registry.missing(), Some("no ready prefill node has joined"));
        registry.report(Nanos(0), "p", 1, "u", report(2));
        assert_eq!(registry.missing(), None);
        assert_eq!(registry.roster().prefill.len(), 1);
        let unpaired = NodeReport {
            paired: false,
            ..report(3)
        };
        registry.report(Nanos(1), "d", 1, "u", unpaired);
        assert!(
            registry
                .missing()
                .is_some_and(|text| text.contains("reached"))
        );
        registry.report(Nanos(1_500_000_000), "h", 1, "u", report(1));
        registry.expire(Nanos(3_500_000_000), |id| id == "p");
        let left: Vec<_> = registry.nodes().map(|(id, _)| id).collect();
        assert_eq!(
            left,
            ["h", "p"],
            "the silent node without a session is gone"
        );
        assert_eq!(registry.missing(), None);
    }

    #[test]
    fn silence_and_old_incarnations_do_not_count() {
        let mut registry = Registry::default();
        assert!(registry.report(Nanos(0), "p", 7, "u", report(2)));
        assert!(!registry.report(Nanos(1), "p", 6, "u", report(2)));
        assert!(!registry.expire(Nanos(2_999_999_999), |_| false));
        registry.forgive(Duration::from_secs(2));
        assert!(!registry.expire(Nanos(4_999_999_999), |_| false));
        assert!(registry.expire(Nanos(5_000_000_000), |_| false));
        assert_eq!(registry.nodes().count(), 0);
    }
}
