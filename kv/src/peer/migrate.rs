//! The decode side's shell: one attempt's machine with its reads, checks and waiter.
//!
//! [`AttemptCell::feed`] runs the machine and its effects at once, wherever an event comes from
//! (a frame, a finished read, a timer), so a watermark turns into posted reads without a task
//! switch. The driver task of the attempt waits for reads and deadlines and checks placed pages.
//! The waiter's end is [`super::Migration`].

use super::hub::Inner;
use super::migration::{MigrationEvent, free_committed};
use super::session::{PullPath, Session};
use super::wait::{Bell, Woken};
use crate::checksum::page_checksum;
use crate::ledger::PageState;
use crate::pool::PageId;
use crate::pull::{Attempt, AttemptPhase, PullEffect, PullEvent, PullNews};
use crate::session::AttemptId;
use crate::transport::{Read, Transport};
use kvserve_runtime::completion::Completion;
use kvserve_runtime::{ChannelId, ChannelKind, Deadline, EndReason, Nanos};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Bytes checked before other tasks of the shard get a turn (PROTOCOL L4).
pub(super) const CHECK_BYTES_PER_TURN: usize = 256 * 1024;

/// How often a pull with reads out looks whether its connection has moved, so that its stage
/// limit is at most this late.
const MOVED_LOOK: Duration = Duration::from_millis(50);

/// How often a stopping attempt looks whether its last post is quiet. The ladder needs 20 to
/// 270 ms for a channel that is broken and no time for one that works.
pub(super) const QUIET_LOOK: Duration = Duration::from_millis(2);

/// One read to be posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostArgs {
    read: u64,
    first: u32,
    count: u32,
    lease: u64,
    epoch: u32,
}

struct Check {
    first: u32,
    checksums: Vec<u64>,
}

type ReadWait = (u64, Completion);

pub(super) struct AttemptCell {
    pub session: Rc<Session>,
    pub deadline: Deadline,
    machine: RefCell<Attempt>,
    /// Events that came while one was being worked on.
    events: RefCell<VecDeque<PullEvent>>,
    feeding: Cell<bool>,
    targets: RefCell<Vec<PageId>>,
    reads: RefCell<Vec<ReadWait>>,
    /// Pages of posted reads that have not ended well.
    unquiet: RefCell<Vec<(u64, Vec<PageId>)>>,
    checks: RefCell<VecDeque<Check>>,
    moved: Cell<u64>,
    /// The lease whose places the copy queue knows.
    pub learnt: Cell<Option<(ChannelId, u64)>>,
    pub news: RefCell<VecDeque<MigrationEvent>>,
    pub waiter_gone: Cell<bool>,
    /// The attempt is over and its targets are only kept until its waiter lets go.
    free_with_waiter: Cell<bool>,
    driver_bell: Bell,
    pub waiter_bell: Bell,
}

impl AttemptCell {
    pub(super) fn new(
        inner: &Inner,
        session: Rc<Session>,
        machine: Attempt,
        targets: Vec<PageId>,
        deadline: Deadline,
    ) -> Self {
        AttemptCell {
            session,
            deadline,
            machine: RefCell::new(machine),
            events: RefCell::default(),
            feeding: Cell::new(false),
            targets: RefCell::new(targets),
            reads: RefCell::default(),
            unquiet: RefCell::default(),
            checks: RefCell::default(),
            moved: Cell::new(0),
            learnt: Cell::new(None),
            news: RefCell::default(),
            waiter_gone: Cell::new(false),
            free_with_waiter: Cell::new(false),
            driver_bell: Bell::new(&inner.hub, "peer.attempt"),
            waiter_bell: Bell::new(&inner.hub, "peer.migration"),
        }
    }

    pub(super) fn id(&self) -> AttemptId {
        self.machine.borrow().id()
    }

    pub(super) fn phase(&self) -> AttemptPhase {
        self.machine.borrow().phase()
    }

    pub(super) fn lease_live(&self) -> Option<u64> {
        self.machine.borrow().lease_live()
    }

    pub(super) fn lease_granted(&self) -> Option<(u64, u32)> {
        self.machine.borrow().lease_granted()
    }

    pub(super) fn progress(&self) -> (u32, u32) {
        self.machine.borrow().progress()
    }

