//! The transport itself: one device, one completion queue, the channels of one shard.

use super::address::{Choice, DeviceFound, NoDevice, PortFound, Wish, choose, numa_of};
use super::channel::{Channel, Turn};
use super::config::{BadSetting, RdmaConfig};
use super::connect::Served;
use super::cut::Entry;
use super::verbs::{
    Access, AsyncEvent, CompletionQueue, Device, DeviceLimits, Library, Region, VerbError,
    WorkBatch,
};
use crate::pool::PoolMemory;
use crate::transport::places::{LearnError, Place};
use crate::transport::sys::{Epoll, Interest, Timer};
use crate::transport::tcp::{ChannelState, pages_per_read_max};
use crate::transport::{Posted, Read, Transport, code};
use kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;
use kvserve_runtime::{ChannelId, Completed, CompletionSource, Nanos, Reap, WorkId};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Turns of a shard that spins between two looks at the descriptors: asynchronous events are
/// noticed that late at most; a parked shard is woken by them.
const LOOK_EVERY_TURNS: u64 = 256;

/// Rounds of one turn: a queue of 8,192 entries is emptied in 128.
const ROUNDS_MAX: usize = 128;

/// Between two tries of something that the card refused for now, or two looks at a drain.
const RETRY: Duration = Duration::from_millis(1);

const COMPLETIONS_TOKEN: u64 = u64::MAX;
const EVENTS_TOKEN: u64 = u64::MAX - 1;
const TIMER_TOKEN: u64 = u64::MAX - 2;

/// What an RDMA transport has counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaCounters {
    /// Reads posted.
    pub reads: u64,
    /// Work requests posted.
    pub requests: u64,
    /// Calls that posted them.
    pub posts: u64,
    /// Posts that a queue pair refused for now.
    pub posts_refused: u64,
    /// Completions taken.
    pub completions: u64,
    /// Bytes of requests that succeeded.
    pub bytes: u64,
    /// Completions of requests that had ended.
    pub duplicates: u64,
    /// Completions of requests that there never were.
    pub strays: u64,
    /// Completions of queue pairs that are gone.
    pub late: u64,
    /// Requests whose completion never came (their queue pair was destroyed).
    pub completions_lost: u64,
    /// Channels that ended by an error.
    pub channels_failed: u64,
    /// Queue pairs that could not be destroyed: their memory is lost to the process.
    pub pairs_stuck: u64,
    /// Asynchronous events.
    pub events: u64,
}

/// Why there is no RDMA, or no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RdmaError {
    /// A setting is refused.
    Setting(BadSetting),
    /// No device can be used.
    Device(NoDevice),
    /// A verb failed.
    Verb(VerbError),
    /// The kernel gave no epoll or timer: errno.
    Kernel(i32),
    /// The completion queue has no room for another queue pair: wanted, free.
    Completions(u32, u32),
    /// The two ends do not fit.
    Endpoint(super::endpoint::BadEndpoint),
    /// Pages are longer than the device's longest message: page bytes, message bytes.
    PageTooLong(usize, u32),
    /// The device is broken with this code.
    Broken(u32),
    /// The port is not ACTIVE: device, port.
    PortDown(String, u8),
    /// The channel's number is in use.
    ChannelInUse(u16),
}

impl fmt::Display for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RdmaError::Setting(bad) => bad.fmt(f),
            RdmaError::Device(none) => none.fmt(f),
            RdmaError::Verb(error) => error.fmt(f),
            RdmaError::Kernel(errno) => {
                let reason = io::Error::from_raw_os_error(*errno);
                write!(f, "no epoll or timer for RDMA: {reason}")
            }
            RdmaError::Completions(wanted, free) => write!(
                f,
                "another queue pair could overrun the completion queue: it needs {wanted} \
                 entries, {free} are free; use shorter queues or fewer peers"
            ),
            RdmaError::Endpoint(bad) => bad.fmt(f),
            RdmaError::PageTooLong(page, message) => write!(
                f,
                "pages of {page} bytes do not fit into the device's messages of {message}"
            ),
            RdmaError::Broken(code) => write!(f, "the device is broken: {}", code::describe(*code)),
            RdmaError::PortDown(device, port) => {
                write!(f, "{device} port {port} is not ACTIVE; look at the link")
            }
            RdmaError::ChannelInUse(index) => {
                write!(
                    f,
                    "channel {index} has a queue pair; kill and reap it first"
                )
            }
        }
    }
}

