//! Every edge of an attempt.

use super::*;
use crate::credits::CreditError;
use crate::session::frame::RefusedKind;
use crate::session::{AbortReason, AttemptId, CommitOutcome, Frame, RequestId};
use kvserve_runtime::{EndReason, Nanos};
use std::time::Duration;

fn ms(value: u64) -> Nanos {
    Nanos(value * 1_000_000)
}

const ID: AttemptId = AttemptId {
    request: RequestId {
        incarnation: 1,
        counter: 2,
    },
    attempt: 1,
};
const LEASE: u64 = 5;

struct Bed {
    attempt: Attempt,
    out: Vec<PullEffect>,
}

impl Bed {
    /// Asked at 0, three target pages of 512 KiB (two to a read), request deadline 60 s.
    fn asked() -> Self {
        Bed {
            attempt: Attempt::new(
                ms(0),
                ID,
                77,
                3,
                512 * 1024,
                ms(60_000),
                PullLimits::default(),
            ),
            out: Vec::new(),
        }
    }
    fn pulling() -> Self {
        let mut bed = Bed::asked();
        bed.on(
            0,
            PullEvent::Granted {
                lease: LEASE,
                epoch: 1,
                pages: 3,
            },
        );
        assert_eq!(bed.take(), [PullEffect::News(PullNews::Granted)]);
        bed
    }
    /// Everything is placed and checked at 10 ms.
    fn committing() -> Self {
        let mut bed = Bed::pulling();
        bed.complete(10, 0, &[1, 2, 3]);
        bed.on(10, PullEvent::ReadDone(0));
        bed.on(10, PullEvent::ReadDone(1));
        bed.checked(10, 2);
        bed.checked(10, 1);
        assert_eq!(bed.attempt.phase(), AttemptPhase::Committing);
        bed.take();
        bed
    }
    fn on(&mut self, at_ms: u64, event: PullEvent) {
        self.attempt.on(ms(at_ms), event, &mut self.out);
    }
    fn watermark(&mut self, at_ms: u64, first: u32, checksums: &[u64]) {
        self.on(
            at_ms,
            PullEvent::Watermark {
                lease: LEASE,
                first,
                checksums: checksums.to_vec(),
            },
        );
    }
    fn complete(&mut self, at_ms: u64, first: u32, checksums: &[u64]) {
        self.on(
            at_ms,
            PullEvent::Complete {
                lease: LEASE,
                pages: first + checksums.len() as u32,
                first,
                checksums: checksums.to_vec(),
            },
        );
    }
    fn checked(&mut self, at_ms: u64, count: u32) {
        self.on(at_ms, PullEvent::Checked { count, wrong: None });
    }
    fn answer(&mut self, at_ms: u64, outcome: CommitOutcome) {
        self.on(
            at_ms,
            PullEvent::CommitAnswer {
                lease: LEASE,
                outcome,
            },
        );
    }
    fn take(&mut self) -> Vec<PullEffect> {
        std::mem::take(&mut self.out)
    }
    fn posts(&self) -> Vec<(u64, u32, u32)> {
        self.out
            .iter()
            .filter_map(|effect| match effect {
                PullEffect::Post {
                    read, first, count, ..
                } => Some((*read, *first, *count)),
                _ => None,
            })
            .collect()
    }
    fn sent(&self, wanted: impl Fn(&Frame) -> bool) -> usize {
        self.out
            .iter()
            .filter(|effect| matches!(effect, PullEffect::Send(frame) if wanted(frame)))
            .count()
    }
    fn failure(&self) -> Option<&MigrationError> {
        self.out.iter().find_map(|effect| match effect {
            PullEffect::News(PullNews::Failed(error)) => Some(error),
            _ => None,
        })
    }
    fn ended(&self) -> Option<bool> {
        self.out.iter().find_map(|effect| match effect {
            PullEffect::Ended { free } => Some(*free),
            _ => None,
        })
    }
    /// The attempt has failed at this stage, says so once, and ends quietly with a release.
    #[track_caller]
    fn fails(&mut self, stage: Stage, reason: FailReason) {
        let error = self.failure().expect("a failure").clone();
        assert_eq!((error.stage, error.reason), (stage, reason));
        if self.ended().is_none() {
            assert!(self.out.contains(&PullEffect::StopReads));
            assert_eq!(
                self.sent(is_release),
                0,
                "not before the last post is quiet"
            );
            self.on(100_000, PullEvent::Quiet);
        }
        assert_eq!(self.ended(), Some(true));
        assert_eq!(self.attempt.phase(), AttemptPhase::Ended);
        self.out.clear();
        self.on(100_000, PullEvent::Tick);
        self.on(100_000, PullEvent::Cancel);
        assert!(self.out.is_empty(), "nothing after the end");
    }
}

