//! The world of one run: nodes, connections, the fabric, the proxy, clients, and the queue of
//! what happens next. Time is virtual; of events at one time the seed draws the order.

mod cards;
mod clients;
mod places;
mod wires;

use super::clock::NodeClock;
use super::context::{Context, Outcome};
use super::node::{ConnId, Incoming, Node, NodePlan, Outgoing};
use super::proxy::Proxy;
use kvserve_kv::session::PeerKey;
use kvserve_kv::session::frame::DataOpen;
use kvserve_kv::transport::sim::{Fabric, LinkId};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::rc::Rc;
use wires::Conn;

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
    /// Is a draining node done?
    Drained { node: usize, looks: u32 },
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

/// See the module's text.
pub struct World {
    pub context: Context,
    pub places: Vec<Place>,
    pub fabric: Rc<RefCell<Fabric>>,
    pub proxy: Proxy,
    /// No word passes between two nodes until then.
    pub cuts: BTreeMap<(usize, usize), u64>,
    /// How many times slower links move in this run.
    pub slow: u64,
    /// Nodes may be so small that they refuse requests for good.
    pub may_refuse: bool,
    /// Pages are read out of mapped pools.
    pub one_host: bool,
    /// How many times longer words take in this run.
    pub far: u64,
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
            far: 1,
            one_host: false,
            may_refuse: false,
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
            while let Some(blow) = self.context.blows.pop() {
                self.blow(blow);
            }
            self.wake_links();
            if over || self.context.violation.is_some() {
                let refused = self.fabric.borrow().reuses_refused();
                (self.context.coverage).add("copy of a reused page refused", refused);
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
            Event::Drained { node, looks } => self.drained(node, looks),
            Event::ProxyBack => self.proxy.down = false,
            Event::Report => self.reports(),
            Event::Unstall(link) => self.fabric.borrow_mut().stall(link, false),
            Event::Calm => self.calm(),
            Event::Later => self.later(),
            Event::Rest => return self.rest(),
        }
        false
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
        self.context.rng.range(20_000, 200_000) * slow * self.far
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
}
