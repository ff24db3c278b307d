//! What several test files need: shards by name, a health client, and this very test binary
//! run again as a child process.
#![allow(dead_code)]

use kvserve_runtime::sentinel::{Sentinel, SentinelConfig};
use kvserve_runtime::{Shard, ShardConfig, ShardHandle};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Tells a child which part it plays.
pub const CHILD: &str = "KVSERVE_RUNTIME_TEST_CHILD";

/// Launches a shard under a sentinel, as every process that serves does: an executor may sleep
/// with runnable tasks, which no stress test may take for a lost wake.
pub fn launch<F, T>(name: &str, body: impl FnOnce(Shard) -> F + Send + 'static) -> ShardHandle<T>
where
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    static SENTINEL: OnceLock<Sentinel> = OnceLock::new();
    let sentinel = SENTINEL.get_or_init(|| {
        let limits = SentinelConfig {
            shard_abort_after: Duration::from_secs(60),
            ..SentinelConfig::default()
        };
        Sentinel::start(limits).unwrap()
    });
    let handle = Shard::launch(shard(name), body).unwrap();
    sentinel.watch_shard(handle.remote());
    handle
}

pub fn shard(name: &str) -> ShardConfig {
    ShardConfig {
        name: name.into(),
        core: None,
    }
}

/// `GET /health`: status and body.
pub fn health(address: SocketAddr) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer[9..12].parse().unwrap();
    let body = answer.split("\r\n\r\n").nth(1).unwrap().to_owned();
    (status, body)
}

/// Polls `ready` until it is true; how long that took, or `None` after `limit`.
pub fn wait_until(limit: Duration, mut ready: impl FnMut() -> bool) -> Option<Duration> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if ready() {
            return Some(start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// Runs the test `test` of this binary as a child that plays `part`.
pub fn child(test: &str, part: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, part)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Whether this process is the child that plays `part`.
pub fn is_child(part: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|value| value == part)
}
