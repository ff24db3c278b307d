//! The prefill node's side: answers reads of leased pages.
//!
//! Nothing that arrives here can do more than end its own connection: requests have one fixed
//! layout, queues are bounded, pages come from the lease table and never from the request.

use super::served::{Close, ServeTurn, Served};
use crate::pool::{PageId, PoolMemory};
use crate::transport::sys::{Epoll, Interest, IoVecs, Socket, Timer};
use kvserve_runtime::{ChannelId, Completed, CompletionSource, GuardToken, Nanos, Reap};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Data connections of a shard at most: 256 decode nodes of 4 cores.
const CONNECTIONS_MAX: usize = 1024;

/// Bytes sent in one turn over all connections: 1 MiB at some 5 GB/s is 0.2 ms of a shard.
const TURN_BYTES_MAX: usize = 1 << 20;

/// The epoll's token of the timer; connections have their place, below [`CONNECTIONS_MAX`].
const TIMER_TOKEN: u64 = u64::MAX;

/// One data connection of a server; never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Who says which pages a read means: the lease table.
///
/// It is called from inside the server's `poll` and must not call back into the server.
pub trait ReadAuthority {
    /// Checks one read against its lease (PROTOCOL L4, L6) and appends its `count` pages, from
    /// page `first` of the lease on, to `out`. The token names them until
    /// [`ReadAuthority::served`].
    ///
    /// # Errors
    /// A refusal code, above 0 and below [`code::LOCAL`](crate::transport::code::LOCAL), that
    /// the reader gets as its completion's error.
    // One argument for each field of the request, as the reader's node sent them.
    #[allow(clippy::too_many_arguments)]
    fn resolve(
        &mut self,
        connection: ConnectionId,
        incarnation: u64,
        lease: u64,
        epoch: u32,
        first: u32,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<GuardToken, u32>;

    /// The kernel has taken the read's bytes, or its connection was closed: nothing of the read
    /// touches the pages any more.
    fn served(&mut self, guards: GuardToken);

    /// A connection is over (closed by the peer, by a violation, or standing still). Not called
    /// for those that [`TcpReadServer::close_connection`] ends.
    fn closed(&mut self, connection: ConnectionId) {
        let _: ConnectionId = connection;
    }
}

/// Settings of a [`TcpReadServer`].
#[derive(Clone, Copy, Debug)]
pub struct ServerConfig {
    /// `SO_SNDBUF` and `SO_RCVBUF` of a data connection, in bytes; 0 leaves them to the kernel's
    /// own tuning.
    pub buffer_bytes: usize,
    /// How long a reader may take no byte of an answer before its connection is closed: longer
    /// than a reader waits for a byte (PROTOCOL R4: 1 s), shorter than a dead session (S3: 3 s).
    pub write_stall_max: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            buffer_bytes: 0,
            write_stall_max: Duration::from_secs(2),
        }
    }
}

/// What a [`TcpReadServer`] has counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Connections taken over.
    pub connections: u64,
    /// Well-formed requests that came in.
    pub requests: u64,
    /// Reads whose bytes the kernel took whole.
    pub reads: u64,
    /// Pages of those reads.
    pub pages: u64,
    /// Bytes sent, answer heads included.
    pub bytes: u64,
    /// Reads refused by the authority.
    pub refused: u64,
    /// Connections that the peer closed or that broke.
    pub closed_by_peer: u64,
    /// Connections closed because of garbage, an impossible read or too many of them.
    pub violations: u64,
    /// Connections closed because the peer took no bytes.
    pub stalled: u64,
}

/// Serves reads of leased pages over data connections.
pub struct TcpReadServer {
    pool: Arc<PoolMemory>,
    page_bytes: usize,
    config: ServerConfig,
    authority: Rc<RefCell<dyn ReadAuthority>>,
    epoll: Rc<Epoll>,
    timer: Timer,
    /// By place; the epoll's token is the place.
    connections: Vec<Option<Box<Served>>>,
    /// Places that have something to do, in the order in which they get their turn; each at
    /// most once.
    busy: VecDeque<usize>,
    next_id: u64,
    list: IoVecs,
    counters: ServerCounters,
}

impl TcpReadServer {
    /// A server without connections for pages of `pool`, `page_bytes` (the layout's page bytes)
    /// each.
    ///
    /// # Errors
    /// When the kernel gives no epoll or timer descriptor.
    pub fn new(
        pool: Arc<PoolMemory>,
        page_bytes: usize,
        authority: Rc<RefCell<dyn ReadAuthority>>,
        config: ServerConfig,
    ) -> io::Result<Self> {
        assert!(
            page_bytes > 0 && page_bytes <= pool.page_stride(),
            "pages of {page_bytes} bytes in a stride of {}",
            pool.page_stride()
        );
        let epoll = Rc::new(Epoll::new()?);
        let timer = Timer::new()?;
        epoll.set(timer.as_raw_fd(), Interest::Read, TIMER_TOKEN)?;
        Ok(TcpReadServer {
            pool,
            page_bytes,
            config,
            authority,
            epoll,
            timer,
            connections: Vec::new(),
            busy: VecDeque::new(),
            next_id: 1,
            list: IoVecs::new(),
            counters: ServerCounters::default(),
        })
    }

