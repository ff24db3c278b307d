//! A bed of nodes in one process for the `peer_*` tests: real sockets on loopback, a prefill
//! service that writes known bytes, and a relay that can be cut or frozen.

#![allow(dead_code)] // each test file uses its part

pub mod relay;

use kvserve_kv::checksum::ChecksumMode;
use kvserve_kv::ledger::{AllocateAs, Ledger, LedgerCell};
use kvserve_kv::peer::{
    HandshakeRefusal, IncomingPrefill, Migration, MigrationError, MigrationEvent, PeerConfig,
    PeerEvents, PeerHub, PeerKey, PeerLimits, PeerParts, PeerState, PeerView, PrefillAsk,
    PrefillService, Publisher, Refusal, RefuseReason, Role, TransportChoice,
};
use kvserve_kv::pool::{PageId, PoolMemory};
use kvserve_kv::transport::chaos::ChaosHandle;
use kvserve_kv::transport::rdma::RdmaConfig;
use kvserve_kv::transport::rdma::verbs::Library;
use kvserve_runtime::completion::{Hub, HubLimits};
use kvserve_runtime::shard::poll_loop::PollPolicy;
use kvserve_runtime::{Deadline, Nanos, Shard, ShardConfig};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Not a multiple of the pool's 64-byte stride.
pub const PAGE_BYTES: usize = 20_000;
/// Pages of each node's pool.
pub const POOL_PAGES: usize = 256;

/// Runs a test body on a shard of its own.
pub fn on_shard<F>(body: impl FnOnce(Shard) -> F + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    let config = ShardConfig {
        name: "peer-test".into(),
        core: None,
    };
    let shard = kvserve_runtime::testing::launch(config, body).expect("a shard");
    shard.join().expect("the test body");
}

/// What a node was told of its peers.
#[derive(Default)]
pub struct Log {
    pub ups: RefCell<Vec<PeerView>>,
    pub downs: RefCell<Vec<(String, RefuseReason, bool)>>,
    pub apps: RefCell<Vec<(String, u16, Vec<u8>)>>,
    pub refusals: RefCell<Vec<HandshakeRefusal>>,
    /// Node, path, reason.
    pub paths: RefCell<Vec<(String, &'static str, String)>>,
}

impl PeerEvents for Log {
    fn up(&self, peer: PeerView) {
        self.ups.borrow_mut().push(peer);
    }
    fn down(&self, node_id: &str, reason: RefuseReason, by_peer: bool) {
        self.downs
            .borrow_mut()
            .push((node_id.to_owned(), reason, by_peer));
    }
    fn app(&self, node_id: &str, kind: u16, bytes: &[u8]) {
        self.apps
            .borrow_mut()
            .push((node_id.to_owned(), kind, bytes.to_vec()));
    }
    fn path(&self, node_id: &str, path: &'static str, reason: &str) {
        self.paths
            .borrow_mut()
            .push((node_id.to_owned(), path, reason.to_owned()));
    }
    fn refused(&self, _address: SocketAddr, refusal: &HandshakeRefusal) {
        self.refusals.borrow_mut().push(refusal.clone());
    }
}

/// What the fake service does with a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Serves it: watermarks of so many pages at a time, then first token and complete.
    Serve { step: usize },
    /// Refuses it.
    Refuse(RefusalKind),
    /// Takes it and never grants.
    NeverGrant,
    /// Grants, then nothing.
    StopAfterGrant,
    /// Grants and publishes so many pages and the first token, then nothing.
    StopAfter { pages: usize },
    /// Grants, then drops the publisher.
    DropAfterGrant,
    /// Serves it, but writes over the first page after its checksum is out.
    Spoil,
    /// As `Spoil`, as soon as the checksum is out.
    SpoilEarly,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    Busy,
    Invalid,
    Draining,
}

pub struct FakePrefill {
    pub script: Cell<Script>,
    pub asked: Cell<usize>,
    /// Publishers not dropped yet.
    pub live: Rc<Cell<usize>>,
    shard: Shard,
    pool: Arc<PoolMemory>,
    ledger: Rc<LedgerCell>,
}

