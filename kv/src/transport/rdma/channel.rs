//! One queue pair that pulls: reads in order, cut into work requests as far as its queue goes.
//!
//! ```text
//!   queue:  [ ended, waits its turn | on its way | cut in part | not begun ... ]   at most READS_MAX
//!   ring:             [ requests on their way ............. ]                      at most queue_depth
//!
//!   Ready ── error, event, stray, kill ──▶ Draining: ERR, marker ── flushed, or too long ──▶ destroy
//!                                                       Gone (quiet) ◀── done ──┴── refused ──▶ Stuck
//! ```
//!
//! **Keeps** E4, E5: a read is told as done only when each of its requests has been closed by a
//! completion; when the queue pair breaks, what it had not done is told as flushed, at once, and
//! its memory is quiet only once the channel is: flushed to the marker, or destroyed.

use super::cut::{CutRule, Entry, next_request};
use super::ring::{Posted, SendRing, Stray};
use super::transport::{CompletionShare, RdmaCounters};
use super::verbs::{Ended, QueuePair, ReadWork, WorkBatch};
use crate::pool::PageId;
use crate::transport::places::{LearnError, PeerPlaces, Place};
use crate::transport::tcp::ChannelState;
use crate::transport::{Read, code};
use kvserve_runtime::{ChannelId, Completed, CompletionStatus, Nanos, Reap, WorkId};
use std::collections::VecDeque;
use std::time::Duration;

/// Reads on one channel at most, as on the other transports.
pub(super) const READS_MAX: usize = 256;

/// Requests posted in one call: the list takes 8 KiB, and a call's fixed cost is spread well.
const BATCH_MAX: usize = 64;

/// How long the marker may take. Measured on soft-RoCE: 1.4 ms for 8 reads of 1 MiB. Below the
/// slab's drain bound of 250 ms, so that a destroy still finds its place.
const MARKER_MAX: Duration = Duration::from_millis(200);

/// Where the peer's pages are, and how reads of them are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub key: u32,
    pub base: u64,
    pub pages: usize,
    pub rule: CutRule,
    pub signal_every: usize,
}

/// What every channel of a transport uses in its turn.
pub(super) struct Turn<'a> {
    pub now: Nanos,
    pub batch: &'a mut WorkBatch,
    pub entries: &'a mut Vec<Entry>,
    pub done: &'a mut VecDeque<Completed>,
    pub counters: &'a mut RdmaCounters,
}

struct Pending {
    position: u64,
    from: Vec<Place>,
    into: Vec<PageId>,
    /// Pages that requests were made for.
    cut: usize,
    /// Its requests on their way.
    requests: usize,
    outcome: Option<CompletionStatus>,
}

impl Pending {
    fn is_open(&self) -> bool {
        self.outcome.is_none() && self.cut < self.into.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    /// It could not be posted yet.
    Due,
    Posted,
    /// It came back, or none is needed: nothing is on its way.
    Back,
    /// None can come: the queue pair refused.
    Hopeless,
}

enum Phase {
    Ready(QueuePair),
    Draining {
        pair: QueuePair,
        marker: Marker,
        /// Set at the first turn after the stop.
        until: Option<Nanos>,
    },
    Gone,
    Stuck,
}

pub(super) struct Channel {
    id: ChannelId,
    phase: Phase,
    pair_number: u32,
    failed: Option<u32>,
    killed: bool,
    remote: Remote,
    ring: SendRing,
    places: PeerPlaces,
    queue: VecDeque<Pending>,
    /// Serial number of the queue's front.
    front: u64,
    /// Reads at the front that need no more requests.
    cursor: usize,
    /// The queue pair took no more although it has credit.
    refused: bool,
    /// Bytes of closed requests.
    pub(super) bytes: u64,
    /// When the last of them was.
    pub(super) moved_at: Nanos,
    share: Option<CompletionShare>,
}

impl Channel {
    pub(super) fn new(
        id: ChannelId,
        pair: QueuePair,
        remote: Remote,
        places: PeerPlaces,
        depth: usize,
        first: u64,
        share: CompletionShare,
    ) -> Self {
        Channel {
            id,
            pair_number: pair.number(),
            phase: Phase::Ready(pair),
            failed: None,
            killed: false,
            remote,
            ring: SendRing::new(depth, first),
            places,
            queue: VecDeque::new(),
            front: 0,
            cursor: 0,
            refused: false,
            bytes: 0,
            moved_at: Nanos(0),
            share: Some(share),
        }
    }

