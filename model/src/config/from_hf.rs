//! The configuration from a Hugging Face `config.json`.

use super::hf_values::{object, short, token_ids};
use super::{Architecture, ConfigError, ModelConfig};
use serde_json::{Map, Value};

/// Reads the configuration from the bytes of a `config.json` and checks it. Both forms of rotary
/// settings are read (`rope_theta` and `rope_scaling`, or `rope_parameters`).
///
/// # Errors
/// [`ConfigError`] naming the key.
pub fn from_hf(bytes: &[u8]) -> Result<ModelConfig, ConfigError> {
    let fields = object(bytes)?;
    let keys = Keys { fields: &fields };
    let architecture = keys.architecture()?;
    keys.refuse_what_is_not_computed(architecture)?;
    let hidden = keys.size("hidden_size")?;
    let heads = keys.size("num_attention_heads")?;
    let head_dim = match keys.optional_size("head_dim")? {
        Some(length) => length,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(ConfigError::Range {
                key: "num_attention_heads".into(),
                found: heads.to_string(),
                wanted: format!("a divisor of hidden_size {hidden}"),
            });
        }
    };
    let config = ModelConfig {
        architecture,
        layers: keys.size("num_hidden_layers")?,
        hidden,
        heads,
        kv_heads: keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        ffn: keys.size("intermediate_size")?,
        vocab: keys.size("vocab_size")?,
        context: keys.size("max_position_embeddings")?,
        rope_theta: keys.rope_theta()?,
        rms_norm_eps: keys.optional_number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        tied_head: keys.optional_bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: architecture == Architecture::Qwen2,
        bos: token_ids(&fields, "bos_token_id")?.first().copied(),
        eos: token_ids(&fields, "eos_token_id")?,
    };
    config.check()?;
    Ok(config)
}

struct Keys<'a> {
    fields: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// A key that is there and not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &'static str,
        take: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match take(value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(ConfigError::Type {
                key: key.to_owned(),
                wanted,
                found: short(value),
            }),
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "an integer of at least 0", |value| {
            value.as_u64().and_then(|size| usize::try_from(size).ok())
        })
    }

    fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?
            .ok_or_else(|| ConfigError::Missing {
                key: key.to_owned(),
            })
    }

    fn optional_number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn optional_bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn optional_text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a text", Value::as_str)
    }

    fn architecture(&self) -> Result<Architecture, ConfigError> {
        let named = self.typed("architectures", "a list of one name", |value| {
            value
                .as_array()
                .and_then(|list| list.first())
                .and_then(Value::as_str)
        })?;
        let supported = "LlamaForCausalLM and Qwen2ForCausalLM";
        match (named, self.optional_text("model_type")?) {
            (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Ok(Architecture::Llama),
            (Some("Qwen2ForCausalLM"), _) | (None, Some("qwen2")) => Ok(Architecture::Qwen2),
            (Some(found), _) => Err(unsupported("architectures", found, supported)),
            (None, Some(found)) => Err(unsupported("model_type", found, supported)),
            (None, None) => Err(ConfigError::Missing {
                key: "architectures".into(),
            }),
        }
    }

    fn rope_theta(&self) -> Result<f64, ConfigError> {
        if let Some(theta) = self.optional_number("rope_theta")? {
            return Ok(theta);
        }
        let nested = self
            .get("rope_parameters")
            .and_then(|fields| fields.get("rope_theta"));
        Ok(nested.and_then(Value::as_f64).unwrap_or(10_000.0))
    }

    fn refuse_what_is_not_computed(&self, architecture: Architecture) -> Result<(), ConfigError> {
        if let Some(found) = self
            .optional_text("hidden_act")?
            .filter(|found| *found != "silu")
        {
            return Err(unsupported("hidden_act", found, "silu"));
        }
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(fields) = self.get(key) else {
                continue;
            };
            let kind = fields.get("rope_type").or_else(|| fields.get("type"));
            let plain = kind.is_none() || kind.and_then(Value::as_str) == Some("default");
            if !plain || (kind.is_none() && fields.get("factor").is_some()) {
                let found = kind.map_or_else(|| short(fields), short);
                return Err(unsupported(key, &found, "unscaled rotary positions"));
            }
        }
        let factor = self.optional_number("partial_rotary_factor")?;
        if let Some(found) = factor.filter(|factor| *factor != 1.0) {
            return Err(unsupported(
                "partial_rotary_factor",
                &found.to_string(),
                "1",
            ));
        }
        if self.optional_bool("use_sliding_window")? == Some(true) {
            let supported = "attention over the whole context";
            return Err(unsupported("use_sliding_window", "true", supported));
        }
        // In Llama this also gives the output projection a bias.
        let biases = match architecture {
            Architecture::Llama => &["attention_bias", "mlp_bias"][..],
            Architecture::Qwen2 => &["mlp_bias"][..],
        };
        for key in biases {
            if self.optional_bool(key)? == Some(true) {
                return Err(unsupported(key, "true", "layers without it"));
            }
        }
        if let Some(found) = self.get("quantization_config") {
            let supported = "float32, float16 and bfloat16 folders";
            return Err(unsupported("quantization_config", &short(found), supported));
        }
        Ok(())
    }
}

fn unsupported(key: &str, found: &str, supported: &'static str) -> ConfigError {
    ConfigError::Unsupported {
        key: key.to_owned(),
        found: found.to_owned(),
        supported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn small() -> Value {
        json!({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 352,
            "vocab_size": 512, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "bos_token_id": 0,
            "eos_token_id": [2, 3]})
    }

    fn with(key: &str, value: Value) -> Result<ModelConfig, ConfigError> {
        let mut config = small();
        config[key] = value;
        from_hf(config.to_string().as_bytes())
    }

    #[test]
    fn sizes_are_read() {
        let config = from_hf(small().to_string().as_bytes()).unwrap();
        assert_eq!(
            (config.head_dim, config.kv_heads, config.eos.as_slice()),
            (32, 2, &[2, 3][..])
        );
        assert!(config.qkv_bias && config.tied_head);
        assert_eq!(config.rope_theta, 1e6);
    }

    #[test]
    fn newer_folders_nest_the_rope_base() {
        let mut config = small();
        config["rope_theta"] = Value::Null;
        config["rope_parameters"] = json!({"rope_theta": 5000.0, "rope_type": "default"});
        assert_eq!(
            from_hf(config.to_string().as_bytes()).unwrap().rope_theta,
            5000.0
        );
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (key, value) in [
            ("architectures", json!(["MistralForCausalLM"])),
            ("hidden_act", json!("gelu")),
            (
                "rope_scaling",
                json!({"rope_type": "llama3", "factor": 8.0}),
            ),
            ("rope_scaling", json!({"factor": 8.0})),
            ("use_sliding_window", json!(true)),
            ("quantization_config", json!({"quant_method": "awq"})),
            ("num_attention_heads", json!(3)),
            ("num_attention_heads", json!(0)),
            ("num_key_value_heads", json!(3)),
            ("vocab_size", json!(-1)),
            ("vocab_size", json!(1u64 << 40)),
            ("eos_token_id", json!(512)),
            ("eos_token_id", json!("end")),
            ("rope_theta", json!(0.0)),
            ("hidden_size", Value::Null),
        ] {
            let error = with(key, value.clone()).expect_err(&format!("{key} = {value}"));
            let text = error.to_string();
            let other = text.contains("heads") || text.contains("vocab");
            assert!(text.contains(key) || other, "{key}: {text}");
        }
        assert!(matches!(from_hf(b"[1"), Err(ConfigError::Json { .. })));
    }
}
