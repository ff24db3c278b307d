//! Every edge of the lease table.

use super::*;
use crate::pool::PageId;
use crate::session::{AbortReason, AttemptId, CommitOutcome, Frame, RefuseReason, RequestId};
use kvserve_runtime::Nanos;

const US: u64 = 77;
const PEER: PeerSession = PeerSession(1);
const OTHER: PeerSession = PeerSession(2);

fn s(seconds: u64) -> Nanos {
    Nanos(seconds * 1_000_000_000)
}

fn id(counter: u64, attempt: u32) -> AttemptId {
    AttemptId {
        request: RequestId {
            incarnation: 9,
            counter,
        },
        attempt,
    }
}

struct Bed {
    table: LeaseTable,
    out: Vec<LeaseEffect>,
}

impl Bed {
    fn new() -> Self {
        Bed {
            table: LeaseTable::new(US, LeaseLimits::default()),
            out: Vec::new(),
        }
    }
    /// Asked and granted two pages at `now`, request deadline 60 s later.
    fn granted(now: Nanos) -> (Self, u64) {
        let mut bed = Bed::new();
        let deadline = Nanos(now.0 + s(60).0);
        assert_eq!(
            bed.table.ask(now, PEER, id(1, 1), deadline, &mut bed.out),
            AskVerdict::Fresh
        );
        let pages = [PageId(4), PageId(5)];
        let lease = bed
            .table
            .grant(now, PEER, id(1, 1), &pages, &mut bed.out)
            .unwrap();
        bed.out.clear();
        (bed, lease)
    }
    /// As `granted`, complete, and the producer has let go.
    fn complete(now: Nanos) -> (Self, u64) {
        let (mut bed, lease) = Bed::granted(now);
        assert!(
            bed.table
                .complete(now, PEER, id(1, 1), &[8, 9], 3, &mut bed.out)
        );
        bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
        bed.out.clear();
        (bed, lease)
    }
    fn commit(&mut self, now: Nanos, lease: u64, epoch: u32, pages: u32) -> CommitOutcome {
        self.table
            .commit(now, PEER, id(1, 1), US, lease, epoch, pages, &mut self.out);
        self.answer()
    }
    fn answer(&self) -> CommitOutcome {
        self.out
            .iter()
            .rev()
            .find_map(|effect| match effect {
                LeaseEffect::Send(_, Frame::CommitAnswer { outcome, .. }) => Some(*outcome),
                _ => None,
            })
            .expect("an answer")
    }
    fn freed(&self) -> Vec<PageId> {
        self.out
            .iter()
            .filter_map(|effect| match effect {
                LeaseEffect::Free(pages) => Some(pages.clone()),
                _ => None,
            })
            .flatten()
            .collect()
    }
    fn told(&self) -> usize {
        self.out
            .iter()
            .filter(|effect| matches!(effect, LeaseEffect::CancelProducer(..)))
            .count()
    }
    fn sent(&self, wanted: impl Fn(&Frame) -> bool) -> usize {
        self.out
            .iter()
            .filter(|effect| matches!(effect, LeaseEffect::Send(_, frame) if wanted(frame)))
            .count()
    }
}

const BOTH: [PageId; 2] = [PageId(4), PageId(5)];

