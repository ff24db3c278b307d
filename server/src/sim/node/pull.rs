//! The decode side: one attempt's machine with its reads, its checks and its waiter.

use super::path::PullPath;
use super::wait::Wait;
use super::{Key, Node};
use crate::sim::check::Invariant;
use crate::sim::context::{Context, OutOfTurn};
use crate::sim::coverage::pull_event;
use crate::sim::model::{self, KV_BYTES, PAGE_TOKENS};
use kvserve_kv::checksum::checksum;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::ledger::PageState;
use kvserve_kv::pull::{Attempt, AttemptPhase, FailReason, PullEffect, PullEvent, PullNews};
use kvserve_kv::session::Frame;
use kvserve_kv::transport::sim::LinkId;
use kvserve_kv::{PageId, Read, Transport};
use kvserve_runtime::{Deadline, EndReason, GuardKeeper as _, Nanos, WorkId};
use std::collections::VecDeque;
use std::time::Duration;

/// Reads a pull channel takes at once.
const READS_IN_FLIGHT_MAX: usize = 64;

/// How often a pull with reads out looks whether its connection has moved.
const MOVED_LOOK: Duration = Duration::from_millis(50);

/// How often a stopping attempt looks whether its last post is quiet.
const QUIET_LOOK: Duration = Duration::from_millis(2);

/// One read to be posted.
#[derive(Clone, Copy, Debug)]
pub struct PostArgs {
    read: u64,
    first: u32,
    count: u32,
    lease: u64,
    epoch: u32,
}

struct ReadWait {
    read: u64,
    wait: Wait,
    work: WorkId,
    link: LinkId,
}

/// One attempt. See the module's text.
pub struct Pull {
    pub machine: Attempt,
    deadline: Deadline,
    pub targets: Vec<PageId>,
    /// The tokens whose keys and values it pulls: for the check of what was committed.
    tokens: Vec<u32>,
    reads: Vec<ReadWait>,
    unquiet: Vec<(u64, Vec<PageId>)>,
    checks: VecDeque<(u32, Vec<u64>)>,
    moved: u64,
    request: u64,
    waiter_gone: bool,
    tick_at: Nanos,
    news: u32,
    /// Its lease, once granted.
    lease: Option<u64>,
}

impl Pull {
    pub(super) fn new(
        machine: Attempt,
        deadline: Deadline,
        targets: Vec<PageId>,
        tokens: Vec<u32>,
        request: u64,
    ) -> Self {
        Pull {
            machine,
            deadline,
            targets,
            tokens,
            reads: Vec::new(),
            unquiet: Vec::new(),
            checks: VecDeque::new(),
            moved: 0,
            request,
            waiter_gone: false,
            tick_at: Nanos(0),
            news: 0,
            lease: None,
        }
    }

    pub(super) fn waits(&self) -> impl Iterator<Item = &Wait> {
        self.reads.iter().map(|read| &read.wait)
    }

    /// Reads that it has out: its credits.
    pub(super) fn reads_out(&self) -> usize {
        self.reads.len()
    }

    fn next_look(&self, now: Nanos) -> Nanos {
        let tick = self.machine.next_tick(now);
        match self.machine.phase() {
            AttemptPhase::Pulling if !self.unquiet.is_empty() => tick.min(now.after(MOVED_LOOK)),
            AttemptPhase::Stopping => now.after(QUIET_LOOK),
            AttemptPhase::Asked
            | AttemptPhase::Pulling
            | AttemptPhase::Committing
            | AttemptPhase::Ended => tick,
        }
    }
}

