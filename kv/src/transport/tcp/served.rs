//! One data connection as the serving side sees it: requests in, answers out, one after the
//! other.
//!
//! A request is resolved to pages only when its turn to be answered has come, so that a lease is
//! checked as late as can be and only one answer's pages are named per connection.

use super::server::{ConnectionId, ReadAuthority, ServerConfig, ServerCounters};
use super::wire::{
    ANSWER_BYTES, AnswerHead, READS_IN_FLIGHT_MAX, REQUEST_BYTES, ReadRequest, pages_per_read_max,
};
use crate::pool::{PageId, PoolMemory};
use crate::transport::code;
use crate::transport::sys::{self, Interest, IoVecs, Socket, Trouble};
use kvserve_runtime::{GuardToken, Nanos};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

/// Requests read in one call: 64 of them are 4 KiB.
const INBOX_BYTES: usize = 64 * REQUEST_BYTES;

/// The code of an answer when the authority itself was wrong (it named pages that are not there).
const REFUSED_INTERNAL: u32 = code::LOCAL - 1;

/// What every connection of a server uses in its turn.
pub(super) struct ServeTurn<'a> {
    pub(super) now: Nanos,
    pub(super) pool: &'a PoolMemory,
    pub(super) page_bytes: usize,
    pub(super) list: &'a mut IoVecs,
    /// Bytes that may still be sent in this turn.
    pub(super) budget: &'a mut usize,
    pub(super) authority: &'a mut dyn ReadAuthority,
    pub(super) counters: &'a mut ServerCounters,
    pub(super) config: ServerConfig,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// The peer closed it or it broke.
    Gone,
    /// The peer sent what the protocol does not allow.
    Violation,
    /// The peer takes no bytes.
    Stalled,
}

/// The answer that is being written.
struct Answer {
    head: [u8; ANSWER_BYTES],
    /// Names its pages until the kernel has taken the bytes (PROTOCOL P6).
    guards: Option<GuardToken>,
    bytes: usize,
    sent: usize,
}

pub(super) struct Served {
    id: ConnectionId,
    socket: Socket,
    inbox: [u8; INBOX_BYTES],
    inbox_filled: usize,
    queue: VecDeque<ReadRequest>,
    answer: Option<Answer>,
    /// Pages of the answer; kept for its memory.
    pages: Vec<PageId>,
    /// When the answer's last byte was taken, or it was begun.
    moved_at: Nanos,
    /// The epoll has said that there is something to read.
    pub(super) readable: bool,
}

impl Served {
    pub(super) fn new(id: ConnectionId, socket: Socket) -> Self {
        Served {
            id,
            socket,
            inbox: [0; INBOX_BYTES],
            inbox_filled: 0,
            queue: VecDeque::new(),
            answer: None,
            pages: Vec::new(),
            moved_at: Nanos(0),
            readable: false,
        }
    }

    pub(super) fn id(&self) -> ConnectionId {
        self.id
    }

    /// Has the epoll wake for what this connection waits for.
    pub(super) fn arm(&mut self) -> io::Result<()> {
        self.socket.ask(if self.unanswered() > 0 {
            Interest::ReadWrite
        } else {
            Interest::Read
        })
    }

    /// Reads that came in and have not been answered whole.
    pub(super) fn unanswered(&self) -> usize {
        self.queue.len() + usize::from(self.answer.is_some())
    }

    /// When the answer in hand has stood still for too long, if there is one.
    pub(super) fn stalls_at(&self, config: &ServerConfig) -> Option<Nanos> {
        self.answer
            .as_ref()
            .map(|_| self.moved_at.after(config.write_stall_max))
    }

    /// Ends the connection's part in the world: the guards of its answer go back. The kernel
    /// holds no pointer, so nothing reads the pages any more.
    pub(super) fn give_back(&mut self, authority: &mut dyn ReadAuthority) {
        if let Some(guards) = self.answer.take().and_then(|answer| answer.guards) {
            authority.served(guards);
        }
        self.queue.clear();
    }

    /// Reads requests if there are any, then writes answers as far as socket and budget go.
    pub(super) fn turn(&mut self, turn: &mut ServeTurn<'_>) -> Result<(), Close> {
        if std::mem::take(&mut self.readable) {
            self.read_requests(turn)?;
        }
        loop {
            if self.answer.is_none() {
                let Some(request) = self.queue.pop_front() else {
                    return Ok(());
                };
                self.begin(request, turn);
            }
            if *turn.budget == 0 {
                return Ok(());
            }
            if !self.write_answer(turn)? {
                return self.check_stall(turn);
            }
        }
    }

    fn check_stall(&self, turn: &ServeTurn<'_>) -> Result<(), Close> {
        if turn.now.since(self.moved_at) >= turn.config.write_stall_max {
            return Err(Close::Stalled);
        }
        Ok(())
    }