impl PrefillService for FakePrefill {
    fn prefill(&self, ask: IncomingPrefill, publisher: Publisher) -> Result<(), Refusal> {
        self.asked.set(self.asked.get() + 1);
        let script = self.script.get();
        if let Script::Refuse(kind) = script {
            return Err(match kind {
                RefusalKind::Busy => Refusal::Busy { retry_ms: 7 },
                RefusalKind::Invalid => Refusal::Invalid(42),
                RefusalKind::Draining => Refusal::Draining,
            });
        }
        let mut pages = Vec::new();
        if script != Script::NeverGrant {
            let wanted = ask.prompt.len();
            let reserved = self
                .ledger
                .with(|ledger| ledger.allocate(wanted, AllocateAs::Building, &mut pages));
            if reserved.is_err() {
                return Err(Refusal::Busy { retry_ms: 5 });
            }
            publisher.granted(pages.clone()).expect("just asked");
        }
        let (shard, pool, live) = (self.shard.clone(), self.pool.clone(), self.live.clone());
        live.set(live.get() + 1);
        self.shard
            .spawn(async move {
                serve(&shard, &pool, script, ask, pages, publisher).await;
                live.set(live.get() - 1);
            })
            .detach();
        Ok(())
    }
}

async fn serve(
    shard: &Shard,
    pool: &PoolMemory,
    script: Script,
    ask: IncomingPrefill,
    pages: Vec<PageId>,
    publisher: Publisher,
) {
    let (step, stop_at) = match script {
        Script::Serve { step } => (step, usize::MAX),
        Script::Spoil => (1, usize::MAX),
        Script::SpoilEarly => {
            write_page(pool, pages[0], ask.prompt[0]);
            publisher.watermark(1);
            // The hashing task's turn, and no more.
            shard.yield_now().await;
            shard.yield_now().await;
            write_page(pool, pages[0], 0xDEAD);
            for (page, token) in pages.iter().zip(&ask.prompt).skip(1) {
                write_page(pool, *page, *token);
            }
            shard.sleep(Duration::from_millis(5)).await;
            publisher.first_token(ask.prompt[0].to_le_bytes().to_vec());
            return publisher.complete(pages.len(), 3);
        }
        Script::StopAfter { pages } => (1, pages),
        Script::DropAfterGrant => return,
        Script::NeverGrant | Script::StopAfterGrant | Script::Refuse(_) => {
            return publisher.cancelled().await;
        }
    };
    let mut ready = 0;
    while ready < pages.len() && ready < stop_at && !publisher.is_cancelled() {
        let upto = (ready + step).min(pages.len()).min(stop_at);
        for (at, page) in pages.iter().enumerate().take(upto).skip(ready) {
            write_page(pool, *page, ask.prompt[at]);
        }
        ready = upto;
        if ready < pages.len() {
            publisher.watermark(ready);
            shard.sleep(Duration::from_millis(1)).await;
        }
    }
    if script == Script::Spoil {
        write_page(pool, pages[0], 0xDEAD);
    }
    publisher.first_token(ask.prompt[0].to_le_bytes().to_vec());
    if stop_at != usize::MAX {
        return publisher.cancelled().await;
    }
    if !publisher.is_cancelled() {
        publisher.complete(pages.len(), 3);
    }
}

/// One prompt token a page; the page's bytes follow from the token.
fn page_byte(token: u32, at: usize) -> u8 {
    (token as usize)
        .wrapping_mul(31)
        .wrapping_add(at.wrapping_mul(7) + at / 256) as u8
}

fn write_page(pool: &PoolMemory, page: PageId, token: u32) {
    let address = pool.page(page);
    for at in 0..PAGE_BYTES {
        // SAFETY: the page is the test's, `at` lies inside it, and all runs on one thread.
        unsafe { address.add(at).write(page_byte(token, at)) };
    }
}

pub fn page_is(pool: &PoolMemory, page: PageId, token: u32) -> bool {
    let address = pool.page(page);
    (0..PAGE_BYTES).all(|at| {
        // SAFETY: as in `write_page`.
        unsafe { address.add(at).read() == page_byte(token, at) }
    })
}

pub struct Node {
    pub shard: Shard,
    pub hub: Hub,
    pub peers: PeerHub,
    pub pool: Arc<PoolMemory>,
    pub ledger: Rc<LedgerCell>,
    pub log: Rc<Log>,
    pub service: Rc<FakePrefill>,
    pub chaos: ChaosHandle,
    pub node_id: String,
}

