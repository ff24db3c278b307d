//! Counters of the API, one set per shard, summed when `/metrics` is read.

use hyper::StatusCode;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What a request was for, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/tokenize` and `/detokenize`.
    Tokenize,
    /// `/v1/models`.
    Models,
    /// Health, metrics, status and debug pages.
    Pages,
    /// Everything that was not found.
    Unknown,
}

const ENDPOINTS: [(Endpoint, &str); 6] = [
    (Endpoint::Completions, "completions"),
    (Endpoint::Chat, "chat"),
    (Endpoint::Tokenize, "tokenize"),
    (Endpoint::Models, "models"),
    (Endpoint::Pages, "pages"),
    (Endpoint::Unknown, "unknown"),
];

/// Statuses with a counter of their own; others share the last place.
const STATUSES: [u16; 14] = [
    200, 400, 401, 403, 404, 405, 408, 413, 429, 500, 501, 502, 503, 504,
];

/// Upper bounds of the histogram's buckets in microseconds: 1 ms to 60 s.
const BOUNDS_US: [u64; 14] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 15_000_000, 60_000_000,
];

/// A histogram of durations.
#[derive(Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Adds one duration.
    pub fn observe(&self, span: Duration) {
        let span_us = span.as_micros().min(u128::from(u64::MAX)) as u64;
        let place = BOUNDS_US.partition_point(|bound| *bound < span_us);
        self.buckets[place].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(span_us, Relaxed);
    }
}

/// The counters of one shard.
#[derive(Default)]
pub struct ApiMetrics {
    requests: [[AtomicU64; STATUSES.len() + 1]; ENDPOINTS.len()],
    /// Requests being answered now.
    pub running: AtomicU64,
    /// Prompt tokens accepted by the engine.
    pub prompt_tokens: AtomicU64,
    /// Tokens generated.
    pub generated_tokens: AtomicU64,
    /// Fields that were not known.
    pub unknown_fields: AtomicU64,
    /// Fields that were explicitly `null`.
    pub null_fields: AtomicU64,
    /// Clients that left before their answer was whole.
    pub clients_left: AtomicU64,
    /// Streams that ended with an error event.
    pub stream_errors: AtomicU64,
    /// Request to first token.
    pub ttft: Histogram,
    /// Token to token.
    pub itl: Histogram,
    /// Request to its end.
    pub end_to_end: Histogram,
}

impl ApiMetrics {
    /// Counts one answer (a stream when its headers go out).
    pub fn answered(&self, endpoint: Endpoint, status: StatusCode) {
        let place = STATUSES
            .iter()
            .position(|known| *known == status.as_u16())
            .unwrap_or(STATUSES.len());
        self.requests[endpoint as usize][place].fetch_add(1, Relaxed);
    }

    /// Adds one.
    pub fn count(&self, counter: impl Fn(&ApiMetrics) -> &AtomicU64) {
        counter(self).fetch_add(1, Relaxed);
    }

    /// Appends the sums over `shards` in Prometheus' text format.
    pub fn render(shards: &[Arc<ApiMetrics>], out: &mut String) {
        let sum = |counter: &dyn Fn(&ApiMetrics) -> &AtomicU64| -> u64 {
            shards
                .iter()
                .map(|shard| counter(shard).load(Relaxed))
                .sum()
        };
        header(
            out,
            "kvserve_http_requests_total",
            "counter",
            "Answers by endpoint and status.",
        );
        for (endpoint, label) in ENDPOINTS {
            for place in 0..=STATUSES.len() {
                let count = sum(&|shard| &shard.requests[endpoint as usize][place]);
                if count > 0 {
                    let status = STATUSES
                        .get(place)
                        .map_or("other".to_owned(), u16::to_string);
                    line(
                        out,
                        format_args!(
                            "kvserve_http_requests_total{{endpoint=\"{label}\",status=\"{status}\"}} {count}"
                        ),
                    );
                }
            }
        }
        type Counter = for<'a> fn(&'a ApiMetrics) -> &'a AtomicU64;
        let counters: [(&str, &str, &str, Counter); 7] = [
            (
                "kvserve_requests_running",
                "gauge",
                "Requests being answered.",
                |m| &m.running,
            ),
            (
                "kvserve_prompt_tokens_total",
                "counter",
                "Prompt tokens accepted.",
                |m| &m.prompt_tokens,
            ),
            (
                "kvserve_generated_tokens_total",
                "counter",
                "Tokens generated.",
                |m| &m.generated_tokens,
            ),
            (
                "kvserve_unknown_fields_total",
                "counter",
                "Request fields that were not known.",
                |m| &m.unknown_fields,
            ),
            (
                "kvserve_null_fields_total",
                "counter",
                "Request fields that were null.",
                |m| &m.null_fields,
            ),
            (
                "kvserve_clients_left_total",
                "counter",
                "Clients that left before the end.",
                |m| &m.clients_left,
            ),
            (
                "kvserve_stream_errors_total",
                "counter",
                "Streams that ended with an error event.",
                |m| &m.stream_errors,
            ),
        ];
        for (name, kind, help, counter) in counters {
            header(out, name, kind, help);
            line(out, format_args!("{name} {}", sum(&|shard| counter(shard))));
        }
        type Pick = for<'a> fn(&'a ApiMetrics) -> &'a Histogram;
        let histograms: [(&str, &str, Pick); 3] = [
            ("kvserve_ttft_seconds", "Request to first token.", |m| {
                &m.ttft
            }),
            ("kvserve_itl_seconds", "Token to token.", |m| &m.itl),
            ("kvserve_request_seconds", "Request to its end.", |m| {
                &m.end_to_end
            }),
        ];
        for (name, help, pick) in histograms {
            header(out, name, "histogram", help);
            let mut below = 0;
            for (place, bound_us) in BOUNDS_US.iter().enumerate() {
                below += sum(&|shard| &pick(shard).buckets[place]);
                let bound_s = *bound_us as f64 / 1e6;
                line(
                    out,
                    format_args!("{name}_bucket{{le=\"{bound_s}\"}} {below}"),
                );
            }
            below += sum(&|shard| &pick(shard).buckets[BOUNDS_US.len()]);
            line(out, format_args!("{name}_bucket{{le=\"+Inf\"}} {below}"));
            let sum_s = sum(&|shard| &pick(shard).sum_us) as f64 / 1e6;
            line(out, format_args!("{name}_sum {sum_s}"));
            line(out, format_args!("{name}_count {below}"));
        }
    }
}

/// Appends `# HELP` and `# TYPE`.
pub fn header(out: &mut String, name: &str, kind: &str, help: &str) {
    line(out, format_args!("# HELP {name} {help}"));
    line(out, format_args!("# TYPE {name} {kind}"));
}

