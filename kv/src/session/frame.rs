//! What two nodes say to each other. Layouts are in `codec`; every length has a cap here.

use std::fmt;

/// Bytes of a frame after its length word. The largest legal frame is a `Prefill` of
/// [`PROMPT_TOKENS_MAX`] ids (512 KiB) with [`PAYLOAD_BYTES_MAX`] of payload and headers.
pub const FRAME_BYTES_MAX: usize = 640 * 1024;
/// Bytes of a frame before both sides have proven the key: an identity (255 + 32 + 20 bytes)
/// with room; what a stranger can make us hold is this, per half-open connection.
pub const HANDSHAKE_FRAME_BYTES_MAX: usize = 1024;
/// Token ids of one prompt.
pub const PROMPT_TOKENS_MAX: usize = 128 * 1024;
/// Opaque bytes of a `Prefill` (sampling parameters) or a `FirstToken`.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Opaque bytes of an `App` frame (cluster registration).
pub const APP_BYTES_MAX: usize = 256 * 1024;
/// Pages of one lease: the longest prompt at two tokens a page.
pub const LEASE_PAGES_MAX: usize = 64 * 1024;
/// Checksums one `Watermark` carries (64 KiB of them); more pages take more frames.
pub const CHECKSUMS_PER_FRAME_MAX: usize = 8 * 1024;
/// Leases one `Renew` lists; also the bound of leases a peer can hold.
pub const RENEW_LIST_MAX: usize = 4096;
/// Bytes of a node id.
pub const NODE_ID_BYTES_MAX: usize = 255;
/// Bytes of an API URL in `Hello`.
pub const API_URL_BYTES_MAX: usize = 256;
/// Bytes of the name of the socket at which a node hands its pool over.
pub const SHM_SOCKET_BYTES_MAX: usize = 96;
/// Places one `Places` frame carries (96 KiB of them); more pages take more frames.
pub const PLACES_PER_FRAME_MAX: usize = 8 * 1024;
/// Bytes of the text that explains a refusal.
pub const REASON_TEXT_BYTES_MAX: usize = 512;

/// Bits of `Hello::features` that must be equal on both sides.
pub const FEATURES_EQUAL: u64 = 0xFF;

/// Bit of `Hello::features`: the node's pool can be read by RDMA.
pub const FEATURE_RDMA: u64 = 1 << 8;

/// Queue pairs that one side of a session may ask for at most.
pub const RDMA_PAIRS_MAX: u8 = 8;

/// Bytes of an RDMA endpoint: this build's has 56, a later one may have more.
pub const RDMA_ENDPOINT_BYTES_MAX: usize = 256;

/// First protocol version this build speaks.
pub const PROTOCOL_MIN: u16 = 1;
/// Last protocol version this build speaks.
pub const PROTOCOL_MAX: u16 = 1;

/// What a node does (the numbers of `/nodes/status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Prefill and decode in one process.
    Hybrid = 1,
    /// Prefill for peers.
    Prefill = 2,
    /// Decode, pulling from prefill nodes.
    Decode = 3,
    /// Routes requests; holds no KV and no model.
    Proxy = 4,
}

impl Role {
    /// Reads the wire number.
    pub fn from_wire(number: u8) -> Option<Self> {
        match number {
            1 => Some(Role::Hybrid),
            2 => Some(Role::Prefill),
            3 => Some(Role::Decode),
            4 => Some(Role::Proxy),
            _ => None,
        }
    }

    /// Whether this node pulls pages.
    pub fn pulls(self) -> bool {
        match self {
            Role::Hybrid | Role::Decode => true,
            Role::Prefill | Role::Proxy => false,
        }
    }

    /// Whether this node computes prompts for peers.
    pub fn serves(self) -> bool {
        match self {
            Role::Hybrid | Role::Prefill => true,
            Role::Decode | Role::Proxy => false,
        }
    }

    /// Whether this node has a model and a KV layout to compare.
    pub fn has_pages(self) -> bool {
        self.pulls() || self.serves()
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Hybrid => "hybrid",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Proxy => "proxy",
        })
    }
}