    pub(super) fn id(&self) -> ChannelId {
        self.id
    }

    pub(super) fn pair_number(&self) -> u32 {
        self.pair_number
    }

    /// Number of the next work request, for the next channel of this index.
    pub(super) fn next_number(&self) -> u64 {
        self.ring.next_number()
    }

    pub(super) fn state(&self) -> ChannelState {
        match (self.killed, self.failed) {
            (true, _) => ChannelState::Killed,
            (false, Some(code)) => ChannelState::Failed(code),
            (false, None) => ChannelState::Open,
        }
    }

    pub(super) fn outstanding(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn room(&self) -> usize {
        match self.phase {
            Phase::Ready(_) => READS_MAX - self.queue.len(),
            Phase::Draining { .. } | Phase::Gone | Phase::Stuck => 0,
        }
    }

    /// Whether a turn would do something; whether only after a while.
    pub(super) fn wants_turn(&self) -> (bool, bool) {
        match &self.phase {
            Phase::Ready(_) => {
                let more = self.cursor < self.queue.len() && self.ring.free() > 0;
                (more && !self.refused, more && self.refused)
            }
            Phase::Draining { .. } => (false, true),
            Phase::Gone | Phase::Stuck => (false, false),
        }
    }

    pub(super) fn learn(
        &mut self,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        match self.phase {
            Phase::Ready(_) => self
                .places
                .learn(self.remote.pages, lease, epoch, first, places),
            Phase::Draining { .. } | Phase::Gone | Phase::Stuck => Err(LearnError::NotConnected),
        }
    }

    pub(super) fn forget_lease(&mut self, lease: u64) {
        self.places.forget(lease);
    }

    /// Queues one read. The caller has checked the read and the room. A read of places that are
    /// not known fails in its turn, alone: nothing of it is posted.
    pub(super) fn queue(&mut self, position: u64, read: Read) {
        let from = self.places.of(&read);
        let outcome = match from {
            Some(_) => None,
            None => Some(CompletionStatus::Error(code::NO_PLACE)),
        };
        self.queue.push_back(Pending {
            position,
            from: from.unwrap_or_default(),
            into: read.into,
            cut: 0,
            requests: 0,
            outcome,
        });
    }

    /// Ends a read for the caller; `true` when nothing of it can touch memory (any more).
    pub(super) fn take_back(&mut self, position: u64, done: &mut VecDeque<Completed>) -> bool {
        let place = self.queue.iter().position(|read| read.position == position);
        let Some(place) = place else {
            return false;
        };
        // What closes requests that give no completion of their own has to be posted.
        let next = (self.cursor..self.queue.len()).find(|at| self.queue[*at].is_open());
        let must_follow = self.ring.tail_is_open() && next == Some(place);
        let read = &mut self.queue[place];
        if read.requests > 0 || (must_follow && read.outcome.is_none()) {
            return false;
        }
        read.outcome
            .get_or_insert(CompletionStatus::Error(code::ABANDONED));
        self.hand_over(done);
        true
    }

    /// Nothing more is told of it; it drains.
    pub(super) fn kill(&mut self) {
        if std::mem::replace(&mut self.killed, true) {
            return;
        }
        self.front += self.queue.len() as u64;
        self.queue.clear();
        self.cursor = 0;
        self.stop();
    }

    /// Something ended it: what it had not done is flushed.
    pub(super) fn fail(&mut self, code: u32, turn: &mut Turn<'_>) {
        if let Phase::Ready(_) = self.phase {
            self.failed = Some(code);
            turn.counters.channels_failed += 1;
            self.stop();
            for read in &mut self.queue {
                read.outcome.get_or_insert(CompletionStatus::Flushed(code));
            }
        }
        self.hand_over(turn.done);
    }

    /// ERR, so that what is on its way is flushed.
    fn stop(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Gone) {
            Phase::Ready(mut pair) => {
                let marker = match (pair.to_error(), self.ring.is_empty()) {
                    (Ok(()), false) => Marker::Due,
                    (Ok(()), true) => Marker::Back,
                    (Err(_), _) => Marker::Hopeless,
                };
                self.phase = Phase::Draining {
                    pair,
                    marker,
                    until: None,
                };
            }
            other => self.phase = other,
        }
    }

