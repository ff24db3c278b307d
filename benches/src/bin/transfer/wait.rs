//! How both sides of floors and pulls wait: as a shard under `PollPolicy::Adaptive` does. It
//! polls on for a while after something completed, then sleeps until a descriptor is ready.

use super::sys;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Nothing is waited for longer; the caller looks again.
const SLEEP_MAX: Duration = Duration::from_secs(1);

pub struct Waiter {
    spin: Duration,
    completed: Instant,
}

impl Waiter {
    pub fn new(spin: Duration) -> Self {
        Waiter {
            spin,
            completed: Instant::now(),
        }
    }

    /// Something completed.
    pub fn completed(&mut self) {
        self.completed = Instant::now();
    }

    /// Whether to look again at once; if so, a moment has passed.
    pub fn spins(&self) -> bool {
        let spins = self.completed.elapsed() < self.spin;
        if spins {
            std::hint::spin_loop();
        }
        spins
    }

    /// Looks again at once, or sleeps until a descriptor is ready.
    pub fn wait(&self, descriptors: &[(RawFd, i16)]) {
        if !self.spins() {
            sys::wait(descriptors, SLEEP_MAX);
        }
    }

    /// Sleeps until a descriptor is ready.
    pub fn sleep(&self, descriptors: &[(RawFd, i16)]) {
        sys::wait(descriptors, SLEEP_MAX);
    }
}
