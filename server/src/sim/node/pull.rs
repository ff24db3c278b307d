//! The decode side: one attempt's machine with its reads, its checks and its waiter.

use super::path::PullPath;
use super::reads::{OutRead, PostArgs};
use super::wait::Wait;
use super::{Key, Node};
use crate::sim::check::Invariant;
use crate::sim::context::{Context, OutOfTurn};
use crate::sim::coverage::pull_event;
use crate::sim::model::{self, KV_BYTES, PAGE_TOKENS};
use kvserve_kv::checksum::checksum;
use kvserve_kv::credits::Short;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::pull::{Attempt, AttemptPhase, FailReason, PullEffect, PullEvent, PullNews};
use kvserve_kv::session::{Frame, RefuseReason};
use kvserve_kv::{PageId, Transport};
use kvserve_runtime::{Deadline, Nanos};
use std::collections::VecDeque;
use std::time::Duration;

/// How often a stopping attempt looks whether its last post is quiet.
const QUIET_LOOK: Duration = Duration::from_millis(2);

/// One attempt. See the module's text.
pub struct Pull {
    pub machine: Attempt,
    pub(super) deadline: Deadline,
    pub targets: Vec<PageId>,
    /// The prompt's tokens: for the check of what was committed.
    tokens: Vec<u32>,
    /// Leading pages of the prompt that are held, not pulled.
    held: usize,
    /// Posted reads that have not ended well.
    pub(super) out: Vec<OutRead>,
    checks: VecDeque<(u32, Vec<u64>)>,
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
        held: usize,
        request: u64,
    ) -> Self {
        Pull {
            machine,
            deadline,
            targets,
            tokens,
            held,
            out: Vec::new(),
            checks: VecDeque::new(),
            request,
            waiter_gone: false,
            tick_at: Nanos(0),
            news: 0,
            lease: None,
        }
    }

    pub(super) fn waits(&self) -> impl Iterator<Item = &Wait> {
        self.out.iter().filter_map(|out| out.wait.as_ref())
    }

    /// Reads that it has out: its credits.
    pub(super) fn reads_out(&self) -> usize {
        self.waits().count()
    }

    fn next_look(&self, now: Nanos) -> Nanos {
        let tick = self.machine.next_tick(now);
        match self.machine.phase() {
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
        self.pump(context);
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

    /// Before a limit is judged: when did bytes last move, of its own channel, or of any if it
    /// waits for what all of them share (PROTOCOL L2)?
    fn look_if_moved(
        &self,
        context: &mut Context,
        pull: &mut Pull,
        number: PeerSession,
        effects: &mut Vec<PullEffect>,
    ) {
        let channel_of = |session: &super::Session| match session.path {
            PullPath::Open(channel, _) => Some(channel),
            PullPath::None(_) | PullPath::Opening(_) => None,
        };
        let transport = self.transport.borrow();
        let own = self.sessions.get(&number).and_then(channel_of);
        let mut at = own.map_or(Nanos(0), |channel| transport.moved_at(channel));
        if self.credits.short_of_peer(number, own) == Some(Short::Shard) {
            let all = self.sessions.values().filter_map(channel_of);
            at = all
                .map(|channel| transport.moved_at(channel))
                .max()
                .unwrap_or(at);
        }
        let phase = pull.machine.phase().label();
        context.coverage.pair("pull", phase, "moved");
        (pull.machine).on(self.turned_at, PullEvent::Moved(at), effects);
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
                self.queue_read(pull, key, post, events);
            }
            PullEffect::Check { first, checksums } => pull.checks.push_back((first, checksums)),
            PullEffect::StopReads => {
                pull.checks.clear();
                self.stop_reads(pull, key);
                events.extend(self.quiet_event(pull));
            }
            PullEffect::EndSession => self.end_session(key.0, RefuseReason::ChannelStuck, false),
            PullEffect::News(news) => self.tell(context, pull, key, news),
            PullEffect::Ended { free } => {
                *ended = true;
                self.forget_reads(pull);
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
                    FailReason::NoCredit(_) => "attempt failed: no_credit",
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
        let first = pull.held * PAGE_TOKENS;
        for (position, wanted) in model::all_kv(&pull.tokens).iter().enumerate().skip(first) {
            let page = pages[position / PAGE_TOKENS - pull.held];
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

    // ---- checks and time ----------------------------------------------------------------------

    pub(super) fn turn_pulls(&mut self, context: &mut Context) {
        let now = self.turned_at;
        let keys: Vec<Key> = self.pulls.keys().copied().collect();
        for key in keys {
            while self.check_next(context, key) {}
            let Some(pull) = self.pulls.get(&key) else {
                continue;
            };
            let quiet = match pull.machine.phase() {
                AttemptPhase::Stopping => self.quiet_event(pull),
                AttemptPhase::Asked
                | AttemptPhase::Pulling
                | AttemptPhase::Committing
                | AttemptPhase::Ended => None,
            };
            if let Some(quiet) = quiet {
                self.feed(context, key, quiet);
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