    /// One completion of this queue pair.
    pub(super) fn on_ended(&mut self, ended: Ended, number: u64, turn: &mut Turn<'_>) {
        let success = ended.status == 0;
        if number == WorkId::POSITION_MAX {
            match &mut self.phase {
                Phase::Draining { marker, .. } => *marker = Marker::Back,
                Phase::Ready(_) | Phase::Gone | Phase::Stuck => turn.counters.strays += 1,
            }
            return;
        }
        let closed = match self.ring.closes(number, success) {
            Ok(closed) => closed,
            Err(stray) => {
                match stray {
                    Stray::Duplicate => turn.counters.duplicates += 1,
                    Stray::Unknown => turn.counters.strays += 1,
                }
                return self.fail(code::STRAY, turn);
            }
        };
        for at in 1..=closed {
            let Some(request) = self.ring.close_oldest() else {
                break;
            };
            // Those before the one that failed succeeded: errors come in order.
            let good = success || at < closed;
            if !good {
                break;
            }
            self.bytes += request.bytes as u64;
            self.moved_at = turn.now;
            let place = request.read.checked_sub(self.front);
            let read = place.and_then(|place| self.queue.get_mut(place as usize));
            let Some(read) = read else {
                continue; // of a channel that is over: it was told, or need not be
            };
            read.requests -= 1;
            if read.requests == 0 && read.cut == read.into.len() {
                read.outcome.get_or_insert(CompletionStatus::Success);
            }
        }
        self.refused = false;
        self.hand_over(turn.done);
        if !success {
            self.fail(code::VERBS | (ended.status & 0xFF), turn);
        }
    }

    /// Moves it on: posts what can be posted, or drains.
    pub(super) fn turn(&mut self, turn: &mut Turn<'_>) {
        match &mut self.phase {
            Phase::Ready(_) => self.pump(turn),
            Phase::Draining {
                pair,
                marker,
                until,
            } => {
                let until = *until.get_or_insert(turn.now.after(MARKER_MAX));
                if *marker == Marker::Due {
                    *marker = post_marker(pair, self.id, turn.batch);
                }
                let over = match marker {
                    Marker::Back | Marker::Hopeless => true,
                    Marker::Due | Marker::Posted => self.ring.is_empty() || turn.now >= until,
                };
                if over {
                    self.destroy(turn);
                }
            }
            Phase::Gone | Phase::Stuck => {}
        }
    }

    fn destroy(&mut self, turn: &mut Turn<'_>) {
        let Phase::Draining { pair, .. } = std::mem::replace(&mut self.phase, Phase::Gone) else {
            return;
        };
        turn.counters.completions_lost += self.ring.len() as u64;
        match pair.destroy() {
            Ok(()) => {
                while self.ring.close_oldest().is_some() {}
                self.share = None;
            }
            Err(_) => {
                turn.counters.pairs_stuck += 1;
                self.phase = Phase::Stuck;
            }
        }
    }

    /// What became of it, for the slab.
    pub(super) fn reap(&self, undelivered: usize) -> Reap {
        match (&self.phase, self.killed) {
            (Phase::Stuck, true) => Reap::Stuck,
            (Phase::Gone, true) => Reap::Quiet,
            (Phase::Draining { .. }, true) => Reap::Draining(self.ring.len()),
            (_, false) => Reap::Draining(self.queue.len() + undelivered),
            (Phase::Ready(_), true) => Reap::Draining(self.ring.len()),
        }
    }

