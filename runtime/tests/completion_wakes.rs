//! A million completions made by another thread, each waking a future of a shard: none is lost,
//! in any poll policy. And a shard with nothing to do does not spin.
//!
//! glommio may park although tasks are runnable (see the sentinel). A thread that knocks every
//! few milliseconds stands in for the sentinel here.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod completion_support;

use completion_support::Ledger;
use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, CompletionStatus, Deadline, EndReason,
    Hub, HubLimits, Nanos, PollPolicy, Reap, Shard, ShardConfig, WorkId,
};
use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The whole of each test; far above what it takes, so that only a lost wake reaches it.
const LIVENESS: Duration = Duration::from_secs(120);

/// Futures that wait at once, each with one post in flight. On a loaded machine the producer
/// may wait milliseconds for a CPU after each batch: with a thousand a batch that is seconds.
const WAITERS: u64 = 1024;

/// One direction between two threads: a ring of work ids, one producer, one consumer.
struct Ring {
    places: Vec<AtomicU64>,
    pushed: AtomicU64,
    popped: AtomicU64,
}

impl Ring {
    fn new() -> Self {
        Ring {
            places: (0..2 * WAITERS).map(|_| AtomicU64::new(0)).collect(),
            pushed: AtomicU64::new(0),
            popped: AtomicU64::new(0),
        }
    }

    fn push(&self, bits: u64) {
        let at = self.pushed.load(Ordering::Relaxed);
        let used = at - self.popped.load(Ordering::Acquire);
        assert!(used < self.places.len() as u64, "one post a waiter");
        self.places[at as usize % self.places.len()].store(bits, Ordering::Relaxed);
        self.pushed.store(at + 1, Ordering::Release);
    }

    fn pop(&self) -> Option<u64> {
        let at = self.popped.load(Ordering::Relaxed);
        if at == self.pushed.load(Ordering::Acquire) {
            return None;
        }
        let bits = self.places[at as usize % self.places.len()].load(Ordering::Relaxed);
        self.popped.store(at + 1, Ordering::Release);
        Some(bits)
    }
}

/// What shard and producer share.
struct Shared {
    posted: Ring,
    completed: Ring,
    /// The shard wants to be called by the eventfd.
    armed: AtomicBool,
    /// The eventfd has been written since it was last read.
    called: AtomicBool,
    ended: AtomicBool,
}

/// Work done by another thread, told through a ring and an eventfd.
struct Remote {
    shared: Arc<Shared>,
    event: std::fs::File,
    in_flight: usize,
    producer: Option<JoinHandle<u64>>,
}

