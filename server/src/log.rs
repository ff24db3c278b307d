//! Log lines on standard error: for people or as JSON, one line each.

use serde_json::{Map, Value};
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

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
