//! One link: a data connection or queue pair between a reader and the node it reads from.

use crate::pool::PageId;
use crate::transport::places::Place;
use kvserve_runtime::{ChannelId, Completed, Nanos, WorkId};
use std::collections::VecDeque;

/// Names a link; never reused within a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub usize);

/// What goes wrong with the next operation that ends on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpFault {
    /// It ends with this status although its bytes are in place.
    Error(u32),
    /// It and the one after it end with this status.
    Errors(u32),
    /// Its bytes are in place and its completion never comes.
    Lost,
    /// Its completion comes twice.
    Duplicate,
    /// A completion of a position never posted comes as well.
    Stray,
    /// One byte of its last page is bent.
    Corrupt,
    /// The second half of its last page is not written.
    Truncate,
    /// The request names another lease than the one posted.
    StaleLease,
    /// The request names another epoch.
    StaleEpoch,
    /// The request names another incarnation.
    StaleIncarnation,
}

/// How a killed one-sided link comes to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// After so many more steps.
    After(u32),
    /// Never: the flush does not come.
    Never,
    /// The flush does not come and destroying fails.
    DestroyFails,
}

/// Who moves the bytes of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The other side's software answers each read, as over TCP.
    Served,
    /// The card reads the other side's memory until the link is destroyed, as over RDMA.
    OneSided,
    /// The reader copies out of a map that nobody can take away, as over shared memory
    /// (PROTOCOL X2): only a page's generation tells that it was used for something else.
    Mapped,
}

/// One read under way.
pub(super) struct Op {
    pub work: WorkId,
    pub tag: u64,
    pub lease: u64,
    pub epoch: u32,
    pub first: u32,
    pub into: Vec<PageId>,
    /// Nobody wants it any more: its bytes go to scrap.
    pub abandoned: bool,
    pub placed: usize,
    /// The first half of the next page is in place, on a mapped link.
    pub half: bool,
    /// A page of it was used for something else before its copy was whole.
    pub reused: Option<PageId>,
    /// The same with their generations at the grant, if they are read without the server.
    pub places: Vec<Place>,
    /// Source pages, once known; the server's guard on them, if it serves.
    pub source: Option<(Vec<PageId>, Option<u64>)>,
}

pub(super) struct Link {
    pub reader: usize,
    pub channel: ChannelId,
    pub server: usize,
    pub server_incarnation: u64,
    pub session: u64,
    pub kind: LinkKind,
    pub ops: VecDeque<Op>,
    pub done: VecDeque<Completed>,
    pub killed: bool,
    pub quiet: bool,
    /// The server's side of it is gone.
    pub destroyed: bool,
    /// The reader is never told that the server's side is gone.
    pub silent: bool,
    /// Nothing moves until it is cleared.
    pub stalled: bool,
    pub fault: Option<OpFault>,
    pub flush: Flush,
    pub bytes_moved: u64,
    /// What the reader saw of them at its last poll, and when it last saw more.
    pub bytes_seen: u64,
    pub moved_at: Nanos,
    pub posts_highest: u64,
    /// So many half pages are copied on a mapped link after its owner has gone.
    pub notices_in: u32,
}
