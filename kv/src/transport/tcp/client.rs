//! The decode node's side: a [`Transport`] over data connections.

use super::channel::{Channel, Link, Turn};
use super::wire::pages_per_read_max;
use crate::pool::PoolMemory;
use crate::transport::sys::{Epoll, Interest, IoVecs, Socket, Timer};
use crate::transport::{Posted, Read, Transport, code};
use kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;
use kvserve_runtime::{ChannelId, Completed, CompletionSource, Nanos, Reap, WorkId};
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Bytes moved in one turn over all channels: 1 MiB at some 5 GB/s is 0.2 ms of a shard, well
/// below the 1 ms preempt timer.
const TURN_BYTES_MAX: usize = 1 << 20;

/// Bytes of abandoned reads thrown away per call: a quarter of a read.
const SCRAP_BYTES: usize = 256 << 10;

/// While reads are on their way their sockets are tried directly; the others are looked at once
/// in so many turns.
const LOOK_EVERY_TURNS: u64 = 16;

/// The epoll's token of the timer; channels have their index, below 4,096.
const TIMER_TOKEN: u64 = u64::MAX;

/// Settings of a [`TcpTransport`].
#[derive(Clone, Copy, Debug)]
pub struct TcpConfig {
    /// `SO_SNDBUF` and `SO_RCVBUF` of a data connection, in bytes; 0 leaves them to the kernel's
    /// own tuning.
    pub buffer_bytes: usize,
    /// How long a connection that owes bytes of abandoned reads may stand still before it is
    /// given up (PROTOCOL E3: 20 ms).
    pub still_max: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            buffer_bytes: 0,
            still_max: Duration::from_millis(20),
        }
    }
}

/// How a channel stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelState {
    /// It takes reads.
    Open,
    /// Its connection is over with this code; it takes no reads. Kill and reap it, then open
    /// another.
    Failed(u32),
    /// It was killed.
    Killed,
}

/// What a [`TcpTransport`] has counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounters {
    /// Reads posted.
    pub reads: u64,
    /// Reads abandoned.
    pub abandoned: u64,
    /// Bytes received, answer heads included.
    pub bytes: u64,
    /// Of those, bytes of abandoned reads.
    pub scrap_bytes: u64,
    /// Connections that failed by themselves.
    pub channels_failed: u64,
}

/// Reads pages of peers over TCP data connections into this node's pool.
///
/// A read is one run of a lease; the caller merges runs up to [`pages_per_read_max`].
pub struct TcpTransport {
    pool: Arc<PoolMemory>,
    page_bytes: usize,
    config: TcpConfig,
    epoll: Rc<Epoll>,
    timer: Timer,
    /// By channel index.
    channels: Vec<Option<Box<Channel>>>,
    /// Indices of the channels there are.
    live: Vec<u16>,
    /// Where in `live` the next turn starts, so that no channel always comes first.
    start: usize,
    turns: u64,
    /// The shard waits on the epoll, so what it found must be looked at.
    armed: bool,
    done: VecDeque<Completed>,
    list: IoVecs,
    scrap: Box<[u8]>,
    counters: TcpCounters,
}

impl TcpTransport {
    /// A transport without channels whose reads land in `pool`, `page_bytes` (the layout's page
    /// bytes, at most the pool's stride) a page.
    ///
    /// # Errors
    /// When the kernel gives no epoll or timer descriptor.
    pub fn new(pool: Arc<PoolMemory>, page_bytes: usize, config: TcpConfig) -> io::Result<Self> {
        assert!(
            page_bytes > 0 && page_bytes <= pool.page_stride(),
            "pages of {page_bytes} bytes in a stride of {}",
            pool.page_stride()
        );
        let epoll = Rc::new(Epoll::new()?);
        let timer = Timer::new()?;
        epoll.set(timer.as_raw_fd(), Interest::Read, TIMER_TOKEN)?;
        Ok(TcpTransport {
            pool,
            page_bytes,
            config,
            epoll,
            timer,
            channels: Vec::new(),
            live: Vec::new(),
            start: 0,
            turns: 0,
            armed: false,
            done: VecDeque::new(),
            list: IoVecs::new(),
            scrap: vec![0; SCRAP_BYTES].into(),
            counters: TcpCounters::default(),
        })
    }

