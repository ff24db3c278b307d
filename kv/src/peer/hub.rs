//! The hub itself: what one shard holds of its peers, and its public face.

use super::config::{
    PathCounters, PeerConfig, PeerCounters, PeerEvents, PeerParts, PeerState, PeerView, PrefillAsk,
    PrefillError, PrefillService, SendError, TransportChoice,
};
use super::connect::Dial;
use super::migrate::{AttemptCell, drive};
use super::migration::Migration;
use super::path::ShmPath;
use super::rdma::NodeRdma;
use super::reads::Queued;
use super::serve::{Authority, Producer};
use super::session::{PullPath, Session};
use crate::credits::{CreditCounters, Credits, PeerCredits};
use crate::lease::{LeaseCounters, LeaseTable, LeaseView, PeerSession};
use crate::ledger::LedgerCell;
use crate::pool::PoolMemory;
use crate::pull::{Attempt, MigrationError, Stage};
use crate::session::frame::{API_URL_BYTES_MAX, APP_BYTES_MAX, NODE_ID_BYTES_MAX};
use crate::session::{AttemptId, Frame, Pulse, RefuseReason, RequestId, Role, ShmOffer};
use crate::transport::chaos::{ChaosHandle, ChaosTransport};
use crate::transport::rdma::verbs::{Access, Library};
use crate::transport::rdma::{Opening, RdmaCounters};
use crate::transport::shm::{ShmConfig, ShmCounters, ShmTransport};
use crate::transport::tcp::{
    ServerConfig, ServerCounters, TcpConfig, TcpCounters, TcpReadServer, TcpTransport,
};
use kvserve_runtime::completion::{Hub, SourceId};
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::{ChannelId, Nanos, Shard};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// Everything about pages; a proxy has none of it.
pub(super) struct Pages {
    pub pool: Arc<PoolMemory>,
    pub ledger: Rc<LedgerCell>,
    pub transport: Rc<RefCell<ChaosTransport<TcpTransport>>>,
    pub transport_source: SourceId,
    pub shm: Rc<RefCell<ChaosTransport<ShmTransport>>>,
    pub shm_source: SourceId,
    pub rdma: Option<NodeRdma>,
    pub server: Rc<RefCell<TcpReadServer>>,
    pub authority: Rc<RefCell<Authority>>,
}

pub(super) struct Inner {
    pub me: Weak<Inner>,
    pub shard: Shard,
    pub hub: Hub,
    pub config: PeerConfig,
    pub pages: Option<Pages>,
    pub shm_offer: ShmOffer,
    pub service: Option<Rc<dyn PrefillService>>,
    pub events: Rc<dyn PeerEvents>,
    pub chaos: Option<ChaosHandle>,
    pub sessions: RefCell<BTreeMap<PeerSession, Rc<Session>>>,
    session_last: Cell<u64>,
    request_last: Cell<u64>,
    pub dials: RefCell<BTreeMap<SocketAddr, Rc<Dial>>>,
    pub half_open: Cell<usize>,
    pub leases: Rc<RefCell<LeaseTable>>,
    pub producers: RefCell<BTreeMap<(PeerSession, AttemptId), Rc<Producer>>>,
    counters: Cell<PeerCounters>,
    pub turned_at: Cell<Nanos>,
    /// Reads in flight, and those that wait.
    pub credits: RefCell<Credits<PeerSession, Queued>>,
    pub pumping: Cell<bool>,
    pub stopped: Cell<bool>,
    local_addr: Option<SocketAddr>,
}

/// The peers of one shard. Cheap to clone, never leaves its thread.
#[derive(Clone)]
pub struct PeerHub(Rc<Inner>);

/// One migration into this node, for `/debug/transfers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptView {
    /// From which node.
    pub node_id: String,
    /// Which attempt.
    pub id: AttemptId,
    /// Where it stands.
    pub phase: &'static str,
    /// Lease number; 0 before the grant.
    pub lease: u64,
    /// Where that belongs in the request's stages: pair, prefill, pull, commit.
    pub stage: &'static str,
    /// Since it was asked for.
    pub age: Duration,
    /// Pages in place and checked.
    pub pages_checked: u32,
    /// Of so many.
    pub pages: u32,
    /// Bytes of the pages in place and checked.
    pub bytes_checked: u64,
    /// Reads posted or waiting for a credit.
    pub reads_out: usize,
    /// Since something last moved for it: a sign of life, or bytes.
    pub still_for: Duration,
    /// Until its present stage's limit ends it, as far as is known now.
    pub limit_left: Duration,
    /// Until the request's deadline.
    pub deadline_left: Duration,
}

