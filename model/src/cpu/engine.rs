//! The engine: weights, pool, team and scratch of one model replica; computes steps.

use super::forward::{Forward, Workspace};
use super::isa::{Isa, Level, UnusableIsa};
use super::lanes::Lanes;
use super::lanes_portable::Portable;
use super::packed::PackedModel;
use super::paged_kv::PagedKv;
use super::phases::{Clock, Phase, PhaseCost};
use super::plan::{Bounds, Checker, Cursor, InvalidStep, Pass};
use super::rope::Rope;
use super::team::{Member, Team};
use crate::backend::Step;
use crate::config::ModelConfig;
use crate::weights::{RopeLayout, TensorId, TensorView, Weights};
use kvserve_kv::{KvDtype, KvLayout, PoolMemory};
use kvserve_runtime::lane::LanePulse;
use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

#[cfg(target_arch = "x86_64")]
use super::{lanes_avx2::Avx2, lanes_avx512::Avx512};

/// How an engine is built.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads of the team, the leader (the thread that calls `run`) counted; at least 1.
    pub threads: usize,
    /// Cores to run on; empty leaves it to the kernel. Worker i is bound to
    /// `cores[i % cores.len()]`; the leader's core, `cores[0]`, is bound by its owner (the lane).
    pub cores: Vec<usize>,
    /// Added to the niceness of the workers, so that a shard on the same core wins it; give the
    /// lane the same.
    pub nice: u8,
    /// Element type of keys and values. With `Bf16`, weights stored as f32 are held as bf16
    /// too; activations are f32 always.
    pub dtype: KvDtype,
    /// Pages of the pool.
    pub pool_pages: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Instruction set; `None`: the best there is, or what `KVSERVE_CPU` names.
    pub isa: Option<Isa>,
}

/// Why an engine cannot be built.
#[derive(Debug)]
pub enum CpuEngineError {
    /// `KVSERVE_CPU` names what this processor lacks.
    Isa(UnusableIsa),
    /// A page of no tokens.
    PageTokens,
    /// The pool cannot be mapped.
    Pool {
        /// Pages asked for.
        pages: usize,
        /// Bytes of a page.
        page_bytes: usize,
        /// What the kernel says.
        error: io::Error,
    },
    /// An engine thread cannot be started or pinned.
    Threads(io::Error),
}

impl fmt::Display for CpuEngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuEngineError::Isa(error) => error.fmt(f),
            CpuEngineError::PageTokens => write!(f, "a KV page must hold at least 1 token, not 0"),
            CpuEngineError::Pool {
                pages,
                page_bytes,
                error,
            } => write!(
                f,
                "a KV pool of {pages} pages of {page_bytes} bytes cannot be mapped: {error}"
            ),
            CpuEngineError::Threads(error) => write!(f, "engine threads: {error}"),
        }
    }
}

impl std::error::Error for CpuEngineError {}

/// Computes steps, synchronously. Move it to the thread that leads the team.
pub struct CpuEngine {
    model: PackedModel,
    rope: Rope,
    kv: PagedKv,
    isa: Isa,
    team: Team,
    work: Workspace,
    pass: Pass,
    checker: Checker,
    pulse: Option<Arc<LanePulse>>,
}

impl CpuEngine {
    /// Packs the weights, maps the pool (pages are touched on first use) and starts the team.
    ///
    /// # Errors
    /// [`CpuEngineError`].
    pub fn new(
        config: &ModelConfig,
        weights: &Weights,
        rope: RopeLayout,
        options: &CpuOptions,
    ) -> Result<Self, CpuEngineError> {
        Self::from_tensors(config, rope, options, |id| weights.tensor(id))
    }

