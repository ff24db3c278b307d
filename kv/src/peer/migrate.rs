//! The decode side's shell: one attempt's machine with its reads, checks and waiter.
//!
//! [`AttemptCell::feed`] runs the machine and its effects at once, wherever an event comes from
//! (a frame, a finished read, a timer), so a watermark turns into posted reads without a task
//! switch. The driver task of the attempt waits for reads and deadlines and checks placed pages.
//! The waiter's end is [`super::Migration`].

use super::hub::Inner;
use super::migration::{MigrationEvent, free_committed};
use super::reads::{OutRead, PostArgs, ReadNews};
use super::session::{PullPath, Session};
use super::wait::{Bell, Woken};
use crate::checksum::page_checksum;
use crate::credits::Short;
use crate::pool::PageId;
use crate::pull::{Attempt, AttemptPhase, PullEffect, PullEvent, PullNews};
use crate::session::{AttemptId, RefuseReason};
use kvserve_runtime::{ChannelId, Deadline, Nanos};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Bytes checked before other tasks of the shard get a turn (PROTOCOL L4).
pub(super) const CHECK_BYTES_PER_TURN: usize = 256 * 1024;

/// How often a stopping attempt looks whether its last post is quiet. The ladder needs 20 to
/// 270 ms for a channel that is broken and no time for one that works.
pub(super) const QUIET_LOOK: Duration = Duration::from_millis(2);

struct Check {
    first: u32,
    checksums: Vec<u64>,
}

pub(super) struct AttemptCell {
    pub session: Rc<Session>,
    pub deadline: Deadline,
    machine: RefCell<Attempt>,
    /// Events that came while one was being worked on.
    events: RefCell<VecDeque<PullEvent>>,
    feeding: Cell<bool>,
    targets: RefCell<Vec<PageId>>,
    /// Posted reads that have not ended well.
    pub out: RefCell<Vec<OutRead>>,
    checks: RefCell<VecDeque<Check>>,
    /// Since when the waiter knows that it has failed.
    failed_at: Cell<Option<Nanos>>,
    pub began_at: Nanos,
    /// When the driver looks next if nobody rings it.
    looks_at: Cell<Nanos>,
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
            out: RefCell::default(),
            checks: RefCell::default(),
            failed_at: Cell::new(None),
            began_at: inner.hub.now(),
            looks_at: Cell::new(Nanos(0)),
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

    /// A look at the machine, for people.
    pub(super) fn look<T>(&self, look: impl FnOnce(&Attempt) -> T) -> T {
        look(&self.machine.borrow())
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
        // A frame may have begun a stage that ends before the driver would look.
        if self.next_look(inner.hub.now()) < self.looks_at.get() {
            self.driver_bell.ring();
        }
    }

    /// When something last moved for it, bytes on its channel included.
    pub(super) fn moved_at(&self, inner: &Inner) -> Nanos {
        let told = self.machine.borrow().moved_at();
        if let Some(pages) = &inner.pages
            && let PullPath::Open(channel) = self.session.pull_path()
            && self.phase() == AttemptPhase::Pulling
        {
            return told.max(pages.moved_at(channel));
        }
        told
    }

    /// Before a stage limit is judged: when did bytes last move, of its own channel, or of any
    /// if it waits for what all of them share (PROTOCOL L2)?
    fn look_if_moved(&self, inner: &Inner, effects: &mut Vec<PullEffect>) {
        let Some(pages) = &inner.pages else {
            return;
        };
        let channel_of = |session: &Session| match session.pull_path() {
            PullPath::Open(channel) => Some(channel),
            PullPath::None => None,
        };
        let own = channel_of(&self.session);
        let mut at = own.map_or(Nanos(0), |channel| pages.moved_at(channel));
        let short = (inner.credits.borrow()).short_of_peer(self.session.number, own);
        if short == Some(Short::Shard) {
            let sessions = inner.sessions.borrow();
            let all = sessions.values().filter_map(|session| channel_of(session));
            at = all
                .map(|channel| pages.moved_at(channel))
                .max()
                .unwrap_or(at);
        }
        let now = inner.hub.now();
        (self.machine.borrow_mut()).on(now, PullEvent::Moved(at), effects);
    }