    /// Takes one event and carries out what follows from it.
    pub(super) fn feed(&self, inner: &Inner, event: PullEvent) {
        self.events.borrow_mut().push_back(event);
        if self.feeding.replace(true) {
            return; // the call below us on the stack takes it
        }
        let mut effects = Vec::new();
        loop {
            let event = self.events.borrow_mut().pop_front();
            let Some(event) = event else { break };
            if event == PullEvent::Tick {
                self.look_if_moved(inner, &mut effects);
            }
            let now = inner.hub.now();
            self.machine.borrow_mut().on(now, event, &mut effects);
            for effect in effects.drain(..) {
                self.perform(inner, effect);
            }
        }
        self.feeding.set(false);
    }

    /// Before a stage limit is judged: has the connection moved since the last look?
    fn look_if_moved(&self, inner: &Inner, effects: &mut Vec<PullEffect>) {
        let (Some(pages), PullPath::Open(channel)) = (&inner.pages, self.session.pull_path())
        else {
            return;
        };
        let bytes = pages.moved(channel);
        if bytes != self.moved.replace(bytes) {
            let now = inner.hub.now();
            self.machine.borrow_mut().on(now, PullEvent::Moved, effects);
        }
    }

    fn perform(&self, inner: &Inner, effect: PullEffect) {
        match effect {
            PullEffect::Send(frame) => self.session.send(inner, &frame),
            PullEffect::Post {
                read,
                first,
                count,
                lease,
                epoch,
            } => {
                let post = PostArgs {
                    read,
                    first,
                    count,
                    lease,
                    epoch,
                };
                self.session.post_or_wait(inner, self, post);
            }
            PullEffect::Check { first, checksums } => {
                self.checks
                    .borrow_mut()
                    .push_back(Check { first, checksums });
                self.driver_bell.ring();
            }
            PullEffect::StopReads => {
                self.checks.borrow_mut().clear();
                // Dropping the completions cancels their slots; the guards stay with those.
                let reads = self.reads.take();
                drop(reads);
                if self.is_quiet(inner) {
                    self.events.borrow_mut().push_back(PullEvent::Quiet);
                }
                self.driver_bell.ring();
            }
            PullEffect::News(news) => self.tell(inner, news),
            PullEffect::Ended { free } => self.ended(inner, free),
        }
    }

    fn tell(&self, inner: &Inner, news: PullNews) {
        let event = match news {
            PullNews::Granted => MigrationEvent::Granted,
            PullNews::FirstToken(payload) => MigrationEvent::FirstToken(payload),
            PullNews::Placed => MigrationEvent::Placed,
            PullNews::Committed => {
                inner.count(|counters| counters.attempts_committed += 1);
                MigrationEvent::Committed {
                    pages: self.targets.take(),
                }
            }
            PullNews::Failed(error) => {
                inner.count(|counters| counters.attempts_failed += 1);
                MigrationEvent::Failed(error)
            }
        };
        if self.waiter_gone.get() {
            free_committed(inner, event);
        } else {
            self.news.borrow_mut().push_back(event);
            self.waiter_bell.ring();
        }
    }

    fn ended(&self, inner: &Inner, free: bool) {
        let id = self.id();
        self.session.attempts.borrow_mut().remove(&id);
        if let (Some(pages), Some((channel, lease))) = (&inner.pages, self.learnt.take()) {
            pages
                .shm
                .borrow_mut()
                .inner_mut()
                .forget_lease(channel, lease);
        }
        if free {
            // From `Placed` on the waiter's engine plans steps with the targets, and it may plan
            // one more before the waiter is told that they are void.
            self.free_with_waiter.set(true);
            if self.waiter_gone.get() {
                self.free_targets(inner);
            }
        } else {
            self.targets.take();
        }
        self.unquiet.borrow_mut().clear();
        self.driver_bell.ring();
    }

    /// The waiter has let go of an attempt that is over: its targets go back.
    pub(super) fn free_targets(&self, inner: &Inner) {
        if !self.free_with_waiter.replace(false) {
            return;
        }
        let targets = self.targets.take();
        if let Some(pages) = inner.pages.as_ref().filter(|_| !targets.is_empty()) {
            pages.ledger.with(|ledger| ledger.free(&targets));
        }
    }

