//! The OpenAI API of one shard, on top of [`Engine`](crate::engine::Engine).
//!
//! ```text
//! bytes -> json -> fields/params/unsupported -> prepare   (pure; on a side thread)
//!       -> handler -> engine -> generation -> run -> assemble -> shape -> bytes
//! ```
//!
//! Owns: what a request may hold, what an answer looks like, which error each failure is.
//! Never: decides when anything runs, knows a page or a peer.
//! Invariants: every non-2xx answer is one JSON error object; what is known before the first
//! token is an HTTP status, after it an SSE error event and the end (PROTOCOL R5); dropping
//! an answer drops its token streams; each wait ends by the request's deadline plus
//! [`generation::BACKSTOP_GRACE`].

pub mod assemble;
pub mod call;
pub mod clock;
pub mod error;
pub mod fields;
pub mod generation;
pub mod handler;
pub mod http;
pub mod ids;
pub mod json;
pub mod metrics;
pub mod model_text;
pub mod offload;
pub mod pages;
pub mod params;
pub mod prepare;
pub mod route;
pub mod run;
pub mod shape;
pub mod text;
pub mod tokenize;
pub mod unsupported;

pub use call::{Answer, AnswerBody, Call, EventSource};
pub use clock::{Clock, LocalFuture};
pub use error::ApiError;
pub use handler::{Api, ApiConfig, BODY_BYTES_MAX, REQUEST_ID_HEADER, TIMEOUT_HEADER};
pub use http::{Service, http_handler};
pub use metrics::ApiMetrics;
pub use model_text::ModelText;
pub use offload::{Inline, Job, Offload, OffloadError};
pub use pages::{AdminPages, Page};
pub use text::{ChatMessage, Detokenizer, SamplingDefaults, ServedModel, TextError, TextModel};
