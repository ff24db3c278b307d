//! The sentinel's thread.

use super::config::SentinelConfig;
use super::health::{HealthView, StandingKind, Subject};
use super::listener::HealthListener;
use super::starved::a_thread_is_starved;
use super::watch::{LaneReading, LaneWatch, ShardReading, ShardWatch};
use crate::bridge::lock;
use crate::lane::LanePulse;
use crate::shard::{EventFd, ShardRemote, abort_on_unwind, abort_process};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The running sentinel. Dropping it stops its thread.
pub struct Sentinel {
    shared: Arc<Shared>,
    health_addr: Option<SocketAddr>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    config: SentinelConfig,
    health: HealthView,
    watched: Mutex<Vec<Watched>>,
    stop: AtomicBool,
    wake: EventFd,
}

struct Watched {
    subject: Arc<Subject>,
    what: Subjects,
}

enum Subjects {
    Shard(ShardRemote, ShardWatch),
    /// Weak: a lane that was dropped is no longer watched.
    Lane(std::sync::Weak<LanePulse>, LaneWatch),
}

impl Sentinel {
    /// Starts the thread and its health port.
    ///
    /// # Errors
    /// When the port cannot be listened on, or the thread or a descriptor cannot be had.
    pub fn start(config: SentinelConfig) -> io::Result<Self> {
        let listener = config.health_listen.map(HealthListener::bind).transpose()?;
        let health_addr = listener.as_ref().map(|l| l.local_addr()).transpose()?;
        let shared = Arc::new(Shared {
            config,
            health: HealthView::default(),
            watched: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            wake: EventFd::new()?,
        });
        let own = shared.clone();
        let thread = std::thread::Builder::new()
            .name("sentinel".into())
            .spawn(move || abort_on_unwind("the sentinel", || run(&own, listener)))?;
        Ok(Sentinel {
            shared,
            health_addr,
            thread: Some(thread),
        })
    }

    /// Where `/health` is answered, with the port that was taken.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.health_addr
    }

    /// What the sentinel finds, for other places that tell it (the API port, `/metrics`).
    pub fn health(&self) -> HealthView {
        self.shared.health.clone()
    }

    /// Watches a shard until its body ends.
    pub fn watch_shard(&self, shard: &ShardRemote) {
        let still_max = self.shared.config.shard_still_max;
        let health = &self.shared.health;
        self.watch(Watched {
            subject: health.add(StandingKind::Shard, shard.name(), still_max),
            what: Subjects::Shard(shard.clone(), ShardWatch::default()),
        });
    }

    /// Watches an engine lane until nobody holds its pulse any more.
    pub fn watch_lane(&self, name: &str, pulse: &Arc<LanePulse>) {
        let still_max = self.shared.config.lane_still_max;
        let health = &self.shared.health;
        self.watch(Watched {
            subject: health.add(StandingKind::Lane, name, still_max),
            what: Subjects::Lane(Arc::downgrade(pulse), LaneWatch::default()),
        });
    }

    fn watch(&self, watched: Watched) {
        lock(&self.shared.watched).push(watched);
        // The first look comes at the fast rate.
        self.shared.wake.signal();
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake.signal();
        if let Some(thread) = self.thread.take() {
            // It aborts the process rather than to panic, so there is nothing in the result.
            let _ended = thread.join();
        }
    }
}

fn run(shared: &Shared, mut listener: Option<HealthListener>) {
    let config = &shared.config;
    let mut period = config.tick;
    let mut last = Instant::now();
    let mut next = last + period;
    while !shared.stop.load(Ordering::Acquire) {
        let woken = wait(
            shared,
            listener.as_ref(),
            next.saturating_duration_since(Instant::now()),
        );
        let now = Instant::now();
        if woken {
            next = next.min(now + config.tick);
        }
        if let Some(listener) = &mut listener {
            listener.serve(now, &shared.health);
        }
        if now < next {
            continue;
        }
        // A process that was frozen gets one period's credit for its absence.
        let credit = now.duration_since(last).min(period);
        let active = look_at_all(shared, credit);
        if let Some(listener) = &mut listener {
            listener.tick(now);
        }
        period = if active {
            config.tick
        } else {
            config.idle_tick
        };
        last = now;
        next = now + period;
    }
}

/// Waits for a connection, something to read, or the next tick; says whether somebody wants
/// the tick sooner.
fn wait(shared: &Shared, listener: Option<&HealthListener>, span: Duration) -> bool {
    let mut descriptors: Vec<RawFd> = vec![shared.wake.as_raw_fd()];
    if let Some(listener) = listener {
        listener.descriptors(&mut descriptors);
    }
    let mut polled: Vec<libc::pollfd> = descriptors
        .iter()
        .map(|fd| libc::pollfd {
            fd: *fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let span = libc::timespec {
        tv_sec: span.as_secs() as libc::time_t,
        tv_nsec: span.subsec_nanos().into(),
    };
    // SAFETY: `polled` and `span` are alive and `polled` is as long as said.
    unsafe {
        libc::ppoll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            &span,
            std::ptr::null(),
        )
    };
    shared.wake.drain()
}

fn look_at_all(shared: &Shared, credit: Duration) -> bool {
    let mut active = false;
    lock(&shared.watched).retain_mut(|watched| {
        let seen = match &mut watched.what {
            Subjects::Shard(shard, watch) => look_at_shard(&shared.config, shard, watch, credit),
            Subjects::Lane(pulse, watch) => look_at_lane(pulse, watch, credit),
        };
        let Some((still, is_active)) = seen else {
            shared.health.remove(&watched.subject);
            return false;
        };
        active |= is_active;
        watched.subject.set_still(still);
        abort_if_too_long(shared, watched, still);
        true
    });
    active
}

/// For how long the shard stands still and whether it is active; `None` once it has ended.
fn look_at_shard(
    config: &SentinelConfig,
    shard: &ShardRemote,
    watch: &mut ShardWatch,
    credit: Duration,
) -> Option<(Duration, bool)> {
    if shard.pulse().ended() {
        return None;
    }
    let reading = ShardReading {
        turns: shard.pulse().turns(),
        cpu: shard.pulse().cpu_time(),
    };
    let verdict = watch.tick(config, credit, reading);
    match (verdict.ping, verdict.hard) {
        (true, true) => shard.ping_hard(),
        (true, false) => shard.ping(),
        (false, _) => {}
    }
    Some((verdict.still, verdict.active))
}

fn look_at_lane(
    pulse: &std::sync::Weak<LanePulse>,
    watch: &mut LaneWatch,
    credit: Duration,
) -> Option<(Duration, bool)> {
    let pulse = pulse.upgrade()?;
    // Progress before jobs: a lane that ends its job in between is then seen without one.
    let reading = LaneReading {
        progress: pulse.progress(),
        jobs: pulse.jobs(),
    };
    Some((watch.tick(credit, reading), false))
}

fn abort_if_too_long(shared: &Shared, watched: &Watched, still: Duration) {
    let (kind, limit) = match &watched.what {
        Subjects::Shard(..) => ("shard", shared.config.shard_abort_after),
        Subjects::Lane(..) => ("engine lane", shared.config.lane_abort_after),
    };
    if still > limit && !a_thread_is_starved() {
        let standing = shared.health.standings();
        abort_process(&format!(
            "a watched {kind} has stood still for {still:?}, longer than {limit:?}; all: {standing:?}"
        ));
    }
}
