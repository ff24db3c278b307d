//! `proxy`: forwards requests to decode nodes; nodes register on its peer port.
//!
//! Shard 0 keeps the registry and tells it to all shards over [`Nodes`]; each shard forwards
//! on its own.

use super::listen::{await_free, check_api, check_peer};
use super::pages::{health_page, ready_page};
use super::peer_key;
use crate::api::http::http_handler;
use crate::api::{AdminPages, ApiError, ApiMetrics, LocalFuture, Page};
use crate::cli::{LogFormat, ProxyArgs};
use crate::cluster::{KIND_REPORT, KIND_ROSTER, NodeReport, ROSTER_EVERY, Registered, Registry};
use crate::log::{FAILED_HANDSHAKES, Log};
use crate::placement::allowed_cpus;
use crate::proxy::{NodeRecord, NodeRole, NodeTable, Proxy, ProxyConfig, ProxyMetrics};
use crate::readiness::Readiness;
use bytes::Bytes;
use hyper::Method;
use kvserve_kv::ChecksumMode;
use kvserve_kv::peer::{
    self, PeerConfig, PeerEvents, PeerHub, PeerLimits, PeerParts, PeerView, TransportChoice,
};
use kvserve_kv::session::handshake::Refusal;
use kvserve_kv::session::{PeerKey, RefuseReason, Role};
use kvserve_runtime::completion::{GuardKeeper, Hub, HubLimits};
use kvserve_runtime::http::{self, Client, ClientLimits, HttpLimits};
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::sentinel::{HealthView, Sentinel, SentinelConfig};
use kvserve_runtime::shard::poll_loop::PollPolicy;
use kvserve_runtime::signals::{self, Drain};
use kvserve_runtime::{Deadline, GuardToken, Shard, ShardConfig};
use serde_json::json;
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// After the drain's own deadline (the longest request), cut connections end within this.
const DRAIN_EXTRA: Duration = Duration::from_secs(1);

/// A turn of the registry's loop that is later than this was a stall of the proxy itself.
const STALL: Duration = Duration::from_millis(250);

/// How often a shard looks whether nodes have come or gone.
const SYNC_EVERY: Duration = Duration::from_millis(20);

/// The nodes as shard 0 knows them, for all shards.
#[derive(Default)]
struct Nodes {
    version: AtomicU64,
    records: Mutex<Vec<NodeRecord>>,
}

