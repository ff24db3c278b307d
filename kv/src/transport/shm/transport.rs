//! The decode node's side: a [`Transport`] that copies out of peers' pools.

use super::channel::{Channel, Link, Turn};
use super::shared::SharedPool;
use crate::checksum::ChecksumMode;
use crate::copy::{Kernel, Stores};
use crate::pool::{PageId, PoolMemory};
use crate::transport::places::{LearnError, Place};
use crate::transport::sys::{Epoll, Interest, Timer};
use crate::transport::tcp::{ChannelState, pages_per_read_max};
use crate::transport::{Posted, Read, Transport, code};
use kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;
use kvserve_runtime::{ChannelId, Completed, CompletionSource, Nanos, Reap, WorkId};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Bytes copied in one turn over all channels (PROTOCOL L4): 256 KiB at some 8 GB/s are 32 µs of
/// a shard.
const TURN_BYTES_MAX: usize = 256 << 10;

/// A copy needs no socket, so sockets are only looked at once in so many turns: a dead peer is
/// noticed within 16 turns of a pull, and within 64 turns of a shard that spins.
const LOOK_EVERY_TURNS: u64 = 16;
const LOOK_EVERY_IDLE_TURNS: u64 = 64;

/// The epoll's token of the timer; channels have their index, below 4,096.
const TIMER_TOKEN: u64 = u64::MAX;

/// Settings of a [`ShmTransport`].
#[derive(Clone, Copy, Debug)]
pub struct ShmConfig {
    /// Bytes copied in one turn at most, at least a block of 1,024.
    pub turn_bytes: usize,
    /// How copied bytes are stored.
    pub stores: Stores,
    /// [`ChecksumMode::Full`] is fused into the copy; the others leave checking to the caller.
    pub checksums: ChecksumMode,
}

impl Default for ShmConfig {
    fn default() -> Self {
        ShmConfig {
            turn_bytes: TURN_BYTES_MAX,
            stores: Stores::Streaming,
            checksums: ChecksumMode::Full,
        }
    }
}

/// What a [`ShmTransport`] has counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShmCounters {
    /// Reads posted.
    pub reads: u64,
    /// Reads abandoned.
    pub abandoned: u64,
    /// Bytes copied, those of reads that failed later included.
    pub bytes: u64,
    /// Pages copied whole and under one generation.
    pub pages: u64,
    /// Copies that failed because their page was reused before or meanwhile.
    pub generations_moved: u64,
    /// Channels that ended by the peer's end.
    pub channels_failed: u64,
}

/// Copies pages of peers on this host into this node's pool.
pub struct ShmTransport {
    pool: Arc<PoolMemory>,
    page_bytes: usize,
    config: ShmConfig,
    kernel: Kernel,
    epoll: Epoll,
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
    sums: Box<[Option<u64>]>,
    counters: ShmCounters,
}

impl ShmTransport {
    /// A transport without channels that copies into `pool`, `page_bytes` (the layout's page
    /// bytes, at most the pool's stride) a page.
    ///
    /// # Errors
    /// When the kernel gives no epoll or timer descriptor.
    pub fn new(pool: Arc<PoolMemory>, page_bytes: usize, config: ShmConfig) -> io::Result<Self> {
        assert!(
            page_bytes > 0 && page_bytes <= pool.page_stride(),
            "pages of {page_bytes} bytes in a stride of {}",
            pool.page_stride()
        );
        let epoll = Epoll::new()?;
        let timer = Timer::new()?;
        epoll.set(timer.as_raw_fd(), Interest::Read, TIMER_TOKEN)?;
        Ok(ShmTransport {
            sums: vec![None; pool.pages()].into(),
            pool,
            page_bytes,
            kernel: Kernel::detect(config.stores),
            config,
            epoll,
            timer,
            channels: Vec::new(),
            live: Vec::new(),
            start: 0,
            turns: 0,
            armed: false,
            done: VecDeque::new(),
            counters: ShmCounters::default(),
        })
    }

