//! The CPU backend: a transformer over paged keys and values, by pinned engine threads.
//!
//! * [`CpuEngine`] computes a [`crate::backend::Step`] synchronously; [`CpuBackend`] is one on
//!   its own lane, as the scheduler sees it.
//! * `isa`, `lanes*`: the instruction set, found at run time; every kernel is written once over
//!   sixteen lanes.
//! * `matrix`, `packed`: weights in reading order, still quantised. `matmul`, `attention`,
//!   `elementwise`, `rope`: the kernels. `forward`: one pass over them.
//! * `dots`: products by dot-product instructions, which dtype bf16 uses where the processor has
//!   them.
//! * `plan`: a step, checked and cut into passes. `team`: the threads. `paged_kv`: the only
//!   code that touches the pool. `aligned`: scratch.
//!
//! It is deterministic always (PROTOCOL D1): every output element is one sum in one order, every
//! attention block lies at a fixed position, so that batch, chunk, threads and pages change
//! nothing. A faster kernel takes the place of an op over `Lanes`, or of
//! `matmul::multiply` for a packing of its own (as `dots` does), and raises the kernel class.

mod aligned;
mod attention;
mod dots;
mod elementwise;
mod engine;
mod forward;
mod isa;
#[cfg(test)]
mod kernel_tests;
mod lane;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_avx2;
#[cfg(target_arch = "x86_64")]
mod lanes_avx512;
mod lanes_portable;
mod matmul;
mod matrix;
mod packed;
mod paged_kv;
mod phases;
mod plan;
mod rope;
mod team;

pub use engine::{CpuEngine, CpuEngineError, CpuOptions};
pub use isa::{Isa, UnusableIsa};
pub use lane::CpuBackend;
pub use phases::{Phase, PhaseCost};
pub use plan::{InvalidStep, PASS_ROWS_MAX};
