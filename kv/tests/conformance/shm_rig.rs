//! The shared-memory transport on a real pool of a peer, whose only other part is a socket that
//! ends with it.

use super::{Lease, Rig, Shape};
use kvserve_kv::transport::shm::{ExpectedPool, Place, SharedPool, ShmConfig, ShmTransport};
use kvserve_kv::transport::{Transport, code};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{ChannelId, ChannelKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

pub struct ShmRig {
    pub transport: ShmTransport,
    /// The peer's ends of the channels.
    pub peer: Vec<UnixStream>,
    pub channels: Vec<ChannelId>,
    leases: Vec<(u64, Vec<Place>)>,
    source: Arc<PoolMemory>,
    target: Arc<PoolMemory>,
    page_bytes: usize,
}

pub fn descriptor_of(pool: &PoolMemory) -> OwnedFd {
    let fd = pool.memfd_raw().unwrap();
    // SAFETY: the pool holds the descriptor open during this call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    fd.try_clone_to_owned().unwrap()
}

pub fn map(pool: &PoolMemory, page_bytes: usize) -> SharedPool {
    let expected = ExpectedPool {
        nonce: pool.nonce(),
        page_bytes,
        // SAFETY: it only reads.
        uid: unsafe { libc::geteuid() },
    };
    SharedPool::map(descriptor_of(pool), &expected).unwrap()
}

impl ShmRig {
    pub fn with(shape: Shape, config: ShmConfig) -> Self {
        let source = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        let target = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        ShmRig {
            transport: ShmTransport::new(target.clone(), shape.page_bytes, config).unwrap(),
            peer: Vec::new(),
            channels: Vec::new(),
            leases: Vec::new(),
            source,
            target,
            page_bytes: shape.page_bytes,
        }
    }
}

impl Rig for ShmRig {
    const REFUSED: u32 = code::NO_PLACE;

    fn new(shape: Shape) -> Self {
        let mut config = ShmConfig::default();
        if shape.narrow {
            // A block a turn: a case meets copies in the middle of a page.
            config.turn_bytes = 1024;
        }
        ShmRig::with(shape, config)
    }

    fn transport(&mut self) -> &mut dyn Transport {
        &mut self.transport
    }

    fn connect(&mut self, index: u16) -> ChannelId {
        let channel = ChannelId {
            kind: ChannelKind::SharedMemory,
            index,
        };
        let (near, far) = UnixStream::pair().unwrap();
        let shared = map(&self.source, self.page_bytes);
        self.transport.add_channel(channel, near, shared).unwrap();
        for (lease, places) in &self.leases {
            let learnt = self.transport.learn_lease(channel, *lease, 1, 0, places);
            learnt.unwrap();
        }
        self.peer.push(far);
        self.channels.push(channel);
        channel
    }

    fn grant(&mut self, pages: &[PageId]) -> Lease {
        let id = 100 + self.leases.len() as u64;
        let place = |page: &PageId| Place {
            page: page.0,
            generation: self.source.generation(*page),
        };
        let places: Vec<_> = pages.iter().map(place).collect();
        for channel in &self.channels {
            // Some are killed by now.
            let _learnt = self.transport.learn_lease(*channel, id, 1, 0, &places);
        }
        self.leases.push((id, places));
        Lease { id, epoch: 1 }
    }

    /// Reads are one-sided.
    fn serve(&mut self) {}

    fn kill_peer(&mut self) {
        self.peer.clear();
    }

    fn peer_guards(&self) -> usize {
        0
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
