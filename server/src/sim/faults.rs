//! What goes wrong in a run: each fault strikes on its time, if it finds what it strikes.

use super::clock::ms;
use super::context::{Aimed, Blow, FrameFault, MOMENTS, OutOfTurn, Strike, WireFault};
use super::expected::FAULTS;
use super::node::{LIVENESS, TTLS};
use super::world::{Event, World};
use kvserve_kv::session::Role;
use kvserve_kv::transport::sim::{Flush, LinkId, LinkKind, OpFault};
use kvserve_runtime::Nanos;

/// A draining node has so many looks, 100 ms apart, until it goes anyway.
const DRAIN_LOOKS_MAX: u32 = 30;

/// Faults of one run at least.
const FAULTS_MIN: u64 = 3;

/// A fault that finds nothing to strike looks again this often, this many times.
const AGAIN: (u64, u32) = (ms(25), 12);

impl World {
    /// A planned fault strikes, or looks again a little later.
    pub fn strike(&mut self, kind: usize, tries: u32) {
        if self.context.calm {
            return;
        }
        let name = FAULTS[kind];
        if !self.strike_named(name) && tries < AGAIN.1 {
            let tries = tries + 1;
            self.after(AGAIN.0, Event::Fault { kind, tries });
        }
    }

    /// A run in which little has struck so far gets what always finds something to strike.
    pub fn at_least(&mut self) {
        for _ in self.context.faults..FAULTS_MIN {
            let sure = [
                "fault: freeze",
                "fault: kill",
                "fault: kill, peers not told",
            ];
            let name = self.context.rng.pick(&sure);
            for _ in 0..self.places.len() * 4 {
                let struck = match name {
                    "fault: freeze" => self.freeze(),
                    _ => self.kill(name, name != "fault: kill"),
                };
                if struck {
                    break;
                }
            }
        }
    }