/// A request, named by the decode node that owns it (PROTOCOL R1). The node itself is the one
/// at the other end of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// The decode node's incarnation.
    pub incarnation: u64,
    /// Its counter.
    pub counter: u64,
}

/// One try of a request's prefill and migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId {
    /// The request.
    pub request: RequestId,
    /// Number of the try; a higher one cancels the lower ones.
    pub attempt: u32,
}

/// Why a session was refused or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RefuseReason {
    /// The proof did not match: the keys differ.
    BadProof = 1,
    /// No protocol version in common.
    ProtocolRange = 2,
    /// The models differ.
    Fingerprint = 3,
    /// The KV layouts or kernel classes differ.
    Layout = 4,
    /// The page sizes differ.
    PageBytes = 5,
    /// A node dialled itself, or two nodes carry one id.
    SameNode = 6,
    /// A later start of the same node id is live.
    Superseded = 7,
    /// Another connection of the same pair is kept.
    Duplicate = 8,
    /// The handshake did not end in time.
    HandshakeTimeout = 9,
    /// A frame that has no place at this point.
    Violation = 10,
    /// The node is going down.
    ShuttingDown = 11,
    /// The peer reads too slowly: its outgoing queue is full.
    TooSlow = 12,
    /// No frame for the dead limit.
    Silent = 13,
    /// An expired lease was not fenced in time (PROTOCOL L3).
    FenceUnanswered = 14,
    /// The connection was closed or failed.
    Disconnected = 15,
    /// The dialler was told to forget the address.
    Forgotten = 16,
    /// Too many sessions.
    Full = 17,
    /// Settings that must be equal on both sides (the checksum mode) differ.
    Settings = 18,
    /// A channel to the peer could not be proven quiet: everything between the two is destroyed.
    ChannelStuck = 19,
}

impl RefuseReason {
    /// Reads the wire number.
    pub fn from_wire(number: u16) -> Option<Self> {
        Some(match number {
            1 => RefuseReason::BadProof,
            2 => RefuseReason::ProtocolRange,
            3 => RefuseReason::Fingerprint,
            4 => RefuseReason::Layout,
            5 => RefuseReason::PageBytes,
            6 => RefuseReason::SameNode,
            7 => RefuseReason::Superseded,
            8 => RefuseReason::Duplicate,
            9 => RefuseReason::HandshakeTimeout,
            10 => RefuseReason::Violation,
            11 => RefuseReason::ShuttingDown,
            12 => RefuseReason::TooSlow,
            13 => RefuseReason::Silent,
            14 => RefuseReason::FenceUnanswered,
            15 => RefuseReason::Disconnected,
            16 => RefuseReason::Forgotten,
            17 => RefuseReason::Full,
            18 => RefuseReason::Settings,
            19 => RefuseReason::ChannelStuck,
            _ => return None,
        })
    }

    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            RefuseReason::BadProof => "bad_proof",
            RefuseReason::ProtocolRange => "protocol_range",
            RefuseReason::Fingerprint => "fingerprint",
            RefuseReason::Layout => "layout",
            RefuseReason::PageBytes => "page_bytes",
            RefuseReason::SameNode => "same_node",
            RefuseReason::Superseded => "superseded",
            RefuseReason::Duplicate => "duplicate",
            RefuseReason::HandshakeTimeout => "handshake_timeout",
            RefuseReason::Violation => "violation",
            RefuseReason::ShuttingDown => "shutting_down",
            RefuseReason::TooSlow => "too_slow",
            RefuseReason::Silent => "silent",
            RefuseReason::FenceUnanswered => "fence_unanswered",
            RefuseReason::Disconnected => "disconnected",
            RefuseReason::Forgotten => "forgotten",
            RefuseReason::Full => "full",
            RefuseReason::Settings => "settings",
            RefuseReason::ChannelStuck => "channel_stuck",
        }
    }
}

/// Why a prefill node does not take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceRefusal {
    /// No pages or no place in the queue now; try again after this time.
    Busy {
        /// Milliseconds.
        retry_ms: u32,
    },
    /// The request itself cannot be served; the code is the layer above's.
    Invalid(u16),
    /// The node finishes what it has and takes nothing new.
    Draining,
}

