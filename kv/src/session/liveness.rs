//! Who counts as alive (PROTOCOL S3, S4). Sans-IO: time and frames come in, a verdict goes out.
//!
//! Silence is counted in ticks of *our* timer, each credited with at most two periods: a
//! process that was stopped for a minute does not find all its peers dead when it wakes.

use kvserve_runtime::Nanos;
use std::time::Duration;

/// Times of [`Liveness`].
#[derive(Clone, Copy, Debug)]
pub struct LivenessLimits {
    /// Span between two heartbeats.
    pub heartbeat: Duration,
    /// So many periods without a frame make a peer suspect.
    pub suspect_missed: u32,
    /// Silence after which the peer is dead.
    pub dead: Duration,
}

impl Default for LivenessLimits {
    fn default() -> Self {
        LivenessLimits {
            heartbeat: Duration::from_millis(200),
            suspect_missed: 3,
            dead: Duration::from_secs(3),
        }
    }
}

/// A peer's state as its frames show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulse {
    /// Frames come.
    Alive,
    /// No new work for it.
    Suspect,
    /// The session ends.
    Dead,
}

/// The silence of one peer.
#[derive(Clone, Debug)]
pub struct Liveness {
    limits: LivenessLimits,
    silence: Duration,
    last_tick: Nanos,
}

impl Liveness {
    /// A peer that was heard at `now`.
    pub fn new(limits: LivenessLimits, now: Nanos) -> Self {
        Liveness {
            limits,
            silence: Duration::ZERO,
            last_tick: now,
        }
    }

    /// A frame of the peer passed its check.
    pub fn heard(&mut self) {
        self.silence = Duration::ZERO;
    }

    /// To be called about every heartbeat period.
    pub fn tick(&mut self, now: Nanos) -> Pulse {
        let credit = now.since(self.last_tick).min(self.limits.heartbeat * 2);
        self.last_tick = now;
        self.silence += credit;
        self.pulse()
    }

    /// The present verdict.
    pub fn pulse(&self) -> Pulse {
        if self.silence >= self.limits.dead {
            Pulse::Dead
        } else if self.silence > self.limits.heartbeat * self.limits.suspect_missed {
            Pulse::Suspect
        } else {
            Pulse::Alive
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Nanos {
        Nanos(value * 1_000_000)
    }

    #[test]
    fn silence_makes_a_peer_suspect_then_dead_and_a_frame_revives_it() {
        let mut live = Liveness::new(LivenessLimits::default(), ms(0));
        for t in (200..=600).step_by(200) {
            assert_eq!(live.tick(ms(t)), Pulse::Alive, "{t}");
        }
        assert_eq!(live.tick(ms(800)), Pulse::Suspect);
        live.heard();
        assert_eq!(live.pulse(), Pulse::Alive);
        let mut verdicts = Vec::new();
        for t in (1000..=3800).step_by(200) {
            verdicts.push(live.tick(ms(t)));
        }
        assert_eq!(verdicts.last(), Some(&Pulse::Dead));
        assert_eq!(
            verdicts.iter().filter(|v| **v == Pulse::Suspect).count(),
            11
        );
    }

    #[test]
    fn our_own_sleep_is_not_the_peers_silence() {
        let mut live = Liveness::new(LivenessLimits::default(), ms(0));
        assert_eq!(live.tick(ms(60_000)), Pulse::Alive);
        assert_eq!(live.tick(ms(60_200)), Pulse::Alive);
        assert_eq!(live.tick(ms(60_400)), Pulse::Suspect);
    }
}
