//! Processes of this very binary, each on ports of its own.

use super::AS_KVSERVE;
use super::client::{get, post};
use kvserve_model::testing::random_qwen2::RandomQwen2;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A node of the tiny model is up within a fraction of this, also beside other work.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A folder with the model, the key and the logs; removed at the end.
pub struct Workshop {
    folder: PathBuf,
    keep: bool,
}

impl Workshop {
    /// Makes it, with a model of random weights that is the same on every machine.
    ///
    /// # Errors
    /// Those of writing.
    pub fn new() -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let folder = std::env::temp_dir().join(format!("kvserve-soak-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        RandomQwen2::TINY.write(&folder.join("model"))?;
        let mut key = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(folder.join("key"))?;
        io::Write::write_all(&mut key, "5a".repeat(32).as_bytes())?;
        Ok(Workshop {
            folder,
            keep: false,
        })
    }

    /// Leaves the logs where they are, for somebody to read.
    pub fn keep(&mut self) -> &Path {
        self.keep = true;
        &self.folder
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        if !self.keep {
            // What cannot be removed stays in the temporary folder.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// One process; dropping it kills it.
pub struct Node {
    /// Its name.
    pub id: String,
    /// Where its API listens.
    pub api: SocketAddr,
    /// Where peers reach it.
    pub peer: SocketAddr,
    command: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
}

impl Node {
    /// A node of this role (`serve`, `proxy`, `prefill`, `decode`), started.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn start(
        shop: &Workshop,
        role: &str,
        id: &str,
        join: Option<SocketAddr>,
        extra: &[&str],
    ) -> Result<Node, String> {
        let free_port = kvserve::up::free_port;
        let (api, peer) = (free_port()?, free_port()?);
        let mut command = vec![role.to_string()];
        let mut add = |words: &[&str]| command.extend(words.iter().map(|word| word.to_string()));
        let model = shop.folder.join("model");
        if role != "proxy" {
            add(&[&model.to_string_lossy()]);
            add(&["--deterministic", "--dtype", "f32", "--kv-cache", "32MiB"]);
        }
        add(&["--listen", &api.to_string()]);
        if role != "serve" {
            let key = shop.folder.join("key");
            add(&["--peer-listen", &peer.to_string(), "--node-id", id]);
            add(&["--peer-key-file", &key.to_string_lossy()]);
        }
        if let Some(join) = join {
            add(&["--join", &join.to_string()]);
        }
        add(extra);
        let mut node = Node {
            id: id.to_string(),
            api,
            peer,
            command,
            log: shop.folder.join(format!("{id}-{}.log", api.port())),
            process: None,
        };
        node.run()?;
        Ok(node)
    }

    /// Starts it, again on its own ports, and waits until it answers.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn run(&mut self) -> Result<(), String> {
        let text = |error: io::Error| format!("{}: {error}", self.id);
        let log = File::options().create(true).append(true).open(&self.log);
        let process = Command::new(std::env::current_exe().map_err(text)?)
            .arg(AS_KVSERVE)
            .args(&self.command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_err(text)?)
            .spawn()
            .map_err(text)?;
        self.process = Some(process);
        let api = self.api;
        let answers = || get(api, "/health").is_ok_and(|answer| answer.status == 200);
        match until(START_LIMIT, answers) {
            Some(_) => Ok(()),
            None => Err(format!(
                "{} does not answer within {} s; its log is {}",
                self.id,
                START_LIMIT.as_secs(),
                self.log.display()
            )),
        }
    }

    /// Sends it a signal by name, e.g. `STOP`.
    pub fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            let id = process.id().to_string();
            // It may have ended; what follows shows it.
            let _ = Command::new("kill")
                .arg(format!("-{name}"))
                .arg(id)
                .status();
        }
    }

    /// SIGKILL, and gone.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // An error means that it has ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// SIGTERM, and gone when it has drained; killed if that takes longer than `limit`.
    pub fn terminate(&mut self, limit: Duration) {
        self.signal("TERM");
        if let Some(process) = &mut self.process {
            until(limit, || matches!(process.try_wait(), Ok(Some(_))));
        }
        self.kill();
    }

    /// Whether it can take requests (a decode node: whether it can pull).
    pub fn ready(&self) -> bool {
        get(self.api, "/ready").is_ok_and(|answer| answer.status == 200)
    }

    /// A page as JSON; `Null` if there is none.
    pub fn page(&self, path: &str) -> Value {
        get(self.api, path).map_or(Value::Null, |answer| answer.json())
    }

    /// A counter or gauge, summed over its labels.
    pub fn metric(&self, name: &str) -> f64 {
        let Ok(answer) = get(self.api, "/metrics") else {
            return 0.0;
        };
        let lines = answer.body.lines();
        lines
            .filter(|line| line.split([' ', '{']).next() == Some(name))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Sets the chaos hook.
    pub fn chaos(&self, spec: &str) -> bool {
        let body = json!({ "spec": spec });
        post(self.api, "/debug/chaos", &body).is_ok_and(|answer| answer.status == 200)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until `done`, at most `limit`; how long it took.
pub fn until(limit: Duration, mut done: impl FnMut() -> bool) -> Option<Duration> {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(began.elapsed())
}

/// A proxy, and nodes that joined it.
pub struct Fleet {
    /// Where clients ask.
    pub proxy: Node,
    /// Decode nodes.
    pub decode: Vec<Node>,
    /// Prefill nodes.
    pub prefill: Vec<Node>,
}

impl Fleet {
    /// Two decode and two prefill nodes over one way of pages.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn start(shop: &Workshop, transport: &str) -> Result<Fleet, String> {
        let proxy = Node::start(shop, "proxy", "proxy", None, &[])?;
        let join = Some(proxy.peer);
        let nodes = |role: &str| -> Result<Vec<Node>, String> {
            (0..2)
                .map(|number| {
                    let id = format!("{role}-{number}");
                    Node::start(shop, role, &id, join, &["--transport", transport])
                })
                .collect()
        };
        let fleet = Fleet {
            prefill: nodes("prefill")?,
            decode: nodes("decode")?,
            proxy,
        };
        match until(START_LIMIT, || fleet.is_whole()) {
            Some(_) => Ok(fleet),
            None => Err("the fleet does not come together; see the logs".into()),
        }
    }

    /// Whether every node has joined and every decode node can pull.
    pub fn is_whole(&self) -> bool {
        let nodes = || self.decode.iter().chain(&self.prefill);
        let status = self.proxy.page("/nodes/status");
        let known = status.as_object().map_or(0, |known| {
            let ready = known.values().filter(|node| node["ready"] == true);
            ready.count()
        });
        known == nodes().count() && nodes().all(Node::ready) && self.proxy.ready()
    }

    /// All nodes but the proxy.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.decode.iter().chain(&self.prefill)
    }
}
