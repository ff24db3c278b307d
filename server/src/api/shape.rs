//! The JSON of answers, written straight into bytes: key order is fixed, nothing is built as
//! a tree, a chunk costs one buffer.

use super::json::{put, put_ids, put_logprob};
use super::params::Kind;
use super::text::TextModel;
use crate::engine::{FinishReason, TokenEvent};
use std::sync::Arc;

/// Token counts of a request (all its choices together).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens found in a cache.
    pub cached_tokens: u64,
}

/// A token with its place, kept for log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedToken {
    /// The token as the engine gave it.
    pub event: TokenEvent,
    /// Characters of text before it.
    pub offset_chars: usize,
}

/// What one chunk (or one whole choice) says.
#[derive(Default)]
pub struct ChoicePart<'a> {
    /// Place of the prompt in the request.
    pub index: usize,
    /// New text.
    pub text: &'a str,
    /// Tokens with log-probabilities; `None`: not asked for.
    pub logprobs: Option<&'a [LoggedToken]>,
    /// Set in the last part.
    pub finish: Option<FinishReason>,
    /// New ids, when asked for.
    pub token_ids: Option<&'a [u32]>,
    /// The prompt's ids, when asked for and not told before.
    pub prompt_token_ids: Option<&'a [u32]>,
}

/// What stays the same over all parts of an answer.
pub struct Shape {
    /// Which endpoint's forms.
    pub kind: Kind,
    /// `id` of the answer.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// Chunks carry `"usage":null` until the one that has it.
    pub include_usage: bool,
    /// For the names of tokens in log-probabilities.
    pub text: Option<Arc<dyn TextModel>>,
}

impl Shape {
    /// A whole answer.
    pub fn whole(&self, choices: &[ChoicePart<'_>], usage: Usage) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        self.open(&mut out, false);
        for (place, choice) in choices.iter().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            self.choice(&mut out, choice, ChoiceForm::Whole);
        }
        out.extend_from_slice(b"],\"usage\":");
        put_usage(&mut out, usage);
        out.push(b'}');
        out
    }

    /// The first chunk of a chat's choice: who speaks.
    pub fn role_chunk(&self, out: &mut Vec<u8>, part: &ChoicePart<'_>) {
        self.chunk(out, part, ChoiceForm::Role);
    }

    /// A chunk with text, ids, log-probabilities and, for completions, the end.
    pub fn text_chunk(&self, out: &mut Vec<u8>, part: &ChoicePart<'_>) {
        self.chunk(out, part, ChoiceForm::Text);
    }

    /// The last chunk of a chat's choice.
    pub fn finish_chunk(&self, out: &mut Vec<u8>, part: &ChoicePart<'_>) {
        self.chunk(out, part, ChoiceForm::Finish);
    }

    /// The chunk that `stream_options.include_usage` asks for.
    pub fn usage_chunk(&self, out: &mut Vec<u8>, usage: Usage) {
        out.extend_from_slice(b"data: ");
        self.open(out, true);
        out.extend_from_slice(b"],\"usage\":");
        put_usage(out, usage);
        out.extend_from_slice(b"}\n\n");
    }

