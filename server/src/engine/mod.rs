//! The engine as the API sees it: a request of token ids goes in, a stream of events comes out.

mod client;
mod core;
mod face;
mod notify;

pub use client::{CancelFlag, EngineClient, EngineCommand};
pub use core::{EngineCore, EngineLoad, Sequence, SequenceEvent};

pub use face::{
    Engine, FinishReason, GenerateEvent, GenerateRequest, Refusal, RetryClass, SamplingParams,
    ServeError, Stage, TokenEvent, TokenStream,
};
pub use notify::Notify;
