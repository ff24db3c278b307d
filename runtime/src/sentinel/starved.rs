//! Wedged, or kept from a CPU? A thread that wants to run and gets no CPU stands still through no
//! fault of its own: a paused virtual CPU, a machine with far too much to do. To end the process
//! would not help, it would only lose its requests; `/health` tells of it all the same.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// Between the two looks. Long enough that a wedged thread (which loops, or sleeps in a call)
/// is seen with CPU time or asleep in one of the next looks even on a busy machine.
const LOOK: Duration = Duration::from_millis(20);

/// Whether a thread of this process, other than the caller, was runnable at two looks in a row
/// and got no CPU in between. False when the kernel does not tell.
pub(super) fn a_thread_is_starved() -> bool {
    let before = runnable_threads();
    std::thread::sleep(LOOK);
    let after = runnable_threads();
    before
        .iter()
        .any(|(tid, cpu_ns)| after.get(tid) == Some(cpu_ns))
}

/// CPU nanoseconds of each runnable thread but the caller, by thread id.
fn runnable_threads() -> BTreeMap<i32, u64> {
    // SAFETY: a plain query of the calling thread.
    let own = unsafe { libc::gettid() };
    let Ok(entries) = fs::read_dir("/proc/self/task") else {
        return BTreeMap::new();
    };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let tid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
            let runnable = tid != own && state(&read("stat")?) == Some('R');
            let cpu_ns = read("schedstat")?.split(' ').next()?.parse().ok()?;
            runnable.then_some((tid, cpu_ns))
        })
        .collect()
}

/// The state letter of a `/proc/.../stat` line: the first field after the name's last `)`.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn the_state_comes_after_the_name_whatever_that_holds() {
        assert_eq!(state("7 (a) R (b)) S 1 7"), Some('S'));
        assert_eq!(state("7 (shard-0) R 1 7"), Some('R'));
        assert_eq!(state("nonsense"), None);
    }

    #[test]
    fn a_thread_that_runs_is_not_taken_for_a_starved_one_for_long() {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let spinner = std::thread::spawn(move || while !seen.load(Ordering::Relaxed) {});
        // One look may fall into a time slice of somebody else; not two hundred.
        let told_apart = (0..200).any(|_| !a_thread_is_starved());
        stop.store(true, Ordering::Relaxed);
        spinner.join().unwrap();
        assert!(told_apart);
    }
}