/// Why a prefill node gave an attempt up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum AbortReason {
    /// The engine failed.
    Engine = 1,
    /// The request's time was up.
    Deadline = 2,
    /// The publisher was dropped without completing.
    Dropped = 3,
    /// The node is going down.
    Draining = 4,
    /// A later attempt of the request has come.
    LaterAttempt = 5,
    /// The lease expired.
    Expired = 6,
    /// The decode node cancelled it.
    Cancelled = 7,
}

impl AbortReason {
    /// Reads the wire number.
    pub fn from_wire(number: u16) -> Option<Self> {
        Some(match number {
            1 => AbortReason::Engine,
            2 => AbortReason::Deadline,
            3 => AbortReason::Dropped,
            4 => AbortReason::Draining,
            5 => AbortReason::LaterAttempt,
            6 => AbortReason::Expired,
            7 => AbortReason::Cancelled,
            _ => return None,
        })
    }
}

/// The answer to a COMMIT. Only `Ok` lets tokens out (PROTOCOL L5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CommitOutcome {
    /// This very grant was complete, unexpired and never fenced.
    Ok = 1,
    /// The lease is not known (any more).
    Unknown = 2,
    /// The prefill has not completed.
    NotComplete = 3,
    /// The lease expired or was fenced.
    Expired = 4,
    /// The prefill node gave it up.
    Aborted = 5,
    /// It was released before.
    Released = 6,
    /// Epoch, attempt, page count or incarnation are not this grant's.
    Mismatch = 7,
}

impl CommitOutcome {
    /// Reads the wire number.
    pub fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            1 => CommitOutcome::Ok,
            2 => CommitOutcome::Unknown,
            3 => CommitOutcome::NotComplete,
            4 => CommitOutcome::Expired,
            5 => CommitOutcome::Aborted,
            6 => CommitOutcome::Released,
            7 => CommitOutcome::Mismatch,
            _ => return None,
        })
    }
}

/// First words of each side: who it is and its nonce. Not secret, not trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// First protocol version spoken.
    pub protocol_min: u16,
    /// Last protocol version spoken.
    pub protocol_max: u16,
    /// 32 fresh random bytes.
    pub nonce: [u8; 32],
    /// The sender's id.
    pub node_id: String,
    /// The sender's incarnation.
    pub incarnation: u64,
    /// The sender's role.
    pub role: Role,
}

/// What must match before two nodes exchange pages (PROTOCOL S2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The low byte must be equal on both sides (the checksum mode); the other bits are
    /// optional features, unknown ones are ignored.
    pub features: u64,
    /// Which model, which weights.
    pub fingerprint: u64,
    /// [`crate::KvLayout::hash`].
    pub layout_hash: u64,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Most pages a lease of this node may have.
    pub lease_pages_max: u32,
    /// Base URL of the node's API, for the cluster layer; empty when it has none.
    pub api_url: String,
    /// Whether and where a peer on this host may map the node's pool.
    pub shm: ShmOffer,
}

/// How a peer on the same host gets at a node's pool (PROTOCOL X1, X2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShmOffer {
    /// Which boot of which machine the node runs in; zeros when it cannot be told.
    pub boot_id: [u8; 16],
    /// Abstract name of the Unix socket at which the pool is handed over; empty: it is not.
    pub socket: String,
    /// The nonce in the pool's head, which a map of the right pool shows.
    pub nonce: [u8; 32],
}

/// First frame of a data connection (PROTOCOL L6): which session it belongs to, and the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataOpen {
    /// Incarnation of the node that opens.
    pub opener: u64,
    /// Incarnation of the node it opens to.
    pub target: u64,
    /// 0: the session's dialler pulls over it. 1: the acceptor does. 2 and 3: the same for the
    /// hand-over of a pool.
    pub lane: u16,
    /// Grows with each data connection of the session, so that a token serves once.
    pub count: u64,
    /// HMAC over the above under the session's data key.
    pub token: [u8; 32],
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields carry the names of PROTOCOL 3 to 5
pub enum Frame {
    /// Handshake, plain.
    Challenge(Challenge),
    /// Handshake, plain.
    Proof([u8; 32]),
    /// The session does not come about, or ends; plain before the proofs, sealed after.
    Refused { reason: RefuseReason, text: String },
    /// Handshake, sealed.
    Hello(Hello),
    /// Handshake, sealed: the sender has checked the other's `Hello`.
    Welcome,
    /// Opens a data connection; plain, carries its own proof.
    DataOpen(DataOpen),
    /// Answers it; plain, carries its own proof.
    DataAccepted([u8; 32]),