impl Nodes {
    fn publish(&self, records: Vec<NodeRecord>) {
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The records, if they are newer than `seen`.
    fn newer(&self, seen: &mut u64) -> Option<Vec<NodeRecord>> {
        let version = self.version.load(Ordering::Acquire);
        if version == *seen {
            return None;
        }
        *seen = version;
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        Some(records.clone())
    }
}

#[derive(Clone)]
struct Shared {
    args: ProxyArgs,
    key: PeerKey,
    log: Log,
    nodes: Arc<Nodes>,
    readiness: Arc<Readiness>,
    health: HealthView,
    http_metrics: Vec<Arc<ApiMetrics>>,
    metrics: Vec<Arc<ProxyMetrics>>,
    drain: Drain,
}

/// Runs the proxy to its end.
///
/// # Errors
/// A sentence for the user.
pub fn run_proxy(args: ProxyArgs) -> Result<i32, String> {
    check_api("--listen", args.listen, args.insecure_no_auth)?;
    check_peer(args.peer_listen, args.peer_key_file.is_some())?;
    if let Some(admin) = args.admin_listen {
        check_api("--admin-listen", admin, args.insecure_no_auth)?;
    }
    for (what, address) in [
        ("--listen", Some(args.listen)),
        ("--peer-listen", Some(args.peer_listen)),
        ("--admin-listen", args.admin_listen),
        ("--health-listen", args.health_listen),
    ] {
        address.map_or(Ok(()), |address| await_free(what, address))?;
    }
    let key = match &args.peer_key_file {
        Some(file) => peer_key::read(file)?,
        None => peer_key::random()?,
    };
    let log = Log::new(args.log_format == LogFormat::Json).quiet(args.quiet);
    let drain = Drain::new();
    signals::install(&drain).map_err(|error| format!("cannot install signal handlers: {error}"))?;
    let sentinel = Sentinel::start(SentinelConfig {
        health_listen: Some(
            args.health_listen
                .unwrap_or(super::listen::ANY_LOOPBACK_PORT),
        ),
        ..SentinelConfig::default()
    })
    .map_err(|error| format!("cannot start the sentinel: {error}"))?;
    let cores = match &args.cores {
        Some(list) => list.0.clone(),
        None => allowed_cpus().into_iter().take(1).collect(),
    };
    let configs: Vec<_> = cores
        .into_iter()
        .enumerate()
        .map(|(index, core)| ShardConfig {
            name: format!("proxy-shard-{index}"),
            core: Some(core),
        })
        .collect();
    if !args.quiet {
        println!("api      http://{}", args.listen);
        println!("peers    {} (nodes join here)", args.peer_listen);
        if let Some(address) = sentinel.health_addr() {
            println!("health   http://{address}/health");
        }
    }
    let shared = Shared {
        key,
        log,
        nodes: Arc::default(),
        readiness: Arc::new(Readiness::new(usize::MAX, usize::MAX)),
        health: sentinel.health(),
        http_metrics: configs.iter().map(|_| Arc::default()).collect(),
        metrics: configs.iter().map(|_| Arc::default()).collect(),
        drain,
        args,
    };
    let shards = Shard::launch_all(&configs, move |shard| run_shard(shard, shared))
        .map_err(|error| format!("cannot start the shards: {error}"))?;
    for shard in &shards {
        sentinel.watch_shard(shard.remote());
    }
    let mut code = 0;
    for shard in shards {
        match shard.join() {
            Ok(Ok(())) => {}
            Ok(Err(message)) => {
                eprintln!("kvserve proxy: {message}");
                code = 1;
            }
            Err(_) => code = 1,
        }
    }
    Ok(code)
}

/// A proxy has no pages.
struct NoPages;

impl GuardKeeper for NoPages {
    fn release(&self, guards: GuardToken) {
        unreachable!("a proxy got guards {guards:?}");
    }

