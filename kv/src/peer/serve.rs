//! The prefill side's shell: peers' prompts to the service, the service's pages to the peers.

use super::config::IncomingPrefill;
use super::hub::Inner;
use super::migrate::CHECK_BYTES_PER_TURN;
use super::session::Session;
use crate::checksum::page_checksum;
use crate::lease::{AskVerdict, GrantError, LeaseTable, PeerSession, ReadRefusal};
use crate::ledger::LedgerCell;
use crate::pool::PageId;
use crate::session::frame::{PAYLOAD_BYTES_MAX, RefusedKind};
use crate::session::{AbortReason, AttemptId, Frame, ServiceRefusal};
use crate::transport::tcp::{ConnectionId, ReadAuthority};
use kvserve_runtime::{Deadline, GuardToken, Nanos};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// When the table of leases is full, a peer may ask again after this.
const FULL_RETRY_MS: u32 = 100;

/// Code of a refusal by a node that computes nothing for peers.
pub const NOT_A_PREFILL_NODE: u16 = u16::MAX;

/// At most one queue heartbeat per attempt in this time; the peer waits 3 s for one.
const QUEUED_EVERY: Duration = Duration::from_millis(300);

pub(super) struct Producer {
    session: PeerSession,
    id: AttemptId,
    cancelled: Cell<bool>,
    waker: RefCell<Option<Waker>>,
    pages: RefCell<Vec<PageId>>,
    /// Pages that the service says are ready, and how many of those are published.
    ready: Cell<u32>,
    hashed: Cell<u32>,
    /// The service is through: tokens in the last page.
    tail_tokens: Cell<Option<u32>>,
    hashing: Cell<bool>,
    queued_at: Cell<Nanos>,
    /// The service has not answered yet: a dropped publisher is no abort.
    being_offered: Cell<bool>,
    dropped: Cell<bool>,
}

/// Why [`Publisher::granted`] did not take the pages; they stay the caller's.
#[derive(Debug)]
pub struct GrantRefused {
    /// The pages.
    pub pages: Vec<PageId>,
    /// Why.
    pub error: GrantError,
}

/// The service's hold on one attempt. Dropping it without [`Publisher::complete`] aborts.
///
/// Leased pages are freed only after the peer's hold *and* this one have ended: a service that
/// is told to stop must drop its publisher once no step of its engine can write the pages.
#[must_use = "dropping a publisher aborts its attempt"]
pub struct Publisher {
    inner: Rc<Inner>,
    producer: Rc<Producer>,
    settled: bool,
}

impl Publisher {
    /// All pages of the prompt are reserved; `pages` are those after the ones that the peer
    /// holds, each a share of the caller's in state Building, Ready or Leased (to others). From
    /// an `Ok` on that share is the lease table's, which gives it back to the ledger; the engine
    /// goes on writing those that are not whole until it completes or is cancelled. Watermarks
    /// and `complete` count within `pages`.
    ///
    /// # Errors
    /// The pages, when the attempt is over already, granted before, or they are in another
    /// state.
    pub fn granted(&self, pages: Vec<PageId>) -> Result<(), GrantRefused> {
        let refuse = |pages, error| Err(GrantRefused { pages, error });
        let Some(parts) = &self.inner.pages else {
            return refuse(pages, GrantError::Ended);
        };
        if parts.ledger.with(|ledger| ledger.lease(&pages)).is_err() {
            return refuse(pages, GrantError::NotReserved);
        }
        let Producer { session, id, .. } = *self.producer;
        let now = self.inner.hub.now();
        let granted = self
            .inner
            .with_leases(|leases, out| leases.grant(now, session, id, &pages, out));
        match granted {
            Ok(lease) => {
                if let Some(session) = self.inner.session_numbered(session) {
                    self.inner.send_places(&session, id, lease, &pages);
                }
                self.producer.pages.replace(pages);
                Ok(())
            }
            Err(error) => {
                let undone = parts.ledger.with(|ledger| ledger.unlease(&pages));
                debug_assert!(undone.is_ok(), "leased in this very call");
                refuse(pages, error)
            }
        }
    }

