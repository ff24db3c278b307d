//! The simulated engine lane: takes one step, computes it when the world says so.

use super::check::{Invariant, Violation};
use super::keeper::{Fate, Keeper};
use super::model::{self, KV_BYTES, Kv, PAGE_TOKENS};
use kvserve_kv::PageId;
use kvserve_kv::ledger::PageState;
use kvserve_kv::transport::sim::SimMemory;
use kvserve_model::{Sampled, Step, StepSequence};
use kvserve_runtime::{
    ChannelId, Completed, CompletionSource, CompletionStatus, Nanos, Reap, WorkId,
};
use std::os::fd::RawFd;
use std::rc::Rc;

struct Job {
    work: WorkId,
    step: Box<Step>,
    guard: u64,
}

/// One engine lane over a simulated pool.
pub struct SimLane {
    memory: Rc<SimMemory>,
    keeper: Rc<Keeper>,
    job: Option<Job>,
    finished: Option<Box<Step>>,
    done: Vec<Completed>,
    /// The next step ends with this code instead of its result.
    pub fail_next: Option<u32>,
}

impl SimLane {
    /// An idle lane.
    pub fn new(memory: Rc<SimMemory>, keeper: Rc<Keeper>) -> Self {
        SimLane {
            memory,
            keeper,
            job: None,
            finished: None,
            done: Vec::new(),
            fail_next: None,
        }
    }

    /// Takes a step; `guard` is the shadow of the step's guard.
    pub fn submit(&mut self, work: WorkId, step: Box<Step>, guard: u64) {
        self.job = Some(Job { work, step, guard });
    }

    /// Whether a step is being computed.
    pub fn is_busy(&self) -> bool {
        self.job.is_some()
    }

    /// Takes the step whose completion has been polled.
    pub fn collect(&mut self) -> Option<Box<Step>> {
        self.finished.take()
    }

    /// The time has come: computes the step and gives its completion.
    ///
    /// # Errors
    /// The invariant that a touch of it broke.
    pub fn finish(&mut self) -> Result<(), Violation> {
        let Some(mut job) = self.job.take() else {
            return Ok(());
        };
        let status = match self.fail_next.take() {
            Some(code) => CompletionStatus::Error(code),
            None => {
                for number in 0..job.step.sequences.len() {
                    let sampled =
                        self.sequence(&job.step, &job.step.sequences[number], job.guard)?;
                    job.step.sampled.push(sampled);
                }
                CompletionStatus::Success
            }
        };
        self.finished = Some(job.step);
        let work = job.work;
        self.done.push(Completed { work, status });
        Ok(())
    }

    fn sequence(
        &self,
        step: &Step,
        sequence: &StepSequence,
        guard: u64,
    ) -> Result<Option<Sampled>, Violation> {
        let pages = &step.pages[sequence.pages.clone()];
        for page in pages {
            self.may_touch(*page, guard)?;
        }
        let tokens = &step.tokens[sequence.tokens.clone()];
        let (mut before, mut sum): (Kv, u64) = ([0; KV_BYTES], 0);
        for position in 0..sequence.start {
            before = self.load(pages, position);
            sum = model::fold(sum, &before);
        }
        for (place, token) in tokens.iter().enumerate() {
            before = model::kv(&before, *token);
            sum = model::fold(sum, &before);
            self.may_write(pages[(sequence.start + place) / PAGE_TOKENS])?;
            self.store(pages, sequence.start + place, &before);
        }
        Ok(sequence.sample.as_ref().map(|_| Sampled {
            token: model::token(sum),
            logprob: f32::NAN,
            top: Vec::new(),
        }))
    }

    fn may_touch(&self, page: PageId, guard: u64) -> Result<(), Violation> {
        let state = self.keeper.ledger.with(|ledger| ledger.state(page));
        let fate = self.keeper.fate(guard);
        if fate == Fate::Live && state != PageState::Free {
            return Ok(());
        }
        Err(Violation {
            invariant: Invariant::I2,
            what: format!(
                "an engine step touches page {}, which is {}; its guard is {fate:?}",
                page.0,
                state.label()
            ),
        })
    }

    /// What several own is never written: it would change under the others.
    fn may_write(&self, page: PageId) -> Result<(), Violation> {
        let owners = self.keeper.ledger.with(|ledger| ledger.owners(page));
        match owners {
            0 | 1 => Ok(()),
            _ => Err(Violation {
                invariant: Invariant::I5,
                what: format!("an engine step writes page {}, which {owners} own", page.0),
            }),
        }
    }

    fn load(&self, pages: &[PageId], position: usize) -> Kv {
        let from = position % PAGE_TOKENS * KV_BYTES;
        self.memory
            .with_page(pages[position / PAGE_TOKENS], |page| {
                let mut kv = [0; KV_BYTES];
                kv.copy_from_slice(&page[from..from + KV_BYTES]);
                kv
            })
    }

    fn store(&self, pages: &[PageId], position: usize, kv: &Kv) {
        let from = position % PAGE_TOKENS * KV_BYTES;
        self.memory
            .change_page(pages[position / PAGE_TOKENS], |page| {
                page[from..from + KV_BYTES].copy_from_slice(kv);
            });
    }
}

impl CompletionSource for SimLane {
    fn poll(&mut self, _now: Nanos, out: &mut Vec<Completed>) -> usize {
        let count = self.done.len();
        out.append(&mut self.done);
        count
    }

    fn arm(&mut self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        usize::from(self.is_busy())
    }

    fn kill(&mut self, _channel: ChannelId) {}

    fn reap(&mut self, _channel: ChannelId) -> Reap {
        match self.job {
            Some(_) => Reap::Draining(1),
            None => Reap::Quiet,
        }
    }
}
