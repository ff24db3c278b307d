//! One simulated node: the real cores with a shell of plain calls instead of sockets and tasks.
//!
//! It follows `kv/src/peer` and `server/src/node` step by step, with the same order of effects;
//! what those do in tasks happens here in [`Node::turn`], in an order that the seed draws.
//!
//! | file | follows |
//! |---|---|
//! | `dial`, `session`, `path` | `peer/{connect,session,data}.rs`: dials, handshakes, data connections |
//! | `frames` | `peer/{session,dispatch}.rs`: frames in and out |
//! | `alive` | `peer/{hub,session}.rs`: heartbeats, renewals, the end of a session |
//! | `lease` | `peer/dispatch.rs` and the read server: the lease table, its frames and effects |
//! | `serve` | `peer/serve.rs`, `node/prefill.rs`: the producer behind each lease |
//! | `pull` | `peer/{migrate,migration}.rs`: one attempt's machine with its checks |
//! | `reads` | `peer/reads.rs`: its reads, their credits, and what is posted again |
//! | `request` | `node/{accept,admission,decode}.rs`: a request to exactly one end |
//! | `engine` | `engine/core.rs`: steps of the real scheduler on the simulated lane |
//! | `checks` | none: the invariants one node can be asked about |

mod alive;
mod checks;
mod dial;
mod engine;
mod frames;
mod lease;
mod path;
mod pull;
mod reads;
mod request;
mod serve;
mod session;
mod wait;

use super::clock;
use super::context::{Context, Outcome};
use super::keeper::Keeper;
use super::model::PAGE_BYTES;
use dial::Dial;
use engine::Engine;
use kvserve_kv::credits::Credits;
use kvserve_kv::lease::{LeaseLimits, LeaseTable, PeerSession};
use kvserve_kv::pull::{PullLimits, PullNews};
use kvserve_kv::session::frame::DataOpen;
use kvserve_kv::session::{AttemptId, LivenessLimits, PeerKey, RefuseReason, Role};
use kvserve_kv::transport::sim::{Fabric, Flush, LinkKind, SimMemory, SimTransport};
use kvserve_kv::{ChecksumMode, PageId, PoolMemory};
use kvserve_runtime::completion::{Hub, HubLimits, SlotId, SourceId};
use kvserve_runtime::{GuardToken, Nanos};
use pull::Pull;
use reads::{CREDITS, PostArgs};
use request::Request;
use serve::{Ask, Producer};
use session::{Line, Session};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Heartbeats of the simulated cluster. Its times are shorter than PROTOCOL 9's, in the same
/// proportions, so that a run meets every one of them in some seconds.
pub const LIVENESS: LivenessLimits = LivenessLimits {
    heartbeat: Duration::from_millis(300),
    suspect_missed: 3,
    dead: Duration::from_millis(1800),
};

/// Lives of leases. The shorter one is over before a silent session is: a node that stands still
/// that long meets fences.
pub const TTLS: [Duration; 2] = [Duration::from_millis(2500), Duration::from_millis(1300)];

/// Leases of the simulated cluster.
pub const LEASES: LeaseLimits = LeaseLimits {
    ttl: TTLS[0],
    fence: Duration::from_millis(700),
    leases_max: 64,
    tombstones_max: 256,
};

/// Stage limits of the simulated cluster.
pub const PULLS: PullLimits = PullLimits {
    pair: Duration::from_millis(600),
    prefill_silence: Duration::from_millis(1500),
    pull_silence: Duration::from_millis(600),
    commit: Duration::from_millis(400),
    reads_out_max: 4,
};

/// Between two lists of live leases.
pub const RENEW: Duration = Duration::from_millis(600);

/// A handshake takes no longer.
pub const HANDSHAKE: Duration = Duration::from_secs(1);

/// First and longest pause between two dials.
pub const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A shard that was away this long first ends what has expired (PROTOCOL S4).
const AWAY_LONG: Duration = Duration::from_secs(1);

/// The next look when something is ready already.
const SOON: Duration = Duration::from_micros(15);

/// A control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// An attempt of a session: how leases and pulls are named.
pub type Key = (PeerSession, AttemptId);

/// What reaches a node from outside.
#[derive(Debug)]
pub enum Incoming {
    /// A dial came through.
    Connected { conn: ConnId, peer: usize },
    /// A dial was refused.
    ConnectFailed { peer: usize },
    /// Somebody dialled this node.
    Accepted { conn: ConnId },
    /// Bytes of a control connection; `tampered`: not as their sender sent them.
    Bytes {
        conn: ConnId,
        bytes: Vec<u8>,
        tampered: bool,
    },
    /// A control connection is closed.
    Closed { conn: ConnId },
    /// The first frame of a data connection.
    DataOpen { from: usize, bytes: Vec<u8> },
    /// Its answer, and what the card needs to know.
    DataAccepted {
        open: DataOpen,
        bytes: Vec<u8>,
        server: usize,
        session: u64,
    },
    /// A request from the proxy.
    Request { client: usize, left_ns: u64 },
    /// Its client has left.
    Cancel { client: usize },
}

