//! Pulls by shared memory and by TCP beside floors of our own, in one run.
//!
//! `cargo run --release -p kvserve-benches --bin transfer [--rounds N] [--pin CLIENT,SERVER]`
//!
//! * floor of shared memory: a streaming memcpy of the same pages from the same map, in one loop.
//! * floor of TCP: one request of 64 bytes, answered by `writev` of the same pages into `readv`,
//!   with the same socket settings and pinning; both sides poll.
//!
//! Both sides are threads of this process, each pinned; their CPU seconds are their threads'
//! own. Pages are taken in another order each round, so that neither side runs a prefetcher's
//! favourite, and pools are several times the largest pull.

use kvserve_kv::checksum::{ChecksumMode, checksum, page_checksum};
use kvserve_kv::copy::{Isa, Stores};
use kvserve_kv::transport::shm::{ExpectedPool, Place, SharedPool, ShmConfig, ShmTransport};
use kvserve_kv::transport::tcp::{
    ConnectionId, ReadAuthority, ServerConfig, TcpConfig, TcpReadServer, TcpTransport,
};
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, CompletionSource, CompletionStatus, GuardToken, Nanos, WorkId,
};
use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Pulls of each kind when none are asked for.
const ROUNDS: usize = 200;

/// Pulls before the first that counts.
const WARM_UP: usize = 20;

/// Bytes of each pool at most: several times the largest pull (24 MiB) and any cache's share.
const POOL_BYTES: usize = 128 << 20;

const LEASE: u64 = 1;

#[derive(Clone, Copy)]
struct Size {
    pages: usize,
    page_bytes: usize,
}

const SIZES: [Size; 5] = [
    Size {
        pages: 1,
        page_bytes: 16 << 10,
    },
    Size {
        pages: 24,
        page_bytes: 16 << 10,
    },
    Size {
        pages: 240,
        page_bytes: 16 << 10,
    },
    Size {
        pages: 24,
        page_bytes: 64 << 10,
    },
    Size {
        pages: 24,
        page_bytes: 1 << 20,
    },
];

/// One line of the table.
struct Line {
    name: &'static str,
    checksums: ChecksumMode,
    nanos: Vec<u64>,
    cpu_seconds: f64,
    bytes: u64,
}

impl Line {
    fn quantile(&self, of: f64) -> f64 {
        let mut sorted = self.nanos.clone();
        sorted.sort_unstable();
        sorted[((sorted.len() - 1) as f64 * of) as usize] as f64 / 1000.0
    }

    fn cpu_per_gib(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / (1u64 << 30) as f64)
    }

    fn print(&self, size: Size, floor: Option<&Line>) {
        let p50 = self.quantile(0.5);
        let bytes = (size.pages * size.page_bytes) as f64;
        let ratio = |ours: f64, floors: f64| format!("{:>5.2}x", ours / floors);
        let (time, cpu) = match floor {
            Some(floor) => (
                ratio(p50, floor.quantile(0.5)),
                ratio(self.cpu_per_gib(), floor.cpu_per_gib()),
            ),
            None => ("     -".into(), "     -".into()),
        };
        println!(
            "{:>4} x {:>4} KiB  {:<10} {:<4} {:>10.1} {:>10.1} {:>7.2} {:>9.3} {time} {cpu}",
            size.pages,
            size.page_bytes >> 10,
            self.name,
            self.checksums.label(),
            p50,
            self.quantile(0.99),
            bytes / p50 / 1000.0,
            self.cpu_per_gib(),
        );
    }
}

fn pin(core: Option<usize>) {
    let Some(core) = core else { return };
    // SAFETY: all zero is an empty set; the calls write and read it only.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    assert_eq!(result, 0, "cannot pin to CPU {core}");
}

