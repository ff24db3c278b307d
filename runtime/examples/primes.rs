//! The runtime without any LLM: two shards, an engine lane that counts primes, a deadline on
//! every count, and the sentinel's health port.
//!
//! ```text
//!   shard "front" ──mailbox──► shard "engine" ──submit──► lane "primes"
//!        ▲                          │ Completion, at most 200 ms
//!        └────────mailbox───────────┘
//! ```
//!
//! Run it with `cargo run -p kvserve-runtime --example primes`; Ctrl-C ends it early.

use kvserve_runtime::lane::{Lane, LaneConfig, LanePulse};
use kvserve_runtime::mailbox;
use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use kvserve_runtime::signals::{self, Drain};
use kvserve_runtime::stages::StageRecorder;
use kvserve_runtime::trace::{TraceKind, TracePhase, chrome_trace};
use kvserve_runtime::{
    ChannelKind, CompletionStatus, Deadline, EndReason, GuardKeeper, GuardToken, Hub, HubLimits,
    PollPolicy, Shard, ShardConfig,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// How long one count may take. The last question below takes longer.
const COUNT_LIMIT: Duration = Duration::from_millis(200);
/// The code that a post fails with when the lane has no room.
const LANE_BUSY: u32 = libc::EBUSY as u32;
/// Questions on their way at once.
const QUESTIONS_MAX: usize = 8;

const COUNT: TraceKind = TraceKind {
    id: 1,
    name: "count begins",
    phase: TracePhase::Begin,
    arguments: ["below", ""],
};
const COUNTED: TraceKind = TraceKind {
    id: 2,
    name: "count ends",
    phase: TracePhase::End,
    arguments: ["primes", "in time"],
};

/// What the lane works on: the numbers below `below`; `primes` is its answer.
struct Count {
    below: u64,
    primes: u64,
}

type Answer = (u64, Result<u64, EndReason>);

/// This example guards no memory: nothing is ever given to it.
struct NoPages;

impl GuardKeeper for NoPages {
    fn release(&self, _guards: GuardToken) {}
    fn quarantine(&self, _guards: GuardToken) {}
}

fn main() -> std::io::Result<()> {
    let limit = kvserve_runtime::limits::raise_open_files()?;
    println!("open files: {} (hard limit {})", limit.soft, limit.hard);
    let drain = Drain::new();
    signals::install(&drain)?;
    let sentinel = Sentinel::start(SentinelConfig {
        health_listen: Some(([127, 0, 0, 1], 0).into()),
        ..SentinelConfig::default()
    })?;
    if let Some(address) = sentinel.health_addr() {
        println!("health: http://{address}/health");
    }

    let (ask, questions) = mailbox::channel::<u64>(QUESTIONS_MAX);
    let (answer, answers) = mailbox::channel::<Answer>(QUESTIONS_MAX);
    let stages = Arc::new(StageRecorder::new(&["count"]));
    let lane = LaneConfig {
        nice: 5,
        ..LaneConfig::new("primes")
    };
    sentinel.watch_lane("primes", &lane.pulse);

    let recorded = stages.clone();
    let engine = Shard::launch(named("engine"), move |shard| async move {
        engine(shard, lane, questions, answer, recorded).await
    })?;
    let front = Shard::launch(named("front"), move |shard| async move {
        front(shard, ask, answers, drain).await
    })?;
    sentinel.watch_shard(engine.remote());
    sentinel.watch_shard(front.remote());

    front.join().expect("shards abort rather than unwind");
    let trace = engine.join().expect("shards abort rather than unwind");
    println!("{:?}", stages.snapshot().summaries()[0]);
    println!("trace: {} bytes of JSON for Perfetto", trace.len());
    println!("health: {}", sentinel.health().answer().1);
    Ok(())
}

fn named(name: &str) -> ShardConfig {
    ShardConfig {
        name: name.into(),
        core: None,
    }
}

/// Asks, and prints what comes back.
async fn front(
    shard: Shard,
    ask: mailbox::Sender<u64>,
    mut answers: mailbox::Receiver<Answer>,
    drain: Drain,
) {
    for below in [1_000, 10_000, 100_000, 1_000_000, 1_000_000_000] {
        if drain.requested() {
            println!("asked to stop");
            return;
        }
        let deadline = Deadline::after(shard.now(), 2 * COUNT_LIMIT);
        if ask.send(below, deadline).await.is_err() {
            println!("the engine takes no more questions");
            return;
        }
        match answers.recv_until(deadline).await {
            Ok(Some((below, Ok(primes)))) => println!("{primes} primes below {below}"),
            Ok(Some((below, Err(reason)))) => {
                println!("primes below {below}: no answer, {}", reason.label());
            }
            Ok(None) | Err(_) => println!("primes below {below}: the engine is silent"),
        }
    }
}

/// Owns the lane and its completions. Gives its trace at the end.
async fn engine(
    shard: Shard,
    config: LaneConfig,
    mut questions: mailbox::Receiver<u64>,
    answer: mailbox::Sender<Answer>,
    stages: Arc<StageRecorder>,
) -> String {
    let hub = Hub::new(HubLimits { slots_max: 64 }, Rc::new(NoPages));
    let pulse = config.pulse.clone();
    let worker = move |count: &mut Count| count_primes(count, &pulse);
    let lane = Lane::spawn(config, worker).expect("a thread for the lane");
    let lane = Rc::new(RefCell::new(lane));
    let source = hub.add_source(lane.clone());
    let channel = hub
        .open_channel(ChannelKind::EngineLane, source, 4)
        .expect("the first channel fits");
    let polling = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Adaptive));

    while let Some(below) = questions.recv().await {
        let begun = shard.now();
        shard.trace().record(&COUNT, below, below, 0);
        let deadline = Deadline::after(begun, COUNT_LIMIT);
        // Reserve the work's name, post it, wait: the wait ends by the deadline at the latest.
        let completion = hub
            .begin("count primes", deadline, None)
            .expect("one of 64 slots is free");
        let work = hub
            .reserve(completion.slot(), channel, 1)
            .expect("the channel is open and has room");
        let job = Count { below, primes: 0 };
        if let Err((_, refusal)) = lane.borrow_mut().submit(work, job) {
            println!("the lane refuses: {refusal}");
            hub.unpost(work, 1, LANE_BUSY);
        }
        let ended = completion.await;
        // Earlier jobs whose waiter left may have ended since: their answers are nobody's.
        let counted =
            std::iter::from_fn(|| lane.borrow_mut().collect()).find(|count| count.below == below);
        let result = ended.map(|()| counted.map_or(0, |count| count.primes));
        stages.record(0, shard.now().since(begun));
        let (primes, in_time) = (result.unwrap_or(0), u64::from(result.is_ok()));
        shard.trace().record(&COUNTED, below, primes, in_time);
        let deadline = Deadline::after(shard.now(), COUNT_LIMIT);
        if answer.send((below, result), deadline).await.is_err() {
            break;
        }
    }
    hub.stop();
    polling.await;
    chrome_trace(&[shard.trace()], &[COUNT, COUNTED])
}

/// Trial division in pieces; says after each that it moves, so that the sentinel takes a long
/// count for what it is.
fn count_primes(count: &mut Count, pulse: &LanePulse) -> CompletionStatus {
    for number in 2..count.below {
        if number.is_multiple_of(4096) {
            pulse.advance();
        }
        // The example's last question would run for minutes: nobody waits for it by then.
        if number > 4_000_000 {
            return CompletionStatus::Error(libc::ECANCELED as u32);
        }
        count.primes += u64::from(is_prime(number));
    }
    CompletionStatus::Success
}

fn is_prime(number: u64) -> bool {
    (2..)
        .take_while(|divisor| divisor * divisor <= number)
        .all(|divisor| !number.is_multiple_of(divisor))
}
