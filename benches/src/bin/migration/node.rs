//! What both sides have: a pool, its ledger, a completion hub, a peer hub.

use super::Args;
use kvserve_kv::ledger::{AllocateAs, Ledger, LedgerCell};
use kvserve_kv::peer::{
    HandshakeRefusal, PeerConfig, PeerEvents, PeerHub, PeerKey, PeerLimits, PeerParts, PeerView,
    PrefillService, RefuseReason, Role,
};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::Shard;
use kvserve_runtime::completion::{Hub, HubLimits};
use kvserve_runtime::shard::poll_loop::PollPolicy;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Pages of each pool, in pulls.
const PULLS: usize = 16;

pub struct Node {
    pub peers: PeerHub,
    pub pool: Arc<PoolMemory>,
    pub ledger: Rc<LedgerCell>,
}

impl Node {
    /// Starts a node on this shard; `service` is made from its pool and ledger.
    pub fn start(
        shard: &Shard,
        args: &Args,
        role: Role,
        service: impl FnOnce(&Arc<PoolMemory>, &Rc<LedgerCell>) -> Option<Rc<dyn PrefillService>>,
    ) -> Node {
        let pool = PoolMemory::memfd(args.pages * PULLS, args.page_bytes).expect("a pool");
        for page in 0..pool.pages() as u32 {
            // SAFETY: inside the page; nobody else has the pool yet.
            unsafe {
                std::ptr::write_bytes(pool.page(PageId(page)), page as u8 ^ 0x5A, args.page_bytes)
            };
        }
        let pool = Arc::new(pool);
        let ledger = Rc::new(LedgerCell::new(Ledger::of_pool(pool.clone())));
        let hub = Hub::new(HubLimits::default(), ledger.clone());
        shard
            .spawn(hub.clone().run(shard.clone(), PollPolicy::Adaptive))
            .detach();
        let serves = role.serves();
        let parts = PeerParts {
            pool: Some(pool.clone()),
            ledger: Some(ledger.clone()),
            prefill: service(&pool, &ledger),
            verbs: None,
            chaos: None,
            events: Rc::new(Loud),
        };
        let config = PeerConfig {
            node_id: if serves { "p" } else { "d" }.into(),
            incarnation: if serves { 2 } else { 1 },
            role,
            key: PeerKey::new([7; 32]),
            listen: serves.then(|| SocketAddr::from(([127, 0, 0, 1], 0))),
            fingerprint: 1,
            layout_hash: 1,
            page_bytes: args.page_bytes,
            api_url: String::new(),
            checksums: args.checksums,
            transport: args.path,
            rdma: Default::default(),
            limits: PeerLimits::default(),
        };
        let peers = PeerHub::start(shard, &hub, config, parts).expect("a peer hub");
        Node {
            peers,
            pool,
            ledger,
        }
    }

    /// Free pages, in the given state.
    pub fn pages(&self, count: usize, state: AllocateAs) -> Vec<PageId> {
        let mut pages = Vec::new();
        self.ledger
            .with(|ledger| ledger.allocate(count, state, &mut pages))
            .expect("free pages");
        pages
    }
}

/// Says what must not happen in a bench.
struct Loud;

impl PeerEvents for Loud {
    fn up(&self, _peer: PeerView) {}

    fn down(&self, node_id: &str, reason: RefuseReason, _by_peer: bool) {
        eprintln!("session with {node_id} is down: {reason:?}");
    }

    fn app(&self, _node_id: &str, _kind: u16, _bytes: &[u8]) {}

    fn refused(&self, address: SocketAddr, refusal: &HandshakeRefusal) {
        eprintln!("handshake with {address} refused: {refusal:?}");
    }
}