/// What a node wants done outside.
#[derive(Debug)]
pub enum Outgoing {
    /// Dial a node.
    Connect { peer: usize },
    /// Send bytes; `idle`: a heartbeat.
    Bytes {
        conn: ConnId,
        bytes: Vec<u8>,
        idle: bool,
    },
    /// Close a connection.
    Close { conn: ConnId },
    /// Open a data connection.
    DataOpen {
        peer: usize,
        open: DataOpen,
        bytes: Vec<u8>,
    },
    /// Answer one.
    DataAccept {
        to: usize,
        bytes: Vec<u8>,
        session: u64,
    },
    /// A step began on the lane.
    Step { tokens: usize },
    /// A request ended.
    Ended { client: usize, outcome: Outcome },
}

/// What a node is made of; the same over its restarts.
#[derive(Clone)]
pub struct NodePlan {
    /// Its place in the cluster, and its address.
    pub index: usize,
    /// Its id.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// Pages of its pool.
    pub pages: usize,
    /// Nodes it dials.
    pub dials: Vec<usize>,
    /// How much checksums cover.
    pub checksums: ChecksumMode,
    /// How it reads peers' pages.
    pub reads: LinkKind,
    /// Whether its own pages have generations, so that peers may map them.
    pub is_mapped: bool,
    /// How long a lease of its lives.
    pub ttl: Duration,
    /// Pages of one read at most.
    pub read_pages: usize,
    /// Requests that run at once.
    pub running_max: usize,
    /// Requests that wait at most.
    pub queued_max: usize,
}

impl NodePlan {
    /// Limits of its leases.
    pub fn leases(&self) -> LeaseLimits {
        LeaseLimits {
            ttl: self.ttl,
            ..LEASES
        }
    }
}

/// One life of a node.
pub struct Node {
    pub(super) plan: NodePlan,
    pub(super) incarnation: u64,
    pub(super) endpoint: usize,
    pub(super) hub: Hub,
    pub(super) keeper: Rc<Keeper>,
    memory: Rc<SimMemory>,
    pub(super) fabric: Rc<RefCell<Fabric>>,
    pub(super) transport: Rc<RefCell<SimTransport>>,
    transport_source: SourceId,
    pub(super) engine: Engine,
    pub(super) leases: LeaseTable,
    producers: BTreeMap<Key, Producer>,
    pub(super) sessions: BTreeMap<PeerSession, Session>,
    session_last: u64,
    lines: BTreeMap<ConnId, Line>,
    dials: Vec<Dial>,
    pub(super) pulls: BTreeMap<Key, Pull>,
    pub(super) credits: Credits<PeerSession, (Key, PostArgs)>,
    pub(super) requests: BTreeMap<u64, Request>,
    request_last: u64,
    queue: VecDeque<u64>,
    running: usize,
    pub(super) inbox: VecDeque<Incoming>,
    pub(super) out: Vec<Outgoing>,
    ending: Vec<(PeerSession, RefuseReason, bool)>,
    news: VecDeque<(u64, AttemptId, PullNews, Vec<PageId>)>,
    served_guards: BTreeMap<u64, GuardToken>,
    /// Targets of attempts that are over, until their waiter lets go.
    held: BTreeMap<AttemptId, Vec<PageId>>,
    next_tick: Nanos,
    turned_at: Nanos,
    key: PeerKey,
    /// Until then it goes on listing leases that are over.
    pub(super) lists_the_dead_until: Nanos,
    /// A later start of this node's id is known: it exits.
    pub(super) superseded: bool,
    /// It was frozen until just now.
    pub(super) thawed: bool,
    /// It gives one of its leases up in its next turn.
    pub(super) gives_up: bool,
    /// It takes nothing new any more.
    pub(super) draining: bool,
    /// Prompts of peers that the service has not answered yet.
    asks: Vec<Ask>,
    overdue: BTreeMap<(u32, u32), Nanos>,
    stopping: BTreeMap<(u32, u32), Nanos>,
}

impl Node {
    /// Starts a node.
    pub fn start(
        plan: NodePlan,
        incarnation: u64,
        now: Nanos,
        fabric: Rc<RefCell<Fabric>>,
        key: PeerKey,
    ) -> Self {
        clock::set(now);
        let pool = plan.is_mapped.then(|| generations(plan.pages));
        let keeper = Keeper::new(plan.pages, pool.clone());
        let memory = Rc::new(SimMemory::new(plan.pages, PAGE_BYTES));
        let (bytes, witness) = (memory.clone(), keeper.clone());
        let endpoint = (fabric.borrow_mut()).attach(incarnation, bytes, witness, pool);
        let limits = HubLimits { slots_max: 1024 };
        let hub = Hub::with_clock(limits, keeper.clone(), clock::now);
        let transport = Rc::new(RefCell::new(SimTransport::new(fabric.clone(), endpoint)));
        let transport_source = hub.add_source(transport.clone());
        let engine = Engine::new(&hub, memory.clone(), keeper.clone());
        let dials = plan
            .dials
            .iter()
            .map(|peer| Dial::new(*peer, now))
            .collect();
        Node {
            incarnation,
            endpoint,
            hub,
            keeper,
            memory,
            fabric,
            transport,
            transport_source,
            engine,
            leases: LeaseTable::new(incarnation, plan.leases()),
            producers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            session_last: 0,
            lines: BTreeMap::new(),
            dials,
            pulls: BTreeMap::new(),
            credits: Credits::new(CREDITS),
            requests: BTreeMap::new(),
            request_last: 0,
            queue: VecDeque::new(),
            running: 0,
            inbox: VecDeque::new(),
            out: Vec::new(),
            ending: Vec::new(),
            news: VecDeque::new(),
            served_guards: BTreeMap::new(),
            held: BTreeMap::new(),
            next_tick: now.after(LIVENESS.heartbeat),
            turned_at: now,
            key,
            lists_the_dead_until: Nanos(0),
            superseded: false,
            thawed: false,
            gives_up: false,
            draining: false,
            asks: Vec::new(),
            overdue: BTreeMap::new(),
            stopping: BTreeMap::new(),
            plan,
        }
    }

