//! The fixed cost of a migration: from `Complete` published by the prefill node to the first
//! migrated token that may leave (COMMIT's answer is in), less the same bytes at the floor.
//!
//! `cargo run --release -p kvserve-benches --bin migration [-- --rounds N] [--pages N] [--kib N]
//! [--path shm|tcp] [--sums off|full] [--cores D,P] [--gap-us N]`
//!
//! ```text
//!  prefill (child): PeerHub on a shard        decode (this process): PeerHub on a shard
//!   all pages reserved, granted ───────────▶
//!   a pause: everything up to here is idle
//!   complete(pages)         t0                 (the time goes along with the first token)
//!     checksums, Complete ─────────────────▶   reads all pages, compares
//!     lease: OK?          ◀──────── Commit
//!                         CommitAnswer ───▶    t1: tokens may leave
//! ```
//!
//! No page is published before `complete`, so that all of them are pulled, and with full
//! checksums hashed on both sides, within the time: the worst case. Floor: the same pages copied
//! in a loop with streaming stores, as often, between the migrations.

#![allow(missing_docs, reason = "a program: its fields are told by its flags")]

mod decode;
mod node;
mod prefill;

use kvserve_kv::ChecksumMode;
use kvserve_kv::peer::TransportChoice;
use std::time::Duration;

/// Settings of both sides.
#[derive(Clone, Debug)]
pub struct Args {
    pub rounds: usize,
    pub pages: usize,
    pub page_bytes: usize,
    pub path: TransportChoice,
    pub checksums: ChecksumMode,
    pub cores: Option<(usize, usize)>,
    /// Between the grant and `complete`: a chunk of prefill in which nothing moves.
    pub gap: Duration,
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (child, words) = match words.split_first() {
        Some((first, rest)) if first == "prefill" => (true, rest),
        _ => (false, &words[..]),
    };
    let args = match parse(words) {
        Ok(args) => args,
        Err(wrong) => {
            eprintln!("{wrong}");
            std::process::exit(2);
        }
    };
    if child {
        prefill::run(args);
    } else {
        decode::run(args, words.to_vec());
    }
}

fn parse(words: &[String]) -> Result<Args, String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut args = Args {
        rounds: 400,
        pages: 24,
        page_bytes: 16 << 10,
        path: TransportChoice::Shm,
        checksums: ChecksumMode::Full,
        cores: (cpus > 1).then_some((0, 1)),
        gap: Duration::from_micros(2000),
    };
    for pair in words.chunks(2) {
        let (flag, value) = (pair[0].as_str(), pair.get(1).map_or("", String::as_str));
        let number = || {
            let number: Result<usize, _> = value.parse();
            number.map_err(|_| format!("{flag} takes a number, not {value:?}"))
        };
        match flag {
            "--rounds" => args.rounds = number()?.max(1),
            "--pages" => args.pages = number()?.clamp(1, 4096),
            "--kib" => args.page_bytes = number()?.clamp(1, 16 << 10) << 10,
            "--gap-us" => args.gap = Duration::from_micros(number()? as u64),
            "--path" => {
                args.path = match value {
                    "shm" => TransportChoice::Shm,
                    "tcp" => TransportChoice::Tcp,
                    _ => return Err(format!("--path takes shm or tcp, not {value:?}")),
                }
            }
            "--sums" => args.checksums = value.parse().map_err(|error| format!("{error}"))?,
            "--cores" => {
                let wrong = || format!("--cores takes two CPUs or none, not {value:?}");
                args.cores = match value {
                    "none" => None,
                    _ => {
                        let (decode, prefill) = value.split_once(',').ok_or_else(wrong)?;
                        let cpu = |text: &str| text.parse().map_err(|_| wrong());
                        Some((cpu(decode)?, cpu(prefill)?))
                    }
                }
            }
            other => return Err(format!("unknown flag {other}: see the head of the source")),
        }
    }
    Ok(args)
}
