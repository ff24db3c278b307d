//! Places and the lives of nodes in them: start, turns, kill, freeze, and their engine lanes.

use super::wires::Conn;
use super::{Event, World};
use crate::sim::check::{Invariant, Violation};
use crate::sim::clock::ms;
use crate::sim::node::{ConnId, Incoming, Node};
use kvserve_kv::transport::sim::Stepped;

/// A node's own sentinel ends it when its lane stands still for this long.
const SENTINEL: u64 = ms(3000);

/// Half pages that a thawed reader copies before anything else.
const PIECES_COPIED_ON: usize = 12;

impl World {
    /// Starts a life at a place.
    pub fn start_node(&mut self, node: usize) {
        let place = &mut self.places[node];
        place.life += 1;
        place.frozen_until = None;
        place.silent = false;
        place.stick_next_step = false;
        let now = place.clock.at(self.context.time);
        // Later starts have larger incarnations, as start times would give.
        let incarnation = (u64::from(place.life) << 32) | (node as u64 + 1) << 8 | 5;
        let started = Node::start(
            place.plan.clone(),
            incarnation,
            now,
            self.fabric.clone(),
            self.key.clone(),
        );
        self.of_endpoint.push((node, place.life));
        debug_assert_eq!(self.of_endpoint.len(), started.endpoint + 1);
        place.node = Some(started);
        self.want_turn(node, 0);
    }

    /// The process is gone. `silent`: its peers' kernels are not told.
    pub fn kill_node(&mut self, node: usize, silent: bool) {
        let place = &mut self.places[node];
        let life = place.life;
        let Some(gone) = place.node.take() else {
            return;
        };
        self.count_node(&gone);
        let place = &mut self.places[node];
        place.silent = silent;
        place.frozen_until = None;
        place.turn_token += 1;
        place.turn_at = u64::MAX;
        self.fabric.borrow_mut().detach(gone.endpoint, silent);
        drop(gone);
        if silent {
            return;
        }
        let of = |(_, conn): &(&ConnId, &Conn)| conn.ends.contains(&(node, life));
        let conns: Vec<ConnId> = self.conns.iter().filter(of).map(|(id, _)| *id).collect();
        for id in conns {
            self.close_from(id, (node, life));
        }
        let lost = self.proxy.leave(node);
        self.clients_lost(lost);
    }

    /// What a life has counted goes into the coverage.
    pub fn count_node(&mut self, node: &Node) {
        let counters = node.hub.counters();
        let coverage = &mut self.context.coverage;
        coverage.add("slot ended: ok", counters.ended_ok);
        coverage.add("slot ended: failed", counters.ended_failed);
        coverage.add("slot ended: deadline", counters.ended_deadline);
        coverage.add("slot ended: cancelled", counters.ended_cancelled);
        coverage.add("slot ended: channel killed", counters.ended_channel_killed);
        coverage.add("slot ended: channel stuck", counters.ended_channel_stuck);
        coverage.add("completion: late", counters.completions_late);
        coverage.add("completion: duplicate", counters.completions_duplicate);
        coverage.add("completion: stray", counters.completions_stray);
        coverage.add("post: unposted", counters.posts_unposted);
        coverage.add("post: lost with its channel", counters.posts_lost);
        coverage.add("post: taken back", counters.posts_taken_back);
        coverage.add("ladder: open to grace", counters.channels_graced);
        coverage.add("ladder: grace to open", counters.channels_recovered);
        let in_grace = counters.channels_killed_in_grace;
        coverage.add("ladder: grace to draining", in_grace);
        let in_use = counters.channels_killed - in_grace;
        coverage.add("ladder: open to draining", in_use);
        coverage.add("ladder: draining to free", counters.channels_quiet);
        coverage.add("ladder: draining to quarantined", counters.channels_stuck);
        coverage.add("guard: released", counters.guards_released);
        coverage.add("guard: quarantined", counters.guards_quarantined);
        let leases = node.leases.counters();
        coverage.add("lease: granted", leases.granted);
        coverage.add("lease: committed", leases.committed);
        coverage.add("lease: released", leases.released);
        coverage.add("lease: unlisted", leases.unlisted);
        coverage.add("lease: aborted", leases.aborted);
        coverage.add("lease: fenced", leases.fences);
        coverage.add("lease: fence unanswered", leases.fences_unanswered);
        coverage.add("lease: ended with its session", leases.session_ended);
        coverage.add("lease: commit refused", leases.commits_refused);
        coverage.add("lease: stale frame", leases.stale_frames);
        coverage.add("sequence preempted", node.engine.preemptions());
    }

    pub(super) fn restart(&mut self, node: usize) {
        if self.places[node].node.is_none() {
            self.context.fault("fault: restart");
            self.context.note(|| format!("node {node} starts again"));
            self.start_node(node);
        }
    }

