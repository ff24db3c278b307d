//! The face between the engine's control and its arithmetic. Synchronous, no futures in it:
//! a step is submitted as a post (PROTOCOL P7) and its end arrives like any other completion.

use crate::cpu::InvalidStep;
use crate::logit_rules::Shaping;
use kvserve_kv::{KvLayout, PageId, PoolMemory};
use kvserve_runtime::{CompletionSource, WorkId};
use std::ops::Range;
use std::sync::Arc;

/// How to choose the token after a sequence's last position.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep this many best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens whose probability is at least this share of the best one's; 0 keeps all.
    pub min_p: f32,
    /// Seed of the request. Sampling is counter-based: (seed, choice, position) alone decide.
    pub seed: u64,
    /// Which of n choices.
    pub choice: u32,
    /// Absolute position of the token to be sampled (0 = first token of the prompt).
    pub position: u32,
    /// `Some(n)`: give the chosen token's log-probability and the n best (n may be 0).
    pub logprobs: Option<u8>,
    /// Tokens that must not be chosen (e.g. EOS under `ignore_eos`). Empty for most.
    pub banned: Vec<u32>,
    /// What the request does to logits before the choice; `None` for most.
    pub shaping: Option<Shaping>,
}

/// One sequence's part of a step: compute `tokens` at positions `start..`, writing their keys
/// and values into its pages, and sample after the last one if asked.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSequence {
    /// Its tokens, as a range of [`Step::tokens`]; never empty.
    pub tokens: Range<usize>,
    /// Absolute position of the first of them; positions before it are already in the pages.
    pub start: usize,
    /// Its page table from position 0, as a range of [`Step::pages`]; covers all its tokens.
    pub pages: Range<usize>,
    /// `None` for a prefill chunk that is not the prompt's last.
    pub sample: Option<SampleSpec>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token id.
    pub token: u32,
    /// Natural log-probability of it before temperature and filters; NaN when not asked for.
    pub logprob: f32,
    /// The best tokens and their log-probabilities, best first; empty when not asked for.
    pub top: Vec<(u32, f32)>,
}

/// One engine step: the plan on the way in, the samples on the way out. The box travels to the
/// engine and back, so that a steady decode step allocates nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// New tokens of all sequences, one after the other.
    pub tokens: Vec<u32>,
    /// Page tables of all sequences, one after the other.
    pub pages: Vec<PageId>,
    /// The sequences.
    pub sequences: Vec<StepSequence>,
    /// Tokens that penalties look at, of all sequences that have some ([`Shaping::history`]).
    pub history: Vec<u32>,
    /// After the step: one entry a sequence, `None` where no sample was asked for.
    pub sampled: Vec<Option<Sampled>>,
    /// After the step: how long the arithmetic took, in nanoseconds.
    pub compute_ns: u64,
}

impl Step {
    /// Empties it for the next step, keeping its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.pages.clear();
        self.sequences.clear();
        self.history.clear();
        self.sampled.clear();
        self.compute_ns = 0;
    }
}

/// A step the backend did not take; it comes back whole.
#[derive(Debug)]
pub struct SubmitError {
    /// The step.
    pub step: Box<Step>,
    /// Why.
    pub reason: SubmitReason,
}

/// Why a backend did not take a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitReason {
    /// Its queue is full; submit again after a completion.
    Busy,
    /// Its engine has ended, or its channel was killed.
    Gone,
    /// The plan is wrong; submitting it again is of no use.
    Invalid(InvalidStep),
}

/// Runs steps of one model replica. It is a completion source: register it with the shard that
/// submits, open one engine channel on it, post each step there.
pub trait Backend: CompletionSource {
    /// Starts a step as `work`. Its end arrives as that completion.
    ///
    /// # Errors
    /// [`SubmitError`] with the step when it was not taken.
    fn submit(&mut self, work: WorkId, step: Box<Step>) -> Result<(), SubmitError>;

    /// Takes the oldest step whose completion has been polled.
    fn collect(&mut self) -> Option<Box<Step>>;

    /// The pool its pages lie in.
    fn pool(&self) -> Arc<PoolMemory>;

    /// The layout of those pages.
    fn layout(&self) -> &KvLayout;

    /// Tokens of vocabulary: ids are below it.
    fn vocab_size(&self) -> usize;

    /// Longest sequence the model can hold.
    fn context_length(&self) -> usize;
}