    fn strike_named(&mut self, name: &'static str) -> bool {
        match name {
            "fault: frame lost" => self.arm_frame(FrameFault::Lose),
            "fault: frame doubled" if self.context.rng.percent(25) => self.double_all(),
            "fault: frame doubled" => self.arm_frame(FrameFault::Double),
            "fault: stale commit" => {
                let part = self.context.rng.below(3) as u8;
                self.arm_frame(FrameFault::StaleCommit(part))
            }
            "fault: commit out of turn" => {
                let when = [OutOfTurn::Asked, OutOfTurn::Granted, OutOfTurn::Stopped];
                let when = self.context.rng.pick(&when);
                self.arm_frame(FrameFault::OutOfTurn(when))
            }
            "fault: lease given up" => {
                let at_peer = self.context.rng.percent(50);
                self.aim(Strike::GiveUp, at_peer)
            }
            "fault: node drains" => self.drain(),
            "fault: watermark goes back" => self.arm_frame(FrameFault::WatermarkBack),
            "fault: frame late" => {
                let span = self.context.rng.range(ms(5), ms(1500));
                self.arm_wire(WireFault::Late(span))
            }
            "fault: bytes corrupted" => self.arm_wire(WireFault::Corrupt),
            "fault: bytes truncated" => self.arm_wire(WireFault::Truncate),
            "fault: bytes replayed" => self.arm_wire(WireFault::Replay),
            "fault: bytes reordered" => self.arm_wire(WireFault::Reorder),
            "fault: partition"
            | "fault: freeze"
            | "fault: kill"
            | "fault: kill, peers not told"
            | "fault: client leaves"
                if self.context.rng.percent(50) =>
            {
                self.aim_named(name)
            }
            "fault: partition" => self.partition(),
            "fault: freeze" => self.freeze(),
            "fault: kill" => self.kill(name, false),
            "fault: kill, peers not told" => self.kill(name, true),
            "fault: proxy killed" => {
                if self.proxy.down {
                    return false;
                }
                self.context.fault(name);
                self.kill_proxy();
                true
            }
            // Follows a kill by itself; drawn alone it is a kill with a quick return.
            "fault: restart" => self.kill("fault: kill", false),
            "fault: completion with an error" => {
                let code = self.context.rng.range(1, 40) as u32;
                let fault = match self.context.rng.percent(50) {
                    true => OpFault::Errors(code),
                    false => OpFault::Error(code),
                };
                self.arm_op(name, fault)
            }
            "fault: completion lost" => self.arm_op(name, OpFault::Lost),
            "fault: completion twice" => self.arm_op(name, OpFault::Duplicate),
            "fault: completion stray" => self.arm_op(name, OpFault::Stray),
            "fault: page corrupted" => self.arm_op(name, OpFault::Corrupt),
            "fault: page truncated" => self.arm_op(name, OpFault::Truncate),
            "fault: stale lease" => self.arm_op(name, OpFault::StaleLease),
            "fault: stale epoch" => self.arm_op(name, OpFault::StaleEpoch),
            "fault: stale incarnation" => self.arm_op(name, OpFault::StaleIncarnation),
            "fault: link stands still" => self.stall(),
            "fault: flush never comes" => self.bad_flush(name, Flush::Never),
            "fault: destroy fails" => self.bad_flush(name, Flush::DestroyFails),
            "fault: post fails" => self.with_node(name, |world, node| {
                let posts = world.context.rng.below(3) as u32;
                if let Some(node) = &world.places[node].node {
                    node.transport.borrow_mut().fail_post_after(Some(posts));
                }
            }),
            "fault: step fails" => self.with_node(name, |world, node| {
                let code = world.context.rng.range(1, 9) as u32;
                if let Some(node) = &world.places[node].node {
                    node.engine.lane.borrow_mut().fail_next = Some(code);
                }
            }),
            "fault: step never ends" => {
                let node = self.context.rng.below(self.places.len() as u64) as usize;
                self.places[node].stick_next_step = true;
                true
            }
            "fault: dead lease listed" => self.list_the_dead(name),
            "fault: client leaves" => self.client_leaves(name),
            "fault: clock drifts" => true,
            _ => unreachable!("a fault without an arm: {name}"),
        }
    }

    // ---- at a moment --------------------------------------------------------------------------

    fn aim(&mut self, strike: Strike, at_peer: bool) -> bool {
        // What freezes here meets its lease's fence with everything in place.
        let tender = ["attempt posts its last read", "attempt stopping"];
        let moment = match strike {
            Strike::Freeze(_) if self.context.rng.percent(40) => self.context.rng.pick(&tender),
            _ => self.context.rng.pick(MOMENTS),
        };
        self.context.armed.moments.push(Aimed {
            moment,
            strike,
            at_peer,
        });
        true
    }

    fn aim_named(&mut self, name: &'static str) -> bool {
        let strike = match name {
            "fault: partition" => Strike::Cut(self.cut_span()),
            "fault: freeze" => Strike::Freeze(self.freeze_span()),
            "fault: client leaves" => Strike::Leave,
            _ => Strike::Kill(name == "fault: kill, peers not told"),
        };
        let at_peer = self.context.rng.percent(50);
        // What it had to say last may be lost, too.
        if strike == Strike::Leave && self.context.rng.percent(40) {
            for _ in 0..2 {
                let lost = (None, FrameFault::LoseLastWord);
                self.context.armed.frames.push(lost);
            }
        }
        self.aim(strike, at_peer)
    }

