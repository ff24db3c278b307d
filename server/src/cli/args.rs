//! The commands and their flags.

use super::parse::{parse_address, parse_cores, parse_duration, parse_size};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvserve_kv::peer::TransportChoice;
use kvserve_kv::transport::chaos::ChaosSpec;
use kvserve_kv::{ChecksumMode, KvDtype};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Serves a language model with prefill and decode on different nodes.
#[derive(Debug, Parser)]
#[command(name = "kvserve", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a whole cluster on this machine: proxy, prefill and decode nodes.
    Up(UpArgs),
    /// Serve a model with prefill and decode in one process.
    Serve(NodeCommand),
    /// Run a prefill node of a cluster.
    Prefill(NodeCommand),
    /// Run a decode node of a cluster.
    Decode(NodeCommand),
    /// Run the proxy of a cluster.
    Proxy(ProxyArgs),
    /// Fetch a model of the catalogue into the cache.
    Fetch(FetchArgs),
    /// Say what this machine has for moving pages by RDMA, and what is missing.
    Doctor(DoctorArgs),
}

/// `kvserve doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The RDMA device to look for (default: the best one).
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Option<String>,
}

/// A model on the command line.
#[derive(Debug, Clone, Args)]
pub struct ModelArg {
    /// A catalogue name, a .gguf file or a Hugging Face folder.
    #[arg(default_value = "smollm2-135m")]
    pub model: String,
}

/// Element type of KV cache and arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// Exact: what the fixtures of the tests are compared with.
    F32,
    /// Half the KV bytes.
    Bf16,
}

impl Dtype {
    /// The KV element type.
    pub fn kv(self) -> KvDtype {
        match self {
            Dtype::F32 => KvDtype::F32,
            Dtype::Bf16 => KvDtype::Bf16,
        }
    }

