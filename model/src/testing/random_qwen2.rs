//! A Qwen2 checkpoint of random weights (QKV bias, tied embeddings): the same bytes on every
//! machine, for tests of shape, speed and correctness where the real model cannot be had.
//!
//! The numbers come from Philox keyed by (seed, number of the tensor). Each is
//! the sum of four uniform 16-bit numbers, shifted and scaled: bell-shaped, and exact anywhere,
//! since only integers and one multiplication and addition in f64 are involved. The bytes are
//! those of `make_random_qwen2.py` (numpy), which made the fixtures; the tests compare hashes.

use super::philox::Philox;
use crate::weights::f32_to_bf16;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Sizes of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Rows of the embedding.
    pub vocab: usize,
}

impl Sizes {
    /// 1.7 MB in f32: 2 layers, 128 hidden, 4 heads of 32, vocabulary of 512.
    pub const TINY: Sizes = Sizes {
        layers: 2,
        hidden: 128,
        heads: 4,
        kv_heads: 2,
        ffn: 352,
        vocab: 512,
    };
    /// The published shape of Qwen2.5-0.5B: 1 GB in bf16.
    pub const FULL: Sizes = Sizes {
        layers: 24,
        hidden: 896,
        heads: 14,
        kv_heads: 2,
        ffn: 4864,
        vocab: 151_936,
    };
}

/// Element type of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// 2 bytes, rounded to nearest, ties to even.
    Bf16,
}

/// What to write.
#[derive(Clone, Debug)]
pub struct RandomQwen2 {
    /// Its sizes.
    pub sizes: Sizes,
    /// Its element type.
    pub dtype: Dtype,
    /// Chooses the numbers.
    pub seed: u64,
}

/// Numbers drawn at once: what the Python program draws, since the four uniforms of an element
/// come from four rows of such a draw.
const DRAW_MAX: usize = 1 << 22;

struct Tensor {
    name: String,
    shape: Vec<usize>,
    deviation: f64,
    mean: f64,
}

impl RandomQwen2 {
    /// The tiny checkpoint in f32 with seed 1, which the fixtures are for.
    pub const TINY: RandomQwen2 = RandomQwen2 {
        sizes: Sizes::TINY,
        dtype: Dtype::F32,
        seed: 1,
    };

