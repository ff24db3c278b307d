//! The engine's control: the real scheduler plans, the simulated lane computes.

use super::wait::Wait;
use super::{Key, Node, Outgoing};
use crate::engine::{RetryClass, SequenceEvent, ServeError, Stage};
use crate::scheduler::{Scheduler, SchedulerEvent, SchedulerLimits, SequenceId, SequenceSpec};
use crate::sim::context::Context;
use crate::sim::keeper::Keeper;
use crate::sim::lane::SimLane;
use crate::sim::model::PAGE_TOKENS;
use kvserve_kv::PageId;
use kvserve_kv::transport::sim::SimMemory;
use kvserve_model::Step;
use kvserve_runtime::completion::Hub;
use kvserve_runtime::{ChannelId, ChannelKind, Deadline, GuardKeeper as _};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// A step that takes longer has failed; the sentinel ends a process whose lane stands still
/// before that.
const STEP_DEADLINE: Duration = Duration::from_secs(20);

/// Whose a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A prefill for a peer.
    Prefill(Key),
    /// A request of this node.
    Request(u64),
}

struct Running {
    wait: Wait,
    members: Vec<SequenceId>,
}

/// See the module's text.
pub struct Engine {
    pub(in crate::sim) lane: Rc<RefCell<SimLane>>,
    channel: ChannelId,
    scheduler: Scheduler,
    owners: Vec<(SequenceId, Owner)>,
    step: Option<Running>,
    spare: Option<Box<Step>>,
}

impl Engine {
    pub(super) fn new(hub: &Hub, memory: Rc<SimMemory>, keeper: Rc<Keeper>) -> Self {
        let lane = Rc::new(RefCell::new(SimLane::new(memory, keeper)));
        let source = hub.add_source(lane.clone());
        let channel = hub.open_channel(ChannelKind::EngineLane, source, 4);
        let limits = SchedulerLimits {
            running_max: 8,
            queued_max: 16,
            ..SchedulerLimits::with_page_tokens(PAGE_TOKENS)
        };
        Engine {
            lane,
            channel: channel.expect("a fresh hub has channels"),
            scheduler: Scheduler::new(limits),
            owners: Vec::new(),
            step: None,
            spare: None,
        }
    }

    pub(super) fn submit(&mut self, spec: SequenceSpec, owner: Owner) -> Option<SequenceId> {
        let id = self.scheduler.submit(spec).ok()?;
        self.owners.push((id, owner));
        Some(id)
    }

    /// The owner lets go of a sequence.
    pub(super) fn remove(&mut self, keeper: &Keeper, id: SequenceId) {
        self.owners.retain(|(of, _)| *of != id);
        let scheduler = &mut self.scheduler;
        keeper.ledger.with(|ledger| scheduler.remove(id, ledger));
    }

    pub(super) fn prove(&mut self, keeper: &Keeper, id: SequenceId, pulled: &[PageId]) -> bool {
        let scheduler = &mut self.scheduler;
        (keeper.ledger).with(|ledger| scheduler.prove(id, pulled, ledger))
    }

    pub(super) fn wait(&self) -> Option<&Wait> {
        self.step.as_ref().map(|step| &step.wait)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.step.is_some() || self.scheduler.has_work()
    }

    pub(in crate::sim) fn preemptions(&self) -> u64 {
        self.scheduler.preemptions()
    }

    fn owner(&self, id: SequenceId) -> Option<Owner> {
        let of = self.owners.iter().find(|(of, _)| *of == id);
        of.map(|(_, owner)| *owner)
    }
}

impl Node {
    pub(super) fn turn_engine(&mut self, context: &mut Context) {
        self.end_expired(context);
        if self.engine.step.is_some() {
            self.finish_step(context);
        }
        if self.engine.step.is_none() {
            self.begin_step(context);
        }
    }

    fn begin_step(&mut self, context: &mut Context) {
        let mut step = self.engine.spare.take().unwrap_or_default();
        let (mut members, mut events) = (Vec::new(), Vec::new());
        let scheduler = &mut self.engine.scheduler;
        let chunk = PAGE_TOKENS * context.rng.range(1, 5) as usize;
        (self.keeper.ledger)
            .with(|ledger| scheduler.plan(ledger, chunk, &mut step, &mut members, &mut events));
        self.deliver(context, events);
        if step.sequences.is_empty() {
            self.engine.spare = Some(step);
            return;
        }
        let (guard, shadow) = self.keeper.guard(&step.pages);
        let deadline = Deadline::after(self.turned_at, STEP_DEADLINE);
        let completion = match self.hub.begin("engine_step", deadline, Some(guard)) {
            Ok(completion) => completion,
            Err(full) => {
                if let Some(guard) = full.guards {
                    self.keeper.release(guard);
                }
                return self.fail_step(context, &members);
            }
        };
        let Ok(work) = self.hub.reserve(completion.slot(), self.engine.channel, 1) else {
            return self.fail_step(context, &members);
        };
        let tokens = step.tokens.len();
        self.engine.lane.borrow_mut().submit(work, step, shadow);
        self.out.push(Outgoing::Step { tokens });
        self.engine.step = Some(Running {
            wait: Wait::new(completion),
            members,
        });
    }

    fn finish_step(&mut self, context: &mut Context) {
        let running = self.engine.step.as_mut();
        let Some(ended) = running.and_then(|running| running.wait.poll()) else {
            return;
        };
        let Some(Running { members, .. }) = self.engine.step.take() else {
            return;
        };
        let step = self.engine.lane.borrow_mut().collect();
        match (ended, step) {
            (Ok(()), Some(mut step)) => {
                let mut events = Vec::new();
                let scheduler = &mut self.engine.scheduler;
                self.keeper.ledger.with(|ledger| {
                    scheduler.finish_step(&members, &step, ledger, &mut events);
                });
                step.clear();
                self.engine.spare = Some(step);
                self.deliver(context, events);
            }
            (Ok(()), None) | (Err(_), _) => self.fail_step(context, &members),
        }
    }

    fn end_expired(&mut self, context: &mut Context) {
        let mut expired = Vec::new();
        self.engine.scheduler.expired(self.turned_at, &mut expired);
        for id in expired {
            self.fail_sequence(context, id, "deadline_exceeded");
        }
    }

    fn fail_step(&mut self, context: &mut Context, members: &[SequenceId]) {
        self.engine.scheduler.abandon_step(members);
        for id in members {
            self.fail_sequence(context, *id, "engine_failed");
        }
    }

    fn fail_sequence(&mut self, context: &mut Context, id: SequenceId, reason: &'static str) {
        let owner = self.engine.owner(id);
        self.engine.remove(&self.keeper, id);
        let error = ServeError {
            stage: Stage::Decode,
            reason,
            retry: RetryClass::Fail,
            message: String::new(),
        };
        if let Some(owner) = owner {
            self.on_sequence(context, owner, id, SequenceEvent::Failed(error));
        }
    }

    fn deliver(&mut self, context: &mut Context, events: Vec<SchedulerEvent>) {
        for event in events {
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
                SchedulerEvent::OutOfPages { sequence } => {
                    self.fail_sequence(context, sequence, "kv_exhausted");
                    continue;
                }
            };
            if let Some(owner) = self.engine.owner(id) {
                self.on_sequence(context, owner, id, event);
            }
        }
    }

    fn on_sequence(
        &mut self,
        context: &mut Context,
        owner: Owner,
        id: SequenceId,
        event: SequenceEvent,
    ) {
        match owner {
            Owner::Prefill(key) => self.on_producer_event(context, key, event),
            Owner::Request(number) => self.on_request_event(context, number, id, event),
        }
    }
}
