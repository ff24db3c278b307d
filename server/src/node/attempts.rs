//! What a request on a decode node decides about its attempts (PROTOCOL R1 to R4), sans-IO: the
//! shell in `decode` and the simulator ask it, and carry out what it says.
//!
//! Owns: which try comes next, which tokens are facts, which are withheld until COMMIT's OK.
//! Keeps: tokens told are facts, so every attempt starts from prompt + told tokens and nothing
//! is sampled or sent twice (R2); no token of migrated pages leaves before the OK (L5).

use crate::engine::{FinishReason, GenerateRequest};
use kvserve_kv::pull::{FailReason, MigrationError, Retry};
use kvserve_model::Sampled;
use std::time::Duration;

/// Attempts on prefill nodes before the prompt is computed here (PROTOCOL R4).
pub const PEER_ATTEMPTS_MAX: u32 = 2;

/// Rounds of "busy" a request takes from prefill nodes before it computes its prompt itself:
/// with the largest pause of 50 ms, 3 s.
pub const BUSY_ROUNDS_MAX: u32 = 60;

/// The longest pause after "busy".
pub const BUSY_PAUSE_MAX: Duration = Duration::from_millis(50);

/// Tokens of a prompt that this node computes itself when it holds all that is before them. Two
/// of the smallest chunks: they ride in one step that runs anyway, and cost its decode rows less
/// than a migration costs the request (a frame each way, the prefill node's queue, one pull and
/// COMMIT). The prefill node, too, would often compute more than them: answers that were
/// generated here were never there.
pub const REST_HERE_TOKENS_MAX: usize = 32;

/// Whether the rest of a prompt of `tokens` is computed here, given that its first
/// `held_tokens` are in this node's prefix cache.
pub fn rest_stays_here(held_tokens: usize, tokens: usize) -> bool {
    held_tokens > 0 && tokens - held_tokens <= REST_HERE_TOKENS_MAX
}

/// Why an attempt failed, and what may come next.
#[derive(Clone, Debug)]
pub struct AttemptFailure {
    /// Stable label.
    pub label: &'static str,
    /// One sentence for the log.
    pub message: String,
    /// What may be tried.
    pub retry: Retry,
    /// The peer was only busy: wait this long, the attempt does not count.
    pub pause: Option<Duration>,
}

impl AttemptFailure {
    /// The peer sent what this version does not understand.
    pub fn protocol(message: impl Into<String>) -> Self {
        AttemptFailure {
            label: "protocol",
            message: message.into(),
            retry: Retry::OtherPair,
            pause: None,
        }
    }

    /// This node has no room to pull into.
    pub fn no_room(message: String) -> Self {
        AttemptFailure {
            label: "no_room",
            message,
            retry: Retry::Recompute,
            pause: None,
        }
    }
}

impl From<MigrationError> for AttemptFailure {
    fn from(error: MigrationError) -> Self {
        AttemptFailure {
            label: error.reason.label(),
            pause: match error.reason {
                FailReason::Busy { retry_ms } => Some(Duration::from_millis(retry_ms.into())),
                _ => None,
            },
            retry: error.retry,
            message: error.message,
        }
    }
}

/// What to do after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Ask for the next attempt now.
    Again,
    /// Wait this long first.
    Pause(Duration),
    /// No peer can help: compute here.
    Recompute,
}

/// The tries of one request so far.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    tried: Vec<String>,
    busy_rounds: u32,
    attempts: u32,
}

impl Attempts {
    /// Number of the next attempt on a peer; `None`: compute here.
    pub fn next_number(&self) -> Option<u32> {
        let more = self.attempts < PEER_ATTEMPTS_MAX && self.busy_rounds < BUSY_ROUNDS_MAX;
        more.then_some(self.attempts + self.busy_rounds + 1)
    }

    /// Whether a peer was asked before, in vain or not.
    pub fn any_failed(&self) -> bool {
        self.attempts + self.busy_rounds > 0
    }

    /// Prefill nodes that are not asked again.
    pub fn tried(&self) -> &[String] {
        &self.tried
    }

