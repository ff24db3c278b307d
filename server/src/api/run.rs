//! One accepted request from the engine's events to the bytes of its answer, plain or as a
//! stream.
//!
//! Owns the generations: dropping a [`Run`] (the client left) cancels them all. Rule R5: a
//! failure before the first byte is an HTTP status; inside a stream it is an error event and
//! then the end, with neither `finish_reason` nor `[DONE]`.

use super::assemble::{Assembler, Piece};
use super::call::EventSource;
use super::clock::{Clock, LocalFuture};
use super::error::ApiError;
use super::generation::Generation;
use super::metrics::ApiMetrics;
use super::params::Kind;
use super::shape::{ChoicePart, LoggedToken, Shape, Usage};
use crate::engine::{FinishReason, GenerateEvent};
use bytes::Bytes;
use kvserve_runtime::Nanos;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// One choice while it grows.
struct Choice {
    assembler: Assembler,
    /// Text so far (plain answers only).
    text: String,
    logged: Vec<LoggedToken>,
    ids: Vec<u32>,
    finish: Option<FinishReason>,
    /// Told once, with the choice's first part.
    prompt_ids: Option<Vec<u32>>,
    /// The chunk with the role has gone out (chat streams).
    opened: bool,
    last_token: Option<Nanos>,
}

/// What a run needs to know of its request.
pub struct RunSpec {
    /// Forms of the answer.
    pub shape: Shape,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// Ids were asked for.
    pub token_ids: bool,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// For 500s.
    pub request_id: String,
    /// When the request came.
    pub arrived: Nanos,
}

/// One choice's beginning.
pub struct ChoiceSpec {
    /// Detokeniser and stop strings.
    pub assembler: Assembler,
    /// The prompt's ids, if the answer shall repeat them.
    pub prompt_ids: Option<Vec<u32>>,
}

/// A request being answered.
pub struct Run {
    spec: RunSpec,
    generation: Generation,
    choices: Vec<Choice>,
    usage: Usage,
    metrics: Arc<ApiMetrics>,
    clock: Rc<dyn Clock>,
    /// The answer (or its error) is whole.
    over: bool,
}

impl Run {
    /// Starts answering; `choices` and the generation's streams have the same places.
    pub fn new(
        spec: RunSpec,
        generation: Generation,
        choices: Vec<ChoiceSpec>,
        metrics: Arc<ApiMetrics>,
        clock: Rc<dyn Clock>,
    ) -> Self {
        metrics.running.fetch_add(1, Relaxed);
        metrics.prompt_tokens.fetch_add(spec.prompt_tokens, Relaxed);
        Run {
            usage: Usage {
                prompt_tokens: spec.prompt_tokens,
                ..Usage::default()
            },
            spec,
            generation,
            choices: choices
                .into_iter()
                .map(|choice| Choice {
                    assembler: choice.assembler,
                    text: String::new(),
                    logged: Vec::new(),
                    ids: Vec::new(),
                    finish: None,
                    prompt_ids: choice.prompt_ids,
                    opened: false,
                    last_token: None,
                })
                .collect(),
            metrics,
            clock,
            over: false,
        }
    }