    /// Opens a channel to a peer's pool. `stream` is the socket that its descriptor came over;
    /// its end is taken for the peer's.
    ///
    /// # Errors
    /// `AlreadyExists` when the channel was not reaped; or what the kernel says of the socket.
    pub fn add_channel(
        &mut self,
        channel: ChannelId,
        stream: UnixStream,
        shared: SharedPool,
    ) -> io::Result<()> {
        let index = channel.index as usize;
        if self.channels.len() <= index {
            self.channels.resize_with(index + 1, || None);
        }
        if self.channels[index].is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("channel {index} already has a map; kill and reap it first"),
            ));
        }
        stream.set_nonblocking(true)?;
        self.epoll
            .set(stream.as_raw_fd(), Interest::Read, index as u64)?;
        self.channels[index] = Some(Box::new(Channel::new(channel, stream, shared)));
        self.live.push(channel.index);
        Ok(())
    }

    /// Places `first..` of a lease, in order: reads of it can be posted from now on.
    ///
    /// # Errors
    /// [`LearnError`]; then nothing was taken.
    pub fn learn_lease(
        &mut self,
        channel: ChannelId,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        self.channel_mut(channel)
            .ok_or(LearnError::NotConnected)?
            .learn(lease, epoch, first, places)
    }

    /// The lease is over: reads of it that are posted from now on fail.
    pub fn forget_lease(&mut self, channel: ChannelId, lease: u64) {
        if let Some(channel) = self.channel_mut(channel) {
            channel.forget_lease(lease);
        }
    }

    /// The xxh3 of the bytes last copied whole into one of our pages, if the copy computed it
    /// and nothing has been said to land there by another way since
    /// ([`ShmTransport::forget_sums`]).
    pub fn landed_sum(&self, page: PageId) -> Option<u64> {
        self.sums.get(page.0 as usize).copied().flatten()
    }

    /// These pages are about to be written by another transport.
    pub fn forget_sums(&mut self, pages: &[PageId]) {
        for page in pages {
            if let Some(sum) = self.sums.get_mut(page.0 as usize) {
                *sum = None;
            }
        }
    }

    /// How a channel stands; `None` when there is none.
    pub fn channel_state(&self, channel: ChannelId) -> Option<ChannelState> {
        self.channel(channel).map(|channel| match channel.link() {
            Link::Open(..) => ChannelState::Open,
            Link::Failed(code) => ChannelState::Failed(*code),
            Link::Killed => ChannelState::Killed,
        })
    }

    /// How many reads can be posted on a channel now.
    pub fn room(&self, channel: ChannelId) -> usize {
        self.channel(channel).map_or(0, Channel::room)
    }

    /// Bytes copied on a channel since it was added.
    pub fn bytes_copied(&self, channel: ChannelId) -> u64 {
        self.channel(channel).map_or(0, |channel| channel.bytes)
    }

    /// The most pages that one read may name: as on TCP, so that a pull may change its path.
    pub fn pages_per_read_max(&self) -> usize {
        pages_per_read_max(self.page_bytes)
    }

    /// The kernel that copies.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// What was counted since the start.
    pub fn counters(&self) -> ShmCounters {
        let mut counters = self.counters;
        for channel in self.channels.iter().flatten() {
            counters.bytes += channel.bytes;
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

    fn queued(&self) -> usize {
        let channels = self.channels.iter().flatten();
        channels.map(|channel| channel.outstanding()).sum()
    }

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
        let mut budget = self.config.turn_bytes;
        let count = self.live.len();
        for step in 0..count {
            let index = self.live[(self.start + step) % count];
            let Some(channel) = self.channels[index as usize].as_deref_mut() else {
                continue;
            };
            if channel.ready || channel.outstanding() > 0 {
                channel.turn(&mut Turn {
                    now,
                    pool: &self.pool,
                    page_bytes: self.page_bytes,
                    kernel: self.kernel,
                    hashing: self.config.checksums == ChecksumMode::Full,
                    budget: &mut budget,
                    done: &mut self.done,
                    sums: &mut self.sums,
                    counters: &mut self.counters,
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

impl Transport for ShmTransport {
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted> {
        debug_assert_eq!(first.channel(), channel);
        let pages_max = self.pages_per_read_max();
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
                Link::Open(..) if target.room() == 0 => Some(code::BUSY),
                Link::Open(..) if read.into.is_empty() || read.into.len() > pages_max => {
                    Some(code::BAD_READ)
                }
                Link::Open(..) => None,
            };
            if let Some(code) = refusal {
                outcome = Err(Posted { posted, code });
                break;
            }
            target.queue(first.position() + posted as u64, read);
            posted += 1;
        }
        self.counters.reads += posted as u64;
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

impl CompletionSource for ShmTransport {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        if self.live.is_empty() {
            return 0;
        }
        self.turns = self.turns.wrapping_add(1);
        let every = if self.queued() > 0 {
            LOOK_EVERY_TURNS
        } else {
            LOOK_EVERY_IDLE_TURNS
        };
        if self.armed || self.turns.is_multiple_of(every) {
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
        // A copy that waits needs nobody but this shard: it must not park.
        let work = self.busy();
        self.timer.set(work.then_some(Nanos(0)));
        let mut channels = self.channels.iter().flatten();
        let open = channels.any(|channel| channel.is_open());
        (open || work).then(|| self.epoll.as_raw_fd())
    }

    /// A copy needs nobody but this shard.
    fn busy(&self) -> bool {
        !self.done.is_empty() || self.queued() > 0
    }

    fn in_flight(&self) -> usize {
        self.done.len() + self.queued()
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
            Link::Open(..) | Link::Failed(_) => {
                let undelivered = self
                    .done
                    .iter()
                    .filter(|done| done.work.channel() == channel)
                    .count();
                Reap::Draining(target.outstanding() + undelivered)
            }
            // Copies happen inside of `poll` only: that it was killed is the physical end.
            Link::Killed => {
                self.counters.bytes += target.bytes;
                self.channels[channel.index as usize] = None;
                self.live.retain(|index| *index != channel.index);
                Reap::Quiet
            }
        }
    }

    fn moved(&self, channel: ChannelId) -> u64 {
        self.bytes_copied(channel)
    }

    /// Always: copies happen inside of `poll` only.
    fn take_back(&mut self, work: WorkId) -> bool {
        self.abandon(work, 1);
        true
    }
}
