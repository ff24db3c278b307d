//! From a completion in the RDMA queue to the polled future, on the fake wire: on a shard that is
//! awake, beside its own empty turns; on one that is parked; what an idle one costs; and work per GiB.
//!
//! `cargo run --release -p kvserve-benches --bin rdma_poller`. It wants two processors to itself:
//! one is the shard, the other the fake card.

use fake_verbs::{Wire, last_completion_ns};
use kvserve_kv::ledger::{Ledger, LedgerCell};
use kvserve_kv::transport::rdma::verbs::{Access, Library};
use kvserve_kv::transport::rdma::{Opening, PeerPlaces, RdmaConfig, RdmaCounters, RdmaTransport};
use kvserve_kv::transport::shm::Place;
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, Deadline, Hub, HubLimits, Nanos,
    PollPolicy, Reap, Shard, ShardConfig, SourceId,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const PAGES: usize = 64;
const PAGE_BYTES: usize = 64 * 1024;
const LEASE: u64 = 1;

/// Reads one at a time, awake; and reads that meet a parked shard.
const AWAKE: usize = 100_000;
const PARKED: usize = 300;

/// How long the idle shard is watched.
const IDLE: Duration = Duration::from_secs(2);

/// Bytes pulled for the cost of work.
const BULK_GIB: usize = 4;

struct Bench {
    hub: Hub,
    near: Rc<RefCell<RdmaTransport>>,
    /// Holds the end that serves.
    _far: RdmaTransport,
    channel: ChannelId,
}

fn open(device: &str, pool: &Arc<PoolMemory>, access: Access) -> RdmaTransport {
    let opening = Opening {
        pool,
        page_bytes: PAGE_BYTES,
        access,
        address: None,
    };
    let config = RdmaConfig {
        device: Some(device.to_owned()),
        ..RdmaConfig::default()
    };
    RdmaTransport::open(&Library::of(fake_verbs::verbs()), opening, config)
        .unwrap_or_else(|error| panic!("{error}"))
}

impl Bench {
    fn new(shard: &Shard, wire: &Wire, policy: PollPolicy) -> Bench {
        let pool = || Arc::new(PoolMemory::memfd(PAGES, PAGE_BYTES).expect("a pool"));
        let lands = Access {
            serves: false,
            lands: true,
        };
        let serves = Access {
            serves: true,
            lands: false,
        };
        let mut near = open(wire.near(), &pool(), lands);
        let mut far = open(wire.far(), &pool(), serves);
        let ledger = Rc::new(LedgerCell::new(Ledger::new(PAGES)));
        let hub = Hub::new(HubLimits::default(), ledger);
        let prepared = near.prepare(1).expect("a queue pair");
        let (_served, theirs) = far.serve(prepared.endpoint(), 2).expect("a queue pair");
        let near_cell = Rc::new(RefCell::new(near));
        let source: SourceId = hub.add_source(near_cell.clone());
        let channel = hub
            .open_channel(ChannelKind::Rdma, source, 1024)
            .expect("a channel");
        let places = PeerPlaces::default();
        let all: Vec<_> = (0..PAGES as u32)
            .map(|page| Place {
                page,
                generation: 0,
            })
            .collect();
        places.learn(PAGES, LEASE, 0, 0, &all).expect("places");
        near_cell
            .borrow_mut()
            .connect(channel, prepared, &theirs, &places)
            .expect("a connection");
        shard.spawn(hub.clone().run(shard.clone(), policy)).detach();
        Bench {
            hub,
            near: near_cell,
            _far: far,
            channel,
        }
    }

    fn post(&self, pages: usize) -> kvserve_runtime::Completion {
        let deadline = Deadline::after(Nanos::now(), Duration::from_secs(10));
        let wait = self.hub.begin("bench", deadline, None).expect("a slot");
        let work = self
            .hub
            .reserve(wait.slot(), self.channel, 1)
            .expect("room");
        let read = Read {
            lease: LEASE,
            epoch: 0,
            first: 0,
            into: (0..pages as u32).map(PageId).collect(),
        };
        let posted = self.near.borrow_mut().post(self.channel, work, vec![read]);
        posted.expect("posted");
        wait
    }

    fn counters(&self) -> RdmaCounters {
        self.near.borrow().counters()
    }
}

/// Nanoseconds at the given share of the sorted list.
fn at(sorted: &[u64], share: f64) -> u64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn thread_cpu_ns() -> u64 {
    let mut spec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid struct for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut spec) };
    spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64
}

fn line(name: &str, sorted: &[u64]) {
    println!(
        "{name:<44} p50 {:>7} ns   p99 {:>7} ns",
        at(sorted, 0.5),
        at(sorted, 0.99)
    );
}

/// A source with nothing to tell that notes the time between its polls: the loop's empty turns.
#[derive(Default)]
struct Gaps {
    last: u64,
    gaps: Vec<u64>,
    noting: bool,
}

impl CompletionSource for Gaps {
    fn poll(&mut self, _now: Nanos, _out: &mut Vec<Completed>) -> usize {
        if self.noting && self.gaps.len() < self.gaps.capacity() {
            let now = Nanos::now().0;
            if self.last > 0 {
                self.gaps.push(now - self.last);
            }
            self.last = now;
        }
        0
    }
    fn arm(&mut self) -> Option<std::os::fd::RawFd> {
        None
    }
    fn in_flight(&self) -> usize {
        0
    }
    fn kill(&mut self, _channel: ChannelId) {}
    fn reap(&mut self, _channel: ChannelId) -> Reap {
        Reap::Quiet
    }
}