impl Node {
    /// Hands an event to a live attempt and carries out what follows; `false`: there is none.
    pub(super) fn feed(&mut self, context: &mut Context, key: Key, event: PullEvent) -> bool {
        let Some(mut pull) = self.pulls.remove(&key) else {
            return false;
        };
        let mut events = VecDeque::from([event]);
        let mut effects = Vec::new();
        let mut ended = false;
        let mut moments = Vec::new();
        let mut out_of_turn = None;
        while let Some(event) = events.pop_front() {
            if event == PullEvent::Tick {
                self.look_if_moved(context, &mut pull, key.0, &mut effects);
            }
            if let PullEvent::Granted { lease, .. } = &event {
                pull.lease.get_or_insert(*lease);
            }
            let phase = pull.machine.phase();
            context
                .coverage
                .pair("pull", phase.label(), pull_event(&event));
            let granted = matches!(event, PullEvent::Granted { .. });
            pull.machine.on(self.turned_at, event, &mut effects);
            let last = |effect: &PullEffect| match effect {
                PullEffect::Post { first, count, .. } => {
                    (first + count) as usize == pull.targets.len()
                }
                _ => false,
            };
            if effects.iter().any(last) {
                self.moment_of(context, key, "attempt posts its last read");
            }
            let posts = effects
                .iter()
                .any(|effect| matches!(effect, PullEffect::Post { .. }));
            if posts {
                self.moment_of(context, key, "attempt posts a read");
            }
            let after = pull.machine.phase();
            if after != phase {
                moments.push(after);
            }
            if granted {
                out_of_turn = Some(OutOfTurn::Granted);
            }
            for effect in effects.drain(..) {
                self.perform_pull(context, &mut pull, key, effect, &mut events, &mut ended);
            }
        }
        for phase in moments {
            let moment = match phase {
                AttemptPhase::Asked => "attempt asked",
                AttemptPhase::Pulling => "attempt pulling",
                AttemptPhase::Committing => "attempt committing",
                AttemptPhase::Stopping => "attempt stopping",
                AttemptPhase::Ended => "attempt ended",
            };
            self.moment_of(context, key, moment);
            if matches!(phase, AttemptPhase::Stopping | AttemptPhase::Ended) {
                out_of_turn = Some(OutOfTurn::Stopped);
            }
        }
        if let (Some(when), Some(lease)) = (out_of_turn, pull.lease) {
            self.commit_out_of_turn(context, key, when, lease);
        }
        if !ended {
            pull.tick_at = pull.next_look(self.turned_at);
            self.pulls.insert(key, pull);
        }
        true
    }

    /// Something of an attempt has happened that a fault may wait for.
    pub(super) fn moment_of(&self, context: &mut Context, key: Key, moment: &'static str) {
        let peer = self.sessions.get(&key.0).and_then(|session| session.peer);
        let request = self.requests.get(&key.1.request.counter);
        let client = request.map(|request| request.client);
        context.moment(self.plan.index, peer, client, moment);
    }

    /// A COMMIT that the machine has not sent, if one is due.
    pub(super) fn commit_out_of_turn(
        &mut self,
        context: &mut Context,
        key: Key,
        when: OutOfTurn,
        lease: u64,
    ) {
        let node = self.plan.index;
        let Some(session) = self.sessions.get(&key.0).filter(|session| !session.ended) else {
            return;
        };
        let grantor = session.identity.incarnation;
        if context.armed.commits_out_of_turn(node, when) {
            context.fault("fault: commit out of turn");
            let frame = Frame::Commit {
                id: key.1,
                grantor,
                lease,
                epoch: 1,
                // As many as no lease has: an OK would be wrong at any time.
                pages: 0,
            };
            self.send(context, key.0, &frame);
        }
    }

    fn look_if_moved(
        &self,
        context: &mut Context,
        pull: &mut Pull,
        number: PeerSession,
        effects: &mut Vec<PullEffect>,
    ) {
        if let Some(PullPath::Open(channel, _)) = self.sessions.get(&number).map(|s| s.path) {
            let bytes = self.transport.borrow().bytes_received(channel);
            if bytes != std::mem::replace(&mut pull.moved, bytes) {
                let phase = pull.machine.phase().label();
                context.coverage.pair("pull", phase, "moved");
                pull.machine.on(self.turned_at, PullEvent::Moved, effects);
            }
        }
    }