impl std::error::Error for RdmaError {}

impl From<VerbError> for RdmaError {
    fn from(error: VerbError) -> Self {
        RdmaError::Verb(error)
    }
}

/// Entries of the completion queue that are free. A queue pair's share comes back only once the
/// queue has been seen empty after its end, since its last completions may still lie in it.
pub(super) struct CompletionCredit {
    free: Cell<u32>,
    returning: Cell<u32>,
}

/// One queue pair's share.
pub(super) struct CompletionShare {
    credit: Rc<CompletionCredit>,
    entries: u32,
}

impl CompletionCredit {
    pub(super) fn take(self: &Rc<Self>, entries: u32) -> Result<CompletionShare, RdmaError> {
        let free = self.free.get();
        if entries > free {
            return Err(RdmaError::Completions(entries, free));
        }
        self.free.set(free - entries);
        Ok(CompletionShare {
            credit: self.clone(),
            entries,
        })
    }

    fn seen_empty(&self) {
        self.free.set(self.free.get() + self.returning.take());
    }
}

impl Drop for CompletionShare {
    fn drop(&mut self) {
        let returning = &self.credit.returning;
        returning.set(returning.get() + self.entries);
    }
}

/// Pulls pages of peers by RDMA READ, and lets peers read ours.
pub struct RdmaTransport {
    // In the order of their ends: queue pairs first.
    pub(super) channels: Vec<Option<Box<Channel>>>,
    pub(super) served: Vec<Option<Served>>,
    pub(super) batch: WorkBatch,
    pub(super) queue: Rc<CompletionQueue>,
    pub(super) region: Rc<Region>,
    pub(super) device: Rc<Device>,
    pub(super) credit: Rc<CompletionCredit>,
    pub(super) config: RdmaConfig,
    pub(super) choice: Choice,
    pub(super) limits: DeviceLimits,
    pub(super) message_bytes_max: u32,
    pub(super) mtu: u32,
    pub(super) access: Access,
    pub(super) pool: Arc<PoolMemory>,
    pub(super) page_bytes: usize,
    epoll: Epoll,
    timer: Timer,
    /// Indices of the channels there are.
    pub(super) live: Vec<u16>,
    /// By channel index: number of the next work request.
    pub(super) numbers: Vec<u64>,
    entries: Vec<Entry>,
    turns: u64,
    armed: bool,
    now: Nanos,
    done: VecDeque<Completed>,
    /// The device is gone, with this code.
    pub(super) broken: Option<u32>,
    pub(super) counters: RdmaCounters,
}

/// What is to be opened.
#[derive(Clone, Copy)]
pub struct Opening<'a> {
    /// The pool.
    pub pool: &'a Arc<PoolMemory>,
    /// The layout's page bytes, at most the pool's stride.
    pub page_bytes: usize,
    /// What the pool is for.
    pub access: Access,
    /// The address by which peers reach this node.
    pub address: Option<std::net::IpAddr>,
}

/// The devices of this host, as [`choose`] wants them.
///
/// # Errors
/// What the library says.
pub fn devices_found(library: &Library) -> Result<Vec<DeviceFound>, VerbError> {
    let mut found = Vec::new();
    for name in library.devices()? {
        // One that cannot be opened is as good as not there; `kvserve doctor` tells of it.
        let Ok(device) = library.open(&name) else {
            continue;
        };
        let ports = device.limits()?.ports;
        let ports = (1..=ports).filter_map(|number| {
            let port = device.port(number).ok()?;
            let gids = device.gids(number);
            Some(PortFound {
                number,
                active: port.active,
                ethernet: port.ethernet,
                lid: port.lid,
                gids: gids.iter().map(|e| (e.index, e.gid, e.kind)).collect(),
            })
        });
        let ports = ports.collect();
        found.push(DeviceFound {
            numa: numa_of(&name),
            name,
            ports,
        });
    }
    Ok(found)
}

