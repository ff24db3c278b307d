//! The faults stop: everything is restored, the pairs must work again, and everything must come
//! to rest.

use super::check::Invariant;
use super::clock::ms;
use super::world::{Event, Place, World};
use kvserve_kv::transport::sim::{Flush, LinkId};

/// From the last client's end until everything is back: a request's deadline and a lease's life
/// beyond it, the fence, and a session's death.
const REST_MAX: u64 = ms(16_000);

impl World {
    /// Everything is restored: what was killed starts, what is not ready is started anew.
    pub fn calm(&mut self) {
        self.context.calm = true;
        self.context.note(|| "the faults stop".to_owned());
        self.context.armed = Default::default();
        self.cuts.clear();
        self.proxy.down = false;
        let links: Vec<LinkId> = (self.fabric.borrow().live())
            .map(|(link, ..)| link)
            .collect();
        for link in links {
            let mut fabric = self.fabric.borrow_mut();
            fabric.disarm(link);
            fabric.stall(link, false);
            fabric.set_flush(link, Flush::After(2));
        }
        for node in 0..self.places.len() {
            self.thaw(node);
            self.places[node].stick_next_step = false;
            match &self.places[node].node {
                None => self.start_node(node),
                // It has been told to go: its owner starts the next one at once.
                Some(there) if there.draining => {
                    self.kill_node(node, false);
                    self.start_node(node);
                }
                Some(there) => {
                    there.transport.borrow_mut().fail_post_after(None);
                    there.engine.lane.borrow_mut().fail_next = None;
                }
            }
        }
        self.after(ms(3500), Event::Later);
    }

    /// I11: the pairs work again, so later requests must be answered.
    pub fn later(&mut self) {
        // Quarantine is for the life of a process: its owner starts it anew.
        let worn = |world: &World, node: usize| {
            let there = world.places[node].node.as_ref();
            there.is_some_and(|there| there.keeper.ledger.with(|ledger| ledger.not_ready()))
        };
        let mut again = false;
        for node in 0..self.places.len() {
            if worn(self, node) {
                self.kill_node(node, false);
                self.start_node(node);
                again = true;
            }
        }
        if again {
            return self.after(ms(2500), Event::Later);
        }
        let pairs = self.missing_pairs();
        if !pairs.is_empty() {
            let what = format!(
                "no way to pull after the faults stopped: {}",
                pairs.join(", ")
            );
            return self.context.broke(Invariant::I11, what);
        }
        for _ in 0..3 {
            let client = self.add_client(true, None);
            let span = self.context.rng.range(ms(1), ms(60));
            self.after(span, Event::Arrive(client));
        }
        self.expects_later = false;
    }

    fn missing_pairs(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for place in self
            .places
            .iter()
            .filter(|place| !place.plan.dials.is_empty())
        {
            for peer in &place.plan.dials {
                let name = &self.places[*peer].plan.name;
                let up = place.node.as_ref().is_some_and(|node| {
                    let mut sessions = node.sessions.values();
                    sessions.any(|s| s.identity.node_id == *name && s.can_pull())
                });
                if !up {
                    missing.push(format!("{} to {name}", place.plan.name));
                }
            }
        }
        missing
    }

    /// Once every client has had its end, everything must come to rest.
    pub fn rest(&mut self) -> bool {
        let open = (self.context.clients.iter()).any(|client| client.outcome.is_none());
        if open || self.expects_later {
            self.resting_since = None;
            self.after(ms(200), Event::Rest);
            return false;
        }
        let time = self.context.time;
        let since = *self.resting_since.get_or_insert(time);
        let busy = |place: &Place| place.node.as_ref().is_some_and(|node| !node.is_idle());
        let frozen = self.places.iter().any(|place| place.frozen_until.is_some());
        let busy_nodes: Vec<String> = (self.places.iter().filter(|place| busy(place)))
            .map(|place| place.plan.name.clone())
            .collect();
        if busy_nodes.is_empty() && !frozen {
            if self.rested {
                self.check_at_rest();
                return true;
            }
            // Guards and slots of the last things that ended have the ladder's time.
            self.rested = true;
            self.after(ms(700), Event::Rest);
            return false;
        }
        self.rested = false;
        if time - since > REST_MAX && !frozen {
            let what = format!(
                "not at rest after {} s: {busy_nodes:?}",
                REST_MAX / 1_000_000_000
            );
            self.context.broke(Invariant::I3, what);
            return true;
        }
        self.after(ms(200), Event::Rest);
        false
    }

    fn check_at_rest(&mut self) {
        for node in 0..self.places.len() {
            if let Some(there) = self.places[node].node.take() {
                there.check_at_rest(&mut self.context);
                self.count_node(&there);
                self.places[node].node = Some(there);
            }
        }
    }
}
