//! A valid GGUF of a few kilobytes: one layer, every element type, byte-level tokenizer, template.
//!
//! Built piece by piece, so that tests can lie about one piece at a time.

use crate::config::Architecture;

/// The pieces of a GGUF. [`SmallGguf::bytes`] writes whatever they say, right or wrong.
#[derive(Clone, Debug)]
pub struct SmallGguf {
    /// Version of the format.
    pub version: u32,
    /// Keys with their values as in the file, type first.
    pub keys: Vec<(String, Vec<u8>)>,
    /// Names, sizes (fastest first), type numbers, and bytes of the tensors.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

const HIDDEN: u64 = 64;
const HEADS: u64 = 2;
const KV_HEADS: u64 = 1;
const FFN: u64 = 96;
const ALIGNMENT: usize = 32;

/// Tokens besides the 256 bytes: merged ones, one that no merge makes, then special ones.
const MERGES: [&str; 6] = ["h e", "l l", "he ll", "hell o", "1 2", "3 4"];
const WHOLE: &str = "zq";
const SPECIAL: [&str; 3] = ["<|begin|>", "<|end|>", "<tool>"];

/// Builds it. `pre` is the way of splitting text (`smollm`, `gpt-2`, `qwen2`, `llama-bpe`).
/// Element type of matrices by turns: F32, F16, BF16, Q8_0, Q4_1.
pub fn small_gguf(architecture: Architecture, pre: &str) -> SmallGguf {
    let (tokens, types) = vocabulary();
    let vocab = tokens.len() as u64;
    let merges: Vec<String> = MERGES.iter().map(|merge| (*merge).to_owned()).collect();
    let end = vocab as u32 - 2;
    let named = |key: &str| format!("{architecture}.{key}");
    let keys = vec![
        (
            "general.architecture".to_owned(),
            text(&architecture.to_string()),
        ),
        (named("block_count"), number(1)),
        (named("context_length"), number(128)),
        (named("embedding_length"), number(HIDDEN as u32)),
        (named("feed_forward_length"), number(FFN as u32)),
        (named("attention.head_count"), number(HEADS as u32)),
        (named("attention.head_count_kv"), number(KV_HEADS as u32)),
        (named("rope.freq_base"), float(10_000.0)),
        (named("attention.layer_norm_rms_epsilon"), float(1e-5)),
        ("tokenizer.ggml.model".to_owned(), text("gpt2")),
        ("tokenizer.ggml.pre".to_owned(), text(pre)),
        ("tokenizer.ggml.tokens".to_owned(), texts(&tokens)),
        ("tokenizer.ggml.token_type".to_owned(), numbers(&types)),
        ("tokenizer.ggml.merges".to_owned(), texts(&merges)),
        ("tokenizer.ggml.bos_token_id".to_owned(), number(end - 1)),
        ("tokenizer.ggml.eos_token_id".to_owned(), number(end)),
        (
            "tokenizer.ggml.add_bos_token".to_owned(),
            vec![7, 0, 0, 0, 1],
        ),
        (
            "tokenizer.chat_template".to_owned(),
            text(
                "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
            ),
        ),
    ];
    SmallGguf {
        version: 3,
        keys,
        tensors: tensors(architecture, vocab),
    }
}

impl SmallGguf {
    /// Replaces a key's value (type first), or adds it.
    pub fn set(&mut self, key: &str, value: Vec<u8>) {
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, _)| name != key);
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            file.extend(counted(key));
            file.extend(value);
        }
        let mut offset = 0u64;
        for (name, sizes, kind, bytes) in &self.tensors {
            file.extend(counted(name));
            file.extend((sizes.len() as u32).to_le_bytes());
            file.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend(offset.to_le_bytes());
            offset += bytes.len().next_multiple_of(ALIGNMENT) as u64;
        }
        for (_, _, _, bytes) in &self.tensors {
            file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
            file.extend(bytes);
        }
        file
    }
}

/// 256 bytes in their printable form, merged tokens, special tokens; and their types.
fn vocabulary() -> (Vec<String>, Vec<i32>) {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..256u32).filter(|byte| !printable(*byte)).count() as u32;
    let characters = (0..256u32)
        .filter(|byte| printable(*byte))
        .chain(0x100..0x100 + others);
    let mut tokens: Vec<String> = characters
        .filter_map(char::from_u32)
        .map(String::from)
        .collect();
    tokens.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    tokens.push(WHOLE.to_owned());
    let mut types = vec![1; tokens.len()];
    tokens.extend(SPECIAL.iter().map(|token| (*token).to_owned()));
    types.extend([3, 3, 4]);
    (tokens, types)
}

fn tensors(architecture: Architecture, vocab: u64) -> Vec<(String, Vec<u64>, u32, Vec<u8>)> {
    let key = HIDDEN / HEADS * KV_HEADS;
    let mut list = Vec::new();
    let mut add = |name: &str, sizes: &[u64], kind: u32| {
        let elements: u64 = sizes.iter().product();
        let length = match kind {
            0 => elements * 4,
            1 | 30 => elements * 2,
            8 => elements / 32 * 34,
            _ => elements / 32 * 20,
        };
        // Small numbers in every type: no exponent bits beyond those of values around 1.
        let bytes = (0..length)
            .map(|at| ((at * 37 + length) % 61) as u8)
            .collect();
        list.push((name.to_owned(), sizes.to_vec(), kind, bytes));
    };
    add("token_embd.weight", &[HIDDEN, vocab], 8);
    add("output_norm.weight", &[HIDDEN], 0);
    add("output.weight", &[HIDDEN, vocab], 3);
    add("blk.0.attn_norm.weight", &[HIDDEN], 0);
    add("blk.0.attn_q.weight", &[HIDDEN, HIDDEN], 0);
    add("blk.0.attn_k.weight", &[HIDDEN, key], 1);
    add("blk.0.attn_v.weight", &[HIDDEN, key], 30);
    if architecture == Architecture::Qwen2 {
        add("blk.0.attn_q.bias", &[HIDDEN], 0);
        add("blk.0.attn_k.bias", &[key], 0);
        add("blk.0.attn_v.bias", &[key], 0);
    }
    add("blk.0.attn_output.weight", &[HIDDEN, HIDDEN], 3);
    add("blk.0.ffn_norm.weight", &[HIDDEN], 0);
    add("blk.0.ffn_gate.weight", &[HIDDEN, FFN], 3);
    add("blk.0.ffn_up.weight", &[HIDDEN, FFN], 8);
    add("blk.0.ffn_down.weight", &[FFN, HIDDEN], 3);
    list
}

fn counted(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

fn text(value: &str) -> Vec<u8> {
    [8u32.to_le_bytes().to_vec(), counted(value)].concat()
}

fn number(value: u32) -> Vec<u8> {
    [4u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn float(value: f32) -> Vec<u8> {
    [6u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn texts(values: &[String]) -> Vec<u8> {
    let elements: Vec<u8> = values.iter().flat_map(|value| counted(value)).collect();
    [array(8, values.len()), elements].concat()
}

fn numbers(values: &[i32]) -> Vec<u8> {
    let elements: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    [array(5, values.len()), elements].concat()
}

fn array(kind: u32, count: usize) -> Vec<u8> {
    let mut bytes = 9u32.to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend((count as u64).to_le_bytes());
    bytes
}
