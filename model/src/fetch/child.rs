//! `python3` as a bounded source of bytes: it is killed when it is silent for too long, when its
//! time is over, and when the taker refuses.

#![allow(
    clippy::disallowed_types,
    reason = "a plain process without a runtime; each receive has its deadline"
)]

use super::FetchError;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes read from the child at once.
const CHUNK_BYTES: usize = 1 << 18;
/// Chunks that may wait for the taker: 1 MiB.
const CHUNKS_MAX: usize = 4;
/// Bytes kept of what the child complains.
const COMPLAINT_BYTES: usize = 2048;
/// How often to look whether the child has ended after it closed its output.
const EXIT_RETRY: Duration = Duration::from_millis(20);

#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Longest wait for the next bytes.
    pub(super) silence: Duration,
    /// When all must be over.
    pub(super) deadline: Instant,
}

/// Runs `python3` and gives its output to `take`.
pub(super) fn python(
    arguments: &[&str],
    limits: Limits,
    take: &mut dyn FnMut(&[u8]) -> Result<(), FetchError>,
) -> Result<(), FetchError> {
    let spawned = Command::new("python3")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = Killed(spawned.map_err(|error| FetchError::NoPython { error })?);
    let output = child.0.stdout.take().map(read_chunks);
    let complaint = child.0.stderr.take().map(read_tail);
    if let Some(output) = output {
        take_all(&output, limits, take)?;
    }
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < limits.deadline => thread::sleep(EXIT_RETRY),
            Ok(None) => return Err(FetchError::Deadline),
            Err(error) => return Err(FetchError::NoPython { error }),
        }
    };
    if status.success() {
        return Ok(());
    }
    let complaint = complaint
        .and_then(|reader| reader.join().ok())
        .unwrap_or_default();
    Err(FetchError::Python { status, complaint })
}

fn take_all(
    output: &Receiver<std::io::Result<Vec<u8>>>,
    limits: Limits,
    take: &mut dyn FnMut(&[u8]) -> Result<(), FetchError>,
) -> Result<(), FetchError> {
    loop {
        let left = limits.deadline.saturating_duration_since(Instant::now());
        match output.recv_timeout(limits.silence.min(left)) {
            Ok(Ok(chunk)) => take(&chunk)?,
            Ok(Err(error)) => return Err(FetchError::NoPython { error }),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) if left <= limits.silence => {
                return Err(FetchError::Deadline);
            }
            Err(RecvTimeoutError::Timeout) => {
                return Err(FetchError::Silent {
                    waited: limits.silence,
                });
            }
        }
    }
}

fn read_chunks(mut from: impl Read + Send + 'static) -> Receiver<std::io::Result<Vec<u8>>> {
    let (sender, receiver) = sync_channel(CHUNKS_MAX);
    // Ends with the child's output, or at the next chunk after the receiver went away.
    thread::spawn(move || {
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let read = from.read(&mut chunk).map(|count| {
                chunk.truncate(count);
                chunk
            });
            let last = !matches!(&read, Ok(chunk) if !chunk.is_empty());
            let end_of_output = matches!(&read, Ok(chunk) if chunk.is_empty());
            if end_of_output || sender.send(read).is_err() || last {
                return;
            }
        }
    });
    receiver
}

/// Reads to the end, keeping the last bytes as text.
fn read_tail(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut tail = Vec::new();
        let mut chunk = [0; COMPLAINT_BYTES];
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            tail.extend_from_slice(&chunk[..count]);
            let excess = tail.len().saturating_sub(COMPLAINT_BYTES);
            tail.drain(..excess);
        }
        String::from_utf8_lossy(&tail).trim().to_owned()
    })
}

/// Kills and reaps the child if it still runs.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // It may just have ended by itself; reaping is what matters.
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(silence_ms: u64) -> Limits {
        let silence = Duration::from_millis(silence_ms);
        Limits {
            silence,
            deadline: Instant::now() + Duration::from_secs(60),
        }
    }

    #[test]
    fn output_arrives_whole() {
        let mut bytes = Vec::new();
        let program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 8192)";
        let taken = python(&["-c", program], limits(30_000), &mut |chunk| {
            bytes.extend_from_slice(chunk);
            Ok(())
        });
        taken.unwrap();
        assert_eq!(bytes.len(), 256 * 8192);
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == at as u8));
    }

    #[test]
    fn a_failure_tells_what_python_said() {
        let error = python(
            &["-c", "raise SystemExit('no such thing')"],
            limits(30_000),
            &mut |_| Ok(()),
        );
        assert!(error.unwrap_err().to_string().contains("no such thing"));
    }

    #[test]
    fn a_silent_child_is_killed() {
        let begin = Instant::now();
        let error = python(
            &["-c", "import time; time.sleep(600)"],
            limits(200),
            &mut |_| Ok(()),
        );
        assert!(matches!(error, Err(FetchError::Silent { .. })));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_refusal_of_the_taker_ends_the_child() {
        let program = "import sys\nwhile True: sys.stdout.buffer.write(b'x' * 65536)";
        let mut taken = 0;
        let error = python(&["-c", program], limits(30_000), &mut |chunk| {
            taken += chunk.len();
            if taken > 1 << 20 {
                Err(FetchError::TooLong { wanted: 1 << 20 })
            } else {
                Ok(())
            }
        });
        assert!(matches!(error, Err(FetchError::TooLong { .. })));
    }
}