    /// Whether nothing that was posted can touch a target any more, or its page is quarantined.
    fn is_quiet(&self, inner: &Inner) -> bool {
        let Some(pages) = &inner.pages else {
            return true;
        };
        let unquiet = self.unquiet.borrow();
        pages.ledger.with(|ledger| {
            unquiet.iter().flat_map(|(_, run)| run).all(|page| {
                ledger.named(*page) == 0 || ledger.state(*page) == PageState::Quarantined
            })
        })
    }

    /// Posts one read; `false` when it could not be.
    pub(super) fn post(&self, inner: &Inner, post: PostArgs) -> bool {
        let (Some(pages), PullPath::Open(channel)) = (&inner.pages, self.session.pull_path())
        else {
            return false;
        };
        let into: Vec<PageId> = {
            let targets = self.targets.borrow();
            let from = post.first as usize;
            match targets.get(from..from + post.count as usize) {
                Some(run) => run.to_vec(),
                None => return false,
            }
        };
        let guards = pages
            .ledger
            .with(|ledger| ledger.guard(into.iter().copied()));
        let wait = match inner.hub.begin("peer.read", self.deadline, Some(guards)) {
            Ok(wait) => wait,
            Err(full) => {
                if let Some(guards) = full.guards {
                    pages.ledger.with(|ledger| ledger.release(guards));
                }
                return false;
            }
        };
        inner.hub.set_owner(wait.slot(), self.id().request.counter);
        // From here on the slot holds the guards: the run counts as unquiet until its good end.
        self.unquiet.borrow_mut().push((post.read, into.clone()));
        let Ok(work) = inner.hub.reserve(wait.slot(), channel, 1) else {
            return false;
        };
        let read = Read {
            lease: post.lease,
            epoch: post.epoch,
            first: post.first,
            into,
        };
        let posted = match channel.kind {
            ChannelKind::SharedMemory => pages.shm.borrow_mut().post(channel, work, vec![read]),
            _ => {
                pages.shm.borrow_mut().inner_mut().forget_sums(&read.into);
                pages.transport.borrow_mut().post(channel, work, vec![read])
            }
        };
        if let Err(failed) = posted {
            inner.hub.unpost(work, 1, failed.code);
            return false;
        }
        self.reads.borrow_mut().push((post.read, wait));
        self.driver_bell.ring();
        true
    }

    /// Takes the results of reads that have ended.
    fn poll_reads(&self, cx: &mut Context<'_>) -> Vec<(u64, Result<(), EndReason>)> {
        let mut ended = Vec::new();
        self.reads
            .borrow_mut()
            .retain_mut(|(read, wait)| match Pin::new(wait).poll(cx) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    ended.push((*read, result));
                    false
                }
            });
        ended
    }

    fn read_ended(&self, inner: &Inner, read: u64, result: Result<(), EndReason>) {
        match result {
            Ok(()) => {
                self.unquiet.borrow_mut().retain(|(kept, _)| *kept != read);
                self.feed(inner, PullEvent::ReadDone(read));
            }
            Err(reason) => self.feed(inner, PullEvent::ReadEnded(read, reason)),
        }
    }

    /// Compares the next placed run with its checksums, a piece at a time.
    async fn check_next(&self, inner: &Inner) -> bool {
        let check = self.checks.borrow_mut().pop_front();
        let (Some(check), Some(pages)) = (check, &inner.pages) else {
            return false;
        };
        let mut bytes = 0;
        for (offset, wanted) in check.checksums.iter().enumerate() {
            if bytes >= CHECK_BYTES_PER_TURN {
                bytes = 0;
                inner.shard.yield_now().await;
            }
            if self.phase() != AttemptPhase::Pulling {
                return true; // stopped meanwhile: the pages may not be ours any more
            }
            let at = check.first as usize + offset;
            let page = self.targets.borrow().get(at).copied();
            let Some(page) = page else {
                return true;
            };
            // Of the bytes as they were stored, when the copy has computed it.
            let landed = pages.shm.borrow().inner().landed_sum(page);
            let found = landed.unwrap_or_else(|| {
                bytes += inner.config.page_bytes;
                // SAFETY: the attempt owns the page (state Pulling, phase checked just above),
                // its read has ended physically, and no task of this shard runs before the call
                // returns.
                unsafe {
                    page_checksum(
                        inner.config.checksums,
                        &pages.pool,
                        page,
                        inner.config.page_bytes,
                    )
                }
            });
            if found != *wanted {
                let wrong = PullEvent::Checked {
                    count: 0,
                    wrong: Some(at as u32),
                };
                self.feed(inner, wrong);
                inner.mismatched(&self.session);
                return true;
            }
        }
        let count = check.checksums.len() as u32;
        self.feed(inner, PullEvent::Checked { count, wrong: None });
        true
    }

    fn next_look(&self, now: Nanos) -> Nanos {
        let tick = self.machine.borrow().next_tick(now);
        match self.phase() {
            AttemptPhase::Pulling if !self.unquiet.borrow().is_empty() => {
                tick.min(now.after(MOVED_LOOK))
            }
            AttemptPhase::Stopping => now.after(QUIET_LOOK),
            AttemptPhase::Asked
            | AttemptPhase::Pulling
            | AttemptPhase::Committing
            | AttemptPhase::Ended => tick,
        }
    }
}

