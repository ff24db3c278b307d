//! `serve`, `prefill`, `decode`: from flags to a running node, and down again.
//!
//! Shard 0 is the engine's: it owns the pages, the step loop, the peers. Every shard (0 too)
//! serves the API on the same port and reaches the engine over the command bridge.

use super::listen::{AdminListen, await_free, check_api, check_chaos, check_peer};
use super::pages::NodePages;
use super::{peer_key, resolve_model, served_name};
use crate::api::http::http_handler;
use crate::api::ids::RandomIds;
use crate::api::{
    Api, ApiConfig, ApiMetrics, Job, LocalFuture, Offload, OffloadError, ServedModel,
};
use crate::cli::{Dtype, LogFormat, NodeArgs, NodeCommand, OnOff, TransportArg};
use crate::cluster::agent::{self, Agent};
use crate::engine::{EngineClient, EngineCommand, EngineCore};
use crate::log::Log;
use crate::metrics::Metrics;
use crate::node::{self, Admission, DebugQuery, NodeContext, PeerPrefills, StatusBoard};
use crate::perf::Perf;
use crate::placement::{allowed_cpus, available_memory};
use crate::readiness::Readiness;
use crate::scheduler::SchedulerLimits;
use kvserve_kv::ledger::{Ledger, LedgerCell};
use kvserve_kv::peer::{self, PeerConfig, PeerHub, PeerLimits, PeerParts};
use kvserve_kv::prefix::PrefixConfig;
use kvserve_kv::session::{PeerKey, Role};
use kvserve_kv::transport::chaos::ChaosHandle;
use kvserve_kv::transport::rdma::RdmaConfig;
use kvserve_kv::{KvLayout, PoolBacking};
use kvserve_model::cpu::{CpuBackend, CpuEngine, CpuOptions};
use kvserve_model::{Backend, Model};
use kvserve_runtime::bridge;
use kvserve_runtime::completion::{Hub, HubLimits};
use kvserve_runtime::http::{self, HttpLimits};
use kvserve_runtime::lane::LaneConfig;
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::sentinel::{HealthView, Sentinel, SentinelConfig};
use kvserve_runtime::shard::poll_loop::PollPolicy;
use kvserve_runtime::side_pool::SidePool;
use kvserve_runtime::signals::{self, Drain};
use kvserve_runtime::{Deadline, GuardToken, Shard, ShardConfig};
use std::cell::{Cell, OnceCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Tokens a running sequence is given room for by default (the arithmetic: max-running
/// x min(max-model-len, this)).
const KV_TOKENS_PER_RUNNING: usize = 2048;

/// Threads that tokenise and render beside the shards, and jobs that wait for them at most.
const SIDE_THREADS: usize = 1;
const SIDE_QUEUE_MAX: usize = 256;

/// Debug questions that wait at most; more are answered with 503.
const DEBUG_QUERIES_MAX: usize = 16;

/// After the drain's own deadline (the longest request), cut connections end within this.
const DRAIN_EXTRA: Duration = Duration::from_secs(1);

/// How often a draining node looks whether peers still need it.
const DRAIN_LOOK: Duration = Duration::from_millis(10);

/// A prefill node goes down when no peer has needed it for this long, so that requests that
/// decode nodes still queue can finish their migration.
const DRAIN_PEERS_IDLE: Duration = Duration::from_millis(300);

/// Niceness of engine threads: a shard on the same CPU wins it.
const ENGINE_NICE: u8 = 5;

/// What all shards get; each takes a clone.
#[derive(Clone)]
struct Shared {
    role: Role,
    listen: SocketAddr,
    limits: SchedulerLimits,
    context_max: usize,
    request_timeout: Duration,
    policy: PollPolicy,
    admin: AdminListen,
    log: Log,
    model: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    perf: Arc<Perf>,
    readiness: Arc<Readiness>,
    board: Arc<StatusBoard>,
    health: HealthView,
    http_metrics: Vec<Arc<ApiMetrics>>,
    commands: bridge::Sender<EngineCommand>,
    queries: bridge::Sender<DebugQuery>,
    drain: Drain,
    side_pool: Arc<SidePool>,
    /// Taken by shard 0.
    engine: Arc<Mutex<Option<EngineParts>>>,
}

/// What only the engine's shard gets.
struct EngineParts {
    backend: CpuBackend,
    prefix_cache: OnOff,
    commands: bridge::Receiver<EngineCommand>,
    queries: bridge::Receiver<DebugQuery>,
    chaos: ChaosHandle,
    peers: Option<PeerStart>,
}

/// How the node meets its peers.
struct PeerStart {
    config: PeerConfig,
    join: Option<SocketAddr>,
    agent: Agent,
}

/// Runs a node to its end.
///
/// # Errors
/// A sentence for the user.
pub fn run_node(role: Role, command: NodeCommand) -> Result<i32, String> {
    let args = &command.node;
    // Under `up` only what is not as it should be is told: the summary must stay readable.
    let log = Log::new(args.log_format == LogFormat::Json).quiet(args.share_memory_with.is_some());
    let listen = args.listen.unwrap_or_else(|| default_listen(role));
    check(role, &command, listen)?;
    await_free("--listen", listen)?;
    for (what, address) in [
        ("--admin-listen", args.admin_listen),
        ("--health-listen", args.health_listen),
        ("--peer-listen", command.join.peer_listen),
    ] {
        address.map_or(Ok(()), |address| await_free(what, address))?;
    }
    let drain = Drain::new();
    signals::install(&drain).map_err(|error| format!("cannot install signal handlers: {error}"))?;

    let path = resolve_model(&command.model.model)?;
    let mut model = Model::load(&path).map_err(|error| error.to_string())?;
    let page_tokens = KvLayout::PAGE_TOKENS_DEFAULT;
    let sizes = Sizes::choose(args, &model, page_tokens)?;
    let engine_cores = match &args.engine_cores {
        Some(list) => list.0.clone(),
        None => allowed_cpus(),
    };
    let engine = CpuEngine::new(
        &model.config,
        &model.weights,
        model.rope,
        &CpuOptions {
            threads: engine_cores.len(),
            cores: engine_cores.clone(),
            dtype: args.dtype.kv(),
            pool_pages: sizes.pages,
            page_tokens,
            isa: None,
            nice: ENGINE_NICE,
        },
    )
    .map_err(|error| error.to_string())?;
    let layout = engine.layout().clone();
    let mut lane = LaneConfig::new("engine");
    lane.core = engine_cores.first().copied();
    lane.nice = ENGINE_NICE;
    let backend = CpuBackend::start(engine, lane)
        .map_err(|error| format!("cannot start the engine's thread: {error}"))?;
    let pool = backend.pool();
    if args.kv_populate {
        pool.populate().map_err(|error| {
            format!(
                "--kv-populate: the {} MiB of KV cache cannot be touched: {error}; choose a \
                 smaller --kv-cache, or leave the flag out",
                pool.bytes() >> 20
            )
        })?;
    }
    let backing = pool.backing();

    let sentinel = Sentinel::start(SentinelConfig {
        health_listen: Some(
            args.health_listen
                .unwrap_or(super::listen::ANY_LOOPBACK_PORT),
        ),
        ..SentinelConfig::default()
    })
    .map_err(|error| format!("cannot start the sentinel: {error}"))?;
    sentinel.watch_lane("engine", backend.pulse());

    let active_max = (args.max_running + args.max_queued) as usize;
    let readiness = Arc::new(Readiness::new(active_max, sizes.context));
    let (commands, commands_out) = bridge::channel(active_max);
    let (queries, queries_out) = bridge::channel(DEBUG_QUERIES_MAX);
    let chaos = ChaosHandle::new(
        args.chaos.clone().unwrap_or_default(),
        std::process::id().into(),
    );
    if let Some(spec) = &args.chaos {
        log.warn(
            "CHAOS is on: faults are injected on purpose",
            &[("spec", spec)],
        );
    }
    let name = match &args.model_name {
        Some(name) => name.clone(),
        None => served_name(&command.model.model),
    };
    let served = ServedModel::of(&mut model, vec![name.clone()], sizes.context as u32);
    let peers = peer_start(role, &command, listen, &model, &layout, &name)?;
    let configs = shard_configs(role, args);
    let side_pool = SidePool::new(SIDE_THREADS, SIDE_QUEUE_MAX)
        .map_err(|error| format!("cannot start side threads: {error}"))?;
    let shared = Shared {
        role,
        listen,
        limits: SchedulerLimits {
            running_max: args.max_running as usize,
            queued_max: args.max_queued as usize,
            ..SchedulerLimits::with_page_tokens(page_tokens)
        },
        context_max: sizes.context,
        request_timeout: args.request_timeout,
        policy: if args.spin {
            PollPolicy::Spin
        } else {
            PollPolicy::Adaptive
        },
        admin: AdminListen::choose(args.admin_listen, listen, &name),
        log,
        model: Arc::new(served),
        metrics: Arc::default(),
        perf: Arc::default(),
        readiness: readiness.clone(),
        board: Arc::default(),
        health: sentinel.health(),
        http_metrics: configs.iter().map(|_| Arc::default()).collect(),
        commands,
        queries,
        drain,
        side_pool: Arc::new(side_pool),
        engine: Arc::new(Mutex::new(Some(EngineParts {
            backend,
            prefix_cache: args.prefix_cache,
            commands: commands_out,
            queries: queries_out,
            chaos,
            peers,
        }))),
    };
    summary(
        &shared, args, &command, &model, &layout, &sizes, backing, &configs, &sentinel,
    );
    // The tensors live on in packed form; the file's mapping and the tables are not needed.
    drop(model);
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
                eprintln!("kvserve: {message}");
                code = 1;
            }
            Err(_) => code = 1,
        }
    }
    Ok(code)
}

