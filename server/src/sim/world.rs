//! The world of one run: nodes, connections, the fabric, the proxy, clients, and the queue of
//! what happens next. Time is virtual; of events at one time the seed draws the order.

use super::check::{Invariant, Violation};
use super::clock::{self, NodeClock, ms};
use super::context::{Context, Outcome, WireFault};
use super::node::{ConnId, Incoming, Node, NodePlan, Outgoing};
use super::proxy::{Proxy, REPORT_EVERY};
use kvserve_kv::session::PeerKey;
use kvserve_kv::session::frame::DataOpen;
use kvserve_kv::transport::sim::{Ask, Fabric, LinkId, Stepped};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::rc::Rc;
use std::time::Duration;

/// A node's own sentinel ends it when its lane stands still for this long.
const SENTINEL: u64 = ms(3000);

/// What happens.
pub enum Event {
    /// A node's turn, if it still wants this one.
    Turn { node: usize, token: u64 },
    /// Something reaches a node, if this life of it is the one meant.
    Reaches {
        node: usize,
        life: u32,
        what: Incoming,
    },
    /// A link moves.
    Link(LinkId),
    /// A lane has computed.
    Lane { node: usize, life: u32 },
    /// A node's sentinel looks whether its lane stands still.
    Sentinel { node: usize, life: u32, step: u64 },
    /// A client sends its request (again, when no node was ready).
    Arrive(usize),
    /// A client's time is up and more.
    Overdue(usize),
    /// A planned fault.
    Fault { kind: usize, tries: u32 },
    /// Some faults strike in every run.
    AtLeast,
    /// A frozen node goes on.
    Thaw { node: usize, token: u64 },
    /// A killed node comes back.
    Restart(usize),
    /// The proxy comes back.
    ProxyBack,
    /// Nodes report to the proxy.
    Report,
    /// A link that stood still moves again.
    Unstall(LinkId),
    /// The faults stop and everything is restored.
    Calm,
    /// The pairs must work again; later requests come.
    Later,
    /// Is everything over?
    Rest,
}

struct Due {
    at: u64,
    tie: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let key = |due: &Due| (due.at, due.tie, due.number);
        key(self).cmp(&key(other))
    }
}

/// A place in the cluster: an address, and whatever life of a node is there.
pub struct Place {
    pub plan: NodePlan,
    pub clock: NodeClock,
    pub node: Option<Node>,
    pub life: u32,
    pub frozen_until: Option<u64>,
    pub thawed_at: u64,
    pub freeze_token: u64,
    /// It went without a word.
    pub silent: bool,
    turn_at: u64,
    turn_token: u64,
    steps: u64,
    /// The next step never ends.
    pub stick_next_step: bool,
}

struct Conn {
    ends: [(usize, u32); 2],
    open: [bool; 2],
    arrival: [u64; 2],
    held: [Option<Vec<u8>>; 2],
}

/// See the module's text.
pub struct World {
    pub context: Context,
    pub places: Vec<Place>,
    pub fabric: Rc<RefCell<Fabric>>,
    pub proxy: Proxy,
    /// No word passes between two nodes until then.
    pub cuts: BTreeMap<(usize, usize), u64>,
    pub slow: u64,
    /// Since when every client has had its end.
    pub resting_since: Option<u64>,
    /// Later requests are to come.
    pub expects_later: bool,
    /// Every node was found at rest once.
    pub rested: bool,
    queue: BinaryHeap<Reverse<Due>>,
    numbered: u64,
    conns: BTreeMap<ConnId, Conn>,
    opens: BTreeMap<(usize, usize), DataOpen>,
    of_endpoint: Vec<(usize, u32)>,
    linked: Vec<bool>,
    key: PeerKey,
}

impl World {
    /// An empty world.
    pub fn new(context: Context) -> Self {
        World {
            context,
            places: Vec::new(),
            fabric: Rc::default(),
            proxy: Proxy::default(),
            cuts: BTreeMap::new(),
            slow: 1,
            resting_since: None,
            expects_later: false,
            rested: false,
            queue: BinaryHeap::new(),
            numbered: 0,
            conns: BTreeMap::new(),
            opens: BTreeMap::new(),
            of_endpoint: Vec::new(),
            linked: Vec::new(),
            key: PeerKey::new([9; 32]),
        }
    }

