//! Single processes with ports of their own, started and restarted by the test itself: a node, a
//! decode node with its prefill node behind a relay, a fleet behind a proxy.

use super::client::{Answer, get, post, try_post};
use super::relay::Relay;
use super::{eventually, ids_of, tiny_qwen2};
use serde_json::Value;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// A node of the tiny model is up within a fraction of this, also beside other work.
const START_LIMIT: Duration = Duration::from_secs(20);

/// KV cache of a node unless a test says otherwise: 2,048 pages of the tiny model.
const KV_CACHE: &str = "32MiB";

/// Ports of one test process: more than a run of all tests takes.
const PORTS: u32 = 2_000;

/// Where such ranges begin: below the ports that the kernel gives to outgoing connections.
const RANGES: std::ops::Range<u32> = 5..16;

/// The first port of this process. Each range has a lock (a name that the kernel frees with the
/// process), so that tests of several checkouts do not take the ports of nodes that are just
/// being started again.
fn first_port() -> u32 {
    static RANGE: OnceLock<(u32, UnixListener)> = OnceLock::new();
    let (range, _lock) = RANGE.get_or_init(|| {
        RANGES
            .into_iter()
            .find_map(|range| {
                let name = format!("kvserve-test-ports-{range}");
                let address = UnixAddress::from_abstract_name(name).ok()?;
                Some((range, UnixListener::bind_addr(&address).ok()?))
            })
            .expect("a range of ports that no other test process uses")
    });
    range * PORTS
}

/// A loopback port that is free now, and that no other test takes.
pub fn free_port() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    (0..PORTS)
        .map(|_| (first_port() + NEXT.fetch_add(1, SeqCst) % PORTS) as u16)
        .map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
        .find(|address| TcpListener::bind(address).is_ok())
        .expect("a free port")
}

/// Two CPUs that this process may use, or one twice.
pub fn cpus() -> [usize; 2] {
    let allowed = kvserve::placement::allowed_cpus();
    [allowed[0], allowed[1 % allowed.len()]]
}

/// The key that all nodes of these tests share.
pub const KEY: [u8; 32] = [0x5A; 32];

/// [`KEY`] in a file.
pub fn key_file() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("peer-{}.key", std::process::id()));
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .expect("key file");
        let hex: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
        std::io::Write::write_all(&mut file, hex.as_bytes()).expect("key file");
        path
    })
    .clone()
}

/// How a process is started; the same for each of its lives.
#[derive(Clone, Debug)]
pub struct Spec {
    pub role: &'static str,
    pub id: String,
    pub api: SocketAddr,
    pub health: SocketAddr,
    pub peer: SocketAddr,
    pub join: Option<SocketAddr>,
    pub model: PathBuf,
    /// CPU of its shard and of its engine.
    pub cpu: usize,
    pub args: Vec<String>,
}

impl Spec {
    pub fn new(role: &'static str, id: &str) -> Spec {
        Spec {
            role,
            id: id.to_string(),
            api: free_port(),
            health: free_port(),
            peer: free_port(),
            join: None,
            model: tiny_qwen2(),
            cpu: cpus()[usize::from(role == "prefill")],
            args: Vec::new(),
        }
    }

    pub fn join(mut self, address: SocketAddr) -> Spec {
        self.join = Some(address);
        self
    }

    pub fn arg(mut self, text: &str) -> Spec {
        self.args.extend(text.split_whitespace().map(String::from));
        self
    }

    fn has(&self, flag: &str) -> bool {
        self.args.iter().any(|arg| arg == flag)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvserve"));
        command.arg(self.role);
        if self.role != "proxy" {
            command.arg(&self.model);
            command.args(["--deterministic"]);
            for (flag, value) in [
                ("--dtype", "f32"),
                ("--kv-cache", KV_CACHE),
                ("--engine-cores", &self.cpu.to_string()),
                // Most faults strike a migration of a prompt that was asked for before: with a
                // cache there would be none. Those of the cache itself switch it on.
                ("--prefix-cache", "off"),
            ] {
                if !self.has(flag) {
                    command.args([flag, value]);
                }
            }
        }
        if !self.has("--cores") {
            command.args(["--cores", &self.cpu.to_string()]);
        }
        command.args(["--listen", &self.api.to_string()]);
        command.args(["--health-listen", &self.health.to_string()]);
        if self.role != "serve" {
            command.args(["--peer-listen", &self.peer.to_string()]);
            command.args(["--node-id", &self.id]);
            command.arg("--peer-key-file").arg(key_file());
        }
        if let Some(join) = self.join {
            command.args(["--join", &join.to_string()]);
        }
        command.args(&self.args);
        command
    }