    /// The attempt waits in the engine's queue behind `ahead` others. Call it at each turn of
    /// the engine; a frame goes out every 300 ms at most.
    pub fn queued(&self, ahead: u32) {
        let now = self.inner.hub.now();
        let producer = &self.producer;
        if now.since(producer.queued_at.get()) >= QUEUED_EVERY {
            producer.queued_at.set(now);
            self.inner.with_leases(|leases, out| {
                leases.queued(now, producer.session, producer.id, ahead, out);
            });
        }
    }

    /// The first `pages_ready` pages are whole and will not be written again; their stores are
    /// visible to this thread. Checksums are computed and published in the background. Said
    /// again without new pages, it is a sign of life like [`Publisher::queued`].
    pub fn watermark(&self, pages_ready: usize) {
        let granted = self.producer.pages.borrow().len();
        debug_assert!(pages_ready <= granted, "watermark beyond the lease");
        let ready = pages_ready.min(granted) as u32;
        if ready > self.producer.ready.get() {
            self.producer.ready.set(ready);
            hash_in_background(&self.inner, &self.producer);
        } else {
            self.queued(0);
        }
    }

    /// Sends the first token at once, whatever the pages' state. More than
    /// [`PAYLOAD_BYTES_MAX`] bytes abort the attempt.
    pub fn first_token(&self, payload: Vec<u8>) {
        let Producer { session, id, .. } = *self.producer;
        if payload.len() > PAYLOAD_BYTES_MAX {
            return self.abort_now(AbortReason::Engine);
        }
        let live = self.inner.leases.borrow().is_live(session, id);
        if live && let Some(session) = self.inner.session_numbered(session) {
            session.send(&self.inner, &Frame::FirstToken { id, payload });
        }
    }

    /// The prefill is whole: `pages` granted pages, `tail_tokens` tokens in the last one.
    pub fn complete(mut self, pages: usize, tail_tokens: usize) {
        self.settled = true;
        let granted = self.producer.pages.borrow().len();
        debug_assert!(pages <= granted, "complete beyond the lease");
        let ready = pages.min(granted) as u32;
        self.producer
            .ready
            .set(ready.max(self.producer.ready.get()));
        self.producer.tail_tokens.set(Some(tail_tokens as u32));
        hash_in_background(&self.inner, &self.producer);
        self.let_go();
    }

    /// Gives the attempt up.
    pub fn abort(mut self, reason: AbortReason) {
        self.settled = true;
        self.abort_now(reason);
        self.let_go();
    }

    /// Whether nobody wants the rest any more: stop computing, then drop this.
    pub fn is_cancelled(&self) -> bool {
        self.producer.cancelled.get()
    }

    /// Ready when [`Publisher::is_cancelled`]. One task may wait; the last to ask is woken.
    pub fn poll_cancelled(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_cancelled() {
            return Poll::Ready(());
        }
        let replaced = self.producer.waker.replace(Some(cx.waker().clone()));
        drop(replaced);
        Poll::Pending
    }

    /// Waits for the cancel. Only of use beside another wait: an attempt that completes is
    /// never cancelled.
    pub async fn cancelled(&self) {
        poll_fn(|cx| self.poll_cancelled(cx)).await;
    }

    fn abort_now(&self, reason: AbortReason) {
        let now = self.inner.hub.now();
        let Producer { session, id, .. } = *self.producer;
        self.inner
            .with_leases(|leases, out| leases.abort(now, session, id, reason, out));
    }

    fn let_go(&self) {
        self.inner.producer_gone(&self.producer);
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        self.producer.dropped.set(true);
        if !self.producer.being_offered.get() {
            self.abort_now(AbortReason::Dropped);
            self.let_go();
        }
    }
}