    /// Queues an event.
    pub fn at(&mut self, at: u64, event: Event) {
        self.numbered += 1;
        let due = Due {
            at: at.max(self.context.time),
            tie: self.context.rng.bits(),
            number: self.numbered,
            event,
        };
        self.queue.push(Reverse(due));
    }

    /// Queues an event a span from now.
    pub fn after(&mut self, span: u64, event: Event) {
        self.at(self.context.time + span, event);
    }

    /// Adds a place with a node in it.
    pub fn settle(&mut self, plan: NodePlan, clock: NodeClock) {
        self.places.push(Place {
            plan,
            clock,
            node: None,
            life: 0,
            frozen_until: None,
            thawed_at: 0,
            freeze_token: 0,
            silent: false,
            turn_at: u64::MAX,
            turn_token: 0,
            steps: 0,
            stick_next_step: false,
        });
        self.start_node(self.places.len() - 1);
    }

    /// Runs until everything is over, an invariant breaks, or nothing is left to happen.
    pub fn run(&mut self) {
        while let Some(Reverse(due)) = self.queue.pop() {
            self.context.time = self.context.time.max(due.at);
            self.context.events += 1;
            let over = self.happen(due.event);
            self.wake_links();
            if over || self.context.violation.is_some() {
                return;
            }
        }
    }

    fn happen(&mut self, event: Event) -> bool {
        match event {
            Event::Turn { node, token } => self.turn(node, token),
            Event::Reaches { node, life, what } => self.reaches(node, life, what),
            Event::Link(link) => self.step_link(link),
            Event::Lane { node, life } => self.lane(node, life),
            Event::Sentinel { node, life, step } => self.sentinel(node, life, step),
            Event::Arrive(client) => self.arrive(client),
            Event::Overdue(client) => self.overdue(client),
            Event::Fault { kind, tries } => self.strike(kind, tries),
            Event::AtLeast => self.at_least(),
            Event::Thaw { node, token } => {
                if self.places[node].freeze_token == token {
                    self.thaw(node);
                }
            }
            Event::Restart(node) => self.restart(node),
            Event::ProxyBack => self.proxy.down = false,
            Event::Report => self.reports(),
            Event::Unstall(link) => self.fabric.borrow_mut().stall(link, false),
            Event::Calm => self.calm(),
            Event::Later => self.later(),
            Event::Rest => return self.rest(),
        }
        false
    }

    // ---- nodes ----------------------------------------------------------------------------------

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
        coverage.add("completion: late", counters.completions_late);
        coverage.add("completion: duplicate", counters.completions_duplicate);
        coverage.add("completion: stray", counters.completions_stray);
        coverage.add("post: unposted", counters.posts_unposted);
        coverage.add("post: lost with its channel", counters.posts_lost);
        coverage.add("post: taken back", counters.posts_taken_back);
        coverage.add("ladder: open to draining", counters.channels_killed);
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