#[test]
fn the_whole_way_frees_at_commit_and_repeats_its_answer() {
    let (mut bed, lease) = Bed::granted(s(0));
    assert!(
        bed.table
            .watermark(s(1), PEER, id(1, 1), &[8], &mut bed.out)
    );
    assert_eq!(
        bed.table.read(s(1), PEER, lease, 1, 0, 1),
        Ok(&[PageId(4)][..])
    );
    assert_eq!(
        bed.table.read(s(1), PEER, lease, 1, 0, 2),
        Err(ReadRefusal::NotReady(2, 1))
    );
    assert_eq!(bed.commit(s(1), lease, 1, 1), CommitOutcome::NotComplete);
    assert!(
        bed.table
            .complete(s(2), PEER, id(1, 1), &[9], 3, &mut bed.out)
    );
    bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
    assert_eq!(bed.table.read(s(2), PEER, lease, 1, 0, 2), Ok(&BOTH[..]));
    assert_eq!(bed.commit(s(3), lease, 1, 1), CommitOutcome::Mismatch);
    assert_eq!(bed.commit(s(3), lease, 2, 2), CommitOutcome::Mismatch);
    assert_eq!(bed.freed(), []);
    assert_eq!(bed.commit(s(3), lease, 1, 2), CommitOutcome::Ok);
    assert_eq!(bed.freed(), BOTH);
    assert!(bed.table.is_empty());
    bed.out.clear();
    assert_eq!(bed.commit(s(4), lease, 1, 2), CommitOutcome::Ok, "repeated");
    bed.table.release(s(4), PEER, id(1, 1), lease, &mut bed.out);
    assert_eq!(bed.sent(|f| matches!(f, Frame::ReleaseAnswer { .. })), 1);
    assert_eq!(bed.freed(), [], "never twice");
    bed.table.tick(s(24), &mut bed.out);
    assert_eq!(bed.commit(s(24), lease, 1, 2), CommitOutcome::Unknown);
}

#[test]
fn pages_wait_for_the_producer_as_well() {
    let (mut bed, lease) = Bed::granted(s(0));
    bed.table.release(s(1), PEER, id(1, 1), lease, &mut bed.out);
    assert_eq!((bed.told(), bed.freed()), (1, vec![]));
    assert!(!bed.table.is_live(PEER, id(1, 1)));
    assert_eq!(
        bed.table.read(s(1), PEER, lease, 1, 0, 0),
        Err(ReadRefusal::Unknown)
    );
    bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
    assert_eq!(bed.freed(), BOTH);
}

#[test]
fn an_abort_moves_the_epoch_and_waits_for_the_release() {
    let (mut bed, lease) = Bed::complete(s(0));
    bed.table
        .abort(s(1), PEER, id(1, 1), AbortReason::Engine, &mut bed.out);
    assert_eq!(bed.sent(|f| matches!(f, Frame::Aborted { .. })), 1);
    assert_eq!(
        bed.table.read(s(1), PEER, lease, 1, 0, 1),
        Err(ReadRefusal::Over)
    );
    assert_eq!(bed.commit(s(1), lease, 1, 2), CommitOutcome::Aborted);
    assert_eq!(bed.freed(), []);
    bed.table.release(s(1), PEER, id(1, 1), lease, &mut bed.out);
    assert_eq!(bed.freed(), BOTH);
    assert_eq!(bed.commit(s(1), lease, 1, 2), CommitOutcome::Released);
}

#[test]
fn a_cancel_tells_the_producer_and_nobody_else() {
    let (mut bed, _) = Bed::granted(s(0));
    bed.table.cancel(s(1), PEER, id(1, 1), &mut bed.out);
    bed.table.cancel(s(1), PEER, id(1, 1), &mut bed.out);
    assert_eq!(bed.told(), 1);
    assert_eq!(bed.sent(|_| true), 0);
    assert_eq!(bed.freed(), []);
    assert!(
        !bed.table
            .watermark(s(1), PEER, id(1, 1), &[8], &mut bed.out)
    );
    bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
    assert_eq!(bed.freed(), [], "the peer may still be reading");
}

#[test]
fn a_cancel_before_the_grant_ends_it() {
    let mut bed = Bed::new();
    bed.table.ask(s(0), PEER, id(1, 1), s(60), &mut bed.out);
    bed.table.cancel(s(0), PEER, id(1, 1), &mut bed.out);
    assert_eq!(bed.told(), 1);
    assert_eq!(
        bed.table.grant(s(0), PEER, id(1, 1), &BOTH, &mut bed.out),
        Err(GrantError::Ended)
    );
    bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
    assert!(bed.table.is_empty());
    assert_eq!(bed.freed(), []);
}

