//! The engine's control on its shard: plans steps, posts them to the backend, and hands what
//! they brought to the sequences' owners.
//!
//! ```text
//!   Sequence::next ◀── events ── finish_step ◀── completion ◀── Backend (engine threads)
//!        │ drop                       │                             ▲
//!        ▼                            ▼                             │ submit(work, step)
//!   Scheduler::remove             Scheduler::plan ──▶ guard pages ──┘
//! ```
//! A step is a post (PROTOCOL P7): its slot has a deadline and guards every page it names, so
//! that a cancelled sequence's pages stay out of reach until the step has ended.

use super::face::{FinishReason, RetryClass, ServeError, Stage};
use super::notify::Notify;
use crate::metrics::Metrics;
use crate::perf::{Perf, STEP_BEGIN, STEP_END, Span};
use crate::scheduler::{
    QueueFull, Scheduler, SchedulerEvent, SchedulerLimits, SequenceId, SequenceSpec, SequenceView,
};
use futures_lite::future;
use kvserve_kv::{PageId, ledger::LedgerCell};
use kvserve_model::{Backend, Sampled, Step};
use kvserve_runtime::completion::{Hub, OpenError};
use kvserve_runtime::{
    ChannelId, ChannelKind, Deadline, EndReason, GuardKeeper as _, Nanos, Shard,
};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, Waker};
use std::time::Duration;

/// A step that takes longer has failed. The sentinel ends a process whose lane stands still for
/// 10 s, so this bound only ends waits for a lane that moves but never finishes.
const STEP_DEADLINE: Duration = Duration::from_secs(120);

/// How long the engine sleeps at most while sequences exist that it cannot plan (no pages):
/// their deadlines are looked at this often.
const IDLE_TICK: Duration = Duration::from_millis(20);

/// Posts the engine's channel keeps in its ring; one step runs at a time.
const STEPS_IN_FLIGHT_MAX: usize = 4;

/// Chunks are cut so that a step takes about this long (PROTOCOL 9): a decode row beside a
/// chunk waits for it, and a cancelled chunk runs to its end.
const STEP_TARGET: Duration = Duration::from_millis(50);

/// The smallest chunk a step is cut to: below one page of tokens the weights are read for little.
const CHUNK_TOKENS_MIN: usize = 16;

/// What the engine tells a sequence's owner.
#[derive(Clone, Debug)]
pub enum SequenceEvent {
    /// It starts after so many tokens that were in the prefix cache. Said at most once, first.
    Cached(usize),
    /// Keys and values of this many tokens are in pages now.
    Computed(usize),
    /// A token; with `Some` it was the last.
    Token(Sampled, Option<FinishReason>),
    /// The sequence has failed and is gone.
    Failed(ServeError),
}

/// One model replica, driven by one shard. Cheap to clone.
#[derive(Clone)]
pub struct EngineCore {
    inner: Rc<Inner>,
}

struct Inner {
    shard: Shard,
    hub: Hub,
    ledger: Rc<LedgerCell>,
    backend: Rc<RefCell<dyn Backend>>,
    channel: ChannelId,
    limits: SchedulerLimits,
    state: RefCell<State>,
    wake: Notify,
    metrics: Arc<Metrics>,
    perf: Arc<Perf>,
}

struct State {
    scheduler: Scheduler,
    mailboxes: HashMap<SequenceId, Rc<Mailbox>>,
}

/// Events of one sequence on their way to its owner; bounded by what a sequence can bring:
/// its tokens, its chunks and one end.
#[derive(Default)]
struct Mailbox {
    events: RefCell<VecDeque<SequenceEvent>>,
    waker: RefCell<Option<Waker>>,
}

