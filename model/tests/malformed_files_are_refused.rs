//! A truncated or lying model file gives an error that names what is wrong. It never panics and
//! never allocates what the file merely claims.

use kvserve_model::gguf::{Gguf, GgufError};
use kvserve_model::safetensors::parse_header;
use kvserve_model::testing::{SmallGguf, small_gguf};
use kvserve_model::weights::StoredTensor;
use kvserve_model::{Architecture, Model, Tokenizer, config};

#[path = "common/random.rs"]
mod random;
#[path = "common/temp_folder.rs"]
mod temp_folder;
use random::Random;
use temp_folder::TempFolder;

fn small() -> SmallGguf {
    small_gguf(Architecture::Llama, "smollm")
}

fn load(folder: &TempFolder, bytes: &[u8]) -> Result<Model, String> {
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::load(&path).map_err(|error| error.to_string())
}

fn refused(label: &str, change: impl Fn(&mut SmallGguf)) -> String {
    let folder = TempFolder::new(label);
    let mut gguf = small();
    change(&mut gguf);
    let error = load(&folder, &gguf.bytes()).expect_err(label);
    assert!(error.contains("model.gguf"), "the file is named: {error}");
    error
}

#[test]
fn the_small_file_is_valid() {
    let folder = TempFolder::new("small-valid");
    for architecture in [Architecture::Llama, Architecture::Qwen2] {
        for pre in ["smollm", "gpt-2", "qwen2", "llama-bpe"] {
            let model = load(&folder, &small_gguf(architecture, pre).bytes()).unwrap();
            assert_eq!(model.config.vocab, 266);
            assert!(!model.config.tied_head);
            assert_eq!(model.config.qkv_bias, architecture == Architecture::Qwen2);
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small().bytes();
    // All cuts in the head, then one in each later run of 61 bytes.
    let cuts = (0..9000).chain((9000..bytes.len()).step_by(61));
    for cut in cuts.filter(|cut| *cut < bytes.len()) {
        let error = Gguf::parse(&bytes[..cut]).expect_err("a cut file");
        assert!(!error.to_string().is_empty());
    }
}

#[test]
fn lies_about_tensors_name_the_tensor() {
    let at = |gguf: &SmallGguf, name: &str| {
        gguf.tensors
            .iter()
            .position(|tensor| tensor.0 == name)
            .unwrap()
    };
    let query = "blk.0.attn_q.weight";
    let error = refused("missing", |gguf| drop(gguf.tensors.remove(at(gguf, query))));
    assert!(
        error.contains(query) && error.contains("missing"),
        "{error}"
    );
    let error = refused("shape", |gguf| {
        let place = at(gguf, query);
        gguf.tensors[place].1 = vec![32, 128];
    });
    assert!(
        error.contains("[128, 32]") && error.contains("[64, 64]"),
        "{error}"
    );
    let error = refused("type", |gguf| {
        let place = at(gguf, query);
        gguf.tensors[place].2 = 12;
    });
    assert!(error.contains(query) && error.contains("Q4_K"), "{error}");
    let error = refused("twice", |gguf| {
        let place = at(gguf, query);
        gguf.tensors.push(gguf.tensors[place].clone());
    });
    assert!(error.contains(query) && error.contains("twice"), "{error}");
    let error = refused("overflow", |gguf| {
        let place = at(gguf, query);
        gguf.tensors[place].1 = vec![1 << 40, 1 << 40, 1 << 40];
    });
    assert!(
        error.contains(query) && error.contains("too large"),
        "{error}"
    );
    let error = refused("beyond", |gguf| {
        let place = at(gguf, query);
        gguf.tensors[place].1 = vec![64, 1 << 30];
    });
    assert!(
        error.contains(query) && error.contains("bytes of tensors"),
        "{error}"
    );
    let error = refused("blocks", |gguf| {
        let place = at(gguf, "blk.0.ffn_down.weight");
        gguf.tensors[place].1 = vec![31, 64];
    });
    assert!(
        error.contains("blk.0.ffn_down.weight") && error.contains("whole blocks"),
        "{error}"
    );
    let error = refused("unknown", |gguf| {
        gguf.tensors
            .push(("rope_freqs.weight".into(), vec![8], 0, vec![0; 32]));
    });
    assert!(error.contains("rope_freqs.weight"), "{error}");
}

#[test]
fn lies_about_keys_name_the_key() {
    let number = |value: u32| [4u32.to_le_bytes(), value.to_le_bytes()].concat();
    let text = |value: &str| {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((value.len() as u64).to_le_bytes());
        bytes.extend(value.as_bytes());
        bytes
    };
    for (key, value, says) in [
        ("llama.block_count", number(2), "blk.1.attn_norm.weight"),
        ("llama.block_count", number(u32::MAX), "layers"),
        ("llama.block_count", text("one"), "llama.block_count"),
        ("llama.attention.head_count", number(0), "head_count"),
        ("llama.attention.head_count_kv", number(3), "kv_heads"),
        ("llama.embedding_length", number(63), "head_count"),
        (
            "llama.rope.scaling.type",
            text("yarn"),
            "llama.rope.scaling.type",
        ),
        ("llama.expert_count", number(8), "llama.expert_count"),
        ("llama.vocab_size", number(5), "llama.vocab_size"),
        ("general.architecture", text("mamba"), "mamba"),
        ("general.alignment", number(24), "general.alignment"),
        (
            "tokenizer.ggml.model",
            text("llama"),
            "tokenizer.ggml.model",
        ),
        ("tokenizer.ggml.pre", text("tekken"), "tekken"),
        ("tokenizer.ggml.tokens", text("x"), "tokenizer.ggml.tokens"),
        (
            "tokenizer.ggml.eos_token_id",
            number(70_000),
            "eos_token_id",
        ),
        (
            "tokenizer.chat_template",
            text("{% for %}"),
            "chat template",
        ),
        (
            "llama.context_length",
            77u32.to_le_bytes().to_vec(),
            "llama.context_length",
        ),
        (
            "tokenizer.ggml.add_bos_token",
            vec![7, 0, 0, 0, 9],
            "add_bos_token",
        ),
    ] {
        let error = refused("key", |gguf| gguf.set(key, value.clone()));
        assert!(error.contains(says), "{key}: {error}");
    }
    for key in [
        "llama.context_length",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.token_type",
    ] {
        let error = refused("no-key", |gguf| gguf.remove(key));
        assert!(error.contains(key) && error.contains("missing"), "{error}");
    }
    let error = refused("key-twice", |gguf| gguf.keys.push(gguf.keys[1].clone()));
    assert!(
        error.contains("llama.block_count") && error.contains("twice"),
        "{error}"
    );
}

#[test]
fn huge_counts_are_compared_with_the_file() {
    let mut bytes = small().bytes();
    bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(
        Gguf::parse(&bytes),
        Err(GgufError::Count {
            found: u64::MAX,
            ..
        })
    ));
    let mut bytes = small().bytes();
    bytes[16..24].copy_from_slice(&(1u64 << 60).to_le_bytes());
    assert!(matches!(Gguf::parse(&bytes), Err(GgufError::Count { .. })));
    // An array of 2^61 texts, and one of 2^61 eight-byte numbers.
    for kind in [8u32, 10] {
        let mut gguf = small();
        let mut value = 9u32.to_le_bytes().to_vec();
        value.extend(kind.to_le_bytes());
        value.extend((1u64 << 61).to_le_bytes());
        gguf.set("tokenizer.ggml.tokens", value);
        let error = Gguf::parse(&gguf.bytes()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml.tokens"), "{error}");
    }
}

#[test]
fn wrong_magic_and_versions_are_told() {
    for (at, byte, says) in [
        (0, b'X', "not a GGUF"),
        (4, 1, "version 1"),
        (4, 9, "version 9"),
    ] {
        let mut bytes = small().bytes();
        bytes[at] = byte;
        let error = Gguf::parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let mut gguf = small();
    gguf.version = 3u32.swap_bytes();
    assert!(
        Gguf::parse(&gguf.bytes())
            .unwrap_err()
            .to_string()
            .contains("big-endian")
    );
    gguf.version = 2;
    assert!(Gguf::parse(&gguf.bytes()).is_ok());
}

#[test]
fn text_that_is_no_utf8_is_refused() {
    let mut gguf = small();
    let mut value = 8u32.to_le_bytes().to_vec();
    value.extend(2u64.to_le_bytes());
    value.extend([0xff, 0xfe]);
    gguf.set("tokenizer.ggml.pre", value);
    let error = Gguf::parse(&gguf.bytes()).unwrap_err().to_string();
    assert!(
        error.contains("tokenizer.ggml.pre") && error.contains("UTF-8"),
        "{error}"
    );
}

/// Changes a few bytes of the head, cuts, or doubles a piece.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>, head: usize) {
    for _ in 0..=random.below(4) {
        let at = random.below(head.min(bytes.len()).max(1));
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
            2 => bytes[at..].iter_mut().take(1).for_each(|byte| *byte = 0),
            3 => {
                let piece = bytes[at..bytes.len().min(at + 40)].to_vec();
                bytes.splice(at..at, piece);
            }
            4 => drop(bytes.drain(at..bytes.len().min(at + 1 + random.below(16)))),
            // Another digit: a number of a JSON header that is well-formed and wrong.
            5 | 6 => {
                let digit = b'0' + random.below(10) as u8;
                bytes[at..].iter_mut().take(1).for_each(|old| *old = digit);
            }
            _ => {
                let byte = random.below(256) as u8;
                bytes[at..].iter_mut().take(1).for_each(|old| *old = byte);
            }
        }
        if bytes.is_empty() {
            return;
        }
    }
}

#[test]
fn mutated_ggufs_never_panic() {
    let valid = small().bytes();
    let head = Gguf::parse(&valid).unwrap().tensors[0].start;
    let (mut parsed, mut built) = (0, 0);
    for seed in 0..6000 {
        let mut random = Random::new(seed);
        let mut bytes = valid.clone();
        mutate(&mut random, &mut bytes, head);
        let Ok(gguf) = Gguf::parse(&bytes) else {
            continue;
        };
        parsed += 1;
        for tensor in &gguf.tensors {
            assert!(
                tensor.start + tensor.length <= bytes.len(),
                "seed {seed}: {}",
                tensor.name
            );
        }
        let Ok(config) = config::from_gguf(&gguf) else {
            continue;
        };
        // Building a tokenizer takes a millisecond: every fourth of those that get here.
        if seed % 4 == 0
            && let Ok(tokenizer) = Tokenizer::from_gguf(&gguf, config.vocab)
        {
            built += 1;
            if let Ok(ids) = tokenizer.encode("hello <|end|> 12é", true) {
                tokenizer.decode(&ids, false);
            }
        }
    }
    assert!(
        parsed > 100 && built > 10,
        "too many mutants die early: {parsed}, {built}"
    );
}

#[test]
fn mutated_gguf_files_load_or_fail_whole() {
    let folder = TempFolder::new("mutants");
    let valid = small().bytes();
    let head = Gguf::parse(&valid).unwrap().tensors[0].start;
    let mut loaded = 0;
    for seed in 100_000..100_400 {
        let mut random = Random::new(seed);
        let mut bytes = valid.clone();
        mutate(&mut random, &mut bytes, head);
        if let Ok(model) = load(&folder, &bytes) {
            loaded += 1;
            read_all(&model);
        }
    }
    assert!(loaded > 5, "only {loaded} mutants loaded");
}

fn read_all(model: &Model) {
    for id in model.weights.ids() {
        let view = model.weights.tensor(id);
        let mut row = vec![0.0; view.columns];
        for number in [0, view.rows - 1] {
            kvserve_model::dequantize_row(&view, number, &mut row);
        }
    }
}

#[test]
fn mutated_safetensors_never_panic() {
    let header = r#"{"__metadata__":{"format":"pt"},
        "a.weight":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},
        "b.weight":{"dtype":"BF16","shape":[16],"data_offsets":[128,160]},
        "c.weight":{"dtype":"F16","shape":[2,2,2],"data_offsets":[160,176]}}"#;
    let mut valid = (header.len() as u64).to_le_bytes().to_vec();
    valid.extend(header.as_bytes());
    valid.resize(valid.len() + 176, 7);
    assert_eq!(parse_header(&valid, 0).unwrap().len(), 3);
    let mut right = 0;
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let mut bytes = valid.clone();
        mutate(&mut random, &mut bytes, header.len() + 8);
        if let Ok(stored) = parse_header(&bytes, 0) {
            right += 1;
            let within = |tensor: &StoredTensor| tensor.start + tensor.length <= bytes.len();
            assert!(stored.iter().all(within), "seed {seed}");
        }
    }
    assert!(right > 50, "only {right} mutants parsed");
}
