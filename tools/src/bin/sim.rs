//! The cluster simulator: `sim -- --seeds N --start S [--threads T] [--coverage] [--replay SEED]`.
//!
//! Exit code 0: every invariant held (and, with `--coverage`, everything that must be met was
//! met); 1: a seed failed or the coverage has a zero; 2: the command line is wrong.

use kvserve::sim::{SeedReport, run_seed, run_seeds, running};
use std::process::ExitCode;
use std::time::Instant;

struct Options {
    seeds: u64,
    start: u64,
    threads: usize,
    coverage: bool,
    replay: Option<u64>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        seeds: 20_000,
        start: 1,
        threads: 2,
        coverage: false,
        replay: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let given = words.next().ok_or(format!("{word} needs a number"))?;
            given
                .parse::<u64>()
                .map_err(|_| format!("{word} {given}: not a number"))
        };
        match word.as_str() {
            "--seeds" => options.seeds = number()?,
            "--start" => options.start = number()?,
            "--threads" => options.threads = number()? as usize,
            "--replay" => options.replay = Some(number()?),
            "--coverage" => options.coverage = true,
            _ => {
                return Err(format!(
                    "unknown option {word}; use --seeds N, --start S, --threads T, --coverage, \
                     --replay SEED"
                ));
            }
        }
    }
    Ok(options)
}

fn print_failure(report: &SeedReport) {
    for line in &report.trace {
        println!("{line}");
    }
    match &report.violation {
        Some(violation) => println!(
            "FAILED seed {} after {} events: {violation}",
            report.seed, report.events
        ),
        None => println!(
            "seed {}: all invariants held over {} events",
            report.seed, report.events
        ),
    }
}

/// A core's own assertion ends the process where panics abort: the seed must be told before.
fn tell_seed_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let (seed, trace) = running();
        let mut text = trace.join("\n");
        text.push_str(&format!("\nFAILED seed {seed}: a core asserts: {panic}\n"));
        print!("{text}");
    }));
}

fn main() -> ExitCode {
    tell_seed_on_panic();
    let options = match options() {
        Ok(options) => options,
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::from(2);
        }
    };
    if let Some(seed) = options.replay {
        let report = run_seed(seed, true);
        print_failure(&report);
        return ExitCode::from(u8::from(report.violation.is_some()));
    }
    let began = Instant::now();
    let summary = run_seeds(options.start, options.seeds, options.threads);
    let took_s = began.elapsed().as_secs_f64();
    println!(
        "{} seeds in {took_s:.1} s ({:.0} a second, {} threads); events: median {}, {} in all; \
         faults: at least {} a seed, {} in all",
        summary.seeds,
        summary.seeds as f64 / took_s,
        options.threads,
        summary.events_median,
        summary.events,
        summary.faults_min,
        summary.faults,
    );
    if let Some(least) = summary.shape_least {
        println!(
            "each with at least {} prefill nodes, {} decode nodes, a proxy, {} requests, {} of them \
             with shared beginnings; {} end with later requests that must be answered",
            least.prefills, least.decodes, least.requests, least.sharing, summary.calms,
        );
    }
    if options.coverage {
        for (name, count) in summary.coverage.table() {
            println!("{count:>12}  {name}");
        }
    }
    if let Some(failed) = &summary.failed {
        // Once more, with its trace.
        print_failure(&run_seed(failed.seed, true));
        println!("replay it with --replay {}", failed.seed);
        return ExitCode::FAILURE;
    }
    let zeros = summary.coverage.zeros();
    if options.coverage && !zeros.is_empty() {
        println!("NOT MET: {}", zeros.join("; "));
        return ExitCode::FAILURE;
    }
    let impossible = summary.coverage.impossible();
    if !impossible.is_empty() {
        println!(
            "MET, although `sim/expected.rs` gives a reason why not: {}",
            impossible.join("; ")
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