    /// The mark after the last chunk.
    pub fn done(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn chunk(&self, out: &mut Vec<u8>, part: &ChoicePart<'_>, form: ChoiceForm) {
        out.extend_from_slice(b"data: ");
        self.open(out, true);
        self.choice(out, part, form);
        out.push(b']');
        if self.include_usage {
            out.extend_from_slice(b",\"usage\":null");
        }
        out.extend_from_slice(b"}\n\n");
    }

    /// `{"id":..,"object":..,"created":..,"model":..,"choices":[`
    fn open(&self, out: &mut Vec<u8>, chunk: bool) {
        out.extend_from_slice(b"{\"id\":");
        put(out, &self.id);
        out.extend_from_slice(b",\"object\":\"");
        out.extend_from_slice(match (self.kind, chunk) {
            (Kind::Completion, false | true) => b"text_completion",
            (Kind::Chat, false) => b"chat.completion",
            (Kind::Chat, true) => b"chat.completion.chunk",
        });
        out.extend_from_slice(b"\",\"created\":");
        put(out, &self.created);
        out.extend_from_slice(b",\"model\":");
        put(out, &self.model);
        out.extend_from_slice(b",\"choices\":[");
    }

    fn choice(&self, out: &mut Vec<u8>, part: &ChoicePart<'_>, form: ChoiceForm) {
        out.extend_from_slice(b"{\"index\":");
        put(out, &part.index);
        match (self.kind, form) {
            (
                Kind::Completion,
                ChoiceForm::Whole | ChoiceForm::Text | ChoiceForm::Role | ChoiceForm::Finish,
            ) => {
                out.extend_from_slice(b",\"text\":");
                put(out, part.text);
            }
            (Kind::Chat, ChoiceForm::Whole) => {
                out.extend_from_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
                put(out, part.text);
                out.push(b'}');
            }
            (Kind::Chat, ChoiceForm::Role) => {
                out.extend_from_slice(b",\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
            }
            (Kind::Chat, ChoiceForm::Text) => {
                out.extend_from_slice(b",\"delta\":{\"content\":");
                put(out, part.text);
                out.push(b'}');
            }
            (Kind::Chat, ChoiceForm::Finish) => out.extend_from_slice(b",\"delta\":{}"),
        }
        out.extend_from_slice(b",\"logprobs\":");
        match part.logprobs {
            Some(tokens) => match self.kind {
                Kind::Completion => self.completion_logprobs(out, tokens),
                Kind::Chat => self.chat_logprobs(out, tokens),
            },
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(b",\"finish_reason\":");
        put(out, &part.finish.map(finish_label));
        if let Some(ids) = part.token_ids {
            out.extend_from_slice(b",\"token_ids\":");
            put_ids(out, ids);
        }
        if let Some(ids) = part.prompt_token_ids {
            out.extend_from_slice(b",\"prompt_token_ids\":");
            put_ids(out, ids);
        }
        out.push(b'}');
    }

    /// Four lists side by side.
    fn completion_logprobs(&self, out: &mut Vec<u8>, tokens: &[LoggedToken]) {
        out.extend_from_slice(b"{\"tokens\":[");
        separated(out, tokens, |out, token| {
            put(out, &self.token_name(token.event.token));
        });
        out.extend_from_slice(b"],\"token_logprobs\":[");
        separated(out, tokens, |out, token| {
            put_logprob(out, token.event.logprob);
        });
        out.extend_from_slice(b"],\"top_logprobs\":[");
        separated(out, tokens, |out, token| self.top_object(out, &token.event));
        out.extend_from_slice(b"],\"text_offset\":[");
        separated(out, tokens, |out, token| put(out, &token.offset_chars));
        out.extend_from_slice(b"]}");
    }

    /// The best tokens by name; the chosen one is always among them (OpenAI: n or n + 1).
    fn top_object(&self, out: &mut Vec<u8>, event: &TokenEvent) {
        let mut names: Vec<String> = Vec::with_capacity(event.top.len() + 1);
        out.push(b'{');
        for (id, logprob) in with_chosen(event) {
            let name = self.token_name(id);
            // Two ids may have one name; the better one keeps it.
            if names.contains(&name) {
                continue;
            }
            if !names.is_empty() {
                out.push(b',');
            }
            put(out, &name);
            out.push(b':');
            put_logprob(out, logprob);
            names.push(name);
        }
        out.push(b'}');
    }

    /// One list of objects.
    fn chat_logprobs(&self, out: &mut Vec<u8>, tokens: &[LoggedToken]) {
        out.extend_from_slice(b"{\"content\":[");
        separated(out, tokens, |out, token| {
            out.push(b'{');
            self.chat_token(out, token.event.token, token.event.logprob);
            out.extend_from_slice(b",\"top_logprobs\":[");
            separated(out, &token.event.top, |out, (id, logprob)| {
                out.push(b'{');
                self.chat_token(out, *id, *logprob);
                out.push(b'}');
            });
            out.extend_from_slice(b"]}");
        });
        out.extend_from_slice(b"]}");
    }

    fn chat_token(&self, out: &mut Vec<u8>, id: u32, logprob: f32) {
        out.extend_from_slice(b"\"token\":");
        put(out, &self.token_name(id));
        out.extend_from_slice(b",\"logprob\":");
        put_logprob(out, logprob);
        out.extend_from_slice(b",\"bytes\":");
        match &self.text {
            Some(text) => put(out, &text.token_bytes(id)),
            None => out.extend_from_slice(b"null"),
        }
    }

    /// A token's text; one that is only part of a character by its bytes; without a
    /// tokenizer by its id.
    fn token_name(&self, id: u32) -> String {
        let Some(text) = &self.text else {
            return format!("token_id:{id}");
        };
        match String::from_utf8(text.token_bytes(id)) {
            Ok(name) => name,
            Err(error) => {
                let mut name = "bytes:".to_owned();
                for byte in error.as_bytes() {
                    name += &format!("\\x{byte:02x}");
                }
                name
            }
        }
    }
}

#[derive(Clone, Copy)]
enum ChoiceForm {
    Whole,
    Role,
    Text,
    Finish,
}

/// The best tokens, then the chosen one unless it is among them.
fn with_chosen(event: &TokenEvent) -> impl Iterator<Item = (u32, f32)> + '_ {
    let chosen_is_among = event.top.iter().any(|(id, _)| *id == event.token);
    event
        .top
        .iter()
        .copied()
        .chain((!chosen_is_among).then_some((event.token, event.logprob)))
}

fn separated<T>(out: &mut Vec<u8>, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    for (place, item) in items.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        write(out, item);
    }
}

fn put_usage(out: &mut Vec<u8>, usage: Usage) {
    out.extend_from_slice(
        format!(
            "{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{}}}}}",
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            usage.cached_tokens
        )
        .as_bytes(),
    );
}

/// `finish_reason`.
pub fn finish_label(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
