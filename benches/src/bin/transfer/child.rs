//! The child process, seen from the decode side.

use super::args::Args;
use super::size::{Size, scattered};
use super::sys::{CpuClock, SourceMap};
use kvserve_kv::checksum::{ChecksumMode, checksum};
use kvserve_kv::{PageId, PoolMemory};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

/// What the child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// Sleeps: shared memory needs nobody.
    Nothing = b'n' as isize,
    /// Answers requests of the floor.
    Floor = b'f' as isize,
    /// Runs the read server.
    Reads = b'r' as isize,
}

/// What the child tells in its first line.
pub struct Told {
    pub descriptor: i32,
    pub port: u16,
    pub bytes: usize,
    pub pages_at: usize,
    pub nonce: [u8; 32],
}

/// Both pools and the way to the child.
pub struct Setup {
    pub size: Size,
    pub target: Arc<PoolMemory>,
    pub source: SourceMap,
    pub told: Told,
    /// Where page `n` of the one lease lies.
    pub places: Vec<u32>,
    /// The full and the sampled checksums of the pages, by place.
    sums: [Vec<u64>; 2],
    process: RefCell<Child>,
    commands: RefCell<ChildStdin>,
    answers: RefCell<BufReader<ChildStdout>>,
    serves: Cell<Serves>,
    pub cpu: CpuClock,
    pub buffer_bytes: usize,
}

impl Setup {
    pub fn start(args: &Args, size: Size) -> Self {
        let program = std::env::current_exe().expect("this program");
        let cores = args.cores.map_or("none".into(), |(decode, prefill)| {
            format!("{decode},{prefill}")
        });
        let sizes = format!("{}x{}", size.pages, size.page_bytes >> 10);
        let mut process = Command::new(program)
            .args(["prefill", "--cores", &cores, "--sizes", &sizes])
            .args(["--spin-us", &args.spin.as_micros().to_string()])
            .args(["--buffer-kib", &(args.buffer_bytes >> 10).to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child process");
        let commands = process.stdin.take().expect("piped");
        let mut answers = BufReader::new(process.stdout.take().expect("piped"));
        let mut line = String::new();
        answers
            .read_line(&mut line)
            .expect("the child's first line");
        let told = Told::parse(&line).unwrap_or_else(|| panic!("the child said {line:?}"));
        let source = SourceMap::new(
            &open(process.id(), told.descriptor),
            told.bytes,
            told.pages_at,
        )
        .expect("a map of the child's pool");
        let sums = [ChecksumMode::Full, ChecksumMode::Sampled].map(|mode| {
            let pages = 0..size.pool_pages() as u32;
            pages
                .map(|page| checksum(mode, source.bytes_of(page, size.page_bytes)))
                .collect()
        });
        Setup {
            size,
            target: Arc::new(size.pool(1 << 20)),
            source,
            told,
            places: scattered(size.pool_pages()),
            sums,
            cpu: CpuClock::of(process.id()),
            buffer_bytes: args.buffer_bytes,
            process: RefCell::new(process),
            commands: RefCell::new(commands),
            answers: RefCell::new(answers),
            serves: Cell::new(Serves::Nothing),
        }
    }

    /// The child's pool, opened anew.
    pub fn pool_file(&self) -> File {
        open(self.process.borrow().id(), self.told.descriptor)
    }

    /// A data connection: the first byte says whose.
    pub fn connect(&self, serves: Serves) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.told.port)).expect("the child");
        stream.set_nodelay(true).expect("an option");
        stream.write_all(&[serves as u8]).expect("a fresh socket");
        let mut line = String::new();
        let mut answers = self.answers.borrow_mut();
        answers.read_line(&mut line).expect("the child");
        assert_eq!(line, "connected\n");
        stream
    }

    /// Has the child do something else, and waits until it does.
    pub fn have(&self, serves: Serves) {
        if self.serves.replace(serves) == serves {
            return;
        }
        let mut commands = self.commands.borrow_mut();
        commands.write_all(&[serves as u8]).expect("the child");
        commands.flush().expect("the child");
        let mut line = String::new();
        let mut answers = self.answers.borrow_mut();
        answers.read_line(&mut line).expect("the child");
        assert_eq!(line, "ready\n");
    }

    /// The checksum that page `first + at` of the lease must have.
    pub fn sum(&self, mode: ChecksumMode, page_of_lease: u32) -> u64 {
        let place = self.places[page_of_lease as usize] as usize;
        match mode {
            ChecksumMode::Off => 0,
            ChecksumMode::Full => self.sums[0][place],
            ChecksumMode::Sampled => self.sums[1][place],
        }
    }

    /// Panics unless the pages from `first` of the lease on lie in `into`.
    pub fn compare(&self, first: u32, into: &[PageId]) {
        for (at, into) in into.iter().enumerate() {
            let place = self.places[first as usize + at];
            let bytes = self.size.page_bytes;
            // SAFETY: the page has landed and this thread owns the pool.
            let landed = unsafe { std::slice::from_raw_parts(self.target.page(*into), bytes) };
            assert!(
                landed == self.source.bytes_of(place, bytes),
                "page {at} of a pull holds other bytes"
            );
        }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let mut process = self.process.borrow_mut();
        let ended = process.kill().and_then(|()| process.wait());
        ended.expect("a child that can be ended");
    }
}

fn open(process: u32, descriptor: i32) -> File {
    let path = format!("/proc/{process}/fd/{descriptor}");
    File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

impl Told {
    pub fn line(&self) -> String {
        let nonce: String = self
            .nonce
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!(
            "{} {} {} {} {nonce}",
            self.descriptor, self.port, self.bytes, self.pages_at
        )
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (descriptor, port) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let (bytes, pages_at) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let digits = words.next()?;
        let mut nonce = [0u8; 32];
        for (at, byte) in nonce.iter_mut().enumerate() {
            *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        Some(Told {
            descriptor,
            port,
            bytes,
            pages_at,
            nonce,
        })
    }
}