    /// As [`CpuEngine::new`], from tensors that need not lie in a file. Their shapes must be
    /// those of `config`.
    ///
    /// # Errors
    /// [`CpuEngineError`].
    ///
    /// # Panics
    /// If a tensor has another shape.
    pub fn from_tensors<'a>(
        config: &ModelConfig,
        rope: RopeLayout,
        options: &CpuOptions,
        tensor: impl Fn(TensorId) -> TensorView<'a>,
    ) -> Result<Self, CpuEngineError> {
        let isa = match options.isa {
            Some(isa) => isa,
            None => Isa::detect().map_err(CpuEngineError::Isa)?,
        };
        if options.page_tokens == 0 {
            return Err(CpuEngineError::PageTokens);
        }
        let layout = layout(config, options, isa);
        let page_bytes = layout.page_bytes();
        let pool = PoolMemory::memfd(options.pool_pages, page_bytes).map_err(|error| {
            CpuEngineError::Pool {
                pages: options.pool_pages,
                page_bytes,
                error,
            }
        })?;
        let mut team = Team::start(options.threads, &options.cores, options.nice)
            .map_err(CpuEngineError::Threads)?;
        let model = PackedModel::pack(config, options.dtype, tensor, &mut team);
        let rope = Rope::new(config.head_dim, config.rope_theta, rope);
        let arithmetic = isa.arithmetic(options.dtype);
        let work = match isa.0 {
            Level::Portable => {
                Workspace::new::<Portable>(&model, &rope, team.threads(), arithmetic)
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Workspace::new::<Avx2>(&model, &rope, team.threads(), arithmetic),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Int8 | Level::Avx512Dots => {
                Workspace::new::<Avx512>(&model, &rope, team.threads(), arithmetic)
            }
        };
        let kv = PagedKv::new(Arc::new(pool), layout);
        let checker = checker(config, &kv);
        Ok(CpuEngine {
            model,
            rope,
            kv,
            isa,
            team,
            work,
            pass: Pass::with_room(),
            checker,
            pulse: None,
        })
    }

    /// Computes a step and fills `sampled` and `compute_ns`.
    ///
    /// A step of more than [`PASS_ROWS_MAX`](super::PASS_ROWS_MAX) tokens is computed in several
    /// passes. A step like one before it allocates nothing, unless log-probabilities are asked for.
    ///
    /// # Errors
    /// [`InvalidStep`] when the plan is wrong; nothing was computed then.
    pub fn run(&mut self, step: &mut Step) -> Result<(), InvalidStep> {
        self.checker.check(step)?;
        let start = Instant::now();
        step.sampled.clear();
        step.sampled.resize(step.sequences.len(), None);
        let group = self.model.config.heads / self.model.config.kv_heads;
        let mut cursor = Cursor::default();
        while self.pass.fill(step, &mut cursor, group) {
            self.run_pass(step);
            for (i, row) in self.pass.samples.iter().enumerate() {
                let slot = self.work.sampled[i].get_mut();
                let sampled = slot.unwrap_or_else(PoisonError::into_inner).take();
                step.sampled[self.pass.rows[*row].sequence] = sampled;
            }
        }
        step.compute_ns = start.elapsed().as_nanos() as u64;
        Ok(())
    }

    fn run_pass(&mut self, step: &Step) {
        let forward = Forward {
            model: &self.model,
            rope: &self.rope,
            kv: &self.kv,
            work: &self.work,
            pass: &self.pass,
            step,
            arithmetic: self.isa.arithmetic(self.kv.layout().dtype),
            pulse: self.pulse.as_deref(),
        };
        match self.isa.0 {
            Level::Portable => lead::<Portable>(&mut self.team, &forward),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => lead::<Avx2>(&mut self.team, &forward),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Int8 | Level::Avx512Dots => {
                lead::<Avx512>(&mut self.team, &forward)
            }
        }
    }

    /// The pool its pages lie in.
    pub fn pool(&self) -> Arc<PoolMemory> {
        Arc::clone(self.kv.pool())
    }

    /// The layout of those pages.
    pub fn layout(&self) -> &KvLayout {
        self.kv.layout()
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads of the team.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Bytes of weights that every decode step must read: the floor of its time is these over
    /// the memory's bandwidth.
    pub fn streamed_bytes(&self) -> usize {
        self.model.streamed_bytes()
    }

    /// Where passes have spent their time.
    pub fn phases(&mut self) -> Vec<PhaseCost> {
        let own = self.work.own[0].get_mut();
        let clock = &own.unwrap_or_else(PoisonError::into_inner).clock;
        let cost = |phase| {
            let (weight_bytes, row_products) = self.model.weights_of(phase);
            PhaseCost {
                phase,
                nanoseconds: clock.spent(phase),
                weight_bytes,
                row_products,
            }
        };
        Phase::ALL.map(cost).to_vec()
    }

    /// Starts the count of [`CpuEngine::phases`] anew.
    pub fn reset_phases(&mut self) {
        let own = self.work.own[0].get_mut();
        own.unwrap_or_else(PoisonError::into_inner).clock = Clock::new();
    }

    /// Signs of life to give several times a layer, so that a long step does not look like a dead lane.
    pub fn set_pulse(&mut self, pulse: Arc<LanePulse>) {
        self.pulse = Some(pulse);
    }

    /// A second checker with this engine's bounds, for whoever submits to it.
    pub(crate) fn new_checker(&self) -> Checker {
        checker(&self.model.config, &self.kv)
    }
}

fn lead<S: Lanes>(team: &mut Team, forward: &Forward<'_>) {
    team.run(&|member: &Member<'_>| {
        // SAFETY: `S` was found on this processor when the engine was built; this team alone
        // runs this pass (`&mut CpuEngine`); `run` has checked the step.
        unsafe { forward.run::<S>(member) }
    });
}

fn layout(config: &ModelConfig, options: &CpuOptions, isa: Isa) -> KvLayout {
    KvLayout {
        dtype: options.dtype,
        page_tokens: options.page_tokens,
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        kernel_class: isa.kernel_class(options.dtype),
    }
}

fn checker(config: &ModelConfig, kv: &PagedKv) -> Checker {
    Checker::new(Bounds {
        vocab: config.vocab,
        context: config.context,
        page_tokens: kv.layout().page_tokens,
        pool_pages: kv.pool().pages(),
    })
}