#[test]
fn expiry_asks_and_only_the_answer_frees() {
    let (mut bed, lease) = Bed::complete(s(0));
    bed.table.tick(s(9), &mut bed.out);
    assert_eq!(bed.sent(|_| true), 0);
    assert_eq!(
        bed.commit(s(10), lease, 1, 2),
        CommitOutcome::Expired,
        "even before the tick"
    );
    bed.table.tick(s(10), &mut bed.out);
    assert_eq!(bed.sent(|f| matches!(f, Frame::FenceQuery { .. })), 1);
    assert_eq!(bed.freed(), []);
    assert_eq!(bed.commit(s(11), lease, 1, 2), CommitOutcome::Expired);
    bed.table
        .fence_answer(s(11), OTHER, id(1, 1), lease, &mut bed.out);
    assert_eq!(bed.freed(), [], "another session's word");
    bed.table
        .fence_answer(s(11), PEER, id(1, 1), lease, &mut bed.out);
    assert_eq!(bed.freed(), BOTH);
    assert_eq!(bed.commit(s(12), lease, 1, 2), CommitOutcome::Expired);
}

#[test]
fn an_unanswered_fence_ends_the_session_which_frees() {
    let (mut bed, _) = Bed::complete(s(0));
    bed.table.tick(s(10), &mut bed.out);
    bed.out.clear();
    bed.table.tick(s(12), &mut bed.out);
    assert_eq!(
        bed.out,
        [LeaseEffect::EndSession(PEER, RefuseReason::FenceUnanswered)]
    );
    bed.out.clear();
    bed.table.session_ended(s(12), PEER, &mut bed.out);
    assert_eq!(bed.freed(), BOTH);
    assert!(bed.table.is_empty());
}

#[test]
fn an_unasked_fence_answer_proves_nothing() {
    let (mut bed, lease) = Bed::complete(s(0));
    bed.table
        .fence_answer(s(1), PEER, id(1, 1), lease, &mut bed.out);
    assert_eq!(bed.freed(), []);
    assert_eq!(bed.table.counters().stale_frames, 1);
}

#[test]
fn renewals_keep_a_moving_lease_and_only_that() {
    let (mut bed, lease) = Bed::granted(s(0));
    let live = [(id(1, 1), lease)];
    for t in [5, 9] {
        bed.table.renew(s(t), PEER, lease, &live, &mut bed.out);
    }
    bed.table.tick(s(18), &mut bed.out);
    assert_eq!(bed.sent(|_| true), 0, "renewed until 19 s");
    // Nothing has moved since 0 s: this renewal does not count.
    bed.table.renew(s(18), PEER, lease, &live, &mut bed.out);
    bed.table.tick(s(19), &mut bed.out);
    assert_eq!(bed.sent(|f| matches!(f, Frame::FenceQuery { .. })), 1);
}

#[test]
fn a_renewal_never_reaches_beyond_deadline_plus_ttl() {
    let (mut bed, lease) = Bed::granted(s(0));
    let live = [(id(1, 1), lease)];
    for t in 1..75 {
        bed.table.queued(s(t), PEER, id(1, 1), 0, &mut bed.out);
        bed.table.renew(s(t), PEER, lease, &live, &mut bed.out);
        bed.table.tick(s(t), &mut bed.out);
        let fenced = bed.sent(|f| matches!(f, Frame::FenceQuery { .. })) > 0;
        assert_eq!(fenced, t >= 70, "at {t} s");
    }
}

#[test]
fn what_a_renewal_does_not_list_counts_as_released() {
    let (mut bed, lease) = Bed::complete(s(0));
    bed.table.renew(s(1), PEER, lease - 1, &[], &mut bed.out);
    assert_eq!(bed.freed(), [], "granted after the peer wrote the list");
    bed.table.renew(s(1), OTHER, lease, &[], &mut bed.out);
    assert_eq!(bed.freed(), [], "another peer's list");
    bed.table.renew(s(1), PEER, lease, &[], &mut bed.out);
    assert_eq!(bed.freed(), BOTH);
    assert_eq!(bed.commit(s(1), lease, 1, 2), CommitOutcome::Released);
}

