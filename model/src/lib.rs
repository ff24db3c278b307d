//! `kvserve-model`: everything that makes text out of numbers and back.
//!
//! **What it is.** Model configuration, weights (GGUF, safetensors), tokenizer, chat template,
//! detokeniser, sampling, the [`Backend`] face and the CPU backend.
//!
//! **What it is not.** It knows no HTTP, no peer and no request: a step is a list of token runs
//! with page tables.

pub mod backend;
pub mod chat_template;
pub mod config;
pub mod cpu;
pub mod detokenizer;
pub mod error;
pub mod fetch;
pub mod generation_config;
pub mod gguf;
pub mod load;
pub mod logit_rules;
pub mod safetensors;
pub mod sampling;
pub mod stop;
pub mod testing;
pub mod tokenizer;
pub mod weights;

pub use backend::{Backend, SampleSpec, Sampled, Step, StepSequence, SubmitError, SubmitReason};
pub use chat_template::{ChatInput, ChatTemplate, TemplateError};
pub use config::{Architecture, ModelConfig};
pub use cpu::{CpuBackend, CpuEngine, CpuOptions};
pub use detokenizer::Detokenizer;
pub use error::{LoadError, LoadProblem};
pub use generation_config::GenerationDefaults;
pub use load::Model;
pub use logit_rules::{LogitRules, Shaping};
pub use stop::{StopError, StopMatcher};
pub use tokenizer::{EncodeError, Tokenizer};
pub use weights::{
    LayerTensor, RopeLayout, TensorId, TensorType, TensorView, Weights, dequantize_row,
};
