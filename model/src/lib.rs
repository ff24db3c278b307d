//! `kvserve-model`: everything that makes text out of numbers and back.
//!
//! **What it is.** Model configuration, weights (GGUF, safetensors), tokenizer, chat template,
//! detokeniser, sampling, the [`Backend`] face and the CPU backend.
//!
//! **What it is not.** It knows no HTTP, no peer and no request: a step is a list of token runs
//! with page tables.

pub mod backend;

pub use backend::{Backend, SampleSpec, Sampled, Step, StepSequence, SubmitError};