    /// Answers whole.
    ///
    /// # Errors
    /// The failure of any of the generations.
    pub async fn whole(mut self) -> Result<Vec<u8>, ApiError> {
        while let Some((index, event)) = self.generation.next().await {
            let piece = self.take(index, event)?;
            let choice = &mut self.choices[index];
            choice.text += &piece.text;
            choice.finish = piece.finish.or(choice.finish);
            keep_token(choice, piece, self.spec.logprobs, self.spec.token_ids);
        }
        let parts: Vec<ChoicePart<'_>> = self
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| ChoicePart {
                index,
                text: &choice.text,
                logprobs: self.spec.logprobs.then_some(choice.logged.as_slice()),
                finish: choice.finish,
                token_ids: self.spec.token_ids.then_some(choice.ids.as_slice()),
                prompt_token_ids: choice.prompt_ids.as_deref(),
            })
            .collect();
        let body = self.spec.shape.whole(&parts, self.usage);
        self.end();
        Ok(body)
    }

    /// Waits for the first event, so that what can be found before the first token is still
    /// an HTTP status; then the rest is a stream.
    ///
    /// # Errors
    /// A failure that came first.
    pub async fn stream(mut self) -> Result<Box<dyn EventSource>, ApiError> {
        let mut first = Vec::new();
        match self.generation.next().await {
            Some((index, event)) => self.stream_event(index, event, &mut first)?,
            None => self.stream_end(&mut first),
        }
        Ok(Box::new(SseSource { run: self, first }))
    }

    /// Counts an event and makes a piece of it.
    fn take(&mut self, index: usize, event: GenerateEvent) -> Result<Piece, ApiError> {
        match event {
            GenerateEvent::Token(token) => {
                self.usage.completion_tokens += 1;
                self.metrics.generated_tokens.fetch_add(1, Relaxed);
                let now = self.clock.now();
                let choice = &mut self.choices[index];
                match choice.last_token.replace(now) {
                    None => self.metrics.ttft.observe(now.since(self.spec.arrived)),
                    Some(last) => self.metrics.itl.observe(now.since(last)),
                }
                let piece = choice.assembler.token(token);
                if piece.finish.is_some() {
                    self.generation.stop(index);
                }
                Ok(piece)
            }
            GenerateEvent::Finished {
                reason,
                cached_tokens,
            } => {
                self.usage.cached_tokens += u64::from(cached_tokens);
                Ok(self.choices[index].assembler.finish(reason))
            }
            GenerateEvent::Failed(error) => {
                self.generation.stop_all();
                self.end();
                Err(ApiError::from_serve_error(&error, &self.spec.request_id))
            }
        }
    }

    /// Writes the chunks of one event; nothing while text is held back.
    fn stream_event(
        &mut self,
        index: usize,
        event: GenerateEvent,
        out: &mut Vec<u8>,
    ) -> Result<(), ApiError> {
        let piece = self.take(index, event)?;
        self.write_chunks(index, piece, out);
        if self.generation.is_over() {
            self.stream_end(out);
        }
        Ok(())
    }

    fn write_chunks(&mut self, index: usize, piece: Piece, out: &mut Vec<u8>) {
        let (logprobs, token_ids) = (self.spec.logprobs, self.spec.token_ids);
        let shape = &self.spec.shape;
        let choice = &mut self.choices[index];
        let finish = piece.finish;
        let text = piece.text.clone();
        let has_token = piece.token.is_some();
        keep_token(choice, piece, logprobs, token_ids);
        let prompt_ids = if has_token || finish.is_some() {
            choice.prompt_ids.take()
        } else {
            None
        };
        let base = ChoicePart {
            index,
            ..ChoicePart::default()
        };
        let chat = shape.kind == Kind::Chat;
        if chat && !choice.opened {
            choice.opened = true;
            shape.role_chunk(
                out,
                &ChoicePart {
                    prompt_token_ids: prompt_ids.as_deref(),
                    ..base
                },
            );
        }
        let tells_token = has_token && (logprobs || token_ids);
        let ends_here = finish.is_some() && !chat;
        if !text.is_empty() || tells_token || ends_here {
            shape.text_chunk(
                out,
                &ChoicePart {
                    index,
                    text: &text,
                    logprobs: (logprobs && has_token).then_some(choice.logged.as_slice()),
                    finish: finish.filter(|_| ends_here),
                    token_ids: token_ids.then_some(choice.ids.as_slice()),
                    prompt_token_ids: prompt_ids.as_deref().filter(|_| !chat),
                },
            );
        }
        if chat && finish.is_some() {
            shape.finish_chunk(
                out,
                &ChoicePart {
                    index,
                    finish,
                    ..ChoicePart::default()
                },
            );
        }
        choice.logged.clear();
        choice.ids.clear();
    }

    /// All choices have ended well.
    fn stream_end(&mut self, out: &mut Vec<u8>) {
        if self.spec.shape.include_usage {
            self.spec.shape.usage_chunk(out, self.usage);
        }
        self.spec.shape.done(out);
        self.end();
    }

    fn end(&mut self) {
        if !self.over {
            self.over = true;
            let span = self.clock.now().since(self.spec.arrived);
            self.metrics.end_to_end.observe(span);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.metrics.running.fetch_sub(1, Relaxed);
        if !self.over {
            self.metrics.clients_left.fetch_add(1, Relaxed);
        }
    }
}

fn keep_token(choice: &mut Choice, piece: Piece, logprobs: bool, token_ids: bool) {
    let Some(event) = piece.token else {
        return;
    };
    if token_ids {
        choice.ids.push(event.token);
    }
    if logprobs {
        choice.logged.push(LoggedToken {
            event,
            offset_chars: piece.offset_chars,
        });
    }
}

/// The rest of a streamed answer.
struct SseSource {
    run: Run,
    /// Chunks of the event that was waited for before the headers.
    first: Vec<u8>,
}

impl SseSource {
    async fn pull(&mut self) -> Option<Bytes> {
        if !self.first.is_empty() {
            return Some(std::mem::take(&mut self.first).into());
        }
        if self.run.over {
            return None;
        }
        let mut out = Vec::new();
        while out.is_empty() {
            match self.run.generation.next().await {
                Some((index, event)) => {
                    if let Err(error) = self.run.stream_event(index, event, &mut out) {
                        self.run.metrics.count(|metrics| &metrics.stream_errors);
                        return Some(error.to_sse().into());
                    }
                }
                None => self.run.stream_end(&mut out),
            }
        }
        Some(out.into())
    }
}

impl EventSource for SseSource {
    fn next(&mut self) -> LocalFuture<'_, Option<Bytes>> {
        Box::pin(self.pull())
    }
}