fn is_release(frame: &Frame) -> bool {
    matches!(frame, Frame::Release { lease: LEASE, .. })
}
fn is_cancel(frame: &Frame) -> bool {
    matches!(frame, Frame::Cancel { .. })
}
fn is_commit(frame: &Frame) -> bool {
    matches!(
        frame,
        Frame::Commit {
            grantor: 77,
            lease: LEASE,
            epoch: 1,
            pages: 3,
            ..
        }
    )
}

#[test]
fn the_whole_way_posts_by_watermark_and_commits_when_whole() {
    let mut bed = Bed::pulling();
    bed.watermark(5, 0, &[1]);
    assert_eq!(bed.posts(), [(0, 0, 1)]);
    bed.take();
    bed.on(6, PullEvent::FirstToken(vec![9]));
    bed.on(6, PullEvent::FirstToken(vec![9]));
    assert_eq!(
        bed.take(),
        [PullEffect::News(PullNews::FirstToken(vec![9]))],
        "once"
    );
    bed.complete(7, 1, &[2, 3]);
    assert_eq!(bed.posts(), [(1, 1, 2)]);
    bed.take();
    bed.on(8, PullEvent::ReadDone(1));
    assert_eq!(
        bed.take(),
        [PullEffect::Check {
            first: 1,
            checksums: vec![2, 3]
        }]
    );
    bed.checked(8, 2);
    assert!(bed.take().is_empty(), "page 0 is missing");
    bed.on(9, PullEvent::ReadDone(0));
    bed.take();
    bed.checked(10, 1);
    assert_eq!(bed.sent(is_commit), 1);
    assert!(bed.out.contains(&PullEffect::News(PullNews::Placed)));
    bed.take();
    bed.answer(11, CommitOutcome::Ok);
    assert_eq!(
        bed.take(),
        [
            PullEffect::News(PullNews::Committed),
            PullEffect::Ended { free: false }
        ]
    );
    assert_eq!(bed.attempt.lease_live(), None);
}

#[test]
fn reads_are_merged_and_only_so_many_are_out() {
    let mut attempt = Attempt::new(
        ms(0),
        ID,
        77,
        100,
        512 * 1024,
        ms(60_000),
        PullLimits::default(),
    );
    let mut out = Vec::new();
    let granted = PullEvent::Granted {
        lease: LEASE,
        epoch: 1,
        pages: 100,
    };
    attempt.on(ms(0), granted, &mut out);
    let watermark = PullEvent::Watermark {
        lease: LEASE,
        first: 0,
        checksums: vec![0; 100],
    };
    attempt.on(ms(0), watermark, &mut out);
    let posts = |out: &[PullEffect]| {
        out.iter()
            .filter(|effect| matches!(effect, PullEffect::Post { count: 2, .. }))
            .count()
    };
    assert_eq!(posts(&out), 16);
    out.clear();
    attempt.on(ms(1), PullEvent::ReadDone(3), &mut out);
    assert_eq!(posts(&out), 1, "one comes, one goes");
    out.clear();
    attempt.on(ms(1), PullEvent::ReadDone(3), &mut out);
    assert!(out.is_empty(), "a read is done once");
}