/// CPU seconds of this thread.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one valid timespec.
    let got = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(got, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn pool_pages(size: Size) -> usize {
    (POOL_BYTES / size.page_bytes).max(4 * size.pages)
}

fn new_pool(size: Size) -> Arc<PoolMemory> {
    let pool = PoolMemory::memfd(pool_pages(size), size.page_bytes).expect("a pool");
    for page in 0..pool.pages() {
        // SAFETY: inside the page; nobody else has the pool yet.
        unsafe {
            let words = pool.page(PageId(page as u32)).cast::<u64>();
            for at in 0..size.page_bytes / 8 {
                words
                    .add(at)
                    .write((page as u64) << 32 ^ (at as u64).wrapping_mul(0x9E37_79B9));
            }
        }
    }
    Arc::new(pool)
}

/// A different set of places for each round.
struct Places(u64);

impl Places {
    fn run(&mut self, size: Size) -> Vec<u32> {
        let stride = (pool_pages(size) / size.pages).max(1) as u64;
        (0..size.pages as u64)
            .map(|at| {
                self.0 ^= self.0 << 13;
                self.0 ^= self.0 >> 7;
                self.0 ^= self.0 << 17;
                (at * stride + self.0 % stride) as u32
            })
            .collect()
    }
}

fn targets(places: &[u32]) -> Vec<PageId> {
    places.iter().map(|page| PageId(*page)).collect()
}

/// A floor and a transport differ only in this.
trait Puller {
    fn pull(&mut self, from: &[u32], into: &[PageId]);
    /// CPU seconds of the other side so far, if it has one.
    fn other_cpu(&mut self) -> f64 {
        0.0
    }
}

fn measure(
    name: &'static str,
    checksums: ChecksumMode,
    size: Size,
    rounds: usize,
    puller: &mut dyn Puller,
) -> Line {
    let (mut from, mut into) = (Places(0x1234_5678_9ABC_DEF1), Places(0x0FED_CBA9_8765_4321));
    let mut nanos = Vec::with_capacity(rounds);
    let (mut own, mut other) = (cpu_seconds(), puller.other_cpu());
    for round in 0..rounds + WARM_UP {
        let (source, target) = (from.run(size), targets(&into.run(size)));
        if round == WARM_UP {
            (own, other) = (cpu_seconds(), puller.other_cpu());
        }
        let began = Instant::now();
        puller.pull(&source, &target);
        if round >= WARM_UP {
            nanos.push(began.elapsed().as_nanos() as u64);
        }
    }
    Line {
        name,
        checksums,
        nanos,
        cpu_seconds: cpu_seconds() - own + puller.other_cpu() - other,
        bytes: (rounds * size.pages * size.page_bytes) as u64,
    }
}

// ---- shared memory ------------------------------------------------------------------------

/// The floor: a plain loop of loads and streaming stores.
struct MemcpyFloor {
    source: Arc<PoolMemory>,
    target: Arc<PoolMemory>,
    page_bytes: usize,
}

impl Puller for MemcpyFloor {
    fn pull(&mut self, from: &[u32], into: &[PageId]) {
        for (from, into) in from.iter().zip(into) {
            let (from, into) = (self.source.page(PageId(*from)), self.target.page(*into));
            // SAFETY: pages of two pools that only this thread touches.
            unsafe { stream_copy(from, into, self.page_bytes) };
        }
        kvserve_kv::copy::store_fence();
    }
}

/// # Safety
/// Both are aligned to 64 and valid for `bytes`, a multiple of 64.
unsafe fn stream_copy(from: *const u8, into: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller promises, and the processor has the instructions.
    unsafe {
        match Isa::detect() {
            Isa::Avx512 => return stream_copy_512(from, into, bytes),
            Isa::Avx2 => return stream_copy_256(from, into, bytes),
            Isa::Portable => {}
        }
    }
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
}

/// # Safety
/// As [`stream_copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_copy_512(from: *const u8, into: *mut u8, bytes: usize) {
    use std::arch::x86_64::*;
    for at in (0..bytes).step_by(64) {
        // SAFETY: inside both.
        unsafe {
            let words = _mm512_load_si512(from.add(at).cast());
            _mm512_stream_si512(into.add(at).cast(), words);
        }
    }
}

/// # Safety
/// As [`stream_copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_copy_256(from: *const u8, into: *mut u8, bytes: usize) {
    use std::arch::x86_64::*;
    for at in (0..bytes).step_by(32) {
        // SAFETY: inside both.
        unsafe {
            let words = _mm256_load_si256(from.add(at).cast());
            _mm256_stream_si256(into.add(at).cast(), words);
        }
    }
}

/// Posts one pull and polls until it is in place; checks sums as the hub does.
struct Pull<T: Transport> {
    transport: T,
    channel: ChannelId,
    pool: Arc<PoolMemory>,
    sums: Arc<Vec<u64>>,
    checksums: ChecksumMode,
    page_bytes: usize,
    pages_per_read: usize,
    position: u64,
    landed: fn(&T, PageId) -> Option<u64>,
    server_cpu: Option<Arc<AtomicU64>>,
}