    fn quarantine(&self, guards: GuardToken) {
        unreachable!("a proxy got guards {guards:?}");
    }
}

async fn run_shard(shard: Shard, shared: Shared) -> Result<(), String> {
    let listener = TcpListener::bind(shared.args.listen, true)
        .map_err(|error| format!("cannot listen on {}: {error}", shared.args.listen))?;
    let hub = Hub::new(HubLimits::default(), Rc::new(NoPages));
    shard
        .spawn(hub.clone().run(shard.clone(), PollPolicy::Armed))
        .detach();
    if shard.index() == 0 {
        start_cluster(&shard, &hub, &shared)?;
    }
    let table = Rc::new(RefCell::new(NodeTable::default()));
    shard
        .spawn(sync(shard.clone(), shared.nodes.clone(), table.clone()))
        .detach();
    let proxy = Proxy {
        table,
        upstream: Rc::new(Client::new(shard.clone(), ClientLimits::default())),
        clock: Rc::new(shard.clone()),
        pages: Rc::new(ProxyPages {
            readiness: shared.readiness.clone(),
            health: shared.health.clone(),
        }),
        config: ProxyConfig {
            request_timeout: shared.args.request_timeout,
            debug_pages: shared.args.listen.ip().is_loopback(),
        },
        http_metrics: shared.http_metrics[shard.index()].clone(),
        all_http_metrics: shared.http_metrics.clone(),
        metrics: shared.metrics[shard.index()].clone(),
        all_metrics: shared.metrics.clone(),
    };
    let http_drain = http::Drain::new();
    let serving = shard.spawn(http::serve(
        shard.clone(),
        listener,
        HttpLimits::default(),
        http_handler(Rc::new(proxy)),
        http_drain.clone(),
    ));
    shared.drain.wait().await;
    shared.readiness.drain();
    let patience = shared.args.request_timeout + DRAIN_EXTRA;
    http_drain.begin(Deadline::after(shard.now(), patience));
    serving.await;
    hub.stop();
    Ok(())
}

/// Keeps a shard's table as the registry says.
async fn sync(shard: Shard, nodes: Arc<Nodes>, table: Rc<RefCell<NodeTable>>) {
    let mut seen = 0;
    loop {
        if let Some(records) = nodes.newer(&mut seen) {
            let mut table = table.borrow_mut();
            let gone: Vec<_> = table
                .records()
                .filter(|known| !records.iter().any(|record| record.node == known.node))
                .map(|known| (known.node.clone(), known.incarnation))
                .collect();
            for (node, incarnation) in gone {
                table.remove(&node, incarnation);
            }
            for record in records {
                // The registry has the smaller bound.
                let _ = table.upsert(record);
            }
        }
        shard.sleep(SYNC_EVERY).await;
    }
}

/// The registry and the peers of shard 0.
struct Cluster {
    shard: Shard,
    log: Log,
    registry: RefCell<Registry>,
    /// Identity of each session that is up, by node id: incarnation and API URL.
    sessions: RefCell<BTreeMap<String, (u64, String)>>,
    peers: OnceCell<PeerHub>,
    nodes: Arc<Nodes>,
    readiness: Arc<Readiness>,
}

fn start_cluster(shard: &Shard, hub: &Hub, shared: &Shared) -> Result<(), String> {
    let cluster = Rc::new(Cluster {
        shard: shard.clone(),
        log: shared.log,
        registry: RefCell::default(),
        sessions: RefCell::default(),
        peers: OnceCell::new(),
        nodes: shared.nodes.clone(),
        readiness: shared.readiness.clone(),
    });
    cluster.changed();
    let peers = PeerHub::start(
        shard,
        hub,
        PeerConfig {
            node_id: shared.args.node_id.clone(),
            incarnation: peer::fresh_incarnation().map_err(|error| error.to_string())?,
            role: Role::Proxy,
            key: shared.key.clone(),
            listen: Some(shared.args.peer_listen),
            fingerprint: 0,
            layout_hash: 0,
            page_bytes: 0,
            api_url: format!("http://{}", shared.args.listen),
            checksums: ChecksumMode::Full,
            transport: TransportChoice::Tcp,
            rdma: Default::default(),
            limits: PeerLimits::default(),
        },
        PeerParts {
            pool: None,
            ledger: None,
            prefill: None,
            verbs: None,
            chaos: None,
            events: Rc::new(Events(Rc::downgrade(&cluster))),
        },
    )
    .map_err(|error| {
        format!(
            "cannot listen for nodes on --peer-listen {}: {error}",
            shared.args.peer_listen
        )
    })?;
    if cluster.peers.set(peers).is_err() {
        unreachable!("peers are set once");
    }
    shard.spawn(keep(cluster)).detach();
    Ok(())
}

/// Expires silent nodes and repeats the roster, until the shard ends.
async fn keep(cluster: Rc<Cluster>) {
    let period = ROSTER_EVERY / 2;
    let mut turned = cluster.shard.now();
    loop {
        cluster.shard.sleep(period).await;
        let now = cluster.shard.now();
        let stood_still = now.since(turned).saturating_sub(period);
        turned = now;
        if stood_still > STALL {
            cluster.registry.borrow_mut().forgive(stood_still);
        }
        let gone = {
            let sessions = cluster.sessions.borrow();
            let mut registry = cluster.registry.borrow_mut();
            registry.expire(now, |id| sessions.contains_key(id))
        };
        if gone {
            cluster.changed();
        }
        cluster.tell_roster();
    }
}

impl Cluster {
    /// Publishes the registry to all shards and to `/ready`.
    fn changed(&self) {
        let registry = self.registry.borrow();
        let records = registry.nodes().filter_map(|(id, node)| record(id, node));
        self.nodes.publish(records.collect());
        self.readiness
            .set_missing(registry.missing().map(str::to_string));
    }

    fn tell_roster(&self) {
        let Some(peers) = self.peers.get() else {
            return;
        };
        let roster = self.registry.borrow().roster().encode();
        for peer in peers.peers() {
            if peer.role == Some(Role::Decode) {
                // A node that cannot be told now is told again in half a second.
                let _ = peers.send_app(&peer.node_id, KIND_ROSTER, roster.clone());
            }
        }
    }

