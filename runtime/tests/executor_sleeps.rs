//! The executor can sleep with runnable tasks: if its preempt timer fires between its arming
//! and the first task, "nothing ran" is taken for "nothing to run". A latency class of 20 µs
//! makes that likely. Without the sentinel the task that only yields is then not polled again;
//! with it the gap is bounded.

use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use kvserve_runtime::shard::ShardHandle;
use kvserve_runtime::{Nanos, Shard, ShardConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A task that yields in a loop and leaves the time of its last poll.
struct Yielder {
    shard: Option<ShardHandle<()>>,
    last_poll: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Yielder {
    fn start(latency: Duration) -> Self {
        let last_poll = Arc::new(AtomicU64::new(Nanos::now().0));
        let stop = Arc::new(AtomicBool::new(false));
        let (polled, stopped) = (last_poll.clone(), stop.clone());
        let config = ShardConfig {
            name: "sleepy".into(),
            core: Some(0),
        };
        let shard = Shard::launch(config, move |shard| async move {
            let yields = shard.clone();
            let task = shard.spawn_in_latency_class_for_reproduction(latency, async move {
                while !stopped.load(Ordering::Relaxed) {
                    polled.store(Nanos::now().0, Ordering::Relaxed);
                    yields.yield_now().await;
                }
            });
            task.await
        })
        .unwrap();
        Yielder {
            shard: Some(shard),
            last_poll,
            stop,
        }
    }

    /// How long ago the task was polled last.
    fn gap(&self) -> Duration {
        Nanos::now().since(Nanos(self.last_poll.load(Ordering::Relaxed)))
    }

    /// The longest gap seen within `span`; returns early once it exceeds `enough`.
    fn longest_gap(&self, span: Duration, enough: Duration) -> Duration {
        let start = Instant::now();
        let mut longest = Duration::ZERO;
        while start.elapsed() < span && longest < enough {
            std::thread::sleep(Duration::from_millis(1));
            longest = longest.max(self.gap());
        }
        longest
    }

    fn wake_by_hand(&self) {
        self.shard.as_ref().unwrap().remote().ping_hard();
    }
}

impl Drop for Yielder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let shard = self.shard.take().unwrap();
        let start = Instant::now();
        while !shard.is_finished() && start.elapsed() < Duration::from_secs(20) {
            shard.remote().ping_hard();
            std::thread::sleep(Duration::from_millis(1));
        }
        shard.join().unwrap();
    }
}

/// Both in one test: they share a CPU and would disturb each other.
#[test]
fn sleeps_with_runnable_tasks_without_the_sentinel_and_not_with_it() {
    // Far beyond any time slice: only a sleeping executor leaves its task alone for so long.
    let asleep = Duration::from_millis(1500);
    let mut slept = false;
    for latency_us in [20, 100, 20, 50] {
        let yielder = Yielder::start(Duration::from_micros(latency_us));
        let gap = yielder.longest_gap(Duration::from_secs(6), asleep);
        println!("no sentinel, latency class {latency_us} us: longest gap {gap:?}");
        if gap >= asleep {
            slept = true;
            // It is asleep, not dead: one wake from another thread and it goes on.
            yielder.wake_by_hand();
            let start = Instant::now();
            while yielder.gap() >= asleep && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(yielder.gap() < asleep, "a ping wakes it");
            break;
        }
    }
    assert!(
        slept,
        "the executor did not sleep with runnable tasks: if its version was changed, the fault \
         may be mended; then this test and the sentinel's pings can go"
    );

    let sentinel = Sentinel::start(SentinelConfig::default()).unwrap();
    for latency_us in [20, 100] {
        let yielder = Yielder::start(Duration::from_micros(latency_us));
        sentinel.watch_shard(yielder.shard.as_ref().unwrap().remote());
        let bound = Duration::from_millis(500);
        let gap = yielder.longest_gap(Duration::from_secs(5), bound);
        println!("with the sentinel, latency class {latency_us} us: longest gap {gap:?}");
        assert!(gap < bound, "the sentinel lets it sleep for {gap:?}");
    }
}
