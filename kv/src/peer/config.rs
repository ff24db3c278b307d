//! What a peer hub is given, and what can be seen of it.

use crate::credits::{CreditLimits, PeerCredits};
use crate::lease::LeaseLimits;
use crate::ledger::LedgerCell;
use crate::pool::{PageId, PoolMemory};
use crate::pull::{MigrationError, PullLimits};
use crate::session::frame::FEATURE_RDMA;
use crate::session::handshake::Refusal;
use crate::session::{LivenessLimits, LocalNode, PeerKey, RefuseReason, RequestId, Role, ShmOffer};
use crate::transport::chaos::ChaosHandle;
use crate::transport::rdma::RdmaConfig;
use crate::transport::rdma::verbs::Library;
use crate::{checksum::ChecksumMode, session::ServiceRefusal};
use kvserve_runtime::{Deadline, Nanos};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::serve::Publisher;

/// A node as its peers see it, and where it listens for them.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Name of the node, unique in the cluster, at most 255 bytes.
    pub node_id: String,
    /// See [`super::fresh_incarnation`].
    pub incarnation: u64,
    /// What it does.
    pub role: Role,
    /// The cluster's key.
    pub key: PeerKey,
    /// Where to accept peers; `None`: this node only dials.
    ///
    /// The caller must refuse an address beyond loopback unless the key was given explicitly.
    pub listen: Option<SocketAddr>,
    /// Which model, which weights; 0 for a proxy.
    pub fingerprint: u64,
    /// [`crate::KvLayout::hash`]; 0 for a proxy.
    pub layout_hash: u64,
    /// The layout's page bytes; 0 for a proxy.
    pub page_bytes: usize,
    /// Base URL of the node's API, at most 256 bytes.
    pub api_url: String,
    /// How much of a page a checksum covers. Both sides must agree.
    pub checksums: ChecksumMode,
    /// Which way pages may take.
    pub transport: TransportChoice,
    /// Settings of RDMA, where it is used.
    pub rdma: RdmaConfig,
    /// Times and bounds.
    pub limits: PeerLimits,
}

/// Which way pages may take between this node and its peers (PROTOCOL X1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TransportChoice {
    /// Shared memory with a peer on this host, RDMA with others, if a probe says so; else TCP.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP only.
    Tcp,
    /// RDMA only.
    Rdma,
}

impl TransportChoice {
    /// The name used on the command line.
    pub fn label(self) -> &'static str {
        match self {
            TransportChoice::Auto => "auto",
            TransportChoice::Shm => "shm",
            TransportChoice::Tcp => "tcp",
            TransportChoice::Rdma => "rdma",
        }
    }
}

impl PeerConfig {
    pub(super) fn local(&self, shm: ShmOffer, rdma: bool) -> LocalNode {
        LocalNode {
            node_id: self.node_id.clone(),
            incarnation: self.incarnation,
            role: self.role,
            fingerprint: self.fingerprint,
            layout_hash: self.layout_hash,
            page_bytes: self.page_bytes as u64,
            api_url: self.api_url.clone(),
            features: match self.checksums {
                ChecksumMode::Off => 0,
                ChecksumMode::Sampled => 1,
                ChecksumMode::Full => 2,
            } | if rdma { FEATURE_RDMA } else { 0 },
            shm,
        }
    }
}

/// Times and bounds of a hub; the defaults are PROTOCOL 9's.
#[derive(Clone, Copy, Debug)]
pub struct PeerLimits {
    /// Stage limits of a pull.
    pub pull: PullLimits,
    /// Reads in flight at once.
    pub credits: CreditLimits,
    /// Lease times and bounds.
    pub lease: LeaseLimits,
    /// Heartbeats.
    pub liveness: LivenessLimits,
    /// From connect to a session that is up.
    pub handshake: Duration,
    /// Handshakes in progress that others have begun; more connections are closed at once.
    pub half_open_max: usize,
    /// Sessions at once.
    pub sessions_max: usize,
    /// First and longest pause between two dials of an address; doubled each time, with a
    /// quarter of jitter.
    pub back_off: (Duration, Duration),
    /// Bytes waiting to be sent to one peer; more end the session as too slow. The longest
    /// prompt takes 512 KiB: eight of them.
    pub outbox_bytes_max: usize,
    /// Between two lists of live leases.
    pub renew: Duration,
    /// Pages that did not match their checksums before their way is out of use.
    pub mismatches_max: u32,
}

