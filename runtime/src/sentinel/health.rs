//! What is known about health, readable from any thread.

use crate::bridge::lock;
use crate::trace::push_string;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandingKind {
    /// A shard.
    Shard,
    /// An engine lane.
    Lane,
}

impl StandingKind {
    /// The metric label and JSON word.
    pub fn label(self) -> &'static str {
        match self {
            StandingKind::Shard => "shard",
            StandingKind::Lane => "lane",
        }
    }
}

/// For how long one shard or lane has stood still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Shard or lane.
    pub kind: StandingKind,
    /// Its name.
    pub name: String,
    /// For how long it stands still now; zero when it moves.
    pub still: Duration,
    /// The longest that it ever stood still.
    pub still_longest: Duration,
    /// Whether that is longer than allowed.
    pub unhealthy: bool,
}

/// The sentinel's findings; clones are views of the same.
#[derive(Clone, Debug, Default)]
pub struct HealthView {
    subjects: Arc<Mutex<Vec<Arc<Subject>>>>,
}

#[derive(Debug)]
pub(super) struct Subject {
    kind: StandingKind,
    name: String,
    still_max: Duration,
    still_ns: AtomicU64,
    longest_ns: AtomicU64,
}

impl Subject {
    /// Written by the sentinel's thread only.
    pub fn set_still(&self, still: Duration) {
        let nanos = still.as_nanos() as u64;
        self.still_ns.store(nanos, Ordering::Relaxed);
        self.longest_ns.fetch_max(nanos, Ordering::Relaxed);
    }

    fn standing(&self) -> Standing {
        let still = Duration::from_nanos(self.still_ns.load(Ordering::Relaxed));
        Standing {
            kind: self.kind,
            name: self.name.clone(),
            still,
            still_longest: Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed)),
            unhealthy: still > self.still_max,
        }
    }
}

impl HealthView {
    /// Whether nothing stands still for longer than allowed.
    pub fn healthy(&self) -> bool {
        self.standings().iter().all(|standing| !standing.unhealthy)
    }

    /// Every watched shard and lane.
    pub fn standings(&self) -> Vec<Standing> {
        let subjects = lock(&self.subjects);
        subjects.iter().map(|subject| subject.standing()).collect()
    }

    /// The answer to `GET /health`: status code and JSON body.
    pub fn answer(&self) -> (u16, String) {
        let still: Vec<Standing> = self
            .standings()
            .into_iter()
            .filter(|standing| standing.unhealthy)
            .collect();
        if still.is_empty() {
            return (200, "{\"status\":\"ok\"}".to_owned());
        }
        let mut body = String::from("{\"status\":\"standing_still\",\"standing_still\":[");
        for (index, standing) in still.iter().enumerate() {
            if index > 0 {
                body.push(',');
            }
            body.push_str("{\"kind\":");
            push_string(&mut body, standing.kind.label());
            body.push_str(",\"name\":");
            push_string(&mut body, &standing.name);
            let millis = standing.still.as_millis();
            write!(body, ",\"still_ms\":{millis}}}").expect("a string takes it");
        }
        body.push_str("]}");
        (503, body)
    }

    /// The gauges in Prometheus text form: `{prefix}shard_stall_seconds{shard="…"}` and the
    /// same for lanes, and the longest stalls so far.
    pub fn write_metrics(&self, prefix: &str, text: &mut String) {
        let standings = self.standings();
        for kind in [StandingKind::Shard, StandingKind::Lane] {
            let label = kind.label();
            let of_kind = || standings.iter().filter(move |s| s.kind == kind);
            let now = format!("{prefix}{label}_stall_seconds");
            write_gauge(
                text,
                &now,
                label,
                of_kind().map(|s| (s.name.as_str(), s.still)),
            );
            let longest = format!("{prefix}{label}_stall_seconds_longest");
            let values = of_kind().map(|s| (s.name.as_str(), s.still_longest));
            write_gauge(text, &longest, label, values);
        }
    }

    pub(super) fn add(&self, kind: StandingKind, name: &str, still_max: Duration) -> Arc<Subject> {
        let subject = Arc::new(Subject {
            kind,
            name: name.to_owned(),
            still_max,
            still_ns: AtomicU64::new(0),
            longest_ns: AtomicU64::new(0),
        });
        lock(&self.subjects).push(subject.clone());
        subject
    }

    pub(super) fn remove(&self, subject: &Arc<Subject>) {
        lock(&self.subjects).retain(|other| !Arc::ptr_eq(other, subject));
    }
}

fn write_gauge<'a>(
    text: &mut String,
    name: &str,
    label: &str,
    values: impl Iterator<Item = (&'a str, Duration)>,
) {
    let mut header = format!("# TYPE {name} gauge\n");
    for (subject, value) in values {
        text.push_str(&std::mem::take(&mut header));
        text.push_str(name);
        text.push('{');
        text.push_str(label);
        text.push('=');
        push_string(text, subject);
        writeln!(text, "}} {}", value.as_secs_f64()).expect("a string takes it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_names_what_stands_still() {
        let view = HealthView::default();
        let shard = view.add(StandingKind::Shard, "shard0", Duration::from_millis(700));
        let lane = view.add(StandingKind::Lane, "engine\"0", Duration::from_secs(1));
        shard.set_still(Duration::from_millis(700));
        assert_eq!(view.answer(), (200, r#"{"status":"ok"}"#.to_owned()));
        lane.set_still(Duration::from_millis(1500));
        let (status, body) = view.answer();
        assert_eq!(status, 503);
        assert_eq!(
            body,
            r#"{"status":"standing_still","standing_still":[{"kind":"lane","name":"engine\"0","still_ms":1500}]}"#
        );
        lane.set_still(Duration::ZERO);
        assert!(view.healthy());
    }

    #[test]
    fn metrics_hold_the_stall_now_and_the_longest() {
        let view = HealthView::default();
        let shard = view.add(StandingKind::Shard, "s0", Duration::from_millis(700));
        shard.set_still(Duration::from_millis(250));
        shard.set_still(Duration::ZERO);
        let mut text = String::new();
        view.write_metrics("x_", &mut text);
        assert_eq!(
            text,
            "# TYPE x_shard_stall_seconds gauge\nx_shard_stall_seconds{shard=\"s0\"} 0\n\
             # TYPE x_shard_stall_seconds_longest gauge\nx_shard_stall_seconds_longest{shard=\"s0\"} 0.25\n"
        );
        view.remove(&shard);
        assert!(view.standings().is_empty());
    }
}
