//! A cluster of real processes under `kvserve up`, or one `kvserve serve`.

use super::client::{get, post};
use super::eventually;
use super::node::free_port;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// One cluster at a time on this machine.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A failed test must not fail the others.
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A turn of [`two_at_a_time`]; dropping it lets the next test in.
pub struct Turn(());

static TURNS: (Mutex<usize>, Condvar) = (Mutex::new(2), Condvar::new());

/// Tests of single nodes, which mostly wait, share the two CPUs that their nodes are pinned to.
pub fn two_at_a_time() -> Turn {
    let (left, freed) = &TURNS;
    let mut left = left.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    while *left == 0 {
        left = (freed.wait(left)).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
    *left -= 1;
    Turn(())
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (left, freed) = &TURNS;
        *left.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
        freed.notify_one();
    }
}

/// The default model, fetched as a user's would be; `None` when tests may skip it.
pub fn model_path() -> Option<PathBuf> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(kvserve_model::testing::smollm2_path)
        .clone()
}

/// Says that a test was skipped.
pub fn skipped(name: &str) {
    eprintln!("SKIPPED {name}: KVSERVE_TEST_OFFLINE=1 and the model is not in the cache");
}

/// How a cluster is started.
#[derive(Clone)]
pub struct Options {
    pub model: PathBuf,
    pub command: &'static str,
    pub args: Vec<String>,
}

impl Options {
    pub fn up(model: PathBuf) -> Self {
        Options {
            model,
            command: "up",
            args: vec!["--deterministic".into(), "--dtype".into(), "f32".into()],
        }
    }

    pub fn serve(model: PathBuf) -> Self {
        Options {
            command: "serve",
            ..Options::up(model)
        }
    }

    pub fn arg(mut self, text: &str) -> Self {
        self.args.extend(text.split_whitespace().map(String::from));
        self
    }
}

/// A running cluster; dropping it ends all its processes.
pub struct Cluster {
    process: Child,
    /// Where clients ask.
    pub api: SocketAddr,
}

impl Cluster {
    pub fn start(options: &Options) -> Cluster {
        let api = kvserve::up::free_port().expect("a free port");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvserve"));
        command.arg(options.command).arg(&options.model);
        match options.command {
            "up" => command.arg("--port").arg(api.port().to_string()),
            _ => command.arg("--listen").arg(api.to_string()),
        };
        command
            .args(&options.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process = command.spawn().expect("the binary starts");
        let cluster = Cluster { process, api };
        cluster.wait_ready();
        cluster
    }

    pub fn wait_ready(&self) {
        eventually("the cluster is ready", Duration::from_secs(60), || {
            get(self.api, "/ready")
                .ok()
                .filter(|answer| answer.status == 200)
        });
    }

    pub fn complete(&self, body: &Value) -> Value {
        let answer = post(self.api, "/v1/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// Process id of the child with this node id, as long as it runs.
    pub fn child(&self, node_id: &str) -> Option<i32> {
        let parent = self.pid();
        std::fs::read_dir("/proc")
            .ok()?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
            .find(|pid| {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                // After the command's closing parenthesis: state, parent.
                let after = stat.rsplit(')').next().unwrap_or_default();
                let mut fields = after.split_whitespace();
                let state = fields.next().unwrap_or_default();
                let ppid = fields.next().and_then(|text| text.parse::<i32>().ok());
                let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let arguments: Vec<_> = arguments.split(|byte| *byte == 0).collect();
                let named = match node_id {
                    "proxy" => arguments.get(1) == Some(&b"proxy".as_slice()),
                    _ => arguments
                        .windows(2)
                        .any(|pair| pair[0] == b"--node-id" && pair[1] == node_id.as_bytes()),
                };
                ppid == Some(parent) && state != "Z" && named
            })
    }

    pub fn signal(&self, node_id: &str, signal: i32) -> i32 {
        let pid = eventually("the child runs", Duration::from_secs(10), || {
            self.child(node_id)
        });
        // SAFETY: a signal to a process of this test.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        pid
    }

    /// `/nodes/status`: url -> node.
    pub fn nodes(&self) -> Vec<(SocketAddr, Value)> {
        let Ok(answer) = get(self.api, "/nodes/status") else {
            return Vec::new();
        };
        let Ok(Value::Object(nodes)) = serde_json::from_str::<Value>(&answer.body) else {
            return Vec::new();
        };
        nodes
            .into_iter()
            .filter_map(|(url, node)| {
                let address = url
                    .strip_prefix("http://")
                    .unwrap_or(&url)
                    .trim_end_matches('/');
                Some((address.parse().ok()?, node))
            })
            .collect()
    }

    /// API address of the nodes of a role (2 prefill, 3 decode).
    pub fn role(&self, role: u64) -> Vec<SocketAddr> {
        self.nodes()
            .into_iter()
            .filter(|(_, node)| node["role"] == role)
            .map(|(address, _)| address)
            .collect()
    }

    /// A counter or gauge of a node's `/metrics`.
    pub fn metric(&self, node: SocketAddr, name: &str) -> f64 {
        let text = get(node, "/metrics").expect("metrics").body;
        text.lines()
            .filter(|line| line.split([' ', '{']).next() == Some(name))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// `/debug/pages` of a node.
    pub fn pages(&self, node: SocketAddr) -> Value {
        get(node, "/debug/pages").expect("pages").json()
    }

    /// Waits until every node has all its pages free or only its prefix cache's, but for
    /// `quarantined`.
    pub fn ledgers_restored(&self, what: &str) {
        eventually(what, Duration::from_secs(10), || {
            let nodes = self.nodes();
            let all = nodes.iter().all(|(address, node)| {
                let Ok(answer) = get(*address, "/debug/pages") else {
                    return false;
                };
                let Ok(pages) = serde_json::from_str::<Value>(&answer.body) else {
                    return false;
                };
                let count = |name: &str| pages[name].as_u64().unwrap_or(u64::MAX);
                let back = count("free").saturating_add(count("evictable"));
                back.saturating_add(count("quarantined")) == count("total")
                    && node["unfinished"] == 0
            });
            (!nodes.is_empty() && all).then_some(())
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let pid = self.pid();
        // SAFETY: a signal to our own child. SIGTERM drains; children end with it.
        unsafe { libc::kill(pid, libc::SIGTERM) };
        for _ in 0..1000 {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // An error means that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