impl Default for PeerLimits {
    fn default() -> Self {
        PeerLimits {
            pull: PullLimits::default(),
            credits: CreditLimits::default(),
            lease: LeaseLimits::default(),
            liveness: LivenessLimits::default(),
            handshake: Duration::from_secs(2),
            half_open_max: 64,
            sessions_max: 1024,
            back_off: (Duration::from_millis(50), Duration::from_secs(2)),
            outbox_bytes_max: 4 << 20,
            renew: Duration::from_secs(2),
            mismatches_max: 2,
        }
    }
}

/// The parts of the node that a hub works with.
pub struct PeerParts {
    /// The pool whose pages are served and pulled into. A proxy has none.
    pub pool: Option<Arc<PoolMemory>>,
    /// The ledger of that pool; also the completion hub's keeper of guards.
    pub ledger: Option<Rc<LedgerCell>>,
    /// Computes prompts for peers, on nodes that do.
    pub prefill: Option<Rc<dyn PrefillService>>,
    /// The verbs library; `None`: the system's, if RDMA is wanted and it is there.
    pub verbs: Option<Library>,
    /// Faults on purpose.
    pub chaos: Option<ChaosHandle>,
    /// Who hears of peers.
    pub events: Rc<dyn PeerEvents>,
}

/// Hears of peers. Called on the hub's shard, never while anything of the hub is borrowed: it
/// may call back. It must not block.
pub trait PeerEvents {
    /// A session is up.
    fn up(&self, peer: PeerView);
    /// A session has ended. `Superseded` means that the peer knows a later start of *this*
    /// node's id if `by_peer`: this process should exit.
    fn down(&self, node_id: &str, reason: RefuseReason, by_peer: bool);
    /// A frame of the layer above.
    fn app(&self, node_id: &str, kind: u16, bytes: &[u8]);
    /// The way of pages pulled from a peer was chosen or has changed: `shm`, `rdma`, `tcp` or, when
    /// there is none (any more), an empty text; and why, if there is more to say.
    fn path(&self, node_id: &str, path: &'static str, reason: &str) {
        let _unused: (&str, &str, &str) = (node_id, path, reason);
    }
    /// A handshake failed; for the log. The address is the other end's.
    fn refused(&self, address: SocketAddr, refusal: &Refusal) {
        let _unused: (SocketAddr, &Refusal) = (address, refusal);
    }
}

/// A prompt that a peer wants computed.
#[derive(Clone, Debug)]
pub struct IncomingPrefill {
    /// The decode node.
    pub peer: String,
    /// Its request.
    pub request: RequestId,
    /// Which try.
    pub attempt: u32,
    /// Leading whole pages of the prompt that the peer holds: it pulls only those after them.
    /// As the peer says; the service refuses what cannot be.
    pub held_pages: u32,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Opaque bytes of the layer above (sampling parameters).
    pub payload: Vec<u8>,
    /// When the request's time is up.
    pub deadline: Deadline,
}

/// Computes prompts for peers.
pub trait PrefillService {
    /// Takes a prompt over, or refuses it at once. To take it: reserve all pages of the prompt,
    /// call [`Publisher::granted`] (now or soon), publish, and drop the publisher when it says
    /// that it is cancelled. No pages: `Busy` at once, never a silent queue (PROTOCOL L1).
    ///
    /// # Errors
    /// The refusal; the publisher given is void then.
    fn prefill(&self, ask: IncomingPrefill, publisher: Publisher) -> Result<(), ServiceRefusal>;
}

/// A prompt to be computed by a peer and pulled from it.
#[derive(Debug)]
pub struct PrefillAsk {
    /// The request, numbered by this node with its own incarnation.
    pub request: RequestId,
    /// Which try; starting a higher one cancels the lower ones.
    pub attempt: u32,
    /// Token ids, at most [`crate::session::frame::PROMPT_TOKENS_MAX`].
    pub prompt: Vec<u32>,
    /// Opaque bytes for the prefill node's layer above.
    pub payload: Vec<u8>,
    /// Leading whole pages of the prompt that this node holds in its prefix cache. The caller
    /// owns them (pins them) until the attempt has ended, and never names a page of an attempt
    /// that was not committed (PROTOCOL C2, R3).
    pub held_pages: u32,
    /// Target pages of the rest, in state Pulling; the hub's until they come back.
    pub into: Vec<PageId>,
    /// When the request's time is up.
    pub deadline: Deadline,
}