    /// A strike whose moment has come.
    pub fn blow(&mut self, blow: Blow) {
        if self.context.calm {
            return;
        }
        let node = blow.node;
        match blow.strike {
            Strike::Freeze(span) => {
                self.freeze_node(node, span);
            }
            Strike::Kill(false) => {
                self.kill_for_a_while("fault: kill", node, false);
            }
            Strike::Kill(true) => {
                self.kill_for_a_while("fault: kill, peers not told", node, true);
            }
            Strike::Leave => {
                if let Some(client) = blow.client.filter(|c| self.proxy.node_of(*c).is_some()) {
                    self.context.fault("fault: client leaves");
                    self.leave(client);
                }
            }
            Strike::GiveUp => {
                if let Some(there) = &mut self.places[node].node {
                    there.gives_up = true;
                    self.want_turn(node, 1_000);
                }
            }
            Strike::Cut(span) => {
                let other = self.context.rng.below(self.places.len() as u64) as usize;
                if other != node {
                    self.cut_nodes(node, other, span);
                }
            }
        }
    }

    /// A node takes nothing new, ends what it has and goes; another life comes.
    fn drain(&mut self) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        let Some(there) = &mut self.places[node].node else {
            return false;
        };
        there.draining = true;
        self.context.fault("fault: node drains");
        self.after(ms(100), Event::Drained { node, looks: 0 });
        true
    }

    /// Whether a draining node is done, or has had its time.
    pub fn drained(&mut self, node: usize, looks: u32) {
        let there = self.places[node].node.as_ref();
        let Some(there) = there.filter(|there| there.draining) else {
            return;
        };
        if there.is_idle() || looks == DRAIN_LOOKS_MAX {
            self.kill_node(node, false);
            let span = self.context.rng.range(ms(1), ms(300));
            return self.after(span, Event::Restart(node));
        }
        let looks = looks + 1;
        self.after(ms(100), Event::Drained { node, looks });
    }

    /// Every frame of a node comes twice for a while.
    fn double_all(&mut self) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        let until = self.context.time + self.context.rng.range(ms(500), ms(4000));
        self.context.armed.doubled = Some((node, until));
        true
    }

    fn arm_frame(&mut self, fault: FrameFault) -> bool {
        let times = if self.context.rng.percent(70) { 1 } else { 4 };
        let from = self.context.rng.below(self.places.len() as u64) as usize;
        let from = self.context.rng.percent(70).then_some(from);
        for _ in 0..times {
            self.context.armed.frames.push((from, fault));
        }
        true
    }

    fn arm_wire(&mut self, fault: WireFault) -> bool {
        self.context.armed.wires.push(fault);
        true
    }

    fn busy_link(&mut self) -> Option<LinkId> {
        let fabric = self.fabric.borrow();
        let live: Vec<LinkId> = fabric.live().map(|(link, ..)| link).collect();
        let busy = |link: &LinkId| fabric.in_flight(*link) > 0;
        let busy: Vec<LinkId> = live.iter().copied().filter(busy).collect();
        drop(fabric);
        match (busy.is_empty(), live.is_empty()) {
            (false, _) => Some(self.context.rng.pick(&busy)),
            (true, false) => Some(self.context.rng.pick(&live)),
            (true, true) => None,
        }
    }

    fn arm_op(&mut self, name: &'static str, fault: OpFault) -> bool {
        let Some(link) = self.busy_link() else {
            return false;
        };
        self.context.fault(name);
        self.fabric.borrow_mut().arm(link, fault);
        true
    }

    fn stall(&mut self) -> bool {
        let Some(link) = self.busy_link() else {
            return false;
        };
        self.context.fault("fault: link stands still");
        self.fabric.borrow_mut().stall(link, true);
        if self.context.rng.percent(60) {
            let span = self.context.rng.range(ms(5), ms(900));
            self.after(span, Event::Unstall(link));
        }
        true
    }

    /// A link that will not come to rest, and a reason for it to be killed.
    fn bad_flush(&mut self, name: &'static str, flush: Flush) -> bool {
        let one_sided: Vec<LinkId> = {
            let fabric = self.fabric.borrow();
            let links = fabric.live().map(|(link, ..)| link);
            links
                .filter(|link| fabric.kind(*link) == LinkKind::OneSided)
                .collect()
        };
        if one_sided.is_empty() {
            return false;
        }
        self.context.fault(name);
        let link = self.context.rng.pick(&one_sided);
        let mut fabric = self.fabric.borrow_mut();
        fabric.set_flush(link, flush);
        let reason = if self.context.rng.percent(50) {
            OpFault::Error(9)
        } else {
            OpFault::Stray
        };
        fabric.arm(link, reason);
        true
    }

    fn with_node(&mut self, name: &'static str, act: impl FnOnce(&mut World, usize)) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        if self.places[node].node.is_none() {
            return false;
        }
        self.context.fault(name);
        act(self, node);
        true
    }

    fn partition(&mut self) -> bool {
        let nodes = self.places.len() as u64;
        let one = self.context.rng.below(nodes) as usize;
        let other = self.context.rng.below(nodes) as usize;
        if one == other {
            return false;
        }
        let span = self.cut_span();
        self.cut_nodes(one, other, span);
        true
    }

    fn cut_span(&mut self) -> u64 {
        self.context.rng.range(ms(20), ms(2800))
    }

    fn cut_nodes(&mut self, one: usize, other: usize, span: u64) {
        self.context.fault("fault: partition");
        let until = self.context.time + span;
        self.cuts.insert((one.min(other), one.max(other)), until);
    }

    fn freeze(&mut self) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        let span = self.freeze_span();
        self.freeze_node(node, span)
    }

    fn freeze_span(&mut self) -> u64 {
        let (from, to) = self.context.rng.pick(&[
            (ms(20), ms(900)),
            (ms(20), ms(900)),
            // Longer than a short lease lives, shorter than a silent session.
            (TTLS[1].as_nanos() as u64, LIVENESS.dead.as_nanos() as u64),
            (ms(900), ms(5200)),
        ]);
        self.context.rng.range(from, to)
    }

    fn freeze_node(&mut self, node: usize, span: u64) -> bool {
        let place = &mut self.places[node];
        if place.node.is_none() || place.frozen_until.is_some() {
            return false;
        }
        let until = self.context.time + span;
        place.frozen_until = Some(until);
        place.freeze_token += 1;
        let token = place.freeze_token;
        self.context.fault("fault: freeze");
        self.context
            .note(|| format!("node {node} is frozen until {} ms", until / 1_000_000));
        self.at(until, Event::Thaw { node, token });
        true
    }

    fn kill(&mut self, name: &'static str, silent: bool) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        self.kill_for_a_while(name, node, silent)
    }

    fn kill_for_a_while(&mut self, name: &'static str, node: usize, silent: bool) -> bool {
        if self.places[node].node.is_none() {
            return false;
        }
        self.context.fault(name);
        self.context.note(|| format!("node {node} is killed"));
        self.kill_node(node, silent);
        if self.context.rng.percent(90) {
            let span = self.context.rng.range(ms(1), ms(1800));
            self.after(span, Event::Restart(node));
        }
        true
    }

    fn list_the_dead(&mut self, name: &'static str) -> bool {
        let decodes: Vec<usize> = (0..self.places.len())
            .filter(|node| self.places[*node].plan.role == Role::Decode)
            .collect();
        let node = self.context.rng.pick(&decodes);
        let now = self.places[node].clock.at(self.context.time);
        let Some(there) = &mut self.places[node].node else {
            return false;
        };
        there.lists_the_dead_until = Nanos(now.0 + ms(9000));
        // Its releases do not come either, so that the lists are all that is heard.
        for _ in 0..6 {
            self.context
                .armed
                .frames
                .push((Some(node), FrameFault::Lose));
        }
        self.context.fault(name);
        true
    }

    fn client_leaves(&mut self, name: &'static str) -> bool {
        let waiting: Vec<usize> = (0..self.context.clients.len())
            .filter(|client| self.proxy.node_of(*client).is_some())
            .collect();
        if waiting.is_empty() {
            return false;
        }
        self.context.fault(name);
        let client = self.context.rng.pick(&waiting);
        self.leave(client);
        true
    }
}