impl<T: Transport> Pull<T> {
    fn reads(&self, from: &[u32], into: &[PageId]) -> Vec<Read> {
        // A lease names pages in any order; here page n of the lease is page n of the pool.
        let mut reads: Vec<Read> = Vec::new();
        for (from, into) in from.iter().zip(into) {
            match reads.last_mut() {
                Some(last)
                    if last.first + last.into.len() as u32 == *from
                        && last.into.len() < self.pages_per_read =>
                {
                    last.into.push(*into);
                }
                _ => reads.push(Read {
                    lease: LEASE,
                    epoch: 1,
                    first: *from,
                    into: vec![*into],
                }),
            }
        }
        reads
    }
}

impl<T: Transport> Puller for Pull<T> {
    fn pull(&mut self, from: &[u32], into: &[PageId]) {
        let reads = self.reads(from, into);
        let count = reads.len();
        let first = WorkId::new(self.channel, self.position);
        self.position += count as u64;
        let posted = self.transport.post(self.channel, first, reads);
        assert_eq!(posted, Ok(()), "a full channel");
        let mut told = Vec::with_capacity(count);
        while told.len() < count {
            self.transport.poll(Nanos(0), &mut told);
        }
        for completed in &told {
            assert_eq!(completed.status, CompletionStatus::Success);
        }
        if self.checksums == ChecksumMode::Off {
            return;
        }
        for (from, into) in from.iter().zip(into) {
            let found = (self.landed)(&self.transport, *into).unwrap_or_else(|| {
                // SAFETY: the page has landed and this thread owns the pool.
                unsafe { page_checksum(self.checksums, &self.pool, *into, self.page_bytes) }
            });
            assert_eq!(found, self.sums[*from as usize], "wrong bytes");
        }
    }

    fn other_cpu(&mut self) -> f64 {
        let nanos = self.server_cpu.as_ref();
        nanos.map_or(0.0, |nanos| nanos.load(Ordering::Acquire) as f64 / 1e9)
    }
}

fn shm_pull(
    size: Size,
    checksums: ChecksumMode,
    source: &Arc<PoolMemory>,
    target: &Arc<PoolMemory>,
    sums: &Arc<Vec<u64>>,
) -> (Pull<ShmTransport>, UnixStream) {
    let config = ShmConfig {
        checksums,
        stores: Stores::Streaming,
        ..ShmConfig::default()
    };
    let mut transport =
        ShmTransport::new(target.clone(), size.page_bytes, config).expect("a transport");
    let fd = source.memfd_raw().expect("a memfd");
    // SAFETY: the pool holds it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let expected = ExpectedPool {
        nonce: source.nonce(),
        page_bytes: size.page_bytes,
        // SAFETY: it only reads.
        uid: unsafe { libc::geteuid() },
    };
    let fd = fd.try_clone_to_owned().expect("a descriptor");
    let shared = SharedPool::map(fd, &expected).expect("our own pool");
    let channel = ChannelId {
        kind: ChannelKind::SharedMemory,
        index: 0,
    };
    let (near, far) = UnixStream::pair().expect("sockets");
    transport
        .add_channel(channel, near, shared)
        .expect("a channel");
    let places: Vec<_> = (0..source.pages() as u32)
        .map(|page| Place {
            page,
            generation: source.generation(PageId(page)),
        })
        .collect();
    transport
        .learn_lease(channel, LEASE, 1, 0, &places)
        .expect("places");
    let pull = Pull {
        pages_per_read: transport.pages_per_read_max(),
        transport,
        channel,
        pool: target.clone(),
        sums: sums.clone(),
        checksums,
        page_bytes: size.page_bytes,
        position: 0,
        landed: |transport, page| transport.landed_sum(page),
        server_cpu: None,
    };
    (pull, far)
}

// ---- TCP ----------------------------------------------------------------------------------

/// Grants every page of the pool, in order.
struct Everything;