    /// One read of the socket: at most 64 requests. What remains keeps the epoll ready.
    fn read_requests(&mut self, turn: &mut ServeTurn<'_>) -> Result<(), Close> {
        let socket = self.socket.as_raw_fd();
        match sys::receive_bytes(socket, &mut self.inbox[self.inbox_filled..]) {
            Ok(0) => return Err(Close::Gone),
            Ok(count) => self.inbox_filled += count,
            Err(error) => match Trouble::from(error) {
                Trouble::NotNow | Trouble::Again => return Ok(()),
                Trouble::Broken(_) => return Err(Close::Gone),
            },
        }
        let mut requests = self.inbox[..self.inbox_filled].chunks_exact(REQUEST_BYTES);
        for bytes in &mut requests {
            let bytes = bytes.try_into().expect("exact chunks");
            let request = ReadRequest::decode(bytes).map_err(|_| Close::Violation)?;
            let fits = request.page_bytes as usize == turn.page_bytes
                && request.count > 0
                && request.count as usize <= pages_per_read_max(turn.page_bytes);
            // One is in the answer in hand; the reading side keeps to the same bound.
            if !fits || self.unanswered() >= READS_IN_FLIGHT_MAX {
                return Err(Close::Violation);
            }
            self.queue.push_back(request);
            turn.counters.requests += 1;
        }
        let rest = requests.remainder().len();
        let used = self.inbox_filled - rest;
        self.inbox.copy_within(used..self.inbox_filled, 0);
        self.inbox_filled = rest;
        Ok(())
    }

    /// Resolves a request and makes its answer the one in hand.
    fn begin(&mut self, request: ReadRequest, turn: &mut ServeTurn<'_>) {
        self.pages.clear();
        let resolved = turn.authority.resolve(
            self.id,
            request.incarnation,
            request.lease,
            request.epoch,
            request.first,
            request.count,
            &mut self.pages,
        );
        let (code, guards) = match resolved {
            Ok(guards) => {
                let sound = self.pages.len() == request.count as usize
                    && self
                        .pages
                        .iter()
                        .all(|page| (page.0 as usize) < turn.pool.pages());
                debug_assert!(sound, "the authority resolved {request:?} wrongly");
                if sound {
                    (0, Some(guards))
                } else {
                    turn.authority.served(guards);
                    (REFUSED_INTERNAL, None)
                }
            }
            // 0 and local codes mean something else on the wire.
            Err(code) if code > 0 && code < code::LOCAL => (code, None),
            Err(_) => (REFUSED_INTERNAL, None),
        };
        if code != 0 {
            self.pages.clear();
            turn.counters.refused += 1;
        }
        let head = AnswerHead {
            code,
            position: request.position,
            count: request.count,
            page_bytes: request.page_bytes,
        };
        self.moved_at = turn.now;
        self.answer = Some(Answer {
            head: head.encode(),
            guards,
            bytes: ANSWER_BYTES + self.pages.len() * turn.page_bytes,
            sent: 0,
        });
    }

    /// Writes on at the answer in hand; returns whether there is reason to go on at once.
    fn write_answer(&mut self, turn: &mut ServeTurn<'_>) -> Result<bool, Close> {
        let Some(answer) = &mut self.answer else {
            return Ok(true);
        };
        turn.list.clear();
        let end = answer.bytes.min(answer.sent + *turn.budget);
        if answer.sent < ANSWER_BYTES {
            let head = &mut answer.head[answer.sent..ANSWER_BYTES.min(end)];
            turn.list.push(head.as_mut_ptr(), head.len());
        }
        let mut at = answer.sent.max(ANSWER_BYTES);
        while at < end {
            let offset = (at - ANSWER_BYTES) % turn.page_bytes;
            let len = (turn.page_bytes - offset).min(end - at);
            let page = self.pages[(at - ANSWER_BYTES) / turn.page_bytes];
            turn.list
                .push(turn.pool.page(page).wrapping_add(offset), len);
            at += len;
        }
        let wanted = turn.list.bytes();
        // SAFETY: the list names the answer's head and pages that its guards keep from being
        // written or handed out (PROTOCOL P6).
        let sent = match unsafe { sys::send(self.socket.as_raw_fd(), turn.list) } {
            Ok(count) => count,
            Err(error) => match Trouble::from(error) {
                Trouble::NotNow | Trouble::Again => return Ok(false),
                Trouble::Broken(_) => return Err(Close::Gone),
            },
        };
        answer.sent += sent;
        *turn.budget = turn.budget.saturating_sub(sent);
        turn.counters.bytes += sent as u64;
        self.moved_at = turn.now;
        if answer.sent < answer.bytes {
            // A short write has filled the socket.
            return Ok(sent == wanted);
        }
        if let Some(guards) = self.answer.take().and_then(|answer| answer.guards) {
            turn.authority.served(guards);
            turn.counters.reads += 1;
            turn.counters.pages += self.pages.len() as u64;
        }
        Ok(true)
    }
}
