//! All ways in turns.

use super::args::Args;
use super::child::{Serves, Setup};
use super::size::{Random, Size};
use super::sys::CpuClock;
use kvserve_kv::{ChecksumMode, PageId};
use std::time::{Duration, Instant};

/// How long one way goes on before the next has its turn: some hundred of the short pulls,
/// and still below what a neighbour on the machine does in one go.
const TURN: Duration = Duration::from_millis(25);

/// Pulls of a turn before the first that counts: the child and the caches have to come round.
const WARM_UP: usize = 3;

/// A way of getting pages here. Floors and transports differ only in this.
pub trait Way {
    fn name(&self) -> &'static str;
    /// Name of its floor, unless it is one.
    fn floor(&self) -> Option<&'static str>;
    fn checksums(&self) -> ChecksumMode;
    /// What the child has to do meanwhile.
    fn needs(&self) -> Serves;
    /// Pulls as many pages as `into` has, from page `first` of the lease on; panics if it fails.
    fn pull(&mut self, first: u32, into: &[PageId]);
}

/// What a way has taken.
pub struct Line {
    pub name: &'static str,
    pub floor: Option<&'static str>,
    pub checksums: ChecksumMode,
    pub size: Size,
    pub nanos: Vec<u64>,
    pub cpu_seconds: f64,
}

impl Line {
    /// Microseconds.
    pub fn quantile(&self, of: f64) -> f64 {
        let mut sorted = self.nanos.clone();
        sorted.sort_unstable();
        sorted[((sorted.len() - 1) as f64 * of) as usize] as f64 / 1000.0
    }

    /// CPU seconds of both sides.
    pub fn cpu_per_gib(&self) -> f64 {
        let bytes = self.nanos.len() * self.size.bytes();
        self.cpu_seconds / (bytes as f64 / (1u64 << 30) as f64)
    }
}

/// Measures each way for `args.measured` altogether, a turn at a time.
pub fn in_turns(args: &Args, setup: &Setup, ways: &mut [Box<dyn Way + '_>]) -> Vec<Line> {
    let own = CpuClock::of(std::process::id());
    let mut random = Random(0x1234_5678_9ABC_DEF1);
    let lines = ways.iter().map(|way| Line {
        name: way.name(),
        floor: way.floor(),
        checksums: way.checksums(),
        size: setup.size,
        nanos: Vec::new(),
        cpu_seconds: 0.0,
    });
    let mut lines: Vec<Line> = lines.collect();
    let turns = args.measured.as_nanos().div_ceil(TURN.as_nanos());
    for _ in 0..turns {
        for (way, line) in ways.iter_mut().zip(&mut lines) {
            turn(setup, &own, &mut random, way.as_mut(), line);
        }
    }
    lines
}

fn turn(setup: &Setup, own: &CpuClock, random: &mut Random, way: &mut dyn Way, line: &mut Line) {
    setup.have(way.needs());
    for _ in 0..WARM_UP {
        let (first, into) = somewhere(setup.size, random);
        way.pull(first, &into);
        setup.compare(first, &into);
    }
    let (began, mut spent) = (Instant::now(), 0.0);
    while began.elapsed() < TURN {
        let (first, into) = somewhere(setup.size, random);
        let cpu = own.seconds() + setup.cpu.seconds();
        let pulling = Instant::now();
        way.pull(first, &into);
        line.nanos.push(pulling.elapsed().as_nanos() as u64);
        spent += own.seconds() + setup.cpu.seconds() - cpu;
    }
    line.cpu_seconds += spent;
}

/// A run of the lease and pages of our pool, others each time.
fn somewhere(size: Size, random: &mut Random) -> (u32, Vec<PageId>) {
    let first = random.below(size.pool_pages() - size.pages + 1) as u32;
    let stride = size.pool_pages() / size.pages;
    let into = (0..size.pages).map(|at| PageId((at * stride + random.below(stride)) as u32));
    (first, into.collect())
}
