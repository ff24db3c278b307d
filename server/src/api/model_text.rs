//! The real model's text side behind [`TextModel`]: thin, the work is in `kvserve-model`.

use super::clock::unix_s;
use super::text::{ChatMessage, Detokenizer, SamplingDefaults, ServedModel, TextError, TextModel};
use kvserve_model::{ChatInput, ChatTemplate, Model, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;

/// Least value of [`ServedModel::token_bytes_max`].
const TOKEN_BYTES_MIN: usize = 256;
/// Unicode normalisation before the pipeline joins at most this many bytes to one.
const NORMALISED_BYTES: usize = 4;

/// Tokenizer and chat template of a loaded model.
pub struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// From a loaded model's parts.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        ModelText {
            tokenizer,
            template,
        }
    }
}

impl ServedModel {
    /// What an API needs of a loaded model; takes its chat template out of it. `names`: what
    /// requests may call it, the first is told in answers (none: the model's own name).
    /// `context_tokens`: the served context length, cut to the model's own.
    pub fn of(model: &mut Model, mut names: Vec<String>, context_tokens: u32) -> Self {
        if names.is_empty() {
            names.push(model.name.clone());
        }
        let template = model.chat_template.take();
        let text = model
            .tokenizer
            .clone()
            .map(|tokenizer| ModelText::new(tokenizer, template));
        let longest = text.as_ref().map_or(0, |text| {
            let ids = 0..text.tokenizer.id_bound() as u32;
            ids.map(|id| text.tokenizer.piece(id).len())
                .max()
                .unwrap_or(0)
        });
        let own_context = u32::try_from(model.config.context).unwrap_or(u32::MAX);
        ServedModel {
            names,
            created: unix_s(),
            context_tokens: context_tokens.min(own_context),
            vocabulary: u32::try_from(model.config.vocab).unwrap_or(u32::MAX),
            token_bytes_max: (longest * NORMALISED_BYTES).max(TOKEN_BYTES_MIN),
            eos_ids: model.config.eos.clone(),
            bos_id: model.config.bos,
            defaults: SamplingDefaults {
                temperature: model.generation.temperature,
                top_p: model.generation.top_p,
                top_k: model.generation.top_k,
            },
            text: text.map(|text| Arc::new(text) as Arc<dyn TextModel>),
        }
    }
}

impl TextModel for ModelText {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.tokenizer
            .encode(text, add_special)
            .map_err(|error| TextError::Tokenizer(error.to_string()))
    }

    fn render_chat(&self, messages: &[ChatMessage]) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let messages: Value = messages
            .iter()
            .map(|message| json!({"role": message.role, "content": message.content}))
            .collect();
        template
            .render(&ChatInput {
                messages: &messages,
                tools: None,
                add_generation_prompt: true,
                variables: None,
                now_unix_s: unix_s(),
            })
            .map_err(|error| TextError::Template(error.to_string()))
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.tokenizer.piece(id).to_vec()
    }

    fn detokenizer(self: Arc<Self>, skip_special: bool) -> Box<dyn Detokenizer> {
        Box::new(self.tokenizer.detokenizer(skip_special))
    }
}

impl Detokenizer for kvserve_model::Detokenizer {
    fn push(&mut self, id: u32, out: &mut String) {
        kvserve_model::Detokenizer::push(self, id, out);
    }

    fn finish(&mut self, out: &mut String) {
        kvserve_model::Detokenizer::finish(self, out);
    }
}
