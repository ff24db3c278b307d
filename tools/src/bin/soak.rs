//! A soak of a whole cluster: `soak [--requests N] [--concurrency N] [--transport shm|tcp|both]
//! [--seed S] [--restart-every N] [--no-timings] [--keep]`.
//!
//! By default 1,000 requests at concurrency 64 over shared memory and over TCP, with clients that
//! leave and a prefill node restarted per 100 requests; then how exactly stage limits are kept.
//! Exit code 0: every text is that of `serve`, nothing leaked, every request had an end; 1: not
//! so; 2: the command line is wrong or a process did not start.

use clap::Parser;
use kvserve_tools::soak::AS_KVSERVE;
use kvserve_tools::soak::client::post;
use kvserve_tools::soak::cluster::{Fleet, Node, Workshop, until};
use kvserve_tools::soak::judge::{Verdict, judge};
use kvserve_tools::soak::load::{Load, bodies, ids_of};
use kvserve_tools::soak::timings::{Timing, measure};
use serde_json::Value;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Options {
    /// Requests over each way of pages.
    #[arg(long, default_value_t = 1000)]
    requests: usize,
    /// Clients at once.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// shm, tcp or both.
    #[arg(long, default_value = "both")]
    transport: String,
    /// From which requests and leavers are drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A prefill node is restarted after so many requests (killed and drained in turns).
    #[arg(long, default_value_t = 100)]
    restart_every: usize,
    /// Do not measure how exactly stage limits are kept.
    #[arg(long)]
    no_timings: bool,
    /// Keep the logs of the processes.
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let mut words = std::env::args();
    let own = words.next().unwrap_or_default();
    if words.next().is_some_and(|word| word == AS_KVSERVE) {
        let cli = kvserve::cli::Cli::parse_from(std::iter::once(own).chain(words));
        std::process::exit(kvserve::run::run(cli));
    }
    match soak(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("soak: {message}");
            ExitCode::from(2)
        }
    }
}

fn soak(options: &Options) -> Result<bool, String> {
    let transports: &[&str] = match options.transport.as_str() {
        "both" => &["shm", "tcp"],
        "shm" => &["shm"],
        "tcp" => &["tcp"],
        other => return Err(format!("--transport {other}: give shm, tcp or both")),
    };
    let mut shop = Workshop::new().map_err(|error| error.to_string())?;
    let requests = reference(&shop, options.seed)?;
    println!(
        "{} requests a way at concurrency {}, {} different ones, a prefill restart per {}, seed {}; \
         load average {}",
        options.requests,
        options.concurrency,
        requests.len(),
        options.restart_every,
        options.seed,
        load_average()
    );
    let mut good = true;
    for transport in transports {
        let (verdict, took, restarts) = run(&shop, transport, &requests, options)?;
        good &= verdict.is_good();
        print_verdict(transport, &verdict, took, restarts);
    }
    if !options.no_timings {
        println!(
            "how exactly limits are kept; load average {}",
            load_average()
        );
        for transport in transports {
            for timing in measure(&shop, transport)? {
                good &= timing.right;
                print_timing(&timing);
            }
        }
    }
    if options.keep || !good {
        println!("logs: {}", shop.keep().display());
    }
    println!("{}", if good { "ok" } else { "FAILED" });
    Ok(good)
}

/// What `serve` alone answers.
fn reference(shop: &Workshop, seed: u64) -> Result<Vec<(Value, Vec<u64>)>, String> {
    let serve = Node::start(shop, "serve", "serve", None, &[])?;
    bodies(seed)
        .into_iter()
        .map(|body| {
            let answer = post(serve.api, "/v1/completions", &body);
            let answer = answer.map_err(|error| format!("serve: {error}"))?;
            let ids = ids_of(&answer.json());
            match answer.status == 200 && !ids.is_empty() {
                true => Ok((body, ids)),
                false => Err(format!("serve answers {}: {}", answer.status, answer.body)),
            }
        })
        .collect()
}

fn run(
    shop: &Workshop,
    transport: &str,
    requests: &[(Value, Vec<u64>)],
    options: &Options,
) -> Result<(Verdict, Duration, usize), String> {
    let mut fleet = Fleet::start(shop, transport)?;
    let load = Load::new(fleet.proxy.api, requests, options.requests, options.seed);
    let began = Instant::now();
    let restarts = std::thread::scope(|scope| {
        for _ in 0..options.concurrency {
            scope.spawn(|| load.client());
        }
        restart(&mut fleet, &load, options.restart_every)
    })?;
    let took = began.elapsed();
    Ok((judge(&fleet, load.tally()), took, restarts))
}

/// Restarts a prefill node after each `every` requests, until all are through.
fn restart(fleet: &mut Fleet, load: &Load<'_>, every: usize) -> Result<usize, String> {
    let mut restarts = 0;
    let mut at = every;
    while every > 0 && at < load.total {
        if load.done.load(Relaxed) < at {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        }
        let node = &mut fleet.prefill[restarts % 2];
        match restarts % 4 {
            0 | 1 => node.kill(),
            _ => node.terminate(Duration::from_secs(10)),
        }
        node.run()?;
        restarts += 1;
        at += every;
    }
    until(Duration::from_secs(30), || fleet.is_whole());
    Ok(restarts)
}

fn print_verdict(transport: &str, verdict: &Verdict, took: Duration, restarts: usize) {
    let tally = &verdict.tally;
    let (committed, failed, here) = verdict.migrations;
    let (reposts, limits) = verdict.reposts_and_limits;
    println!(
        "{transport:>4}: {} right, {} WRONG, {} left, {} typed errors, {} cut, {} without an end; \
         {restarts} restarts; {:.1} s",
        tally.right,
        tally.wrong,
        tally.left,
        tally.refused.len(),
        tally.cut,
        tally.no_end,
        took.as_secs_f64()
    );
    println!(
        "      {committed} migrations committed, {failed} failed, {here} prompts computed here; \
         {:.1} MiB pulled, {reposts} reads posted again, {limits} ended by a limit (at most \
         {:.1} ms late), pages back within {:.1} ms; {} leaks",
        verdict.bytes / f64::from(1 << 20),
        verdict.latest.0 * 1e3,
        verdict.latest.1 * 1e3,
        verdict.leaks.len()
    );
    for said in &tally.refused {
        println!("      error: {said}");
    }
    for leak in &verdict.leaks {
        println!("      LEAK {leak}");
    }
}

fn print_timing(timing: &Timing) {
    println!(
        "{:>4}: {:<26} ended {:>7.1} ms after the {}, pages back {:>6.1} ms after that, answered {}",
        timing.transport,
        timing.case,
        timing.late_ms,
        timing.since,
        timing.pages_back_ms,
        if timing.right { "200" } else { "with an error" }
    );
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("?").to_string()
}