    /// Takes over an authenticated data connection as `channel`. `incarnation` is that of the
    /// peer, which grants the leases; it goes into every request (PROTOCOL L6).
    ///
    /// # Errors
    /// `AlreadyExists` when the channel has a connection that was not reaped; or what the kernel
    /// says of the socket.
    pub fn add_channel(
        &mut self,
        channel: ChannelId,
        stream: TcpStream,
        incarnation: u64,
    ) -> io::Result<()> {
        let index = channel.index as usize;
        if self.channels.len() <= index {
            self.channels.resize_with(index + 1, || None);
        }
        if self.channels[index].is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("channel {index} already has a data connection; kill and reap it first"),
            ));
        }
        let buffer_bytes = self.config.buffer_bytes;
        let socket = Socket::new(stream, &self.epoll, index as u64, buffer_bytes)?;
        self.channels[index] = Some(Box::new(Channel::new(channel, socket, incarnation)));
        self.live.push(channel.index);
        Ok(())
    }

    /// How a channel stands; `None` when it has no connection.
    pub fn channel_state(&self, channel: ChannelId) -> Option<ChannelState> {
        self.channel(channel).map(|channel| match channel.link() {
            Link::Open(_) => ChannelState::Open,
            Link::Failed(code) => ChannelState::Failed(*code),
            Link::Killed => ChannelState::Killed,
        })
    }

    /// How many reads can be posted on a channel now.
    pub fn room(&self, channel: ChannelId) -> usize {
        self.channel(channel).map_or(0, Channel::room)
    }

    /// Bytes received on a channel since it was added: two looks tell whether it moves.
    pub fn bytes_received(&self, channel: ChannelId) -> u64 {
        self.channel(channel).map_or(0, |channel| channel.bytes)
    }

    /// The most pages that one read may name.
    pub fn pages_per_read_max(&self) -> usize {
        pages_per_read_max(self.page_bytes)
    }

    /// What was counted since the start.
    pub fn counters(&self) -> TcpCounters {
        let mut counters = self.counters;
        for channel in self.channels.iter().flatten() {
            counters.bytes += channel.bytes;
            counters.scrap_bytes += channel.scrap_bytes;
            counters.channels_failed += u64::from(matches!(channel.link(), Link::Failed(_)));
        }
        counters
    }

    fn channel(&self, id: ChannelId) -> Option<&Channel> {
        let channel = self.channels.get(id.index as usize)?.as_deref()?;
        (channel.id() == id).then_some(channel)
    }

    fn channel_mut(&mut self, id: ChannelId) -> Option<&mut Channel> {
        let channel = self.channels.get_mut(id.index as usize)?.as_deref_mut()?;
        (channel.id() == id).then_some(channel)
    }

    /// Marks the channels that the epoll says are ready.
    fn look(&mut self) {
        let channels = &mut self.channels;
        self.epoll.look(|token| {
            let entry = channels.get_mut(token as usize);
            // The timer has no channel: it only had to wake the shard.
            if let Some(channel) = entry.and_then(Option::as_deref_mut) {
                channel.ready = true;
            }
        });
    }

    fn turn(&mut self, now: Nanos) {
        let mut budget = TURN_BYTES_MAX;
        let count = self.live.len();
        for step in 0..count {
            let index = self.live[(self.start + step) % count];
            let Some(channel) = self.channels[index as usize].as_deref_mut() else {
                continue;
            };
            if channel.expects() || channel.ready || channel.wants_write() {
                channel.turn(&mut Turn {
                    now,
                    pool: &self.pool,
                    page_bytes: self.page_bytes,
                    list: &mut self.list,
                    scrap: &mut self.scrap,
                    budget: &mut budget,
                    done: &mut self.done,
                    still_max: self.config.still_max,
                });
            }
        }
        self.start = if count == 0 {
            0
        } else {
            (self.start + 1) % count
        };
    }
}

