//! `kvserve up`: a whole cluster on this machine, as real processes under one supervisor.
//!
//! The supervisor is a plain thread: it starts the children, waits until the proxy is ready,
//! restarts what dies with a back-off on the same ports, and ends all of them on one Ctrl-C, at
//! once on a second.
//! It serves nothing itself, so that its own death harms nobody (children are told by the
//! kernel and drain).

mod child;
mod plan;
mod ready;

use crate::cli::UpArgs;
use crate::log::Log;
use child::Child;
use kvserve_runtime::signals::{self, Drain, SecondInterrupt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use plan::free_port;

/// How often the supervisor looks at its children.
const TICK: Duration = Duration::from_millis(20);

/// How long children may drain before they are killed: the longest request and a little.
const DRAIN_EXTRA: Duration = Duration::from_secs(5);

/// How long the cluster may take to be ready before `up` says what it waits for.
const READY_HINT: Duration = Duration::from_secs(10);

/// A child that dies this often before the cluster was ever ready will not come.
const EARLY_DEATHS_MAX: u32 = 3;

/// Runs the cluster until a signal; gives the process's exit code.
pub fn run(args: &UpArgs, model_path: PathBuf, log: Log) -> i32 {
    let drain = Drain::new();
    if let Err(error) = signals::install_with(&drain, SecondInterrupt::IsTold) {
        eprintln!("kvserve up: cannot install signal handlers: {error}");
        return 1;
    }
    let plan = match plan::Plan::make(args, &model_path) {
        Ok(plan) => plan,
        Err(message) => {
            eprintln!("kvserve up: {message}");
            return 1;
        }
    };
    let mut children: Vec<Child> = plan.children.iter().cloned().map(Child::new).collect();
    let code = supervise(&plan, &mut children, &drain, log);
    stop(&mut children, args.node.request_timeout + DRAIN_EXTRA);
    plan.clean_up();
    code
}

fn supervise(plan: &plan::Plan, children: &mut [Child], drain: &Drain, log: Log) -> i32 {
    let started = Instant::now();
    let mut announced = false;
    let mut hinted = false;
    loop {
        let now = Instant::now();
        for child in children.iter_mut() {
            if let Some(how) = child.tend(now)
                && !drain.requested()
            {
                log.warn(
                    "a node ended and is started again",
                    &[
                        ("node", &child.name()),
                        ("ended", &how),
                        ("in_ms", &child.back_off().as_millis()),
                    ],
                );
                if !announced && child.deaths() >= EARLY_DEATHS_MAX {
                    eprintln!(
                        "kvserve up: {} ended {} times before the cluster was ready ({how}); \
                         its own message stands above",
                        child.name(),
                        child.deaths()
                    );
                    return 1;
                }
            }
        }
        if !announced {
            match ready::check(plan.api) {
                Ok(()) => {
                    announced = true;
                    plan.announce(started.elapsed());
                }
                Err(waiting_for) => {
                    if !hinted && started.elapsed() > READY_HINT {
                        hinted = true;
                        log.info("still starting", &[("waiting_for", &waiting_for)]);
                    }
                }
            }
        }
        if drain.wait_timeout(TICK) {
            return 0;
        }
    }
}

/// Tells the children to drain in the order in which requests flow, so that nobody goes down
/// while somebody before it still needs it: proxy, decode nodes, prefill nodes. Kills what is
/// left when the patience ends, or at once when the user asks a second time.
fn stop(children: &mut [Child], patience: Duration) {
    let until = Instant::now() + patience;
    for wave in ["proxy", "decode", "prefill"] {
        let in_wave = |child: &&mut Child| child.name().starts_with(wave);
        children
            .iter_mut()
            .filter(in_wave)
            .for_each(|child| child.terminate());
        while Instant::now() < until
            && !signals::interrupted_again()
            && children.iter_mut().filter(in_wave).any(Child::running)
        {
            std::thread::sleep(TICK);
        }
    }
    for child in children.iter_mut() {
        child.kill();
    }
}