pub fn config(node_id: &str, role: Role) -> PeerConfig {
    let start: u64 = 1_000_000;
    PeerConfig {
        node_id: node_id.into(),
        incarnation: start + node_id.bytes().map(u64::from).sum::<u64>(),
        role,
        key: PeerKey::new([3; 32]),
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        fingerprint: 11,
        layout_hash: 22,
        page_bytes: PAGE_BYTES,
        api_url: format!("http://{node_id}"),
        checksums: ChecksumMode::Full,
        transport: transport_of_the_run(),
        rdma: RdmaConfig::default(),
        limits: PeerLimits::default(),
    }
}

/// Every story here is told over TCP, and over shared memory when the environment says so:
/// `KVSERVE_TEST_TRANSPORT=auto cargo test -p kvserve-kv`.
fn transport_of_the_run() -> TransportChoice {
    match std::env::var("KVSERVE_TEST_TRANSPORT").as_deref() {
        Ok("auto") => TransportChoice::Auto,
        _ => TransportChoice::Tcp,
    }
}

impl Node {
    pub fn start(shard: &Shard, node_id: &str, role: Role) -> Node {
        Node::with(shard, config(node_id, role))
    }

    pub fn with(shard: &Shard, config: PeerConfig) -> Node {
        Node::with_verbs(shard, config, None)
    }

