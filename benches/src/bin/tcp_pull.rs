//! A pull over TCP, from the post of the read to its completion, beside its floor: one 64-byte
//! request answered by `writev`, read by `readv`, of the same scattered pages, with the same
//! socket settings and the same two pinned threads. Batches of the two alternate in one run, so
//! that the ratio is what counts.
//!
//! `cargo run --release -p kvserve-benches --bin tcp_pull [ROUNDS] [PAGES] [PAGE_BYTES] [BUFFER_BYTES]`

use kvserve_kv::checksum::page_checksum;
use kvserve_kv::ledger::{AllocateAs, Ledger};
use kvserve_kv::transport::tcp::{
    ConnectionId, ReadAuthority, ServerConfig, TcpConfig, TcpReadServer, TcpTransport,
    pages_per_read_max,
};
use kvserve_kv::transport::{Read, Transport};
use kvserve_kv::{ChecksumMode, PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, CompletionSource, CompletionStatus, GuardToken, Nanos, WorkId,
};
use std::cell::RefCell;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const FLOOR: u8 = 0;
const PULL: u8 = 1;
const STOP: u8 = 2;

/// Rounds of one side before the other has its turn: some 20 ms of each.
const BATCH: usize = 200;

/// Bytes of the floor's request: as long as a read request.
const REQUEST: usize = 64;

#[derive(Clone, Copy)]
struct Args {
    rounds: usize,
    pages: usize,
    page_bytes: usize,
    buffer_bytes: usize,
}

fn args() -> Result<Args, String> {
    let mut values = [10_000, 24, 16 << 10, 0];
    let given: Vec<String> = std::env::args().skip(1).collect();
    if given.len() > values.len() {
        return Err("usage: tcp_pull [ROUNDS] [PAGES] [PAGE_BYTES] [BUFFER_BYTES]".into());
    }
    for (value, text) in values.iter_mut().zip(&given) {
        *value = text
            .parse()
            .map_err(|_| format!("{text:?} is not a whole number"))?;
    }
    let [rounds, pages, page_bytes, buffer_bytes] = values;
    if rounds < BATCH || !(1..=1000).contains(&pages) || page_bytes < 64 {
        return Err("at least 200 rounds, 1 to 1000 pages, and pages of 64 bytes".into());
    }
    Ok(Args {
        rounds,
        pages,
        page_bytes,
        buffer_bytes,
    })
}

/// Every page but each fourth, so that pages are scattered as they are in a pool in use.
fn scattered(count: usize) -> Vec<PageId> {
    let all = (0..).filter(|page| page % 4 != 3);
    // Downwards: no two follow on each other in memory.
    let mut pages: Vec<_> = all.take(count).map(PageId).collect();
    pages.reverse();
    pages
}

fn pool_for(args: Args) -> PoolMemory {
    let pool = PoolMemory::memfd(args.pages * 2, args.page_bytes).expect("a pool");
    for page in 0..pool.pages() as u32 {
        // SAFETY: the pool is fresh and nobody else has it.
        unsafe { std::ptr::write_bytes(pool.page(PageId(page)), page as u8, args.page_bytes) };
    }
    pool
}

/// One lease of all the pages, guarded as in the product.
struct OneLease {
    ledger: Ledger,
    pages: Vec<PageId>,
}

impl ReadAuthority for OneLease {
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
        let end = first.checked_add(count).ok_or(1u32)? as usize;
        let run = self.pages.get(first as usize..end).ok_or(1u32)?;
        out.extend_from_slice(run);
        Ok(self.ledger.guard(run.iter().copied()))
    }

    fn served(&mut self, guards: GuardToken) {
        self.ledger.release(guards);
    }
}

fn socket_pair(buffer_bytes: usize) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let near = TcpStream::connect(listener.local_addr().expect("its address")).expect("connects");
    let (far, _) = listener.accept().expect("accepts");
    for stream in [&near, &far] {
        stream.set_nonblocking(true).expect("non-blocking");
        stream.set_nodelay(true).expect("no delay");
        set_buffers(stream, buffer_bytes);
    }
    (near, far)
}

fn set_buffers(stream: &TcpStream, bytes: usize) {
    use std::os::fd::AsRawFd;
    if bytes == 0 {
        return;
    }
    let value = bytes as libc::c_int;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // SAFETY: `value` is a valid int for the length of the call.
        let done = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}