/// What `count` completions that come at random moments of such a loop wait for its next turn's
/// end: the floor for any poller in it.
fn waits_of(gaps: &[u64], count: usize) -> Vec<u64> {
    let ends: Vec<u64> = gaps
        .iter()
        .scan(0, |sum, gap| {
            *sum += gap;
            Some(*sum)
        })
        .collect();
    let all = ends.last().copied().unwrap_or(1);
    let mut state = 1_u64;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let moment = (state >> 11) % all;
            let next = ends.partition_point(|end| *end <= moment);
            ends[next] - moment
        })
        .collect()
}

/// The awake shard, and the empty turns of its own loop, taken in turns.
async fn awake(shard: Shard, wire: Arc<Wire>) {
    let bench = Bench::new(&shard, &wire, PollPolicy::Spin);
    let mut told = Vec::new();
    let noted = Rc::new(RefCell::new(Gaps {
        gaps: Vec::with_capacity(4 * AWAKE),
        ..Gaps::default()
    }));
    bench.hub.add_source(noted.clone());
    for round in 0..AWAKE {
        bench.post(1).await.expect("read");
        let now = Nanos::now().0;
        told.push(now.saturating_sub(last_completion_ns()));
        if round % (AWAKE / 50) == 0 {
            // Nothing is under way and no other task runs: only the loop turns.
            (noted.borrow_mut().last, noted.borrow_mut().noting) = (0, true);
            shard.sleep(Duration::from_millis(4)).await;
            noted.borrow_mut().noting = false;
        }
    }
    let mut empty = waits_of(&noted.borrow().gaps, AWAKE);
    told.sort_unstable();
    empty.sort_unstable();
    line("awake: completion in the queue -> future", &told);
    line("awake: any moment -> next empty turn's end", &empty);
    println!(
        "p99 over the p99 of empty turns: {:.2} (goal: p50 <= 1000 ns, this <= 2)",
        at(&told, 0.99) as f64 / at(&empty, 0.99).max(1) as f64
    );
    let before = (bench.counters(), thread_cpu_ns());
    let reads = BULK_GIB * (1 << 30) / (16 * PAGE_BYTES);
    let mut waits = std::collections::VecDeque::new();
    for _ in 0..reads {
        if waits.len() == 16 {
            let oldest: Option<kvserve_runtime::Completion> = waits.pop_front();
            if let Some(oldest) = oldest {
                oldest.await.expect("read");
            }
        }
        waits.push_back(bench.post(16));
    }
    for wait in waits {
        wait.await.expect("read");
    }
    let (after, cpu) = (bench.counters(), thread_cpu_ns() - before.1);
    let per_gib = |count: u64| count as f64 / BULK_GIB as f64;
    println!(
        "per GiB by 1 MiB reads: {:.0} work requests, {:.0} posts, {:.0} completions (the shard spins: \
         {:.1} ms of its processor)",
        per_gib(after.requests - before.0.requests),
        per_gib(after.posts - before.0.posts),
        per_gib(after.completions - before.0.completions),
        per_gib(cpu) / 1e6
    );
    bench.hub.stop();
}

/// The idle shard's cost, and how soon a completion wakes it.
async fn parked(shard: Shard, wire: Arc<Wire>) {
    let bench = Bench::new(&shard, &wire, PollPolicy::Adaptive);
    bench.post(1).await.expect("read");
    shard.sleep(Duration::from_millis(100)).await;
    let (cpu, began) = (thread_cpu_ns(), Nanos::now());
    shard.sleep(IDLE).await;
    let share = (thread_cpu_ns() - cpu) as f64 / Nanos::now().since(began).as_nanos() as f64;
    println!(
        "idle, a connection up: {:.2} % of a processor (goal: < 1)",
        share * 100.0
    );
    wire.by_hand(true);
    let mut told = Vec::new();
    for _ in 0..PARKED {
        let wait = bench.post(1);
        let card = wire.clone();
        let stepping = std::thread::spawn(move || {
            // Long enough that the shard has parked.
            std::thread::sleep(Duration::from_millis(2));
            card.step(1);
        });
        wait.await.expect("read");
        told.push(Nanos::now().0.saturating_sub(last_completion_ns()));
        stepping.join().expect("the card's thread");
    }
    told.sort_unstable();
    line("parked: completion in the queue -> future", &told);
    println!("(goal: p50 < 50000 ns)");
    bench.hub.stop();
}

fn main() {
    let config = |name: &str| ShardConfig {
        name: name.into(),
        core: Some(0),
    };
    let wire = Arc::new(Wire::new());
    let own = wire.clone();
    let shard = kvserve_runtime::testing::launch(config("awake"), move |shard| awake(shard, own));
    shard.expect("a shard").join().expect("the shard ends");
    let wire = Arc::new(Wire::new());
    let own = wire.clone();
    let shard = kvserve_runtime::testing::launch(config("parked"), move |shard| parked(shard, own));
    shard.expect("a shard").join().expect("the shard ends");
}