    /// Runs it to its end, as a wrong command line does; its exit code and what it said.
    pub fn run_to_end(&self) -> (Option<i32>, String) {
        let out = self.command().output().expect("the binary starts");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        (out.status.code(), text)
    }

    pub fn start(self) -> Node {
        let log = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
            "{}-{}.log",
            self.id,
            self.api.port()
        ));
        let mut node = Node {
            spec: self,
            log,
            process: None,
        };
        node.start();
        node
    }
}

/// One process; dropping it kills it.
pub struct Node {
    pub spec: Spec,
    log: PathBuf,
    process: Option<Child>,
}

impl Node {
    /// Starts it on its own ports, and waits until it answers there.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "{} runs already", self.spec.id);
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .expect("log file");
        let process = self
            .spec
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the binary starts");
        self.process = Some(process);
        let api = self.spec.api;
        eventually(
            &format!("{} answers; its log: {}", self.spec.id, self.log.display()),
            START_LIMIT,
            || {
                if let Some(process) = &mut self.process {
                    assert!(
                        matches!(process.try_wait(), Ok(None)),
                        "{} ended at its start, see {}",
                        self.spec.id,
                        self.log.display()
                    );
                }
                get(api, "/health").ok()
            },
        );
    }

    pub fn pid(&self) -> i32 {
        self.process
            .as_ref()
            .map_or(0, |process| process.id() as i32)
    }

    pub fn api(&self) -> SocketAddr {
        self.spec.api
    }

    pub fn signal(&self, signal: i32) {
        assert_ne!(self.pid(), 0, "{} does not run", self.spec.id);
        // SAFETY: a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// SIGKILL, and gone.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // An error means that it has ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// SIGTERM, and gone when it has drained.
    pub fn terminate(&mut self) {
        self.signal(libc::SIGTERM);
        eventually(
            &format!("{} ends after SIGTERM", self.spec.id),
            Duration::from_secs(15),
            || (!self.lives()).then_some(()),
        );
        self.process = None;
    }

    pub fn restart(&mut self) {
        self.kill();
        self.start();
    }

    /// Whether the process lives.
    pub fn lives(&mut self) -> bool {
        match &mut self.process {
            Some(process) => matches!(process.try_wait(), Ok(None)),
            None => false,
        }
    }

    /// Everything it said on standard error.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn ready(&self) -> bool {
        get(self.api(), "/ready").is_ok_and(|answer| answer.status == 200)
    }

    pub fn wait_ready(&self) {
        eventually(&format!("{} is ready", self.spec.id), START_LIMIT, || {
            self.ready().then_some(())
        });
    }

    pub fn healthy(&self) -> bool {
        get(self.spec.health, "/health").is_ok_and(|answer| answer.status == 200)
    }

    pub fn ask(&self, body: &Value) -> Answer {
        post(self.api(), "/v1/completions", body)
    }

    pub fn try_ask(&self, body: &Value) -> std::io::Result<Answer> {
        try_post(self.api(), "/v1/completions", body)
    }

    /// Ids of an answer that must be a 200.
    pub fn ids(&self, body: &Value) -> Vec<u32> {
        let answer = self.ask(body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        ids_of(&answer.json())
    }

    /// A counter or gauge, summed over its labels.
    pub fn metric(&self, name: &str) -> f64 {
        let text = get(self.api(), "/metrics").expect("metrics").body;
        text.lines()
            .filter(|line| line.split([' ', '{']).next() == Some(name))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    pub fn chaos(&self, spec: &str) {
        let answer = post(
            self.api(),
            "/debug/chaos",
            &serde_json::json!({ "spec": spec }),
        );
        assert_eq!(answer.status, 200, "{}", answer.body);
    }

    /// A count of `/debug/pages`.
    pub fn pages(&self, name: &str) -> u64 {
        let answer = get(self.api(), "/debug/pages").expect("pages").json();
        answer[name].as_u64().expect("a count")
    }

    /// Whether every page is free or only the prefix cache's, and nothing runs.
    pub fn restored(&self) -> bool {
        let Ok(answer) = get(self.api(), "/debug/pages") else {
            return false;
        };
        let Ok(pages) = serde_json::from_str::<Value>(&answer.body) else {
            return false;
        };
        let count = |name: &str| pages[name].as_u64().unwrap_or(u64::MAX);
        count("free").saturating_add(count("evictable")) == count("total")
            && count("quarantined") == 0
            && count("guards_live") == 0
    }

    /// Waits until every page is free.
    pub fn wait_restored(&self, what: &str, limit: Duration) {
        eventually(
            &format!("{what}: all pages of {} are free", self.spec.id),
            limit,
            || self.restored().then_some(()),
        );
    }

    /// Bytes of memory of its own: the pool (shared memory) is as large as it is from the start,
    /// touched or not.
    pub fn resident(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("status");
        let kib: u64 = text
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .expect("RssAnon");
        kib * 1024
    }

    /// CPU time used so far.
    pub fn cpu_time(&self) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("stat");
        let after = text.rsplit(')').next().expect("fields");
        let ticks: u64 = after
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|word| word.parse::<u64>().ok())
            .sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("---- log of {}\n{}", self.spec.id, self.log());
        }
        // Kept only for a test that failed, above.
        let _ = fs::remove_file(&self.log);
    }
}

