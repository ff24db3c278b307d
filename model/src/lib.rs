//! `kvserve-model`: everything that makes text out of numbers and back.
//!
//! **What it is.** Model configuration, weights (GGUF, safetensors), tokenizer, chat template,
//! detokeniser, sampling, the [`Backend`] face and the CPU backend.
//!
//! **What it is not.** It knows no HTTP, no peer and no request: a step is a list of token runs
//! with page tables.

pub mod backend;
pub mod config;
pub mod weights;

pub use backend::{Backend, SampleSpec, Sampled, Step, StepSequence, SubmitError};
pub use config::{Architecture, ModelConfig};
pub use weights::{
    LayerTensor, RopeLayout, TensorId, TensorType, TensorView, Weights, dequantize_row,
};
