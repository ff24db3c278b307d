//! The shell around the completion core: one per shard, cheap to clone, never leaves its thread.
//!
//! It owns the registered sources and carries out the core's effects. The rule that makes this
//! safe: **nothing foreign is called while the core is borrowed**, and sources and the keeper
//! of guards are called only from [`Hub::turn`], at the top of the stack of the poll loop. So
//! futures, wakers, sources and keepers may all call the hub from wherever they are.

use super::counters::{HubCounters, SlotView};
use super::effects::{GuardEnd, Order};
use super::errors::{BeginError, OpenError, PostError};
use super::future::Completion;
use super::ids::{ChannelId, ChannelKind, Completed, EndReason, GuardToken, SlotId, WorkId};
use super::oneshot::{self, Completer, OneshotCompletion};
use super::slab::{Slab, SourceId};
use super::slot::Outcome;
use super::wheel::TICK;
use crate::source::{COMPLETIONS_PER_POLL_MAX, CompletionSource};
use crate::time::{Deadline, Nanos};
use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Deadlines fired in one turn: 1,024 at about 100 ns each stay well below the preempt timer of
/// 1 ms; after a long sleep the rest follows in the next turns, without a park between.
const DEADLINES_PER_TURN_MAX: usize = 1024;

/// A shard that was away this long first ends what has expired, then polls (PROTOCOL S4).
const AWAY_LONG: Duration = Duration::from_secs(1);

/// Bounds of one hub.
#[derive(Clone, Copy, Debug)]
pub struct HubLimits {
    /// Slots the shard can have at once.
    pub slots_max: u32,
}

impl Default for HubLimits {
    /// 65,536 slots: 64 running requests with 1,000 waits each; 16 MiB if ever all are used.
    fn default() -> Self {
        HubLimits { slots_max: 1 << 16 }
    }
}

/// Keeps the memory that guards name: the page ledger.
///
/// Called only by the poll loop, between tasks, once for each token.
pub trait GuardKeeper {
    /// Nothing can touch the guarded memory any more.
    fn release(&self, guards: GuardToken);
    /// That could not be proven: the memory is never used again in this process.
    fn quarantine(&self, guards: GuardToken);
}

/// What one turn of the poll loop did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Completions taken from sources.
    pub completions: usize,
    /// Deadlines fired.
    pub deadlines: usize,
    /// Whether more is known to be due: turn again before parking.
    pub more: bool,
}

impl Turn {
    /// Whether anything happened, so that another turn may find more.
    pub fn worked(&self) -> bool {
        self.completions > 0 || self.deadlines > 0 || self.more
    }
}

/// How a source can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arming {
    /// Its descriptor turns readable.
    Descriptor {
        /// What to watch.
        descriptor: RawFd,
        /// Which registration it belongs to: numbers of descriptors are used again.
        serial: u64,
    },
    /// It has nothing in flight and nothing to tell.
    Idle,
    /// No source is registered at this place any more.
    Gone,
    /// It has work in flight and must be polled.
    MustPoll,
}

type SharedSource = Rc<RefCell<dyn CompletionSource>>;

/// A source under its number.
#[derive(Clone)]
struct Registered {
    source: SharedSource,
    serial: u64,
}

/// The completion hub of one shard. See the module's text.
#[derive(Clone)]
pub struct Hub(Rc<Inner>);

struct Inner {
    core: RefCell<Slab>,
    sources: RefCell<Vec<Option<Registered>>>,
    /// Sources ever registered.
    serials: Cell<u64>,
    keeper: Rc<dyn GuardKeeper>,
    clock: fn() -> Nanos,
    batch: RefCell<Vec<Completed>>,
    bell: Bell,
    turned_at: Cell<Nanos>,
    /// Back from a long absence, with expired slots still to end.
    thawing: Cell<bool>,
    stopped: Cell<bool>,
    turns: Cell<u64>,
}