/// A decode node that reaches its one prefill node through a relay; no proxy.
pub struct Pair {
    // Dropped first: what the decode node still says must not reach a test's script.
    pub decode: Node,
    pub prefill: Node,
    pub relay: Relay,
}

impl Pair {
    /// Pages go over TCP, where the relay sees them.
    pub fn start() -> Pair {
        Pair::over("tcp", "", "")
    }

    /// The way of pages (`tcp`, `shm`), and extra flags of the decode and of the prefill node.
    pub fn over(transport: &str, decode: &str, prefill: &str) -> Pair {
        let transport = format!("--transport {transport}");
        // The prefill node's own proxy is nowhere: it keeps dialling, which must not matter.
        let prefill = Spec::new("prefill", "prefill-0")
            .join(free_port())
            .arg(&transport)
            .arg(prefill)
            .start();
        let relay = Relay::to(prefill.spec.peer);
        let decode = Spec::new("decode", "decode-0")
            .join(relay.address)
            .arg(&transport)
            .arg(decode)
            .start();
        let pair = Pair {
            decode,
            prefill,
            relay,
        };
        pair.wait_paired();
        pair
    }

    /// Waits until the decode node can pull.
    pub fn wait_paired(&self) {
        self.decode.wait_ready();
    }

    /// Both ledgers are whole again.
    pub fn wait_restored(&self, what: &str) {
        for node in [&self.decode, &self.prefill] {
            node.wait_restored(what, Duration::from_secs(8));
        }
    }

    /// The next request migrates, and gives these ids.
    pub fn serves_by_migration(&self, body: &Value, expected: &[u32], what: &str) {
        self.wait_paired();
        let committed = || self.decode.metric("kvserve_migrations_committed_total");
        eventually(
            &format!("{what}: a request migrates again"),
            Duration::from_secs(10),
            || {
                let before = committed();
                assert_eq!(self.decode.ids(body), expected, "{what}");
                (committed() > before).then_some(())
            },
        );
    }
}

/// A proxy and nodes that joined it.
pub struct Fleet {
    pub proxy: Node,
    pub decode: Vec<Node>,
    pub prefill: Vec<Node>,
}

impl Fleet {
    pub fn start(decode: usize, prefill: usize) -> Fleet {
        Fleet::with(decode, prefill, "")
    }

    /// Extra flags of each node.
    pub fn with(decode: usize, prefill: usize, args: &str) -> Fleet {
        let proxy = Spec::new("proxy", "proxy").start();
        let node = |role, index: usize| {
            Spec::new(role, &format!("{role}-{index}"))
                .join(proxy.spec.peer)
                .arg(args)
                .start()
        };
        let prefill: Vec<_> = (0..prefill).map(|index| node("prefill", index)).collect();
        let decode: Vec<_> = (0..decode).map(|index| node("decode", index)).collect();
        let fleet = Fleet {
            proxy,
            decode,
            prefill,
        };
        fleet.wait_whole();
        fleet
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.decode.iter().chain(&self.prefill)
    }

    /// Waits until every node that runs has joined and every decode node can pull.
    pub fn wait_whole(&self) {
        self.proxy.wait_ready();
        eventually("all nodes have joined", START_LIMIT, || {
            let status = get(self.proxy.api(), "/nodes/status").ok()?.json();
            let known = status.as_object()?;
            let up = self.nodes().filter(|node| node.pid() != 0);
            let ready = |node: &Node| {
                known
                    .values()
                    .any(|entry| entry["node"] == *node.spec.id && entry["ready"] == true)
                    && node.ready()
            };
            up.into_iter().all(ready).then_some(())
        });
    }

    pub fn wait_restored(&self, what: &str) {
        for node in self.nodes().filter(|node| node.pid() != 0) {
            node.wait_restored(what, Duration::from_secs(10));
        }
    }
}
