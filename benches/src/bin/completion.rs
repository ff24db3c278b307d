//! From a completion to its woken future, on an awake shard, beside the floor: an array index
//! and a wake. Both are measured in one run on one shard, so that the ratio is what counts.
//!
//! `cargo run --release -p kvserve-benches --bin completion [ROUNDS]`

use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, CompletionStatus, Deadline, GuardKeeper,
    GuardToken, Hub, HubLimits, Nanos, PollPolicy, Reap, Shard, ShardConfig, WorkId,
};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Rounds when none are asked for: a second or so, enough for a steady p99.
const ROUNDS: usize = 200_000;

/// Waits that exist beside the measured one, so that neither table sits in one cache line.
const CROWD: usize = 256;

/// Completes the last post at its next poll and notes when it told.
#[derive(Default)]
struct Instantly {
    posted: Option<WorkId>,
    told_at: Rc<Cell<Nanos>>,
}

impl CompletionSource for Instantly {
    fn poll(&mut self, _now: Nanos, out: &mut Vec<Completed>) -> usize {
        let Some(work) = self.posted.take() else {
            return 0;
        };
        out.push(Completed {
            work,
            status: CompletionStatus::Success,
        });
        self.told_at.set(Nanos::now());
        1
    }

    fn arm(&mut self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        usize::from(self.posted.is_some())
    }

    fn kill(&mut self, _channel: ChannelId) {}

    fn reap(&mut self, _channel: ChannelId) -> Reap {
        Reap::Quiet
    }
}

struct NoPages;

impl GuardKeeper for NoPages {
    fn release(&self, _guards: GuardToken) {}
    fn quarantine(&self, _guards: GuardToken) {}
}

/// The floor: a table of wakers, indexed by what a completion would carry.
#[derive(Default)]
struct Table {
    wakers: RefCell<Vec<Option<Waker>>>,
    done: Cell<bool>,
    wanted: Cell<Option<usize>>,
    told_at: Cell<Nanos>,
}

impl Table {
    /// Waits for the entry at `index` to be completed by [`Table::run`].
    async fn wait(&self, index: usize) {
        self.done.set(false);
        self.wanted.set(Some(index));
        poll_fn(|cx| {
            if self.done.get() {
                return Poll::Ready(());
            }
            self.wakers.borrow_mut()[index] = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// The barest poller: index, take, wake, let others run.
    async fn run(&self, stopped: &Cell<bool>) {
        while !stopped.get() {
            if let Some(index) = self.wanted.take() {
                self.told_at.set(Nanos::now());
                let waker = self.wakers.borrow_mut()[index].take();
                self.done.set(true);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            yield_once().await;
        }
    }
}

/// Lets every other runnable task run once.
async fn yield_once() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

async fn measure(shard: Shard, rounds: usize) -> (Vec<u64>, Vec<u64>) {
    let hub = Hub::new(HubLimits::default(), Rc::new(NoPages));
    let source = Rc::new(RefCell::new(Instantly::default()));
    let told_at = source.borrow().told_at.clone();
    let id = hub.add_source(source.clone());
    let channel = (hub.open_channel(ChannelKind::Simulated, id, 64)).expect("the first channel");
    let day = Deadline::after(hub.now(), Deadline::SPAN_MAX);
    let crowd: Vec<_> = (0..CROWD)
        .map(|_| hub.begin("crowd", day, None).expect("65,536 slots"))
        .collect();

    let poll_loop = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Spin));
    let mut slab = Vec::with_capacity(rounds);
    for _round in 0..rounds {
        let deadline = Deadline::after(hub.now(), Duration::from_secs(1));
        let wait = hub.begin("bench", deadline, None).expect("65,536 slots");
        let work = (hub.reserve(wait.slot(), channel, 1)).expect("an empty ring");
        source.borrow_mut().posted = Some(work);
        wait.await.expect("the source completes at once");
        slab.push(Nanos::now().since(told_at.get()).as_nanos() as u64);
    }
    hub.stop();
    poll_loop.await;
    drop(crowd);

    let table = Rc::new(Table::default());
    table.wakers.borrow_mut().resize(CROWD, None);
    let stopped = Rc::new(Cell::new(false));
    let poller = {
        let (table, stopped) = (table.clone(), stopped.clone());
        shard.spawn(async move { table.run(&stopped).await })
    };
    let mut floor = Vec::with_capacity(rounds);
    for round in 0..rounds {
        table.wait(round % CROWD).await;
        floor.push(Nanos::now().since(table.told_at.get()).as_nanos() as u64);
    }
    stopped.set(true);
    poller.await;
    (slab, floor)
}

/// The values below which half and 99 % of `samples` lie.
fn p50_p99(samples: &mut [u64]) -> (u64, u64) {
    samples.sort_unstable();
    let at = |share: usize| samples[(samples.len() - 1) * share / 100];
    (at(50), at(99))
}

fn main() {
    let rounds = match std::env::args().nth(1) {
        None => ROUNDS,
        Some(text) => match text.parse() {
            Ok(rounds) if rounds > 0 => rounds,
            Ok(_) | Err(_) => {
                eprintln!("ROUNDS must be a positive number, not {text:?}");
                std::process::exit(2);
            }
        },
    };
    let config = ShardConfig {
        name: "bench".into(),
        core: Some(0),
    };
    let shard = kvserve_runtime::testing::launch(config, move |shard| measure(shard, rounds));
    let shard = match shard {
        Ok(shard) => shard,
        Err(error) => {
            eprintln!("cannot start a shard on CPU 0: {error}");
            std::process::exit(1);
        }
    };
    let (mut slab, mut floor) = shard.join().expect("the bench shard ends");
    let (slab_p50, slab_p99) = p50_p99(&mut slab);
    let (floor_p50, floor_p99) = p50_p99(&mut floor);
    println!("rounds: {rounds}, one at a time, {CROWD} other waits");
    println!("completion -> woken future   p50 {slab_p50:>6} ns   p99 {slab_p99:>6} ns");
    println!("array index + wake (floor)   p50 {floor_p50:>6} ns   p99 {floor_p99:>6} ns");
    println!("ratio at p50: {:.2}", slab_p50 as f64 / floor_p50 as f64);
}
