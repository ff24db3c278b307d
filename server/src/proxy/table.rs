//! The nodes a proxy knows, and which one the next request goes to. Sans-IO: the cluster layer
//! fills it from leases, time is given.
//!
//! One table per shard; `unfinished` counts what went through this shard.

use super::ticket::{Load, Ticket};
use crate::cluster::PathReport;
use kvserve_runtime::Nanos;
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::rc::Rc;

/// Nodes a table holds at most: choosing scans them all, 1,024 cost some microseconds.
pub const NODES_MAX: usize = 1024;

/// What a node does. The numbers are those of `/nodes/status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeRole {
    /// Prefill and decode in one.
    Hybrid = 1,
    /// Prefill for others.
    Prefill = 2,
    /// Decodes; takes requests.
    Decode = 3,
}

impl NodeRole {
    fn takes_requests(self) -> bool {
        match self {
            NodeRole::Hybrid | NodeRole::Decode => true,
            NodeRole::Prefill => false,
        }
    }
}

/// A node as it registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// Its name, unique in the cluster.
    pub node: String,
    /// Its life (PROTOCOL S2): another one is another process.
    pub incarnation: u64,
    /// Where its API listens.
    pub address: SocketAddr,
    /// Its API as people write it, the key in `/nodes/status`.
    pub url: String,
    /// What it does.
    pub role: NodeRole,
    /// Models it serves.
    pub models: Vec<String>,
    /// Whether it admits work.
    pub ready: bool,
    /// How pages come to it.
    pub paths: Vec<PathReport>,
}

/// The table has [`NODES_MAX`] nodes and takes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull {
    /// The bound.
    pub nodes_max: usize,
}

struct Node {
    record: NodeRecord,
    load: Rc<Load>,
}

/// The nodes known to this shard.
#[derive(Default)]
pub struct NodeTable {
    nodes: Vec<Node>,
    /// Where the last choice was, for turns among equals.
    last: usize,
}

impl NodeTable {
    /// Takes in a registration or a renewal. A new incarnation under an old name ends the
    /// requests at the old one.
    ///
    /// # Errors
    /// [`TableFull`].
    pub fn upsert(&mut self, record: NodeRecord) -> Result<(), TableFull> {
        let known = self
            .nodes
            .iter()
            .position(|node| node.record.node == record.node);
        let Some(place) = known else {
            if self.nodes.len() >= NODES_MAX {
                return Err(TableFull {
                    nodes_max: NODES_MAX,
                });
            }
            self.nodes.push(Node {
                record,
                load: Rc::default(),
            });
            return Ok(());
        };
        let node = &mut self.nodes[place];
        if node.record.incarnation != record.incarnation {
            node.load.mark_gone();
            node.load = Rc::default();
        }
        node.record = record;
        Ok(())
    }

    /// The node's lease has ended: its requests end with `peer_lost`. An older incarnation
    /// than the known one changes nothing. Gives what was known of it.
    pub fn remove(&mut self, name: &str, incarnation: u64) -> Option<NodeRecord> {
        let place = self
            .nodes
            .iter()
            .position(|node| node.record.node == name && node.record.incarnation == incarnation)?;
        let node = self.nodes.remove(place);
        node.load.mark_gone();
        Some(node.record)
    }

    /// The ready decode or hybrid node with the least unfinished requests, none of `tried`;
    /// equals take turns. A node that has just failed is chosen only if there is no other.
    pub fn choose(&mut self, now: Nanos, tried: &[String]) -> Option<Ticket> {
        let count = self.nodes.len();
        let key = |node: &Node| {
            (
                now < node.load.avoid_until.get(),
                node.load.unfinished.get(),
            )
        };
        let chosen = (1..=count)
            .map(|step| (self.last + step) % count)
            .filter(|place| {
                let record = &self.nodes[*place].record;
                record.ready && record.role.takes_requests() && !tried.contains(&record.node)
            })
            // `min_by_key` gives the first of equals: the next one after the last choice.
            .min_by_key(|place| key(&self.nodes[*place]))?;
        self.last = chosen;
        let node = &self.nodes[chosen];
        Some(Ticket::new(
            node.record.node.clone(),
            node.record.address,
            node.load.clone(),
            now,
        ))
    }

