//! A few hundred clusters with faults at every step: every invariant holds, and a seed gives the
//! same run again. Many more run in release (`tools/src/bin/sim.rs`).

use kvserve::sim::{run_seed, run_seeds};
use std::path::Path;
use std::process::Command;

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
    let least = summary.shape_least.expect("seeds have run");
    assert!(least.prefills >= 2 && least.decodes >= 2, "{least:?}");
    assert!(least.requests >= 8 && least.sharing >= 8, "{least:?}");
    assert!(summary.faults_min >= 3, "{} faults", summary.faults_min);
    assert_eq!(summary.calms, SEEDS / 2);
    assert_eq!(summary.coverage.impossible(), [""; 0]);
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
        assert!(first.shape.requests >= 8 && first.events > 0);
    }
}

/// `sim-planted` plants these and needs minutes for each; that they still fit is shown here.
#[test]
fn every_planted_bug_applies_to_the_present_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(arguments).current_dir(&root);
        git.output().is_ok_and(|output| output.status.success())
    };
    if !git(&["rev-parse", "--is-inside-work-tree"]) {
        eprintln!("SKIPPED: not a git checkout, patches cannot be checked");
        return;
    }
    let folder = root.join("server/src/sim/planted");
    let mut patches = 0;
    for entry in std::fs::read_dir(folder).expect("the planted bugs") {
        let path = entry.expect("an entry").path();
        let name = path.to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).expect("a text");
        assert!(text.contains("\nFound by: I"), "{name} names no invariant");
        assert!(git(&["apply", "--check", &name]), "{name} does not apply");
        patches += 1;
    }
    // The 14 and four more.
    assert!(patches >= 18, "{patches} planted bugs");
}