    fn reported(&self, node_id: &str, report: NodeReport) {
        let Some((incarnation, url)) = self.sessions.borrow().get(node_id).cloned() else {
            return;
        };
        let now = self.shard.now();
        let before = self.registry.borrow().roster();
        let taken = self
            .registry
            .borrow_mut()
            .report(now, node_id, incarnation, &url, report);
        if !taken {
            self.log
                .warn("a node's report was not taken", &[("node", &node_id)]);
            return;
        }
        self.changed();
        if self.registry.borrow().roster() != before {
            self.tell_roster();
        }
    }
}

/// A node as the data plane needs it; `None` for one whose API address makes no sense.
fn record(id: &str, node: &Registered) -> Option<NodeRecord> {
    let host = node.api_url.strip_prefix("http://")?.trim_end_matches('/');
    let address: SocketAddr = host.parse().ok()?;
    Some(NodeRecord {
        node: id.to_string(),
        incarnation: node.incarnation,
        address,
        url: node.api_url.clone(),
        role: match node.report.role {
            1 => NodeRole::Hybrid,
            2 => NodeRole::Prefill,
            3 => NodeRole::Decode,
            _ => return None,
        },
        models: vec![node.report.model.clone()],
        ready: node.report.ready,
        paths: node.report.paths.clone(),
    })
}

struct Events(Weak<Cluster>);

impl PeerEvents for Events {
    fn up(&self, peer: PeerView) {
        if let Some(cluster) = self.0.upgrade() {
            cluster.log.info(
                "node joined",
                &[("node", &peer.node_id), ("api", &peer.api_url)],
            );
            let identity = (peer.incarnation, peer.api_url);
            cluster.sessions.borrow_mut().insert(peer.node_id, identity);
        }
    }

    fn down(&self, node_id: &str, reason: RefuseReason, _by_peer: bool) {
        if let Some(cluster) = self.0.upgrade() {
            let text = format!("{reason:?}");
            cluster
                .log
                .info("node left", &[("node", &node_id), ("reason", &text)]);
            // A lost session alone does not end the node's requests: it may be a dropped frame,
            // and a node that died resets its data connections by itself. Its lease (the last
            // report) runs on for REPORT_TTL; a later incarnation takes its place at once.
            cluster.sessions.borrow_mut().remove(node_id);
        }
    }

    fn app(&self, node_id: &str, kind: u16, bytes: &[u8]) {
        let Some(cluster) = self.0.upgrade() else {
            return;
        };
        if kind != KIND_REPORT {
            return;
        }
        match NodeReport::decode(bytes) {
            Ok(report) => cluster.reported(node_id, report),
            Err(error) => {
                cluster
                    .log
                    .warn("bad report", &[("node", &node_id), ("error", &error)]);
            }
        }
    }

    fn refused(&self, address: SocketAddr, refusal: &Refusal) {
        if let Some(cluster) = self.0.upgrade() {
            let fields: [(&str, &dyn std::fmt::Display); 2] =
                [("address", &address), ("why", &refusal.text)];
            // Not there (yet): dialling goes on by itself.
            if refusal.reason == RefuseReason::Disconnected {
                cluster.log.info("peer not reached", &fields);
            } else {
                cluster
                    .log
                    .warn_gated(&FAILED_HANDSHAKES, "handshake failed", &fields);
            }
        }
    }
}

struct ProxyPages {
    readiness: Arc<Readiness>,
    health: HealthView,
}

impl AdminPages for ProxyPages {
    fn health(&self) -> Page {
        health_page(&self.health)
    }

    fn ready(&self) -> Page {
        ready_page(&self.readiness)
    }

    fn progress(&self) -> Page {
        // What waits on a proxy waits for a node, which tells its own progress.
        Page::ok(json!({ "oldest_wait_s": {} }))
    }

    fn metrics(&self, out: &mut String) {
        self.health.write_metrics("kvserve_", out);
    }

    fn debug(
        &self,
        _method: Method,
        _path: String,
        _body: Bytes,
    ) -> LocalFuture<'_, Result<Option<Page>, ApiError>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}
