//! Models for tests and benches, of this crate and of others.
//!
//! * [`random_qwen2`]: a checkpoint of random weights, the same bytes on every machine

mod philox;
pub mod random_qwen2;
