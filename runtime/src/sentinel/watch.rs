//! What the sentinel concludes from what it sees. Sans-IO: given readings, it decides.

use super::config::SentinelConfig;
use std::time::Duration;

/// After a shard has stood still this long it is pinged at every [`SLOW_PINGS`]th tick only:
/// each unanswered hard ping stays in the shard's wake queue (16 bytes), so a shard that is wedged
/// for an hour (aborts switched off) holds some 36,000 of them.
const STILL_SLOW: Duration = Duration::from_secs(1);
const SLOW_PINGS: u64 = 20;

/// What was read of a shard at one tick.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardReading {
    pub turns: u64,
    /// CPU time of its thread, if that can be read.
    pub cpu: Option<Duration>,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShardVerdict {
    pub ping: bool,
    /// The ping before was not answered: ping by all means.
    pub hard: bool,
    /// Whether the next look should come soon.
    pub active: bool,
    /// For how long it has stood still.
    pub still: Duration,
}

/// An answer is quiet if the shard used less CPU than this since the look before: being woken,
/// turning once and parking again takes 20 to 60 µs.
const QUIET_CPU: Duration = Duration::from_micros(200);
/// Quiet answers in a row after which a shard is believed to sleep rightly. One is not enough:
/// an executor that parks with runnable tasks may, woken by a ping, answer it and park again.
const QUIET_ANSWERS: u32 = 4;

/// What is remembered of one shard.
#[derive(Debug, Default)]
pub(super) struct ShardWatch {
    turns: u64,
    cpu: Option<Duration>,
    /// A ping was sent and no turn was seen since.
    pinged: bool,
    quiet_answers: u32,
    still: Duration,
    since_ping: Duration,
    ticks_still: u64,
}

impl ShardWatch {
    /// One look; `credit` is the time that may be counted for it, at most one period.
    pub fn tick(
        &mut self,
        config: &SentinelConfig,
        credit: Duration,
        reading: ShardReading,
    ) -> ShardVerdict {
        self.since_ping += credit;
        let turned = reading.turns != self.turns;
        let cpu_used = match (reading.cpu, self.cpu) {
            (Some(now), Some(before)) => now.saturating_sub(before),
            (Some(_), None) | (None, _) => Duration::MAX,
        };
        self.turns = reading.turns;
        self.cpu = reading.cpu;
        let ping = match (turned, self.pinged) {
            (true, true) => self.answered(cpu_used),
            // It turned by itself, and may have parked wrongly right after: ask.
            (true, false) => self.moved(),
            (false, true) => self.not_answered(credit),
            (false, false) => self.asleep(config, cpu_used),
        };
        if ping {
            self.pinged = true;
            self.since_ping = Duration::ZERO;
        }
        ShardVerdict {
            ping,
            hard: ping && !self.still.is_zero(),
            active: ping || turned || self.quiet_answers < QUIET_ANSWERS,
            still: self.still,
        }
    }

    /// The answer explains this look's turn and CPU time; the next look asks again if need be.
    fn answered(&mut self, cpu_used: Duration) -> bool {
        self.pinged = false;
        self.still = Duration::ZERO;
        self.ticks_still = 0;
        self.quiet_answers = match cpu_used < QUIET_CPU {
            true => self.quiet_answers.saturating_add(1),
            false => 0,
        };
        false
    }

    fn moved(&mut self) -> bool {
        self.quiet_answers = 0;
        true
    }

    fn not_answered(&mut self, credit: Duration) -> bool {
        self.still += credit;
        self.ticks_still += 1;
        self.quiet_answers = 0;
        self.still < STILL_SLOW || self.ticks_still.is_multiple_of(SLOW_PINGS)
    }

    fn asleep(&mut self, config: &SentinelConfig, cpu_used: Duration) -> bool {
        if !cpu_used.is_zero() {
            self.quiet_answers = 0;
        }
        self.quiet_answers < QUIET_ANSWERS || self.since_ping >= config.idle_ping
    }
}

/// What was read of a lane at one tick.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneReading {
    pub jobs: u64,
    pub progress: u64,
}

