//! A request's place at a node: counted while it lives, measured when it ends well.

use kvserve_runtime::Nanos;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Weight of the newest request in the averages: the last ten or so count.
const NEWEST_WEIGHT: f64 = 0.2;

/// What a node has from this proxy. Shared by the table and the tickets; outlives the node's
/// entry until the last ticket is gone.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) unfinished: Cell<u32>,
    pub(super) finished: Cell<u64>,
    pub(super) failed: Cell<u64>,
    /// Seconds from forwarding to the answer's end; `None` until one has ended.
    pub(super) latency_s: Cell<Option<f64>>,
    /// Seconds from forwarding to the answer's head.
    pub(super) first_byte_s: Cell<Option<f64>>,
    /// Events (tokens, mostly) a second over a stream's life.
    pub(super) speed: Cell<Option<f64>>,
    /// Other nodes are preferred until then.
    pub(super) avoid_until: Cell<Nanos>,
    gone: Cell<bool>,
    waiters: RefCell<BTreeMap<u64, Waker>>,
    next_waiter: Cell<u64>,
}

impl Load {
    /// The node has left the cluster: wakes everyone who waits for it.
    pub(super) fn mark_gone(&self) {
        self.gone.set(true);
        let waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        waiters.into_values().for_each(Waker::wake);
    }
}

fn averaged(average: &Cell<Option<f64>>, newest: f64) {
    average.set(Some(match average.get() {
        Some(old) => old + (newest - old) * NEWEST_WEIGHT,
        None => newest,
    }));
}

/// One request at one node. Dropping it ends the count.
#[derive(Debug)]
pub struct Ticket {
    /// The node's name.
    pub node: String,
    /// Its API.
    pub address: SocketAddr,
    load: Rc<Load>,
    waiter: u64,
    started: Nanos,
}

impl Ticket {
    pub(super) fn new(node: String, address: SocketAddr, load: Rc<Load>, now: Nanos) -> Self {
        load.unfinished.set(load.unfinished.get() + 1);
        let waiter = load.next_waiter.get();
        load.next_waiter.set(waiter + 1);
        Ticket {
            node,
            address,
            load,
            waiter,
            started: now,
        }
    }

    /// Runs `work`, at most until the node is gone (`None`).
    pub async fn unless_gone<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(value) = work.as_mut().poll(context) {
                return Poll::Ready(Some(value));
            }
            if self.load.gone.get() {
                return Poll::Ready(None);
            }
            self.load
                .waiters
                .borrow_mut()
                .insert(self.waiter, context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// The head of the answer came.
    pub fn answered(&self, now: Nanos) {
        averaged(
            &self.load.first_byte_s,
            now.since(self.started).as_secs_f64(),
        );
    }

    /// The answer is whole; `events` of it were streamed.
    pub fn finish(self, now: Nanos, events: u64) {
        let span_s = now.since(self.started).as_secs_f64();
        averaged(&self.load.latency_s, span_s);
        if events > 0 && span_s > 0.0 {
            averaged(&self.load.speed, events as f64 / span_s);
        }
        self.load.finished.set(self.load.finished.get() + 1);
    }

    /// The node failed this request; others are preferred until `avoid_until`.
    pub fn fail(self, avoid_until: Nanos) {
        self.load.failed.set(self.load.failed.get() + 1);
        self.load.avoid_until.set(avoid_until);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.load.unfinished.set(self.load.unfinished.get() - 1);
        self.load.waiters.borrow_mut().remove(&self.waiter);
    }
}
