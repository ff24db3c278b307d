//! First come, first served admission of requests on a decode node: a place among the running
//! and pages for the prompt, both at once (PROTOCOL C3).

use kvserve_kv::PageId;
use kvserve_kv::ledger::{AllocateAs, LedgerCell};
use kvserve_runtime::Shard;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// How often the head of the queue looks whether pages have come back. Only the head looks;
/// everybody behind it sleeps until it is the head.
const HEAD_TICK: Duration = Duration::from_millis(2);

/// The queue is at its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionFull {
    /// Requests waiting.
    pub queued: usize,
    /// The bound.
    pub queued_max: usize,
}

/// The queue of one decode node.
pub struct Admission {
    running: Cell<usize>,
    running_max: usize,
    queued_max: usize,
    next_ticket: Cell<u64>,
    queue: RefCell<VecDeque<(u64, Option<Waker>)>>,
}

/// A place among the running; dropping it lets the next one in.
pub struct Admitted {
    admission: Rc<Admission>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let running = &self.admission.running;
        running.set(running.get() - 1);
    }
}

/// A place in the queue; dropping it leaves the queue.
struct Ticket {
    admission: Rc<Admission>,
    number: u64,
}

impl Ticket {
    fn is_head(&self) -> bool {
        let queue = self.admission.queue.borrow();
        queue
            .front()
            .is_some_and(|(number, _)| *number == self.number)
    }

    async fn becomes_head(&self) {
        poll_fn(|cx| {
            if self.is_head() {
                return Poll::Ready(());
            }
            let mut queue = self.admission.queue.borrow_mut();
            if let Some((_, waker)) = queue.iter_mut().find(|(n, _)| *n == self.number) {
                *waker = Some(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.admission.queue.borrow_mut();
            queue.retain(|(number, _)| *number != self.number);
            queue.front_mut().and_then(|(_, waker)| waker.take())
        };
        if let Some(next) = next {
            next.wake();
        }
    }
}

impl Admission {
    /// An empty queue.
    pub fn new(running_max: usize, queued_max: usize) -> Rc<Self> {
        Rc::new(Admission {
            running: Cell::new(0),
            running_max,
            queued_max,
            next_ticket: Cell::new(0),
            queue: RefCell::default(),
        })
    }

    /// Requests admitted.
    pub fn running(&self) -> usize {
        self.running.get()
    }

    /// Requests waiting.
    pub fn queued(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Waits for a place; `room` says whether the pages for it are there now. The caller bounds
    /// the wait by the request's deadline.
    ///
    /// # Errors
    /// [`AdmissionFull`] at once when the queue is at its bound.
    pub async fn enter(
        self: &Rc<Self>,
        shard: &Shard,
        room: impl Fn() -> bool,
    ) -> Result<Admitted, AdmissionFull> {
        let queued = self.queued();
        let may_enter = || self.running.get() < self.running_max && room();
        if queued == 0 && may_enter() {
            self.running.set(self.running.get() + 1);
            return Ok(Admitted {
                admission: self.clone(),
            });
        }
        if queued >= self.queued_max {
            return Err(AdmissionFull {
                queued,
                queued_max: self.queued_max,
            });
        }
        let number = self.next_ticket.get();
        self.next_ticket.set(number + 1);
        self.queue.borrow_mut().push_back((number, None));
        let ticket = Ticket {
            admission: self.clone(),
            number,
        };
        loop {
            ticket.becomes_head().await;
            if may_enter() {
                self.running.set(self.running.get() + 1);
                return Ok(Admitted {
                    admission: self.clone(),
                });
            }
            shard.sleep(HEAD_TICK).await;
        }
    }
}

/// Takes pages for a pull, if they are there now.
pub fn reserve(ledger: &LedgerCell, pages: usize) -> Option<Vec<PageId>> {
    let mut out = Vec::with_capacity(pages);
    ledger
        .with(|ledger| ledger.allocate(pages, AllocateAs::Pulling, &mut out))
        .ok()?;
    Some(out)
}
