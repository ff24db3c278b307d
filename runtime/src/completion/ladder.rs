//! The stop ladder of one channel (PROTOCOL E2 to E4), as a pure state machine.
//!
//! ```text
//!            a waiter ends, its posts do not
//!   Open ──────────────────────────────► Grace ── stands still, or too long ──┐
//!    ▲ └────────── all such posts ended ───┘                                  │
//!    │                                                                        ▼
//!    │      close, stray or duplicate completion, terminal error          Draining
//!    │   (from Open or Grace) ───────────────────────────────────────────►    │
//!    │                                                    quiet ◄─────────────┤
//!   Free ◄────────────────────────────────────────────────┘                   │
//!                                             Quarantined ◄── stuck, or past the bound
//! ```
//!
//! Each rung is bounded, so that every channel with an ended waiter is Open again, Free or
//! Quarantined within `at_most` + `still` + `drain`.

use super::ids::ChannelKind;
use crate::source::Reap;
use crate::time::Nanos;
use std::time::Duration;

/// How long a channel may stand still once a waiter has ended (PROTOCOL 9).
pub const GRACE: Duration = Duration::from_millis(20);

/// How long a killed channel may drain before its pages are quarantined (PROTOCOL 9).
pub const DRAIN_BOUND: Duration = Duration::from_millis(250);

/// The longest grace while completions come (PROTOCOL E3): five times [`GRACE`].
const GRACE_MAX: Duration = Duration::from_millis(100);

/// An engine step or a launched kernel cannot be taken back, and one step may take tens of
/// milliseconds: such a channel counts as standing still when the sentinel would say so, too.
const GRACE_STEP: Duration = Duration::from_secs(1);

/// The limits of one kind of channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopRule {
    /// Killed when it shows no progress for this long.
    pub still: Duration,
    /// Killed when posts of an ended waiter hold memory for this long, progress or not.
    pub at_most: Duration,
    /// Whether the time for `at_most` follows the measured rate: twice what is outstanding,
    /// between `still` and `at_most`.
    pub by_rate: bool,
    /// How long it may drain after the kill.
    pub drain: Duration,
    /// Whether one failed completion is the end of the channel.
    pub error_is_terminal: bool,
    /// Whether its source may be able to take a post back ([`CompletionSource::abandon`]).
    ///
    /// [`CompletionSource::abandon`]: crate::source::CompletionSource::abandon
    pub can_abandon: bool,
}

impl StopRule {
    /// The rule for channels of `kind`.
    pub fn of(kind: ChannelKind) -> Self {
        let bytes = StopRule {
            still: GRACE,
            at_most: GRACE_MAX,
            by_rate: false,
            drain: DRAIN_BOUND,
            error_is_terminal: false,
            can_abandon: true,
        };
        let steps = StopRule {
            still: GRACE_STEP,
            at_most: GRACE_STEP,
            can_abandon: false,
            ..bytes
        };
        match kind {
            ChannelKind::Tcp
            | ChannelKind::SharedMemory
            | ChannelKind::Control
            | ChannelKind::Simulated => bytes,
            ChannelKind::Rdma => StopRule {
                by_rate: true,
                error_is_terminal: true,
                can_abandon: false,
                ..bytes
            },
            ChannelKind::EngineLane => steps,
            ChannelKind::GpuStream => StopRule {
                error_is_terminal: true,
                ..steps
            },
        }
    }

    /// The grace for a channel with `outstanding` posts that retired `retired` posts in `busy`.
    pub(super) fn allowance(&self, outstanding: u64, retired: u64, busy: Duration) -> Duration {
        if !self.by_rate {
            return self.at_most;
        }
        if retired == 0 {
            return self.still;
        }
        let each_ns = busy.as_nanos() / u128::from(retired);
        let twice_ns = 2 * each_ns * u128::from(outstanding);
        Duration::from_nanos(twice_ns.min(u128::from(u64::MAX)) as u64)
            .clamp(self.still, self.at_most)
    }
}

/// Where a channel stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The number is not in use.
    Free,
    /// In use, nothing to stop.
    Open,
    /// In use, with posts outstanding whose waiter has ended.
    Grace(Grace),
    /// Killed; the source has not yet proven it quiet.
    Draining {
        /// Past this it counts as stuck.
        until: Nanos,
    },
    /// Could not be proven quiet. The number is never used again in this process, since its
    /// completions may still come.
    Quarantined,
}

/// The clocks of a channel in grace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grace {
    /// Since when the posts that were outstanding at `mark` have been waited for.
    pub since: Nanos,
    /// Last seen progress, or the entry into grace.
    pub progress_at: Nanos,
    /// The source's own measure of progress when last asked.
    pub moved: u64,
    /// First position posted after `since`: once the channel has retired all before it, the
    /// clock starts anew, so that a steady stream of cancels does not kill a channel that moves.
    pub mark: u64,
}

