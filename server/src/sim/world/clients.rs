//! Clients, the proxy they come through, and what nodes report to it.

use super::{Event, World};
use crate::sim::check::Invariant;
use crate::sim::clock::ms;
use crate::sim::context::Outcome;
use crate::sim::node::Incoming;
use crate::sim::proxy::REPORT_EVERY;
use std::time::Duration;

impl World {
    pub(super) fn arrive(&mut self, client: usize) {
        let time = self.context.time;
        let known = &mut self.context.clients[client];
        if known.outcome.is_some() {
            return;
        }
        if known.until == 0 {
            known.until = time + known.timeout_ns;
            let overdue = known.until + ms(500);
            self.at(overdue, Event::Overdue(client));
        }
        let left_ns = self.context.clients[client].until.saturating_sub(time);
        let chosen = match self.proxy.down {
            true => None,
            false => self.proxy.choose(time, client),
        };
        match chosen {
            Some(node) => {
                self.context
                    .note(|| format!("client {client} goes to node {node}"));
                let life = self.places[node].life;
                let span = self.latency();
                let what = Incoming::Request { client, left_ns };
                self.after(span, Event::Reaches { node, life, what });
            }
            None if left_ns > ms(1500) => self.after(ms(150), Event::Arrive(client)),
            None => self.context.ended(client, Outcome::Failed("not_ready")),
        }
    }

    /// A client leaves: its node hears of it.
    pub fn leave(&mut self, client: usize) {
        if let Some((node, _)) = self.proxy.node_of(client) {
            self.cancel_at(node, client);
        }
        self.proxy.ended(self.context.time, client, true);
        self.context.ended(client, Outcome::Left);
    }

    pub(super) fn cancel_at(&mut self, node: usize, client: usize) {
        let life = self.places[node].life;
        let span = self.latency();
        let what = Incoming::Cancel { client };
        self.after(span, Event::Reaches { node, life, what });
    }

    pub(super) fn clients_lost(&mut self, clients: Vec<usize>) {
        for client in clients {
            self.context.ended(client, Outcome::Failed("peer_lost"));
        }
    }

    /// Kills the proxy: streams end, nodes see their clients leave.
    pub fn kill_proxy(&mut self) {
        for (client, node) in self.proxy.kill() {
            self.context.ended(client, Outcome::Failed("peer_lost"));
            self.cancel_at(node, client);
        }
        let span = self.context.rng.range(ms(50), ms(900));
        self.after(span, Event::ProxyBack);
    }

    /// I1: half a second after a request's time its client has had an end, unless its node was
    /// not there to tell.
    pub(super) fn overdue(&mut self, client: usize) {
        if self.context.clients[client].outcome.is_some() {
            return;
        }
        let time = self.context.time;
        if let Some((node, incarnation)) = self.proxy.node_of(client) {
            let place = &self.places[node];
            let now = place.clock.at(time);
            let there = place.node.as_ref().filter(|there| {
                let awake = place.frozen_until.is_none() && there.inbox.is_empty();
                awake && there.incarnation == incarnation
            });
            // A request that reached its node late has that much more time there.
            let late = there.is_some_and(|there| match there.deadline_of(client) {
                Some(deadline) => now > deadline.at().after(Duration::from_millis(20)),
                None => true,
            });
            if late && time.saturating_sub(place.thawed_at) > ms(300) {
                let what = format!("client {client} waits half a second past its deadline");
                self.context.broke(Invariant::I1, what);
            }
            self.cancel_at(node, client);
        }
        self.proxy.ended(time, client, false);
        self.context
            .ended(client, Outcome::Failed("deadline_exceeded"));
    }

    pub(super) fn reports(&mut self) {
        let time = self.context.time;
        for node in 0..self.places.len() {
            let place = &self.places[node];
            let Some(there) = place.node.as_ref().filter(|_| place.frozen_until.is_none()) else {
                continue;
            };
            if self.proxy.down {
                continue;
            }
            let lost = self.proxy.report(
                time,
                node,
                &place.plan.name,
                there.incarnation,
                place.plan.role,
                there.is_ready(),
            );
            self.clients_lost(lost);
        }
        let lost = self.proxy.expire(time);
        self.clients_lost(lost);
        self.after(REPORT_EVERY, Event::Report);
    }
}
