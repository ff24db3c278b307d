//! What the two cards do: one request at a time, in order, with the statuses of the table.

use crate::device::{FakeContext, QueueCore};
use crate::wire::{Rule, TIME_SCALE, WireCounters};
use rdma_core_sys::{self as sys, ibv_async_element, ibv_wc};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which of the two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Near,
    Far,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::Near => Side::Far,
            Side::Far => Side::Near,
        }
    }
}

/// One request on its way.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub wr_id: u64,
    pub signalled: bool,
    pub remote_address: u64,
    pub remote_key: u32,
    pub scatter: Vec<(u64, u32, u32)>,
    /// What a rule makes of it.
    pub fate: Option<Rule>,
}

/// A queue pair as its card knows it.
pub(crate) struct Pair {
    pub state: u32,
    pub peer: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub remote_read: bool,
    pub depth: usize,
    pub queue: Arc<QueueCore>,
    pub requests: VecDeque<Request>,
    /// Since when the oldest request has had no answer.
    pub unanswered: Option<Instant>,
    /// Address of the caller's struct, to name it in events.
    pub name: usize,
}

/// A registered region.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub start: u64,
    pub bytes: u64,
    pub flags: i32,
}

/// One device.
#[derive(Default)]
pub(crate) struct Card {
    pub pairs: HashMap<u32, Pair>,
    /// In the order in which they were made, so that turns are fair and repeatable.
    pub order: Vec<u32>,
    pub memory: HashMap<u32, Memory>,
    /// Addresses of the contexts, for events.
    pub contexts: Vec<usize>,
    /// The process behind it is dead: it answers nothing.
    pub dead: bool,
    pub link_down: bool,
    pub rules: Vec<(u64, Rule)>,
    /// Requests posted on it so far.
    pub posted: u64,
    /// Posts get `ENOMEM` once so many more requests were taken.
    pub enomem_after: Option<u64>,
    pub destroy_fails: bool,
    pub flushes_lost: bool,
}

/// What the wire carries between the two.
#[derive(Default)]
pub(crate) struct Cards {
    pub near: Card,
    pub far: Card,
    pub lossy: bool,
    /// READs move only when the test says so.
    pub by_hand: bool,
    /// Requests that may move now, when by hand.
    pub may_move: u64,
    pub counters: WireCounters,
}

enum Answer {
    Done,
    Failed(u32),
    NotYet(Option<Instant>),
}

impl Cards {
    pub fn side(&mut self, side: Side) -> &mut Card {
        match side {
            Side::Near => &mut self.near,
            Side::Far => &mut self.far,
        }
    }

    /// Does all that can be done now; when something is due later.
    pub fn turn(&mut self, now: Instant) -> Option<Instant> {
        let mut due: Option<Instant> = None;
        for side in [Side::Near, Side::Far] {
            let order = self.side(side).order.clone();
            for number in order {
                while let Some(later) = self.step(side, number, now) {
                    match later {
                        None => continue,
                        Some(at) => {
                            due = Some(due.map_or(at, |due| due.min(at)));
                            break;
                        }
                    }
                }
            }
        }
        due
    }

    /// One request of one queue pair. `None`: nothing to do. `Some(None)`: went on. `Some(at)`:
    /// waits until then.
    fn step(&mut self, side: Side, number: u32, now: Instant) -> Option<Option<Instant>> {
        let pair = self.side(side).pairs.get(&number)?;
        let request = pair.requests.front()?.clone();
        match pair.state {
            sys::IBV_QPS_ERR => {
                self.flush(side, number);
                None
            }
            sys::IBV_QPS_RTS => {
                let answer = self.attempt(side, number, &request, now);
                self.conclude(side, number, request, answer)
            }
            _ => None,
        }
    }

    fn conclude(
        &mut self,
        side: Side,
        number: u32,
        request: Request,
        answer: Answer,
    ) -> Option<Option<Instant>> {
        match answer {
            Answer::NotYet(None) => None,
            Answer::NotYet(Some(at)) => Some(Some(at)),
            Answer::Done => {
                let pair = self.side(side).pairs.get_mut(&number)?;
                pair.requests.pop_front();
                pair.unanswered = None;
                let times = match request.fate {
                    Some(Rule::LoseCompletion) => 0,
                    Some(Rule::DoubleCompletion) => 2,
                    Some(Rule::Fail(_)) | None => usize::from(request.signalled),
                };
                let queue = pair.queue.clone();
                for _ in 0..times {
                    queue.push(completion(request.wr_id, sys::IBV_WC_SUCCESS, number));
                }
                self.counters.completed += 1;
                Some(None)
            }
            Answer::Failed(status) => {
                let pair = self.side(side).pairs.get_mut(&number)?;
                pair.requests.pop_front();
                pair.state = sys::IBV_QPS_ERR;
                let queue = pair.queue.clone();
                // A failed one completes whether it was signalled or not.
                queue.push(completion(request.wr_id, status, number));
                self.flush(side, number);
                None
            }
        }
    }

    /// Everything on a queue pair in ERR comes back as flushed, in order.
    pub fn flush(&mut self, side: Side, number: u32) {
        let card = self.side(side);
        let lost = card.flushes_lost;
        let Some(pair) = card.pairs.get_mut(&number) else {
            return;
        };
        pair.unanswered = None;
        if lost {
            return; // they stay, and never come
        }
        let queue = pair.queue.clone();
        for request in pair.requests.drain(..) {
            queue.push(completion(request.wr_id, sys::IBV_WC_WR_FLUSH_ERR, number));
        }
    }

