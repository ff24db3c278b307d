//! Where a pass spends its time, phase by phase, as the leader sees it.
//!
//! A phase ends when all members have met, so that what the leader measures between two barriers
//! is what the phase cost the step. Reading the clock takes some 25 ns, five times a layer: 4 us of
//! a decode step of 2 ms.

use std::time::Instant;

/// A part of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embeddings and the rotary table.
    Embed,
    /// Norm, and queries, keys and values.
    QueryKeyValue,
    /// Rotation, the store of keys and values, attention.
    Attention,
    /// The output product of attention.
    AttentionOutput,
    /// Norm, gate and up, SiLU.
    GateUp,
    /// The down product.
    Down,
    /// Norm and logits of the sampled rows.
    Head,
    /// Choosing tokens.
    Sample,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Phase; 8] = [
        Phase::Embed,
        Phase::QueryKeyValue,
        Phase::Attention,
        Phase::AttentionOutput,
        Phase::GateUp,
        Phase::Down,
        Phase::Head,
        Phase::Sample,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Embed => "embed",
            Phase::QueryKeyValue => "q k v",
            Phase::Attention => "attention",
            Phase::AttentionOutput => "attention out",
            Phase::GateUp => "gate, up",
            Phase::Down => "down",
            Phase::Head => "head",
            Phase::Sample => "sample",
        }
    }
}

/// What a phase has taken, and what it must read.
#[derive(Clone, Copy, Debug)]
pub struct PhaseCost {
    /// Which.
    pub phase: Phase,
    /// Time since the engine was built or [`super::CpuEngine::reset_phases`] was called.
    pub nanoseconds: u64,
    /// Bytes of weights that it reads in a pass.
    pub weight_bytes: usize,
    /// Products with weights that a row needs.
    pub row_products: usize,
}

/// The leader's clock.
pub(crate) struct Clock {
    spent: [u64; Phase::ALL.len()],
    last: Instant,
}

impl Clock {
    pub fn new() -> Self {
        Clock {
            spent: [0; Phase::ALL.len()],
            last: Instant::now(),
        }
    }

    /// A pass begins.
    pub fn start(&mut self) {
        self.last = Instant::now();
    }

    /// A phase has ended.
    pub fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        self.spent[phase as usize] += now.duration_since(self.last).as_nanos() as u64;
        self.last = now;
    }

    pub fn spent(&self, phase: Phase) -> u64 {
        self.spent[phase as usize]
    }
}
