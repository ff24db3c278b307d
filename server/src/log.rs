//! Log lines on standard error: for people or as JSON, one line each.

use serde_json::{Map, Value};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Lines of one kind that strangers can cause, a second: enough to see what goes on, and at 200
/// bytes a line less than 100 MB a day.
const GATED_LINES_PER_SECOND: u64 = 5;

/// Keeps lines that strangers can cause from filling a disk: the first few of a second are written,
/// the number of the others with the next line that is.
#[derive(Debug, Default)]
pub struct LogGate {
    second: AtomicU64,
    lines: AtomicU64,
    held_back: AtomicU64,
}

impl LogGate {
    /// A gate that has let nothing through yet.
    pub const fn new() -> Self {
        LogGate {
            second: AtomicU64::new(0),
            lines: AtomicU64::new(0),
            held_back: AtomicU64::new(0),
        }
    }

    /// Whether a line may be written in this second of any clock, and how many were held back
    /// before it. Two threads at a second's border may let one line more through.
    fn pass(&self, second: u64) -> Option<u64> {
        if self.second.swap(second, Ordering::Relaxed) != second {
            self.lines.store(0, Ordering::Relaxed);
        }
        if self.lines.fetch_add(1, Ordering::Relaxed) < GATED_LINES_PER_SECOND {
            Some(self.held_back.swap(0, Ordering::Relaxed))
        } else {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

/// Handshakes that failed: anybody who reaches a peer port can cause them.
pub static FAILED_HANDSHAKES: LogGate = LogGate::new();

/// Writes log lines. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    json: bool,
    quiet: bool,
}

impl Log {
    /// A log of JSON objects, or of text.
    pub fn new(json: bool) -> Self {
        Log { json, quiet: false }
    }

    /// The same log, without [`Log::info`] if `quiet`.
    pub fn quiet(self, quiet: bool) -> Self {
        Log { quiet, ..self }
    }

    /// Something a reader of the log may want to know.
    pub fn info(&self, message: &str, fields: &[(&str, &dyn std::fmt::Display)]) {
        if !self.quiet {
            self.line("info", message, fields);
        }
    }

    /// Something that is not as it should be; the service goes on.
    pub fn warn(&self, message: &str, fields: &[(&str, &dyn std::fmt::Display)]) {
        self.line("warn", message, fields);
    }

    /// [`Log::warn`] for what strangers can cause.
    pub fn warn_gated(
        &self,
        gate: &LogGate,
        message: &str,
        fields: &[(&str, &dyn std::fmt::Display)],
    ) {
        let second = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        match gate.pass(second) {
            None => {}
            Some(0) => self.warn(message, fields),
            Some(held_back) => {
                let mut more = fields.to_vec();
                more.push(("held_back", &held_back));
                self.warn(message, &more);
            }
        }
    }

    fn line(&self, level: &str, message: &str, fields: &[(&str, &dyn std::fmt::Display)]) {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs_f64();
        let line = if self.json {
            let mut object = Map::new();
            object.insert("time".into(), Value::from(now));
            object.insert("level".into(), Value::from(level));
            object.insert("message".into(), Value::from(message));
            for (name, value) in fields {
                object.insert((*name).into(), Value::from(value.to_string()));
            }
            format!("{}\n", Value::Object(object))
        } else {
            let mut line = format!("{now:.3} {level} {message}");
            for (name, value) in fields {
                line.push_str(&format!(" {name}={value}"));
            }
            line.push('\n');
            line
        };
        // A log that cannot be written must not end the service.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_lets_a_few_lines_of_each_second_through_and_counts_the_others() {
        let gate = LogGate::new();
        let passed = (0..100).filter(|_| gate.pass(7).is_some()).count() as u64;
        assert_eq!(passed, GATED_LINES_PER_SECOND);
        assert_eq!(gate.pass(8), Some(100 - GATED_LINES_PER_SECOND));
        assert_eq!(gate.pass(8), Some(0));
    }
}