#[test]
fn each_stage_ends_at_its_limit() {
    let mut bed = Bed::asked();
    assert_eq!(bed.attempt.next_tick(ms(0)), ms(1000));
    bed.on(999, PullEvent::Tick);
    assert!(bed.out.is_empty());
    bed.on(1000, PullEvent::Tick);
    assert_eq!(bed.sent(is_cancel), 1);
    bed.fails(Stage::Pair, FailReason::StageLimit);

    let mut bed = Bed::pulling();
    bed.on(2900, PullEvent::Queued);
    bed.on(5899, PullEvent::Tick);
    assert!(bed.out.is_empty());
    assert_eq!(bed.attempt.next_tick(ms(5899)), ms(5900));
    bed.on(5900, PullEvent::Tick);
    bed.fails(Stage::Prefill, FailReason::StageLimit);

    let mut bed = Bed::pulling();
    bed.watermark(10, 0, &[1, 2, 3]);
    bed.take();
    bed.on(900, PullEvent::ReadDone(0));
    bed.on(1800, PullEvent::Moved(ms(1800)));
    bed.on(2799, PullEvent::Tick);
    assert_eq!(bed.failure(), None);
    bed.on(2800, PullEvent::Tick);
    bed.fails(Stage::Pull, FailReason::StageLimit);

    let mut bed = Bed::committing();
    bed.on(259, PullEvent::Tick);
    assert_eq!(bed.sent(is_commit), 0);
    bed.on(260, PullEvent::Tick);
    assert_eq!(bed.sent(is_commit), 1, "re-sent half-way");
    bed.on(300, PullEvent::Tick);
    assert_eq!(bed.sent(is_commit), 1, "once");
    bed.on(510, PullEvent::Tick);
    bed.fails(Stage::Commit, FailReason::StageLimit);
}

#[test]
fn the_requests_deadline_ends_every_stage() {
    let late = 60_000;
    for mut bed in [Bed::asked(), Bed::pulling(), Bed::committing()] {
        let stage = bed.attempt.stage();
        bed.on(late, PullEvent::Tick);
        bed.fails(stage, FailReason::RequestDeadline);
    }
}

#[test]
fn an_ok_that_comes_too_late_is_not_an_ok() {
    for (late, reason) in [
        (60_000, FailReason::RequestDeadline),
        (510, FailReason::StageLimit),
    ] {
        let mut bed = Bed::committing();
        bed.answer(late, CommitOutcome::Ok);
        bed.fails(Stage::Commit, reason);
    }
}

#[test]
fn little_time_left_shortens_the_wait_for_the_answer() {
    let mut bed = Bed::pulling();
    bed.complete(59_600, 0, &[1, 2, 3]);
    bed.on(59_600, PullEvent::ReadDone(0));
    bed.on(59_600, PullEvent::ReadDone(1));
    bed.checked(59_600, 3);
    assert_eq!(bed.attempt.next_tick(ms(59_600)), ms(59_650));
    bed.take();
    bed.on(59_700, PullEvent::Tick);
    bed.fails(Stage::Commit, FailReason::StageLimit);
}

#[test]
fn answers_of_the_prefill_node_fail_the_ask_without_a_cancel() {
    for (event, reason) in [
        (
            PullEvent::Busy { retry_ms: 5 },
            FailReason::Busy { retry_ms: 5 },
        ),
        (
            PullEvent::Refused {
                refusal: RefusedKind::Invalid,
                code: 3,
            },
            FailReason::Refused(3),
        ),
        (
            PullEvent::Refused {
                refusal: RefusedKind::Draining,
                code: 0,
            },
            FailReason::Draining,
        ),
        (
            PullEvent::Aborted(AbortReason::Engine),
            FailReason::Aborted(AbortReason::Engine),
        ),
    ] {
        let mut bed = Bed::asked();
        bed.on(1, event);
        assert_eq!(bed.sent(|_| true), 0);
        bed.fails(Stage::Pair, reason);
    }
}

#[test]
fn a_cancel_works_in_every_phase() {
    let mut bed = Bed::asked();
    bed.on(1, PullEvent::Cancel);
    assert_eq!(bed.sent(is_cancel), 1);
    bed.fails(Stage::Pair, FailReason::Cancelled);

    let mut bed = Bed::pulling();
    bed.on(1, PullEvent::Cancel);
    assert_eq!((bed.sent(is_cancel), bed.sent(is_release)), (1, 1));
    bed.fails(Stage::Prefill, FailReason::Cancelled);

    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.take();
    bed.on(2, PullEvent::Cancel);
    assert_eq!((bed.sent(is_cancel), bed.sent(is_release)), (1, 0));
    assert_eq!(
        bed.attempt.lease_live(),
        Some(LEASE),
        "listed until released"
    );
    bed.on(3, PullEvent::ReadDone(0));
    bed.on(3, PullEvent::Cancel);
    bed.fails(Stage::Pull, FailReason::Cancelled);

    let mut bed = Bed::committing();
    bed.on(11, PullEvent::Cancel);
    assert_eq!(bed.sent(is_cancel), 0, "nothing computes any more");
    bed.fails(Stage::Commit, FailReason::Cancelled);
}