    pub fn with_verbs(shard: &Shard, config: PeerConfig, verbs: Option<Library>) -> Node {
        let pool = Arc::new(PoolMemory::memfd(POOL_PAGES, PAGE_BYTES).expect("a pool"));
        let ledger = Rc::new(LedgerCell::new(Ledger::of_pool(pool.clone())));
        let hub = Hub::new(HubLimits::default(), ledger.clone());
        shard
            .spawn(hub.clone().run(shard.clone(), PollPolicy::Adaptive))
            .detach();
        let log = Rc::new(Log::default());
        let chaos = ChaosHandle::off();
        let service = Rc::new(FakePrefill {
            script: Cell::new(Script::Serve { step: 3 }),
            asked: Cell::new(0),
            live: Rc::default(),
            shard: shard.clone(),
            pool: pool.clone(),
            ledger: ledger.clone(),
        });
        let serves = config.role.serves();
        let has_pages = config.role.has_pages();
        let node_id = config.node_id.clone();
        let parts = PeerParts {
            pool: has_pages.then(|| pool.clone()),
            ledger: has_pages.then(|| ledger.clone()),
            prefill: serves.then(|| service.clone() as Rc<dyn PrefillService>),
            verbs,
            chaos: Some(chaos.clone()),
            events: log.clone(),
        };
        let peers = PeerHub::start(shard, &hub, config, parts).expect("a peer hub");
        Node {
            shard: shard.clone(),
            hub,
            peers,
            pool,
            ledger,
            log,
            service,
            chaos,
            node_id,
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.peers.local_addr().expect("listens")
    }

    pub fn sees(&self, node_id: &str, wanted: PeerState) -> bool {
        let peers = self.peers.peers();
        peers
            .iter()
            .any(|peer| peer.node_id == node_id && peer.state == wanted)
    }

    pub fn can_pull_from(&self, node_id: &str) -> bool {
        let peers = self.peers.peers();
        peers
            .iter()
            .any(|peer| peer.node_id == node_id && peer.can_pull)
    }

    /// Takes target pages for a pull.
    pub fn targets(&self, count: usize) -> Vec<PageId> {
        let mut pages = Vec::new();
        self.ledger
            .with(|ledger| ledger.allocate(count, AllocateAs::Pulling, &mut pages))
            .expect("free pages");
        pages
    }

    /// Asks `peer` for a prompt of one page per token.
    pub fn ask(&self, peer: &str, prompt: &[u32], left: Duration) -> Migration {
        let ask = PrefillAsk {
            request: self.peers.next_request_id(),
            attempt: 1,
            held_pages: 0,
            prompt: prompt.to_vec(),
            payload: vec![1, 2, 3],
            into: self.targets(prompt.len()),
            deadline: Deadline::after(Nanos::now(), left),
        };
        match self.peers.prefill(peer, ask) {
            Ok(migration) => migration,
            Err(error) => panic!("{}", error.error),
        }
    }

    /// Checks pulled pages, then gives them back.
    pub fn take(&self, pages: &[PageId], prompt: &[u32]) {
        assert_eq!(pages.len(), prompt.len());
        for (page, token) in pages.iter().zip(prompt) {
            assert!(page_is(&self.pool, *page, *token), "other bytes than sent");
        }
        self.ledger.with(|ledger| {
            ledger.commit(pages).expect("pulled pages");
            ledger.free(pages);
        });
    }

    pub fn free_pages(&self) -> usize {
        self.ledger.with(|ledger| {
            ledger.assert_consistent();
            ledger.free_pages()
        })
    }

    /// Nothing is under way here and all pages but the quarantined are free.
    pub fn is_at_rest(&self) -> bool {
        let quarantined = self.ledger.with(|ledger| ledger.counts().quarantined);
        self.peers.attempts().is_empty()
            && self.peers.leases().is_empty()
            && self.service.live.get() == 0
            && self.free_pages() + quarantined == POOL_PAGES
            && self.ledger.with(|ledger| ledger.guards_live()) == 0
    }
}

/// Waits until `done`, at most `limit`.
pub async fn until(shard: &Shard, limit: Duration, what: &str, done: impl Fn() -> bool) {
    let start = Nanos::now();
    while !done() {
        assert!(
            Nanos::now().since(start) < limit,
            "{what}: not within {limit:?}"
        );
        shard.sleep(Duration::from_millis(1)).await;
    }
}

pub const SOON: Duration = Duration::from_secs(5);

/// A decode node `d` that can pull from a prefill node `p`, dialled at `address` or directly.
pub async fn pair(shard: &Shard) -> (Node, Node) {
    let p = Node::start(shard, "p", Role::Prefill);
    let d = Node::start(shard, "d", Role::Decode);
    d.peers.dial(p.addr());
    until(shard, SOON, "the pair comes up", || d.can_pull_from("p")).await;
    (d, p)
}

pub async fn at_rest(shard: &Shard, nodes: &[&Node], limit: Duration) {
    until(shard, limit, "all books restored", || {
        nodes.iter().all(|node| node.is_at_rest())
    })
    .await;
}

pub fn prompt(count: u32) -> Vec<u32> {
    (0..count).map(|at| at * 5 + 1).collect()
}

/// How a migration went.
#[derive(Debug, Default)]
pub struct Story {
    pub granted: bool,
    pub first_token: Option<Vec<u8>>,
    pub placed: bool,
    pub committed: Option<Vec<PageId>>,
    pub failed: Option<MigrationError>,
}

/// Follows a migration to its end.
pub async fn follow(migration: &mut Migration) -> Story {
    let mut story = Story::default();
    loop {
        match migration.next().await {
            MigrationEvent::Granted => story.granted = true,
            MigrationEvent::FirstToken(bytes) => story.first_token = Some(bytes),
            MigrationEvent::Placed => story.placed = true,
            MigrationEvent::Committed { pages } => {
                story.committed = Some(pages);
                return story;
            }
            MigrationEvent::Failed(error) => {
                story.failed = Some(error);
                return story;
            }
        }
    }
}

/// A whole migration that must work, and the pages given back.
pub async fn migrate(d: &Node, peer: &str, prompt: &[u32]) {
    let mut migration = d.ask(peer, prompt, Duration::from_secs(20));
    let story = follow(&mut migration).await;
    let pages = story
        .committed
        .unwrap_or_else(|| panic!("{:?}", story.failed));
    assert!(story.granted && story.placed);
    assert_eq!(story.first_token, Some(prompt[0].to_le_bytes().to_vec()));
    d.take(&pages, prompt);
}

pub fn stop(nodes: &[&Node]) {
    for node in nodes {
        node.peers.stop();
        node.hub.stop();
    }
}

/// Why a hub does not start.
pub fn start_refused(shard: &Shard, config: PeerConfig, verbs: Library) -> String {
    let pool = Arc::new(PoolMemory::memfd(POOL_PAGES, PAGE_BYTES).expect("a pool"));
    let ledger = Rc::new(LedgerCell::new(Ledger::of_pool(pool.clone())));
    let hub = Hub::new(HubLimits::default(), ledger.clone());
    let parts = PeerParts {
        pool: Some(pool),
        ledger: Some(ledger),
        prefill: None,
        verbs: Some(verbs),
        chaos: None,
        events: Rc::new(Log::default()),
    };
    let started = PeerHub::start(shard, &hub, config, parts);
    started.err().expect("a refusal").to_string()
}