/// A prefill that could not even be asked for. The pages come back.
#[derive(Debug)]
pub struct PrefillError {
    /// The target pages of the ask.
    pub into: Vec<PageId>,
    /// What is missing.
    pub error: MigrationError,
}

/// Why an App frame was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// No session with that node is up.
    NoSession,
    /// More than [`crate::session::frame::APP_BYTES_MAX`] bytes.
    TooLong(usize),
    /// The peer reads too slowly; its session has ended.
    TooSlow,
}

/// How a peer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Being dialled; not up.
    Dialling,
    /// Frames come.
    Up,
    /// Heartbeats are missing.
    Suspect,
    /// The session is ending.
    Dead,
}

impl PeerState {
    /// A short stable label.
    pub fn label(self) -> &'static str {
        match self {
            PeerState::Dialling => "dialling",
            PeerState::Up => "up",
            PeerState::Suspect => "suspect",
            PeerState::Dead => "dead",
        }
    }
}

/// One peer.
#[derive(Clone, Debug)]
pub struct PeerView {
    /// Its id; empty while an address is dialled that was never reached.
    pub node_id: String,
    /// Its role, once known.
    pub role: Option<Role>,
    /// Its incarnation; 0 while not known.
    pub incarnation: u64,
    /// The other end of the control connection.
    pub address: SocketAddr,
    /// How it stands.
    pub state: PeerState,
    /// Base URL of its API.
    pub api_url: String,
    /// Since when it stands so (up), or has been dialled.
    pub since: Nanos,
    /// How pages move to or from it; empty when none do.
    pub path: &'static str,
    /// Whether a pull from it could start now.
    pub can_pull: bool,
    /// Migrations from it that are running.
    pub in_flight: usize,
    /// What its session has moved into this node.
    pub moved: PathCounters,
    /// What it has in flight against its allowance.
    pub credits: PeerCredits,
}

/// What one session has moved into this node; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Reads posted.
    pub reads: u64,
    /// Bytes of reads that were in place.
    pub bytes: u64,
    /// Reads posted again after the loss of their channel.
    pub reposts: u64,
    /// Pages that did not match their checksums.
    pub mismatches: u64,
    /// Times that its path was left for another.
    pub fallbacks: u64,
}

/// What the hub has counted; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    /// Sessions that came up.
    pub sessions_up: u64,
    /// Sessions that ended.
    pub sessions_down: u64,
    /// Handshakes that failed.
    pub handshakes_failed: u64,
    /// Connections closed at once: too many half-open.
    pub half_open_refused: u64,
    /// Frames sent and received.
    pub frames_sent: u64,
    /// Frames received.
    pub frames_received: u64,
    /// Frames of attempts, leases or incarnations that are not live: dropped.
    pub frames_stale: u64,
    /// Data connections that came up.
    pub data_connections: u64,
    /// Pools of peers that were mapped.
    pub pools_mapped: u64,
    /// Times that this node's pool was handed over.
    pub pools_given: u64,
    /// Requests for this node's pool that were refused.
    pub pools_refused: u64,
    /// Sessions that fell back from shared memory to TCP.
    pub path_fallbacks: u64,
    /// Queue pairs that came up to pull over, and those that peers read over.
    pub rdma_pairs: u64,
    /// See `rdma_pairs`.
    pub rdma_pairs_served: u64,
    /// Queue pairs to pull over that were lost (each is made anew).
    pub rdma_pairs_lost: u64,
    /// Pages that did not match their checksums.
    pub checksum_mismatches: u64,
    /// Ways taken out of use for that.
    pub paths_out_of_use: u64,
    /// Attempts begun.
    pub attempts: u64,
    /// Attempts that committed.
    pub attempts_committed: u64,
    /// Attempts that failed.
    pub attempts_failed: u64,
    /// Of these, attempts that a limit ended (a stage's or the request's).
    pub attempts_at_limit: u64,
    /// How late such a limit was noticed at most.
    pub limit_late_max: Duration,
    /// The longest time from an attempt's failure to its pages being quiet or quarantined.
    pub pages_back_max: Duration,
    /// Reads posted again after the loss of their channel (PROTOCOL E5).
    pub reads_reposted: u64,
}