    /// I am alive.
    Heartbeat,
    /// Decode asks for a prompt to be computed.
    Prefill {
        id: AttemptId,
        left_ns: u64,
        held_pages: u32,
        prompt: Vec<u32>,
        payload: Vec<u8>,
    },
    /// Pages for the whole prompt are reserved under this lease.
    Granted {
        id: AttemptId,
        lease: u64,
        epoch: u32,
        pages: u32,
    },
    /// Where pages `first ..` of the lease lie in the sender's pool, and their generations; sent
    /// after `Granted` to a peer that has mapped the pool.
    Places {
        id: AttemptId,
        lease: u64,
        first: u32,
        places: Vec<(u32, u64)>,
    },
    /// Asks for a queue pair to read the receiver's pool over, in place of the one that was
    /// asked for before under this number (of at most [`RDMA_PAIRS_MAX`]).
    RdmaAsk {
        pair: u8,
        serial: u32,
        endpoint: Vec<u8>,
    },
    /// Answers it; an empty endpoint is a refusal, and `text` says why.
    RdmaAnswer {
        pair: u8,
        serial: u32,
        endpoint: Vec<u8>,
        text: String,
    },
    /// Not now.
    Busy { id: AttemptId, retry_ms: u32 },
    /// Not at all.
    PrefillRefused {
        id: AttemptId,
        refusal: RefusedKind,
        code: u16,
    },
    /// The attempt waits in the engine's queue (a sign of life, PROTOCOL R4).
    Queued { id: AttemptId, ahead: u32 },
    /// Pages `first .. first + checksums.len()` are ready to be read.
    Watermark {
        id: AttemptId,
        lease: u64,
        first: u32,
        checksums: Vec<u64>,
    },
    /// The first token, opaque.
    FirstToken { id: AttemptId, payload: Vec<u8> },
    /// All pages are ready, the tail included; `checksums` are of the pages from `first` on.
    Complete {
        id: AttemptId,
        lease: u64,
        pages: u32,
        tail_tokens: u32,
        first: u32,
        checksums: Vec<u64>,
    },
    /// The prefill node gives the attempt up; the lease's epoch has moved.
    Aborted { id: AttemptId, reason: AbortReason },
    /// Everything is in and checked; also the release.
    Commit {
        id: AttemptId,
        grantor: u64,
        lease: u64,
        epoch: u32,
        pages: u32,
    },
    /// Answer to `Commit`.
    CommitAnswer {
        id: AttemptId,
        lease: u64,
        outcome: CommitOutcome,
    },
    /// No post of the decode node names the lease any more.
    Release {
        id: AttemptId,
        lease: u64,
        epoch: u32,
    },
    /// Answer to `Release`.
    ReleaseAnswer { id: AttemptId, lease: u64 },
    /// Stop computing for this attempt; the pages wait for `Release`.
    Cancel { id: AttemptId },
    /// All live leases of the sender, and the highest grant it has seen.
    Renew {
        grant_highest: u64,
        live: Vec<(AttemptId, u64)>,
    },
    /// Does any post of yours name this lease?
    FenceQuery { id: AttemptId, lease: u64 },
    /// None does, and none will.
    FenceAnswer { id: AttemptId, lease: u64 },
    /// A frame of the layer above.
    App { kind: u16, bytes: Vec<u8> },
    /// The sender ends the session.
    Bye { reason: RefuseReason },
}

/// The two refusals of a `Prefill` that retrying on the same node does not cure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RefusedKind {
    /// See [`ServiceRefusal::Invalid`].
    Invalid = 1,
    /// See [`ServiceRefusal::Draining`].
    Draining = 2,
}