/// Appends one line.
pub fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("writing into a String never fails");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_summed_and_buckets_are_cumulative() {
        let shards = [
            Arc::new(ApiMetrics::default()),
            Arc::new(ApiMetrics::default()),
        ];
        for shard in &shards {
            shard.answered(Endpoint::Chat, StatusCode::OK);
            shard.answered(Endpoint::Chat, StatusCode::IM_A_TEAPOT);
            shard.ttft.observe(Duration::from_millis(3));
            shard.ttft.observe(Duration::from_secs(100));
        }
        let mut text = String::new();
        ApiMetrics::render(&shards, &mut text);
        for wanted in [
            "kvserve_http_requests_total{endpoint=\"chat\",status=\"200\"} 2",
            "kvserve_http_requests_total{endpoint=\"chat\",status=\"other\"} 2",
            "kvserve_ttft_seconds_bucket{le=\"0.0025\"} 0",
            "kvserve_ttft_seconds_bucket{le=\"0.005\"} 2",
            "kvserve_ttft_seconds_bucket{le=\"60\"} 2",
            "kvserve_ttft_seconds_bucket{le=\"+Inf\"} 4",
            "kvserve_ttft_seconds_count 4",
        ] {
            assert!(text.lines().any(|line| line == wanted), "{wanted}\n{text}");
        }
    }
}
