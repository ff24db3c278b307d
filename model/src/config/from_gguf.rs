//! The configuration from the metadata of a GGUF.

use super::{Architecture, ConfigError, ModelConfig};
use crate::gguf::{Gguf, KeyError};
use crate::weights::{LayerTensor, Naming, TensorId};

/// Reads the configuration of the model in a GGUF and checks it.
///
/// # Errors
/// [`ConfigError`] naming the key.
pub fn from_gguf(gguf: &Gguf<'_>) -> Result<ModelConfig, ConfigError> {
    let architecture = match gguf.text("general.architecture")? {
        Some("llama") => Architecture::Llama,
        Some("qwen2") => Architecture::Qwen2,
        Some(other) => {
            let supported = "\"llama\" and \"qwen2\"";
            return Err(unsupported(
                "general.architecture",
                format!("{other:?}"),
                supported,
            ));
        }
        None => return Err(missing("general.architecture".into())),
    };
    let keys = Keys { gguf, architecture };
    keys.refuse_what_is_not_computed()?;
    let has = |id| gguf.tensor(&Naming::Gguf.name(id)).is_some();
    let hidden = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let found = heads.to_string();
            let wanted = format!("a divisor of the {hidden} of embedding_length");
            return Err(ConfigError::Range {
                key: keys.name("attention.head_count"),
                found,
                wanted,
            });
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        keys.must_equal(key, head_dim)?;
    }
    let vocab = embedding_rows(gguf)?;
    keys.must_equal("vocab_size", vocab)?;
    let config = ModelConfig {
        architecture,
        layers: keys.size("block_count")?,
        hidden,
        heads,
        kv_heads: keys
            .optional_size("attention.head_count_kv")?
            .unwrap_or(heads),
        head_dim,
        ffn: keys.size("feed_forward_length")?,
        vocab,
        context: keys.size("context_length")?,
        rope_theta: gguf
            .float(&keys.name("rope.freq_base"))?
            .unwrap_or(10_000.0),
        rms_norm_eps: keys.norm_epsilon()?,
        tied_head: !has(TensorId::Head),
        qkv_bias: architecture == Architecture::Qwen2
            || has(TensorId::Layer(0, LayerTensor::QueryBias)),
        bos: token_id(gguf, "tokenizer.ggml.bos_token_id")?,
        eos: end_tokens(gguf)?,
    };
    config.check()?;
    Ok(config)
}

impl From<KeyError> for ConfigError {
    fn from(error: KeyError) -> Self {
        match error.found {
            None => ConfigError::Missing { key: error.key },
            Some(found) => ConfigError::Type {
                key: error.key,
                wanted: error.wanted,
                found,
            },
        }
    }
}

fn missing(key: String) -> ConfigError {
    ConfigError::Missing { key }
}

fn unsupported(key: &str, found: String, supported: &'static str) -> ConfigError {
    ConfigError::Unsupported {
        key: key.to_owned(),
        found,
        supported,
    }
}

/// Keys below the architecture's prefix.
struct Keys<'a, 'b> {
    gguf: &'a Gguf<'b>,
    architecture: Architecture,
}

impl Keys<'_, '_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let found = self.gguf.unsigned(&self.name(key))?;
        Ok(found.map(|size| usize::try_from(size).unwrap_or(usize::MAX)))
    }

    fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?
            .ok_or_else(|| missing(self.name(key)))
    }

    fn must_equal(&self, key: &str, wanted: usize) -> Result<(), ConfigError> {
        match self.optional_size(key)? {
            Some(found) if found != wanted => Err(ConfigError::Range {
                key: self.name(key),
                found: found.to_string(),
                wanted: wanted.to_string(),
            }),
            _ => Ok(()),
        }
    }

    fn norm_epsilon(&self) -> Result<f32, ConfigError> {
        let key = self.name("attention.layer_norm_rms_epsilon");
        let found = self.gguf.float(&key)?.ok_or(ConfigError::Missing { key })?;
        Ok(found as f32)
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ConfigError> {
        if let Some(count) = self
            .optional_size("expert_count")?
            .filter(|count| *count > 0)
        {
            let key = self.name("expert_count");
            return Err(unsupported(&key, count.to_string(), "dense models"));
        }
        let key = self.name("rope.scaling.type");
        if let Some(found) = self.gguf.text(&key)?.filter(|found| *found != "none") {
            return Err(unsupported(
                &key,
                format!("{found:?}"),
                "unscaled rotary positions",
            ));
        }
        for key in ["rope.scaling.factor", "rope.scale_linear"] {
            let key = self.name(key);
            if let Some(found) = self.gguf.float(&key)?.filter(|factor| *factor != 1.0) {
                return Err(unsupported(
                    &key,
                    found.to_string(),
                    "unscaled rotary positions",
                ));
            }
        }
        let window = self.optional_size("attention.sliding_window")?;
        if let Some(found) = window.filter(|window| *window > 0) {
            let key = self.name("attention.sliding_window");
            return Err(unsupported(
                &key,
                found.to_string(),
                "attention over the whole context",
            ));
        }
        Ok(())
    }
}

fn embedding_rows(gguf: &Gguf<'_>) -> Result<usize, ConfigError> {
    let name = Naming::Gguf.name(TensorId::Embedding);
    match gguf.tensor(&name).map(|tensor| tensor.shape.as_slice()) {
        Some([rows, _]) => Ok(*rows),
        Some(shape) => Err(ConfigError::Range {
            key: name,
            found: format!("of shape {shape:?}"),
            wanted: "a matrix [vocabulary, hidden]".into(),
        }),
        None => Err(missing(name)),
    }
}

fn token_id(gguf: &Gguf<'_>, key: &str) -> Result<Option<u32>, ConfigError> {
    let Some(found) = gguf.unsigned(key)? else {
        return Ok(None);
    };
    match u32::try_from(found) {
        // Writers put all ones where a model has no such token.
        Ok(u32::MAX) => Ok(None),
        Ok(id) => Ok(Some(id)),
        Err(_) => Err(ConfigError::Range {
            key: key.to_owned(),
            found: found.to_string(),
            wanted: "a token id".into(),
        }),
    }
}

/// Tokens that end an answer: end of text, of a turn, of a message.
fn end_tokens(gguf: &Gguf<'_>) -> Result<Vec<u32>, ConfigError> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some(id) = token_id(gguf, &format!("tokenizer.ggml.{key}"))?
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    Ok(ids)
}