    fn attempt(&mut self, side: Side, number: u32, request: &Request, now: Instant) -> Answer {
        if let Some(Rule::Fail(status)) = request.fate {
            return Answer::Failed(status);
        }
        let Some(pair) = self.side(side).pairs.get(&number) else {
            return Answer::NotYet(None);
        };
        let peer_number = pair.peer;
        if self.side(side).link_down || self.side(side.other()).link_down {
            return Answer::Failed(sys::IBV_WC_WR_FLUSH_ERR);
        }
        let lossy = self.lossy;
        let there = self.side(side.other());
        let answers = |pair: &Pair| {
            matches!(pair.state, sys::IBV_QPS_RTR | sys::IBV_QPS_RTS) && pair.peer == number
        };
        let reached = !lossy && !there.dead && there.pairs.get(&peer_number).is_some_and(answers);
        if !reached {
            return self.unanswered(side, number, now);
        }
        if self.by_hand {
            if self.may_move == 0 {
                return Answer::NotYet(None);
            }
            self.may_move -= 1;
        }
        self.read(side, peer_number, request)
    }

    /// (retry_cnt + 1) timers and some 15 %; 7 and 0 mean "for ever", as on soft-RoCE.
    fn unanswered(&mut self, side: Side, number: u32, now: Instant) -> Answer {
        let Some(pair) = self.side(side).pairs.get_mut(&number) else {
            return Answer::NotYet(None);
        };
        if pair.retry_cnt == 7 || pair.timeout == 0 {
            return Answer::NotYet(None);
        }
        let since = *pair.unanswered.get_or_insert(now);
        let timer_ns = 4096_u64 << pair.timeout.min(31);
        let all_ns = timer_ns * (u64::from(pair.retry_cnt) + 1) * 115 / 100 / TIME_SCALE;
        let until = since + Duration::from_nanos(all_ns);
        match now >= until {
            true => Answer::Failed(sys::IBV_WC_RETRY_EXC_ERR),
            false => Answer::NotYet(Some(until)),
        }
    }

    fn read(&mut self, side: Side, peer_number: u32, request: &Request) -> Answer {
        let bytes: u64 = request
            .scatter
            .iter()
            .map(|(_, len, _)| u64::from(*len))
            .sum();
        let there = self.side(side.other());
        let readable = |memory: &Memory| {
            memory.flags & sys::IBV_ACCESS_REMOTE_READ != 0
                && request.remote_address >= memory.start
                && request
                    .remote_address
                    .checked_add(bytes)
                    .is_some_and(|end| end <= memory.start + memory.bytes)
        };
        let known = there.memory.get(&request.remote_key).is_some_and(readable);
        let allowed = there
            .pairs
            .get(&peer_number)
            .is_some_and(|pair| pair.remote_read);
        if !known || !allowed {
            // The answering queue pair is in error, too.
            let contexts = there.contexts.clone();
            if let Some(pair) = there.pairs.get_mut(&peer_number) {
                pair.state = sys::IBV_QPS_ERR;
                let element = ibv_async_element {
                    qp: pair.name as *mut sys::ibv_qp,
                };
                tell(&contexts, element, sys::IBV_EVENT_QP_ACCESS_ERR);
            }
            self.flush(side.other(), peer_number);
            return Answer::Failed(sys::IBV_WC_REM_ACCESS_ERR);
        }
        let here = self.side(side);
        let lands = |(address, len, key): &(u64, u32, u32)| {
            here.memory.get(key).is_some_and(|memory| {
                memory.flags & sys::IBV_ACCESS_LOCAL_WRITE != 0
                    && *address >= memory.start
                    && address + u64::from(*len) <= memory.start + memory.bytes
            })
        };
        if !request.scatter.iter().all(lands) {
            return Answer::Failed(sys::IBV_WC_LOC_PROT_ERR);
        }
        let mut from = request.remote_address;
        for (address, len, _) in &request.scatter {
            // SAFETY: both ranges lie in regions that are registered, which their owners keep
            // mapped; whoever posted the request keeps the target to it until it ends. The two
            // pools are different mappings.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from as *const u8,
                    *address as *mut u8,
                    *len as usize,
                );
            }
            from += u64::from(*len);
        }
        self.counters.bytes += bytes;
        Answer::Done
    }
}

/// An asynchronous event for every context of a device.
pub(crate) fn tell(contexts: &[usize], element: ibv_async_element, event: u32) {
    for context in contexts {
        // SAFETY: a context is taken off the list, under the same lock, before it is freed.
        unsafe {
            (*(*context as *const FakeContext))
                .events
                .push(element, event)
        };
    }
}

/// A completion. Of a failed one all fields but the four that are valid hold rubbish on purpose
/// (fault 32).
fn completion(wr_id: u64, status: u32, pair: u32) -> ibv_wc {
    let good = status == sys::IBV_WC_SUCCESS;
    ibv_wc {
        wr_id,
        status,
        opcode: if good { sys::IBV_WC_RDMA_READ } else { 0xDEAD },
        vendor_err: if good { 0 } else { 0x77 },
        byte_len: if good { 0 } else { u32::MAX },
        qp_num: pair,
        ..ibv_wc::default()
    }
}