impl Remote {
    fn start() -> Self {
        // SAFETY: plain call; the new descriptor is owned by the file below.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        assert!(descriptor >= 0);
        // SAFETY: the descriptor is open and nobody else's.
        let event = unsafe { std::fs::File::from_raw_fd(descriptor) };
        let shared = Arc::new(Shared {
            posted: Ring::new(),
            completed: Ring::new(),
            armed: AtomicBool::new(false),
            called: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let (theirs, call) = (shared.clone(), event.try_clone().expect("descriptor"));
        let producer = std::thread::spawn(move || produce(&theirs, call));
        Remote {
            shared,
            event,
            in_flight: 0,
            producer: Some(producer),
        }
    }

    fn post(&mut self, work: WorkId) {
        self.in_flight += 1;
        self.shared.posted.push(work.bits());
    }

    /// Ends the producer; how often it had to call.
    fn end(&mut self) -> u64 {
        self.shared.ended.store(true, Ordering::Relaxed);
        let producer = self.producer.take().expect("ended once");
        producer.join().expect("producer")
    }
}

/// Completes everything posted, in order, now and then after a pause so that the shard parks.
fn produce(shared: &Shared, mut call: std::fs::File) -> u64 {
    let (mut calls, mut idle, mut made) = (0, 0, 0u64);
    while !shared.ended.load(Ordering::Relaxed) {
        let Some(bits) = shared.posted.pop() else {
            idle += 1;
            if idle > 1000 {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::thread::yield_now();
            }
            continue;
        };
        idle = 0;
        made += 1;
        if made.is_multiple_of(500) {
            std::thread::sleep(Duration::from_micros(300));
        }
        shared.completed.push(bits);
        // Either the shard sees what was pushed, or this sees that it has armed.
        fence(Ordering::SeqCst);
        if shared.armed.swap(false, Ordering::SeqCst) {
            call.write_all(&1u64.to_ne_bytes()).expect("eventfd");
            shared.called.store(true, Ordering::Release);
            calls += 1;
        }
    }
    calls
}

impl CompletionSource for Remote {
    fn poll(&mut self, _now: Nanos, out: &mut Vec<Completed>) -> usize {
        if self.shared.called.swap(false, Ordering::Acquire) {
            let mut count = [0; 8];
            // Nothing to read is fine: the count was taken by an earlier look.
            let _read = self.event.read(&mut count);
        }
        let mut count = 0;
        while count < 64
            && let Some(bits) = self.shared.completed.pop()
        {
            let work = WorkId::from_bits(bits).expect("what was posted");
            out.push(Completed {
                work,
                status: CompletionStatus::Success,
            });
            count += 1;
        }
        self.in_flight -= count;
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        self.shared.armed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Some(self.event.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn kill(&mut self, _channel: ChannelId) {}

    fn reap(&mut self, _channel: ChannelId) -> Reap {
        match self.in_flight {
            0 => Reap::Quiet,
            posts => Reap::Draining(posts),
        }
    }
}

/// Runs `body` on a shard of its own and fails when it takes longer than [`LIVENESS`].
fn on_a_shard<F>(body: impl FnOnce(Shard) -> F + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    let config = ShardConfig {
        name: "test".into(),
        core: None,
    };
    let (ended, wait) = std::sync::mpsc::channel();
    let shard = kvserve_runtime::testing::launch(config, move |shard| async move {
        let knocking = shard.spawn(knocked());
        body(shard).await;
        drop(knocking);
        ended.send(()).expect("the test waits");
    });
    shard.expect("a shard");
    wait.recv_timeout(LIVENESS)
        .expect("the shard is done: a wake was lost, or it never ran");
}

/// Wakes this executor from another thread every 2 ms, as a sentinel does.
async fn knocked() {
    let (knock, hear) = flume::bounded::<()>(1);
    std::thread::spawn(move || {
        while knock.send(()).is_ok() {
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    while hear.recv_async().await.is_ok() {}
}

fn a_hub() -> Hub {
    Hub::new(HubLimits::default(), Rc::new(Ledger::default()))
}

fn a_million_wakes(policy: PollPolicy, wakes: u64) {
    on_a_shard(move |shard| async move {
        let hub = a_hub();
        let source = Rc::new(RefCell::new(Remote::start()));
        let id = hub.add_source(source.clone());
        let channel = hub
            .open_channel(ChannelKind::EngineLane, id, WAITERS as usize)
            .expect("room");
        let poll_loop = shard.spawn(hub.clone().run(shard.clone(), policy));
        let woken = Rc::new(Cell::new(0u64));
        let waiters: Vec<_> = (0..WAITERS)
            .map(|nth| {
                let (hub, source, woken) = (hub.clone(), source.clone(), woken.clone());
                let share = wakes / WAITERS + u64::from(nth < wakes % WAITERS);
                shard.spawn(async move {
                    for _wait in 0..share {
                        let deadline = Deadline::after(hub.now(), LIVENESS);
                        let wait = hub.begin("wake", deadline, None).expect("room");
                        let work = hub.reserve(wait.slot(), channel, 1).expect("room");
                        source.borrow_mut().post(work);
                        assert_eq!(wait.await, Ok(()));
                        woken.set(woken.get() + 1);
                    }
                })
            })
            .collect();
        for waiter in waiters {
            waiter.await;
        }
        hub.stop();
        poll_loop.await;
        let calls = source.borrow_mut().end();
        assert_eq!(woken.get(), wakes);
        let counted = hub.counters();
        assert_eq!(counted.ended_ok, wakes);
        assert_eq!(counted.posts_retired, wakes);
        assert_eq!(counted.slots_live, 0);
        println!("{policy:?}: {wakes} wakes, {calls} calls by eventfd");
        if policy == PollPolicy::Armed {
            assert!(calls > 0, "the parked path was not taken");
        }
    });
}

#[test]
fn none_of_a_million_is_lost_when_armed() {
    a_million_wakes(PollPolicy::Armed, 1_000_000);
}

#[test]
fn none_of_a_million_is_lost_when_adaptive() {
    a_million_wakes(PollPolicy::Adaptive, 1_000_000);
}

#[test]
fn none_of_a_million_is_lost_when_spinning() {
    a_million_wakes(PollPolicy::Spin, 1_000_000);
}

/// One completion at a time with pauses: the shard parks before nearly each of them.
#[test]
fn every_wake_out_of_a_park_arrives() {
    on_a_shard(|shard| async move {
        let hub = a_hub();
        let source = Rc::new(RefCell::new(Remote::start()));
        let id = hub.add_source(source.clone());
        let channel = hub
            .open_channel(ChannelKind::EngineLane, id, 4)
            .expect("room");
        let poll_loop = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Adaptive));
        for _wait in 0..2_000 {
            let deadline = Deadline::after(hub.now(), LIVENESS);
            let wait = hub.begin("wake", deadline, None).expect("room");
            // Time for the loop to park before the post exists.
            shard.sleep(Duration::from_micros(100)).await;
            let work = hub.reserve(wait.slot(), channel, 1).expect("room");
            source.borrow_mut().post(work);
            assert_eq!(wait.await, Ok(()));
        }
        hub.stop();
        poll_loop.await;
        source.borrow_mut().end();
    });
}

#[test]
fn a_deadline_ends_a_wait_on_a_parked_shard() {
    for policy in [PollPolicy::Armed, PollPolicy::Adaptive, PollPolicy::Spin] {
        on_a_shard(move |shard| async move {
            let hub = a_hub();
            let poll_loop = shard.spawn(hub.clone().run(shard.clone(), policy));
            // Far one first: the loop parks until it, and must notice that a nearer one came.
            let far = Deadline::after(hub.now(), Duration::from_secs(50));
            let far = hub.begin("far", far, None).expect("room");
            shard.sleep(Duration::from_millis(5)).await;
            let begun = Instant::now();
            let near = Deadline::after(hub.now(), Duration::from_millis(30));
            let near = hub.begin("near", near, None).expect("room");
            assert_eq!(near.await, Err(EndReason::Deadline));
            assert!(begun.elapsed() >= Duration::from_millis(30), "never early");
            drop(far);
            hub.stop();
            poll_loop.await;
        });
    }
}

#[test]
fn an_idle_loop_does_not_spin() {
    for policy in [PollPolicy::Armed, PollPolicy::Adaptive] {
        on_a_shard(move |shard| async move {
            let hub = a_hub();
            let source = Rc::new(RefCell::new(Remote::start()));
            let id = hub.add_source(source.clone());
            hub.open_channel(ChannelKind::EngineLane, id, 4)
                .expect("room");
            let poll_loop = shard.spawn(hub.clone().run(shard.clone(), policy));
            let deadline = Deadline::after(hub.now(), Duration::from_secs(40));
            let wait = hub.begin("idle", deadline, None).expect("room");
            shard.sleep(Duration::from_millis(50)).await;
            let before = hub.turns();
            shard.sleep(Duration::from_secs(1)).await;
            let turns = hub.turns() - before;
            println!("{policy:?}: {turns} turns in a second of nothing");
            assert!(turns < 50, "{turns} turns in a second of nothing");
            drop(wait);
            hub.stop();
            poll_loop.await;
            source.borrow_mut().end();
        });
    }
}

#[test]
fn a_spinning_loop_lets_other_tasks_and_their_io_run() {
    on_a_shard(|shard| async move {
        let hub = a_hub();
        let poll_loop = shard.spawn(hub.clone().run(shard.clone(), PollPolicy::Spin));
        let (near, far) = std::os::unix::net::UnixStream::pair().expect("sockets");
        near.set_nonblocking(true).expect("non-blocking");
        let echo = std::thread::spawn(move || {
            let mut far = far;
            let mut byte = [0];
            while far.read(&mut byte).is_ok_and(|count| count == 1) {
                far.write_all(&byte).expect("echo");
            }
        });
        for round in 0..200u8 {
            (&near).write_all(&[round]).expect("room for a byte");
            let mut byte = [0];
            while (&near).read(&mut byte).is_err() {
                shard.sleep(Duration::from_micros(200)).await;
            }
            assert_eq!(byte, [round]);
        }
        let turns = hub.turns();
        assert!(turns > 200, "the loop spun meanwhile: {turns} turns");
        drop(near);
        echo.join().expect("echo");
        hub.stop();
        poll_loop.await;
    });
}
