//! Plants each bug of `server/src/sim/planted` in a scratch copy of the tree and has the cluster
//! simulator look for it: `sim-planted [--seeds N] [--only NAME]... [--threads T]
//! [--target-dir DIR]`.
//!
//! The copy lies in `DIR/planted-tree`; only what a patch touches is built anew. A patch's text
//! names the invariants that may find it (`Found by: I2, I10`). Exit code 0: every bug was found by
//! one of its invariants; 1: one was not; 2: the command line or the tree is wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Their assertions are left out: what is to be shown is that the simulator's checks find a bug.
const UNASSERTED: [&str; 3] = ["kvserve-runtime", "kvserve-kv", "kvserve"];

struct Options {
    seeds: u64,
    threads: u64,
    only: Vec<String>,
    target: PathBuf,
}

struct Planted {
    name: String,
    path: PathBuf,
    found_by: Vec<String>,
}

/// What the simulator said.
enum Found {
    /// By this invariant, at this seed, in these words.
    By(String, u64, String),
    No,
}

fn options(root: &Path) -> Result<Options, String> {
    let mut options = Options {
        seeds: 20_000,
        threads: 2,
        only: Vec::new(),
        target: std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |given: String| {
            given
                .parse::<u64>()
                .map_err(|_| format!("{given}: not a number"))
        };
        match word.as_str() {
            "--seeds" => options.seeds = number(value()?)?,
            "--threads" => options.threads = number(value()?)?,
            "--only" => options.only.push(value()?),
            "--target-dir" => options.target = PathBuf::from(value()?),
            _ => {
                return Err(format!(
                    "unknown option {word}; use --seeds N, --threads T, --only NAME, \
                     --target-dir DIR"
                ));
            }
        }
    }
    Ok(options)
}

fn planted(root: &Path, only: &[String]) -> Result<Vec<Planted>, String> {
    let folder = root.join("server/src/sim/planted");
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut all = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let Some(name) = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
        else {
            continue;
        };
        if path
            .extension()
            .is_none_or(|extension| extension != "patch")
            || !(only.is_empty() || only.contains(&name))
        {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|error| format!("{name}: {error}"))?;
        let named = text
            .lines()
            .find_map(|line| line.strip_prefix("Found by: "));
        let found_by = named.ok_or(format!("{name}: no line `Found by: ` names invariants"))?;
        let found_by = found_by.split(", ").map(str::to_owned).collect();
        all.push(Planted {
            name,
            path,
            found_by,
        });
    }
    all.sort_by(|one, other| one.name.cmp(&other.name));
    match all.is_empty() {
        true => Err("no such patch".into()),
        false => Ok(all),
    }
}

fn run(command: &mut Command) -> Result<String, String> {
    let told = format!("{command:?}");
    let output = command
        .output()
        .map_err(|error| format!("{told}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => {
            let errors = String::from_utf8_lossy(&output.stderr);
            let errors: Vec<&str> = errors.lines().filter(|line| !line.is_empty()).collect();
            let from = errors.len().saturating_sub(30);
            Err(format!("{told} failed:\n{}", errors[from..].join("\n")))
        }
    }
}

/// Makes the copy equal to the tree; files that are equal already keep their times, so that
/// nothing is built for them.
fn copy_tree(root: &Path, scratch: &Path) -> Result<(), String> {
    let listed = run(Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root))?;
    for name in listed.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root.join(name), scratch.join(name));
        if from.is_file() {
            copy_if_other(&from, &to).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    Ok(())
}

fn copy_if_other(from: &Path, to: &Path) -> std::io::Result<()> {
    let wanted = fs::read(from)?;
    if fs::read(to).is_ok_and(|there| there == wanted) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(to, wanted)
}

/// Builds the simulator in the copy; its path.
fn build(scratch: &Path, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = Command::new("cargo");
    cargo.args([
        "build",
        "-p",
        "kvserve-tools",
        "--bin",
        "sim",
        "--target-dir",
    ]);
    cargo.arg(target).current_dir(scratch);
    for package in UNASSERTED {
        let off = format!("profile.dev.package.{package}.debug-assertions=false");
        cargo.args(["--config", &off]);
    }
    run(&mut cargo)?;
    Ok(target.join("debug/sim"))
}

/// Applies a patch as if no repository were there.
fn apply(scratch: &Path, patch: &Path) -> Result<(), String> {
    let mut git = Command::new("git");
    git.arg("apply").arg(patch).current_dir(scratch);
    git.env(
        "GIT_CEILING_DIRECTORIES",
        scratch.parent().unwrap_or(scratch),
    );
    run(&mut git).map(|_| ())
}

fn look(sim: &Path, options: &Options) -> Result<Found, String> {
    let mut command = Command::new(sim);
    command.args(["--seeds", &options.seeds.to_string()]);
    command.args(["--threads", &options.threads.to_string()]);
    let output = command.output().map_err(|error| format!("sim: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(line) = text
        .lines()
        .rev()
        .find(|line| line.starts_with("FAILED seed "))
    else {
        return match output.status.success() {
            true => Ok(Found::No),
            false => {
                let errors = String::from_utf8_lossy(&output.stderr);
                let last = errors
                    .lines()
                    .last()
                    .unwrap_or("and said nothing")
                    .to_owned();
                let status = output.status;
                Err(format!(
                    "the simulator ended with {status} and named no seed: {last}"
                ))
            }
        };
    };
    let seed = line.split(' ').nth(2).and_then(|word| word.parse().ok());
    let said = line.split_once(": ").map_or(line, |(_, said)| said);
    let invariant = said.split(' ').next().unwrap_or_default().to_owned();
    Ok(Found::By(invariant, seed.unwrap_or(0), said.to_owned()))
}

fn all(root: &Path, options: &Options) -> Result<bool, String> {
    let bugs = planted(root, &options.only)?;
    let scratch = options.target.join("planted-tree");
    let target = options.target.join("planted-build");
    let target = match std::env::var_os("KVSERVE_PLANTED_BUILD") {
        Some(other) => PathBuf::from(other),
        None => target,
    };
    copy_tree(root, &scratch)?;
    let mut good = true;
    for bug in &bugs {
        let began = Instant::now();
        apply(&scratch, &bug.path).map_err(|error| format!("{}: {error}", bug.name))?;
        let found = build(&scratch, &target).and_then(|sim| look(&sim, options));
        copy_tree(root, &scratch)?;
        let took = began.elapsed().as_secs();
        let name = &bug.name;
        match found {
            Err(error) => {
                println!("NOT RUN          {name} ({took} s): {error}");
                good = false;
            }
            Ok(Found::By(invariant, seed, said)) => {
                let right = bug.found_by.contains(&invariant);
                let verdict = if right { "found" } else { "FOUND BY ANOTHER" };
                println!("{verdict:<16} {name}: seed {seed} ({took} s): {said}");
                good &= right;
            }
            Ok(Found::No) => {
                println!(
                    "NOT FOUND        {name}: {} seeds ({took} s)",
                    options.seeds
                );
                good = false;
            }
        }
    }
    println!("{} planted bugs looked for", bugs.len());
    Ok(good)
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let done = options(&root).and_then(|options| all(&root, &options));
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(wrong) => {
            eprintln!("{wrong}");
            ExitCode::from(2)
        }
    }
}