impl PeerHub {
    /// Starts the hub on `shard`: binds `config.listen`, registers its sources with `hub` (whose
    /// keeper of guards must be `parts.ledger`), starts its timers.
    ///
    /// # Errors
    /// `InvalidInput` when the configuration is over a cap or misses a part; what the kernel
    /// says when the address cannot be bound or descriptors are out.
    pub fn start(
        shard: &Shard,
        hub: &Hub,
        config: PeerConfig,
        parts: PeerParts,
    ) -> io::Result<PeerHub> {
        check(&config, &parts)?;
        let listener = match config.listen {
            Some(address) => Some(TcpListener::bind(address, false)?),
            None => None,
        };
        let local_addr = match &listener {
            Some(listener) => Some(listener.local_addr()?),
            None => None,
        };
        let leases = Rc::new(RefCell::new(LeaseTable::new(
            config.incarnation,
            config.limits.lease,
        )));
        let pages = match (parts.pool, parts.ledger) {
            (Some(pool), Some(ledger)) => {
                let chaos = parts.chaos.clone().unwrap_or_else(ChaosHandle::off);
                let verbs = parts.verbs.clone();
                Some(open_pages(
                    hub, &config, pool, ledger, chaos, &leases, verbs,
                )?)
            }
            (Some(_), None) | (None, Some(_)) | (None, None) => None,
        };
        let (shm_offer, pool_listener) = match &pages {
            Some(pages) => super::path::offer(pages, config.role.serves(), config.transport)?,
            None => Default::default(),
        };
        let now = hub.now();
        let credits = Credits::new(config.limits.credits);
        let inner = Rc::new_cyclic(|me| Inner {
            me: me.clone(),
            shard: shard.clone(),
            hub: hub.clone(),
            config,
            pages,
            shm_offer,
            service: parts.prefill,
            events: parts.events,
            chaos: parts.chaos,
            sessions: RefCell::default(),
            session_last: Cell::new(0),
            request_last: Cell::new(0),
            dials: RefCell::default(),
            half_open: Cell::new(0),
            leases,
            producers: RefCell::default(),
            counters: Cell::default(),
            turned_at: Cell::new(now),
            credits: RefCell::new(credits),
            pumping: Cell::new(false),
            stopped: Cell::new(false),
            local_addr,
        });
        if let Some(listener) = listener {
            shard
                .spawn(super::connect::accept_loop(inner.clone(), listener))
                .detach();
        }
        if let Some(listener) = pool_listener {
            shard
                .spawn(super::path::hand_over_loop(inner.clone(), listener))
                .detach();
        }
        shard.spawn(timer(inner.clone())).detach();
        Ok(PeerHub(inner))
    }