impl Transport for TcpTransport {
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted> {
        debug_assert_eq!(first.channel(), channel);
        let (page_bytes, pages_max) = (self.page_bytes, self.pages_per_read_max());
        let Some(target) = self.channel_mut(channel) else {
            return Err(Posted {
                posted: 0,
                code: code::NOT_CONNECTED,
            });
        };
        let mut outcome = Ok(());
        let mut posted = 0;
        for read in reads {
            let refusal = match target.link() {
                Link::Failed(code) => Some(*code),
                Link::Killed => Some(code::NOT_CONNECTED),
                Link::Open(_) if target.room() == 0 => Some(code::BUSY),
                Link::Open(_) if read.into.is_empty() || read.into.len() > pages_max => {
                    Some(code::BAD_READ)
                }
                Link::Open(_) => None,
            };
            if let Some(code) = refusal {
                outcome = Err(Posted { posted, code });
                break;
            }
            target.queue(first.position() + posted as u64, read, page_bytes);
            posted += 1;
        }
        self.counters.reads += posted as u64;
        // At once, not in the next turn: the peer starts one turn earlier.
        if let Some(target) = self.channels[channel.index as usize].as_deref_mut() {
            target.write_requests(&mut self.done);
        }
        outcome
    }

    fn abandon(&mut self, first: WorkId, count: usize) {
        let index = first.channel().index as usize;
        let entry = self.channels.get_mut(index).and_then(Option::as_deref_mut);
        if let Some(channel) = entry.filter(|channel| channel.id() == first.channel()) {
            let marked = channel.abandon(first.position(), count as u64, &mut self.done);
            self.counters.abandoned += marked;
        }
    }

    fn moved_at(&self, channel: ChannelId) -> Nanos {
        self.channel(channel)
            .map_or(Nanos(0), |channel| channel.moved_at)
    }
}

impl CompletionSource for TcpTransport {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        if self.live.is_empty() {
            return 0;
        }
        self.turns = self.turns.wrapping_add(1);
        let quiet = self.live.iter().all(|index| {
            let channel = self.channels[*index as usize].as_deref();
            channel.is_none_or(|channel| !channel.expects())
        });
        if quiet || self.armed || self.turns.is_multiple_of(LOOK_EVERY_TURNS) {
            self.armed = false;
            self.look();
        }
        self.turn(now);
        let count = self.done.len().min(COMPLETIONS_PER_POLL_MAX);
        out.extend(self.done.drain(..count));
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        self.armed = true;
        // Completions that are waiting for the next poll must wake it at once.
        let mut wake = (!self.done.is_empty()).then_some(Nanos(0));
        let mut open = false;
        for index in &self.live {
            let Some(channel) = self.channels[*index as usize].as_deref_mut() else {
                continue;
            };
            if let Some(at) = channel.wake_at(self.config.still_max) {
                wake = Some(wake.map_or(at, |wake| wake.min(at)));
            }
            open |= channel.socket().is_some();
            if channel.arm().is_err() {
                // Out of kernel memory: be polled again at once rather than sleep on it.
                wake = Some(Nanos(0));
            }
        }
        self.timer.set(wake);
        (open || wake.is_some()).then(|| self.epoll.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        let channels = self.channels.iter().flatten();
        let on_their_way: usize = channels.map(|channel| channel.outstanding()).sum();
        self.done.len() + on_their_way
    }

    fn kill(&mut self, channel: ChannelId) {
        if let Some(target) = self.channel_mut(channel) {
            let failed = matches!(target.link(), Link::Failed(_));
            target.kill();
            self.counters.channels_failed += u64::from(failed);
            self.done.retain(|done| done.work.channel() != channel);
        }
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        let Some(target) = self.channel(channel) else {
            return Reap::Quiet;
        };
        match target.link() {
            Link::Open(_) | Link::Failed(_) => {
                let undelivered = self
                    .done
                    .iter()
                    .filter(|done| done.work.channel() == channel)
                    .count();
                Reap::Draining(target.outstanding() + undelivered)
            }
            // Its socket is closed and the kernel held no pointer: that is the physical end.
            Link::Killed => {
                let (bytes, scrap_bytes) = (target.bytes, target.scrap_bytes);
                self.counters.bytes += bytes;
                self.counters.scrap_bytes += scrap_bytes;
                self.channels[channel.index as usize] = None;
                self.live.retain(|index| *index != channel.index);
                Reap::Quiet
            }
        }
    }

    fn moved(&self, channel: ChannelId) -> u64 {
        self.bytes_received(channel)
    }

    /// Always: what is on its way goes into scrap, what has landed has landed, and what was
    /// never posted or is on no open connection cannot land.
    fn take_back(&mut self, work: WorkId) -> bool {
        self.abandon(work, 1);
        true
    }
}