/// What happens to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Given out by `open_channel`.
    Opened,
    /// A waiter ended with posts outstanding here.
    Orphaned {
        /// The channel's next position.
        next_post: u64,
    },
    /// A completion retired posts here.
    Retired {
        /// Whether posts of ended waiters remain.
        orphans: bool,
        /// First position not retired.
        next_retire: u64,
        /// The channel's next position.
        next_post: u64,
    },
    /// Time has passed.
    Tick {
        /// The source's measure of progress.
        moved: u64,
        /// Whether posts of ended waiters still hold memory (were not abandoned).
        pinned: bool,
        /// How long they may.
        allowance: Duration,
    },
    /// It must go: closed, broken, or in breach of P3.
    Kill,
    /// The source's answer for a killed channel.
    Reaped(Reap),
}

/// What the slab must do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing.
    None,
    /// Order the kill and end the waiters.
    Kill,
    /// All posts have ended: guards may go.
    Quiet,
    /// Posts may still touch memory: guards are quarantined.
    Stuck,
}

/// One step of the ladder. Events that make no sense in a phase change nothing: completions,
/// kills and answers may all come after the end.
pub(super) fn step(phase: Phase, event: Event, rule: &StopRule, now: Nanos) -> (Phase, Action) {
    match phase {
        Phase::Free => match event {
            Event::Opened => (Phase::Open, Action::None),
            Event::Orphaned { .. }
            | Event::Retired { .. }
            | Event::Tick { .. }
            | Event::Kill
            | Event::Reaped(_) => (phase, Action::None),
        },
        Phase::Open => match event {
            Event::Orphaned { next_post } => {
                let grace = Grace {
                    since: now,
                    progress_at: now,
                    moved: 0,
                    mark: next_post,
                };
                (Phase::Grace(grace), Action::None)
            }
            Event::Kill => killed(rule, now),
            Event::Opened | Event::Retired { .. } | Event::Tick { .. } | Event::Reaped(_) => {
                (phase, Action::None)
            }
        },
        Phase::Grace(grace) => match event {
            Event::Retired { orphans: false, .. } => (Phase::Open, Action::None),
            Event::Retired {
                orphans: true,
                next_retire,
                next_post,
            } => (
                Phase::Grace(grace.after_retire(next_retire, next_post, now)),
                Action::None,
            ),
            Event::Tick {
                moved,
                pinned,
                allowance,
            } => {
                let grace = grace.after_look(moved, now);
                let still = now.since(grace.progress_at) >= rule.still;
                let too_long = pinned && now.since(grace.since) >= allowance;
                if still || too_long {
                    killed(rule, now)
                } else {
                    (Phase::Grace(grace), Action::None)
                }
            }
            Event::Kill => killed(rule, now),
            Event::Opened | Event::Orphaned { .. } | Event::Reaped(_) => (phase, Action::None),
        },
        Phase::Draining { until } => match event {
            Event::Reaped(Reap::Quiet) => (Phase::Free, Action::Quiet),
            Event::Reaped(Reap::Stuck) => (Phase::Quarantined, Action::Stuck),
            Event::Reaped(Reap::Draining(_)) if now >= until => (Phase::Quarantined, Action::Stuck),
            Event::Reaped(Reap::Draining(_))
            | Event::Opened
            | Event::Orphaned { .. }
            | Event::Retired { .. }
            | Event::Tick { .. }
            | Event::Kill => (phase, Action::None),
        },
        Phase::Quarantined => match event {
            Event::Opened
            | Event::Orphaned { .. }
            | Event::Retired { .. }
            | Event::Tick { .. }
            | Event::Kill
            | Event::Reaped(_) => (phase, Action::None),
        },
    }
}

fn killed(rule: &StopRule, now: Nanos) -> (Phase, Action) {
    let until = now.after(rule.drain);
    (Phase::Draining { until }, Action::Kill)
}

impl Grace {
    fn after_retire(mut self, next_retire: u64, next_post: u64, now: Nanos) -> Self {
        self.progress_at = now;
        if next_retire >= self.mark {
            self.since = now;
            self.mark = next_post;
        }
        self
    }

    fn after_look(mut self, moved: u64, now: Nanos) -> Self {
        if moved != self.moved {
            self.moved = moved;
            self.progress_at = now;
        }
        self
    }
}

impl Phase {
    /// Whether posts may be made.
    pub fn takes_posts(self) -> bool {
        match self {
            Phase::Open | Phase::Grace(_) => true,
            Phase::Free | Phase::Draining { .. } | Phase::Quarantined => false,
        }
    }