/// Binds the calling thread to one CPU of those the process may use.
fn pin(which: usize) {
    // SAFETY: all zero is an empty set; the calls write and read it within its size.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        if libc::sched_getaffinity(0, size, &raw mut allowed) != 0 {
            return;
        }
        let cpus: Vec<_> = (0..libc::CPU_SETSIZE as usize)
            .filter(|cpu| libc::CPU_ISSET(*cpu, &allowed))
            .collect();
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpus[which % cpus.len()], &mut one);
        libc::sched_setaffinity(0, size, &raw const one);
    }
}

/// The serving thread: answers whichever of the two is being measured.
fn serve(args: Args, mode: &AtomicU8, mut floor: TcpStream, pull: TcpStream) {
    pin(1);
    let pool = Arc::new(pool_for(args));
    let pages = scattered(args.pages);
    let mut ledger = Ledger::new(pool.pages());
    let mut all = Vec::new();
    ledger
        .allocate(pool.pages(), AllocateAs::Building, &mut all)
        .expect("all are free");
    let authority = Rc::new(RefCell::new(OneLease {
        ledger,
        pages: pages.clone(),
    }));
    let config = ServerConfig {
        buffer_bytes: args.buffer_bytes,
        ..ServerConfig::default()
    };
    let mut server =
        TcpReadServer::new(pool.clone(), args.page_bytes, authority, config).expect("descriptors");
    server.add_connection(pull).expect("a connection");
    let mut request = [0; REQUEST];
    let mut filled = 0;
    let mut none = Vec::new();
    loop {
        match mode.load(Ordering::Relaxed) {
            FLOOR => match floor.read(&mut request[filled..]) {
                Ok(0) => return,
                Ok(count) => {
                    filled += count;
                    if filled == REQUEST {
                        filled = 0;
                        write_pages(&mut floor, &pool, &pages, args.page_bytes);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("the floor's socket: {error}"),
            },
            PULL => {
                server.poll(Nanos::now(), &mut none);
            }
            _ => return,
        }
        std::hint::spin_loop();
    }
}

fn write_pages(stream: &mut TcpStream, pool: &PoolMemory, pages: &[PageId], page_bytes: usize) {
    let slices = pages.iter().map(|page| {
        // SAFETY: inside the pool; nobody writes it while the slices live.
        IoSlice::new(unsafe { std::slice::from_raw_parts(pool.page(*page), page_bytes) })
    });
    let mut slices: Vec<_> = slices.collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match stream.write_vectored(rest) {
            Ok(count) => IoSlice::advance_slices(&mut rest, count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("the floor's socket: {error}"),
        }
    }
}

fn read_pages(stream: &mut TcpStream, pool: &PoolMemory, pages: &[PageId], page_bytes: usize) {
    let slices = pages.iter().map(|page| {
        // SAFETY: inside the pool, each page once; nobody else touches it while the slices live.
        IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(pool.page(*page), page_bytes) })
    });
    let mut slices: Vec<_> = slices.collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match stream.read_vectored(rest) {
            Ok(0) => panic!("the floor's peer has closed"),
            Ok(count) => IoSliceMut::advance_slices(&mut rest, count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("the floor's socket: {error}"),
        }
    }
}

/// The reading thread's two ways to the same pages.
struct Reader {
    args: Args,
    pool: Arc<PoolMemory>,
    pages: Vec<PageId>,
    floor: TcpStream,
    transport: TcpTransport,
    channel: ChannelId,
    next: u64,
}

impl Reader {
    fn floor_round(&mut self) -> u64 {
        let begun = Nanos::now();
        let sent = self.floor.write(&[7; REQUEST]).expect("room for a request");
        assert_eq!(sent, REQUEST);
        read_pages(
            &mut self.floor,
            &self.pool,
            &self.pages,
            self.args.page_bytes,
        );
        Nanos::now().0 - begun.0
    }

    fn pull_round(&mut self, out: &mut Vec<kvserve_runtime::Completed>) -> u64 {
        let begun = Nanos::now();
        let run = pages_per_read_max(self.args.page_bytes);
        let reads = self.pages.chunks(run).enumerate().map(|(at, part)| Read {
            lease: 1,
            epoch: 1,
            first: (at * run) as u32,
            into: part.to_vec(),
        });
        let reads: Vec<_> = reads.collect();
        let count = reads.len();
        let first = WorkId::new(self.channel, self.next);
        self.next += count as u64;
        self.transport
            .post(self.channel, first, reads)
            .expect("room for a pull");
        out.clear();
        while out.len() < count {
            self.transport.poll(Nanos::now(), out);
            std::hint::spin_loop();
        }
        let took = Nanos::now().0 - begun.0;
        assert!(
            out.iter()
                .all(|done| done.status == CompletionStatus::Success)
        );
        took
    }

