//! The soak's short form: every run of `cargo test` sees a small cluster under load, cancels and
//! restarts come out clean. The full one: `cargo run --release -p kvserve-tools --bin soak`.

use std::process::Command;

#[test]
fn a_hundred_requests_over_both_ways_end_right_and_leave_nothing() {
    let run = Command::new(env!("CARGO_BIN_EXE_soak"))
        .args(["--requests", "100", "--concurrency", "32"])
        .args(["--restart-every", "40", "--no-timings", "--seed", "7"])
        .output()
        .expect("the soak starts");
    let said = String::from_utf8_lossy(&run.stdout);
    let complained = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}\n{complained}");
}
