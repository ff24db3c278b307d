//! One data connection as the reading side sees it: requests out, answers in, in order.
//!
//! Two cursors run over the same queue of reads. `wire` is what the peer still owes bytes for;
//! `handed` is how many of those, from the front, have already given their completion. It runs
//! ahead only over abandoned reads: those are over for the caller at once, while their bytes
//! still have to come by and go into scrap (PROTOCOL E3).

use super::wire::{ANSWER_BYTES, AnswerHead, READS_IN_FLIGHT_MAX, ReadRequest};
use crate::pool::{PageId, PoolMemory};
use crate::transport::sys::{self, Interest, IoVecs, Socket, Trouble};
use crate::transport::{Read, code};
use kvserve_runtime::{ChannelId, Completed, CompletionStatus, Nanos, WorkId};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// What every channel of a transport uses in its turn.
pub(super) struct Turn<'a> {
    pub(super) now: Nanos,
    pub(super) pool: &'a PoolMemory,
    pub(super) page_bytes: usize,
    pub(super) list: &'a mut IoVecs,
    /// Where bytes of abandoned reads go.
    pub(super) scrap: &'a mut [u8],
    /// Bytes that may still be moved in this turn.
    pub(super) budget: &'a mut usize,
    /// Completions in order, for the transport to hand out.
    pub(super) done: &'a mut VecDeque<Completed>,
    /// How long a connection with abandoned reads may stand still.
    pub(super) still_max: Duration,
}

/// A read whose answer has not come whole.
struct Pending {
    position: u64,
    /// Target pages; empty once abandoned.
    into: Vec<PageId>,
    /// Pages that come over the wire, abandoned or not.
    pages: usize,
    outcome: Option<CompletionStatus>,
}

impl Pending {
    fn is_abandoned(&self) -> bool {
        self.into.is_empty()
    }
}

/// The pages of the answer that is coming in now.
#[derive(Clone, Copy)]
struct Body {
    bytes: usize,
    done: usize,
}

/// How a channel stands.
pub(super) enum Link {
    Open(Socket),
    Failed(u32),
    Killed,
}

pub(super) struct Channel {
    id: ChannelId,
    incarnation: u64,
    link: Link,
    wire: VecDeque<Pending>,
    handed: usize,
    /// Abandoned reads in `wire`.
    scraps: usize,
    /// Since when the connection has stood still while it owes scrap.
    still_since: Option<Nanos>,
    requests: Vec<u8>,
    requests_sent: usize,
    head: [u8; ANSWER_BYTES],
    head_filled: usize,
    body: Option<Body>,
    last_position: Option<u64>,
    /// The epoll has said that there is something.
    pub(super) ready: bool,
    /// Bytes received, heads included.
    pub(super) bytes: u64,
    /// Of those, bytes thrown away.
    pub(super) scrap_bytes: u64,
    /// When bytes last came in.
    pub(super) moved_at: Nanos,
}

impl Channel {
    pub(super) fn new(id: ChannelId, socket: Socket, incarnation: u64) -> Self {
        Channel {
            id,
            incarnation,
            link: Link::Open(socket),
            wire: VecDeque::new(),
            handed: 0,
            scraps: 0,
            still_since: None,
            requests: Vec::new(),
            requests_sent: 0,
            head: [0; ANSWER_BYTES],
            head_filled: 0,
            body: None,
            last_position: None,
            ready: false,
            bytes: 0,
            scrap_bytes: 0,
            moved_at: Nanos(0),
        }
    }

