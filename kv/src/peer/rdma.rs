//! RDMA between two nodes: queue pairs asked for in sealed frames, probed, kept up, taken down.
//!
//! ```text
//! side that pulls                                     side that serves
//!  prepare a queue pair ── RdmaAsk{endpoint} ───────▶  in place of the one of that number
//!  connect it           ◀── RdmaAnswer{endpoint} ────  pool's key, base, pages
//!  probe: a real READ, its rate                        (nothing)
//!  posts reads; a pair that is lost is made anew, with back-off
//! session over: its pairs go down the ladder           its pairs are destroyed, then leases end
//! ```
//!
//! A session has several queue pairs to its peer; reads go round over those that stand, and those
//! of a lost one are posted again on another (PROTOCOL E5).

use super::config::TransportChoice;
use super::connect::jitter;
use super::entropy;
use super::hub::{Inner, Pages};
use super::session::Session;
use super::wait::{Bell, Woken};
use crate::ledger::{AllocateAs, LedgerCell};
use crate::pool::PageId;
use crate::session::PeerIdentity;
use crate::session::frame::{Frame, RDMA_PAIRS_MAX, REASON_TEXT_BYTES_MAX};
use crate::transport::chaos::{ChaosHandle, ChaosTransport};
use crate::transport::rdma::verbs::Library;
use crate::transport::rdma::{Endpoint, Opening, PeerPlaces, RdmaConfig, RdmaTransport, ServedId};
use crate::transport::shm::{LearnError, Place};
use crate::transport::tcp::READS_IN_FLIGHT_MAX;
use crate::transport::{Read, Transport};
use kvserve_runtime::completion::{Hub, SourceId};
use kvserve_runtime::{ChannelId, ChannelKind, Deadline};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Posts a queue pair's ring holds; see the TCP data connection's.
const RING_POSTS: usize = 2 * READS_IN_FLIGHT_MAX;

/// Tries in a row without any queue pair before a node that may takes TCP: some 1.3 s of retries
/// each on a peer that cannot be reached, so 4 s in all.
const TRIES_MAX: u32 = 3;

/// Pauses between tries to make a queue pair.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Bytes that a probe reads at most, after a first page that shows that it works at all.
const PROBE_BYTES_MAX: usize = 1 << 20;

/// How long a probe may take: the retries of an unreachable peer are over by then.
const PROBE_LIMIT: Duration = Duration::from_secs(3);

/// The lease number of probes; real ones count up from 1.
const PROBE_LEASE: u64 = u64::MAX;

/// How often standing queue pairs are looked after.
const LOOK: Duration = Duration::from_millis(500);

/// A node's RDMA.
pub(super) struct NodeRdma {
    pub transport: Rc<RefCell<ChaosTransport<RdmaTransport>>>,
    pub source: SourceId,
}

/// Opens a device if one is wanted and there; else says why not.
pub(super) fn open(
    hub: &Hub,
    library: Option<Library>,
    opening: Opening<'_>,
    config: &RdmaConfig,
    chaos: ChaosHandle,
) -> Result<NodeRdma, String> {
    let library = match library {
        Some(library) => library,
        None => Library::system().map_err(|error| error.to_string())?,
    };
    let opened = RdmaTransport::open(&library, opening, config.clone());
    let transport = opened.map_err(|error| error.to_string())?;
    let transport = ChaosTransport::new(transport, chaos).map_err(|error| error.to_string())?;
    let transport = Rc::new(RefCell::new(transport));
    let source = hub.add_source(transport.clone());
    Ok(NodeRdma { transport, source })
}

/// Target pages of a probe: given back however it ends, also when its session does. The ledger
/// waits for the read's guards.
struct ProbePages<'a> {
    ledger: &'a LedgerCell,
    pages: Vec<PageId>,
}

impl Drop for ProbePages<'_> {
    fn drop(&mut self) {
        self.ledger.with(|ledger| ledger.free(&self.pages));
    }
}

/// How RDMA stands as a session's way to pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RdmaPhase {
    /// It is not this session's way (any more).
    Off,
    /// No queue pair stands.
    Trying,
    /// At least one does.
    Open,
}