/// How tasks of the shard call the poll loop out of its park.
#[derive(Default)]
struct Bell {
    rung: Cell<bool>,
    parked_until: Cell<Nanos>,
    poll_loop: RefCell<Option<Waker>>,
}

// --- making and wiring ---------------------------------------------------------------------

impl Hub {
    /// A hub on the monotonic clock; `keeper` gets every guard back.
    pub fn new(limits: HubLimits, keeper: Rc<dyn GuardKeeper>) -> Hub {
        Hub::with_clock(limits, keeper, Nanos::now)
    }

    /// A hub on another clock: for simulators and tests.
    pub fn with_clock(limits: HubLimits, keeper: Rc<dyn GuardKeeper>, clock: fn() -> Nanos) -> Hub {
        let now = clock();
        Hub(Rc::new(Inner {
            core: RefCell::new(Slab::new(limits.slots_max, now)),
            sources: RefCell::default(),
            serials: Cell::new(0),
            keeper,
            clock,
            batch: RefCell::new(Vec::with_capacity(COMPLETIONS_PER_POLL_MAX)),
            bell: Bell::default(),
            turned_at: Cell::new(now),
            thawing: Cell::new(false),
            stopped: Cell::new(false),
            turns: Cell::new(0),
        }))
    }

    /// Registers a source: it is polled each turn from now on.
    ///
    /// # Panics
    /// At the 65,536th source: sources are a few per shard, made by its owner.
    pub fn add_source(&self, source: SharedSource) -> SourceId {
        let mut sources = self.0.sources.borrow_mut();
        let place = (sources.iter().position(Option::is_none)).unwrap_or(sources.len());
        let id = SourceId(u16::try_from(place).expect("a shard has few sources"));
        if place == sources.len() {
            sources.push(None);
        }
        let serial = self.0.serials.get() + 1;
        self.0.serials.set(serial);
        sources[place] = Some(Registered { source, serial });
        drop(sources);
        self.ring();
        id
    }

    /// Takes a source out; `false`, and nothing happens, while any of its channels is open or
    /// draining (close them first).
    pub fn remove_source(&self, source: SourceId) -> bool {
        if self.0.core.borrow().uses_source(source) {
            return false;
        }
        let removed = (self.0.sources.borrow_mut())
            .get_mut(source.0 as usize)
            .and_then(Option::take);
        removed.is_some()
    }

    /// Opens a channel of a registered source whose ring holds at least `ring` posts.
    ///
    /// # Errors
    /// [`OpenError`] when numbers are used up, the ring is out of bounds, the source unknown.
    pub fn open_channel(
        &self,
        kind: ChannelKind,
        source: SourceId,
        ring: usize,
    ) -> Result<ChannelId, OpenError> {
        if self.source(source).is_none() {
            return Err(OpenError::UnknownSource(source));
        }
        let now = self.now();
        self.with_core(|core| core.open_channel(kind, source, ring, now))
    }

    /// Takes a channel down: kill, drain, then quiet or quarantine. Its waiters end at once with
    /// [`EndReason::ChannelKilled`], but for those that may post again. Close a channel once; its number is given out again later.
    pub fn close_channel(&self, channel: ChannelId) {
        let now = self.now();
        self.with_core(|core| core.close_channel(channel, now));
    }

    /// Whether `channel` still takes posts (the ladder may have killed it).
    pub fn channel_is_open(&self, channel: ChannelId) -> bool {
        self.0.core.borrow().takes_posts(channel)
    }
}

// --- waits and posts -----------------------------------------------------------------------

impl Hub {
    /// Begins a wait that ends by `deadline` at the latest. The guards are the slot's until its
    /// physical end, whatever becomes of the future.
    ///
    /// # Errors
    /// [`BeginError`] with the guards when all slots are in use.
    pub fn begin(
        &self,
        label: &'static str,
        deadline: Deadline,
        guards: Option<GuardToken>,
    ) -> Result<Completion, BeginError> {
        let now = self.now();
        let slot = self.with_core(|core| core.begin(label, deadline, guards, now))?;
        self.ring_if_parked_beyond(deadline.at());
        Ok(Completion::new(self.clone(), slot))
    }