fn default_listen(role: Role) -> SocketAddr {
    let port = match role {
        Role::Hybrid | Role::Proxy => 8000,
        Role::Prefill => 8002,
        Role::Decode => 8001,
    };
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn check(role: Role, command: &NodeCommand, listen: SocketAddr) -> Result<(), String> {
    let args = &command.node;
    check_api("--listen", listen, args.insecure_no_auth)?;
    let mut addresses = vec![listen];
    if let Some(admin) = args.admin_listen {
        check_api("--admin-listen", admin, args.insecure_no_auth)?;
        addresses.push(admin);
    }
    if let Some(peer) = command.join.peer_listen {
        check_peer(peer, command.join.peer_key_file.is_some())?;
        addresses.push(peer);
    }
    check_chaos(args.chaos.is_some(), &addresses)?;
    let clustered = matches!(role, Role::Prefill | Role::Decode);
    if clustered && command.join.join.is_none() {
        return Err(
            "a prefill or decode node needs --join HOST:PORT, the proxy's peer address".into(),
        );
    }
    if clustered && command.join.peer_key_file.is_none() {
        return Err(
            "a node of a cluster needs --peer-key-file, the same file on every node".into(),
        );
    }
    Ok(())
}

/// Sizes of the pool and of a sequence.
struct Sizes {
    pages: usize,
    context: usize,
    /// Set when memory, not the flags, decided.
    cut_by_memory: bool,
}

impl Sizes {
    fn choose(args: &NodeArgs, model: &Model, page_tokens: usize) -> Result<Sizes, String> {
        let config = &model.config;
        let asked = args
            .max_model_len
            .map_or(config.context, |tokens| tokens as usize);
        if asked > config.context {
            return Err(format!(
                "--max-model-len {asked} is more than the {} tokens this model can hold",
                config.context
            ));
        }
        let page_bytes = KvLayout {
            dtype: args.dtype.kv(),
            page_tokens,
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            kernel_class: String::new(),
        }
        .page_bytes();
        let (pages, cut_by_memory) = match args.kv_cache {
            Some(bytes) => {
                let free = available_memory().unwrap_or(u64::MAX);
                if bytes > free {
                    return Err(format!(
                        "--kv-cache of {} MiB is more than the {} MiB of memory that this \
                         machine has free; choose less",
                        bytes >> 20,
                        free >> 20
                    ));
                }
                ((bytes / page_bytes as u64) as usize, false)
            }
            None => {
                let tokens = args.max_running as usize * asked.min(KV_TOKENS_PER_RUNNING);
                let wanted = tokens.div_ceil(page_tokens);
                let sharers = args.share_memory_with.unwrap_or(1).max(1) as u64;
                let share = available_memory().map_or(u64::MAX, |bytes| bytes / 4 / sharers);
                let fits = (share / page_bytes as u64) as usize;
                (wanted.min(fits), fits < wanted)
            }
        };
        // A sequence of two tokens needs a page; page ids have 32 bits.
        if pages == 0 || pages > u32::MAX as usize {
            return Err(format!(
                "the KV cache would have {pages} pages of {page_bytes} bytes; \
                 choose --kv-cache between {page_bytes} bytes and {} pages",
                u32::MAX
            ));
        }
        Ok(Sizes {
            pages,
            context: asked.min(pages * page_tokens),
            cut_by_memory,
        })
    }
}

fn shard_configs(role: Role, args: &NodeArgs) -> Vec<ShardConfig> {
    let cores = match &args.cores {
        Some(list) => list.0.clone(),
        None => allowed_cpus().into_iter().take(1).collect(),
    };
    cores
        .into_iter()
        .enumerate()
        .map(|(index, core)| ShardConfig {
            name: format!("{}-shard-{index}", super::role_name(role)),
            core: Some(core),
        })
        .collect()
}

fn peer_start(
    role: Role,
    command: &NodeCommand,
    listen: SocketAddr,
    model: &Model,
    layout: &KvLayout,
    model_name: &str,
) -> Result<Option<PeerStart>, String> {
    let join = &command.join;
    let Some(key_file) = &join.peer_key_file else {
        return Ok(None);
    };
    let key: PeerKey = peer_key::read(key_file)?;
    let node_id = join
        .node_id
        .clone()
        .unwrap_or_else(|| format!("{}-{}", super::role_name(role), listen));
    let host = |address: SocketAddr| match &join.advertise {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{}", address.port())
        }
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    };
    Ok(Some(PeerStart {
        config: PeerConfig {
            node_id,
            incarnation: peer::fresh_incarnation().map_err(|error| error.to_string())?,
            role,
            key,
            listen: join.peer_listen,
            fingerprint: model.fingerprint,
            layout_hash: layout.hash(),
            page_bytes: layout.page_bytes(),
            api_url: format!("http://{}", host(listen)),
            checksums: command.node.checksums,
            transport: command.node.transport.choice(),
            rdma: RdmaConfig {
                device: command.node.rdma_device.clone(),
                ..RdmaConfig::default()
            },
            limits: peer_limits(command.node.lease_ttl),
        },
        join: join.join,
        agent: Agent {
            peer_address: join.peer_listen.map(host).unwrap_or_default(),
            model: model_name.to_string(),
            supervised: command.node.share_memory_with.is_some(),
        },
    }))
}

