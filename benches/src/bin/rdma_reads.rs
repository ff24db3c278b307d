//! Reads over real verbs for `tools/rdma-vm/perftest`, which runs them beside `ib_read_bw` and
//! `ib_read_lat`: both ends in this process, blocking on the completion channel, so that one
//! emulated processor serves both and the kernel.
//!
//! `rdma_reads bw|lat BYTES COUNT NEAR FAR` prints one number: MB/s, or the median in µs.

use kvserve_kv::transport::rdma::verbs::{Access, Library};
use kvserve_kv::transport::rdma::{Opening, PeerPlaces, RdmaConfig, RdmaTransport};
use kvserve_kv::transport::shm::Place;
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, CompletionStatus, Nanos, WorkId,
};
use std::os::fd::RawFd;
use std::sync::Arc;

/// Pages of each pool; reads go round over them.
const PAGES: u32 = 16;

/// Reads under way at once when the rate is measured, as perftest's own default of 128 allows.
const DEPTH: u64 = 16;

fn open(device: &str, pool: &Arc<PoolMemory>, bytes: usize, access: Access) -> RdmaTransport {
    let library = Library::system().unwrap_or_else(|error| panic!("{error}"));
    let opening = Opening {
        pool,
        page_bytes: bytes,
        access,
        address: None,
    };
    let config = RdmaConfig {
        device: Some(device.to_owned()),
        ..RdmaConfig::default()
    };
    RdmaTransport::open(&library, opening, config).unwrap_or_else(|error| panic!("{error}"))
}

/// Blocks until the descriptor is readable, a second at most.
fn park(fd: RawFd) {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd for the length of the call.
    unsafe { libc::poll(&raw mut poll, 1, 1000) };
}

/// Polls, parks when nothing came, until something has.
fn wait(transport: &mut RdmaTransport, told: &mut Vec<Completed>) {
    told.clear();
    while transport.poll(Nanos::now(), told) == 0 {
        let fd = transport.arm().expect("reads are on their way");
        if transport.poll(Nanos::now(), told) > 0 {
            return;
        }
        park(fd);
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, mode, bytes, count, near, far] = args.as_slice() else {
        panic!("rdma_reads bw|lat BYTES COUNT NEAR FAR");
    };
    let bytes: usize = bytes.parse().expect("bytes");
    let count: u64 = count.parse().expect("a count");
    let pool = || Arc::new(PoolMemory::memfd(PAGES as usize, bytes).expect("a pool"));
    let lands = Access {
        serves: false,
        lands: true,
    };
    let serves = Access {
        serves: true,
        lands: false,
    };
    let (mut near, mut far) = (
        open(near, &pool(), bytes, lands),
        open(far, &pool(), bytes, serves),
    );
    let channel = ChannelId {
        kind: ChannelKind::Rdma,
        index: 0,
    };
    let prepared = near.prepare(11).unwrap_or_else(|error| panic!("{error}"));
    let served = far.serve(prepared.endpoint(), 22);
    let (_id, theirs) = served.unwrap_or_else(|error| panic!("{error}"));
    let places = PeerPlaces::default();
    let all: Vec<_> = (0..PAGES)
        .map(|page| Place {
            page,
            generation: 0,
        })
        .collect();
    places.learn(PAGES as usize, 1, 0, 0, &all).expect("places");
    near.connect(channel, prepared, &theirs, &places)
        .unwrap_or_else(|error| panic!("{error}"));
    let post = |near: &mut RdmaTransport, at: u64| {
        let page = (at % u64::from(PAGES)) as u32;
        let read = Read {
            lease: 1,
            epoch: 0,
            first: page,
            into: vec![PageId(page)],
        };
        let posted = near.post(channel, WorkId::new(channel, at), vec![read]);
        posted.expect("posted");
    };
    let depth = if mode == "bw" { DEPTH } else { 1 };
    let (mut posted, mut ended) = (0, 0);
    let (mut told, mut spans) = (Vec::new(), Vec::new());
    let began = Nanos::now();
    while ended < count {
        let at = Nanos::now();
        while posted < count && posted - ended < depth {
            post(&mut near, posted);
            posted += 1;
        }
        wait(&mut near, &mut told);
        assert!(
            told.iter()
                .all(|told| told.status == CompletionStatus::Success)
        );
        ended += told.len() as u64;
        spans.push(Nanos::now().since(at));
    }
    let all = Nanos::now().since(began).as_secs_f64();
    spans.sort_unstable();
    match mode.as_str() {
        "bw" => println!("{:.2}", (bytes as u64 * count) as f64 / all / 1e6),
        _ => println!("{:.2}", spans[spans.len() / 2].as_secs_f64() * 1e6),
    }
}
