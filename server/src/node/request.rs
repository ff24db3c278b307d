//! One request on the engine's shard, from its arrival to exactly one end.

use super::attempts::{Facts, Told};
use crate::engine::{
    EngineCommand, FinishReason, GenerateEvent, GenerateRequest, RetryClass, ServeError, Stage,
    TokenEvent,
};
use crate::perf::{Perf, Span};
use kvserve_kv::session::RequestId;
use kvserve_model::Sampled;
use kvserve_runtime::{Nanos, bridge};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// The client's side of a request: what it has been told so far. Tokens told are facts
/// (PROTOCOL R2), so they are kept here, above all attempts.
pub struct RequestOut {
    /// Its number, made by this node, which owns it to its end (PROTOCOL R1).
    pub id: RequestId,
    /// The request as it came.
    pub request: GenerateRequest,
    /// Where it is, for the error if its time runs out.
    pub stage: Cell<Stage>,
    /// When it arrived.
    pub arrived: Nanos,
    perf: Arc<Perf>,
    told_at: Cell<Nanos>,
    cached_tokens: Cell<Option<usize>>,
    events: bridge::Sender<GenerateEvent>,
    facts: RefCell<Facts>,
}

impl RequestOut {
    /// Takes a command apart.
    pub fn new(
        id: RequestId,
        perf: Arc<Perf>,
        command: EngineCommand,
    ) -> (Self, crate::engine::CancelFlag) {
        let out = RequestOut {
            id,
            request: command.request,
            stage: Cell::new(Stage::Queue),
            arrived: Nanos::now(),
            perf,
            told_at: Cell::default(),
            cached_tokens: Cell::default(),
            events: command.events,
            facts: RefCell::default(),
        };
        (out, command.cancelled)
    }

    /// Prompt and all tokens told so far: what a retry prefills.
    pub fn tokens(&self) -> Vec<u32> {
        self.facts.borrow().tokens(&self.request)
    }

    /// Tokens the client was told.
    pub fn told(&self) -> usize {
        self.facts.borrow().told()
    }

    /// Tokens it may still get.
    pub fn left(&self) -> u32 {
        self.facts.borrow().left(&self.request)
    }

    /// Tells a token, unless it is a stop token. Gives the finish reason if it was the last.
    pub fn token(&self, sampled: Sampled) -> Option<FinishReason> {
        let taken = (self.facts.borrow_mut()).take(&self.request, sampled.token);
        let end = match taken {
            Told::Stop => return Some(FinishReason::Stop),
            Told::Text(end) => end,
        };
        let now = Nanos::now();
        match self.told() {
            1 => self.perf.record(Span::FirstToken, now.since(self.arrived)),
            _ => self
                .perf
                .record(Span::NextToken, now.since(self.told_at.get())),
        }
        self.told_at.set(now);
        // The bridge holds max_tokens + 2 events, so only a client that left refuses one; its
        // cancel flag ends this request.
        let _ = self.events.try_send(GenerateEvent::Token(TokenEvent {
            token: sampled.token,
            logprob: sampled.logprob,
            top: sampled.top,
        }));
        end
    }

    /// So many tokens of the prompt were found in a prefix cache, by whoever computes the first
    /// token. Usage counts once: what a retry or a recompute finds later says nothing.
    pub fn found_cached(&self, tokens: usize) {
        if self.told() == 0 && self.cached_tokens.get().is_none() {
            self.cached_tokens.set(Some(tokens));
        }
    }

    /// Tells the end.
    pub fn finished(&self, reason: FinishReason) {
        let _ = self.events.try_send(GenerateEvent::Finished {
            reason,
            cached_tokens: (self.cached_tokens.get())
                .map_or(0, |tokens| tokens.min(self.request.prompt.len()) as u32),
        });
    }

    /// Tells a failure.
    pub fn failed(&self, error: ServeError) {
        let _ = self.events.try_send(GenerateEvent::Failed(error));
    }

    /// The error of a request whose time has run out where it is now.
    pub fn deadline_error(&self) -> ServeError {
        let stage = self.stage.get();
        ServeError {
            stage,
            reason: "deadline_exceeded",
            retry: RetryClass::Fail,
            message: format!(
                "the request's time ran out while it was in stage {}",
                stage.label()
            ),
        }
    }
}