    /// Writes `config.json`, `generation_config.json` and `model.safetensors` into a folder,
    /// making it if needed. Gives the SHA-256 of `model.safetensors` in hex.
    ///
    /// # Errors
    /// Those of writing.
    pub fn write(&self, folder: &Path) -> io::Result<String> {
        fs::create_dir_all(folder)?;
        let path = folder.join("model.safetensors");
        let mut out = Hashed {
            out: BufWriter::new(File::create(path)?),
            hash: Sha256::new(),
        };
        let tensors = self.tensors();
        let header = self.header(&tensors);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for (number, tensor) in tensors.iter().enumerate() {
            self.write_tensor(number as u64, tensor, &mut out)?;
        }
        out.flush()?;
        fs::write(folder.join("config.json"), self.config_json())?;
        fs::write(
            folder.join("generation_config.json"),
            self.generation_json(),
        )?;
        Ok(out
            .hash
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }

    fn eos(&self) -> u32 {
        if self.sizes.vocab < 151_643 {
            2
        } else {
            151_645
        }
    }

    fn config_json(&self) -> String {
        let Sizes {
            layers,
            hidden,
            heads,
            kv_heads,
            ffn,
            vocab,
        } = self.sizes;
        let config = json!({
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": 32768,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true,
            "use_sliding_window": false,
            "torch_dtype": match self.dtype { Dtype::F32 => "float32", Dtype::Bf16 => "bfloat16" },
            "bos_token_id": 0,
            "eos_token_id": self.eos(),
            "pad_token_id": 0,
        });
        format!("{config:#}")
    }

    fn generation_json(&self) -> String {
        json!({"bos_token_id": 0, "eos_token_id": self.eos(), "pad_token_id": 0, "do_sample": false})
            .to_string()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let Sizes {
            layers,
            hidden,
            heads,
            kv_heads,
            ffn,
            vocab,
        } = self.sizes;
        let (query, key) = (hidden, kv_heads * (hidden / heads));
        let scale = 1.0 / (hidden as f64).sqrt();
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize], deviation: f64, mean: f64| {
            tensors.push(Tensor {
                name,
                shape: shape.to_vec(),
                deviation,
                mean,
            });
        };
        add(
            "model.embed_tokens.weight".into(),
            &[vocab, hidden],
            0.05,
            0.0,
        );
        for layer in 0..layers {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}");
            add(name("input_layernorm.weight"), &[hidden], 0.1, 1.0);
            for (letter, rows) in [("q", query), ("k", key), ("v", key)] {
                let part = |rest: &str| name(&format!("self_attn.{letter}_proj.{rest}"));
                add(
                    part("weight"),
                    &[rows, hidden],
                    1.2 / (hidden as f64).sqrt(),
                    0.0,
                );
                add(part("bias"), &[rows], 0.3, 0.0);
            }
            add(
                name("self_attn.o_proj.weight"),
                &[hidden, query],
                scale,
                0.0,
            );
            add(name("post_attention_layernorm.weight"), &[hidden], 0.1, 1.0);
            add(name("mlp.gate_proj.weight"), &[ffn, hidden], scale, 0.0);
            add(name("mlp.up_proj.weight"), &[ffn, hidden], scale, 0.0);
            add(
                name("mlp.down_proj.weight"),
                &[hidden, ffn],
                1.0 / (ffn as f64).sqrt(),
                0.0,
            );
        }
        add("model.norm.weight".into(), &[hidden], 0.1, 1.0);
        tensors
    }

    /// The safetensors header, padded with spaces to a multiple of 8.
    fn header(&self, tensors: &[Tensor]) -> String {
        let (dtype, element) = match self.dtype {
            Dtype::F32 => ("F32", 4),
            Dtype::Bf16 => ("BF16", 2),
        };
        let mut entries = serde_json::Map::new();
        entries.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut offset = 0;
        for tensor in tensors {
            let end = offset + tensor.shape.iter().product::<usize>() * element;
            let entry =
                json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]});
            entries.insert(tensor.name.clone(), entry);
            offset = end;
        }
        let mut header = serde_json::Value::Object(entries).to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        header
    }

    fn write_tensor(&self, number: u64, tensor: &Tensor, out: &mut impl Write) -> io::Result<()> {
        let mut stream = Philox::new([self.seed, number]);
        // The deviation of one uniform from [0, 2^16) is 2^16 / sqrt(12), of four 2^16 / sqrt(3).
        let scale = tensor.deviation / (65536.0 * (1.0f64 / 3.0).sqrt());
        let total: usize = tensor.shape.iter().product();
        let mut sums = Vec::new();
        let mut bytes = Vec::new();
        for start in (0..total).step_by(DRAW_MAX) {
            let count = DRAW_MAX.min(total - start);
            draw_sums(&mut stream, count, &mut sums);
            bytes.clear();
            for sum in &sums {
                let value = (f64::from(*sum as i32 - 131_070) * scale + tensor.mean) as f32;
                match self.dtype {
                    Dtype::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
                    Dtype::Bf16 => bytes.extend_from_slice(&f32_to_bf16(value).to_le_bytes()),
                }
            }
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Sums of four rows of `count` uniform 16-bit numbers, as numpy draws an array `[4][count]`: four
/// numbers from each 64-bit word, lowest first.
fn draw_sums(stream: &mut Philox, count: usize, sums: &mut Vec<u32>) {
    sums.clear();
    sums.resize(count, 0);
    let mut column = 0;
    for _ in 0..count {
        let mut word = stream.next();
        for _ in 0..4 {
            sums[column] += (word & 0xffff) as u32;
            word >>= 16;
            column += 1;
            if column == count {
                column = 0;
            }
        }
    }
}

struct Hashed<W> {
    out: W,
    hash: Sha256,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
