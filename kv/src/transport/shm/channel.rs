//! One peer's copy queue: reads in order, copied a piece at a time.

use super::shared::SharedPool;
use super::transport::ShmCounters;
use crate::copy::{Kernel, PageCopy, store_fence};
use crate::pool::{PageId, PoolMemory};
use crate::transport::places::{LearnError, Place, Places};
use crate::transport::sys::{self, Trouble};
use crate::transport::{Read, code};
use kvserve_runtime::{ChannelId, Completed, CompletionStatus, Nanos, WorkId};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{Ordering, fence};

/// Reads that wait or are copied on one channel at most, as on a TCP connection.
pub(super) const READS_MAX: usize = 256;

/// What every channel of a transport uses in its turn.
pub(super) struct Turn<'a> {
    pub(super) now: Nanos,
    pub(super) pool: &'a PoolMemory,
    pub(super) page_bytes: usize,
    pub(super) kernel: Kernel,
    pub(super) hashing: bool,
    /// Bytes that may still be copied in this turn.
    pub(super) budget: &'a mut usize,
    pub(super) done: &'a mut VecDeque<Completed>,
    /// By page of our pool: the hash of what was copied into it last.
    pub(super) sums: &'a mut [Option<u64>],
    pub(super) counters: &'a mut ShmCounters,
}

struct Pending {
    position: u64,
    from: Vec<Place>,
    into: Vec<PageId>,
    /// Pages in place.
    placed: usize,
    outcome: Option<CompletionStatus>,
}

/// How a channel stands.
pub(super) enum Link {
    Open(UnixStream, SharedPool),
    Failed(u32),
    Killed,
}

pub(super) struct Channel {
    id: ChannelId,
    link: Link,
    places: Places,
    queue: VecDeque<Pending>,
    /// The copy of the front read's next page, once begun.
    copy: Option<PageCopy>,
    /// The socket has something to say: it has ended.
    pub(super) ready: bool,
    /// Bytes copied.
    pub(super) bytes: u64,
    /// When the last of them were.
    pub(super) moved_at: Nanos,
}

impl Channel {
    pub(super) fn new(id: ChannelId, stream: UnixStream, shared: SharedPool) -> Self {
        Channel {
            id,
            link: Link::Open(stream, shared),
            places: Places::default(),
            queue: VecDeque::new(),
            copy: None,
            ready: false,
            bytes: 0,
            moved_at: Nanos(0),
        }
    }