    /// What this cluster lacks to serve; `None`: it is ready.
    pub fn missing(&self) -> Option<&'static str> {
        let ready = |role: NodeRole| {
            self.nodes
                .iter()
                .any(|node| node.record.ready && node.record.role == role)
        };
        if ready(NodeRole::Hybrid) {
            return None;
        }
        match (ready(NodeRole::Prefill), ready(NodeRole::Decode)) {
            (true, true) => None,
            (true, false) => Some("no decode node has joined and is ready"),
            (false, true) => Some("no prefill node has joined and is ready"),
            (false, false) => Some("no prefill and no decode node has joined and is ready"),
        }
    }

    /// `/nodes/status`.
    pub fn status(&self) -> Value {
        let mut page = Map::new();
        for Node { record, load } in &self.nodes {
            page.insert(
                record.url.clone(),
                json!({
                    "role": record.role as u8,
                    "models": record.models,
                    "unfinished": load.unfinished.get(),
                    "latency": load.latency_s.get(),
                    "speed": load.speed.get(),
                    "first_byte": load.first_byte_s.get(),
                    "finished": load.finished.get(),
                    "failed": load.failed.get(),
                    "ready": record.ready,
                    "node": record.node,
                    "incarnation": format!("{:016x}", record.incarnation),
                    "peers": record.paths.iter().map(path_json).collect::<Vec<_>>(),
                }),
            );
        }
        Value::Object(page)
    }

    /// All records, for the cluster layer.
    pub fn records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.iter().map(|node| &node.record)
    }

    /// Requests at all nodes.
    pub fn unfinished(&self) -> u64 {
        self.nodes
            .iter()
            .map(|node| u64::from(node.load.unfinished.get()))
            .sum()
    }
}