impl RdmaTransport {
    /// Opens a device, registers the pool, makes the completion queue. `config` is checked first.
    ///
    /// # Errors
    /// [`RdmaError`]: each says what to do.
    pub fn open(
        library: &Library,
        opening: Opening<'_>,
        config: RdmaConfig,
    ) -> Result<Self, RdmaError> {
        let page_bytes = opening.page_bytes;
        assert!(
            page_bytes > 0 && page_bytes <= opening.pool.page_stride(),
            "pages of {page_bytes} bytes in a stride of {}",
            opening.pool.page_stride()
        );
        config.check().map_err(RdmaError::Setting)?;
        let wish = Wish {
            device: config.device.clone(),
            port: config.port,
            numa: crate::transport::sys::numa_node_of_this_thread(),
            address: opening.address,
        };
        let found = devices_found(library)?;
        let choice = choose(&found, &wish).map_err(RdmaError::Device)?;
        let device = library.open(&choice.device)?;
        let limits = device.limits()?;
        let port = device.port(choice.port)?;
        if page_bytes as u64 > u64::from(port.message_bytes_max) {
            return Err(RdmaError::PageTooLong(page_bytes, port.message_bytes_max));
        }
        let region = Region::register(&device, opening.pool, opening.access)?;
        let entries = config.completions.min(limits.completions_max);
        let queue = CompletionQueue::new(&device, entries)?;
        let kernel = |error: io::Error| RdmaError::Kernel(error.raw_os_error().unwrap_or(0));
        let epoll = Epoll::new().map_err(kernel)?;
        let timer = Timer::new().map_err(kernel)?;
        for (descriptor, token) in [
            (timer.as_raw_fd(), TIMER_TOKEN),
            (queue.descriptor(), COMPLETIONS_TOKEN),
            (device.async_descriptor(), EVENTS_TOKEN),
        ] {
            epoll
                .set(descriptor, Interest::Read, token)
                .map_err(kernel)?;
        }
        Ok(RdmaTransport {
            channels: Vec::new(),
            served: Vec::new(),
            batch: WorkBatch::new(region.clone()),
            credit: Rc::new(CompletionCredit {
                free: Cell::new(queue.entries()),
                returning: Cell::new(0),
            }),
            queue,
            region,
            device,
            message_bytes_max: port.message_bytes_max,
            mtu: port.mtu.min(config.mtu_max),
            config,
            choice,
            limits,
            access: opening.access,
            pool: opening.pool.clone(),
            page_bytes,
            epoll,
            timer,
            live: Vec::new(),
            numbers: Vec::new(),
            entries: Vec::new(),
            turns: 0,
            armed: false,
            now: Nanos(0),
            done: VecDeque::new(),
            broken: None,
            counters: RdmaCounters::default(),
        })
    }

    /// What was chosen, for logs and `/nodes/status`.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Whether the pool is registered with relaxed ordering.
    pub fn relaxed_ordering(&self) -> bool {
        self.region.relaxed_ordering()
    }

    /// Places `first..` of a lease, in order: reads of it can be posted from now on. RDMA cannot
    /// compare generations: what makes reuse impossible is the lease (PROTOCOL I10).
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

    /// How a channel stands; `None` when there is none.
    pub fn channel_state(&self, channel: ChannelId) -> Option<ChannelState> {
        self.channel(channel).map(Channel::state)
    }

    /// How many reads can be posted on a channel now.
    pub fn room(&self, channel: ChannelId) -> usize {
        self.channel(channel).map_or(0, Channel::room)
    }

    /// Bytes of requests that have succeeded on a channel.
    pub fn bytes_read(&self, channel: ChannelId) -> u64 {
        self.channel(channel).map_or(0, |channel| channel.bytes)
    }

    /// The most pages that one read may name: as on TCP, so that a pull may change its path.
    pub fn pages_per_read_max(&self) -> usize {
        pages_per_read_max(self.page_bytes)
    }

    /// What was counted since the start.
    pub fn counters(&self) -> RdmaCounters {
        let mut counters = self.counters;
        let channels = self.channels.iter().flatten();
        counters.bytes += channels.map(|channel| channel.bytes).sum::<u64>();
        counters
    }

    fn channel(&self, id: ChannelId) -> Option<&Channel> {
        let channel = self.channels.get(id.index as usize)?.as_deref()?;
        (channel.id() == id).then_some(channel)
    }

    pub(super) fn channel_mut(&mut self, id: ChannelId) -> Option<&mut Channel> {
        let channel = self.channels.get_mut(id.index as usize)?.as_deref_mut()?;
        (channel.id() == id).then_some(channel)
    }