    /// As written on the command line.
    pub fn label(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// Which way pages may take between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// Shared memory with a node on this host, RDMA with others, if a probe says so; else TCP.
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP only.
    Tcp,
    /// RDMA READ only.
    Rdma,
}

impl TransportArg {
    /// As the peers' layer takes it.
    pub fn choice(self) -> TransportChoice {
        match self {
            TransportArg::Auto => TransportChoice::Auto,
            TransportArg::Shm => TransportChoice::Shm,
            TransportArg::Tcp => TransportChoice::Tcp,
            TransportArg::Rdma => TransportChoice::Rdma,
        }
    }
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// On.
    On,
    /// Off.
    Off,
}

impl OnOff {
    /// As written on the command line.
    pub fn label(self) -> &'static str {
        match self {
            OnOff::On => "on",
            OnOff::Off => "off",
        }
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Flags that every serving process knows.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Where the API listens.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub listen: Option<SocketAddr>,
    /// Where /debug and /admin listen (default: the API port while it is loopback).
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub admin_listen: Option<SocketAddr>,
    /// Where the sentinel answers /health by itself.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub health_listen: Option<SocketAddr>,
    /// Arithmetic and KV element type.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: Dtype,
    /// Texts independent of batch, chunk and node (PROTOCOL D1; this backend always holds it).
    #[arg(long)]
    pub deterministic: bool,
    /// Bytes of KV cache (e.g. 2GiB); default from --max-running, at most a quarter of free memory.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache: Option<u64>,
    /// Touch the whole KV cache at start: no step pays for a first use, and it takes its memory at once.
    #[arg(long)]
    pub kv_populate: bool,
    /// Keep the pages of prompts and answers for those that begin alike.
    #[arg(long, value_enum, default_value = "on")]
    pub prefix_cache: OnOff,
    /// Longest prompt + answer in tokens; default: what the model can hold.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,
    /// Requests computed at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_running: u32,
    /// Requests that wait at most; more are refused with 429.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub max_queued: u32,
    /// A request's whole time; the header x-kvserve-timeout-ms may lower it.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub request_timeout: Duration,
    /// CPUs of the shards, one shard each (default: one shard, unpinned CPU 0).
    #[arg(long, value_name = "LIST", value_parser = parse_cores_arg)]
    pub cores: Option<CoreList>,
    /// CPUs of the engine threads (default: one thread on each CPU).
    #[arg(long, value_name = "LIST", value_parser = parse_cores_arg)]
    pub engine_cores: Option<CoreList>,
    /// Poll completions without sleeping while transfers are in flight.
    #[arg(long)]
    pub spin: bool,
    /// How log lines look.
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Allow a bind to another address than loopback without an API key.
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// The model's name in the API (default: as given, without folder and ending).
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// How many nodes share this machine's memory (set by `up`, which also prints the summary).
    #[arg(long, value_name = "N", hide = true)]
    pub share_memory_with: Option<u32>,
    /// Which way pages may take between nodes.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: TransportArg,
    /// The RDMA device to use (default: the one nearest to the node's memory).
    #[arg(long, value_name = "NAME")]
    pub rdma_device: Option<String>,
    /// How much of each moved page is checked: off, sampled or full. Equal on all nodes.
    #[arg(long, value_name = "MODE", default_value_t = ChecksumMode::Full)]
    pub checksums: ChecksumMode,
    /// Life of a lease without a renewal, for tests of its expiry; five renewals fit into it.
    #[arg(long, value_name = "TIME", hide = true, value_parser = parse_duration)]
    pub lease_ttl: Option<Duration>,
    /// Faults to inject, e.g. completion=lose@0.1 (loopback only).
    #[arg(long, value_name = "SPEC")]
    pub chaos: Option<ChaosSpec>,
}

/// CPU numbers, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreList(pub Vec<usize>);

fn parse_cores_arg(text: &str) -> Result<CoreList, String> {
    parse_cores(text).map(CoreList)
}

/// Flags of a node that belongs to a cluster.
#[derive(Debug, Clone, Default, Args)]
pub struct JoinArgs {
    /// The proxy's peer address.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub join: Option<SocketAddr>,
    /// Where peers reach this node.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub peer_listen: Option<SocketAddr>,
    /// The host name or address that others reach this node by (default: the bound address).
    #[arg(long, value_name = "HOST")]
    pub advertise: Option<String>,
    /// This node's name; unique in the cluster, kept over restarts.
    #[arg(long, value_name = "NAME")]
    pub node_id: Option<String>,
    /// File with the cluster's secret key (32 bytes as 64 hex digits).
    #[arg(long, value_name = "FILE")]
    pub peer_key_file: Option<PathBuf>,
}

/// `serve`, `prefill`, `decode`.
#[derive(Debug, Clone, Args)]
pub struct NodeCommand {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArg,
    /// Flags of every serving process.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Flags of a cluster's node.
    #[command(flatten)]
    pub join: JoinArgs,
}

/// `proxy`.
#[derive(Debug, Clone, Args)]
pub struct ProxyArgs {
    /// Where the API listens.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000", value_parser = parse_address)]
    pub listen: SocketAddr,
    /// Where nodes register.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7000", value_parser = parse_address)]
    pub peer_listen: SocketAddr,
    /// Where /debug and /admin listen (default: the API port while it is loopback).
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub admin_listen: Option<SocketAddr>,
    /// Where the sentinel answers /health by itself.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub health_listen: Option<SocketAddr>,
    /// This proxy's name.
    #[arg(long, value_name = "NAME", default_value = "proxy")]
    pub node_id: String,
    /// File with the cluster's secret key (32 bytes as 64 hex digits).
    #[arg(long, value_name = "FILE")]
    pub peer_key_file: Option<PathBuf>,
    /// A request's whole time; the header x-kvserve-timeout-ms may lower it.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub request_timeout: Duration,
    /// CPUs of the shards, one shard each.
    #[arg(long, value_name = "LIST", value_parser = parse_cores_arg)]
    pub cores: Option<CoreList>,
    /// How log lines look.
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Allow a bind to another address than loopback without an API key.
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// Say only what is not as it should be (set by `up`, which prints the summary).
    #[arg(long, hide = true)]
    pub quiet: bool,
}

/// `up`.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArg,
    /// Prefill nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub prefill: u32,
    /// Decode nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub decode: u32,
    /// Port of the proxy's API on loopback.
    #[arg(long, value_name = "PORT", default_value_t = 8000, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Flags of every node.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `fetch`.
#[derive(Debug, Clone, Args)]
pub struct FetchArgs {
    /// Catalogue name.
    #[arg(default_value = "smollm2-135m")]
    pub name: String,
    /// Take it from this file or URL (checked against the same hash).
    #[arg(long, value_name = "FILE|URL")]
    pub from: Option<String>,
}