    /// Whether the poll loop must look at it every tick.
    pub fn is_stopping(self) -> bool {
        match self {
            Phase::Grace(_) | Phase::Draining { .. } => true,
            Phase::Free | Phase::Open | Phase::Quarantined => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: StopRule = StopRule {
        still: GRACE,
        at_most: GRACE_MAX,
        by_rate: false,
        drain: DRAIN_BOUND,
        error_is_terminal: false,
        can_abandon: true,
    };

    fn ms(value: u64) -> Nanos {
        Nanos(value * 1_000_000)
    }

    fn look(moved: u64, pinned: bool) -> Event {
        Event::Tick {
            moved,
            pinned,
            allowance: RULE.allowance(1, 0, Duration::ZERO),
        }
    }

    fn grace_at(now: Nanos, next_post: u64) -> Phase {
        let (phase, action) = step(Phase::Open, Event::Orphaned { next_post }, &RULE, now);
        assert_eq!(action, Action::None);
        phase
    }

    #[test]
    fn a_channel_that_stands_still_is_killed_after_the_grace() {
        let phase = grace_at(ms(0), 1);
        let (phase, action) = step(phase, look(0, false), &RULE, ms(19));
        assert_eq!(action, Action::None);
        let (phase, action) = step(phase, look(0, false), &RULE, ms(20));
        assert_eq!(action, Action::Kill);
        assert_eq!(phase, Phase::Draining { until: ms(270) });
    }

    #[test]
    fn bytes_that_move_keep_a_channel_alive_when_nothing_is_pinned() {
        let mut phase = grace_at(ms(0), 1);
        for at in 1..1000 {
            let (next, action) = step(phase, look(at, false), &RULE, ms(at));
            assert_eq!(action, Action::None);
            phase = next;
        }
    }

    #[test]
    fn pinned_pages_wait_no_longer_than_the_limit_even_if_bytes_move() {
        let mut phase = grace_at(ms(0), 1);
        for at in 1..100 {
            let (next, action) = step(phase, look(at, true), &RULE, ms(at));
            assert_eq!(action, Action::None);
            phase = next;
        }
        let (_, action) = step(phase, look(100, true), &RULE, ms(100));
        assert_eq!(action, Action::Kill);
    }

    #[test]
    fn a_steady_stream_of_cancels_does_not_kill_a_channel_that_retires_them() {
        let mut phase = grace_at(ms(0), 10);
        for round in 1..100 {
            let retired = Event::Retired {
                orphans: true,
                next_retire: round * 10,
                next_post: (round + 1) * 10,
            };
            let (next, _) = step(phase, retired, &RULE, ms(round * 15));
            let (next, action) = step(next, look(0, true), &RULE, ms(round * 15 + 14));
            assert_eq!(action, Action::None, "round {round}");
            phase = next;
        }
    }

    #[test]
    fn the_last_orphan_leaves_the_channel_open() {
        let retired = Event::Retired {
            orphans: false,
            next_retire: 1,
            next_post: 1,
        };
        let (phase, action) = step(grace_at(ms(0), 1), retired, &RULE, ms(5));
        assert_eq!((phase, action), (Phase::Open, Action::None));
    }

    #[test]
    fn draining_ends_quiet_or_stuck_and_within_its_bound() {
        let draining = Phase::Draining { until: ms(250) };
        let reaped = |reap, at| step(draining, Event::Reaped(reap), &RULE, at);
        assert_eq!(reaped(Reap::Draining(1), ms(249)), (draining, Action::None));
        assert_eq!(reaped(Reap::Quiet, ms(1)), (Phase::Free, Action::Quiet));
        let stuck = (Phase::Quarantined, Action::Stuck);
        assert_eq!(reaped(Reap::Stuck, ms(1)), stuck);
        assert_eq!(reaped(Reap::Draining(1), ms(250)), stuck);
    }

    #[test]
    fn a_quarantined_channel_stays_so() {
        for event in [
            Event::Opened,
            Event::Kill,
            Event::Reaped(Reap::Quiet),
            look(1, true),
        ] {
            let after = step(Phase::Quarantined, event, &RULE, ms(1));
            assert_eq!(after, (Phase::Quarantined, Action::None));
        }
    }

    #[test]
    fn the_grace_of_rdma_follows_the_rate_between_its_bounds() {
        let rule = StopRule::of(ChannelKind::Rdma);
        let busy = Duration::from_millis(100);
        assert_eq!(rule.allowance(5, 0, busy), GRACE);
        assert_eq!(rule.allowance(5, 100, busy), GRACE);
        assert_eq!(rule.allowance(30, 100, busy), Duration::from_millis(60));
        assert_eq!(rule.allowance(5000, 100, busy), GRACE_MAX);
    }
}