    /// Gives a channel the turn's parts.
    fn with_channel(&mut self, index: usize, use_it: impl FnOnce(&mut Channel, &mut Turn<'_>)) {
        if let Some(channel) = self.channels.get_mut(index).and_then(Option::as_deref_mut) {
            use_it(
                channel,
                &mut Turn {
                    now: self.now,
                    batch: &mut self.batch,
                    entries: &mut self.entries,
                    done: &mut self.done,
                    counters: &mut self.counters,
                },
            );
        }
    }

    fn fail_all(&mut self, code: u32) {
        for at in 0..self.live.len() {
            let index = self.live[at] as usize;
            self.with_channel(index, |channel, turn| channel.fail(code, turn));
        }
    }

    /// Looks at the descriptors, takes their readiness back.
    fn look(&mut self) {
        let (mut completions, mut events) = (false, false);
        self.epoll.look(|token| match token {
            COMPLETIONS_TOKEN => completions = true,
            EVENTS_TOKEN => events = true,
            _ => {} // the timer only had to wake the shard; `arm` sets it anew
        });
        if completions {
            self.queue.take_events();
        }
        if events {
            self.take_async_events();
        }
    }

    fn take_async_events(&mut self) {
        // Bounded: a device in trouble may tell of each of its queue pairs.
        for _ in 0..COMPLETIONS_PER_POLL_MAX {
            let Some(event) = self.device.next_event() else {
                return;
            };
            self.counters.events += 1;
            match event {
                AsyncEvent::Other(_) => {}
                AsyncEvent::Device(kind) => {
                    self.broken = Some(code::VERBS_EVENT | kind);
                    self.fail_all(code::VERBS_EVENT | kind);
                }
                AsyncEvent::Port(port, kind) => {
                    if port == self.choice.port {
                        self.fail_all(code::VERBS_EVENT | kind);
                    }
                }
                AsyncEvent::Pair(pair, kind) => {
                    let named = |index: &&u16| {
                        let channel = self.channels[**index as usize].as_deref();
                        channel.is_some_and(|channel| channel.pair_number() == pair)
                    };
                    if let Some(index) = self.live.iter().find(named).copied() {
                        let code = code::VERBS_EVENT | kind;
                        self.with_channel(index as usize, |channel, turn| channel.fail(code, turn));
                    }
                    for served in self.served.iter_mut().flatten() {
                        served.note_event(pair);
                    }
                }
            }
        }
    }

    /// Takes completions until the queue is empty or a turn's worth is in hand; whether it was
    /// emptied, and whether any came.
    fn drain_queue(&mut self) -> (bool, bool) {
        let mut any = false;
        for _ in 0..ROUNDS_MAX {
            let queue = self.queue.clone();
            let taken = queue.take(|ended| self.on_ended(ended));
            match taken {
                Ok(count) => {
                    any |= count > 0;
                    self.counters.completions += count as u64;
                    if count < COMPLETIONS_PER_POLL_MAX {
                        self.credit.seen_empty();
                        return (true, any);
                    }
                }
                Err(error) => {
                    let code = code::LOCAL | error.errno as u32;
                    if self.broken.is_none() {
                        self.broken = Some(code);
                        self.fail_all(code);
                    }
                    return (true, any);
                }
            }
            if self.done.len() >= COMPLETIONS_PER_POLL_MAX {
                break;
            }
        }
        (false, any)
    }

    fn on_ended(&mut self, ended: super::verbs::Ended) {
        let work = WorkId::from_bits(ended.wr_id);
        let channel = work.and_then(|work| {
            let channel = self.channel(work.channel())?;
            (channel.pair_number() == ended.pair).then(|| work.channel().index as usize)
        });
        match (work, channel) {
            (Some(work), Some(index)) => self.with_channel(index, |channel, turn| {
                channel.on_ended(ended, work.position(), turn);
            }),
            (_, _) => self.counters.late += 1,
        }
    }

    fn turn_channels(&mut self) {
        for at in 0..self.live.len() {
            let index = self.live[at] as usize;
            let wants = self.channels[index].as_deref().map(Channel::wants_turn);
            if wants.is_some_and(|(now, later)| now || later) {
                self.with_channel(index, Channel::turn);
            }
        }
    }

    fn queued(&self) -> usize {
        let live = self.live.iter();
        live.filter_map(|index| self.channels[*index as usize].as_deref())
            .map(Channel::outstanding)
            .sum()
    }
}

impl Transport for RdmaTransport {
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
            let refusal = match target.state() {
                ChannelState::Failed(code) => Some(code),
                ChannelState::Killed => Some(code::NOT_CONNECTED),
                ChannelState::Open if target.room() == 0 => Some(code::BUSY),
                ChannelState::Open if read.into.is_empty() || read.into.len() > pages_max => {
                    Some(code::BAD_READ)
                }
                ChannelState::Open => None,
            };
            if let Some(code) = refusal {
                outcome = Err(Posted { posted, code });
                break;
            }
            target.queue(first.position() + posted as u64, read);
            posted += 1;
        }
        self.counters.reads += posted as u64;
        self.with_channel(channel.index as usize, |channel, turn| {
            channel.pump(turn);
            channel.hand_over(turn.done);
        });
        outcome
    }

    /// Reads of which nothing is on its way end at once, the others when they end.
    fn abandon(&mut self, first: WorkId, count: usize) {
        for at in 0..count as u64 {
            self.take_back(first.offset(at));
        }
    }

    fn moved_at(&self, channel: ChannelId) -> Nanos {
        self.channel(channel)
            .map_or(Nanos(0), |channel| channel.moved_at)
    }
}