enum DriverWake {
    Reads(Vec<(u64, Result<(), EndReason>)>),
    Bell(Woken),
}

/// The driver of one attempt: runs from the ask to the physical end.
pub(super) async fn drive(inner: Rc<Inner>, cell: Rc<AttemptCell>) {
    loop {
        while cell.check_next(&inner).await {}
        match cell.phase() {
            AttemptPhase::Ended => return,
            AttemptPhase::Stopping if cell.is_quiet(&inner) => {
                cell.feed(&inner, PullEvent::Quiet);
                continue;
            }
            AttemptPhase::Asked
            | AttemptPhase::Pulling
            | AttemptPhase::Committing
            | AttemptPhase::Stopping => {}
        }
        let until = cell.next_look(inner.hub.now());
        let wake = {
            let mut bell = pin!(cell.driver_bell.wait(until));
            poll_fn(|cx| {
                let ended = cell.poll_reads(cx);
                if !ended.is_empty() {
                    return Poll::Ready(DriverWake::Reads(ended));
                }
                bell.as_mut().poll(cx).map(DriverWake::Bell)
            })
            .await
        };
        match wake {
            DriverWake::Reads(ended) => {
                for (read, result) in ended {
                    cell.read_ended(&inner, read, result);
                }
                cell.session.pump(&inner);
            }
            DriverWake::Bell(Woken::Rung) => {}
            DriverWake::Bell(Woken::Deadline) => cell.feed(&inner, PullEvent::Tick),
            DriverWake::Bell(Woken::NoSlot) => {
                inner.shard.sleep(QUIET_LOOK).await;
                cell.feed(&inner, PullEvent::Tick);
            }
        }
    }
}

impl Session {
    /// Posts a read, or queues it behind those that wait for room on the data connection.
    fn post_or_wait(&self, inner: &Inner, cell: &AttemptCell, post: PostArgs) {
        let room = self.waiting.borrow().is_empty() && self.room(inner) > 0;
        if !room && self.is_live() {
            let attempt = self.attempts.borrow().get(&cell.id()).map(Rc::downgrade);
            if let Some(attempt) = attempt {
                self.waiting.borrow_mut().push_back((attempt, post));
            }
        } else if !cell.post(inner, post) {
            cell.feed(inner, PullEvent::NotPosted(post.read));
        }
    }

    fn room(&self, inner: &Inner) -> usize {
        match (&inner.pages, self.pull_path()) {
            (Some(pages), PullPath::Open(channel)) => pages.room(channel),
            // Without a connection a post fails at once, which is what should happen.
            (None, _) | (Some(_), PullPath::None) => 1,
        }
    }

    /// Posts what waits, as far as there is room.
    pub(super) fn pump(&self, inner: &Inner) {
        while self.room(inner) > 0 {
            let next = self.waiting.borrow_mut().pop_front();
            let Some((attempt, post)) = next else { break };
            let Some(attempt) = attempt.upgrade() else {
                continue;
            };
            match attempt.phase() {
                AttemptPhase::Pulling => {
                    if !attempt.post(inner, post) {
                        attempt.feed(inner, PullEvent::NotPosted(post.read));
                    }
                }
                AttemptPhase::Asked
                | AttemptPhase::Committing
                | AttemptPhase::Stopping
                | AttemptPhase::Ended => {}
            }
        }
    }
}
