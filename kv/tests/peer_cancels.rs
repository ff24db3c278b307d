//! A migration dropped at any stage: nothing computes for it, and both books are restored.

mod peer_bed;

use kvserve_kv::peer::{Migration, MigrationEvent};
use peer_bed::*;
use std::time::Duration;

/// Reads news up to the first that `last` accepts.
async fn until_news(migration: &mut Migration, last: impl Fn(&MigrationEvent) -> bool) {
    loop {
        let event = migration.next().await;
        if last(&event) {
            return;
        }
        assert!(
            !matches!(
                event,
                MigrationEvent::Failed(_) | MigrationEvent::Committed { .. }
            ),
            "{event:?}"
        );
    }
}

/// Drops a migration once it has told `last`; then the same pair must work again.
fn dropped_after(script: Script, last: impl Fn(&MigrationEvent) -> bool + Send + 'static) {
    on_shard(move |shard| async move {
        let (d, p) = pair(&shard).await;
        for _ in 0..5 {
            p.service.script.set(script);
            let mut migration = d.ask("p", &prompt(12), Duration::from_secs(30));
            until_news(&mut migration, &last).await;
            drop(migration);
            at_rest(&shard, &[&d, &p], SOON).await;
        }
        p.service.script.set(Script::Serve { step: 2 });
        until(&shard, SOON, "can pull", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(12)).await;
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn before_anything_was_heard() {
    for script in [Script::NeverGrant, Script::Serve { step: 1 }] {
        on_shard(move |shard| async move {
            let (d, p) = pair(&shard).await;
            p.service.script.set(script);
            for pause_ms in [0, 1, 3, 10] {
                let migration = d.ask("p", &prompt(12), Duration::from_secs(30));
                shard.sleep(Duration::from_millis(pause_ms)).await;
                drop(migration);
            }
            at_rest(&shard, &[&d, &p], SOON).await;
            stop(&[&d, &p]);
        });
    }
}

#[test]
fn after_the_grant() {
    dropped_after(Script::StopAfterGrant, |event| {
        matches!(event, MigrationEvent::Granted)
    });
}

#[test]
fn while_pages_are_pulled() {
    dropped_after(Script::Serve { step: 1 }, |event| {
        matches!(event, MigrationEvent::Granted)
    });
    dropped_after(Script::StopAfter { pages: 5 }, |event| {
        matches!(event, MigrationEvent::FirstToken(_))
    });
}

#[test]
fn while_commit_is_under_way() {
    dropped_after(Script::Serve { step: 4 }, |event| {
        matches!(event, MigrationEvent::Placed)
    });
}

#[test]
fn after_a_commit_that_nobody_took() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        let migration = d.ask("p", &prompt(12), Duration::from_secs(30));
        until(&shard, SOON, "committed", || {
            d.peers.counters().attempts_committed == 1
        })
        .await;
        drop(migration);
        at_rest(&shard, &[&d, &p], SOON).await;
        stop(&[&d, &p]);
    });
}

#[test]
fn at_any_moment() {
    on_shard(|shard| async move {
        let (d, p) = pair(&shard).await;
        p.service.script.set(Script::Serve { step: 1 });
        for round in 0..60u64 {
            let migration = d.ask("p", &prompt(20), Duration::from_secs(30));
            shard.sleep(Duration::from_micros(round * 450)).await;
            drop(migration);
        }
        at_rest(&shard, &[&d, &p], SOON).await;
        until(&shard, SOON, "can pull", || d.can_pull_from("p")).await;
        migrate(&d, "p", &prompt(20)).await;
        stop(&[&d, &p]);
    });
}
