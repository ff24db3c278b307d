//! Our transports, driven as the hub of a shard drives them.

use super::child::{Serves, Setup};
use super::measure::Way;
use super::wait::Waiter;
use kvserve_kv::checksum::page_checksum;
use kvserve_kv::copy::Stores;
use kvserve_kv::transport::shm::{ExpectedPool, Place, SharedPool, ShmConfig, ShmTransport};
use kvserve_kv::transport::tcp::{TcpConfig, TcpTransport};
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{ChecksumMode, PageId};
use kvserve_runtime::{ChannelId, ChannelKind, Completed, CompletionStatus, Nanos, WorkId};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

const LEASE: u64 = 1;
const EPOCH: u32 = 1;

/// One channel to the child.
pub struct Pull<'a, T: Transport> {
    name: &'static str,
    floor: &'static str,
    needs: Serves,
    setup: &'a Setup,
    transport: T,
    channel: ChannelId,
    pages_per_read: usize,
    checksums: ChecksumMode,
    landed: fn(&T, PageId) -> Option<u64>,
    position: u64,
    told: Vec<Completed>,
    waiter: Waiter,
    /// The end of the channel's socket that the peer would have.
    _far: Option<UnixStream>,
}

/// Pulls by shared memory.
pub fn shm(setup: &Setup, checksums: ChecksumMode, spin: Duration) -> Pull<'_, ShmTransport> {
    let size = setup.size;
    let config = ShmConfig {
        checksums,
        stores: Stores::Streaming,
        ..ShmConfig::default()
    };
    let mut transport =
        ShmTransport::new(setup.target.clone(), size.page_bytes, config).expect("descriptors");
    let expected = ExpectedPool {
        nonce: setup.told.nonce,
        page_bytes: size.page_bytes,
        // SAFETY: it only reads.
        uid: unsafe { libc::geteuid() },
    };
    let shared = SharedPool::map(OwnedFd::from(setup.pool_file()), &expected);
    let channel = ChannelId {
        kind: ChannelKind::SharedMemory,
        index: 0,
    };
    let (near, far) = UnixStream::pair().expect("sockets");
    transport
        .add_channel(channel, near, shared.expect("the child's pool"))
        .expect("a channel");
    let places = setup.places.iter().map(|page| Place {
        page: *page,
        generation: 0,
    });
    let places: Vec<_> = places.collect();
    transport
        .learn_lease(channel, LEASE, EPOCH, 0, &places)
        .expect("places");
    Pull {
        name: "shm",
        floor: "memcpy",
        needs: Serves::Nothing,
        setup,
        pages_per_read: transport.pages_per_read_max(),
        transport,
        channel,
        checksums,
        landed: |transport, page| transport.landed_sum(page),
        position: 0,
        told: Vec::new(),
        waiter: Waiter::new(spin),
        _far: Some(far),
    }
}

/// Pulls by TCP.
pub fn tcp(setup: &Setup, checksums: ChecksumMode, spin: Duration) -> Pull<'_, TcpTransport> {
    let mut transport = TcpTransport::new(
        setup.target.clone(),
        setup.size.page_bytes,
        TcpConfig {
            buffer_bytes: setup.buffer_bytes,
            ..TcpConfig::default()
        },
    )
    .expect("descriptors");
    let channel = ChannelId {
        kind: ChannelKind::Tcp,
        index: 0,
    };
    transport
        .add_channel(channel, setup.connect(Serves::Reads), 7)
        .expect("a channel");
    Pull {
        name: "tcp",
        floor: "writev/readv",
        needs: Serves::Reads,
        setup,
        pages_per_read: transport.pages_per_read_max(),
        transport,
        channel,
        checksums,
        landed: |_, _| None,
        position: 0,
        told: Vec::new(),
        waiter: Waiter::new(spin),
        _far: None,
    }
}

impl<T: Transport> Pull<'_, T> {
    fn reads(&self, first: u32, into: &[PageId]) -> Vec<Read> {
        let runs = into.chunks(self.pages_per_read).enumerate();
        runs.map(|(run, into)| Read {
            lease: LEASE,
            epoch: EPOCH,
            first: first + (run * self.pages_per_read) as u32,
            into: into.to_vec(),
        })
        .collect()
    }

    /// One turn of the poll loop: looks, and sleeps only after it has armed and looked again.
    fn turn(&mut self) {
        if self.poll() || self.waiter.spins() {
            return;
        }
        let descriptor = self.transport.arm();
        if self.poll() {
            return;
        }
        if let Some(descriptor) = descriptor {
            self.waiter.sleep(&[(descriptor, libc::POLLIN)]);
        }
    }

    fn poll(&mut self) -> bool {
        let completed = self.transport.poll(Nanos::now(), &mut self.told) > 0;
        if completed {
            self.waiter.completed();
        }
        completed
    }
}

impl<T: Transport> Way for Pull<'_, T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn floor(&self) -> Option<&'static str> {
        Some(self.floor)
    }

    fn checksums(&self) -> ChecksumMode {
        self.checksums
    }

    fn needs(&self) -> Serves {
        self.needs
    }

    fn pull(&mut self, first: u32, into: &[PageId]) {
        let reads = self.reads(first, into);
        let count = reads.len();
        let work = WorkId::new(self.channel, self.position);
        self.position += count as u64;
        self.told.clear();
        let posted = self.transport.post(self.channel, work, reads);
        assert_eq!(posted, Ok(()), "a full channel");
        while self.told.len() < count {
            self.turn();
        }
        for completed in &self.told {
            assert_eq!(completed.status, CompletionStatus::Success);
        }
        if self.checksums == ChecksumMode::Off {
            return;
        }
        for (at, into) in into.iter().enumerate() {
            let found = (self.landed)(&self.transport, *into).unwrap_or_else(|| {
                let pool = &self.setup.target;
                // SAFETY: the page has landed and this thread owns the pool.
                unsafe { page_checksum(self.checksums, pool, *into, self.setup.size.page_bytes) }
            });
            let wanted = self.setup.sum(self.checksums, first + at as u32);
            assert_eq!(found, wanted, "wrong bytes");
        }
    }
}
