//! The proxy: the real table of nodes, and which client waits at which node. It holds no state
//! that safety needs (PROTOCOL R7).

use super::clock::ms;
use crate::proxy::{NodeRecord, NodeRole, NodeTable, Ticket};
use kvserve_kv::session::Role;
use kvserve_runtime::Nanos;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Between two reports of a node.
pub const REPORT_EVERY: u64 = ms(400);

/// A node without a report for so long has left.
const REPORT_LOST: u64 = ms(1500);

/// Others are preferred for this long after a failure.
const AVOID: u64 = ms(500);

struct Waiting {
    ticket: Ticket,
    node: usize,
    incarnation: u64,
}

/// See the module's text.
#[derive(Default)]
pub struct Proxy {
    table: NodeTable,
    waiting: BTreeMap<usize, Waiting>,
    reported: BTreeMap<usize, (u64, String, u64)>,
    /// Killed and not back yet.
    pub down: bool,
}

impl Proxy {
    /// A node reports.
    pub fn report(
        &mut self,
        time: u64,
        node: usize,
        name: &str,
        incarnation: u64,
        role: Role,
        ready: bool,
    ) -> Vec<usize> {
        let role = match role {
            Role::Decode => NodeRole::Decode,
            Role::Hybrid => NodeRole::Hybrid,
            Role::Prefill | Role::Proxy => NodeRole::Prefill,
        };
        let address = SocketAddr::from(([127, 0, 0, 1], 9000 + node as u16));
        let record = NodeRecord {
            node: name.to_owned(),
            incarnation,
            address,
            url: format!("http://{name}"),
            role,
            models: Vec::new(),
            ready,
            paths: Vec::new(),
        };
        let known = self.table.upsert(record);
        debug_assert!(known.is_ok(), "few nodes");
        self.reported
            .insert(node, (time, name.to_owned(), incarnation));
        self.lost(|waiting| waiting.node == node && waiting.incarnation != incarnation)
    }

    /// Nodes that are silent have left; gives the clients that waited there.
    pub fn expire(&mut self, time: u64) -> Vec<usize> {
        let silent: Vec<usize> = (self.reported.iter())
            .filter(|(_, (at, _, _))| time.saturating_sub(*at) > REPORT_LOST)
            .map(|(node, _)| *node)
            .collect();
        silent
            .into_iter()
            .flat_map(|node| self.leave(node))
            .collect()
    }

    /// A node has left; gives the clients that waited there.
    pub fn leave(&mut self, node: usize) -> Vec<usize> {
        if let Some((_, name, incarnation)) = self.reported.remove(&node) {
            self.table.remove(&name, incarnation);
        }
        self.lost(|waiting| waiting.node == node)
    }

    fn lost(&mut self, of: impl Fn(&Waiting) -> bool) -> Vec<usize> {
        let lost: Vec<usize> = (self.waiting.iter())
            .filter(|(_, waiting)| of(waiting))
            .map(|(client, _)| *client)
            .collect();
        for client in &lost {
            self.waiting.remove(client);
        }
        lost
    }

    /// The node for a client's request, if one is ready.
    pub fn choose(&mut self, time: u64, client: usize) -> Option<usize> {
        let ticket = self.table.choose(Nanos(time), &[])?;
        let of = |(_, (_, name, _)): &(&usize, &(u64, String, u64))| *name == ticket.node;
        let (node, (_, _, incarnation)) = self.reported.iter().find(of)?;
        let (node, incarnation) = (*node, *incarnation);
        let waiting = Waiting {
            ticket,
            node,
            incarnation,
        };
        self.waiting.insert(client, waiting);
        Some(node)
    }

    /// Where a client waits: node and its incarnation.
    pub fn node_of(&self, client: usize) -> Option<(usize, u64)> {
        let waiting = self.waiting.get(&client)?;
        Some((waiting.node, waiting.incarnation))
    }

    /// A client's request has ended.
    pub fn ended(&mut self, time: u64, client: usize, well: bool) {
        match self.waiting.remove(&client) {
            Some(waiting) if well => waiting.ticket.finish(Nanos(time), 1),
            Some(waiting) => waiting.ticket.fail(Nanos(time + AVOID)),
            None => {}
        }
    }

    /// It is killed: every client's stream ends; gives them with their nodes.
    pub fn kill(&mut self) -> Vec<(usize, usize)> {
        let waiting = std::mem::take(&mut self.waiting);
        *self = Proxy::default();
        self.down = true;
        let clients = waiting.into_iter();
        clients
            .map(|(client, waiting)| (client, waiting.node))
            .collect()
    }
}
