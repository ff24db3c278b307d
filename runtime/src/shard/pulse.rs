//! What other threads may know of a shard, and the one thing that they may do to it: ping it.

use super::bell::Doorbell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// A shard's signs of life: written by the shard, read by the sentinel.
#[derive(Debug)]
pub struct ShardPulse {
    turns: AtomicU64,
    ended: AtomicBool,
    /// The thread's CPU clock, or [`NO_CLOCK`] before the thread has named it.
    cpu_clock: AtomicI32,
}

/// No thread's CPU clock has this id: those are negative numbers with the low bits set.
const NO_CLOCK: i32 = i32::MAX;

impl ShardPulse {
    pub(crate) fn new() -> Self {
        ShardPulse {
            turns: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            cpu_clock: AtomicI32::new(NO_CLOCK),
        }
    }

    /// Counts one turn of the shard. Called on the shard only (the poll loop once a turn, the
    /// doorbell task by itself), so it is a plain load and store.
    pub fn turn(&self) {
        let turns = self.turns.load(Ordering::Relaxed);
        self.turns.store(turns + 1, Ordering::Relaxed);
    }

    /// Turns counted so far.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Whether the shard's body has ended: such a shard no longer turns and is not unhealthy.
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn set_ended(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Lets other threads read the calling thread's CPU time through this pulse.
    pub(crate) fn adopt_this_thread(&self) {
        let mut clock: libc::clockid_t = 0;
        // SAFETY: `pthread_self` is the running thread, and `clock` is writable.
        let code = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
        if code == 0 {
            self.cpu_clock.store(clock, Ordering::Relaxed);
        }
    }

    /// CPU time that the shard's thread has used; `None` before it runs and after it ended.
    pub fn cpu_time(&self) -> Option<Duration> {
        let clock = self.cpu_clock.load(Ordering::Relaxed);
        if clock == NO_CLOCK || self.ended() {
            return None;
        }
        let mut spec = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `spec` is writable; a clock of a thread that is gone is an error, not a fault.
        let code = unsafe { libc::clock_gettime(clock, &mut spec) };
        (code == 0).then(|| Duration::new(spec.tv_sec as u64, spec.tv_nsec as u32))
    }
}

/// The handle to a shard that any thread may hold: its name, its pulse, its bell.
#[derive(Clone, Debug)]
pub struct ShardRemote {
    pub(crate) name: Arc<str>,
    pub(crate) pulse: Arc<ShardPulse>,
    pub(crate) bell: Arc<Doorbell>,
}

impl ShardRemote {
    pub(crate) fn new(name: &str) -> std::io::Result<Self> {
        Ok(ShardRemote {
            name: name.into(),
            pulse: Arc::new(ShardPulse::new()),
            bell: Arc::new(Doorbell::new()?),
        })
    }

    /// The shard's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shard's signs of life.
    pub fn pulse(&self) -> &ShardPulse {
        &self.pulse
    }

    /// Makes the shard's executor turn, also when it sleeps. A healthy shard answers with
    /// [`ShardPulse::turn`].
    pub fn ping(&self) {
        self.bell.wake();
    }

    /// As [`ShardRemote::ping`], for a shard that did not answer one: this also reaches an
    /// executor that sleeps with the task that should have answered. Each call that is not
    /// answered leaves an entry of 16 bytes in its wake queue: the caller bounds their rate.
    pub fn ping_hard(&self) {
        self.bell.wake();
        self.bell.wake_hard();
    }
}
