//! What passes between the API (any shard) and the engine (one shard of the process).

use kvserve_model::LogitRules;
use kvserve_runtime::Deadline;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// How tokens are chosen; already checked and completed with defaults by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// Bias and penalties; `None` for most.
    pub rules: Option<Arc<LogitRules>>,
    /// The request's seed; drawn by the API when the client gave none.
    pub seed: u64,
    /// `Some(n)`: log-probabilities of the chosen token and the n best (n <= 20).
    pub logprobs: Option<u8>,
}

/// Greedy, with nothing else asked for.
impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            rules: None,
            seed: 0,
            logprobs: None,
        }
    }
}

/// One generation. `prompt` is never empty and every id is below the vocabulary's size.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; at least 1; prompt + this fits the context.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Token ids that end the text (EOS included unless `ignore_eos`).
    pub stop_token_ids: Vec<u32>,
    /// Only prompts of the same salt share cached pages; at most
    /// [`kvserve_kv::prefix::CACHE_SALT_BYTES_MAX`] bytes.
    pub cache_salt: String,
    /// By when all of it must have ended.
    pub deadline: Deadline,
    /// The client's id for the request; a label only, never a key (PROTOCOL R1).
    pub label: String,
}

/// Why a generation ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token (or, told by the API itself, a stop string).
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The token id.
    pub token: u32,
    /// Natural log-probability; NaN when not asked for.
    pub logprob: f32,
    /// The best alternatives, best first.
    pub top: Vec<(u32, f32)>,
}

/// What a stream gives, in order: tokens, then exactly one `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum GenerateEvent {
    /// A token; it is a fact from now on (PROTOCOL R2).
    Token(TokenEvent),
    /// The end. The stop token itself is not given as a token.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Prompt tokens found in a cache.
        cached_tokens: u32,
    },
    /// A failure, before or after the first token.
    Failed(ServeError),
}

/// Where a request was when it failed (DESIGN 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Waiting for admission.
    Queue,
    /// Pairing with a prefill node.
    Pair,
    /// Prefill computing.
    Prefill,
    /// Pages moving.
    Pull,
    /// Proof of the migration.
    Commit,
    /// Decode steps.
    Decode,
    /// Between proxy and node.
    Forward,
}

impl Stage {
    /// A short stable label for metrics, logs and messages.
    pub fn label(self) -> &'static str {
        match self {
            Stage::Queue => "queue",
            Stage::Pair => "pair",
            Stage::Prefill => "prefill",
            Stage::Pull => "pull",
            Stage::Commit => "commit",
            Stage::Decode => "decode",
            Stage::Forward => "forward",
        }
    }
}

/// What a caller may try next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryClass {
    /// The same pair of nodes again.
    SamePair,
    /// Another prefill node.
    OtherPair,
    /// Compute the prompt locally.
    Recompute,
    /// Nothing: the request has failed.
    Fail,
}

/// A typed failure of an accepted request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeError {
    /// Where.
    pub stage: Stage,
    /// Stable label, e.g. `deadline_exceeded`, `peer_lost`, `draining`, `engine_failed`.
    pub reason: &'static str,
    /// What may be tried.
    pub retry: RetryClass,
    /// One sentence for the person who reads it: what, where, what to do.
    pub message: String,
}

/// A request that was not accepted; nothing was reserved for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full (429/503 with Retry-After).
    Overloaded {
        /// Requests waiting.
        queued: usize,
        /// The bound.
        queued_max: usize,
        /// When to come again.
        retry_after: Duration,
    },
    /// The process is draining (503).
    Draining,
    /// No decode/prefill node or engine is there yet (503).
    NotReady {
        /// What is missing.
        missing: String,
    },
    /// It can never fit into this node's KV pool (400).
    TooLarge {
        /// Tokens it may need.
        tokens: usize,
        /// Tokens the pool can hold.
        tokens_max: usize,
    },
}

/// Events of one generation. Dropping it cancels the generation at every stage.
pub trait TokenStream {
    /// The next event; `None` only after `Finished` or `Failed`.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<GenerateEvent>> + '_>>;
}

/// Accepts generations; one per shard, whichever shard the engine itself runs on.
pub trait Engine {
    /// Starts a generation.
    ///
    /// # Errors
    /// [`Refusal`] when it is not accepted.
    fn generate(&self, request: GenerateRequest) -> Result<Box<dyn TokenStream>, Refusal>;
}