impl CompletionSource for RdmaTransport {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        self.now = now;
        self.turns = self.turns.wrapping_add(1);
        let armed = std::mem::take(&mut self.armed);
        if armed || self.turns.is_multiple_of(LOOK_EVERY_TURNS) {
            self.look();
        }
        // The shard parks after a poll that hands nothing out. So an armed poll that took
        // completions without handing any out (of requests in the middle of a read, say) has to
        // ask for the next event itself, and to look once more after that.
        let mut settled = false;
        for _ in 0..ROUNDS_MAX {
            let (empty, any) = self.drain_queue();
            self.turn_channels();
            settled = empty && !(armed && any);
            if settled || !self.done.is_empty() || !armed {
                break;
            }
            if self.queue.request_notify().is_err() {
                break;
            }
            self.queue.take_events();
        }
        if armed && !settled {
            // Wakes the shard at once.
            self.timer.set(Some(Nanos(0)));
        }
        let count = self.done.len().min(COMPLETIONS_PER_POLL_MAX);
        out.extend(self.done.drain(..count));
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        self.armed = true;
        if self.live.is_empty() && self.served.iter().all(Option::is_none) {
            self.timer.set(None);
            return None;
        }
        if self.queue.request_notify().is_err() {
            // It has to be polled.
            return None;
        }
        let (mut at_once, mut later) = (!self.done.is_empty(), false);
        for index in &self.live {
            if let Some(channel) = self.channels[*index as usize].as_deref() {
                let (now, soon) = channel.wants_turn();
                at_once |= now;
                later |= soon;
            }
        }
        self.timer.set(match (at_once, later) {
            (true, _) => Some(Nanos(0)),
            (false, true) => Some(self.now.after(RETRY)),
            (false, false) => None,
        });
        Some(self.epoll.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.done.len() + self.queued()
    }

    fn kill(&mut self, channel: ChannelId) {
        if let Some(target) = self.channel_mut(channel) {
            target.kill();
            self.done.retain(|done| done.work.channel() != channel);
        }
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        let Some(target) = self.channel(channel) else {
            return Reap::Quiet;
        };
        let undelivered = self
            .done
            .iter()
            .filter(|done| done.work.channel() == channel)
            .count();
        let reap = target.reap(undelivered);
        if reap == Reap::Quiet {
            let index = channel.index as usize;
            let (bytes, next) = (target.bytes, target.next_number());
            self.counters.bytes += bytes;
            self.numbers[index] = next;
            self.channels[index] = None;
            self.live.retain(|index| *index != channel.index);
        }
        reap
    }

    fn moved(&self, channel: ChannelId) -> u64 {
        self.bytes_read(channel)
    }

    /// Only while nothing of the read has been posted: what the card has cannot be taken back.
    fn take_back(&mut self, work: WorkId) -> bool {
        let index = work.channel().index as usize;
        let entry = self.channels.get_mut(index).and_then(Option::as_deref_mut);
        match entry.filter(|channel| channel.id() == work.channel()) {
            Some(channel) => channel.take_back(work.position(), &mut self.done),
            None => false,
        }
    }
}