    /// A frozen node goes on where it was.
    pub fn thaw(&mut self, node: usize) {
        let time = self.context.time;
        let place = &mut self.places[node];
        if place.frozen_until.take().is_some() {
            place.thawed_at = time;
            place.turn_at = u64::MAX;
            if let Some(there) = &mut place.node {
                there.thawed = true;
            }
            self.context.note(|| format!("node {node} thaws"));
            self.copy_on(node);
            self.want_turn(node, 0);
        }
    }

    /// A shard that goes on polls its copies before it hears what has become of its peers: on
    /// maps it copies a few pieces on.
    fn copy_on(&mut self, node: usize) {
        let Some(there) = &self.places[node].node else {
            return;
        };
        let mut fabric = self.fabric.borrow_mut();
        for link in fabric.mapped_of(there.endpoint) {
            for _ in 0..PIECES_COPIED_ON {
                match fabric.step(link) {
                    Stepped::Moved | Stepped::Ended => {}
                    Stepped::Idle | Stepped::Asks(_) => break,
                    Stepped::Violation(what) => {
                        self.context.broke(Invariant::I10, what);
                        break;
                    }
                }
            }
        }
    }

    pub fn want_turn(&mut self, node: usize, span: u64) {
        let at = self.context.time + span;
        let place = &mut self.places[node];
        if place.node.is_none() || place.frozen_until.is_some() || place.turn_at <= at {
            return;
        }
        place.turn_at = at;
        place.turn_token += 1;
        let token = place.turn_token;
        self.at(at, Event::Turn { node, token });
    }

    pub(super) fn turn(&mut self, node: usize, token: u64) {
        let place = &mut self.places[node];
        if place.turn_token != token || place.frozen_until.is_some() {
            return;
        }
        place.turn_at = u64::MAX;
        let Some(mut running) = place.node.take() else {
            return;
        };
        let now = place.clock.at(self.context.time);
        let clock = place.clock;
        let next = running.turn(&mut self.context, now);
        let out = std::mem::take(&mut running.out);
        let superseded = running.superseded;
        self.places[node].node = Some(running);
        for what in out {
            self.goes_out(node, what);
        }
        if superseded {
            return self.kill_node(node, false);
        }
        let span = clock.world(next).saturating_sub(self.context.time);
        self.want_turn(node, span.max(1000));
    }

    pub(super) fn reaches(&mut self, node: usize, life: u32, what: Incoming) {
        let place = &mut self.places[node];
        let there = place.node.as_mut().filter(|_| place.life == life);
        match there {
            Some(there) => {
                there.inbox.push_back(what);
                let span = self.context.rng.range(1_000, 30_000);
                self.want_turn(node, span);
            }
            None => self.nobody_there(node, what),
        }
    }

    /// A life that is over is reached: a kernel that is up again says so.
    pub(super) fn nobody_there(&mut self, node: usize, what: Incoming) {
        let up_again = self.places[node].node.is_some();
        if let Incoming::Bytes { conn, .. } = what
            && up_again
            && let Some(known) = self.conns.get(&conn)
        {
            let end = known.ends.iter().find(|end| end.0 == node).copied();
            if let Some(end) = end {
                self.close_from(conn, end);
            }
        }
    }

    // ---- lanes ------------------------------------------------------------------------------

    pub(super) fn step(&mut self, node: usize, life: u32, tokens: usize) {
        let place = &mut self.places[node];
        place.steps += 1;
        let step = place.steps;
        if std::mem::take(&mut place.stick_next_step) {
            self.context.fault("fault: step never ends");
            return self.after(SENTINEL, Event::Sentinel { node, life, step });
        }
        let mut span = self.context.rng.range(200_000, 1_500_000) + tokens as u64 * 120_000;
        if self.context.rng.percent(3) {
            span *= 15;
        }
        self.after(span, Event::Lane { node, life });
    }

    pub(super) fn lane(&mut self, node: usize, life: u32) {
        let place = &mut self.places[node];
        if let Some(until) = place.frozen_until {
            return self.at(until + 50_000, Event::Lane { node, life });
        }
        let Some(there) = place.node.as_ref().filter(|_| place.life == life) else {
            return;
        };
        let finished = there.engine.lane.borrow_mut().finish();
        if let Err(Violation { invariant, what }) = finished {
            let name = &place.plan.name;
            self.context.broke(invariant, format!("{name}: {what}"));
        }
        self.want_turn(node, 5_000);
    }

    pub(super) fn sentinel(&mut self, node: usize, life: u32, step: u64) {
        let place = &self.places[node];
        let there = place.node.as_ref().filter(|_| place.life == life);
        let stuck = there.is_some_and(|there| there.engine.lane.borrow().is_busy());
        if stuck && place.steps == step {
            self.context.coverage.hit("node aborted by its sentinel");
            self.kill_node(node, false);
            self.after(ms(100), Event::Restart(node));
        }
    }
}