impl ReadAuthority for Everything {
    fn resolve(
        &mut self,
        _connection: ConnectionId,
        _incarnation: u64,
        _lease: u64,
        _epoch: u32,
        first: u32,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<GuardToken, u32> {
        out.extend((first..first + count).map(PageId));
        Ok(GuardToken::issue(NonZeroU32::MIN))
    }

    fn served(&mut self, _guards: GuardToken) {}

    fn closed(&mut self, _connection: ConnectionId) {}
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
    let (far, _) = listener.accept().expect("loopback");
    for end in [&near, &far] {
        end.set_nodelay(true).expect("an option");
    }
    (near, far)
}

/// A thread that serves and tells its CPU time, until it is dropped.
struct Server {
    over: Arc<AtomicBool>,
    cpu: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(core: Option<usize>, serve: impl FnOnce(&dyn Fn() -> bool) + Send + 'static) -> Self {
        let (over, cpu) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (ended, told) = (over.clone(), cpu.clone());
        let thread = std::thread::spawn(move || {
            pin(core);
            serve(&|| {
                told.store((cpu_seconds() * 1e9) as u64, Ordering::Release);
                !ended.load(Ordering::Acquire)
            });
        });
        Server {
            over,
            cpu,
            thread: Some(thread),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server");
        }
    }
}

fn tcp_pull(
    size: Size,
    checksums: ChecksumMode,
    source: &Arc<PoolMemory>,
    target: &Arc<PoolMemory>,
    sums: &Arc<Vec<u64>>,
    core: Option<usize>,
) -> (Pull<TcpTransport>, Server) {
    let (near, far) = sockets();
    let mut transport =
        TcpTransport::new(target.clone(), size.page_bytes, TcpConfig::default()).expect("one");
    let channel = ChannelId {
        kind: ChannelKind::Tcp,
        index: 0,
    };
    transport.add_channel(channel, near, 7).expect("a channel");
    let served = source.clone();
    let server = Server::start(core, move |go_on| {
        let authority = Rc::new(RefCell::new(Everything));
        let mut server =
            TcpReadServer::new(served, size.page_bytes, authority, ServerConfig::default())
                .expect("a server");
        server.add_connection(far).expect("a connection");
        let mut told = Vec::new();
        while go_on() {
            for _ in 0..64 {
                server.poll(Nanos::now(), &mut told);
            }
        }
    });
    let pull = Pull {
        pages_per_read: transport.pages_per_read_max(),
        transport,
        channel,
        pool: target.clone(),
        sums: sums.clone(),
        checksums,
        page_bytes: size.page_bytes,
        position: 0,
        landed: |_, _| None,
        server_cpu: Some(server.cpu.clone()),
    };
    (pull, server)
}

/// One request, then `readv` into the pages; the other side `writev`s them. Both poll.
struct TcpFloor {
    stream: TcpStream,
    target: Arc<PoolMemory>,
    page_bytes: usize,
    /// Where the request's pages are told, so that the request is 64 bytes whatever their count.
    asked: Arc<std::sync::Mutex<Vec<u32>>>,
    server: Server,
}

/// The most buffers of one vectored call.
const IOVECS_MAX: usize = 1024;

/// Moves all of `pages` through a vectored call that polls.
fn move_pages(
    pool: &PoolMemory,
    pages: &[u32],
    page_bytes: usize,
    mut call: impl FnMut(&[libc::iovec]) -> isize,
) {
    let total = pages.len() * page_bytes;
    let mut done = 0;
    let mut vectors: Vec<libc::iovec> = Vec::with_capacity(pages.len());
    while done < total {
        vectors.clear();
        let mut at = done;
        while at < total && vectors.len() < IOVECS_MAX {
            let offset = at % page_bytes;
            let start = pool.page(PageId(pages[at / page_bytes]));
            vectors.push(libc::iovec {
                iov_base: start.wrapping_add(offset).cast(),
                iov_len: page_bytes - offset,
            });
            at += page_bytes - offset;
        }
        match call(&vectors) {
            count if count > 0 => done += count as usize,
            0 => panic!("the other side is gone"),
            _ => {
                let error = std::io::Error::last_os_error();
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
                std::hint::spin_loop();
            }
        }
    }
}

impl TcpFloor {
    fn start(
        size: Size,
        source: &Arc<PoolMemory>,
        target: &Arc<PoolMemory>,
        core: Option<usize>,
    ) -> Self {
        let (near, mut far) = sockets();
        for end in [&near, &far] {
            end.set_nonblocking(true).expect("an option");
        }
        let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (pages, source) = (asked.clone(), source.clone());
        let server = Server::start(core, move |go_on| {
            let mut request = [0; 64];
            let mut filled = 0;
            while go_on() {
                for _ in 0..64 {
                    match far.read(&mut request[filled..]) {
                        Ok(0) => return,
                        Ok(count) => filled += count,
                        Err(_) => continue,
                    }
                    if filled < 64 {
                        continue;
                    }
                    filled = 0;
                    let pages = pages.lock().expect("one client").clone();
                    let socket = far.as_raw_fd();
                    move_pages(&source, &pages, size.page_bytes, |vectors| {
                        // SAFETY: the vectors name pages of a pool that lives on.
                        unsafe { libc::writev(socket, vectors.as_ptr(), vectors.len() as _) }
                    });
                }
            }
        });
        TcpFloor {
            stream: near,
            target: target.clone(),
            page_bytes: size.page_bytes,
            asked,
            server,
        }
    }
}

impl Puller for TcpFloor {
    fn pull(&mut self, from: &[u32], into: &[PageId]) {
        *self.asked.lock().expect("one server") = from.to_vec();
        self.stream.write_all(&[1; 64]).expect("room for a request");
        let pages: Vec<u32> = into.iter().map(|page| page.0).collect();
        let socket = self.stream.as_raw_fd();
        move_pages(&self.target, &pages, self.page_bytes, |vectors| {
            // SAFETY: the vectors name pages that only this thread touches.
            unsafe { libc::readv(socket, vectors.as_ptr(), vectors.len() as _) }
        });
    }