impl Inner {
    pub(super) fn on_prefill(
        &self,
        session: &Rc<Session>,
        id: AttemptId,
        left_ns: u64,
        held_pages: u32,
        prompt: Vec<u32>,
        payload: Vec<u8>,
    ) {
        if id.request.incarnation != session.peer.incarnation {
            return self.count(|counters| counters.frames_stale += 1);
        }
        let service = self.service.clone();
        let (Some(service), true, Some(inner)) =
            (service, session.peer.role.pulls(), self.me.upgrade())
        else {
            let refused = Frame::PrefillRefused {
                id,
                refusal: RefusedKind::Invalid,
                code: NOT_A_PREFILL_NODE,
            };
            return session.send(self, &refused);
        };
        let now = self.hub.now();
        let deadline = Deadline::after(now, Duration::from_nanos(left_ns));
        let verdict =
            self.with_leases(|leases, out| leases.ask(now, session.number, id, deadline.at(), out));
        match verdict {
            AskVerdict::Fresh => {}
            AskVerdict::Old => return self.count(|counters| counters.frames_stale += 1),
            AskVerdict::Full => {
                let retry_ms = FULL_RETRY_MS;
                return session.send(self, &Frame::Busy { id, retry_ms });
            }
        }
        let producer = Rc::new(Producer {
            session: session.number,
            id,
            cancelled: Cell::new(false),
            waker: RefCell::new(None),
            pages: RefCell::default(),
            ready: Cell::new(0),
            hashed: Cell::new(0),
            tail_tokens: Cell::new(None),
            hashing: Cell::new(false),
            queued_at: Cell::new(Nanos(0)),
            being_offered: Cell::new(true),
            dropped: Cell::new(false),
        });
        self.producers
            .borrow_mut()
            .insert((session.number, id), producer.clone());
        let publisher = Publisher {
            inner,
            producer: producer.clone(),
            settled: false,
        };
        let ask = IncomingPrefill {
            peer: session.peer.node_id.clone(),
            request: id.request,
            attempt: id.attempt,
            held_pages,
            prompt,
            payload,
            deadline,
        };
        let answer = service.prefill(ask, publisher);
        producer.being_offered.set(false);
        match answer {
            Ok(()) if producer.dropped.get() => {
                self.with_leases(|leases, out| {
                    leases.abort(now, session.number, id, AbortReason::Dropped, out);
                });
                self.producer_gone(&producer);
            }
            Ok(()) => {}
            Err(refusal) => self.refuse(session, &producer, refusal),
        }
    }

    fn refuse(&self, session: &Session, producer: &Rc<Producer>, refusal: ServiceRefusal) {
        let id = producer.id;
        let frame = match refusal {
            ServiceRefusal::Busy { retry_ms } => Frame::Busy { id, retry_ms },
            ServiceRefusal::Invalid(code) => Frame::PrefillRefused {
                id,
                refusal: RefusedKind::Invalid,
                code,
            },
            ServiceRefusal::Draining => Frame::PrefillRefused {
                id,
                refusal: RefusedKind::Draining,
                code: 0,
            },
        };
        let now = self.hub.now();
        self.leases.borrow_mut().refused(session.number, id);
        let still_there = self.leases.borrow().is_live(session.number, id);
        if still_there {
            // Granted and then refused: the lease goes the ordinary way.
            self.with_leases(|leases, out| {
                leases.abort(now, session.number, id, AbortReason::Engine, out);
            });
        } else {
            session.send(self, &frame);
        }
        self.producer_gone(producer);
    }

    fn producer_gone(&self, producer: &Producer) {
        let key = (producer.session, producer.id);
        self.producers.borrow_mut().remove(&key);
        self.with_leases(|leases, out| {
            leases.producer_gone(producer.session, producer.id, out);
        });
    }

