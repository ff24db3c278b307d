//! Running seeds: one, or many on several threads.

use super::check::{Invariant, Violation};
use super::context::{self, Client, Context};
use super::coverage::Coverage;
use super::model::PAGE_TOKENS;
use super::world::{Place, World};
use kvserve_kv::session::Role;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// What a run is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Nodes that compute prompts for others.
    pub prefills: usize,
    /// Nodes that pull.
    pub decodes: usize,
    /// Requests of its clients.
    pub requests: usize,
    /// Of which so many begin with the same whole page as another.
    pub sharing: usize,
    /// Its faults stop, and later requests come.
    pub calms: bool,
}

impl Shape {
    fn of(world: &World, seed: u64) -> Self {
        let decodes = |place: &&Place| place.plan.role == Role::Decode;
        let decodes = world.places.iter().filter(decodes).count();
        let page = |client: &Client| client.prompt.get(..PAGE_TOKENS).map(<[u32]>::to_vec);
        let pages: Vec<Vec<u32>> = world.context.clients.iter().filter_map(page).collect();
        let shared = |page: &&Vec<u32>| pages.iter().filter(|other| other == page).count() > 1;
        Shape {
            prefills: world.places.len() - decodes,
            decodes,
            requests: world.context.clients.len(),
            sharing: pages.iter().filter(shared).count(),
            calms: seed.is_multiple_of(2),
        }
    }

    /// The least of both.
    fn least(self, other: Shape) -> Shape {
        Shape {
            prefills: self.prefills.min(other.prefills),
            decodes: self.decodes.min(other.decodes),
            requests: self.requests.min(other.requests),
            sharing: self.sharing.min(other.sharing),
            calms: self.calms && other.calms,
        }
    }
}

/// What one seed brought.
#[derive(Clone, Debug)]
pub struct SeedReport {
    /// Which.
    pub seed: u64,
    /// Events that happened.
    pub events: u64,
    /// Faults that struck.
    pub faults: u64,
    /// What it is made of.
    pub shape: Shape,
    /// The invariant that broke, if one did.
    pub violation: Option<Violation>,
    /// What it met.
    pub coverage: Coverage,
    /// Its last lines, if asked for.
    pub trace: Vec<String>,
}

/// Runs one seed to its end; the same seed gives the same run. `traced` keeps its last lines.
pub fn run_seed(seed: u64, traced: bool) -> SeedReport {
    let mut world = World::from_seed(seed, traced);
    let shape = Shape::of(&world, seed);
    // A core's own assertion is a finding like any other (where panics unwind; else the hook of
    // the binary tells the seed).
    let ran = catch_unwind(AssertUnwindSafe(|| world.run()));
    let asserted = ran.err().map(|panic| assertion(&*panic));
    let trace = context::running().1;
    let context = std::mem::replace(&mut world.context, Context::new(seed, false));
    if asserted.is_some() {
        // What is half done may not even be dropped.
        std::mem::forget(world);
    }
    report(seed, shape, context, asserted, trace)
}

fn report(
    seed: u64,
    shape: Shape,
    context: Context,
    asserted: Option<Violation>,
    trace: Vec<String>,
) -> SeedReport {
    SeedReport {
        seed,
        events: context.events,
        faults: context.faults,
        shape,
        violation: context.violation.or(asserted),
        coverage: context.coverage,
        trace,
    }
}

/// A panic's message names the invariant it is about; those that do not are about books kept
/// wrong.
fn assertion(panic: &(dyn Any + Send)) -> Violation {
    let text = (panic.downcast_ref::<String>().map(String::as_str))
        .or(panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without words");
    let named = Invariant::ALL
        .into_iter()
        .find(|invariant| text.contains(&format!("invariant {invariant:?})")));
    Violation {
        invariant: named.unwrap_or(Invariant::I3),
        what: format!("a core asserts: {text}"),
    }
}

/// What many seeds brought.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds that ran.
    pub seeds: u64,
    /// Events of the seed in the middle.
    pub events_median: u64,
    /// Events of all.
    pub events: u64,
    /// Faults of all.
    pub faults: u64,
    /// Fewest faults of a seed.
    pub faults_min: u64,
    /// The least of each kind over all seeds.
    pub shape_least: Option<Shape>,
    /// Seeds whose faults stop, so that later requests must be answered.
    pub calms: u64,
    /// What was met.
    pub coverage: Coverage,
    /// The failed seed with the lowest number among those found.
    pub failed: Option<SeedReport>,
}

/// Runs `count` seeds from `start` on so many threads; stops soon after the first failure.
pub fn run_seeds(start: u64, count: u64, threads: usize) -> Summary {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let merged = Mutex::new((Summary::default(), Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut own = Summary {
                    faults_min: u64::MAX,
                    ..Summary::default()
                };
                let mut events = Vec::new();
                while !stop.load(Relaxed) {
                    let place = next.fetch_add(1, Relaxed);
                    if place >= count {
                        break;
                    }
                    let report = run_seed(start + place, false);
                    own.seeds += 1;
                    own.events += report.events;
                    own.faults += report.faults;
                    let least = own.shape_least.map(|least| least.least(report.shape));
                    own.shape_least = Some(least.unwrap_or(report.shape));
                    own.calms += u64::from(report.shape.calms);
                    own.faults_min = own.faults_min.min(report.faults);
                    own.coverage.merge(&report.coverage);
                    events.push(report.events);
                    if report.violation.is_some() {
                        own.failed = Some(report);
                        stop.store(true, Relaxed);
                    }
                }
                let mut merged = merged.lock().unwrap_or_else(|poison| poison.into_inner());
                merged.0.take_in(own);
                merged.1.extend(events);
            });
        }
    });
    let (mut summary, mut events) = merged
        .into_inner()
        .unwrap_or_else(|poison| poison.into_inner());
    events.sort_unstable();
    summary.events_median = events.get(events.len() / 2).copied().unwrap_or(0);
    summary
}

impl Summary {
    fn take_in(&mut self, other: Summary) {
        self.faults_min = match self.seeds {
            0 => other.faults_min,
            _ => self.faults_min.min(other.faults_min),
        };
        self.shape_least = match (self.shape_least, other.shape_least) {
            (Some(one), Some(other)) => Some(one.least(other)),
            (one, other) => one.or(other),
        };
        self.calms += other.calms;
        self.seeds += other.seeds;
        self.events += other.events;
        self.faults += other.faults;
        self.coverage.merge(&other.coverage);
        let lowest = |report: &Option<SeedReport>| report.as_ref().map_or(u64::MAX, |r| r.seed);
        if lowest(&other.failed) < lowest(&self.failed) {
            self.failed = other.failed;
        }
    }
}