    fn perform_pull(
        &mut self,
        context: &mut Context,
        pull: &mut Pull,
        key: Key,
        effect: PullEffect,
        events: &mut VecDeque<PullEvent>,
        ended: &mut bool,
    ) {
        match effect {
            PullEffect::Send(frame) => self.send(context, key.0, &frame),
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
                self.post_or_wait(context, pull, key, post, events);
            }
            PullEffect::Check { first, checksums } => pull.checks.push_back((first, checksums)),
            PullEffect::StopReads => {
                pull.checks.clear();
                // Dropping the completions cancels their slots; the guards stay with those.
                pull.reads.clear();
                if self.is_quiet(pull) {
                    events.push_back(PullEvent::Quiet);
                }
            }
            PullEffect::News(news) => self.tell(context, pull, key, news),
            PullEffect::Ended { free } => {
                *ended = true;
                let targets = std::mem::take(&mut pull.targets);
                if free && pull.waiter_gone {
                    self.keeper.ledger.with(|ledger| ledger.free(&targets));
                } else if free {
                    self.held.insert(key.1, targets);
                }
            }
        }
    }

    fn tell(&mut self, context: &mut Context, pull: &mut Pull, key: Key, news: PullNews) {
        let mut pages = Vec::new();
        match &news {
            PullNews::Granted | PullNews::FirstToken(_) | PullNews::Placed => {}
            PullNews::Committed => {
                pages = std::mem::take(&mut pull.targets);
                self.judge_commit(context, pull, key, &pages);
            }
            PullNews::Failed(error) => {
                pull.news += 1;
                context.note(|| format!("{}: {}", self.plan.name, error.message));
                context.coverage.hit(match error.reason {
                    FailReason::StageLimit => "attempt failed: stage_limit",
                    FailReason::RequestDeadline => "attempt failed: deadline_exceeded",
                    FailReason::Busy { .. } => "attempt failed: busy",
                    FailReason::Refused(_) => "attempt failed: refused",
                    FailReason::Draining => "attempt failed: draining",
                    FailReason::Aborted(_) => "attempt failed: aborted",
                    FailReason::SessionEnded => "attempt failed: peer_lost",
                    FailReason::Read(_) => "attempt failed: read_failed",
                    FailReason::NoPost => "attempt failed: no_post",
                    FailReason::Checksum(_) => "attempt failed: checksum",
                    FailReason::CommitRefused(_) => "attempt failed: commit_refused",
                    FailReason::Fenced => "attempt failed: fenced",
                    FailReason::Violation(_) => "attempt failed: violation",
                    FailReason::Cancelled => "attempt failed: cancelled",
                    FailReason::NotBegun(_) => "attempt failed: not_begun",
                    FailReason::NoPages { .. } => "attempt failed: no_pages",
                });
                if pull.news > 1 {
                    context.broke(Invariant::I6, "an attempt failed twice");
                }
            }
        }
        if pull.waiter_gone {
            self.keeper.ledger.with(|ledger| ledger.free(&pages));
        } else {
            self.news.push_back((pull.request, key.1, news, pages));
        }
    }

    /// I5: what is committed was answered OK, lies still, and is what the prompt gives.
    fn judge_commit(&mut self, context: &mut Context, pull: &Pull, key: Key, pages: &[PageId]) {
        let grantor = self.sessions.get(&key.0).map(|s| s.identity.incarnation);
        let named = grantor.zip(pull.lease);
        if !named.is_some_and(|named| context.commits_ok.contains(&named)) {
            let what = format!("{}: committed without an OK for it (L5)", self.plan.name);
            context.broke(Invariant::I5, what);
        }
        for (position, wanted) in model::all_kv(&pull.tokens).iter().enumerate() {
            let page = pages[position / PAGE_TOKENS];
            let from = position % PAGE_TOKENS * KV_BYTES;
            let equal =
                (self.memory).with_page(page, |bytes| bytes[from..from + KV_BYTES] == wanted[..]);
            if !equal {
                let what = format!(
                    "{}: committed page {} differs at position {position}",
                    self.plan.name, page.0
                );
                return context.broke(Invariant::I5, what);
            }
        }
    }

    /// Whether nothing that was posted can touch a target any more, or its page is quarantined.
    fn is_quiet(&self, pull: &Pull) -> bool {
        self.keeper.ledger.with(|ledger| {
            pull.unquiet.iter().flat_map(|(_, run)| run).all(|page| {
                ledger.named(*page) == 0 || ledger.state(*page) == PageState::Quarantined
            })
        })
    }

    // ---- reads --------------------------------------------------------------------------------

    fn room(&self, number: PeerSession) -> usize {
        match self.sessions.get(&number).map(|session| session.path) {
            Some(PullPath::Open(_, link)) => {
                READS_IN_FLIGHT_MAX
                    - self
                        .fabric
                        .borrow()
                        .in_flight(link)
                        .min(READS_IN_FLIGHT_MAX)
            }
            Some(PullPath::None(_) | PullPath::Opening(_)) | None => 1,
        }
    }

    fn post_or_wait(
        &mut self,
        context: &mut Context,
        pull: &mut Pull,
        key: Key,
        post: PostArgs,
        events: &mut VecDeque<PullEvent>,
    ) {
        let room = self.room(key.0) > 0;
        let session = self
            .sessions
            .get_mut(&key.0)
            .filter(|session| !session.ended);
        match session {
            Some(session) if !(room && session.waiting.is_empty()) => {
                session.waiting.push_back((key, post));
            }
            Some(_) | None => {
                if !self.post(context, pull, key.0, post) {
                    events.push_back(PullEvent::NotPosted(post.read));
                }
            }
        }
    }

    fn post(
        &mut self,
        context: &mut Context,
        pull: &mut Pull,
        number: PeerSession,
        post: PostArgs,
    ) -> bool {
        let path = self.sessions.get(&number).map(|session| session.path);
        let Some(PullPath::Open(channel, link)) = path else {
            return false;
        };
        let from = post.first as usize;
        let Some(into) = pull.targets.get(from..from + post.count as usize) else {
            return false;
        };
        let into = into.to_vec();
        let (guards, shadow) = self.keeper.guard(&into);
        let completion = match self.hub.begin("peer.read", pull.deadline, Some(guards)) {
            Ok(completion) => completion,
            Err(full) => {
                if let Some(guards) = full.guards {
                    self.keeper.release(guards);
                }
                return false;
            }
        };
        pull.unquiet.push((post.read, into.clone()));
        let Ok(work) = self.hub.reserve(completion.slot(), channel, 1) else {
            return false;
        };
        let read = Read {
            lease: post.lease,
            epoch: post.epoch,
            first: post.first,
            into,
        };
        let posted = {
            let mut transport = self.transport.borrow_mut();
            transport.set_tag(shadow);
            transport.post(channel, work, vec![read])
        };
        if let Err(failed) = posted {
            context.note(|| format!("{}: a post failed", self.plan.name));
            self.hub.unpost(work, 1, failed.code);
            return false;
        }
        pull.reads.push(ReadWait {
            read: post.read,
            wait: Wait::new(completion),
            work,
            link,
        });
        true
    }

    /// Posts what waits, as far as there is room.
    pub(super) fn pump(&mut self, context: &mut Context, number: PeerSession) {
        while self.room(number) > 0 {
            let session = self.sessions.get_mut(&number);
            let Some((key, post)) = session.and_then(|session| session.waiting.pop_front()) else {
                break;
            };
            let Some(mut pull) = self.pulls.remove(&key) else {
                continue;
            };
            let wanted = pull.machine.phase() == AttemptPhase::Pulling;
            let posted = !wanted || self.post(context, &mut pull, number, post);
            self.pulls.insert(key, pull);
            if !posted {
                self.feed(context, key, PullEvent::NotPosted(post.read));
            }
        }
    }

    /// Takes the results of reads that have ended.
    pub(super) fn read_completions(&mut self, context: &mut Context) {
        let due = |(key, pull): (&Key, &Pull)| pull.waits().any(Wait::is_due).then_some(*key);
        let keys: Vec<Key> = self.pulls.iter().filter_map(due).collect();
        for key in keys {
            let mut ended: Vec<(u64, WorkId, LinkId, Result<(), EndReason>)> = Vec::new();
            if let Some(pull) = self.pulls.get_mut(&key) {
                pull.reads.retain_mut(|read| match read.wait.poll() {
                    None => true,
                    Some(result) => {
                        ended.push((read.read, read.work, read.link, result));
                        false
                    }
                });
            }
            for (read, work, link, result) in ended {
                match result {
                    Ok(()) => {
                        if self.fabric.borrow().is_under_way(link, work) {
                            let what = format!("read {read} is done, the card still has it (P3)");
                            context.broke(Invariant::I5, what);
                        }
                        if let Some(pull) = self.pulls.get_mut(&key) {
                            pull.unquiet.retain(|(kept, _)| *kept != read);
                        }
                        self.feed(context, key, PullEvent::ReadDone(read));
                    }
                    Err(reason) => {
                        self.feed(context, key, PullEvent::ReadEnded(read, reason));
                    }
                }
            }
            self.pump(context, key.0);
        }
    }

    // ---- checks and time ----------------------------------------------------------------------

    pub(super) fn turn_pulls(&mut self, context: &mut Context) {
        let now = self.turned_at;
        let keys: Vec<Key> = self.pulls.keys().copied().collect();
        for key in keys {
            while self.check_next(context, key) {}
            let Some(pull) = self.pulls.get(&key) else {
                continue;
            };
            if pull.machine.phase() == AttemptPhase::Stopping && self.is_quiet(pull) {
                self.feed(context, key, PullEvent::Quiet);
            } else if now >= pull.tick_at {
                self.feed(context, key, PullEvent::Tick);
            }
        }
    }

    pub(super) fn next_pull(&self, now: Nanos) -> Nanos {
        let looks = self.pulls.values().map(|pull| match pull.checks.len() {
            0 => pull.tick_at,
            _ => now,
        });
        looks.min().unwrap_or(Nanos(u64::MAX))
    }

    /// Compares the next placed run with its checksums.
    fn check_next(&mut self, context: &mut Context, key: Key) -> bool {
        let Some(pull) = self.pulls.get_mut(&key) else {
            return false;
        };
        let Some((first, sums)) = pull.checks.pop_front() else {
            return false;
        };
        let mode = self.plan.checksums;
        for (place, wanted) in (first as usize..).zip(&sums) {
            let page = pull.targets[place];
            let found = self.memory.with_page(page, |bytes| checksum(mode, bytes));
            if found != *wanted {
                let event = PullEvent::Checked {
                    count: 0,
                    wrong: Some(place as u32),
                };
                self.feed(context, key, event);
                return true;
            }
        }
        let count = sums.len() as u32;
        self.feed(context, key, PullEvent::Checked { count, wrong: None });
        true
    }

    /// The waiter lets go of an attempt.
    pub(super) fn drop_migration(&mut self, context: &mut Context, key: Key) {
        if let Some(pull) = self.pulls.get_mut(&key) {
            pull.waiter_gone = true;
            self.feed(context, key, PullEvent::Cancel);
        }
        let id = key.1;
        let mut unread = Vec::new();
        self.news.retain_mut(|(_, of, news, pages)| {
            if *of != id {
                return true;
            }
            if *news == PullNews::Committed {
                unread.append(pages);
            }
            false
        });
        unread.extend(self.held.remove(&id).unwrap_or_default());
        self.keeper.ledger.with(|ledger| ledger.free(&unread));
    }
}