    pub(super) fn cancel_producer(&self, session: PeerSession, id: AttemptId) {
        let producer = self.producers.borrow().get(&(session, id)).cloned();
        if let Some(producer) = producer {
            producer.cancelled.set(true);
            let waker = producer.waker.take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// Starts the task that checksums and publishes ready pages, unless it runs.
fn hash_in_background(inner: &Rc<Inner>, producer: &Rc<Producer>) {
    if producer.hashing.replace(true) {
        return;
    }
    let (inner, producer) = (inner.clone(), producer.clone());
    let shard = inner.shard.clone();
    shard.spawn(hash_and_publish(inner, producer)).detach();
}

/// Publishes what is ready in batches of about a read's length, so that pulling starts early.
async fn hash_and_publish(inner: Rc<Inner>, producer: Rc<Producer>) {
    let batch_pages = crate::pull::READ_BYTES_MAX / inner.config.page_bytes.max(1);
    let batch_pages = batch_pages.max(1);
    let Producer { session, id, .. } = *producer;
    // The first token was queued just before this was begun: it goes to the wire first, so that
    // the client has it, and the peer is awake, while the last pages are hashed.
    inner.shard.yield_now().await;
    loop {
        let mut sums = Vec::new();
        let mut bytes = 0;
        while producer.hashed.get() + (sums.len() as u32) < producer.ready.get()
            && sums.len() < batch_pages
        {
            if bytes >= CHECK_BYTES_PER_TURN {
                bytes = 0;
                inner.shard.yield_now().await;
            }
            let at = producer.hashed.get() as usize + sums.len();
            let page = producer.pages.borrow().get(at).copied();
            let live = inner.leases.borrow().is_live(session, id);
            let (Some(page), Some(parts), true) = (page, &inner.pages, live) else {
                return producer.hashing.set(false);
            };
            // SAFETY: the lease is live (checked just above), so the table owns the page and
            // does not free it before this call returns; below the watermark nobody writes it.
            sums.push(unsafe {
                page_checksum(
                    inner.config.checksums,
                    &parts.pool,
                    page,
                    inner.config.page_bytes,
                )
            });
            bytes += inner.config.page_bytes;
        }
        producer
            .hashed
            .set(producer.hashed.get() + sums.len() as u32);
        let now = inner.hub.now();
        let all = producer.hashed.get() >= producer.ready.get();
        match producer.tail_tokens.get().filter(|_| all) {
            Some(tail) => {
                inner.with_leases(|leases, out| {
                    leases.complete(now, session, id, &sums, tail, out);
                });
                return producer.hashing.set(false);
            }
            None if sums.is_empty() => return producer.hashing.set(false),
            None => {
                inner.with_leases(|leases, out| {
                    leases.watermark(now, session, id, &sums, out);
                });
            }
        }
    }
}

/// Answers the read server from the lease table.
pub(super) struct Authority {
    incarnation: u64,
    leases: Rc<RefCell<LeaseTable>>,
    ledger: Rc<LedgerCell>,
    sessions: BTreeMap<ConnectionId, PeerSession>,
}

impl Authority {
    pub(super) fn new(
        incarnation: u64,
        leases: Rc<RefCell<LeaseTable>>,
        ledger: Rc<LedgerCell>,
    ) -> Self {
        Authority {
            incarnation,
            leases,
            ledger,
            sessions: BTreeMap::new(),
        }
    }

    pub(super) fn learn(&mut self, connection: ConnectionId, session: PeerSession) {
        self.sessions.insert(connection, session);
    }

    pub(super) fn forget(&mut self, connection: ConnectionId) {
        self.sessions.remove(&connection);
    }

    pub(super) fn knows(&self, connection: ConnectionId) -> bool {
        self.sessions.contains_key(&connection)
    }
}

/// Codes of refused reads, as the reader's completion shows them.
fn code_of(refusal: ReadRefusal) -> u32 {
    match refusal {
        ReadRefusal::Unknown => 1,
        ReadRefusal::Epoch => 2,
        ReadRefusal::NotReady(..) => 3,
        ReadRefusal::Over => 4,
    }
}

/// The reader named another incarnation of this node.
const CODE_INCARNATION: u32 = 5;

impl ReadAuthority for Authority {
    fn resolve(
        &mut self,
        connection: ConnectionId,
        incarnation: u64,
        lease: u64,
        epoch: u32,
        first: u32,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<GuardToken, u32> {
        if incarnation != self.incarnation {
            return Err(CODE_INCARNATION);
        }
        let session = self.sessions.get(&connection).copied();
        let session = session.ok_or_else(|| code_of(ReadRefusal::Unknown))?;
        let mut leases = self.leases.borrow_mut();
        let pages = leases
            .read(Nanos::now(), session, lease, epoch, first, count)
            .map_err(code_of)?;
        out.extend_from_slice(pages);
        Ok(self
            .ledger
            .with(|ledger| ledger.guard(pages.iter().copied())))
    }

    fn served(&mut self, guards: GuardToken) {
        self.ledger.with(|ledger| ledger.release(guards));
    }

    fn closed(&mut self, connection: ConnectionId) {
        self.forget(connection);
    }
}