    /// Moves the completions of all reads from the front that have an outcome to `done`.
    pub(super) fn hand_over(&mut self, done: &mut VecDeque<Completed>) {
        while let Some(read) = self.queue.front()
            && let Some(status) = read.outcome
        {
            done.push_back(Completed {
                work: WorkId::new(self.id, read.position),
                status,
            });
            self.queue.pop_front();
            self.front += 1;
            self.cursor = self.cursor.saturating_sub(1);
        }
    }

    /// Posts requests as far as the queue's credit goes.
    pub(super) fn pump(&mut self, turn: &mut Turn<'_>) {
        self.refused = false;
        loop {
            self.fill(turn.batch, turn.entries);
            let Phase::Ready(pair) = &mut self.phase else {
                return;
            };
            if turn.batch.is_empty() {
                return;
            }
            turn.batch.signal_last();
            self.ring.signal_last();
            let made = turn.batch.len();
            let failed = match pair.post(turn.batch) {
                Ok(()) => {
                    turn.counters.requests += made as u64;
                    turn.counters.posts += 1;
                    continue;
                }
                Err(failed) => failed,
            };
            turn.counters.requests += failed.posted as u64;
            for _ in failed.posted..made {
                self.unmake();
            }
            if failed.errno == libc::ENOMEM || failed.errno == libc::EAGAIN {
                // Back-pressure of the queue pair itself: the rest waits here.
                turn.counters.posts_refused += 1;
                self.refused = true;
                return;
            }
            return self.fail(code::LOCAL | failed.errno as u32, turn);
        }
    }

    /// Makes requests of the next reads.
    fn fill(&mut self, batch: &mut WorkBatch, entries: &mut Vec<Entry>) {
        batch.clear();
        while self.ring.free() > 0 && batch.len() < BATCH_MAX {
            let Some(read) = self.queue.get_mut(self.cursor) else {
                return;
            };
            if !read.is_open() {
                self.cursor += 1;
                continue;
            }
            let rule = &self.remote.rule;
            let cut = next_request(
                rule,
                &read.from[read.cut..],
                &read.into[read.cut..],
                entries,
            );
            let from = read.from[read.cut].page as u64;
            let signalled = self.ring.signal_due(self.remote.signal_every);
            batch.push(ReadWork {
                wr_id: WorkId::new(self.id, self.ring.next_number()).bits(),
                signalled,
                remote_address: self.remote.base + from * rule.stride_remote as u64,
                remote_key: self.remote.key,
            });
            for entry in entries.iter() {
                batch.into_page(entry.page, entry.bytes);
            }
            self.ring.push(Posted {
                read: self.front + self.cursor as u64,
                pages: cut.pages,
                bytes: cut.bytes,
                signalled,
            });
            read.cut += cut.pages;
            read.requests += 1;
        }
    }

    /// Takes the newest request back: it was not posted.
    fn unmake(&mut self) {
        let Some(request) = self.ring.pop_newest() else {
            return;
        };
        let place = (request.read - self.front) as usize;
        self.cursor = self.cursor.min(place);
        if let Some(read) = self.queue.get_mut(place) {
            read.cut -= request.pages;
            read.requests -= 1;
        }
    }
}

/// Posts the one signalled request whose flush proves that all before it have ended (E4).
fn post_marker(pair: &mut QueuePair, id: ChannelId, batch: &mut WorkBatch) -> Marker {
    batch.clear();
    batch.push(ReadWork {
        wr_id: WorkId::new(id, WorkId::POSITION_MAX).bits(),
        signalled: true,
        // It reads nothing, from nowhere: in ERR it is only flushed.
        remote_address: 0,
        remote_key: 0,
    });
    match pair.post(batch) {
        Ok(()) => Marker::Posted,
        Err(failed) if failed.errno == libc::ENOMEM || failed.errno == libc::EAGAIN => Marker::Due,
        Err(_) => Marker::Hopeless,
    }
}
