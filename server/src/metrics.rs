//! Counters of one process, written by its shards, read by `/metrics`. First names.

use kvserve_model::Step;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

macro_rules! metrics {
    ($($(#[doc = $doc:literal])* $name:ident => $metric:literal,)*) => {
        /// Counters that only grow.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $($(#[doc = $doc])* pub $name: AtomicU64,)*
        }

        impl Metrics {
            /// The Prometheus text of all counters.
            pub fn render(&self, out: &mut String) {
                $(
                    let _ = writeln!(out, "# TYPE {} counter", $metric);
                    let _ = writeln!(out, "{} {}", $metric, self.$name.load(Relaxed));
                )*
            }
        }
    };
}

metrics! {
    /// Requests that reached the engine's shard.
    requests => "kvserve_requests_total",
    /// Requests that ended with a finish reason.
    requests_finished => "kvserve_requests_finished_total",
    /// Requests that ended with a typed error.
    requests_failed => "kvserve_requests_failed_total",
    /// Requests whose client left first.
    requests_cancelled => "kvserve_requests_cancelled_total",
    /// Requests that ran out of time.
    requests_expired => "kvserve_requests_deadline_exceeded_total",
    /// Tokens given to clients.
    tokens => "kvserve_generated_tokens_total",
    /// Prompt tokens taken in.
    prompt_tokens => "kvserve_prompt_tokens_total",
    /// Engine steps.
    steps => "kvserve_engine_steps_total",
    /// Engine steps that failed.
    steps_failed => "kvserve_engine_steps_failed_total",
    /// Tokens computed in steps, prefill and decode.
    step_tokens => "kvserve_engine_tokens_total",
    /// Nanoseconds of arithmetic.
    step_compute_ns => "kvserve_engine_compute_nanoseconds_total",
    /// Nanoseconds from submitting a step to its woken owner.
    step_wall_ns => "kvserve_engine_step_nanoseconds_total",
    /// Attempts of prefill and migration begun.
    migrations_started => "kvserve_migrations_started_total",
    /// Migrations committed.
    migrations_committed => "kvserve_migrations_committed_total",
    /// Attempts that failed.
    migrations_failed => "kvserve_migrations_failed_total",
    /// Requests whose prompt was computed on the decode node instead.
    recomputes => "kvserve_local_recomputes_total",
    /// Requests of which a decode node held so much that it computed the short rest itself.
    rests_here => "kvserve_prefix_rests_here_total",
    /// Prefills done for peers.
    peer_prefills => "kvserve_peer_prefills_total",
    /// Prefills for peers refused as busy.
    peer_prefills_busy => "kvserve_peer_prefills_busy_total",
}

impl Metrics {
    /// Counts one ended step.
    pub fn step(&self, step: &Step, wall: Duration) {
        self.steps.fetch_add(1, Relaxed);
        self.step_tokens
            .fetch_add(step.tokens.len() as u64, Relaxed);
        self.step_compute_ns.fetch_add(step.compute_ns, Relaxed);
        self.step_wall_ns.fetch_add(wall.as_nanos() as u64, Relaxed);
    }
}

/// Adds one gauge to a Prometheus text.
pub fn gauge(out: &mut String, name: &str, labels: &str, value: f64) {
    let _ = writeln!(out, "# TYPE {name} gauge");
    let _ = writeln!(out, "{name}{labels} {value}");
}