/// What is remembered of one lane.
#[derive(Debug, Default)]
pub(super) struct LaneWatch {
    progress: u64,
    still: Duration,
}

impl LaneWatch {
    /// One look; gives for how long the lane has stood still with a job.
    pub fn tick(&mut self, credit: Duration, reading: LaneReading) -> Duration {
        if reading.jobs == 0 || reading.progress != self.progress {
            self.still = Duration::ZERO;
        } else {
            self.still += credit;
        }
        self.progress = reading.progress;
        self.still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(5);

    struct Sim {
        config: SentinelConfig,
        watch: ShardWatch,
        turns: u64,
        cpu: Duration,
    }

    impl Sim {
        fn new() -> Self {
            Sim {
                config: SentinelConfig::default(),
                watch: ShardWatch::default(),
                turns: 0,
                cpu: Duration::ZERO,
            }
        }

        fn look(&mut self) -> ShardVerdict {
            let reading = ShardReading {
                turns: self.turns,
                cpu: Some(self.cpu),
            };
            self.watch.tick(&self.config, TICK, reading)
        }

        /// Answers pings until the shard is believed to sleep.
        fn settle(&mut self) {
            while self.look().active {
                if self.watch.pinged {
                    self.turn();
                }
            }
        }

        fn turn(&mut self) {
            self.turns += 1;
            self.cpu += Duration::from_micros(20);
        }
    }

    #[test]
    fn an_idle_shard_is_pinged_at_the_slow_rate_and_is_never_still() {
        let mut sim = Sim::new();
        let mut pings = 0;
        for _ in 0..400 {
            let verdict = sim.look();
            assert_eq!(verdict.still, Duration::ZERO);
            if verdict.ping {
                pings += 1;
                sim.turn();
            }
        }
        // Two seconds: four pings to believe it, then one per 100 ms.
        assert!((20..=24).contains(&pings), "{pings}");
    }

    #[test]
    fn a_shard_that_used_cpu_without_turning_is_pinged_until_it_answers() {
        let mut sim = Sim::new();
        sim.settle();
        sim.cpu += Duration::from_micros(5);
        for ticks in 0..10u32 {
            let verdict = sim.look();
            assert!(verdict.ping && verdict.active);
            assert_eq!(verdict.hard, ticks > 0);
            assert_eq!(verdict.still, TICK * ticks);
        }
        sim.turn();
        assert_eq!(sim.look().still, Duration::ZERO);
    }

    #[test]
    fn turns_without_a_ping_are_asked_about() {
        let mut sim = Sim::new();
        sim.settle();
        sim.turn();
        assert!(sim.look().ping, "it may have parked right after that turn");
        sim.turn();
        assert!(!sim.look().ping, "the answer explains itself");
    }

    #[test]
    fn a_wedged_shard_is_found_within_the_promised_second() {
        let mut sim = Sim::new();
        // Believed to sleep, wedged since, its CPU clock not moving: the worst case.
        sim.settle();
        let mut waited = Duration::ZERO;
        while sim.look().still <= sim.config.shard_still_max {
            waited += sim.config.tick;
        }
        assert!(waited < Duration::from_secs(1), "{waited:?}");
    }

    #[test]
    fn unanswered_pings_become_rare() {
        let mut sim = Sim::new();
        let pings = (0..20_000).filter(|_| sim.look().ping).count();
        // 100 s: 200 in the first second, then one per 100 ms.
        assert!(pings < 1300, "{pings}");
    }

    #[test]
    fn a_lane_is_still_only_with_a_job_and_without_progress() {
        let mut lane = LaneWatch::default();
        let mut look = |jobs, progress| lane.tick(TICK, LaneReading { jobs, progress });
        assert_eq!(look(0, 0), Duration::ZERO);
        assert_eq!(look(0, 0), Duration::ZERO);
        assert_eq!(look(1, 1), Duration::ZERO);
        assert_eq!(look(1, 1), TICK);
        assert_eq!(look(1, 1), 2 * TICK);
        assert_eq!(look(1, 2), Duration::ZERO);
        assert_eq!(look(1, 2), TICK);
        assert_eq!(look(0, 2), Duration::ZERO);
    }
}