    pub(super) fn id(&self) -> ChannelId {
        self.id
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn socket(&self) -> Option<RawFd> {
        match &self.link {
            Link::Open(socket) => Some(socket.as_raw_fd()),
            Link::Failed(_) | Link::Killed => None,
        }
    }

    /// Reads posted whose completion has not been handed over.
    pub(super) fn outstanding(&self) -> usize {
        self.wire.len() - self.handed
    }

    /// Whether the peer owes bytes.
    pub(super) fn expects(&self) -> bool {
        !self.wire.is_empty()
    }

    /// How many reads may be posted now.
    pub(super) fn room(&self) -> usize {
        match self.link {
            // Abandoned reads count as long as the peer has them queued.
            Link::Open(_) => READS_IN_FLIGHT_MAX - self.wire.len(),
            Link::Failed(_) | Link::Killed => 0,
        }
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Has the epoll wake for what this channel waits for.
    pub(super) fn arm(&mut self) -> io::Result<()> {
        let interest = if self.wants_write() {
            Interest::ReadWrite
        } else {
            Interest::Read
        };
        match &mut self.link {
            Link::Open(socket) => socket.ask(interest),
            Link::Failed(_) | Link::Killed => Ok(()),
        }
    }

    /// When the ladder of E3 has to look again, if it does.
    pub(super) fn wake_at(&self, still_max: Duration) -> Option<Nanos> {
        if self.scraps == 0 || self.socket().is_none() {
            return None;
        }
        // Abandoned since the last turn: the next one starts the clock.
        Some(
            self.still_since
                .map_or(Nanos(0), |since| since.after(still_max)),
        )
    }

    /// Queues one read. The caller has checked the read and the room.
    pub(super) fn queue(&mut self, position: u64, read: Read, page_bytes: usize) {
        debug_assert!(self.last_position.is_none_or(|last| position > last));
        self.last_position = Some(position);
        ReadRequest {
            incarnation: self.incarnation,
            lease: read.lease,
            epoch: read.epoch,
            first: read.first,
            count: read.into.len() as u32,
            page_bytes: page_bytes as u32,
            position,
        }
        .encode(&mut self.requests);
        self.wire.push_back(Pending {
            position,
            pages: read.into.len(),
            into: read.into,
            outcome: None,
        });
    }

    /// Ends the reads at `first..first + count` for the caller: their pages are quiet on return.
    /// Returns how many there were.
    pub(super) fn abandon(
        &mut self,
        first: u64,
        count: u64,
        done: &mut VecDeque<Completed>,
    ) -> u64 {
        let before = self.scraps;
        let end = first.saturating_add(count);
        for pending in &mut self.wire {
            let named = pending.position >= first && pending.position < end;
            if named && pending.outcome.is_none() {
                pending.outcome = Some(CompletionStatus::Error(code::ABANDONED));
                pending.into = Vec::new();
                self.scraps += 1;
            }
        }
        let marked = self.scraps - before;
        self.hand_over(done);
        marked as u64
    }

    /// Closes at once; nothing of it completes any more.
    pub(super) fn kill(&mut self) {
        self.link = Link::Killed;
        self.forget();
    }

    /// Writes requests and reads answers as far as the socket and the turn's budget go.
    pub(super) fn turn(&mut self, turn: &mut Turn<'_>) {
        self.write_requests(turn.done);
        if self.wire.is_empty() {
            if std::mem::take(&mut self.ready) {
                self.poke(turn.done);
            }
            return;
        }
        self.ready = false;
        let before = self.bytes;
        let drained = self.read_answers(turn);
        if self.bytes > before {
            self.moved_at = turn.now;
        }
        self.watch_scrap(turn, self.bytes > before, drained);
    }

    /// Sends what is queued of the requests.
    pub(super) fn write_requests(&mut self, done: &mut VecDeque<Completed>) {
        let Some(socket) = self.socket() else {
            return;
        };
        while self.requests_sent < self.requests.len() {
            let rest = &self.requests[self.requests_sent..];
            match sys::send_bytes(socket, rest) {
                Ok(count) => self.requests_sent += count,
                Err(error) => match Trouble::from(error) {
                    Trouble::NotNow => return,
                    Trouble::Again => {}
                    Trouble::Broken(errno) => return self.fail(code::LOCAL | errno, done),
                },
            }
        }
        self.requests.clear();
        self.requests_sent = 0;
    }

    /// Nothing is owed and yet the socket has something to say: the peer has closed, or talks
    /// unasked.
    fn poke(&mut self, done: &mut VecDeque<Completed>) {
        let Some(socket) = self.socket() else {
            return;
        };
        match sys::receive_bytes(socket, &mut self.head[..1]) {
            Ok(0) => self.fail(code::PEER_CLOSED, done),
            Ok(_) => self.fail(code::PROTOCOL, done),
            Err(error) => match Trouble::from(error) {
                Trouble::NotNow | Trouble::Again => {}
                Trouble::Broken(errno) => self.fail(code::LOCAL | errno, done),
            },
        }
    }

    /// Returns whether the socket had no more to give (as opposed to the budget being used up).
    fn read_answers(&mut self, turn: &mut Turn<'_>) -> bool {
        while self.expects() && *turn.budget > 0 {
            let Some(socket) = self.socket() else {
                return true;
            };
            turn.list.clear();
            let body_part = self.list_body(turn);
            let body_left = self.body.map_or(0, |body| body.bytes - body.done);
            // After the rest of a body comes the head of the next answer, if one is due: both
            // in one call.
            let head_due = self.body.is_none() || self.wire.len() > 1;
            if head_due && body_part == body_left && !turn.list.is_full() {
                let rest = &mut self.head[self.head_filled..];
                turn.list.push(rest.as_mut_ptr(), rest.len());
            }
            let wanted = turn.list.bytes();
            // SAFETY: the list names `self.head`, the transport's scrap, and pages that the
            // read's slot guards until its completion (PROTOCOL E1); no reference to them lives.
            let received = unsafe { sys::receive(socket, turn.list) };
            match received {
                Ok(0) => {
                    self.fail(code::PEER_CLOSED, turn.done);
                    return true;
                }
                Ok(count) => {
                    *turn.budget = turn.budget.saturating_sub(count);
                    self.bytes += count as u64;
                    self.take(count, body_part, turn);
                    // A short read has drained the socket; asking again would only cost a call.
                    if count < wanted {
                        return true;
                    }
                }
                Err(error) => match Trouble::from(error) {
                    Trouble::NotNow => return true,
                    Trouble::Again => return false,
                    Trouble::Broken(errno) => {
                        self.fail(code::LOCAL | errno, turn.done);
                        return true;
                    }
                },
            }
        }
        false
    }

    /// Lists where the next bytes of the body go, within the budget; returns how many.
    fn list_body(&self, turn: &mut Turn<'_>) -> usize {
        let (Some(body), Some(front)) = (self.body, self.wire.front()) else {
            return 0;
        };
        let part = (body.bytes - body.done).min(*turn.budget);
        if front.is_abandoned() {
            let part = part.min(turn.scrap.len());
            turn.list.push(turn.scrap.as_mut_ptr(), part);
            return part;
        }
        let mut at = body.done;
        let end = body.done + part;
        while at < end {
            let offset = at % turn.page_bytes;
            let len = (turn.page_bytes - offset).min(end - at);
            let page = turn.pool.page(front.into[at / turn.page_bytes]);
            turn.list.push(page.wrapping_add(offset), len);
            at += len;
        }
        part
    }

    /// Accounts for `count` bytes received: first the body's listed part, then the head.
    fn take(&mut self, count: usize, body_part: usize, turn: &mut Turn<'_>) {
        let of_body = count.min(body_part);
        if let Some(body) = &mut self.body {
            body.done += of_body;
            if self.wire.front().is_some_and(Pending::is_abandoned) {
                self.scrap_bytes += of_body as u64;
            }
            if body.done == body.bytes {
                self.body = None;
                self.finish_front(CompletionStatus::Success, turn.done);
            }
        }
        self.head_filled += count - of_body;
        if self.head_filled == ANSWER_BYTES {
            self.head_filled = 0;
            self.start_answer(turn);
        }
    }

    /// A head is complete: it must be the answer to the front read.
    fn start_answer(&mut self, turn: &mut Turn<'_>) {
        let (Ok(head), Some(front)) = (AnswerHead::decode(&self.head), self.wire.front()) else {
            return self.fail(code::PROTOCOL, turn.done);
        };
        let fits = head.position == front.position
            && head.count as usize == front.pages
            && head.page_bytes as usize == turn.page_bytes;
        if !fits || head.code >= code::LOCAL {
            return self.fail(code::PROTOCOL, turn.done);
        }
        if head.code != 0 {
            return self.finish_front(CompletionStatus::Error(head.code), turn.done);
        }
        self.body = Some(Body {
            bytes: front.pages * turn.page_bytes,
            done: 0,
        });
    }

    /// The front read's bytes are through. An abandoned one has its outcome already.
    fn finish_front(&mut self, status: CompletionStatus, done: &mut VecDeque<Completed>) {
        let front = self.wire.front_mut().expect("an answer belongs to a read");
        if front.is_abandoned() {
            self.scraps -= 1;
        }
        front.outcome.get_or_insert(status);
        self.hand_over(done);
        // The front has an outcome, so at least it has been handed over.
        self.wire.pop_front();
        self.handed -= 1;
    }

    /// Moves the completions of all reads from the front that have an outcome to `done`.
    fn hand_over(&mut self, done: &mut VecDeque<Completed>) {
        while let Some(pending) = self.wire.get(self.handed)
            && let Some(status) = pending.outcome
        {
            done.push_back(Completed {
                work: WorkId::new(self.id, pending.position),
                status,
            });
            self.handed += 1;
        }
    }

    /// The connection is over: it is closed here, so every page is quiet, and each read that has
    /// no outcome is flushed with `code`.
    fn fail(&mut self, code: u32, done: &mut VecDeque<Completed>) {
        self.link = Link::Failed(code);
        for pending in &mut self.wire {
            pending
                .outcome
                .get_or_insert(CompletionStatus::Flushed(code));
        }
        self.hand_over(done);
        self.forget();
    }

    fn forget(&mut self) {
        self.wire.clear();
        self.handed = 0;
        self.scraps = 0;
        self.still_since = None;
        self.requests = Vec::new();
        self.requests_sent = 0;
        self.head_filled = 0;
        self.body = None;
    }

    /// E3: a connection that owes scrap and stands still is given up. The clock only counts
    /// while the socket was found empty, so a pause of our own is not the peer's.
    fn watch_scrap(&mut self, turn: &mut Turn<'_>, moved: bool, drained: bool) {
        if self.scraps == 0 || self.socket().is_none() {
            self.still_since = None;
            return;
        }
        match self.still_since {
            Some(since) if !moved && drained => {
                if turn.now.since(since) >= turn.still_max {
                    self.fail(code::STOOD_STILL, turn.done);
                }
            }
            Some(_) | None => self.still_since = Some(turn.now),
        }
    }
}
