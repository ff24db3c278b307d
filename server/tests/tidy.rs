//! What people forget: file length, banned words, whose door glommio is, where unsafe may live.

use std::fs;
use std::path::{Path, PathBuf};

/// A file says one thing; tests beside the code count, too.
const LINES_MAX: usize = 1000;

fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("workspace");
    let mut folders: Vec<_> = [
        "runtime", "kv", "model", "gpu", "server", "tools", "benches",
    ]
    .iter()
    .map(|name| root.join(name))
    .collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("folder of the workspace") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = fs::read_to_string(&path).expect("a readable source");
                let name = path
                    .strip_prefix(root)
                    .expect("below the root")
                    .to_path_buf();
                files.push((name, text));
            }
        }
    }
    assert!(
        files.len() > 50,
        "the walk found only {} files",
        files.len()
    );
    files
}

fn is_this_file(path: &Path) -> bool {
    path.ends_with("tests/tidy.rs")
}

#[test]
fn no_file_is_longer_than_one_can_read() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(
            lines <= LINES_MAX,
            "{} has {lines} lines; split it",
            path.display()
        );
    }
}

#[test]
fn nothing_is_left_half_done() {
    for (path, text) in sources() {
        if is_this_file(&path) {
            continue;
        }
        for word in ["todo!(", "unimplemented!(", "FIXME", "XXX", "HACK", "dbg!("] {
            assert!(!text.contains(word), "{} contains {word}", path.display());
        }
    }
}

#[test]
fn glommio_is_reached_through_the_runtimes_door_only() {
    for (path, text) in sources() {
        let door = path.starts_with("runtime/src/shard") || path.starts_with("runtime/src/net");
        if door || is_this_file(&path) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            assert!(
                !code.contains("glommio::"),
                "{}:{} reaches glommio past runtime/src/shard",
                path.display(),
                number + 1
            );
        }
    }
}

#[test]
fn every_unsafe_block_gives_its_reason() {
    for (path, text) in sources() {
        if is_this_file(&path) {
            continue;
        }
        let lines: Vec<_> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if code.contains("unsafe {") || code.contains("unsafe impl") {
                let from = number.saturating_sub(8);
                assert!(
                    lines[from..=number]
                        .iter()
                        .any(|line| line.contains("SAFETY")),
                    "{}:{} has unsafe without a SAFETY reason near it",
                    path.display(),
                    number + 1
                );
            }
        }
    }
}

#[test]
fn no_machine_path_or_address_is_in_the_tree() {
    for (path, text) in sources() {
        if is_this_file(&path) {
            continue;
        }
        for word in ["/work/", "/root/", "/home/"] {
            assert!(!text.contains(word), "{} names {word}", path.display());
        }
    }
}
