//! The RDMA transport on both ends of a wire: the fake one of `fake-verbs`, or with
//! `KVSERVE_TEST_VERBS=system` the two soft-RoCE devices of `tools/rdma-vm`.

use super::{Lease, PATIENCE, Rig, Shape};
use fake_verbs::Wire;
use kvserve_kv::transport::rdma::verbs::{Access, Library};
use kvserve_kv::transport::rdma::{
    Opening, PeerPlaces, RdmaConfig, RdmaError, RdmaTransport, ServedId,
};
use kvserve_kv::transport::shm::Place;
use kvserve_kv::transport::{Transport, code};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{ChannelId, ChannelKind, CompletionSource, Nanos, Reap};
use std::sync::Arc;
use std::time::Instant;

/// Whether the tests run on the system's library: in the VM.
pub fn on_system_verbs() -> bool {
    match std::env::var("KVSERVE_TEST_VERBS").as_deref() {
        Ok("system") => true,
        Ok(other) => panic!("KVSERVE_TEST_VERBS={other}: only \"system\" is known"),
        Err(_) => false,
    }
}

/// The VM's devices: ours, and the peer's.
pub const SYSTEM_DEVICES: [&str; 2] = ["rxe1", "rxe0"];

/// What both ends stand on.
pub struct Fabric {
    /// The fake wire, unless on the system's library.
    pub wire: Option<Wire>,
    pub library: Library,
    pub near: String,
    pub far: String,
}

impl Fabric {
    pub fn new() -> Self {
        if on_system_verbs() {
            let [near, far] = SYSTEM_DEVICES.map(String::from);
            return Fabric {
                wire: None,
                library: Library::system().unwrap(),
                near,
                far,
            };
        }
        let wire = Wire::new();
        Fabric {
            library: Library::of(fake_verbs::verbs()),
            near: wire.near().to_owned(),
            far: wire.far().to_owned(),
            wire: Some(wire),
        }
    }

    /// The fake wire; a test that needs it says first that it does not run on the system's.
    pub fn wire(&self) -> &Wire {
        self.wire.as_ref().expect("a test of the fake wire")
    }
}

pub struct RdmaRig {
    // Before the fabric, so that queue pairs end first.
    pub transport: RdmaTransport,
    pub peer: Option<RdmaTransport>,
    pub served: Vec<ServedId>,
    pub channels: Vec<ChannelId>,
    leases: Vec<(u64, Vec<Place>)>,
    source: Arc<PoolMemory>,
    target: Arc<PoolMemory>,
    page_bytes: usize,
    psn: u32,
    pub fabric: Fabric,
}

/// Settings of tests: several channels on a short queue, so that its credit matters.
pub fn test_config() -> RdmaConfig {
    RdmaConfig {
        queue_depth: 32,
        signal_every: 8,
        scatter_max: 8,
        completions: 1024,
        ..RdmaConfig::default()
    }
}

pub fn open(
    fabric: &Fabric,
    device: &str,
    pool: &Arc<PoolMemory>,
    page_bytes: usize,
    access: Access,
    config: &RdmaConfig,
) -> Result<RdmaTransport, RdmaError> {
    let opening = Opening {
        pool,
        page_bytes,
        access,
        address: None,
    };
    let config = RdmaConfig {
        device: Some(device.to_owned()),
        ..config.clone()
    };
    RdmaTransport::open(&fabric.library, opening, config)
}

const SERVES: Access = Access {
    serves: true,
    lands: false,
};

const LANDS: Access = Access {
    serves: false,
    lands: true,
};

impl RdmaRig {
    pub fn with(shape: Shape, config: RdmaConfig) -> Self {
        let fabric = Fabric::new();
        if let Some(wire) = &fabric.wire {
            // Narrow: a request moves when the peer is served, so that a case meets each
            // half-way point.
            wire.by_hand(shape.narrow);
        }
        let source = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        let target = Arc::new(PoolMemory::memfd(shape.pages, shape.page_bytes).unwrap());
        let near = open(
            &fabric,
            &fabric.near,
            &target,
            shape.page_bytes,
            LANDS,
            &config,
        );
        let far = open(
            &fabric,
            &fabric.far,
            &source,
            shape.page_bytes,
            SERVES,
            &config,
        );
        RdmaRig {
            transport: near.unwrap_or_else(|error| panic!("{error}")),
            peer: Some(far.unwrap_or_else(|error| panic!("{error}"))),
            served: Vec::new(),
            channels: Vec::new(),
            leases: Vec::new(),
            source,
            target,
            page_bytes: shape.page_bytes,
            psn: 1,
            fabric,
        }
    }

    pub fn wire(&self) -> &Wire {
        self.fabric.wire()
    }

    /// A fresh process at the far end, with the same pool.
    pub fn peer_starts_again(&mut self) {
        let config = test_config();
        let far = open(
            &self.fabric,
            &self.fabric.far,
            &self.source,
            self.page_bytes,
            SERVES,
            &config,
        );
        self.peer = Some(far.unwrap_or_else(|error| panic!("{error}")));
        if let Some(wire) = &self.fabric.wire {
            wire.revive();
        }
    }

    pub fn try_connect(&mut self, index: u16) -> Result<ChannelId, RdmaError> {
        let channel = ChannelId {
            kind: ChannelKind::Rdma,
            index,
        };
        self.psn += 77;
        let prepared = self.transport.prepare(self.psn)?;
        let peer = self.peer.as_mut().expect("the peer lives");
        let (id, theirs) = peer.serve(prepared.endpoint(), self.psn * 3)?;
        self.served.push(id);
        self.transport
            .connect(channel, prepared, &theirs, &PeerPlaces::default())?;
        for (lease, places) in &self.leases {
            let learnt = self.transport.learn_lease(channel, *lease, 1, 0, places);
            learnt.unwrap();
        }
        self.channels.push(channel);
        Ok(channel)
    }

    /// Polls until the killed channel is quiet or stuck.
    pub fn reaped(&mut self, channel: ChannelId) -> Reap {
        let begun = Instant::now();
        loop {
            match self.transport.reap(channel) {
                Reap::Draining(_) => {}
                end => return end,
            }
            assert!(begun.elapsed() < PATIENCE, "it drains for ever");
            let told = self.transport.poll(Nanos::now(), &mut Vec::new());
            assert_eq!(told, 0, "nothing is told of a killed channel");
            std::thread::yield_now();
        }
    }
}

impl Rig for RdmaRig {
    const REFUSED: u32 = code::NO_PLACE;
    const QUIET_AT_ONCE: bool = false;

    /// Real cards (and soft ones) go on by themselves.
    fn stands_still(&self) -> bool {
        self.fabric.wire.is_some()
    }

    fn new(shape: Shape) -> Self {
        RdmaRig::with(shape, test_config())
    }

    fn transport(&mut self) -> &mut dyn Transport {
        &mut self.transport
    }

    fn connect(&mut self, index: u16) -> ChannelId {
        self.try_connect(index)
            .unwrap_or_else(|error| panic!("{error}"))
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

    /// Reads are one-sided; by hand, one request moves.
    fn serve(&mut self) {
        match &self.fabric.wire {
            Some(wire) => wire.step(1),
            // One processor: the kernel's side needs it.
            None => std::thread::yield_now(),
        }
    }

    fn kill_peer(&mut self) {
        self.peer = None;
        if let Some(wire) = &self.fabric.wire {
            wire.kill();
        }
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