    /// Begins a wait for a value that another task of this shard hands over.
    ///
    /// # Errors
    /// [`BeginError`] when all slots are in use.
    pub fn oneshot<T>(
        &self,
        label: &'static str,
        deadline: Deadline,
    ) -> Result<(Completer<T>, OneshotCompletion<T>), BeginError> {
        Ok(oneshot::pair(
            self.clone(),
            self.begin(label, deadline, None)?,
        ))
    }

    /// Gives `posts` positions of `channel` to the slot; returns the first. Post to the source
    /// right after, without an await between; what could not be posted goes to [`Hub::unpost`].
    ///
    /// # Errors
    /// [`PostError`]; nothing has changed then.
    pub fn reserve(
        &self,
        slot: SlotId,
        channel: ChannelId,
        posts: usize,
    ) -> Result<WorkId, PostError> {
        let now = self.now();
        let reserved = self.with_core(|core| core.reserve(slot, channel, posts, now));
        // The source may have had nothing to arm when the loop parked.
        self.ring();
        reserved
    }

    /// The work of this slot may be posted again after the loss of a channel, see
    /// [`Hub::posts_owed`]; it then outlives the kill.
    pub fn allow_reposts(&self, slot: SlotId) {
        self.0.core.borrow_mut().allow_reposts(slot);
    }

    /// Posts that this slot has to make again: they ended with a channel that is quiet now
    /// (PROTOCOL E5). Its future's waker is called when there are some. Reserve them on another
    /// channel with [`Hub::reserve`], under the same slot.
    pub fn posts_owed(&self, slot: SlotId) -> u32 {
        self.0.core.borrow_mut().posts_owed(slot)
    }

    /// Takes back `count` reserved positions from `first_not_posted` on: the tail of a failed
    /// post. Their slot ends with [`EndReason::Failed`].
    pub fn unpost(&self, first_not_posted: WorkId, count: usize, code: u32) {
        let now = self.now();
        self.with_core(|core| core.unpost(first_not_posted, count, code, now));
    }

    /// Ends a slot from outside (its session ended, for instance); nothing happens if it has
    /// ended already.
    pub fn end(&self, slot: SlotId, reason: EndReason) {
        self.finish(slot, Err(reason));
    }

    /// Gives a slot the number of its owner, shown by [`Hub::live`].
    pub fn set_owner(&self, slot: SlotId, owner: u64) {
        self.0.core.borrow_mut().set_owner(slot, owner);
    }

    /// The end of a slot without a post; `false` when it had ended already.
    pub(super) fn finish(&self, slot: SlotId, outcome: Outcome) -> bool {
        let now = self.now();
        self.with_core(|core| core.end(slot, outcome, now))
    }

    pub(super) fn is_waiting(&self, slot: SlotId) -> bool {
        self.0.core.borrow_mut().is_waiting(slot)
    }

    pub(super) fn poll_slot(&self, slot: SlotId, waker: &Waker) -> Poll<Outcome> {
        self.with_core(|core| core.poll(slot, waker))
    }

    pub(super) fn forget(&self, slot: SlotId) {
        let now = self.now();
        self.with_core(|core| core.forget(slot, now));
    }
}

// --- what can be seen ----------------------------------------------------------------------

impl Hub {
    /// All live slots: `/debug/transfers`.
    pub fn live(&self) -> Vec<SlotView> {
        self.0.core.borrow().live(self.now())
    }

    /// What has been counted: `/metrics`.
    pub fn counters(&self) -> HubCounters {
        self.0.core.borrow().counters()
    }

    /// Turns so far. (A sentinel reads the shard's pulse, which counts them, too.)
    pub fn turns(&self) -> u64 {
        self.0.turns.get()
    }