    /// What the checksums of one side cost for these pages.
    fn checksum_ns(&self) -> u64 {
        let begun = Nanos::now();
        let mut all = 0u64;
        for _ in 0..100 {
            for page in &self.pages {
                // SAFETY: nothing is being read into the pool now.
                all ^= unsafe {
                    page_checksum(ChecksumMode::Full, &self.pool, *page, self.args.page_bytes)
                };
            }
        }
        std::hint::black_box(all);
        (Nanos::now().0 - begun.0) / 100
    }
}

fn micros(sorted: &[u64], part: f64) -> f64 {
    let place = ((sorted.len() - 1) as f64 * part).round() as usize;
    sorted[place] as f64 / 1000.0
}

fn main() {
    let args = match args() {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("{problem}");
            std::process::exit(2);
        }
    };
    let mode = Arc::new(AtomicU8::new(FLOOR));
    let (floor_near, floor_far) = socket_pair(args.buffer_bytes);
    let (pull_near, pull_far) = socket_pair(args.buffer_bytes);
    let server = {
        let mode = mode.clone();
        std::thread::spawn(move || serve(args, &mode, floor_far, pull_far))
    };
    pin(0);
    let pool = Arc::new(pool_for(args));
    let config = TcpConfig {
        buffer_bytes: args.buffer_bytes,
        ..TcpConfig::default()
    };
    let mut transport =
        TcpTransport::new(pool.clone(), args.page_bytes, config).expect("descriptors");
    let channel = ChannelId {
        kind: ChannelKind::Tcp,
        index: 0,
    };
    transport
        .add_channel(channel, pull_near, 1)
        .expect("a connection");
    let mut reader = Reader {
        args,
        pool,
        pages: scattered(args.pages),
        floor: floor_near,
        transport,
        channel,
        next: 0,
    };
    let (mut floor, mut pull, mut out) = (Vec::new(), Vec::new(), Vec::new());
    let batches = args.rounds.div_ceil(BATCH);
    // The first batch of each warms caches, windows and buffers up and is not counted.
    for batch in 0..=batches {
        mode.store(FLOOR, Ordering::Relaxed);
        let of_floor: Vec<_> = (0..BATCH).map(|_| reader.floor_round()).collect();
        mode.store(PULL, Ordering::Relaxed);
        let of_pull: Vec<_> = (0..BATCH).map(|_| reader.pull_round(&mut out)).collect();
        if batch > 0 {
            floor.extend(of_floor);
            pull.extend(of_pull);
        }
    }
    mode.store(STOP, Ordering::Relaxed);
    server.join().expect("the serving thread");
    floor.sort_unstable();
    pull.sort_unstable();
    let bytes = args.pages * args.page_bytes;
    println!(
        "TCP pull of {} x {} bytes, {} rounds of each, buffers {}",
        args.pages,
        args.page_bytes,
        floor.len(),
        if args.buffer_bytes == 0 {
            "tuned by the kernel".to_owned()
        } else {
            format!("{} bytes", args.buffer_bytes)
        }
    );
    println!("{:<28}{:>10}{:>10}{:>10}", "", "p50 µs", "p99 µs", "GB/s");
    for (name, times) in [
        ("floor: writev, readv", &floor),
        ("pull: post to completion", &pull),
    ] {
        let p50 = micros(times, 0.5);
        println!(
            "{name:<28}{p50:>10.1}{:>10.1}{:>10.2}",
            micros(times, 0.99),
            bytes as f64 / p50 / 1000.0
        );
    }
    println!(
        "{:<28}{:>10.3}{:>10.3}   (goal: p50 <= 1.25)",
        "ratio",
        micros(&pull, 0.5) / micros(&floor, 0.5),
        micros(&pull, 0.99) / micros(&floor, 0.99)
    );
    println!(
        "{:<28}{:>10.1}   (each side, not in the pull)",
        "full checksums of the pages",
        reader.checksum_ns() as f64 / 1000.0
    );
}
