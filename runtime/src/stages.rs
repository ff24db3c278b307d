//! How long each stage takes: one histogram per stage and shard, merged when somebody asks.
//!
//! A shard records into its own histograms; the lock on each is contended only while a
//! snapshot copies that one histogram (some microseconds, whenever `/metrics` is read).

use hdrhistogram::Histogram;
use std::sync::Mutex;
use std::time::Duration;

/// The shortest span told apart, in nanoseconds: below it lies the cost of the clock.
const SPAN_NS_MIN: u64 = 64;
/// The longest span told apart: ten minutes, beyond any request's deadline.
const SPAN_NS_MAX: u64 = 600 * 1_000_000_000;
/// Two significant digits are an error below 1 % and about 30 KiB a stage and shard.
const DIGITS: u8 = 2;

/// The stage histograms of one shard. Wrap it in an `Arc` to read it from elsewhere.
#[derive(Debug)]
pub struct StageRecorder {
    stages: &'static [&'static str],
    histograms: Vec<Mutex<Histogram<u64>>>,
}

impl StageRecorder {
    /// Recorder for the named stages; a stage's number is its place in the list.
    pub fn new(stages: &'static [&'static str]) -> Self {
        StageRecorder {
            stages,
            histograms: stages.iter().map(|_| Mutex::new(histogram())).collect(),
        }
    }

    /// The stages' names.
    pub fn stages(&self) -> &'static [&'static str] {
        self.stages
    }

    /// Records one span; longer ones than ten minutes count as ten minutes.
    ///
    /// # Panics
    /// When `stage` is not a place in the list.
    pub fn record(&self, stage: usize, span: Duration) {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        lock(&self.histograms[stage]).saturating_record(nanos.max(SPAN_NS_MIN));
    }

    /// A copy of everything recorded so far.
    pub fn snapshot(&self) -> StageSnapshot {
        StageSnapshot {
            stages: self.stages,
            histograms: self.histograms.iter().map(|h| lock(h).clone()).collect(),
        }
    }
}

/// Copied histograms, of one shard or of several merged.
#[derive(Clone, Debug)]
pub struct StageSnapshot {
    stages: &'static [&'static str],
    histograms: Vec<Histogram<u64>>,
}

/// The figures of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSummary {
    /// The stage's name.
    pub stage: &'static str,
    /// Spans recorded.
    pub count: u64,
    /// The median.
    pub p50: Duration,
    /// 99 % were at most this long.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
    /// All spans together, to about 1 %.
    pub sum: Duration,
}

impl StageSnapshot {
    /// Adds the spans of another shard's snapshot. Stages are matched by name; those that this
    /// snapshot does not know are left out.
    pub fn merge(&mut self, other: &StageSnapshot) {
        for (name, theirs) in other.stages.iter().zip(&other.histograms) {
            if let Some(place) = self.stages.iter().position(|stage| stage == name) {
                self.histograms[place]
                    .add(theirs)
                    .expect("all stage histograms have the same bounds");
            }
        }
    }

    /// The figures of every stage, in the list's order.
    pub fn summaries(&self) -> Vec<StageSummary> {
        self.stages
            .iter()
            .zip(&self.histograms)
            .map(|(stage, spans)| summary(stage, spans))
            .collect()
    }
}

fn summary(stage: &'static str, spans: &Histogram<u64>) -> StageSummary {
    let quantile = |q: f64| match spans.is_empty() {
        true => Duration::ZERO,
        false => Duration::from_nanos(spans.value_at_quantile(q)),
    };
    StageSummary {
        stage,
        count: spans.len(),
        p50: quantile(0.5),
        p99: quantile(0.99),
        max: quantile(1.0),
        sum: Duration::from_secs_f64(spans.mean() * spans.len() as f64 / 1e9),
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(SPAN_NS_MIN, SPAN_NS_MAX, DIGITS)
        .expect("the bounds are constants that the histogram accepts")
}

fn lock(histogram: &Mutex<Histogram<u64>>) -> std::sync::MutexGuard<'_, Histogram<u64>> {
    // A panic while recording leaves a histogram that is still a histogram.
    histogram
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGES: &[&str] = &["parse", "step"];

    fn near(span: Duration, nanos: u64) -> bool {
        let got = span.as_nanos() as f64;
        (got - nanos as f64).abs() <= nanos as f64 * 0.01 + SPAN_NS_MIN as f64
    }

    #[test]
    fn summaries_tell_median_tail_and_longest() {
        let recorder = StageRecorder::new(STAGES);
        for i in 1..=100u64 {
            recorder.record(1, Duration::from_micros(i));
        }
        let summaries = recorder.snapshot().summaries();
        assert_eq!(summaries[0].count, 0);
        assert_eq!(summaries[0].max, Duration::ZERO);
        let step = summaries[1];
        assert_eq!((step.stage, step.count), ("step", 100));
        assert!(near(step.p50, 50_000), "{step:?}");
        assert!(near(step.p99, 99_000), "{step:?}");
        assert!(near(step.max, 100_000), "{step:?}");
        assert!(near(step.sum, 5_050_000), "{step:?}");
    }

    #[test]
    fn snapshots_of_shards_merge_by_stage_name() {
        let (one, two) = (StageRecorder::new(STAGES), StageRecorder::new(STAGES));
        let other = StageRecorder::new(&["step", "unknown"]);
        one.record(0, Duration::from_millis(1));
        two.record(0, Duration::from_millis(3));
        other.record(0, Duration::from_millis(5));
        other.record(1, Duration::from_millis(5));
        let mut merged = one.snapshot();
        merged.merge(&two.snapshot());
        merged.merge(&other.snapshot());
        let counts: Vec<u64> = merged.summaries().iter().map(|s| s.count).collect();
        assert_eq!(counts, [2, 1]);
        assert!(near(merged.summaries()[0].max, 3_000_000));
    }

    #[test]
    fn spans_out_of_range_are_kept_at_the_bounds() {
        let recorder = StageRecorder::new(STAGES);
        recorder.record(0, Duration::ZERO);
        recorder.record(0, Duration::from_secs(1 << 40));
        let parse = recorder.snapshot().summaries()[0];
        assert_eq!(parse.count, 2);
        assert!(parse.max >= Duration::from_secs(600));
    }
}