#[test]
fn the_release_follows_the_last_quiet_post() {
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::Aborted(AbortReason::Engine));
    assert_eq!(bed.sent(is_release), 0);
    bed.on(3, PullEvent::Quiet);
    assert_eq!(bed.sent(is_release), 1);
    assert_eq!(bed.sent(is_cancel), 0);
    assert_eq!(bed.ended(), Some(true));
}

#[test]
fn a_lost_session_fails_every_phase_and_sends_nothing() {
    for mut bed in [Bed::asked(), Bed::pulling(), Bed::committing()] {
        let stage = bed.attempt.stage();
        bed.on(20, PullEvent::SessionEnded);
        assert_eq!(bed.sent(|_| true), 0);
        bed.fails(stage, FailReason::SessionEnded);
    }
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::Cancel);
    bed.take();
    bed.on(3, PullEvent::SessionEnded);
    bed.on(4, PullEvent::Quiet);
    assert_eq!(bed.sent(|_| true), 0, "nobody is there to hear it");
    assert_eq!(bed.ended(), Some(true));
}

#[test]
fn a_fence_query_fails_the_attempt_and_is_answered_when_quiet() {
    let is_answer = |frame: &Frame| matches!(frame, Frame::FenceAnswer { lease: LEASE, .. });
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::FenceQuery { lease: LEASE });
    assert_eq!(bed.sent(is_answer), 0);
    bed.on(3, PullEvent::Quiet);
    assert_eq!(bed.sent(is_answer), 1);

    let mut bed = Bed::committing();
    bed.on(11, PullEvent::FenceQuery { lease: LEASE });
    bed.on(11, PullEvent::Quiet);
    assert_eq!(bed.sent(is_answer), 1);

    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::Cancel);
    bed.on(2, PullEvent::FenceQuery { lease: LEASE });
    bed.on(3, PullEvent::Quiet);
    assert_eq!(bed.sent(is_answer), 1);

    let mut bed = Bed::asked();
    bed.on(2, PullEvent::FenceQuery { lease: LEASE });
    assert_eq!(bed.sent(is_answer), 1, "a grant we never heard of");
    bed.fails(Stage::Pair, FailReason::Fenced);
}

#[test]
fn failed_reads_and_wrong_bytes_fail_the_attempt() {
    for (event, reason) in [
        (
            PullEvent::ReadEnded(0, EndReason::Failed(7)),
            FailReason::Read(EndReason::Failed(7)),
        ),
        (
            PullEvent::ReadEnded(0, EndReason::ChannelKilled),
            FailReason::Read(EndReason::ChannelKilled),
        ),
        (PullEvent::NotPosted(0), FailReason::NoPost),
    ] {
        let mut bed = Bed::pulling();
        bed.watermark(1, 0, &[1]);
        bed.take();
        bed.on(2, event);
        bed.fails(Stage::Pull, reason);
    }
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::ReadDone(0));
    bed.take();
    bed.on(
        2,
        PullEvent::Checked {
            count: 0,
            wrong: Some(0),
        },
    );
    bed.fails(Stage::Pull, FailReason::Checksum(0));
}

#[test]
fn every_refused_commit_fails_with_its_outcome() {
    for outcome in [
        CommitOutcome::Unknown,
        CommitOutcome::NotComplete,
        CommitOutcome::Expired,
        CommitOutcome::Aborted,
        CommitOutcome::Released,
        CommitOutcome::Mismatch,
    ] {
        let mut bed = Bed::committing();
        bed.answer(20, outcome);
        bed.fails(Stage::Commit, FailReason::CommitRefused(outcome));
    }
    let mut bed = Bed::committing();
    bed.on(
        20,
        PullEvent::CommitAnswer {
            lease: LEASE + 1,
            outcome: CommitOutcome::Ok,
        },
    );
    assert!(bed.take().is_empty(), "another lease's answer");
}

type Act = Box<dyn Fn(&mut Bed)>;