#[test]
fn a_later_attempt_cancels_the_earlier_and_an_old_one_is_dropped() {
    let (mut bed, _) = Bed::granted(s(0));
    assert_eq!(
        bed.table.ask(s(1), PEER, id(1, 1), s(60), &mut bed.out),
        AskVerdict::Old
    );
    assert_eq!(
        bed.table.ask(s(1), PEER, id(1, 2), s(60), &mut bed.out),
        AskVerdict::Fresh
    );
    assert_eq!(bed.told(), 1);
    assert_eq!(
        bed.table.ask(s(1), PEER, id(1, 1), s(60), &mut bed.out),
        AskVerdict::Old
    );
    assert_eq!(
        bed.table.ask(s(1), OTHER, id(1, 1), s(60), &mut bed.out),
        AskVerdict::Fresh,
        "another node's request"
    );
}

#[test]
fn an_attempt_that_is_never_granted_ends_at_its_deadline() {
    let mut bed = Bed::new();
    bed.table.ask(s(0), PEER, id(1, 1), s(5), &mut bed.out);
    bed.table.tick(s(4), &mut bed.out);
    assert!(bed.out.is_empty());
    bed.table.tick(s(5), &mut bed.out);
    assert_eq!(bed.told(), 1);
    assert_eq!(bed.sent(|f| matches!(f, Frame::Aborted { .. })), 1);
    bed.table.producer_gone(PEER, id(1, 1), &mut bed.out);
    assert!(bed.table.is_empty());
}

#[test]
fn another_peer_can_neither_read_nor_end_a_lease() {
    let (mut bed, lease) = Bed::complete(s(0));
    assert_eq!(
        bed.table.read(s(0), OTHER, lease, 1, 0, 1),
        Err(ReadRefusal::Unknown)
    );
    bed.table
        .release(s(0), OTHER, id(1, 1), lease, &mut bed.out);
    bed.table.cancel(s(0), OTHER, id(1, 1), &mut bed.out);
    bed.table
        .commit(s(0), OTHER, id(1, 1), US, lease, 1, 2, &mut bed.out);
    assert_eq!(bed.answer(), CommitOutcome::Unknown);
    bed.table
        .commit(s(0), PEER, id(1, 1), US + 1, lease, 1, 2, &mut bed.out);
    assert_eq!(
        bed.answer(),
        CommitOutcome::Mismatch,
        "an earlier incarnation's grant"
    );
    bed.table.session_ended(s(0), OTHER, &mut bed.out);
    assert_eq!(bed.freed(), []);
    assert_eq!(bed.commit(s(0), lease, 1, 2), CommitOutcome::Ok);
}

#[test]
fn the_table_and_its_tombstones_are_bounded() {
    let limits = LeaseLimits {
        leases_max: 2,
        tombstones_max: 3,
        ..LeaseLimits::default()
    };
    let mut table = LeaseTable::new(US, limits);
    let mut out = Vec::new();
    for n in 0..10u64 {
        assert_eq!(
            table.ask(s(0), PEER, id(n, 1), s(60), &mut out),
            AskVerdict::Fresh
        );
        let lease = table
            .grant(s(0), PEER, id(n, 1), &[PageId(n as u32)], &mut out)
            .unwrap();
        table.producer_gone(PEER, id(n, 1), &mut out);
        table.release(s(0), PEER, id(n, 1), lease, &mut out);
        table.tick(s(0), &mut out);
    }
    assert!(table.is_empty());
    for n in 10..12u64 {
        table.ask(s(0), PEER, id(n, 1), s(60), &mut out);
    }
    assert_eq!(
        table.ask(s(0), PEER, id(12, 1), s(60), &mut out),
        AskVerdict::Full
    );
    // Only the last three outcomes are remembered.
    out.clear();
    for (n, outcome) in [(5, CommitOutcome::Unknown), (9, CommitOutcome::Released)] {
        table.commit(s(0), PEER, id(n, 1), US, n + 1, 1, 0, &mut out);
        assert!(matches!(
            out.pop(),
            Some(LeaseEffect::Send(_, Frame::CommitAnswer { outcome: got, .. })) if got == outcome
        ));
    }
}
