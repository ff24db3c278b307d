//! Models for tests and benches, of this crate and of others.
//!
//! * [`random_qwen2`]: a checkpoint of random weights, the same bytes on every machine
//! * [`smollm2_path`]: the real default model
//! * [`small_gguf`]: a GGUF of a few kilobytes with weights, tokenizer and template

mod philox;
pub mod random_qwen2;
mod small_gguf;
mod smollm2;

pub use small_gguf::{SmallGguf, small_gguf};
pub use smollm2::smollm2_path;