    /// The hub's clock.
    pub fn now(&self) -> Nanos {
        (self.0.clock)()
    }
}

// --- the poll turn -------------------------------------------------------------------------

impl Hub {
    /// One turn: poll every source once, fire deadlines, look at stopping channels, carry out
    /// effects. Everything in it is bounded. The poll loop calls it; so does a test without one.
    pub fn turn(&self, now: Nanos) -> Turn {
        let away = now.since(self.0.turned_at.replace(now));
        let mut turn = Turn::default();
        if away >= AWAY_LONG {
            self.0.thawing.set(true);
        }
        if self.0.thawing.get() {
            self.fire_deadlines(now, &mut turn);
            self.0.thawing.set(turn.more);
        }
        if !turn.more {
            self.poll_sources(now, &mut turn);
            self.fire_deadlines(now, &mut turn);
        }
        self.carry_out_orders();
        self.look_at_stopping_channels(now);
        self.carry_out_orders();
        self.end_guards();
        self.flush_wakes();
        self.0.turns.set(self.0.turns.get() + 1);
        turn
    }

    /// When the loop must turn again although no source has called, given how the sources are
    /// armed.
    pub fn turn_again_at(&self, now: Nanos, must_poll: bool) -> Option<Nanos> {
        let core = self.0.core.borrow();
        let next_tick = now.after(TICK);
        match (core.next_deadline(), must_poll || core.stopping_len() > 0) {
            (Some(deadline), true) => Some(deadline.min(next_tick)),
            (None, true) => Some(next_tick),
            (deadline, false) => deadline,
        }
    }

    /// Whether any post is outstanding.
    pub fn in_flight(&self) -> bool {
        self.0.core.borrow().posts_outstanding() > 0
    }

    /// Arms the source at `place`; `None` past the last one.
    pub fn arm_source(&self, place: usize) -> Option<Arming> {
        let Registered { source, serial } = match self.0.sources.borrow().get(place)? {
            Some(registered) => registered.clone(),
            None => return Some(Arming::Gone),
        };
        let mut source = source.borrow_mut();
        Some(match source.arm() {
            Some(descriptor) => Arming::Descriptor { descriptor, serial },
            None if source.in_flight() > 0 => Arming::MustPoll,
            None => Arming::Idle,
        })
    }

    fn poll_sources(&self, now: Nanos, turn: &mut Turn) {
        let mut batch = self.0.batch.take();
        let mut place = 0;
        loop {
            let source = match self.0.sources.borrow().get(place) {
                None => break,
                Some(registered) => registered.clone(),
            };
            place += 1;
            let Some(Registered { source, .. }) = source else {
                continue;
            };
            batch.clear();
            source.borrow_mut().poll(now, &mut batch);
            turn.completions += batch.len();
            turn.more |= batch.len() >= COMPLETIONS_PER_POLL_MAX || source.borrow().busy();
            let mut core = self.0.core.borrow_mut();
            for &completed in &batch {
                core.complete(completed, now);
            }
        }
        self.0.batch.replace(batch);
    }

    fn fire_deadlines(&self, now: Nanos, turn: &mut Turn) {
        let mut core = self.0.core.borrow_mut();
        let mut fired = 0;
        while fired < DEADLINES_PER_TURN_MAX && core.fire_deadline(now) {
            fired += 1;
        }
        turn.deadlines += fired;
        turn.more |= fired == DEADLINES_PER_TURN_MAX;
    }

    /// From the end, since an answer may take a channel off the list.
    fn look_at_stopping_channels(&self, now: Nanos) {
        let mut place = self.0.core.borrow().stopping_len();
        while place > 0 {
            place -= 1;
            let Some((source, channel, killed)) = self.0.core.borrow().stopping_at(place) else {
                continue;
            };
            // A source cannot go while it has channels that stop, see `remove_source`.
            let Some(source) = self.source(source) else {
                continue;
            };
            if killed {
                let reap = source.borrow_mut().reap(channel);
                self.0.core.borrow_mut().reaped(channel, reap, now);
            } else {
                let moved = source.borrow().moved(channel);
                self.0.core.borrow_mut().look(channel, moved, now);
            }
        }
    }