    /// The attempt on `peer` failed.
    pub fn failed(&mut self, peer: &str, failure: &AttemptFailure) -> AfterFailure {
        match (failure.pause, failure.retry) {
            (Some(pause), _) => {
                self.busy_rounds += 1;
                AfterFailure::Pause(pause.min(BUSY_PAUSE_MAX))
            }
            (None, Retry::SamePair) => {
                self.attempts += 1;
                AfterFailure::Again
            }
            (None, Retry::OtherPair) => {
                self.attempts += 1;
                self.tried.push(peer.to_owned());
                AfterFailure::Again
            }
            // What a peer cannot do this node may: it has its own pool and its own limits.
            (None, Retry::Recompute | Retry::Fail) => AfterFailure::Recompute,
        }
    }
}

/// Tokens computed from migrated pages before COMMIT's OK (PROTOCOL L5), of one attempt.
#[derive(Clone, Debug)]
pub struct Withheld {
    computed: usize,
    tokens: Vec<Sampled>,
    finish: Option<FinishReason>,
}

impl Withheld {
    /// Of an attempt that pulls the keys and values of `computed` tokens.
    pub fn new(computed: usize) -> Self {
        Withheld {
            computed,
            tokens: Vec::new(),
            finish: None,
        }
    }

    /// Tokens whose keys and values the attempt pulls.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// All pages are in place and `tokens` are prompt and told tokens: may steps begin?
    ///
    /// # Errors
    /// When the first token has not come before the pages.
    pub fn may_decode(&self, tokens: usize) -> Result<(), AttemptFailure> {
        if tokens == self.computed + 1 {
            return Ok(());
        }
        Err(AttemptFailure::protocol(
            "the pages came without a first token",
        ))
    }

    /// A step brought a token.
    pub fn push(&mut self, sampled: Sampled, finish: Option<FinishReason>) {
        self.tokens.push(sampled);
        self.finish = finish;
    }

    /// How many tokens are withheld.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Set once the text is complete, though not told.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// COMMIT's answer was OK: the tokens to tell, in order, and the end if it has come.
    pub fn release(self) -> (Vec<Sampled>, Option<FinishReason>) {
        (self.tokens, self.finish)
    }
}

/// What a sampled token means to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// A stop token: the text is complete, the token itself is not told.
    Stop,
    /// Text; with a reason if it was the last.
    Text(Option<FinishReason>),
}

/// The tokens a client was told. They are facts (PROTOCOL R2).
#[derive(Clone, Debug, Default)]
pub struct Facts(Vec<u32>);

impl Facts {
    /// Prompt and all tokens told so far: what a retry prefills.
    pub fn tokens(&self, request: &GenerateRequest) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(request.prompt.len() + self.0.len());
        tokens.extend_from_slice(&request.prompt);
        tokens.extend_from_slice(&self.0);
        tokens
    }

    /// Tokens the client was told.
    pub fn told(&self) -> usize {
        self.0.len()
    }

    /// Tokens it may still get.
    pub fn left(&self, request: &GenerateRequest) -> u32 {
        request.max_tokens - self.told() as u32
    }

    /// Takes a sampled token in.
    pub fn take(&mut self, request: &GenerateRequest, token: u32) -> Told {
        if request.stop_token_ids.contains(&token) {
            return Told::Stop;
        }
        self.0.push(token);
        Told::Text((self.left(request) == 0).then_some(FinishReason::Length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvserve_kv::pull::Stage;

    fn failure(reason: FailReason) -> AttemptFailure {
        MigrationError::new(Stage::Pull, reason).into()
    }

    #[test]
    fn only_a_short_rest_behind_a_held_prefix_stays_here() {
        assert!(!rest_stays_here(0, 5), "nothing held: as any prompt");
        assert!(rest_stays_here(16, 48));
        assert!(!rest_stays_here(16, 49));
    }

    #[test]
    fn busy_rounds_do_not_count_as_attempts_and_a_failed_peer_is_not_asked_again() {
        let mut attempts = Attempts::default();
        let busy = failure(FailReason::Busy { retry_ms: 80 });
        assert_eq!(
            attempts.failed("a", &busy),
            AfterFailure::Pause(BUSY_PAUSE_MAX)
        );
        assert_eq!(attempts.next_number(), Some(2));
        let lost = failure(FailReason::SessionEnded);
        assert_eq!(attempts.failed("a", &lost), AfterFailure::Again);
        assert_eq!(attempts.tried(), ["a"]);
        assert_eq!(attempts.failed("b", &lost), AfterFailure::Again);
        assert_eq!(attempts.next_number(), None, "two attempts, then here");
        let full = AttemptFailure::no_room("full".into());
        assert_eq!(attempts.failed("b", &full), AfterFailure::Recompute);
    }
}
