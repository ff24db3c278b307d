//! A few hundred clusters with faults at every step: every invariant holds, and a seed gives the
//! same run again. Many more run in release (`tools/src/bin/sim.rs`).

use kvserve::sim::{run_seed, run_seeds};

/// Some seconds in the dev profile on two cores.
const SEEDS: u64 = 300;

#[test]
fn clusters_with_faults_keep_every_invariant() {
    let summary = run_seeds(1, SEEDS, 2);
    if let Some(failed) = &summary.failed {
        let report = run_seed(failed.seed, true);
        panic!(
            "{}\nseed {}: {:?}",
            report.trace.join("\n"),
            report.seed,
            failed.violation
        );
    }
    assert_eq!(summary.seeds, SEEDS);
    assert!(
        summary.events_median >= 300,
        "median {}",
        summary.events_median
    );
    // Half of the seeds end with requests after the faults, all of them answered.
    let later =
        |(name, count): &(String, u64)| (name == "later request: finished").then_some(*count);
    let answered = summary.coverage.table().iter().find_map(later);
    assert!(
        answered.is_some_and(|count| count >= SEEDS / 2 * 3 - 3),
        "{answered:?}"
    );
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 1000..1020 {
        let (first, second) = (run_seed(seed, true), run_seed(seed, true));
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert_eq!(first.events, second.events, "seed {seed}");
        assert!(first.requests >= 8 && first.events > 0);
    }
}
