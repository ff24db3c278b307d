//! What a model is made of: sizes, constants and the ids that end a text.
//!
//! Two files can say it: the metadata of a GGUF ([`from_gguf`]) and a `config.json`
//! ([`from_hf`]). Both readers refuse what the engine does not compute (rope scaling, sliding
//! windows, other activations): a model that would answer wrongly must not start.

mod from_gguf;
mod from_hf;
pub(crate) mod hf_values;

pub use from_gguf::from_gguf;
pub use from_hf::from_hf;

use std::fmt;

/// Families of models that the engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama and what is built like it (SmolLM2).
    Llama,
    /// Qwen2 and Qwen2.5: as Llama, with biases on query, key and value.
    Qwen2,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
        })
    }
}

/// Sizes and constants of a model. Checked by [`ModelConfig::check`] at load: every size is at
/// least 1 and within the bounds below, and the heads divide as they must.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its family.
    pub architecture: Architecture,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Rows of the embedding: token ids are below it.
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f32,
    /// The output head is the embedding.
    pub tied_head: bool,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// Token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
}

/// More layers than any model that fits a host: the largest published dense models have 126.
pub const LAYERS_MAX: usize = 512;
/// Widest hidden or feed-forward row: 2^20 elements (the widest published is 53,248).
pub const WIDTH_MAX: usize = 1 << 20;
/// Largest vocabulary: 2^22 tokens (the largest published is 262,144).
pub const VOCAB_MAX: usize = 1 << 22;
/// Longest context: 2^24 tokens; a position must stay exact in an f32 (24 bits of mantissa).
pub const CONTEXT_MAX: usize = 1 << 24;
/// Most ids that may end an answer: Llama 3 has 3.
pub const EOS_MAX: usize = 64;

/// Why a configuration cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigError {
    /// The key is not there.
    Missing {
        /// Its name.
        key: String,
    },
    /// The key has another type than it should have.
    Type {
        /// Its name.
        key: String,
        /// What it must be.
        wanted: &'static str,
        /// What it is.
        found: String,
    },
    /// The number is outside what a model can have.
    Range {
        /// Its name.
        key: String,
        /// What it is.
        found: String,
        /// What it must be.
        wanted: String,
    },
    /// Something of the model that the engine does not compute.
    Unsupported {
        /// The key that says so.
        key: String,
        /// Its value.
        found: String,
        /// What the engine computes.
        supported: &'static str,
    },
    /// It is not JSON, or not an object.
    Json {
        /// What the parser says, with line and column.
        problem: String,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Missing { key } => write!(f, "key \"{key}\" is missing"),
            ConfigError::Type { key, wanted, found } => {
                write!(f, "key \"{key}\" must be {wanted}, it is {found}")
            }
            ConfigError::Range { key, found, wanted } => {
                write!(f, "key \"{key}\" is {found}, it must be {wanted}")
            }
            ConfigError::Unsupported {
                key,
                found,
                supported,
            } => {
                write!(
                    f,
                    "key \"{key}\" is {found}, which this engine does not compute (it computes {supported})"
                )
            }
            ConfigError::Json { problem } => write!(f, "not a JSON object: {problem}"),
        }
    }
}

impl std::error::Error for ConfigError {}

impl ModelConfig {
    /// Checks all sizes against each other and against the bounds of this module.
    ///
    /// # Errors
    /// [`ConfigError::Range`] naming the first field that is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        let within = |key: &str, found: usize, max: usize| {
            if found == 0 || found > max {
                return Err(range(key, found, format!("1 to {max}")));
            }
            Ok(())
        };
        within("layers", self.layers, LAYERS_MAX)?;
        within("hidden", self.hidden, WIDTH_MAX)?;
        within("ffn", self.ffn, WIDTH_MAX)?;
        within("heads", self.heads, WIDTH_MAX)?;
        within("kv_heads", self.kv_heads, self.heads)?;
        within("head_dim", self.head_dim, WIDTH_MAX)?;
        within("vocab", self.vocab, VOCAB_MAX)?;
        within("context", self.context, CONTEXT_MAX)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let wanted = format!("a divisor of the {} query heads", self.heads);
            return Err(range("kv_heads", self.kv_heads, wanted));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(range(
                "head_dim",
                self.head_dim,
                "even, for rotary pairs".into(),
            ));
        }
        within(
            "heads * head_dim",
            self.heads.saturating_mul(self.head_dim),
            WIDTH_MAX,
        )?;
        if !(self.rope_theta.is_finite() && self.rope_theta >= 1.0) {
            return Err(range(
                "rope_theta",
                self.rope_theta,
                "a number of at least 1".into(),
            ));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0 && self.rms_norm_eps < 1.0) {
            return Err(range(
                "rms_norm_eps",
                self.rms_norm_eps,
                "from 0 to below 1".into(),
            ));
        }
        if self.eos.len() > EOS_MAX {
            return Err(range(
                "eos_token_id",
                self.eos.len(),
                format!("at most {EOS_MAX} ids"),
            ));
        }
        let ids = self.eos.iter().map(|id| ("eos_token_id", *id));
        for (key, id) in ids.chain(self.bos.map(|id| ("bos_token_id", id))) {
            if id as usize >= self.vocab {
                return Err(range(
                    key,
                    id,
                    format!("below the vocabulary of {}", self.vocab),
                ));
            }
        }
        Ok(())
    }
}

fn range(key: &str, found: impl fmt::Display, wanted: String) -> ConfigError {
    ConfigError::Range {
        key: key.to_owned(),
        found: found.to_string(),
        wanted,
    }
}