    fn restart(&mut self, node: usize) {
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
            self.context.note(|| format!("node {node} thaws"));
            self.want_turn(node, 0);
        }
    }

    fn want_turn(&mut self, node: usize, span: u64) {
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

    fn turn(&mut self, node: usize, token: u64) {
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

    fn reaches(&mut self, node: usize, life: u32, what: Incoming) {
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
    fn nobody_there(&mut self, node: usize, what: Incoming) {
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

    fn goes_out(&mut self, node: usize, what: Outgoing) {
        let life = self.places[node].life;
        match what {
            Outgoing::Connect { peer } => self.connect(node, life, peer),
            Outgoing::Bytes { conn, bytes, idle } => self.send(conn, (node, life), bytes, idle),
            Outgoing::Close { conn } => self.close_from(conn, (node, life)),
            Outgoing::DataOpen { peer, open, bytes } => {
                self.opens.insert((node, peer), open);
                let what = Incoming::DataOpen { from: node, bytes };
                self.pass(node, peer, what);
            }
            Outgoing::DataAccept { to, bytes, session } => {
                let open = self.opens.get(&(to, node)).cloned();
                let server = self.places[node].node.as_ref().map(|node| node.endpoint);
                if let (Some(open), Some(server)) = (open, server) {
                    let what = Incoming::DataAccepted {
                        open,
                        bytes,
                        server,
                        session,
                    };
                    self.pass(node, to, what);
                }
            }
            Outgoing::Step { tokens } => self.step(node, life, tokens),
            Outgoing::Ended { client, outcome } => {
                let well = matches!(outcome, Outcome::Finished | Outcome::Left);
                self.proxy.ended(self.context.time, client, well);
                self.context.ended(client, outcome);
            }
        }
    }

    fn latency(&mut self) -> u64 {
        let slow = if self.context.rng.percent(5) { 20 } else { 1 };
        self.context.rng.range(20_000, 200_000) * slow
    }

    /// One message that stands alone; lost if the nodes are cut.
    fn pass(&mut self, from: usize, node: usize, what: Incoming) {
        if self.cut(from, node).is_some() {
            return;
        }
        let life = self.places[node].life;
        let span = self.latency();
        self.after(span, Event::Reaches { node, life, what });
    }

    /// Until when two nodes are cut from one another.
    pub fn cut(&self, one: usize, other: usize) -> Option<u64> {
        let until = *self.cuts.get(&(one.min(other), one.max(other)))?;
        (until > self.context.time).then_some(until)
    }

    // ---- control connections ----------------------------------------------------------------------

    fn connect(&mut self, node: usize, life: u32, peer: usize) {
        let span = self.latency();
        if self.cut(node, peer).is_some() {
            return; // the dialler's own limit ends it
        }
        let there = &self.places[peer];
        if there.node.is_none() {
            if !there.silent {
                let what = Incoming::ConnectFailed { peer };
                self.after(span, Event::Reaches { node, life, what });
            }
            return;
        }
        let ends = [(node, life), (peer, there.life)];
        self.numbered += 1;
        let conn = ConnId(self.numbered);
        let time = self.context.time;
        let made = Conn {
            ends,
            open: [true, true],
            arrival: [time + span; 2],
            held: [None, None],
        };
        self.conns.insert(conn, made);
        let (accepted, connected) = (
            Incoming::Accepted { conn },
            Incoming::Connected { conn, peer },
        );
        for (end, what) in [(ends[1], accepted), (ends[0], connected)] {
            let (node, life) = end;
            self.after(span, Event::Reaches { node, life, what });
        }
    }

    fn send(&mut self, id: ConnId, from: (usize, u32), mut bytes: Vec<u8>, idle: bool) {
        let latency = self.latency();
        let cut = {
            let Some(conn) = self.conns.get(&id) else {
                return;
            };
            self.cut(conn.ends[0].0, conn.ends[1].0)
        };
        let strikes = !idle && !self.context.armed.wires.is_empty();
        let fault =
            (strikes && self.context.rng.percent(50)).then(|| self.context.armed.wires.remove(0));
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let side = usize::from(conn.ends[1] == from);
        if !conn.open[side] {
            return;
        }
        let mut arrival = (self.context.time + latency).max(conn.arrival[side] + 1);
        if let Some(until) = cut {
            arrival = arrival.max(until + latency);
        }
        let mut tampered = false;
        let mut again = None;
        match fault {
            None => {}
            Some(WireFault::Late(span)) => {
                self.context.fault("fault: frame late");
                arrival += span;
            }
            Some(WireFault::Corrupt) => {
                self.context.fault("fault: bytes corrupted");
                let bit = self.context.rng.below(bytes.len() as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
                tampered = true;
            }
            Some(WireFault::Truncate) => {
                self.context.fault("fault: bytes truncated");
                let left = self.context.rng.below(bytes.len() as u64) as usize;
                bytes.truncate(left);
                tampered = true;
            }
            Some(WireFault::Replay) => {
                self.context.fault("fault: bytes replayed");
                again = Some(bytes.clone());
            }
            Some(WireFault::Reorder) => {
                self.context.fault("fault: bytes reordered");
                conn.held[side] = Some(bytes);
                return;
            }
        }
        let held = conn.held[side].take();
        tampered |= held.is_some();
        conn.arrival[side] = arrival + 2;
        let (node, life) = conn.ends[1 - side];
        let give = |world: &mut World, after: u64, bytes: Vec<u8>, tampered: bool| {
            let conn = id;
            let what = Incoming::Bytes {
                conn,
                bytes,
                tampered,
            };
            world.at(arrival + after, Event::Reaches { node, life, what });
        };
        give(self, 0, bytes, tampered);
        for other in held.into_iter().chain(again) {
            give(self, 1, other, true);
        }
    }

    fn close_from(&mut self, id: ConnId, from: (usize, u32)) {
        let latency = self.latency();
        let time = self.context.time;
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let side = usize::from(conn.ends[1] == from);
        if !std::mem::replace(&mut conn.open[side], false) {
            return;
        }
        let at = (time + latency).max(conn.arrival[side] + 3);
        let (node, life) = conn.ends[1 - side];
        let (ends, other_open) = (conn.ends, conn.open[1 - side]);
        if !other_open {
            self.conns.remove(&id);
        }
        let at = self
            .cut(ends[0].0, ends[1].0)
            .map_or(at, |until| until.max(at));
        let what = Incoming::Closed { conn: id };
        self.at(at, Event::Reaches { node, life, what });
    }

    // ---- lanes ------------------------------------------------------------------------------------

    fn step(&mut self, node: usize, life: u32, tokens: usize) {
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

    fn lane(&mut self, node: usize, life: u32) {
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

    fn sentinel(&mut self, node: usize, life: u32, step: u64) {
        let place = &self.places[node];
        let there = place.node.as_ref().filter(|_| place.life == life);
        let stuck = there.is_some_and(|there| there.engine.lane.borrow().is_busy());
        if stuck && place.steps == step {
            self.context.coverage.hit("node aborted by its sentinel");
            self.kill_node(node, false);
            self.after(ms(100), Event::Restart(node));
        }
    }

    // ---- links ------------------------------------------------------------------------------------

    fn wake_links(&mut self) {
        let mut awake = Vec::new();
        self.fabric.borrow_mut().take_awake(&mut awake);
        for link in awake {
            self.link_in(link, 3_000, 20_000);
        }
    }

    fn link_in(&mut self, link: LinkId, from: u64, to: u64) {
        if self.linked.len() <= link.0 {
            self.linked.resize(link.0 + 1, false);
        }
        if !std::mem::replace(&mut self.linked[link.0], true) {
            let span = self.context.rng.range(from, to) * self.slow;
            self.after(span, Event::Link(link));
        }
    }

    fn step_link(&mut self, link: LinkId) {
        self.linked[link.0] = false;
        let (reader, server) = {
            let (reader, server) = self.fabric.borrow().ends(link);
            (self.of_endpoint[reader], self.of_endpoint[server])
        };
        let one_sided = self.fabric.borrow().is_one_sided(link);
        let frozen = |at: (usize, u32)| self.places[at.0].frozen_until.filter(|_| !one_sided);
        let cut = self.cut(reader.0, server.0);
        if let Some(until) = frozen(reader).or(frozen(server)).or(cut) {
            self.linked[link.0] = true;
            return self.at(until + 60_000, Event::Link(link));
        }
        let stepped = self.fabric.borrow_mut().step(link);
        match stepped {
            Stepped::Idle => {}
            Stepped::Asks(ask) => self.ask(link, server, &ask),
            Stepped::Moved => self.link_in(link, 3_000, 40_000),
            Stepped::Ended => {
                self.want_turn(reader.0, 3_000);
                self.want_turn(server.0, 10_000);
                self.link_in(link, 3_000, 40_000);
            }
            Stepped::Violation(what) => {
                let named = Invariant::ALL
                    .into_iter()
                    .find(|invariant| what.starts_with(&format!("{invariant:?}:")));
                self.context.broke(named.unwrap_or(Invariant::I2), what);
            }
        }
    }

    fn ask(&mut self, link: LinkId, server: (usize, u32), ask: &Ask) {
        let place = &mut self.places[server.0];
        let now = place.clock.at(self.context.time);
        clock::set(now);
        if let Some(there) = place.node.as_mut().filter(|_| place.life == server.1) {
            let answer = there.resolve(&mut self.context, now, ask);
            let refused = answer.is_err();
            self.fabric.borrow_mut().answer(link, answer);
            if refused {
                let reader = self.fabric.borrow().ends(link).0;
                let reader = self.of_endpoint[reader].0;
                self.want_turn(reader, 3_000);
            }
        }
        self.link_in(link, 3_000, 60_000);
    }

    // ---- clients and the proxy ----------------------------------------------------------------------

    fn arrive(&mut self, client: usize) {
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

    fn cancel_at(&mut self, node: usize, client: usize) {
        let life = self.places[node].life;
        let span = self.latency();
        let what = Incoming::Cancel { client };
        self.after(span, Event::Reaches { node, life, what });
    }

    fn clients_lost(&mut self, clients: Vec<usize>) {
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
    fn overdue(&mut self, client: usize) {
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

    fn reports(&mut self) {
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