    /// Where peers reach this node, if it listens.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.local_addr
    }

    /// Abstract name of the Unix socket at which this node's pool is handed over, if it is.
    pub fn pool_socket(&self) -> Option<&str> {
        let name = self.0.shm_offer.socket.as_str();
        (!name.is_empty()).then_some(name)
    }

    /// Keeps a session with the node at `address` up, with back-off, until [`PeerHub::forget`].
    pub fn dial(&self, address: SocketAddr) {
        let mut dials = self.0.dials.borrow_mut();
        if self.0.stopped.get() || dials.contains_key(&address) {
            return;
        }
        let dial = Rc::new(Dial::new(&self.0, address));
        dials.insert(address, dial.clone());
        drop(dials);
        self.0
            .shard
            .spawn(super::connect::dial_loop(self.0.clone(), dial))
            .detach();
    }

    /// Stops dialling `address` and ends the session that came of it.
    pub fn forget(&self, address: SocketAddr) {
        let dial = self.0.dials.borrow_mut().remove(&address);
        if let Some(dial) = dial {
            dial.forget();
        }
        for session in self.0.live_sessions() {
            if session.we_dialled && session.address == address {
                session.request_end(RefuseReason::Forgotten, false);
            }
        }
    }

    /// Every session and every address being dialled.
    pub fn peers(&self) -> Vec<PeerView> {
        let pulls = self.0.config.role.pulls();
        let mut views = Vec::new();
        for session in self.0.live_sessions() {
            self.0.check_pull_path(&session);
            let credits = self.0.credits.borrow().peer(session.number);
            views.push(session.view(pulls, credits));
        }
        for dial in self.0.dials.borrow().values() {
            let reached = views.iter().any(|view| dial.reaches(view));
            if !reached {
                views.push(PeerView {
                    node_id: dial.node_id(),
                    role: None,
                    incarnation: 0,
                    address: dial.address,
                    state: PeerState::Dialling,
                    api_url: String::new(),
                    since: dial.since,
                    path: "",
                    can_pull: false,
                    in_flight: 0,
                    moved: PathCounters::default(),
                    credits: PeerCredits::default(),
                });
            }
        }
        views
    }

    /// Sends a frame of the layer above.
    ///
    /// # Errors
    /// [`SendError`] when there is no session, or the bytes are too many.
    pub fn send_app(&self, node_id: &str, kind: u16, bytes: Vec<u8>) -> Result<(), SendError> {
        if bytes.len() > APP_BYTES_MAX {
            return Err(SendError::TooLong(bytes.len()));
        }
        let session = self.0.session_of(node_id).ok_or(SendError::NoSession)?;
        session.send(&self.0, &Frame::App { kind, bytes });
        if session.is_live() {
            Ok(())
        } else {
            Err(SendError::TooSlow)
        }
    }

    /// A request number of this node, never given before.
    pub fn next_request_id(&self) -> RequestId {
        self.0.request_last.set(self.0.request_last.get() + 1);
        RequestId {
            incarnation: self.0.config.incarnation,
            counter: self.0.request_last.get(),
        }
    }

    /// Asks a prefill node to compute a prompt and pulls its pages. An earlier attempt of the
    /// same request is cancelled.
    ///
    /// # Errors
    /// [`PrefillError`] with the pages, when it cannot even be asked.
    pub fn prefill(&self, node_id: &str, ask: PrefillAsk) -> Result<Migration, PrefillError> {
        let (session, id) = match self.0.may_ask(node_id, &ask) {
            Ok(found) => found,
            Err(reason) => {
                let mut error = MigrationError::new(Stage::Pair, reason);
                error.message = format!("no prefill by `{node_id}`: {reason:?}");
                return Err(PrefillError {
                    into: ask.into,
                    error,
                });
            }
        };
        self.0.cancel_earlier(id);
        let inner = &self.0;
        let now = inner.hub.now();
        let machine = Attempt::new(
            now,
            id,
            session.peer.incarnation,
            ask.into.len() as u32,
            inner.config.page_bytes,
            ask.deadline.at(),
            inner.config.limits.pull,
        );
        let cell = Rc::new(AttemptCell::new(
            inner,
            session.clone(),
            machine,
            ask.into,
            ask.deadline,
        ));
        session.attempts.borrow_mut().insert(id, cell.clone());
        inner.count(|counters| counters.attempts += 1);
        let frame = Frame::Prefill {
            id,
            left_ns: ask.deadline.left(now).as_nanos() as u64,
            held_pages: ask.held_pages,
            prompt: ask.prompt,
            payload: ask.payload,
        };
        session.send(inner, &frame);
        inner
            .shard
            .spawn(drive(inner.clone(), cell.clone()))
            .detach();
        Ok(Migration::new(inner.clone(), cell))
    }

    /// What was counted since the start.
    pub fn counters(&self) -> PeerCounters {
        self.0.counters.get()
    }

    /// What the credits have counted, and the reads and bytes in flight and waiting now.
    pub fn credits(&self) -> (CreditCounters, (u32, u64), usize) {
        let credits = self.0.credits.borrow();
        (credits.counters(), credits.in_flight(), credits.waiting())
    }

    /// What the lease table has counted.
    pub fn lease_counters(&self) -> LeaseCounters {
        self.0.leases.borrow().counters()
    }

    /// Leases that this node has granted or is asked for.
    pub fn leases(&self) -> Vec<LeaseView> {
        self.0.leases.borrow().views()
    }

    /// Migrations into this node.
    pub fn attempts(&self) -> Vec<AttemptView> {
        let now = self.0.hub.now();
        let mut views = Vec::new();
        for session in self.0.live_sessions() {
            for (id, cell) in session.attempts.borrow().iter() {
                let (pages_checked, pages) = cell.progress();
                views.push(AttemptView {
                    node_id: session.peer.node_id.clone(),
                    id: *id,
                    phase: cell.phase().label(),
                    lease: cell.lease_live().unwrap_or(0),
                    stage: cell.look(|machine| machine.stage().label()),
                    age: now.since(cell.began_at),
                    bytes_checked: u64::from(pages_checked) * self.0.config.page_bytes as u64,
                    reads_out: cell.look(Attempt::reads_out),
                    still_for: now.since(cell.moved_at(&self.0)),
                    limit_left: cell.look(|machine| machine.limit(now)).since(now),
                    pages_checked,
                    pages,
                    deadline_left: cell.deadline.left(now),
                });
            }
        }
        views
    }

    /// What the data connections have moved: pulled into this node, and served to others.
    pub fn transport_counters(&self) -> (TcpCounters, ServerCounters) {
        match &self.0.pages {
            Some(pages) => (
                pages.transport.borrow().inner().counters(),
                pages.server.borrow().counters(),
            ),
            None => Default::default(),
        }
    }

    /// What was copied by shared memory.
    pub fn shm_counters(&self) -> ShmCounters {
        match &self.0.pages {
            Some(pages) => pages.shm.borrow().inner().counters(),
            None => ShmCounters::default(),
        }
    }

    /// What RDMA has moved and counted; `None` where there is none.
    pub fn rdma_counters(&self) -> Option<RdmaCounters> {
        let rdma = self.0.pages.as_ref()?.rdma.as_ref()?;
        Some(rdma.transport.borrow().inner().counters())
    }

    /// The device and port that RDMA uses, where this node has it.
    pub fn rdma_device(&self) -> Option<String> {
        let rdma = self.0.pages.as_ref()?.rdma.as_ref()?;
        let transport = rdma.transport.borrow();
        let choice = transport.inner().choice();
        Some(format!("{} port {}", choice.device, choice.port))
    }

    /// Ends everything: no dials, no accepts, each session with `ShuttingDown`. The tasks end
    /// within a heartbeat.
    pub fn stop(&self) {
        self.0.stopped.set(true);
        let dials = std::mem::take(&mut *self.0.dials.borrow_mut());
        for dial in dials.values() {
            dial.forget();
        }
        for session in self.0.live_sessions() {
            session.request_end(RefuseReason::ShuttingDown, false);
        }
    }
}