    /// One turn of everything that is ready, in an order the seed draws. Gives the time of the
    /// next one.
    pub fn turn(&mut self, context: &mut Context, now: Nanos) -> Nanos {
        clock::set(now);
        let away = now.since(std::mem::replace(&mut self.turned_at, now));
        self.hub.turn(now);
        self.release_served();
        if away >= AWAY_LONG {
            self.expire(context);
        }
        if std::mem::take(&mut self.thawed) {
            // What stands still waits, too: the bounds count a process's own time.
            let marks = self.overdue.values_mut().chain(self.stopping.values_mut());
            marks.for_each(|since| *since = since.after(away));
        }
        let mut steps = [0u8, 1, 2, 3, 4, 5];
        for place in (1..steps.len()).rev() {
            steps.swap(place, context.rng.below(place as u64 + 1) as usize);
        }
        for step in steps {
            match step {
                0 => self.read_inbox(context),
                1 => self.read_completions(context),
                2 => self.turn_engine(context),
                3 => self.turn_requests(context),
                4 => self.turn_pulls(context),
                _ => self.turn_producers(context),
            }
            self.finish_sessions(context);
        }
        self.turn_dials(context);
        if now >= self.next_tick {
            self.next_tick = now.after(LIVENESS.heartbeat);
            self.tick(context);
            self.finish_sessions(context);
        }
        // Orders to sources and ended guards: the poll loop turns again when its bell rings.
        self.hub.turn(now);
        self.release_served();
        self.check(context);
        self.next_turn(now)
    }

    fn next_turn(&self, now: Nanos) -> Nanos {
        let due = !self.inbox.is_empty()
            || !self.news.is_empty()
            || self.waits().any(|wait| wait.is_due())
            || self.has_producer_work();
        if due {
            return now.after(SOON);
        }
        let mut at = self.next_tick;
        if let Some(hub) = self.hub.turn_again_at(now, false) {
            at = at.min(hub);
        }
        at = at.min(self.next_dial());
        at = at.min(self.next_pull(now));
        at = at.min(self.next_request(now));
        at = at.min(self.next_service());
        at.max(now.after(SOON))
    }

    /// Reads that peers' cards have taken from this node's pages: their guards end.
    fn release_served(&mut self) {
        use kvserve_runtime::GuardKeeper as _;
        let ended = self.fabric.borrow_mut().take_served(self.endpoint);
        for shadow in ended {
            if let Some(token) = self.served_guards.remove(&shadow) {
                self.keeper.release(token);
            }
        }
    }

    fn waits(&self) -> impl Iterator<Item = &wait::Wait> {
        let reads = self.pulls.values().flat_map(|pull| pull.waits());
        let requests = self.requests.values().map(|request| &request.wait);
        reads.chain(requests).chain(self.engine.wait())
    }

    /// Whether a request is on it or it computes or holds anything for anybody.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
            && self.pulls.is_empty()
            && self.leases.is_empty()
            && self.producers.is_empty()
            && !self.engine.is_busy()
    }

    /// Whether it takes requests (`/ready`).
    pub fn is_ready(&self) -> bool {
        let healthy = !self.keeper.ledger.with(|ledger| ledger.not_ready());
        let paired = match self.plan.role {
            Role::Decode => self.sessions.values().any(|session| session.can_pull()),
            Role::Hybrid | Role::Prefill | Role::Proxy => true,
        };
        healthy && paired && !self.draining
    }

    /// Names of slots, for checks.
    fn slot_name(slot: SlotId) -> (u32, u32) {
        (slot.index, slot.generation)
    }
}

/// A pool of which only the generation words are used: the ledger raises them, readers look.
fn generations(pages: usize) -> Arc<PoolMemory> {
    match PoolMemory::memfd(pages, 64) {
        Ok(pool) => Arc::new(pool),
        Err(error) => panic!("no memfd of {pages} small pages for a simulated node: {error}"),
    }
}

/// How the links of a run come to rest when they are killed, unless a fault says otherwise.
pub fn ordinary_flush(context: &mut Context) -> Flush {
    Flush::After(context.rng.range(0, 6) as u32)
}