    /// Takes over an authenticated data connection. The id is what the authority is asked with,
    /// from the next poll on: tell it which session the id belongs to before that.
    ///
    /// # Errors
    /// `QuotaExceeded` when there are 1,024 connections; or what the kernel says of the socket.
    pub fn add_connection(&mut self, stream: TcpStream) -> io::Result<ConnectionId> {
        let free = self.connections.iter().position(Option::is_none);
        let place = free.unwrap_or(self.connections.len());
        if place >= CONNECTIONS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!("{CONNECTIONS_MAX} data connections on one shard; add prefill nodes"),
            ));
        }
        let buffer_bytes = self.config.buffer_bytes;
        let socket = Socket::new(stream, &self.epoll, place as u64, buffer_bytes)?;
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        let served = Some(Box::new(Served::new(id, socket)));
        if place == self.connections.len() {
            self.connections.push(served);
        } else {
            self.connections[place] = served;
        }
        self.counters.connections += 1;
        Ok(id)
    }

    /// Closes a connection at once, e.g. because its session is dead (PROTOCOL S3): guards of its
    /// answer are given back before this returns. Unknown ids are passed over.
    pub fn close_connection(&mut self, id: ConnectionId) {
        let place = self
            .connections
            .iter()
            .position(|entry| entry.as_ref().is_some_and(|served| served.id() == id));
        if let Some(mut served) = place.and_then(|place| self.connections[place].take()) {
            served.give_back(&mut *self.authority.borrow_mut());
        }
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.connections.iter().flatten().count()
    }

    /// What was counted since the start.
    pub fn counters(&self) -> ServerCounters {
        self.counters
    }

    /// Puts every connection with something to read in the queue of those that get a turn.
    fn look(&mut self) {
        let (connections, busy) = (&mut self.connections, &mut self.busy);
        self.epoll.look(|token| {
            let entry = connections.get_mut(token as usize);
            // The timer has no place: it only had to wake the shard.
            let Some(served) = entry.and_then(Option::as_deref_mut) else {
                return;
            };
            served.readable = true;
            // With work in hand it is in the queue already, or `turn` has put it back.
            if !busy.contains(&(token as usize)) {
                busy.push_back(token as usize);
            }
        });
    }

    fn turn(&mut self, now: Nanos) {
        let mut budget = TURN_BYTES_MAX;
        let mut authority = self.authority.borrow_mut();
        for _ in 0..self.busy.len() {
            let Some(place) = self.busy.pop_front() else {
                return;
            };
            // Closed from outside since it was queued.
            let Some(served) = self.connections[place].as_deref_mut() else {
                continue;
            };
            let ended = served.turn(&mut ServeTurn {
                now,
                pool: &self.pool,
                page_bytes: self.page_bytes,
                list: &mut self.list,
                budget: &mut budget,
                authority: &mut *authority,
                counters: &mut self.counters,
                config: self.config,
            });
            match ended {
                Ok(()) if served.unanswered() > 0 => self.busy.push_back(place),
                Ok(()) => {}
                Err(close) => {
                    let counter = match close {
                        Close::Gone => &mut self.counters.closed_by_peer,
                        Close::Violation => &mut self.counters.violations,
                        Close::Stalled => &mut self.counters.stalled,
                    };
                    *counter += 1;
                    let id = served.id();
                    served.give_back(&mut *authority);
                    self.connections[place] = None;
                    authority.closed(id);
                }
            }
        }
    }
}

impl CompletionSource for TcpReadServer {
    /// Serves; hands out no completions, since a read is posted by the peer and not by a slot of
    /// this shard. Its guards and its time limit (PROTOCOL P6) are kept here.
    fn poll(&mut self, now: Nanos, _out: &mut Vec<Completed>) -> usize {
        if self.connections.is_empty() {
            return 0;
        }
        self.look();
        if !self.busy.is_empty() {
            self.turn(now);
        }
        0
    }

    fn arm(&mut self) -> Option<RawFd> {
        let mut wake: Option<Nanos> = None;
        for served in self.connections.iter_mut().flatten() {
            let mut at = served.stalls_at(&self.config);
            if served.arm().is_err() {
                // Out of kernel memory: be polled again at once rather than sleep on it.
                at = Some(Nanos(0));
            }
            if let Some(at) = at {
                wake = Some(wake.map_or(at, |wake| wake.min(at)));
            }
        }
        self.timer.set(wake);
        (self.connections() > 0).then(|| self.epoll.as_raw_fd())
    }

    /// Reads that came in and have not been answered whole.
    fn in_flight(&self) -> usize {
        let open = self.connections.iter().flatten();
        open.map(|served| served.unanswered()).sum()
    }

    /// A server has no channels of the slab.
    fn kill(&mut self, _channel: ChannelId) {}

    /// A server has no channels of the slab: nothing was posted on any.
    fn reap(&mut self, _channel: ChannelId) -> Reap {
        Reap::Quiet
    }
}

impl Drop for TcpReadServer {
    fn drop(&mut self) {
        let mut authority = self.authority.borrow_mut();
        for served in self.connections.iter_mut().flatten() {
            served.give_back(&mut *authority);
        }
    }
}
