//! What the API needs of a model's text side: tokenizer, chat template, detokeniser.
//!
//! The API never computes any of it on a shard: encoding and templates run inside an
//! [`Offload`](super::Offload) job, only the detokeniser's bounded work per token does not.

use std::sync::Arc;

/// One message of a chat, text only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// Why text could not be made into ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// The tokenizer refused the text.
    Tokenizer(String),
    /// The chat template refused the messages, or spent its fuel.
    Template(String),
    /// The model has no chat template.
    NoTemplate,
}

/// Tokenizer, template and detokeniser of one model; shared by all shards.
pub trait TextModel: Send + Sync {
    /// Ids of `text`; with `add_special` those that the tokenizer adds by itself (BOS).
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError>;

    /// The prompt text of a chat, with the opening of the assistant's turn.
    ///
    /// # Errors
    /// [`TextError::Template`], [`TextError::NoTemplate`].
    fn render_chat(&self, messages: &[ChatMessage]) -> Result<String, TextError>;

    /// The bytes that one id stands for on its own, special tokens with their name. May be
    /// part of a character.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// A detokeniser for one new text.
    fn detokenizer(self: Arc<Self>, skip_special: bool) -> Box<dyn Detokenizer>;
}

/// Makes text out of ids, one at a time, never half a character.
pub trait Detokenizer {
    /// Takes an id; appends the text that is complete now (often none).
    fn push(&mut self, id: u32, out: &mut String);
    /// The end: appends what was held back for a character that never completed.
    fn finish(&mut self, out: &mut String);
}

/// The model behind an API, shared by all shards.
pub struct ServedModel {
    /// Names that requests may use; the first is told in answers.
    pub names: Vec<String>,
    /// Unix seconds for `/v1/models`.
    pub created: u64,
    /// Longest prompt plus answer, in tokens.
    pub context_tokens: u32,
    /// Ids are below this.
    pub vocabulary: u32,
    /// No token stands for more bytes of text than this: a text that is longer than the
    /// context even so needs no tokenising to be refused.
    pub token_bytes_max: usize,
    /// Ids that end a text unless `ignore_eos`.
    pub eos_ids: Vec<u32>,
    /// The id that an empty prompt becomes, where the model has one.
    pub bos_id: Option<u32>,
    /// Sampling when the request says nothing (`generation_config.json` over OpenAI's).
    pub defaults: SamplingDefaults,
    /// `None`: a model without a tokenizer, served by ids alone.
    pub text: Option<Arc<dyn TextModel>>,
}

impl ServedModel {
    /// The name told in answers.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Whether a request for `name` is for this model.
    pub fn is_named(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }
}

/// Sampling parameters of requests that give none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass; 1 keeps all.
    pub top_p: f32,
    /// Best ids kept; 0 keeps all.
    pub top_k: u32,
}

impl Default for SamplingDefaults {
    /// OpenAI's.
    fn default() -> Self {
        SamplingDefaults {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
        }
    }
}
