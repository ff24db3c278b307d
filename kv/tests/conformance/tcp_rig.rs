//! The TCP transport over real loopback sockets, with a plain lease table on a real ledger.

use super::{Lease, REFUSED, Rig, Shape};
use kvserve_kv::ledger::{AllocateAs, Ledger, LedgerCell};
use kvserve_kv::transport::Transport;
use kvserve_kv::transport::tcp::{
    ConnectionId, ReadAuthority, ServerConfig, TcpConfig, TcpReadServer, TcpTransport,
};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::completion::GuardKeeper;
use kvserve_runtime::{ChannelId, ChannelKind, CompletionSource, GuardToken, Nanos};
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The incarnation of the peer.
pub const INCARNATION: u64 = 0xABCD;

/// The peer's leases; its guards are names in a real ledger.
pub struct Leases {
    pub ledger: Rc<LedgerCell>,
    leases: HashMap<u64, (u32, Vec<PageId>)>,
    pub closed: Vec<ConnectionId>,
}

impl Leases {
    pub fn new(pages: usize) -> Self {
        let mut ledger = Ledger::new(pages);
        // All pages of the peer hold something; which of them a lease names is the test's.
        let mut all = Vec::new();
        ledger
            .allocate(pages, AllocateAs::Building, &mut all)
            .unwrap();
        ledger.lease(&all).unwrap();
        Leases {
            ledger: Rc::new(LedgerCell::new(ledger)),
            leases: HashMap::new(),
            closed: Vec::new(),
        }
    }

    pub fn grant(&mut self, pages: &[PageId]) -> Lease {
        let id = 100 + self.leases.len() as u64;
        self.leases.insert(id, (1, pages.to_vec()));
        Lease { id, epoch: 1 }
    }

    pub fn guards(&self) -> usize {
        self.ledger.with(|ledger| ledger.guards_live())
    }
}

impl ReadAuthority for Leases {
    fn resolve(
        &mut self,
        _connection: ConnectionId,
        incarnation: u64,
        lease: u64,
        epoch: u32,
        first: u32,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<GuardToken, u32> {
        let (live, pages) = self.leases.get(&lease).ok_or(REFUSED)?;
        let end = first.checked_add(count).ok_or(REFUSED)?;
        let run = pages.get(first as usize..end as usize).ok_or(REFUSED)?;
        if incarnation != INCARNATION || *live != epoch {
            return Err(REFUSED);
        }
        out.extend_from_slice(run);
        Ok(self.ledger.with(|ledger| ledger.guard(run.iter().copied())))
    }

    fn served(&mut self, guards: GuardToken) {
        self.ledger.release(guards);
    }

    fn closed(&mut self, connection: ConnectionId) {
        self.closed.push(connection);
    }
}

pub struct TcpRig {
    pub transport: TcpTransport,
    pub peer: Option<TcpReadServer>,
    pub leases: Rc<RefCell<Leases>>,
    source: Arc<PoolMemory>,
    target: Arc<PoolMemory>,
}

pub fn socket_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    (near, far)
}

impl TcpRig {
    pub fn with_limits(shape: Shape, still_max: Duration, write_stall_max: Duration) -> Self {
        // A short send buffer makes for short turns. A short receive buffer would too, but then
        // TCP waits with timers of 40 to 200 ms for its window to open.
        let buffer_bytes = if shape.narrow { 16 << 10 } else { 0 };
        let source = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        let target = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        let leases = Rc::new(RefCell::new(Leases::new(shape.pages)));
        let transport = TcpTransport::new(
            target.clone(),
            shape.page_bytes,
            TcpConfig {
                buffer_bytes: 0,
                still_max,
            },
        )
        .unwrap();
        let peer = TcpReadServer::new(
            source.clone(),
            shape.page_bytes,
            leases.clone(),
            ServerConfig {
                buffer_bytes,
                write_stall_max,
            },
        )
        .unwrap();
        TcpRig {
            transport,
            peer: Some(peer),
            leases,
            source,
            target,
        }
    }

    pub fn peer(&mut self) -> &mut TcpReadServer {
        self.peer.as_mut().expect("the peer lives")
    }
}

impl Rig for TcpRig {
    fn new(shape: Shape) -> Self {
        // A test host may stand still for longer than E3's 20 ms; what those mean has its test.
        let long = Duration::from_secs(60);
        TcpRig::with_limits(shape, long, long)
    }

    fn transport(&mut self) -> &mut dyn Transport {
        &mut self.transport
    }

    fn connect(&mut self, index: u16) -> ChannelId {
        let channel = ChannelId {
            kind: ChannelKind::Tcp,
            index,
        };
        let (near, far) = socket_pair();
        self.transport
            .add_channel(channel, near, INCARNATION)
            .unwrap();
        self.peer().add_connection(far).unwrap();
        channel
    }

    fn grant(&mut self, pages: &[PageId]) -> Lease {
        self.leases.borrow_mut().grant(pages)
    }

    fn serve(&mut self) {
        if let Some(peer) = &mut self.peer {
            let count = peer.poll(Nanos::now(), &mut Vec::new());
            assert_eq!(count, 0);
        }
    }

    fn kill_peer(&mut self) {
        self.peer = None;
    }

    fn peer_guards(&self) -> usize {
        self.leases.borrow().guards()
    }

    fn source(&self) -> &Arc<PoolMemory> {
        &self.source
    }

    fn target(&self) -> &Arc<PoolMemory> {
        &self.target
    }

    fn pages_per_read_max(&self) -> usize {
        self.transport.pages_per_read_max()
    }
}