    fn carry_out_orders(&self) {
        loop {
            let order = self.0.core.borrow_mut().effects.orders.pop_front();
            match order {
                None => break,
                Some(Order::Kill { source, channel }) => {
                    if let Some(source) = self.source(source) {
                        source.borrow_mut().kill(channel);
                    }
                }
                Some(Order::TakeBack { source, work }) => {
                    let Some(source) = self.source(source) else {
                        continue;
                    };
                    let quiet = source.borrow_mut().take_back(work);
                    if quiet {
                        self.0.core.borrow_mut().taken_back(work);
                    }
                }
            }
        }
    }

    fn end_guards(&self) {
        loop {
            let end = self.0.core.borrow_mut().effects.guards.pop_front();
            match end {
                None => break,
                Some(GuardEnd::Release(guards)) => self.0.keeper.release(guards),
                Some(GuardEnd::Quarantine(guards)) => self.0.keeper.quarantine(guards),
            }
        }
    }

    fn flush_wakes(&self) {
        loop {
            let waker = self.0.core.borrow_mut().effects.wakes.pop_front();
            match waker {
                None => break,
                Some(waker) => waker.wake(),
            }
        }
        let spent = std::mem::take(&mut self.0.core.borrow_mut().effects.spent_wakers);
        drop(spent);
    }

    /// One step of the core from any task: wakes go out at once, the rest with the next turn.
    fn with_core<T>(&self, step: impl FnOnce(&mut Slab) -> T) -> T {
        let (result, need_a_turn, wakes) = {
            let mut core = self.0.core.borrow_mut();
            let result = step(&mut core);
            let effects = &core.effects;
            let wakes = !effects.wakes.is_empty() || !effects.spent_wakers.is_empty();
            (result, effects.need_a_turn(), wakes)
        };
        if wakes {
            self.flush_wakes();
        }
        if need_a_turn {
            self.ring();
        }
        result
    }

    fn source(&self, id: SourceId) -> Option<SharedSource> {
        let sources = self.0.sources.borrow();
        let registered = sources.get(id.0 as usize)?.as_ref()?;
        Some(registered.source.clone())
    }
}

// --- park and call -------------------------------------------------------------------------

impl Hub {
    /// Calls the poll loop: it turns before it parks (again).
    pub fn ring(&self) {
        self.0.bell.rung.set(true);
        let parked = self.0.bell.poll_loop.take();
        if let Some(waker) = parked {
            waker.wake();
        }
    }

    /// Ends the poll loop at its next turn. Slots and guards stay as they are.
    pub fn stop(&self) {
        self.0.stopped.set(true);
        self.ring();
    }

    /// Whether [`Hub::stop`] was called.
    pub fn stopped(&self) -> bool {
        self.0.stopped.get()
    }

    /// Whether the bell was rung since the last answer.
    pub(crate) fn take_ring(&self) -> bool {
        self.0.bell.rung.replace(false)
    }

    /// The poll loop parks: `waker` is woken by the next ring; `until` is when it turns anyway.
    pub(crate) fn park(&self, waker: Waker, until: Option<Nanos>) {
        self.0
            .bell
            .parked_until
            .set(until.unwrap_or(Nanos(u64::MAX)));
        let replaced = self.0.bell.poll_loop.replace(Some(waker));
        drop(replaced);
    }

    /// The poll loop turns again of itself.
    pub(crate) fn unpark(&self) {
        let waker = self.0.bell.poll_loop.take();
        drop(waker);
    }

    fn ring_if_parked_beyond(&self, deadline: Nanos) {
        if deadline < self.0.bell.parked_until.get() {
            self.ring();
        }
    }
}
