//! How bytes of pages move. One face for shared memory, TCP, RDMA and the simulator.
//!
//! A transport is a completion source that reads pages of a peer into pages of ours (PROTOCOL
//! section 5: pull). It owns its channels and never decides when a page may be used again: that
//! is the completion slab's and the ledger's business.
//!
//! | file | what |
//! |---|---|
//! | `tcp/` | data connections: the decode node's [`tcp::TcpTransport`], the prefill node's [`tcp::TcpReadServer`] |
//! | `shm/` | [`shm::ShmTransport`]: copies out of the pools of peers on this host |
//! | `rdma/` | [`rdma::RdmaTransport`]: READs by the card out of peers' pools, and into ours |
//! | `places.rs` | where leased pages lie, for the two transports that read by themselves |
//! | `sim/` | the simulator's network card: real bytes, virtual time, ownership asserted at touch |
//! | `chaos.rs` | faults on purpose, between any transport's `poll` and the slab |
//! | `sys.rs` | epoll, timerfd, readv, sendmsg; with `shm/sys.rs` and `rdma/verbs/` the only `libc` calls of this folder |

pub mod chaos;
pub mod places;
pub mod rdma;
pub mod shm;
pub mod sim;
mod sys;
pub mod tcp;

use crate::pool::PageId;
use kvserve_runtime::{ChannelId, CompletionSource, Nanos, WorkId};

/// Codes of failed posts and completions. Below [`code::LOCAL`]: the peer's own refusal code,
/// as its lease table gave it. From there on: what this side's transport found.
pub mod code {
    /// Added to an errno by the transport of this side; refusal codes of peers stay below.
    pub const LOCAL: u32 = 0x1_0000;
    /// The channel is unknown or its connection is gone.
    pub const NOT_CONNECTED: u32 = LOCAL | libc::ENOTCONN as u32;
    /// As many reads as a channel takes are on their way; post again after a completion.
    pub const BUSY: u32 = LOCAL | libc::EAGAIN as u32;
    /// The read names no page, or more bytes than one read may carry.
    pub const BAD_READ: u32 = LOCAL | libc::EMSGSIZE as u32;
    /// The caller abandoned the read; its pages are quiet.
    pub const ABANDONED: u32 = LOCAL | libc::ECANCELED as u32;
    /// The peer closed the connection.
    pub const PEER_CLOSED: u32 = LOCAL | libc::ECONNRESET as u32;
    /// The peer sent what the protocol does not allow.
    pub const PROTOCOL: u32 = LOCAL | libc::EPROTO as u32;
    /// The connection stood still with abandoned reads on it (PROTOCOL E3).
    pub const STOOD_STILL: u32 = LOCAL | libc::ETIMEDOUT as u32;
    /// The page was handed out for something else before or while it was copied (PROTOCOL X2).
    pub const GENERATION: u32 = LOCAL | 0x8001;
    /// Where these pages of the lease lie was not told, or the lease is over.
    pub const NO_PLACE: u32 = LOCAL | 0x8002;
    /// A completion that no work on its way can have given (PROTOCOL P3).
    pub const STRAY: u32 = LOCAL | 0x8003;
    /// Added to the status (below 256) of a failed RDMA completion.
    pub const VERBS: u32 = LOCAL | 0x9000;
    /// Added to the number (below 256) of the RDMA device's event that ended a channel.
    pub const VERBS_EVENT: u32 = LOCAL | 0x9100;
    /// The chaos hook made a good completion fail.
    pub const CHAOS: u32 = LOCAL | 0x8000;

    /// A short text for logs.
    pub fn describe(code: u32) -> String {
        match code {
            NOT_CONNECTED => "channel is not connected".into(),
            BUSY => "channel has no room for more reads".into(),
            BAD_READ => "read is empty or longer than a read may be".into(),
            ABANDONED => "abandoned by the caller".into(),
            PEER_CLOSED => "peer closed the data connection".into(),
            PROTOCOL => "peer broke the data protocol".into(),
            STOOD_STILL => "data connection stood still".into(),
            GENERATION => "page was reused while it was copied".into(),
            NO_PLACE => "pages of the lease are not known here".into(),
            CHAOS => "failed by the chaos hook".into(),
            STRAY => "a completion of work that was not on its way".into(),
            verbs if verbs & !0xFF == VERBS => {
                format!("RDMA read failed with status {}", verbs & 0xFF)
            }
            event if event & !0xFF == VERBS_EVENT => {
                format!("RDMA device event {} ended the connection", event & 0xFF)
            }
            local if local >= LOCAL => {
                std::io::Error::from_raw_os_error((local - LOCAL) as i32).to_string()
            }
            refused => format!("peer refused the read with code {refused}"),
        }
    }
}

/// One unit of work of a pull: a run of whole pages of one lease, read from the peer into pages
/// of ours. The transport may move it in any order; it completes when all of it is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The lease on the prefill side that holds the source pages (PROTOCOL L6).
    pub lease: u64,
    /// Its epoch.
    pub epoch: u32,
    /// First page of the run, counted within the lease.
    pub first: u32,
    /// Target pages in this node's pool; source page `first + i` lands in `into[i]`.
    pub into: Vec<PageId>,
}

/// A post that failed after some of its work had been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// How many reads, from the front, were posted; they complete like any other.
    pub posted: usize,
    /// The source's error code for the one that was not.
    pub code: u32,
}

/// Moves pages. Completions come out of [`CompletionSource::poll`], one for each read, in order
/// of position per channel. A channel that breaks says `Flushed` of the reads it had not done:
/// they may be posted again elsewhere once it is quiet (PROTOCOL E5).
pub trait Transport: CompletionSource {
    /// Posts `reads` on `channel` as positions `first, first + 1, ...`.
    ///
    /// # Errors
    /// [`Posted`] when the channel took only a part (back-pressure or failure).
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted>;

    /// The caller no longer wants the `count` reads from `first` on (its slot has ended). A
    /// transport that can makes their pages quiet at once; each still gives its completion, as
    /// [`code::ABANDONED`] and in order, unless it is already in place. Positions that have
    /// completed, or were never posted, are passed over. The default lets the reads run to
    /// their end, which is always right, only later.
    fn abandon(&mut self, first: WorkId, count: usize) {
        let (_, _) = (first, count);
    }

    /// When a byte of a page last moved on `channel`, on the clock that `poll` is given; zero if
    /// none ever did. A pull's stage limit is judged by it, to the tick (PROTOCOL R4).
    fn moved_at(&self, channel: ChannelId) -> Nanos;
}
