//! Everything from one `.gguf` file.

use super::{Model, fingerprint, name_of};
use crate::chat_template::ChatTemplate;
use crate::config::{self, Architecture};
use crate::error::{LoadError, LoadProblem};
use crate::generation_config::GenerationDefaults;
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;
use crate::weights::{MappedFile, Naming, RopeLayout, Weights};
use std::path::Path;

/// Special tokens that chat templates know by name.
const SPECIAL_TOKENS: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];

pub(super) fn load(path: &Path) -> Result<Model, LoadError> {
    load_parts(path).map_err(|problem| LoadError::new(path, problem))
}

fn load_parts(path: &Path) -> Result<Model, LoadProblem> {
    let file = MappedFile::open(path)?;
    let gguf = Gguf::parse(file.bytes())?;
    let config = config::from_gguf(&gguf)?;
    let tokenizer = Tokenizer::from_gguf(&gguf, config.vocab)?;
    let chat_template = chat_template(&gguf)?;
    let stored = gguf.stored_tensors(0);
    let rope = match config.architecture {
        Architecture::Llama => RopeLayout::Interleaved,
        Architecture::Qwen2 => RopeLayout::Halves,
    };
    let weights = Weights::assemble(vec![file], stored, Naming::Gguf, &config)?;
    let generation = GenerationDefaults {
        eos: config.eos.clone(),
        ..Default::default()
    };
    Ok(Model {
        fingerprint: fingerprint::of(&config, rope, &weights),
        name: name_of(path),
        tokenizer: Some(tokenizer),
        config,
        weights,
        rope,
        chat_template,
        generation,
    })
}

fn chat_template(gguf: &Gguf<'_>) -> Result<Option<ChatTemplate>, LoadProblem> {
    let key_error = |error| LoadProblem::Gguf(crate::gguf::GgufError::Key(error));
    let Some(source) = gguf.text("tokenizer.chat_template").map_err(key_error)? else {
        return Ok(None);
    };
    let tool_source = gguf
        .text("tokenizer.chat_template.tool_use")
        .map_err(key_error)?;
    let mut special_tokens = Vec::new();
    for (name, key) in SPECIAL_TOKENS {
        if let Some(id) = gguf.unsigned(key).map_err(key_error)?
            && let Some(token) = token_text(gguf, id)
        {
            special_tokens.push((name.to_owned(), token.to_owned()));
        }
    }
    Ok(Some(ChatTemplate::new(
        source,
        tool_source,
        special_tokens,
    )?))
}

fn token_text<'a>(gguf: &Gguf<'a>, id: u64) -> Option<&'a str> {
    let tokens = gguf.array("tokenizer.ggml.tokens").ok().flatten()?;
    tokens.texts()?.nth(usize::try_from(id).ok()?)
}
