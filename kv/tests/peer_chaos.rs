//! Faults on purpose between transport, control frames and the hub: every migration ends by
//! its limit, no wrong byte is committed, the books are restored.

mod peer_bed;

use kvserve_kv::peer::{FailReason, Stage};
use kvserve_runtime::Nanos;
use peer_bed::*;
use std::time::Duration;

/// Migrations under a rule on the decode side; then none, and the pair must work again.
fn under(rule: &'static str, rounds: usize, mut judge: impl FnMut(&Node, Story) + Send + 'static) {
    on_shard(move |shard| async move {
        let (d, p) = pair(&shard).await;
        d.chaos.set(rule.parse().expect("a rule"));
        for _ in 0..rounds {
            let pulls = || d.can_pull_from("p");
            until(&shard, SOON, "a data connection", pulls).await;
            let started = Nanos::now();
            let prompt = prompt(12);
            let mut migration = d.ask("p", &prompt, Duration::from_secs(30));
            let story = follow(&mut migration).await;
            let took = Nanos::now().since(started);
            assert!(took < Duration::from_secs(4), "{took:?}: {story:?}");
            if let Some(pages) = &story.committed {
                d.take(pages, &prompt);
            }
            judge(&d, story);
            drop(migration);
            at_rest(&shard, &[&d, &p], SOON).await;
        }
        d.chaos.set("off".parse().expect("a rule"));
        until(&shard, SOON, "a data connection", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(12)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        let quarantined = d.ledger.with(|ledger| ledger.counts().quarantined);
        // Twelve pages were being read when their channel could not be proven quiet; nothing
        // else is ever lost.
        let lost = d.chaos.counters().flushes_lost;
        assert_eq!(rule.contains("flush=lose"), lost > 0);
        assert_eq!(quarantined > 0, lost > 0, "{quarantined} pages");
        assert!(quarantined <= 12, "{quarantined} pages");
        assert_eq!(p.ledger.with(|ledger| ledger.counts().quarantined), 0);
        stop(&[&d, &p]);
    });
}

#[test]
fn lost_completions_end_at_the_limit_and_give_all_pages_back() {
    under("completion=lose@1", 2, |_, story| {
        let error = story.failed.expect("nothing can complete");
        assert_eq!(
            (error.stage, error.reason),
            (Stage::Pull, FailReason::StageLimit)
        );
    });
}

#[test]
fn some_lost_completions_are_made_good_by_those_behind_them_or_end() {
    under("completion=lose@0.3", 8, |_, story| {
        assert!(story.committed.is_some() != story.failed.is_some());
    });
}

#[test]
fn failed_completions_fail_the_attempt_at_once() {
    under("completion=fail@1", 4, |_, story| {
        let error = story.failed.expect("every read fails");
        assert!(matches!(error.reason, FailReason::Read(_)), "{error}");
    });
}

#[test]
fn late_completions_only_take_their_time() {
    under("completion=late:300ms@1", 2, |_, story| {
        assert!(story.committed.is_some(), "{:?}", story.failed);
    });
}

#[test]
fn duplicated_completions_never_count_twice() {
    under("completion=duplicate@0.5", 10, |_, story| {
        if let Some(error) = story.failed {
            assert!(
                matches!(error.reason, FailReason::Read(_) | FailReason::NoPost),
                "{error}"
            );
        }
    });
}

#[test]
fn a_lost_flush_quarantines_exactly_what_cannot_be_proven() {
    under("completion=lose@1,flush=lose", 1, |d, story| {
        assert_eq!(story.failed.expect("lost").stage, Stage::Pull);
        // The rest of the story is in `at_rest`: free and quarantined pages add up.
        assert_eq!(
            d.chaos.counters().flushes_lost,
            0,
            "not before the ladder's last rung"
        );
    });
}

#[test]
fn lost_late_and_corrupted_frames_end_or_work_but_never_hang() {
    for rule in [
        "message=lose@0.2",
        "message=late:20ms@0.5",
        "message=corrupt@0.05",
    ] {
        on_shard(move |shard| async move {
            let (d, p) = pair(&shard).await;
            for node in [&d, &p] {
                node.chaos.set(rule.parse().expect("a rule"));
            }
            for _ in 0..12 {
                until(&shard, SOON, "a data connection", || d.can_pull_from("p")).await;
                let prompt = prompt(9);
                let mut migration = d.ask("p", &prompt, Duration::from_secs(2));
                let story = follow(&mut migration).await;
                if let Some(pages) = &story.committed {
                    d.take(pages, &prompt);
                }
            }
            for node in [&d, &p] {
                node.chaos.set("off".parse().expect("a rule"));
            }
            // A lost release is made good by the next renewal or by a fence.
            at_rest(&shard, &[&d, &p], Duration::from_secs(20)).await;
            until(&shard, SOON, "a data connection", || d.can_pull_from("p")).await;
            migrate(&d, "p", &prompt(9)).await;
            at_rest(&shard, &[&d, &p], SOON).await;
            stop(&[&d, &p]);
        });
    }
}