impl Inner {
    pub(super) fn count(&self, change: impl FnOnce(&mut PeerCounters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    pub(super) fn next_session(&self) -> PeerSession {
        self.session_last.set(self.session_last.get() + 1);
        PeerSession(self.session_last.get())
    }

    pub(super) fn live_sessions(&self) -> Vec<Rc<Session>> {
        self.sessions.borrow().values().cloned().collect()
    }

    pub(super) fn session_numbered(&self, number: PeerSession) -> Option<Rc<Session>> {
        self.sessions.borrow().get(&number).cloned()
    }

    /// The live session with a node, the newest if one is being replaced.
    pub(super) fn session_of(&self, node_id: &str) -> Option<Rc<Session>> {
        let sessions = self.sessions.borrow();
        let of_node = sessions
            .values()
            .rev()
            .find(|session| session.is_live() && session.peer.node_id == node_id);
        of_node.cloned()
    }

    /// A pull connection that broke, or that the ladder took down, is closed, so that another
    /// one is opened.
    pub(super) fn check_pull_path(&self, session: &Session) {
        let Some(pages) = &self.pages else {
            return;
        };
        let works =
            |channel: ChannelId| self.hub.channel_is_open(channel) && pages.is_open(channel);
        match session.tcp_path.get() {
            PullPath::Open(channel) if !works(channel) => {
                self.close_tcp_path(session);
                session.data_bell.ring();
            }
            PullPath::Open(_) | PullPath::None => {}
        }
        match session.shm_path.get() {
            ShmPath::Open(channel) if !works(channel) => {
                self.fall_back(session, "the peer's socket has ended");
            }
            ShmPath::Open(_) | ShmPath::Trying | ShmPath::Off => {}
        }
        self.check_rdma(session, works);
    }

    /// What is due every heartbeat.
    fn tick(&self) {
        let now = self.hub.now();
        self.turned_at.set(now);
        self.with_leases(|leases, out| leases.tick(now, out));
        for session in self.live_sessions() {
            if session.tick(now) == Pulse::Dead {
                session.request_end(RefuseReason::Silent, false);
                continue;
            }
            session.send(self, &Frame::Heartbeat);
            self.check_pull_path(&session);
            session.pump(self);
            let due = now.since(session.renewed_at.get()) >= self.config.limits.renew;
            if due && self.config.role.pulls() && session.peer.role.serves() {
                session.renewed_at.set(now);
                let live = session
                    .attempts
                    .borrow()
                    .values()
                    .filter_map(|cell| Some((cell.id(), cell.lease_live()?)))
                    .collect();
                let grant_highest = session.grant_highest.get();
                session.send(
                    self,
                    &Frame::Renew {
                        grant_highest,
                        live,
                    },
                );
            }
        }
    }
}

/// Heartbeats, expiry and renewals of all sessions, until the hub is stopped.
async fn timer(inner: Rc<Inner>) {
    while !inner.stopped.get() {
        inner
            .shard
            .sleep(inner.config.limits.liveness.heartbeat)
            .await;
        inner.catch_up();
        inner.tick();
    }
}

fn check(config: &PeerConfig, parts: &PeerParts) -> io::Result<()> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let id_bytes = config.node_id.len();
    if id_bytes == 0 || id_bytes > NODE_ID_BYTES_MAX {
        return wrong(format!(
            "a node id has 1 to {NODE_ID_BYTES_MAX} bytes, this one {id_bytes}"
        ));
    }
    if config.api_url.len() > API_URL_BYTES_MAX {
        return wrong(format!(
            "an API URL has at most {API_URL_BYTES_MAX} bytes, this one {}",
            config.api_url.len()
        ));
    }
    let has_pages = parts.pool.is_some() && parts.ledger.is_some();
    let needs_pages = match config.role {
        Role::Hybrid | Role::Prefill | Role::Decode => true,
        Role::Proxy => false,
    };
    if needs_pages && (!has_pages || config.page_bytes == 0) {
        return wrong(format!(
            "a {} node needs a pool, its ledger and the page bytes",
            config.role
        ));
    }
    Ok(())
}

fn open_pages(
    hub: &Hub,
    config: &PeerConfig,
    pool: Arc<PoolMemory>,
    ledger: Rc<LedgerCell>,
    chaos: ChaosHandle,
    leases: &Rc<RefCell<LeaseTable>>,
    verbs: Option<Library>,
) -> io::Result<Pages> {
    let rdma = open_rdma(hub, config, &pool, verbs, chaos.clone())?;
    let tcp = TcpTransport::new(pool.clone(), config.page_bytes, TcpConfig::default())?;
    let transport = Rc::new(RefCell::new(ChaosTransport::new(tcp, chaos.clone())?));
    let copies = ShmConfig {
        checksums: config.checksums,
        ..ShmConfig::default()
    };
    let shm = ShmTransport::new(pool.clone(), config.page_bytes, copies)?;
    let shm = Rc::new(RefCell::new(ChaosTransport::new(shm, chaos)?));
    let authority = Rc::new(RefCell::new(Authority::new(
        config.incarnation,
        leases.clone(),
        ledger.clone(),
    )));
    let server = Rc::new(RefCell::new(TcpReadServer::new(
        pool.clone(),
        config.page_bytes,
        authority.clone(),
        ServerConfig::default(),
    )?));
    let transport_source = hub.add_source(transport.clone());
    let shm_source = hub.add_source(shm.clone());
    hub.add_source(server.clone());
    Ok(Pages {
        pool,
        ledger,
        transport,
        transport_source,
        shm,
        shm_source,
        rdma,
        server,
        authority,
    })
}

/// RDMA, as the node's choice wants it: with `auto` only where it is, with `rdma` or not at all.
fn open_rdma(
    hub: &Hub,
    config: &PeerConfig,
    pool: &Arc<PoolMemory>,
    verbs: Option<Library>,
    chaos: ChaosHandle,
) -> io::Result<Option<NodeRdma>> {
    let must = match config.transport {
        TransportChoice::Rdma => true,
        TransportChoice::Auto => false,
        TransportChoice::Shm | TransportChoice::Tcp => return Ok(None),
    };
    let address = config.listen.map(|address| address.ip());
    let opening = Opening {
        pool,
        page_bytes: config.page_bytes,
        access: Access {
            serves: config.role.serves(),
            lands: config.role.pulls(),
        },
        address: address.filter(|ip| !ip.is_loopback() && !ip.is_unspecified()),
    };
    let opened = super::rdma::open(hub, verbs, opening, &config.rdma, chaos);
    match opened {
        Ok(rdma) => Ok(Some(rdma)),
        Err(reason) if must => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("--transport rdma: {reason}"),
        )),
        // A node that may take other ways says nothing of a card it does not have; `kvserve
        // doctor` does.
        Err(_reason) => Ok(None),
    }
}
