//! Filling the next step: decode rows first, then prefill chunks in order of arrival.

use super::sequence::{Phase, Sequence, SequenceId, Standing};
use super::table::{Scheduler, SchedulerEvent};
use kvserve_kv::ledger::{AllocateAs, Ledger};
use kvserve_model::{SampleSpec, Shaping, Step, StepSequence};

impl Scheduler {
    /// Plans the next step into `step` and `members` (both emptied first). `chunk_tokens` is
    /// the engine's own bound on prefill tokens for this step; the limits' bound holds too.
    /// Sequences that can never go on are reported in `events` and are gone.
    pub fn plan(
        &mut self,
        ledger: &mut Ledger,
        chunk_tokens: usize,
        step: &mut Step,
        members: &mut Vec<SequenceId>,
        events: &mut Vec<SchedulerEvent>,
    ) {
        step.clear();
        members.clear();
        self.plan_decode_rows(ledger, step, members, events);
        let mut budget = chunk_tokens.min(self.limits.chunk_tokens_max);
        self.plan_running_prefills(&mut budget, step, members);
        self.admit_waiting(ledger, &mut budget, step, members, events);
    }

    fn plan_decode_rows(
        &mut self,
        ledger: &mut Ledger,
        step: &mut Step,
        members: &mut Vec<SequenceId>,
        events: &mut Vec<SchedulerEvent>,
    ) {
        let mut index = 0;
        while index < self.running.len() {
            let id = self.running[index];
            if !self.get(id).is_some_and(|s| s.decodes()) {
                index += 1;
                continue;
            }
            match self.grow(id, ledger) {
                Grown::Yes => {
                    self.add_to_step(id, 1, step, members);
                    index += 1;
                }
                // It was the youngest itself; `running` has moved up by one.
                Grown::Preempted => {}
                Grown::Never => {
                    self.remove(id, ledger);
                    events.push(SchedulerEvent::OutOfPages { sequence: id });
                }
                Grown::Later => index += 1,
            }
        }
    }

    fn plan_running_prefills(
        &mut self,
        budget: &mut usize,
        step: &mut Step,
        members: &mut Vec<SequenceId>,
    ) {
        for index in 0..self.running.len() {
            if *budget == 0 {
                return;
            }
            let id = self.running[index];
            let Some(sequence) = self.get(id) else {
                continue;
            };
            if sequence.in_step == 0 && !sequence.decodes() {
                let count = sequence.uncomputed().min(*budget);
                *budget -= count;
                self.add_to_step(id, count, step, members);
            }
        }
    }

    /// First come, first served: nobody takes a page before the head of the queue has its own,
    /// so it cannot starve. Those behind it that lack no page go on meanwhile: a lease holds all
    /// of its pages from the grant on, and the head may wait for just these (PROTOCOL C3).
    fn admit_waiting(
        &mut self,
        ledger: &mut Ledger,
        budget: &mut usize,
        step: &mut Step,
        members: &mut Vec<SequenceId>,
        events: &mut Vec<SchedulerEvent>,
    ) {
        let mut place = 0;
        let mut starved = None;
        while *budget > 0 && self.running.len() < self.limits.running_max {
            let Some(id) = self.waiting.get(place).copied() else {
                // With nobody running, pages come back only from those that wait.
                match starved {
                    Some(id) if self.running.is_empty() && self.strip_waiting(id, ledger) => {
                        (place, starved) = (0, None);
                        continue;
                    }
                    Some(_) | None => return,
                }
            };
            let Some(missing) = self.missing_for_admission(id) else {
                self.waiting.remove(place);
                continue;
            };
            let may_take = missing == 0 || starved.is_none();
            if !(may_take && self.take_first_pages(id, missing, ledger, events)) {
                starved = starved.or(Some(id));
                place += 1;
                continue;
            }
            self.waiting.remove(place);
            let position = self.arrival_position(id);
            self.running.insert(position, id);
            let limit = *budget;
            let count = match self.get_mut(id) {
                Some(sequence) => {
                    sequence.phase = Phase::Running;
                    sequence.uncomputed().min(limit)
                }
                None => continue,
            };
            *budget -= count;
            self.add_to_step(id, count, step, members);
        }
    }

    /// Pages that a waiting sequence lacks to run: room for the whole prompt and the first
    /// token's successor. `None`: it is gone.
    fn missing_for_admission(&self, id: SequenceId) -> Option<usize> {
        let sequence = self.get(id)?;
        let wanted = match sequence.standing {
            Standing::Leased => sequence.pages.len(),
            Standing::Own | Standing::Unproven => self.limits.pages_for(sequence.tokens.len() + 1),
        };
        Some(wanted.saturating_sub(sequence.pages.len()))
    }