    pub(super) fn id(&self) -> ChannelId {
        self.id
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn is_open(&self) -> bool {
        self.socket().is_some()
    }

    fn socket(&self) -> Option<RawFd> {
        match &self.link {
            Link::Open(stream, _) => Some(stream.as_raw_fd()),
            Link::Failed(_) | Link::Killed => None,
        }
    }

    /// Reads whose completion has not been handed over.
    pub(super) fn outstanding(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn room(&self) -> usize {
        match self.link {
            Link::Open(..) => READS_MAX - self.queue.len(),
            Link::Failed(_) | Link::Killed => 0,
        }
    }

    pub(super) fn learn(
        &mut self,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        let Link::Open(_, shared) = &self.link else {
            return Err(LearnError::NotConnected);
        };
        self.places
            .learn(shared.pages(), lease, epoch, first, places)
    }

    pub(super) fn forget_lease(&mut self, lease: u64) {
        self.places.forget(lease);
    }

    /// Queues one read. The caller has checked the read and the room. A read of places that are
    /// not known fails in its turn, alone.
    pub(super) fn queue(&mut self, position: u64, read: Read) {
        let from = self.places.of(&read);
        let outcome = match from {
            Some(_) => None,
            None => Some(CompletionStatus::Error(code::NO_PLACE)),
        };
        self.queue.push_back(Pending {
            position,
            from: from.map(<[Place]>::to_vec).unwrap_or_default(),
            into: read.into,
            placed: 0,
            outcome,
        });
    }

    /// Ends the reads at `first..first + count` for the caller: nothing is copied into their
    /// pages any more. Returns how many there were.
    pub(super) fn abandon(
        &mut self,
        first: u64,
        count: u64,
        done: &mut VecDeque<Completed>,
    ) -> u64 {
        let end = first.saturating_add(count);
        let mut marked = 0;
        for (place, pending) in self.queue.iter_mut().enumerate() {
            let named = pending.position >= first && pending.position < end;
            if named && pending.outcome.is_none() {
                pending.outcome = Some(CompletionStatus::Error(code::ABANDONED));
                marked += 1;
                if place == 0 {
                    self.copy = None;
                }
            }
        }
        self.hand_over(done);
        marked
    }

    /// Nothing of it is copied or completes any more; the map is gone on return.
    pub(super) fn kill(&mut self) {
        self.link = Link::Killed;
        self.forget();
    }

    /// Copies as far as the turn's budget goes.
    pub(super) fn turn(&mut self, turn: &mut Turn<'_>) {
        if std::mem::take(&mut self.ready) {
            self.poke(turn.done);
        }
        self.hand_over(turn.done);
        while *turn.budget > 0
            && let Some(front) = self.queue.front_mut()
            && let Link::Open(_, shared) = &self.link
        {
            let (from, into) = (front.from[front.placed], front.into[front.placed]);
            let moved = |shared: &SharedPool| !from.holds(shared.generation(from.page));
            if self.copy.is_none() && moved(shared) {
                turn.counters.generations_moved += 1;
                front.outcome = Some(CompletionStatus::Error(code::GENERATION));
                self.hand_over(turn.done);
                continue;
            }
            let copy = self
                .copy
                .get_or_insert_with(|| PageCopy::new(turn.page_bytes, turn.hashing));
            turn.sums[into.0 as usize] = None;
            // SAFETY: the source page lies in the peer's pool (checked when learnt), which is
            // mapped; the target is guarded by the read's slot until its completion (PROTOCOL
            // E1) and no reference to it lives. The two are different mappings, and a node does
            // not pull from itself.
            let count = unsafe {
                copy.step(
                    turn.kernel,
                    shared.page(from.page),
                    turn.pool.page(into),
                    *turn.budget,
                )
            };
            *turn.budget = turn.budget.saturating_sub(count);
            self.bytes += count as u64;
            self.moved_at = turn.now;
            // The words above are loaded before the generation below.
            fence(Ordering::Acquire);
            if moved(shared) {
                turn.counters.generations_moved += 1;
                self.copy = None;
                front.outcome = Some(CompletionStatus::Error(code::GENERATION));
            } else if copy.is_whole() {
                turn.sums[into.0 as usize] = copy.hash();
                turn.counters.pages += 1;
                self.copy = None;
                front.placed += 1;
                if front.placed == front.into.len() {
                    // Before an engine reads the pages, wherever it runs.
                    store_fence();
                    front.outcome = Some(CompletionStatus::Success);
                }
            }
            if front.outcome.is_some() {
                self.hand_over(turn.done);
            }
        }
    }

    /// The socket only ever says that the peer is gone.
    fn poke(&mut self, done: &mut VecDeque<Completed>) {
        let Some(socket) = self.socket() else {
            return;
        };
        match sys::receive_bytes(socket, &mut [0]) {
            Ok(0) => self.fail(code::PEER_CLOSED, done),
            Ok(_) => self.fail(code::PROTOCOL, done),
            Err(error) => match Trouble::from(error) {
                Trouble::NotNow | Trouble::Again => {}
                Trouble::Broken(errno) => self.fail(code::LOCAL | errno, done),
            },
        }
    }

    /// Moves the completions of all reads from the front that have an outcome to `done`.
    fn hand_over(&mut self, done: &mut VecDeque<Completed>) {
        while let Some(pending) = self.queue.front()
            && let Some(status) = pending.outcome
        {
            done.push_back(Completed {
                work: WorkId::new(self.id, pending.position),
                status,
            });
            self.queue.pop_front();
        }
    }

    fn fail(&mut self, code: u32, done: &mut VecDeque<Completed>) {
        self.link = Link::Failed(code);
        for pending in &mut self.queue {
            pending
                .outcome
                .get_or_insert(CompletionStatus::Flushed(code));
        }
        self.hand_over(done);
        self.forget();
    }

    fn forget(&mut self) {
        self.queue.clear();
        self.places.clear();
        self.copy = None;
    }
}
