//! What a run is made of, and what goes wrong in it: drawn from the seed, struck on time.

use super::clock::{NodeClock, ms};
use super::context::{Client, Context, FrameFault, WireFault};
use super::coverage::FAULTS;
use super::model::{self, STOP_IDS, VOCAB};
use super::node::NodePlan;
use super::world::{Event, World};
use kvserve_kv::ChecksumMode;
use kvserve_kv::session::Role;
use kvserve_kv::transport::sim::{Flush, LinkId, OpFault};
use kvserve_runtime::Nanos;

/// Faults of one run at most.
const FAULTS_MAX: u64 = 9;

/// And at least.
const FAULTS_MIN: u64 = 3;

/// A fault that finds nothing to strike looks again this often, this many times.
const AGAIN: (u64, u32) = (ms(25), 12);

/// The faults stop here in every second run.
const CALM_AT: (u64, u64) = (ms(3500), ms(6000));

impl World {
    /// The cluster, the clients and the faults of a seed.
    pub fn from_seed(seed: u64, traced: bool) -> World {
        let mut world = World::new(Context::new(seed, traced));
        let rng = &mut world.context.rng;
        let prefills = rng.range(2, 4) as usize;
        let decodes = if rng.percent(80) { 2 } else { 3 };
        let checksums = match rng.percent(35) {
            true => ChecksumMode::Off,
            false => ChecksumMode::Full,
        };
        for index in 0..prefills + decodes {
            world.settle_one(index, prefills, checksums);
        }
        let requests = world.context.rng.range(8, 15);
        for _ in 0..requests {
            let client = world.add_client(false);
            let at = world.context.rng.range(ms(20), ms(2600));
            world.at(at, Event::Arrive(client));
        }
        let faults = world.context.rng.range(4, FAULTS_MAX + 1);
        for _ in 0..faults {
            // Without checksums bent pages cannot be told from good ones.
            let kind = loop {
                let kind = world.context.rng.below(FAULTS.len() as u64) as usize;
                let bends = matches!(
                    FAULTS[kind],
                    "fault: page corrupted" | "fault: page truncated"
                );
                if !(bends && checksums == ChecksumMode::Off) {
                    break kind;
                }
            };
            let at = world.context.rng.range(ms(10), ms(3000));
            world.at(at, Event::Fault { kind, tries: 0 });
        }
        world.at(ms(1800), Event::AtLeast);
        if seed.is_multiple_of(2) {
            let at = world.context.rng.range(CALM_AT.0, CALM_AT.1);
            world.at(at, Event::Calm);
            world.expects_later = true;
        }
        world.at(ms(100), Event::Report);
        world.at(ms(3000), Event::Rest);
        world
    }

    fn settle_one(&mut self, index: usize, prefills: usize, checksums: ChecksumMode) {
        let rng = &mut self.context.rng;
        let decodes = index >= prefills;
        let role = match (decodes, rng.percent(35)) {
            (true, _) => Role::Decode,
            (false, true) => Role::Hybrid,
            (false, false) => Role::Prefill,
        };
        let pages = if rng.percent(60) {
            rng.range(10, 20)
        } else {
            rng.range(20, 48)
        };
        let drift = if rng.percent(60) {
            rng.below(21) as i64 - 10
        } else {
            0
        };
        let plan = NodePlan {
            index,
            name: format!("{role}-{index}"),
            role,
            pages: pages as usize,
            dials: if decodes {
                (0..prefills).collect()
            } else {
                Vec::new()
            },
            checksums,
            one_sided: rng.percent(50),
        };
        let clock = NodeClock {
            offset: rng.range(1_000_000_000, 90_000_000_000),
            drift_permille: drift,
        };
        if drift != 0 {
            self.context.coverage.hit("fault: clock drifts");
        }
        self.settle(plan, clock);
    }

    /// A client with a prompt that shares its beginning with others.
    fn add_client(&mut self, later: bool) -> usize {
        let rng = &mut self.context.rng;
        let shared = rng.below(3) as u32;
        let prefix = rng.range(0, 13) as u32;
        let own = rng.range(1, 13);
        let id = |place: u32, base: u32| STOP_IDS + (base * 97 + place * 31) % (VOCAB - STOP_IDS);
        let mut prompt: Vec<u32> = (0..prefix).map(|place| id(place, shared)).collect();
        for _ in 0..own {
            prompt.push(STOP_IDS + rng.below(u64::from(VOCAB - STOP_IDS)) as u32);
        }
        let max_tokens = rng.range(1, 13) as u32;
        let timeout_ns = if later {
            ms(5000)
        } else {
            rng.range(ms(1500), ms(4500))
        };
        let (expected, _finish) = model::oracle(&prompt, max_tokens);
        self.context.clients.push(Client {
            prompt,
            max_tokens,
            timeout_ns,
            until: 0,
            expected,
            told: 0,
            outcome: None,
            later,
        });
        self.context.clients.len() - 1
    }

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
                if self.strike_named(name) {
                    break;
                }
            }
        }
    }

    fn strike_named(&mut self, name: &'static str) -> bool {
        match name {
            "fault: frame lost" => self.arm_frame(FrameFault::Lose),
            "fault: frame doubled" => self.arm_frame(FrameFault::Double),
            "fault: stale commit" => {
                let part = self.context.rng.below(3) as u8;
                self.arm_frame(FrameFault::StaleCommit(part))
            }
            "fault: watermark goes back" => self.arm_frame(FrameFault::WatermarkBack),
            "fault: frame late" => {
                let span = self.context.rng.range(ms(5), ms(1500));
                self.arm_wire(WireFault::Late(span))
            }
            "fault: bytes corrupted" => self.arm_wire(WireFault::Corrupt),
            "fault: bytes truncated" => self.arm_wire(WireFault::Truncate),
            "fault: bytes replayed" => self.arm_wire(WireFault::Replay),
            "fault: bytes reordered" => self.arm_wire(WireFault::Reorder),
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
                self.arm_op(name, OpFault::Error(code))
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
            links.filter(|link| fabric.is_one_sided(*link)).collect()
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
        self.context.fault("fault: partition");
        let span = self.context.rng.range(ms(20), ms(2800));
        let until = self.context.time + span;
        self.cuts.insert((one.min(other), one.max(other)), until);
        true
    }

    fn freeze(&mut self) -> bool {
        let node = self.context.rng.below(self.places.len() as u64) as usize;
        let place = &mut self.places[node];
        if place.node.is_none() || place.frozen_until.is_some() {
            return false;
        }
        let short = self.context.rng.percent(50);
        let (from, to) = if short {
            (ms(20), ms(900))
        } else {
            (ms(900), ms(5200))
        };
        let until = self.context.time + self.context.rng.range(from, to);
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

    // ---- the faults stop --------------------------------------------------------------------------

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
            return self.context.broke(super::check::Invariant::I11, what);
        }
        for _ in 0..3 {
            let client = self.add_client(true);
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
        let busy =
            |place: &super::world::Place| place.node.as_ref().is_some_and(|node| !node.is_idle());
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
            self.context.broke(super::check::Invariant::I3, what);
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

/// From the last client's end until everything is back: a request's deadline and a lease's life
/// beyond it, the fence, and a session's death.
const REST_MAX: u64 = ms(16_000);