    /// Takes what a waiting sequence lacks: its cached prefix, then pages for the rest.
    fn take_first_pages(
        &mut self,
        id: SequenceId,
        missing: usize,
        ledger: &mut Ledger,
        events: &mut Vec<SchedulerEvent>,
    ) -> bool {
        let page_tokens = self.limits.page_tokens;
        let Some(sequence) = self.get_mut(id) else {
            return false;
        };
        // Only an own sequence that has nothing yet: others start from the pages they brought.
        if sequence.standing != Standing::Own || !sequence.pages.is_empty() {
            return self.take_pages(id, missing, ledger);
        }
        let salt = &sequence.cache_salt;
        if !ledger.prefix_fits(salt, &sequence.tokens, missing) {
            return false;
        }
        let found = ledger.take_prefix(salt, &sequence.tokens, &mut sequence.pages);
        sequence.cached = found;
        sequence.computed = found * page_tokens;
        if !std::mem::replace(&mut sequence.started, true) && found > 0 {
            events.push(SchedulerEvent::Cached {
                sequence: id,
                tokens: found * page_tokens,
            });
        }
        let taken = self.take_pages(id, missing.saturating_sub(found), ledger);
        debug_assert!(taken, "there was room a moment ago");
        taken
    }

    /// Sees to it that the next decode row of `id` has a page to write to.
    fn grow(&mut self, id: SequenceId, ledger: &mut Ledger) -> Grown {
        loop {
            let Some(sequence) = self.get(id) else {
                return Grown::Preempted;
            };
            if sequence.phase == Phase::Waiting {
                return Grown::Preempted;
            }
            let wanted = self.limits.pages_for(sequence.tokens.len());
            let missing = wanted.saturating_sub(sequence.pages.len());
            if self.take_pages(id, missing, ledger) {
                return Grown::Yes;
            }
            if self.preempt_younger(id, ledger) {
                continue;
            }
            // Pages may still come back: from a running transfer, a lease, an older sequence.
            let counts = ledger.counts();
            let coming = counts.stopping + counts.leased + counts.pulling > 0;
            return if coming || self.another_holds_pages(id) {
                Grown::Later
            } else {
                Grown::Never
            };
        }
    }

    fn another_holds_pages(&self, id: SequenceId) -> bool {
        self.running
            .iter()
            .chain(&self.waiting)
            .any(|other| *other != id && !self.pages(*other).is_empty())
    }

    fn take_pages(&mut self, id: SequenceId, missing: usize, ledger: &mut Ledger) -> bool {
        if missing == 0 {
            return true;
        }
        match self.get_mut(id) {
            Some(sequence) => ledger
                .allocate(missing, AllocateAs::Building, &mut sequence.pages)
                .is_ok(),
            None => false,
        }
    }

    fn arrival_position(&self, id: SequenceId) -> usize {
        let arrival = self.get(id).map_or(u64::MAX, |s| s.arrival);
        self.running
            .iter()
            .position(|other| self.get(*other).is_some_and(|s| s.arrival > arrival))
            .unwrap_or(self.running.len())
    }

    fn add_to_step(
        &mut self,
        id: SequenceId,
        count: usize,
        step: &mut Step,
        members: &mut Vec<SequenceId>,
    ) {
        let pages_for = self.limits;
        let Some(sequence) = self.get_mut(id) else {
            return;
        };
        let start = sequence.computed;
        let end = start + count;
        let tokens_from = step.tokens.len();
        step.tokens.extend_from_slice(&sequence.tokens[start..end]);
        let pages_from = step.pages.len();
        let pages = pages_for.pages_for(end);
        step.pages.extend_from_slice(&sequence.pages[..pages]);
        let history = &mut step.history;
        let sample = (end == sequence.tokens.len()).then(|| SampleSpec {
            temperature: sequence.sampling.temperature,
            top_k: sequence.sampling.top_k,
            top_p: sequence.sampling.top_p,
            seed: sequence.sampling.seed,
            choice: 0,
            position: end as u32,
            logprobs: sequence.sampling.logprobs,
            min_p: sequence.sampling.min_p,
            banned: Vec::new(),
            shaping: shaping(sequence, history),
        });
        step.sequences.push(StepSequence {
            tokens: tokens_from..step.tokens.len(),
            start,
            pages: pages_from..step.pages.len(),
            sample,
        });
        sequence.in_step = count;
        members.push(id);
    }
}

/// The rules of a sequence that has some, with the tokens they ask for put into `history`.
fn shaping(sequence: &Sequence, history: &mut Vec<u32>) -> Option<Shaping> {
    let rules = sequence.sampling.rules.as_ref()?;
    let from = history.len();
    if rules.wants_history() {
        history.extend_from_slice(&sequence.tokens);
    }
    Some(Shaping {
        rules: rules.clone(),
        history: from..history.len(),
        generated: (sequence.tokens.len() - sequence.answer_from) as u32,
    })
}

/// What became of the wish for one more page.
enum Grown {
    /// It has it.
    Yes,
    /// The sequence itself was preempted.
    Preempted,
    /// Not in this step; pages will come back.
    Later,
    /// Nobody holds a page that could come back.
    Never,
}