#[test]
fn a_peer_that_breaks_the_protocol_is_not_believed() {
    for pages in [2, 4] {
        let mut bed = Bed::asked();
        bed.on(
            1,
            PullEvent::Granted {
                lease: LEASE,
                epoch: 1,
                pages,
            },
        );
        let reason = bed.failure().map(|error| error.reason);
        assert!(matches!(reason, Some(FailReason::Violation(_))));
        assert_eq!(bed.sent(is_release), 1);
    }
    let breaks: Vec<Act> = vec![
        Box::new(|bed| bed.watermark(1, 1, &[2])),
        Box::new(|bed| bed.watermark(1, 0, &[1, 2, 3, 4])),
        Box::new(|bed| {
            bed.on(
                1,
                PullEvent::Complete {
                    lease: LEASE,
                    pages: 3,
                    first: 0,
                    checksums: vec![1, 2],
                },
            );
        }),
        Box::new(|bed| bed.complete(1, 0, &[1, 2])),
        Box::new(|bed| bed.answer(1, CommitOutcome::Ok)),
        Box::new(|bed| bed.on(1, PullEvent::Busy { retry_ms: 1 })),
    ];
    for (number, act) in breaks.iter().enumerate() {
        let mut bed = Bed::pulling();
        act(&mut bed);
        let reason = bed.failure().map(|error| error.reason);
        assert!(
            matches!(reason, Some(FailReason::Violation(_))),
            "{number}: {reason:?}"
        );
    }
    // Another lease's frames, and repeats, change nothing.
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.take();
    bed.watermark(1, 0, &[1]);
    bed.on(
        1,
        PullEvent::Watermark {
            lease: 99,
            first: 7,
            checksums: vec![1],
        },
    );
    assert!(bed.take().is_empty());
}

#[test]
fn each_reason_has_a_label_of_its_own() {
    let reasons = [
        FailReason::StageLimit,
        FailReason::RequestDeadline,
        FailReason::Busy { retry_ms: 1 },
        FailReason::Refused(1),
        FailReason::Draining,
        FailReason::Aborted(AbortReason::Engine),
        FailReason::SessionEnded,
        FailReason::Read(EndReason::Deadline),
        FailReason::NoPost,
        FailReason::Checksum(1),
        FailReason::CommitRefused(CommitOutcome::Expired),
        FailReason::Fenced,
        FailReason::Violation("x"),
        FailReason::Cancelled,
        FailReason::NotBegun(NotBegun::NoSession),
        FailReason::NoPages { wanted: 2, free: 1 },
    ];
    let labels: std::collections::BTreeSet<_> = reasons.iter().map(|r| r.label()).collect();
    assert_eq!(labels.len(), reasons.len());
}

/// L7: where a post was never proven over, the fence is not sent: the session ends instead.
#[test]
fn a_stuck_attempt_sends_no_release_and_ends_its_session() {
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(2, PullEvent::ReadEnded(0, EndReason::ChannelStuck));
    assert_eq!(
        bed.failure().map(|error| error.retry),
        Some(Retry::SamePair)
    );
    bed.on(2, PullEvent::FenceQuery { lease: LEASE });
    bed.take();
    bed.on(3, PullEvent::Stuck);
    assert_eq!(bed.sent(|_| true), 0, "neither RELEASE nor an answer");
    assert_eq!(
        bed.out,
        [PullEffect::EndSession, PullEffect::Ended { free: true }]
    );
}

#[test]
fn a_read_without_a_credit_fails_the_attempt_with_the_numbers() {
    let hopeless = CreditError::Hopeless {
        ahead_bytes: 64 << 20,
        bytes: 1 << 20,
        bytes_per_s: 1 << 20,
        left: Duration::from_secs(9),
    };
    let mut bed = Bed::pulling();
    bed.watermark(1, 0, &[1]);
    bed.on(1, PullEvent::NoCredit(0, hopeless));
    let error = bed.failure().expect("failed");
    assert_eq!(error.reason.label(), "hopeless");
    assert!(error.message.contains("67108864"), "{}", error.message);
}

#[test]
fn what_moved_before_the_limit_was_looked_at_counts_from_then() {
    let mut bed = Bed::pulling();
    bed.watermark(0, 0, &[1, 2, 3]);
    bed.take();
    // The look comes at the limit, and is told of a byte at 400 ms.
    bed.on(1000, PullEvent::Moved(ms(400)));
    bed.on(1000, PullEvent::Tick);
    assert_eq!(bed.failure(), None);
    assert_eq!(bed.attempt.next_tick(ms(1000)), ms(1400), "to the tick");
    bed.on(1400, PullEvent::Moved(ms(400)));
    bed.on(1403, PullEvent::Tick);
    bed.fails(Stage::Pull, FailReason::StageLimit);
    assert_eq!(bed.attempt.limit_late(), Some(Duration::from_millis(3)));
}