/// PROTOCOL 9's, or with another life of leases.
fn peer_limits(lease_ttl: Option<Duration>) -> PeerLimits {
    let mut limits = PeerLimits::default();
    if let Some(ttl) = lease_ttl {
        limits.lease.ttl = ttl;
        limits.renew = ttl / 5;
    }
    limits
}

/// The process's side pool on one shard.
struct SharedPool(Arc<SidePool>);

impl Offload for SharedPool {
    fn run(&self, deadline: Deadline, job: Job) -> LocalFuture<'_, Result<(), OffloadError>> {
        Offload::run(&*self.0, deadline, job)
    }
}

/// Guards on a shard without pages: there are none.
struct NoPages;

impl kvserve_runtime::completion::GuardKeeper for NoPages {
    fn release(&self, guards: GuardToken) {
        unreachable!("a shard without pages got guards {guards:?}");
    }

    fn quarantine(&self, guards: GuardToken) {
        unreachable!("a shard without pages got guards {guards:?}");
    }
}

async fn run_shard(shard: Shard, shared: Shared) -> Result<(), String> {
    let listener = TcpListener::bind(shared.listen, true)
        .map_err(|error| format!("cannot listen on {}: {error}", shared.listen))?;
    let parts = match shard.index() {
        0 => shared
            .engine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(),
        _ => None,
    };
    let (hub, node) = match parts {
        Some(parts) => {
            let (hub, node) = start_engine(&shard, &shared, parts)?;
            (hub, Some(node))
        }
        None => {
            let hub = Hub::new(HubLimits::default(), Rc::new(NoPages));
            shard
                .spawn(hub.clone().run(shard.clone(), shared.policy))
                .detach();
            (hub, None)
        }
    };
    let make_api = |debug_pages: bool| Api {
        engine: Rc::new(EngineClient::new(
            shard.clone(),
            hub.clone(),
            shared.commands.clone(),
            shared.readiness.clone(),
        )),
        model: shared.model.clone(),
        config: ApiConfig {
            request_timeout: shared.request_timeout,
            debug_pages,
        },
        offload: Rc::new(SharedPool(shared.side_pool.clone())),
        clock: Rc::new(shard.clone()),
        pages: Rc::new(NodePages {
            hub: hub.clone(),
            readiness: shared.readiness.clone(),
            board: shared.board.clone(),
            metrics: shared.metrics.clone(),
            perf: shared.perf.clone(),
            health: shared.health.clone(),
            queries: shared.queries.clone(),
        }),
        metrics: shared.http_metrics[shard.index()].clone(),
        all_metrics: shared.http_metrics.clone(),
        ids: RandomIds::default(),
    };
    let http_drain = http::Drain::new();
    let serve_on = |listener: http::Listener, debug_pages: bool| {
        shard.spawn(http::serve(
            shard.clone(),
            listener,
            HttpLimits::default(),
            http_handler(Rc::new(make_api(debug_pages))),
            http_drain.clone(),
        ))
    };
    let on_api = shared.admin == AdminListen::OnApi;
    let serving = serve_on(listener.into(), on_api);
    let admin = match (&shared.admin, shard.index()) {
        (AdminListen::OnApi, _) | (_, 1..) => None,
        (other, 0) => Some(serve_on(other.bind()?, true)),
    };
    shared.drain.wait().await;
    shared.readiness.drain();
    let patience = shared.request_timeout + DRAIN_EXTRA;
    http_drain.begin(Deadline::after(shard.now(), patience));
    serving.await;
    if let Some(admin) = admin {
        admin.await;
    }
    if let Some(node) = node {
        finish_peers(&shard, &node, patience).await;
    }
    hub.stop();
    Ok(())
}