/// A session's queue pairs, both ways.
pub(super) struct RdmaPath {
    pub phase: Cell<RdmaPhase>,
    /// By number: the channel that stands.
    pairs: RefCell<Vec<Option<ChannelId>>>,
    /// Where the next read goes first.
    next: Cell<usize>,
    pub places: PeerPlaces,
    peer_pages: Cell<usize>,
    serial: Cell<u32>,
    /// The answer to the ask of that serial number.
    answer: RefCell<Option<(u32, Result<Endpoint, String>)>>,
    answered: Bell,
    /// Queue pairs over which the peer reads, by number.
    served: RefCell<Vec<Option<ServedId>>>,
}

impl RdmaPath {
    pub(super) fn new(inner: &Inner, planned: bool) -> Self {
        RdmaPath {
            phase: Cell::new(match planned {
                true => RdmaPhase::Trying,
                false => RdmaPhase::Off,
            }),
            pairs: RefCell::new(vec![None; inner.config.rdma.pairs_per_peer]),
            next: Cell::new(0),
            places: PeerPlaces::default(),
            peer_pages: Cell::new(0),
            serial: Cell::new(0),
            answer: RefCell::new(None),
            answered: Bell::new(&inner.hub, "peer.rdma"),
            served: RefCell::new(vec![None; RDMA_PAIRS_MAX as usize]),
        }
    }

    /// The first channel that stands and is `wanted`, from the one whose turn it is on.
    fn standing(&self, wanted: impl Fn(ChannelId) -> bool) -> Option<(usize, ChannelId)> {
        if self.phase.get() != RdmaPhase::Open {
            return None;
        }
        let pairs = self.pairs.borrow();
        let order = (0..pairs.len()).map(|step| (self.next.get() + step) % pairs.len());
        order
            .filter_map(|place| Some((place, pairs[place]?)))
            .find(|(_, channel)| wanted(*channel))
    }

    /// The channel whose turn it is.
    pub(super) fn channel(&self) -> Option<ChannelId> {
        Some(self.standing(|_| true)?.1)
    }

    /// A channel that `takes` a read now; the next read starts behind it.
    pub(super) fn channel_that(&self, takes: impl Fn(ChannelId) -> bool) -> Option<ChannelId> {
        let (place, channel) = self.standing(takes)?;
        self.next.set(place + 1);
        Some(channel)
    }

    /// Where pages of a lease lie; nothing is learnt where RDMA is not the way.
    pub(super) fn learn(
        &self,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        match self.phase.get() {
            RdmaPhase::Off => Err(LearnError::NotConnected),
            RdmaPhase::Trying | RdmaPhase::Open => {
                let pages = self.peer_pages.get();
                self.places.learn(pages, lease, epoch, first, places)
            }
        }
    }

    pub(super) fn is_served(&self) -> bool {
        self.served.borrow().iter().any(Option::is_some)
    }

    fn vacant(&self) -> Option<usize> {
        self.pairs.borrow().iter().position(Option::is_none)
    }
}

// ---- the side that pulls ------------------------------------------------------------------

impl Inner {
    fn rdma(&self) -> Option<&NodeRdma> {
        self.pages.as_ref()?.rdma.as_ref()
    }