impl Mailbox {
    fn push(&self, event: SequenceEvent) {
        self.events.borrow_mut().push_back(event);
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A sequence's owner. Dropping it cancels the sequence.
pub struct Sequence {
    core: EngineCore,
    id: SequenceId,
    mailbox: Rc<Mailbox>,
}

impl Sequence {
    /// The next event. The caller bounds the wait by the request's deadline.
    pub async fn next(&mut self) -> SequenceEvent {
        poll_fn(|cx| {
            if let Some(event) = self.mailbox.events.borrow_mut().pop_front() {
                return Poll::Ready(event);
            }
            *self.mailbox.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// COMMIT came back OK: its held pages and the `pulled` ones are the engine's now. False if
    /// it has ended already; the pages are then the caller's to free.
    pub fn prove(&self, pulled: &[PageId]) -> bool {
        let inner = &self.core.inner;
        let scheduler = &mut inner.state.borrow_mut().scheduler;
        inner
            .ledger
            .with(|ledger| scheduler.prove(self.id, pulled, ledger))
    }

    /// Where it is; `None` once it has ended.
    pub fn view(&self) -> Option<SequenceView> {
        self.core.inner.state.borrow().scheduler.view(self.id)
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let inner = &self.core.inner;
        let mut state = inner.state.borrow_mut();
        state.mailboxes.remove(&self.id);
        let scheduler = &mut state.scheduler;
        if inner
            .ledger
            .with(|ledger| scheduler.remove(self.id, ledger))
        {
            drop(state);
            inner.wake.notify();
        }
    }
}

/// Where the engine stands, for status pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineLoad {
    /// Sequences that take part in steps.
    pub running: usize,
    /// Sequences waiting.
    pub queued: usize,
    /// How often a sequence lost its pages to an older one.
    pub preemptions: u64,
}

impl EngineCore {
    /// Puts a backend under control of this shard: registers it with the poll loop and opens
    /// its channel.
    ///
    /// # Errors
    /// [`OpenError`] when the shard has no channel left.
    pub fn new<B: Backend + 'static>(
        shard: Shard,
        hub: Hub,
        ledger: Rc<LedgerCell>,
        backend: B,
        limits: SchedulerLimits,
        metrics: Arc<Metrics>,
        perf: Arc<Perf>,
    ) -> Result<Self, OpenError> {
        let backend = Rc::new(RefCell::new(backend));
        let source = hub.add_source(backend.clone());
        let channel = hub.open_channel(ChannelKind::EngineLane, source, STEPS_IN_FLIGHT_MAX)?;
        Ok(EngineCore {
            inner: Rc::new(Inner {
                shard,
                hub,
                ledger,
                backend,
                channel,
                limits,
                state: RefCell::new(State {
                    scheduler: Scheduler::new(limits),
                    mailboxes: HashMap::new(),
                }),
                wake: Notify::default(),
                metrics,
                perf,
            }),
        })
    }

    /// Takes a sequence in.
    ///
    /// # Errors
    /// [`QueueFull`] at the queue's bound.
    pub fn submit(&self, spec: SequenceSpec) -> Result<Sequence, QueueFull> {
        let mut state = self.inner.state.borrow_mut();
        let id = state.scheduler.submit(spec)?;
        let mailbox = Rc::new(Mailbox::default());
        state.mailboxes.insert(id, mailbox.clone());
        self.inner.wake.notify();
        Ok(Sequence {
            core: self.clone(),
            id,
            mailbox,
        })
    }

    /// Pages came back or went: look again whether something can be planned.
    pub fn pages_changed(&self) {
        self.inner.wake.notify();
    }

    /// The bounds it works under.
    pub fn limits(&self) -> SchedulerLimits {
        self.inner.limits
    }

    /// Tokens of vocabulary: ids in a plan must be below it.
    pub fn vocab_size(&self) -> usize {
        self.inner.backend.borrow().vocab_size()
    }

    /// Where it stands.
    pub fn load(&self) -> EngineLoad {
        let state = self.inner.state.borrow();
        EngineLoad {
            running: state.scheduler.running(),
            queued: state.scheduler.queued(),
            preemptions: state.scheduler.preemptions(),
        }
    }

    /// The step loop; ends only with the shard.
    pub async fn run(self) {
        let inner = &*self.inner;
        let mut spare = Some(Box::<Step>::default());
        let mut members = Vec::with_capacity(inner.limits.running_max);
        let mut events = Vec::new();
        let mut pace = Pace::default();
        loop {
            self.end_expired();
            let mut step = spare.take().unwrap_or_default();
            {
                let scheduler = &mut inner.state.borrow_mut().scheduler;
                let chunk = pace.chunk_tokens();
                inner.ledger.with(|ledger| {
                    scheduler.plan(ledger, chunk, &mut step, &mut members, &mut events);
                });
            }
            self.deliver(&mut events);
            if step.sequences.is_empty() {
                spare = Some(step);
                self.idle().await;
                continue;
            }
            spare = self.step(step, &members, &mut events, &mut pace).await;
            self.deliver(&mut events);
        }
    }

    /// Runs one planned step to its end.
    async fn step(
        &self,
        step: Box<Step>,
        members: &[SequenceId],
        events: &mut Vec<SchedulerEvent>,
        pace: &mut Pace,
    ) -> Option<Box<Step>> {
        let inner = &*self.inner;
        let now = inner.shard.now();
        let guard = inner
            .ledger
            .with(|ledger| ledger.guard(step.pages.iter().copied()));
        let deadline = Deadline::after(now, STEP_DEADLINE);
        let completion = match inner.hub.begin("engine_step", deadline, Some(guard)) {
            Ok(completion) => completion,
            Err(error) => {
                if let Some(guard) = error.guards {
                    inner.ledger.release(guard);
                }
                self.fail_step(members, "no completion slot is free on this shard");
                return Some(step);
            }
        };
        let work = match inner.hub.reserve(completion.slot(), inner.channel, 1) {
            Ok(work) => work,
            Err(error) => {
                self.fail_step(
                    members,
                    &format!("the engine's channel took no post: {error}"),
                );
                return Some(step);
            }
        };
        inner.shard.trace().record(
            &STEP_BEGIN,
            work.position(),
            step.sequences.len() as u64,
            step.tokens.len() as u64,
        );
        let submitted = inner.backend.borrow_mut().submit(work, step);
        if let Err(error) = submitted {
            inner.hub.unpost(work, 1, 0);
            drop(completion);
            self.fail_step(
                members,
                &format!("the engine refused a step: {:?}", error.reason),
            );
            return Some(error.step);
        }
        let ended = completion.await;
        // Steps end in order: ours is the last, after any whose waiter had given up before.
        let mut step = None;
        while let Some(ended) = inner.backend.borrow_mut().collect() {
            step = Some(ended);
        }
        match (ended, step) {
            (Ok(()), Some(step)) => {
                let took = inner.shard.now().since(now);
                inner.metrics.step(&step, took);
                inner.perf.record(Span::Step, took);
                let trace = inner.shard.trace();
                trace.record(&STEP_END, work.position(), step.compute_ns, 0);
                pace.learn(&step);
                let scheduler = &mut inner.state.borrow_mut().scheduler;
                inner
                    .ledger
                    .with(|ledger| scheduler.finish_step(members, &step, ledger, events));
                Some(step)
            }
            (Ok(()), None) => {
                self.fail_step(members, "the engine ended a step without its result");
                None
            }
            (Err(reason), step) => {
                self.fail_step(members, &describe_step_end(reason));
                step
            }
        }
    }

    /// Waits until something may be planned again.
    async fn idle(&self) {
        let inner = &*self.inner;
        if inner.state.borrow().scheduler.has_work() {
            future::or(inner.wake.notified(), inner.shard.sleep(IDLE_TICK)).await;
        } else {
            inner.wake.notified().await;
        }
    }

    fn end_expired(&self) {
        let now: Nanos = self.inner.shard.now();
        let mut expired = Vec::new();
        self.inner
            .state
            .borrow()
            .scheduler
            .expired(now, &mut expired);
        for id in expired {
            self.fail(
                id,
                ServeError {
                    stage: Stage::Decode,
                    reason: "deadline_exceeded",
                    retry: RetryClass::Fail,
                    message: "the request's time ran out in the engine".into(),
                },
            );
        }
    }

    fn fail_step(&self, members: &[SequenceId], why: &str) {
        self.inner.metrics.steps_failed.fetch_add(1, Relaxed);
        self.inner
            .state
            .borrow_mut()
            .scheduler
            .abandon_step(members);
        for id in members {
            self.fail(
                *id,
                ServeError {
                    stage: Stage::Decode,
                    reason: "engine_failed",
                    retry: RetryClass::Fail,
                    message: format!("the engine step of this request failed: {why}"),
                },
            );
        }
    }

    /// Takes a sequence out and tells its owner.
    fn fail(&self, id: SequenceId, error: ServeError) {
        let mailbox = {
            let mut state = self.inner.state.borrow_mut();
            let scheduler = &mut state.scheduler;
            self.inner
                .ledger
                .with(|ledger| scheduler.remove(id, ledger));
            state.mailboxes.remove(&id)
        };
        if let Some(mailbox) = mailbox {
            mailbox.push(SequenceEvent::Failed(error));
        }
    }

    fn deliver(&self, events: &mut Vec<SchedulerEvent>) {
        for event in events.drain(..) {
            let state = self.inner.state.borrow();
            let (id, event) = match event {
                SchedulerEvent::Cached { sequence, tokens } => {
                    (sequence, SequenceEvent::Cached(tokens))
                }
                SchedulerEvent::Computed { sequence, computed } => {
                    (sequence, SequenceEvent::Computed(computed))
                }
                SchedulerEvent::Token {
                    sequence,
                    sampled,
                    finish,
                } => (sequence, SequenceEvent::Token(sampled, finish)),
                SchedulerEvent::OutOfPages { sequence } => (
                    sequence,
                    SequenceEvent::Failed(ServeError {
                        stage: Stage::Decode,
                        reason: "kv_exhausted",
                        retry: RetryClass::Fail,
                        message: "the KV pool is too small for this request's length; \
                                  start the node with a larger --kv-cache"
                            .into(),
                    }),
                ),
            };
            let mailbox = state.mailboxes.get(&id).cloned();
            drop(state);
            if let Some(mailbox) = mailbox {
                mailbox.push(event);
            }
        }
    }

    /// Pages of a sequence's table; for tests and status pages.
    pub fn pages_of(&self, sequence: &Sequence) -> Vec<PageId> {
        self.inner
            .state
            .borrow()
            .scheduler
            .pages(sequence.id)
            .to_vec()
    }
}

fn describe_step_end(reason: EndReason) -> String {
    match reason {
        EndReason::Failed(code) => format!("the backend reported error {code}"),
        EndReason::Deadline => format!("no end within {} s", STEP_DEADLINE.as_secs()),
        EndReason::Cancelled
        | EndReason::SessionEnded
        | EndReason::CompleterDropped
        | EndReason::ChannelKilled
        | EndReason::ChannelStuck => format!("its channel ended ({})", reason.label()),
    }
}

/// Cuts prefill chunks so that a step takes about [`STEP_TARGET`], from what steps took.
#[derive(Default)]
struct Pace {
    /// Nanoseconds a token of a chunk takes, smoothed; 0 before the first chunk.
    token_ns: f64,
}

impl Pace {
    fn chunk_tokens(&self) -> usize {
        if self.token_ns <= 0.0 {
            return 4 * CHUNK_TOKENS_MIN;
        }
        let fits = (STEP_TARGET.as_nanos() as f64 / self.token_ns) as usize;
        // Whole pages: a chunk border inside a page delays its watermark.
        (fits / CHUNK_TOKENS_MIN * CHUNK_TOKENS_MIN).max(CHUNK_TOKENS_MIN)
    }

    fn learn(&mut self, step: &Step) {
        // Steps without a chunk say nothing about chunks.
        if step.tokens.len() < step.sequences.len() + CHUNK_TOKENS_MIN - 1 {
            return;
        }
        let sample = step.compute_ns as f64 / step.tokens.len() as f64;
        self.token_ns = if self.token_ns <= 0.0 {
            sample
        } else {
            0.75 * self.token_ns + 0.25 * sample
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_the_measured_pace_in_whole_pages() {
        let mut pace = Pace::default();
        assert_eq!(pace.chunk_tokens(), 64);
        let mut step = Step {
            tokens: vec![0; 64],
            compute_ns: 64 * 500_000,
            ..Step::default()
        };
        pace.learn(&step);
        assert_eq!(pace.chunk_tokens(), 96, "50 ms at 0.5 ms a token, in pages");
        step.compute_ns = u64::MAX / 2;
        for _ in 0..50 {
            pace.learn(&step);
        }
        assert_eq!(pace.chunk_tokens(), 16);
    }
}
