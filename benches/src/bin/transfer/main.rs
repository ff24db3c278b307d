//! Pulls by shared memory and by TCP beside floors of our own, in one run, between two processes.
//!
//! `cargo run --release -p kvserve-benches --bin transfer [-- --cores DECODE,PREFILL] [--spin-us N]
//! [--ms N] [--sizes 24x16,24x1024] [--csv FILE]`
//!
//! ```text
//!  this process (decode)                        child (prefill; this program, told `prefill`)
//!   memcpy floor ── loads, streaming stores ──▶  the pool's memfd, mapped read-only
//!   shm pull     ── ShmTransport ─────────────▶  the same
//!   tcp floor    ── 64 bytes ▶ ◀ writev/readv ─  the same pages, same socket settings
//!   tcp pull     ── TcpTransport ─────────────▶  TcpReadServer
//! ```
//!
//! All ways take turns in short batches, so that a noisy machine is as noisy for the floor as for
//! us: judge the ratios. Pages are scattered over pools several times the size of any pull, other
//! ones each time. CPU seconds are those of both processes. Both sides of a floor and of a pull
//! wait alike (`wait.rs`).

mod args;
mod child;
mod floors;
mod measure;
mod prefill;
mod pulls;
mod size;
mod sys;
mod table;
mod wait;

use args::{Args, Task};
use kvserve_kv::ChecksumMode;

fn main() {
    match Args::parse(std::env::args().skip(1)) {
        Ok(Task::Measure(args)) => measure(&args),
        Ok(Task::Prefill(args)) => prefill::serve(&args),
        Err(wrong) => {
            eprintln!("{wrong}");
            std::process::exit(2);
        }
    }
}

fn measure(args: &Args) {
    let modes = [ChecksumMode::Off, ChecksumMode::Sampled, ChecksumMode::Full];
    sys::pin(args.cores.map(|(decode, _)| decode));
    table::head(args);
    let mut lines = Vec::new();
    for size in &args.sizes {
        let setup = child::Setup::start(args, *size);
        let mut ways: Vec<Box<dyn measure::Way + '_>> = vec![
            Box::new(floors::MemcpyFloor::new(&setup)),
            Box::new(floors::TcpFloor::new(&setup, args.spin)),
        ];
        for mode in modes {
            ways.push(Box::new(pulls::shm(&setup, mode, args.spin)));
            ways.push(Box::new(pulls::tcp(&setup, mode, args.spin)));
        }
        let measured = measure::in_turns(args, &setup, &mut ways);
        table::print(&measured);
        lines.extend(measured);
    }
    table::verdict(&lines);
    if let Some(path) = &args.csv {
        table::write_csv(path, &lines);
    }
}