/// One way of pages, as `/nodes/status` shows it on the proxy and on the node.
pub fn path_json(path: &PathReport) -> Value {
    json!({
        "node": path.node_id,
        "path": path.path,
        "reads": path.moved.reads,
        "bytes": path.moved.bytes,
        "reposts": path.moved.reposts,
        "mismatches": path.moved.mismatches,
        "fallbacks": path.moved.fallbacks,
        "credit_reads": path.credit_reads,
        "credit_bytes": path.credit_bytes,
        "waiting": path.waiting,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn record(name: &str, role: NodeRole) -> NodeRecord {
        NodeRecord {
            node: name.into(),
            incarnation: 1,
            address: "127.0.0.1:9000".parse().unwrap(),
            url: format!("http://{name}"),
            role,
            models: vec!["tiny".into()],
            ready: true,
            paths: Vec::new(),
        }
    }

    fn table(nodes: &[(&str, NodeRole)]) -> NodeTable {
        let mut table = NodeTable::default();
        for (name, role) in nodes {
            table.upsert(record(name, *role)).unwrap();
        }
        table
    }

    #[test]
    fn the_least_busy_is_chosen_and_equals_take_turns() {
        let mut table = table(&[
            ("d0", NodeRole::Decode),
            ("p0", NodeRole::Prefill),
            ("d1", NodeRole::Decode),
            ("h0", NodeRole::Hybrid),
        ]);
        let mut tickets: Vec<Ticket> = (0..6)
            .map(|_| table.choose(Nanos(0), &[]).unwrap())
            .collect();
        let names: Vec<&str> = tickets.iter().map(|ticket| ticket.node.as_str()).collect();
        assert_eq!(names, ["d1", "h0", "d0", "d1", "h0", "d0"]);
        // One ends at h0: it is the least busy now.
        drop(tickets.remove(1));
        let next = table.choose(Nanos(0), &[]).unwrap();
        assert_eq!(next.node, "h0");
        drop((tickets, next));
        assert_eq!(table.unfinished(), 0);
    }

    #[test]
    fn one_after_another_goes_round() {
        let mut table = table(&[("d0", NodeRole::Decode), ("d1", NodeRole::Decode)]);
        let names: Vec<String> = (0..4)
            .map(|_| table.choose(Nanos(0), &[]).unwrap().node.clone())
            .collect();
        assert_eq!(names, ["d1", "d0", "d1", "d0"]);
    }

    #[test]
    fn unready_prefill_and_tried_nodes_are_passed_over() {
        let mut table = table(&[("p0", NodeRole::Prefill), ("d0", NodeRole::Decode)]);
        assert!(table.choose(Nanos(0), &["d0".into()]).is_none());
        table
            .upsert(NodeRecord {
                ready: false,
                paths: Vec::new(),
                ..record("d0", NodeRole::Decode)
            })
            .unwrap();
        assert!(table.choose(Nanos(0), &[]).is_none());
        assert!(NodeTable::default().choose(Nanos(0), &[]).is_none());
    }

    #[test]
    fn a_node_that_failed_is_second_choice_for_a_while() {
        let mut table = table(&[("d0", NodeRole::Decode), ("d1", NodeRole::Decode)]);
        let later = Nanos(0).after(Duration::from_secs(1));
        let first = table.choose(Nanos(0), &[]).unwrap();
        let (bad, good) = match first.node.as_str() {
            "d0" => ("d0", "d1"),
            _ => ("d1", "d0"),
        };
        first.fail(later);
        let busy: Vec<Ticket> = (0..3)
            .map(|_| table.choose(Nanos(0), &[]).unwrap())
            .collect();
        assert!(busy.iter().all(|ticket| ticket.node == good));
        assert_eq!(
            table.choose(Nanos(0), &[good.into()]).unwrap().node,
            bad,
            "better than none"
        );
        assert_eq!(table.choose(later, &[]).unwrap().node, bad);
    }

    #[test]
    fn a_new_incarnation_is_another_node() {
        let mut table = table(&[("d0", NodeRole::Decode)]);
        let old = table.choose(Nanos(0), &[]).unwrap();
        table
            .upsert(NodeRecord {
                incarnation: 2,
                ..record("d0", NodeRole::Decode)
            })
            .unwrap();
        assert_eq!(table.unfinished(), 0);
        drop(old);
        assert_eq!(table.unfinished(), 0);
        assert!(
            table.remove("d0", 1).is_none(),
            "an old lease's end is late"
        );
        assert!(table.remove("d0", 2).is_some());
        assert_eq!(table.records().count(), 0);
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(
            table(&[])
                .missing()
                .unwrap()
                .contains("no prefill and no decode")
        );
        let decode = table(&[("d", NodeRole::Decode)]);
        assert!(decode.missing().unwrap().contains("no prefill node"));
        let prefill = table(&[("p", NodeRole::Prefill)]);
        assert!(prefill.missing().unwrap().contains("no decode node"));
        assert_eq!(table(&[("h", NodeRole::Hybrid)]).missing(), None);
        let both = [("p", NodeRole::Prefill), ("d", NodeRole::Decode)];
        assert_eq!(table(&both).missing(), None);
    }

    #[test]
    fn the_status_page_has_averages() {
        let mut table = table(&[("d0", NodeRole::Decode)]);
        assert_eq!(table.status()["http://d0"]["latency"], Value::Null);
        let second = Nanos(0).after(Duration::from_secs(1));
        let ticket = table.choose(Nanos(0), &[]).unwrap();
        assert_eq!(table.status()["http://d0"]["unfinished"], 1);
        ticket.finish(second, 20);
        let ticket = table.choose(second, &[]).unwrap();
        ticket.finish(second.after(Duration::from_secs(2)), 0);
        let page = table.status();
        let node = &page["http://d0"];
        assert_eq!((&node["role"], &node["unfinished"]), (&json!(3), &json!(0)));
        assert_eq!(node["models"], json!(["tiny"]));
        assert!((node["latency"].as_f64().unwrap() - 1.2).abs() < 1e-9);
        assert!((node["speed"].as_f64().unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(node["finished"], 2);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut table = NodeTable::default();
        for place in 0..NODES_MAX {
            let name = format!("n{place}");
            table.upsert(record(&name, NodeRole::Decode)).unwrap();
        }
        let more = table.upsert(record("more", NodeRole::Decode));
        assert_eq!(
            more,
            Err(TableFull {
                nodes_max: NODES_MAX
            })
        );
        assert!(table.upsert(record("n5", NodeRole::Decode)).is_ok());
    }
}
