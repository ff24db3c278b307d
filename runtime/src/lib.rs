//! `kvserve-runtime`: an embeddable thread-per-core runtime on io_uring.
//!
//! **What it is.** Pinned shards (one executor a core), a completion slab whose futures
//! always end by a finite deadline, a poll loop over completion sources (sockets, engine
//! threads, RDMA queues, GPU counters), mailboxes between shards, HTTP on the same shards,
//! trace rings and stage histograms.
//!
//! **What it is not.** It knows no model, no token, no KV page, and it is not a general
//! purpose async runtime: nothing here is `Send` across shards except what says so.

pub mod bridge;
pub mod completion;
pub mod http;
pub mod lane;
pub mod limits;
pub mod mailbox;
pub mod net;
pub mod sentinel;
pub mod shard;
pub mod side_pool;
pub mod signals;
pub mod source;
pub mod stages;
pub mod testing;
pub mod time;
pub mod trace;

pub use completion::{
    BeginError, ChannelId, ChannelKind, Completed, Completer, Completion, CompletionStatus,
    EndReason, GuardKeeper, GuardToken, Hub, HubCounters, HubLimits, OneshotCompletion, OpenError,
    PostError, SlotId, SlotView, SourceId, WorkId,
};
pub use shard::poll_loop::PollPolicy;
pub use shard::{Shard, ShardConfig, ShardHandle};
pub use source::{CompletionSource, Reap};
pub use time::{Deadline, Nanos};
