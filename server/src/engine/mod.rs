//! The engine as the API sees it: a request of token ids goes in, a stream of events comes out.

mod face;

pub use face::{
    Engine, FinishReason, GenerateEvent, GenerateRequest, Refusal, RetryClass, SamplingParams,
    ServeError, Stage, TokenEvent, TokenStream,
};