/// Waits until no peer needs this node any more.
async fn finish_peers(shard: &Shard, node: &NodeContext, patience: Duration) {
    let end = Deadline::after(shard.now(), patience);
    let mut idle_since = shard.now();
    while node.role == Role::Prefill && !end.passed(shard.now()) {
        let leased = node.ledger.with(|ledger| ledger.counts().leased);
        if leased > 0 || node.unfinished() > 0 {
            idle_since = shard.now();
        }
        if shard.now().since(idle_since) >= DRAIN_PEERS_IDLE {
            return;
        }
        shard.sleep(DRAIN_LOOK).await;
    }
}

/// What clients cannot know, so that they cannot make prefixes collide.
fn hash_seed() -> Result<u64, String> {
    let key = peer::fresh_key().map_err(|error| format!("no random numbers: {error}"))?;
    let (seed, _) = key.split_first_chunk().expect("a key has 32 bytes");
    Ok(u64::from_le_bytes(*seed))
}

fn start_engine(
    shard: &Shard,
    shared: &Shared,
    parts: EngineParts,
) -> Result<(Hub, Rc<NodeContext>), String> {
    let pool = kvserve_model::Backend::pool(&parts.backend);
    let mut ledger = Ledger::of_pool(pool.clone());
    if parts.prefix_cache == OnOff::On {
        ledger = ledger.with_prefix_cache(PrefixConfig {
            page_tokens: shared.limits.page_tokens,
            seed: hash_seed()?,
        });
    }
    let ledger = Rc::new(LedgerCell::new(ledger));
    let hub = Hub::new(HubLimits::default(), ledger.clone());
    let core = EngineCore::new(
        shard.clone(),
        hub.clone(),
        ledger.clone(),
        parts.backend,
        shared.limits,
        shared.metrics.clone(),
        shared.perf.clone(),
    )
    .map_err(|error| format!("cannot open the engine's channel: {error}"))?;
    let incarnation = match &parts.peers {
        Some(start) => start.config.incarnation,
        None => peer::fresh_incarnation().map_err(|error| error.to_string())?,
    };
    let node = Rc::new(NodeContext {
        role: shared.role,
        incarnation,
        requests_numbered: Cell::new(0),
        shard: shard.clone(),
        hub: hub.clone(),
        ledger: ledger.clone(),
        core: core.clone(),
        peers: OnceCell::new(),
        limits: shared.limits,
        context_max: shared.context_max,
        admission: Admission::new(shared.limits.running_max, shared.limits.queued_max),
        metrics: shared.metrics.clone(),
        perf: shared.perf.clone(),
        prompt_token_ns: Cell::new(0.0),
        readiness: shared.readiness.clone(),
        standing: Default::default(),
        peer_prefills_live: Cell::new(0),
        log: shared.log,
    });
    shard
        .spawn(hub.clone().run(shard.clone(), shared.policy))
        .detach();
    shard.spawn(core.run()).detach();
    shard
        .spawn(node::accept(node.clone(), parts.commands))
        .detach();
    shard
        .spawn(node::publish(node.clone(), shared.board.clone()))
        .detach();
    shard
        .spawn(node::answer(
            node.clone(),
            parts.chaos.clone(),
            parts.queries,
        ))
        .detach();
    match parts.peers {
        Some(start) => {
            let events = agent::AgentEvents::new(Rc::downgrade(&node));
            let prefill = PeerPrefills::new(Rc::downgrade(&node));
            let peers = PeerHub::start(
                shard,
                &hub,
                start.config,
                PeerParts {
                    pool: Some(pool),
                    ledger: Some(ledger),
                    prefill: matches!(shared.role, Role::Prefill | Role::Hybrid)
                        .then(|| Rc::new(prefill) as Rc<_>),
                    verbs: None,
                    chaos: Some(parts.chaos),
                    events,
                },
            )
            .map_err(|error| format!("cannot reach peers: {error}"))?;
            if let Some(address) = start.join {
                peers.dial(address);
            }
            if node.peers.set(peers).is_err() {
                unreachable!("peers are set once");
            }
            shard
                .spawn(agent::report(node.clone(), start.agent))
                .detach();
        }
        None => shared.readiness.set_missing(None),
    }
    Ok((hub, node))
}