    /// News for the machine while it is being fed, or soon.
    pub(super) fn events_push(&self, event: PullEvent) {
        self.events.borrow_mut().push_back(event);
    }

    pub(super) fn ring_driver(&self) {
        self.driver_bell.ring();
    }

    /// A run of the targets.
    pub(super) fn target_run(&self, from: usize, count: usize) -> Option<Vec<PageId>> {
        let targets = self.targets.borrow();
        targets.get(from..from + count).map(<[PageId]>::to_vec)
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
                self.session.queue_read(inner, self, post);
            }
            PullEffect::Check { first, checksums } => {
                self.checks
                    .borrow_mut()
                    .push_back(Check { first, checksums });
                self.driver_bell.ring();
            }
            PullEffect::StopReads => {
                self.checks.borrow_mut().clear();
                self.stop_reads(inner);
                if self.is_quiet(inner) {
                    let quiet = self.quiet_event(inner);
                    self.events_push(quiet);
                }
                self.driver_bell.ring();
            }
            PullEffect::EndSession => self.session.request_end(RefuseReason::ChannelStuck, false),
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
                self.failed_at.set(Some(inner.hub.now()));
                let late = self.machine.borrow().limit_late();
                inner.count(|counters| {
                    counters.attempts_failed += 1;
                    if let Some(late) = late {
                        counters.attempts_at_limit += 1;
                        counters.limit_late_max = counters.limit_late_max.max(late);
                    }
                });
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
        if let Some((lease, _epoch)) = self.lease_granted() {
            self.session.rdma.places.forget(lease);
        }
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
        if let Some(failed_at) = self.failed_at.take() {
            let span = inner.hub.now().since(failed_at);
            inner.count(|counters| counters.pages_back_max = counters.pages_back_max.max(span));
        }
        self.forget_reads(inner);
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

    /// What to tell the machine once nothing can touch a target any more.
    fn quiet_event(&self, inner: &Inner) -> PullEvent {
        match self.is_stuck(inner) {
            true => PullEvent::Stuck,
            false => PullEvent::Quiet,
        }
    }

    fn next_look(&self, now: Nanos) -> Nanos {
        match self.phase() {
            AttemptPhase::Stopping => now.after(QUIET_LOOK),
            AttemptPhase::Asked
            | AttemptPhase::Pulling
            | AttemptPhase::Committing
            | AttemptPhase::Ended => self.machine.borrow().next_tick(now),
        }
    }
}

enum DriverWake {
    Reads(ReadNews),
    Bell(Woken),
}

/// The driver of one attempt: runs from the ask to the physical end.
pub(super) async fn drive(inner: Rc<Inner>, cell: Rc<AttemptCell>) {
    loop {
        while cell.check_next(&inner).await {}
        match cell.phase() {
            AttemptPhase::Ended => return,
            AttemptPhase::Stopping if cell.is_quiet(&inner) => {
                let quiet = cell.quiet_event(&inner);
                cell.feed(&inner, quiet);
                continue;
            }
            AttemptPhase::Asked
            | AttemptPhase::Pulling
            | AttemptPhase::Committing
            | AttemptPhase::Stopping => {}
        }
        let until = cell.next_look(inner.hub.now());
        cell.looks_at.set(until);
        let wake = {
            let mut bell = pin!(cell.driver_bell.wait(until));
            poll_fn(|cx| {
                if let Some(news) = cell.poll_reads(&inner, cx) {
                    return Poll::Ready(DriverWake::Reads(news));
                }
                bell.as_mut().poll(cx).map(DriverWake::Bell)
            })
            .await
        };
        match wake {
            DriverWake::Reads(ReadNews { ended, owed }) => {
                if !owed.is_empty() {
                    inner.check_pull_path(&cell.session);
                }
                for post in owed {
                    cell.session.queue_read(&inner, &cell, post);
                }
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