    /// Whether a session's pages are to be tried by RDMA; else why not.
    pub(super) fn rdma_plan(&self, peer: &PeerIdentity) -> Result<(), &'static str> {
        if self.pages.is_none() || !self.config.role.pulls() || !peer.role.serves() {
            return Err("nothing is pulled");
        }
        match self.config.transport {
            TransportChoice::Auto | TransportChoice::Rdma => {}
            TransportChoice::Shm => return Err("this node's --transport is shm"),
            TransportChoice::Tcp => return Err("this node's --transport is tcp"),
        }
        if self.rdma().is_none() {
            return Err("this node has no RDMA");
        }
        match peer.rdma {
            false => Err("the peer offers no RDMA"),
            true => Ok(()),
        }
    }

    /// Makes the queue pairs of a session and keeps them up, for as long as RDMA is its way.
    pub(super) async fn rdma_loop(&self, session: &Session) {
        let (mut pause, mut tries) = (PAUSE.0, 0);
        while session.rdma.phase.get() != RdmaPhase::Off {
            self.check_pull_path(session);
            let Some(number) = session.rdma.vacant() else {
                let until = self.hub.now().after(LOOK);
                match session.path_bell.wait(until).await {
                    Woken::Rung | Woken::Deadline => {}
                    Woken::NoSlot => self.shard.sleep(LOOK).await,
                }
                continue;
            };
            let first = session.rdma.phase.get() == RdmaPhase::Trying;
            match self.make_pair(session, number, first).await {
                Ok(rate) => {
                    (pause, tries) = (PAUSE.0, 0);
                    self.count(|counters| counters.rdma_pairs += 1);
                    if session.rdma.phase.replace(RdmaPhase::Open) == RdmaPhase::Trying {
                        self.events.path(&session.peer.node_id, "rdma", &rate);
                    }
                    self.hub.ring();
                    session.pump(self);
                }
                Err(reason) => {
                    tries += 1;
                    let none = session.rdma.phase.get() == RdmaPhase::Trying;
                    if none && self.config.transport == TransportChoice::Rdma {
                        self.events.path(&session.peer.node_id, "", &reason);
                    } else if none && tries >= TRIES_MAX {
                        return self.leave_rdma(session, &reason);
                    }
                    self.shard.sleep(jitter(pause)).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
        }
    }

    /// One queue pair, from the ask to the probe (of the first one); gives its rate in words.
    async fn make_pair(
        &self,
        session: &Session,
        number: usize,
        probe: bool,
    ) -> Result<String, String> {
        let (Some(pages), Some(rdma)) = (&self.pages, self.rdma()) else {
            return Err("this node has no RDMA".into());
        };
        let path = &session.rdma;
        let random = entropy::bytes().map_err(|error| error.to_string())?;
        let prepared = rdma
            .transport
            .borrow_mut()
            .inner_mut()
            .prepare(u32::from_le_bytes(random))
            .map_err(|error| error.to_string())?;
        let serial = path.serial.get() + 1;
        path.serial.set(serial);
        path.answer.take();
        let ask = Frame::RdmaAsk {
            pair: number as u8,
            serial,
            endpoint: prepared.endpoint().encode().to_vec(),
        };
        session.send(self, &ask);
        let theirs = self.await_answer(session, serial).await?;
        if path.phase.get() == RdmaPhase::Off || !session.is_live() {
            return Err("the session has ended".into());
        }
        let channel = self
            .hub
            .open_channel(ChannelKind::Rdma, rdma.source, RING_POSTS)
            .map_err(|error| error.to_string())?;
        let connected = rdma.transport.borrow_mut().inner_mut().connect(
            channel,
            prepared,
            &theirs,
            &path.places,
        );
        if let Err(error) = connected {
            self.hub.close_channel(channel);
            return Err(error.to_string());
        }
        // From here on the session's end closes it, also in the middle of the probe.
        path.pairs.borrow_mut()[number] = Some(channel);
        if !probe {
            return Ok(String::new());
        }
        let rate = self.probe(pages, rdma, session, channel).await;
        let stands = path.pairs.borrow()[number] == Some(channel);
        match (rate, stands) {
            (Ok(rate), true) => Ok(rate),
            (Ok(_), false) => Err("it was lost during the probe".into()),
            (Err(reason), true) => {
                path.pairs.borrow_mut()[number] = None;
                self.hub.close_channel(channel);
                Err(reason)
            }
            (Err(reason), false) => Err(reason),
        }
    }

    async fn await_answer(&self, session: &Session, serial: u32) -> Result<Endpoint, String> {
        let until = self.hub.now().after(self.config.limits.handshake);
        loop {
            match session.rdma.answer.take() {
                Some((answered, theirs)) if answered == serial => return theirs,
                Some(_) | None => {}
            }
            match session.rdma.answered.wait(until).await {
                Woken::Rung => {}
                Woken::Deadline => return Err("the peer did not answer about RDMA in time".into()),
                Woken::NoSlot => return Err("no completion slot is free".into()),
            }
        }
    }

    /// Real READs of the peer's pool: one page, to show that it works, then more, for the rate.
    async fn probe(
        &self,
        pages: &Pages,
        rdma: &NodeRdma,
        session: &Session,
        channel: ChannelId,
    ) -> Result<String, String> {
        let most = session.rdma.peer_pages.get();
        let more = (PROBE_BYTES_MAX / self.config.page_bytes).clamp(1, 64);
        let mut text = String::new();
        for count in [1, more.min(most)] {
            let mut target = ProbePages {
                ledger: &pages.ledger,
                pages: Vec::new(),
            };
            let into = &mut target.pages;
            let got = pages
                .ledger
                .with(|ledger| ledger.allocate(count, AllocateAs::Pulling, into));
            if got.is_err() {
                // The pool is full of work: the pages of that are a probe, too.
                return Ok("not timed: no page was free".into());
            }
            let began = self.hub.now();
            let into = &target.pages;
            self.probe_read(pages, rdma, session, channel, into).await?;
            let span = self.hub.now().since(began);
            let bytes = count * self.config.page_bytes;
            let rate = bytes as f64 / span.as_secs_f64().max(1e-9) / 1e6;
            text = format!("{bytes} bytes by READ in {span:?}, {rate:.0} MB/s");
        }
        Ok(text)
    }

    async fn probe_read(
        &self,
        pages: &Pages,
        rdma: &NodeRdma,
        session: &Session,
        channel: ChannelId,
        into: &[PageId],
    ) -> Result<(), String> {
        let places: Vec<_> = (0..into.len() as u32)
            .map(|page| Place {
                page,
                generation: 0,
            })
            .collect();
        let known = &session.rdma.places;
        // One that was cut short may have left its places.
        known.forget(PROBE_LEASE);
        let learnt = known.learn(session.rdma.peer_pages.get(), PROBE_LEASE, 0, 0, &places);
        learnt.map_err(|error| error.to_string())?;
        let guards = pages
            .ledger
            .with(|ledger| ledger.guard(into.iter().copied()));
        let deadline = Deadline::after(self.hub.now(), PROBE_LIMIT);
        let wait = match self.hub.begin("peer.rdma_probe", deadline, Some(guards)) {
            Ok(wait) => wait,
            Err(full) => {
                if let Some(guards) = full.guards {
                    pages.ledger.with(|ledger| ledger.release(guards));
                }
                return Err("no completion slot is free".into());
            }
        };
        let work = self
            .hub
            .reserve(wait.slot(), channel, 1)
            .map_err(|error| error.to_string())?;
        let read = Read {
            lease: PROBE_LEASE,
            epoch: 0,
            first: 0,
            into: into.to_vec(),
        };
        let posted = rdma.transport.borrow_mut().post(channel, work, vec![read]);
        if let Err(failed) = posted {
            self.hub.unpost(work, 1, failed.code);
        }
        let ended = wait.await;
        known.forget(PROBE_LEASE);
        ended.map_err(|reason| match reason {
            kvserve_runtime::EndReason::Failed(code) => {
                format!(
                    "the probe failed: {}",
                    crate::transport::code::describe(code)
                )
            }
            other => format!("the probe failed: {}", other.label()),
        })
    }

    /// The answer to one of our asks.
    pub(super) fn on_rdma_answer(
        &self,
        session: &Session,
        serial: u32,
        endpoint: &[u8],
        text: String,
    ) {
        if serial != session.rdma.serial.get() {
            return self.count(|counters| counters.frames_stale += 1);
        }
        let theirs = match endpoint.is_empty() {
            true => Err(format!("the peer refused: {text}")),
            false => Endpoint::decode(endpoint).map_err(|error| error.to_string()),
        };
        if let Ok(theirs) = &theirs {
            session.rdma.peer_pages.set(theirs.pages as usize);
        }
        session.rdma.answer.replace(Some((serial, theirs)));
        session.rdma.answered.ring();
    }

    /// Closes queue pairs that `works` says are over, so that others are made.
    pub(super) fn check_rdma(&self, session: &Session, works: impl Fn(ChannelId) -> bool) {
        let path = &session.rdma;
        let mut lost = Vec::new();
        for pair in path.pairs.borrow_mut().iter_mut() {
            if let Some(channel) = *pair
                && !works(channel)
            {
                lost.push(channel);
                *pair = None;
            }
        }
        if lost.is_empty() {
            return;
        }
        for channel in lost {
            self.hub.close_channel(channel);
            self.count(|counters| counters.rdma_pairs_lost += 1);
        }
        if path.pairs.borrow().iter().all(Option::is_none) && path.phase.get() == RdmaPhase::Open {
            path.phase.set(RdmaPhase::Trying);
        }
        session.path_bell.ring();
    }

    /// RDMA is this session's way no more: TCP for the rest of it, if that is allowed.
    pub(super) fn leave_rdma(&self, session: &Session, reason: &str) {
        self.close_rdma_pulls(session);
        self.count(|counters| counters.path_fallbacks += 1);
        session.fallbacks.set(session.fallbacks.get() + 1);
        let path = match session.tcp_out.get() {
            true => "",
            false => "tcp",
        };
        self.events.path(&session.peer.node_id, path, reason);
        session.path_bell.ring();
        session.pump(self);
    }

    fn close_rdma_pulls(&self, session: &Session) {
        session.rdma.phase.set(RdmaPhase::Off);
        for pair in session.rdma.pairs.borrow_mut().iter_mut() {
            if let Some(channel) = pair.take() {
                self.hub.close_channel(channel);
            }
        }
        session.rdma.answered.ring();
    }

    /// The session is over: what we pull goes down the ladder; what the peer reads over is
    /// destroyed before this returns, so that its leases may end (PROTOCOL S3).
    pub(super) fn close_rdma(&self, session: &Session) {
        self.close_rdma_pulls(session);
        let Some(rdma) = self.rdma() else {
            return;
        };
        for served in session.rdma.served.borrow_mut().iter_mut() {
            if let Some(id) = served.take() {
                rdma.transport.borrow_mut().inner_mut().stop_serving(id);
            }
        }
    }
}

// ---- the side that serves -----------------------------------------------------------------

impl Inner {
    /// A peer asks for a queue pair to read this node's pool over.
    pub(super) fn on_rdma_ask(&self, session: &Session, pair: u8, serial: u32, endpoint: &[u8]) {
        let answer = match self.serve_pair(session, pair, endpoint) {
            Ok(ours) => Frame::RdmaAnswer {
                pair,
                serial,
                endpoint: ours.encode().to_vec(),
                text: String::new(),
            },
            Err(mut text) => {
                while text.len() > REASON_TEXT_BYTES_MAX {
                    text.pop();
                }
                Frame::RdmaAnswer {
                    pair,
                    serial,
                    endpoint: Vec::new(),
                    text,
                }
            }
        };
        session.send(self, &answer);
    }

    fn serve_pair(&self, session: &Session, pair: u8, endpoint: &[u8]) -> Result<Endpoint, String> {
        let Some(rdma) = self.rdma().filter(|_| self.rdma_offered()) else {
            return Err("this node offers no RDMA".into());
        };
        if !session.peer.role.pulls() || pair >= RDMA_PAIRS_MAX {
            return Err(format!("no queue pair {pair} for this peer"));
        }
        let theirs = Endpoint::decode(endpoint).map_err(|error| error.to_string())?;
        let random = entropy::bytes().map_err(|error| error.to_string())?;
        let mut transport = rdma.transport.borrow_mut();
        let transport = transport.inner_mut();
        let mut served = session.rdma.served.borrow_mut();
        let place = &mut served[pair as usize];
        if let Some(older) = place.take() {
            transport.stop_serving(older);
        }
        let made = transport.serve(&theirs, u32::from_le_bytes(random));
        let (id, ours) = made.map_err(|error| error.to_string())?;
        *place = Some(id);
        self.count(|counters| counters.rdma_pairs_served += 1);
        Ok(ours)
    }

    /// Whether peers are told that this node's pool can be read by RDMA.
    pub(super) fn rdma_offered(&self) -> bool {
        self.rdma().is_some() && self.config.role.serves()
    }
}