#[allow(
    clippy::too_many_arguments,
    reason = "one line of text for each, called once"
)]
fn summary(
    shared: &Shared,
    args: &NodeArgs,
    command: &NodeCommand,
    model: &Model,
    layout: &KvLayout,
    sizes: &Sizes,
    backing: PoolBacking,
    configs: &[ShardConfig],
    sentinel: &Sentinel,
) {
    let tokens = sizes.pages * layout.page_tokens;
    if args.share_memory_with.is_some() {
        let cores: Vec<_> = configs.iter().filter_map(|c| c.core).collect();
        println!(
            "{}: {}, {} on shard cores {cores:?} and engine cores {:?}, {} KV pages = {tokens} \
             tokens, path {}, http://{}",
            command.join.node_id.as_deref().unwrap_or("node"),
            args.dtype.label(),
            layout.kernel_class,
            engine_cores_text(args),
            sizes.pages,
            args.transport.choice().label(),
            shared.listen
        );
        return;
    }
    let cores: Vec<_> = configs.iter().filter_map(|c| c.core).collect();
    let memory = if sizes.cut_by_memory {
        " (a quarter of free memory; --kv-cache SIZE sets it)"
    } else {
        ""
    };
    println!(
        "model    {} ({:?}, {} layers, context {} of {})",
        shared.model.name(),
        model.config.architecture,
        model.config.layers,
        sizes.context,
        model.config.context
    );
    println!(
        "sampling temperature {}, top_p {}, top_k {} unless a request says otherwise",
        model.generation.temperature, model.generation.top_p, model.generation.top_k
    );
    println!(
        "dtype    {}, kernels {}",
        dtype_text(args),
        layout.kernel_class
    );
    println!(
        "cores    shards on {cores:?}, engine threads on {:?}",
        engine_cores_text(args)
    );
    println!(
        "kv       {} pages of {} tokens = {tokens} tokens, {:.2} GiB on {} memory pages{memory}",
        sizes.pages,
        layout.page_tokens,
        (sizes.pages * layout.page_bytes()) as f64 / (1u64 << 30) as f64,
        backing.label()
    );
    match shared.role {
        Role::Hybrid => println!("path     none: prefill and decode in one process"),
        Role::Prefill | Role::Decode | Role::Proxy => {
            println!("path     {}", path_text(args));
        }
    }
    match &shared.admin {
        AdminListen::OnApi => println!("api      http://{} (and /debug)", shared.listen),
        admin => println!("api      http://{}, /debug on {admin}", shared.listen),
    }
    if let Some(address) = sentinel.health_addr() {
        println!("health   http://{address}/health");
    }
}

fn dtype_text(args: &NodeArgs) -> &'static str {
    match args.dtype {
        Dtype::F32 => "f32 (texts independent of batch and node: always on here)",
        Dtype::Bf16 => "bf16 (texts independent of batch and node: always on here)",
    }
}

fn path_text(args: &NodeArgs) -> &'static str {
    match args.transport {
        TransportArg::Auto => {
            "shared memory with nodes on this host, rdma with others, else tcp (probed)"
        }
        TransportArg::Rdma => "rdma only (--transport rdma)",
        TransportArg::Shm => "shared memory only (--transport shm)",
        TransportArg::Tcp => "tcp only (--transport tcp)",
    }
}

fn engine_cores_text(args: &NodeArgs) -> Vec<usize> {
    args.engine_cores
        .as_ref()
        .map_or_else(allowed_cpus, |list| list.0.clone())
}
