//! Where a request's time goes: one histogram a stage, and a trace of its steps.
//!
//! Spans are recorded by the engine's shard into its own histograms; events go into the shard's
//! trace ring (four stores each). `/metrics` shows the first, `/debug/trace` the second, in the
//! Chrome trace format.

use kvserve_runtime::stages::StageRecorder;
use kvserve_runtime::trace::{TraceKind, TracePhase};
use std::fmt::Write;
use std::time::Duration;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// Arrival to admission.
    Queue,
    /// Ask to grant.
    Pair,
    /// Grant to first token.
    Prefill,
    /// First token to all pages in place and checked.
    Pull,
    /// COMMIT sent to its answer.
    Commit,
    /// Arrival to first token (TTFT).
    FirstToken,
    /// Between two tokens (ITL).
    NextToken,
    /// An engine step, submit to woken owner.
    Step,
    /// Arrival to the end.
    Request,
}

/// Names of the spans, in order of [`Span`].
const SPANS: [&str; 9] = [
    "queue",
    "pair",
    "prefill",
    "pull",
    "commit",
    "first_token",
    "next_token",
    "step",
    "request",
];

/// The histograms of one node.
#[derive(Debug)]
pub struct Perf {
    spans: StageRecorder,
}

impl Default for Perf {
    fn default() -> Self {
        Perf {
            spans: StageRecorder::new(&SPANS),
        }
    }
}

impl Perf {
    /// Records one span.
    pub fn record(&self, span: Span, took: Duration) {
        self.spans.record(span as usize, took);
    }

    /// Appends summaries in Prometheus' text format, in seconds.
    pub fn render(&self, out: &mut String) {
        let name = "kvserve_stage_seconds";
        let _ = writeln!(out, "# TYPE {name} summary");
        for summary in self.spans.snapshot().summaries() {
            let stage = summary.stage;
            for (quantile, value) in [
                ("0.5", summary.p50),
                ("0.99", summary.p99),
                ("1", summary.max),
            ] {
                let _ = writeln!(
                    out,
                    "{name}{{stage=\"{stage}\",quantile=\"{quantile}\"}} {}",
                    value.as_secs_f64()
                );
            }
            let _ = writeln!(
                out,
                "{name}_sum{{stage=\"{stage}\"}} {}",
                summary.sum.as_secs_f64()
            );
            let _ = writeln!(out, "{name}_count{{stage=\"{stage}\"}} {}", summary.count);
        }
    }
}

const fn kind(
    id: u16,
    name: &'static str,
    phase: TracePhase,
    arguments: [&'static str; 2],
) -> TraceKind {
    TraceKind {
        id,
        name,
        phase,
        arguments,
    }
}

/// A request has arrived; the subject of all request events is its number on this node.
pub const REQUEST_BEGIN: TraceKind = kind(
    1,
    "request",
    TracePhase::Begin,
    ["prompt_tokens", "new_tokens_max"],
);
/// It has ended.
pub const REQUEST_END: TraceKind = kind(2, "request", TracePhase::End, ["tokens_told", "failed"]);
/// A prefill node was asked.
pub const ASKED: TraceKind = kind(3, "asked", TracePhase::Instant, ["attempt", "pages"]);
/// It granted the lease.
pub const GRANTED: TraceKind = kind(4, "granted", TracePhase::Instant, ["attempt", ""]);
/// The first token has come.
pub const FIRST_TOKEN: TraceKind = kind(5, "first token", TracePhase::Instant, ["attempt", ""]);
/// All pages are in place and checked.
pub const PLACED: TraceKind = kind(6, "placed", TracePhase::Instant, ["attempt", "pages"]);
/// COMMIT was answered OK.
pub const COMMITTED: TraceKind = kind(7, "committed", TracePhase::Instant, ["attempt", "withheld"]);
/// The attempt failed.
pub const ATTEMPT_FAILED: TraceKind =
    kind(8, "attempt failed", TracePhase::Instant, ["attempt", ""]);
/// An engine step starts; the subject is its position on the engine's channel.
pub const STEP_BEGIN: TraceKind = kind(9, "step", TracePhase::Begin, ["sequences", "tokens"]);
/// It has ended.
pub const STEP_END: TraceKind = kind(10, "step", TracePhase::End, ["compute_ns", ""]);

/// All kinds, for a dump.
pub const KINDS: [TraceKind; 10] = [
    REQUEST_BEGIN,
    REQUEST_END,
    ASKED,
    GRANTED,
    FIRST_TOKEN,
    PLACED,
    COMMITTED,
    ATTEMPT_FAILED,
    STEP_BEGIN,
    STEP_END,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_kinds_have_names_of_their_own() {
        assert_eq!(SPANS.len(), Span::Request as usize + 1);
        for (index, kind) in KINDS.iter().enumerate() {
            assert_eq!(kind.id as usize, index + 1);
        }
        let perf = Perf::default();
        perf.record(Span::Request, Duration::from_millis(3));
        let mut text = String::new();
        perf.render(&mut text);
        assert!(text.contains("kvserve_stage_seconds_count{stage=\"request\"} 1"));
    }
}
