//! What a request gets when it does not say: `generation_config.json`.
//!
//! Without that file, and for a GGUF, the OpenAI defaults hold: temperature 1, top-p 1, all
//! tokens. A file that says `do_sample: false` asks for greedy decoding: temperature 0. A file
//! without `do_sample` keeps its own temperature (or 1); Hugging Face would decode greedily
//! there, but people who set a temperature in that file mean it.

use crate::config::ConfigError;
use crate::config::hf_values::{object, short, token_ids};
use serde_json::{Map, Value};
use std::fmt;

/// Defaults of sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Tokens that end an answer, as this file lists them; [`crate::ModelConfig::eos`] has them
    /// and those of the other files.
    pub eos: Vec<u32>,
    /// Settings of the file that this engine does not apply, `key = value`, for the start-up
    /// summary.
    pub not_applied: Vec<String>,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            eos: Vec::new(),
            not_applied: Vec::new(),
        }
    }
}

impl fmt::Display for GenerationDefaults {
    /// For the start-up summary: `temperature 0.7, top-p 0.8, top-k 20`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.temperature == 0.0 {
            write!(f, "greedy")?;
        } else {
            write!(f, "temperature {}, top-p {}", self.temperature, self.top_p)?;
            match self.top_k {
                0 => write!(f, ", all tokens")?,
                top_k => write!(f, ", top-k {top_k}")?,
            }
        }
        if !self.not_applied.is_empty() {
            write!(f, "; not applied: {}", self.not_applied.join(", "))?;
        }
        Ok(())
    }
}

/// Settings that change the text if they are not at their neutral value.
const NEUTRAL: [(&str, f64); 5] = [
    ("repetition_penalty", 1.0),
    ("typical_p", 1.0),
    ("min_p", 0.0),
    ("num_beams", 1.0),
    ("no_repeat_ngram_size", 0.0),
];

impl GenerationDefaults {
    /// Reads the bytes of a `generation_config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] naming the key.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let fields = object(bytes)?;
        let temperature = match fields.get("do_sample") {
            Some(Value::Bool(false)) => 0.0,
            _ => within(&fields, "temperature", 0.0, 100.0)?.unwrap_or(1.0),
        };
        let top_k = within(&fields, "top_k", 0.0, f64::from(u32::MAX))?.unwrap_or(0.0);
        let not_applied = NEUTRAL.iter().filter_map(|(key, neutral)| {
            let value = fields.get(*key)?.as_f64()?;
            (value != *neutral).then(|| format!("{key} = {value}"))
        });
        Ok(Self {
            temperature: temperature as f32,
            top_p: within(&fields, "top_p", f64::MIN_POSITIVE, 1.0)?.unwrap_or(1.0) as f32,
            top_k: top_k as u32,
            eos: token_ids(&fields, "eos_token_id")?,
            not_applied: not_applied.collect(),
        })
    }
}

fn within(
    fields: &Map<String, Value>,
    key: &str,
    least: f64,
    most: f64,
) -> Result<Option<f64>, ConfigError> {
    let value = match fields.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    match value.as_f64() {
        Some(number) if number >= least && number <= most => Ok(Some(number)),
        Some(number) => Err(ConfigError::Range {
            key: key.to_owned(),
            found: number.to_string(),
            wanted: format!("from {least} to {most}"),
        }),
        None => {
            let found = short(value);
            Err(ConfigError::Type {
                key: key.to_owned(),
                wanted: "a number",
                found,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sampling_is_greedy() {
        let defaults =
            GenerationDefaults::parse(br#"{"do_sample":false,"temperature":0.7}"#).unwrap();
        assert_eq!(defaults.temperature, 0.0);
    }

    #[test]
    fn settings_are_read_and_others_reported() {
        let json = br#"{"do_sample":true,"temperature":0.7,"top_p":0.8,"top_k":20,
            "repetition_penalty":1.1,"num_beams":1,"eos_token_id":[151645,151643]}"#;
        let defaults = GenerationDefaults::parse(json).unwrap();
        assert_eq!(
            (defaults.temperature, defaults.top_p, defaults.top_k),
            (0.7, 0.8, 20)
        );
        assert_eq!(defaults.eos, [151645, 151643]);
        assert_eq!(defaults.not_applied, ["repetition_penalty = 1.1"]);
        assert_eq!(
            defaults.to_string(),
            "temperature 0.7, top-p 0.8, top-k 20; not applied: repetition_penalty = 1.1"
        );
    }

    #[test]
    fn nonsense_is_refused_by_key() {
        for json in [r#"{"top_p":2}"#, r#"{"top_p":0}"#, r#"{"top_p":"high"}"#] {
            let error = GenerationDefaults::parse(json.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("top_p"), "{error}");
        }
    }
}
