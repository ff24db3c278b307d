//! One sequence: its tokens, how many of them are in pages, and which pages.

use crate::engine::SamplingParams;
use kvserve_kv::PageId;
use kvserve_runtime::Deadline;
use std::ops::Range;

/// Names a sequence of this scheduler; a stale generation names nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// Where a sequence's first pages come from, which decides who frees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PagesFrom {
    /// The scheduler allocates and frees them.
    Scheduler,
    /// A prefill for a peer: all pages of the prompt are given. The sequence ends with its
    /// first token.
    Lease {
        /// Pages from position 0.
        pages: Vec<PageId>,
        /// Leading pages that the peer holds: the scheduler frees these. The others the lease
        /// frees.
        held: usize,
        /// Tokens whose keys and values are in `pages` already, from the prefix cache.
        computed: usize,
    },
    /// A migration that placed the keys and values of the first `computed` tokens. Its waiter
    /// frees these pages until [`super::Scheduler::prove`]; what the sequence grows beyond them
    /// is the scheduler's.
    Migration {
        /// Pages from position 0: those held from the prefix cache, then those pulled.
        pages: Vec<PageId>,
        /// How many are held, not pulled.
        held: usize,
        /// Tokens whose keys and values are in them.
        computed: usize,
    },
}

/// A new sequence.
#[derive(Clone, Debug)]
pub struct SequenceSpec {
    /// Prompt, then tokens already sent (facts).
    pub tokens: Vec<u32>,
    /// How many of them, the last ones, are the answer's so far; penalties ask for that.
    pub generated: usize,
    /// Tokens still to generate; at least 1.
    pub new_tokens_max: u32,
    /// Tokens that end it.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Prompts of another salt share no cached page with it.
    pub cache_salt: Vec<u8>,
    /// By when it must have ended.
    pub deadline: Deadline,
    /// Its first pages.
    pub pages: PagesFrom,
}

/// Whether the pages in `Sequence::others` may be touched and who frees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// All pages are the scheduler's; it may be preempted.
    Own,
    /// Pages are a lease's.
    Leased,
    /// The first pages are a migration's until proven.
    Unproven,
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Running,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub tokens: Vec<u32>,
    /// Where in `tokens` the answer begins.
    pub answer_from: usize,
    /// Tokens whose keys and values are in the pages.
    pub computed: usize,
    pub pages: Vec<PageId>,
    /// Pages at these places are a lease's or a migration's to free.
    pub others: Range<usize>,
    /// Leading pages that are the prefix cache's as well.
    pub cached: usize,
    /// It has been told how much of it was found in the cache.
    pub started: bool,
    pub cache_salt: Vec<u8>,
    pub new_tokens_left: u32,
    pub stop_token_ids: Vec<u32>,
    pub sampling: SamplingParams,
    pub deadline: Deadline,
    pub standing: Standing,
    pub phase: Phase,
    /// Order of arrival; kept over a preemption.
    pub arrival: u64,
    /// Tokens of it in the running step; 0 outside a step.
    pub in_step: usize,
}

impl Sequence {
    pub fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// A decode row: everything but the last token is computed.
    pub fn decodes(&self) -> bool {
        self.uncomputed() == 1 && self.computed > 0
    }

    /// Whether what was computed for it may enter the prefix cache: not on pages of a migration
    /// before COMMIT's OK, and so nothing that was computed on top of them (PROTOCOL C2).
    pub fn may_be_cached(&self) -> bool {
        match self.standing {
            Standing::Own | Standing::Leased => true,
            Standing::Unproven => false,
        }
    }

    pub fn preemptible(&self) -> bool {
        self.standing == Standing::Own && self.phase == Phase::Running && self.in_step == 0
    }
}

/// What others may see of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceView {
    /// Tokens: prompt and generated.
    pub tokens: usize,
    /// Tokens in pages.
    pub computed: usize,
    /// Pages held.
    pub pages: usize,
    /// Whether it takes part in steps.
    pub running: bool,
    /// Whether a step that computes it is under way.
    pub in_step: bool,
}