    fn other_cpu(&mut self) -> f64 {
        self.server.cpu.load(Ordering::Acquire) as f64 / 1e9
    }
}

/// Pages of a pull by TCP lie side by side in the lease, as a prompt's do.
struct InOrder<'a>(&'a mut dyn Puller);

impl Puller for InOrder<'_> {
    fn pull(&mut self, from: &[u32], into: &[PageId]) {
        let first = from[0];
        let side_by_side: Vec<u32> = (0..from.len() as u32).map(|at| first + at).collect();
        self.0.pull(&side_by_side, into);
    }

    fn other_cpu(&mut self) -> f64 {
        self.0.other_cpu()
    }
}

fn main() {
    let mut rounds = ROUNDS;
    let (mut client, mut server) = (None, None);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().unwrap_or_default();
        match flag.as_str() {
            "--rounds" => rounds = value.parse().expect("--rounds takes a number"),
            "--pin" => {
                let (left, right) = value.split_once(',').expect("--pin takes CLIENT,SERVER");
                client = Some(left.parse().expect("a CPU"));
                server = Some(right.parse().expect("a CPU"));
            }
            other => panic!("unknown flag {other}: use --rounds N or --pin CLIENT,SERVER"),
        }
    }
    pin(client);
    println!("kernel {}, {rounds} rounds", Isa::detect().label());
    println!(
        "{:<15}  {:<10} {:<4} {:>10} {:>10} {:>7} {:>9} {:>6} {:>6}",
        "pages", "what", "sums", "p50 us", "p99 us", "GB/s", "CPU s/GiB", "p50", "CPU"
    );
    for size in SIZES {
        run(size, rounds, server);
    }
}

fn run(size: Size, rounds: usize, core: Option<usize>) {
    let (source, target) = (new_pool(size), new_pool(size));
    let sums: Vec<u64> = (0..source.pages())
        .map(|page| {
            // SAFETY: the page is whole and nobody writes it any more.
            let bytes = unsafe {
                std::slice::from_raw_parts(source.page(PageId(page as u32)), size.page_bytes)
            };
            checksum(ChecksumMode::Full, bytes)
        })
        .collect();
    let sums = Arc::new(sums);
    let (off, full) = (ChecksumMode::Off, ChecksumMode::Full);

    let mut floor = MemcpyFloor {
        source: source.clone(),
        target: target.clone(),
        page_bytes: size.page_bytes,
    };
    let floor_line = measure("memcpy", off, size, rounds, &mut InOrder(&mut floor));
    floor_line.print(size, None);
    for checksums in [off, full] {
        let (mut pull, _far) = shm_pull(size, checksums, &source, &target, &sums);
        let line = measure("shm", checksums, size, rounds, &mut InOrder(&mut pull));
        line.print(size, Some(&floor_line));
    }

    let floor_line = {
        let mut floor = TcpFloor::start(size, &source, &target, core);
        measure("tcp floor", off, size, rounds, &mut InOrder(&mut floor))
    };
    floor_line.print(size, None);
    for checksums in [off, full] {
        let (mut pull, _server) = tcp_pull(size, checksums, &source, &target, &sums, core);
        let line = measure("tcp", checksums, size, rounds, &mut InOrder(&mut pull));
        line.print(size, Some(&floor_line));
    }
}
