//! The tokenizer, template and detokeniser of the real model, from the vocabulary in its GGUF,
//! against what Hugging Face's made of the same model.

use kvserve_model::testing::smollm2_path;
use kvserve_model::{ChatInput, Model, StopMatcher};
use serde_json::Value;
use std::path::Path;
use std::sync::OnceLock;

#[path = "common/random.rs"]
mod random;
use random::Random;

fn model() -> Option<&'static Model> {
    static MODEL: OnceLock<Option<Model>> = OnceLock::new();
    MODEL
        .get_or_init(|| smollm2_path().map(|path| Model::load(&path).unwrap()))
        .as_ref()
}

fn cases() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../server/tests/fixtures/smollm2-q4_1-greedy.json");
    let fixture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), 8);
    cases
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

#[test]
fn prompts_encode_to_the_reference_ids() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    for case in cases() {
        let rendered = case["rendered"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode(rendered, false).unwrap(),
            ids(&case["prompt_ids"]),
            "{rendered:?}"
        );
        // The file says add_bos_token = false.
        assert_eq!(
            tokenizer.encode(rendered, true).unwrap(),
            ids(&case["prompt_ids"])
        );
    }
}

#[test]
fn conversations_render_to_the_reference_text() {
    let Some(model) = model() else { return };
    let template = model.chat_template.as_ref().unwrap();
    let mut chats = 0;
    for case in cases().iter().filter(|case| case["kind"] == "chat") {
        let input = ChatInput {
            messages: &case["messages"],
            tools: None,
            add_generation_prompt: true,
            variables: None,
            now_unix_s: 0,
        };
        assert_eq!(
            template.render(&input).unwrap(),
            case["rendered"].as_str().unwrap()
        );
        chats += 1;
    }
    assert!(chats >= 2);
}

#[test]
fn answers_decode_to_the_reference_text_whole_and_piecewise() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    for case in cases() {
        let (answer, text) = (ids(&case["gen_ids"]), case["text"].as_str().unwrap());
        assert_eq!(tokenizer.decode(&answer, false), text);
        let skipped = tokenizer.decode(&answer, true);
        assert_eq!(
            skipped,
            text.replace("<|im_end|>", "").replace("<|im_start|>", "")
        );
        let mut detokenizer = tokenizer.detokenizer(false);
        let mut joined = String::new();
        for id in &answer {
            let mut piece = String::new();
            detokenizer.push(*id, &mut piece);
            assert!(detokenizer.pending_bytes() <= 3);
            joined.push_str(&piece);
        }
        detokenizer.finish(&mut joined);
        assert_eq!(joined, text);
    }
}

#[test]
fn any_ids_decode_as_their_bytes_do() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    for seed in 0..300 {
        let mut random = Random::new(seed);
        // Ids 17 to 300 are nearly all single bytes: many broken characters.
        let bound = if seed % 2 == 0 {
            300
        } else {
            tokenizer.id_bound() + 5
        };
        let sequence: Vec<u32> = (0..40).map(|_| random.below(bound) as u32).collect();
        let bytes: Vec<u8> = sequence
            .iter()
            .flat_map(|id| tokenizer.piece(*id).to_vec())
            .collect();
        assert_eq!(
            tokenizer.decode(&sequence, false),
            String::from_utf8_lossy(&bytes),
            "seed {seed}"
        );
    }
}

#[test]
fn text_survives_the_way_there_and_back() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    for text in [
        "",
        " ",
        "\n\n  x",
        "1234567",
        "日本語 🙂🏽‍🚀 é\u{301}",
        "a\u{0}b",
        "<|im_start|>user\nhi<|im_end|>",
    ] {
        let encoded = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&encoded, false), text);
    }
    // Each digit is a token of its own.
    assert_eq!(tokenizer.encode("1969", false).unwrap().len(), 4);
    // A special token written in a text is that token.
    assert_eq!(tokenizer.encode("<|im_end|>", false).unwrap(), [2]);
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(2));
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(504));
}

#[test]
fn texts_that_would_be_split_wrongly_are_refused() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    let spaces = " ".repeat(250_001);
    assert!(
        tokenizer
            .encode(&spaces, false)
            .unwrap_err()
            .to_string()
            .contains("whitespace")
    );
    let most = " ".repeat(250_000);
    assert_eq!(
        tokenizer.decode(&tokenizer.encode(&most, false).unwrap(), false),
        most
    );
    assert!(tokenizer.encode(&"x".repeat((1 << 20) + 1), false).is_err());
}

#[test]
fn a_stop_string_over_token_borders_ends_the_text() {
    let Some(model) = model() else { return };
    let tokenizer = model.tokenizer.as_ref().unwrap();
    let case = &cases()[0];
    let text = case["text"].as_str().unwrap();
    let stop = "answer is: 2018";
    let mut matcher = StopMatcher::new(&[stop], false).unwrap();
    let mut detokenizer = tokenizer.detokenizer(false);
    let (mut out, mut ended) = (String::new(), false);
    for id in ids(&case["gen_ids"]) {
        let mut piece = String::new();
        detokenizer.push(id, &mut piece);
        if matcher.push(&piece, &mut out).is_some() {
            ended = true;
            break;
        }
    }
    assert!(ended);
    assert_eq!(out, text[..text.find(stop).unwrap()]);
}

#[test]
fn the_configuration_is_read_from_the_file() {
    let Some(model) = model() else { return };
    let config = &model.config;
    assert_eq!(
        (config.layers, config.hidden, config.heads, config.kv_heads),
        (30, 576, 9, 3)
    );
    assert_eq!(
        (config.head_dim, config.ffn, config.vocab, config.context),
        (64, 1536, 49152, 8192)
    );
    assert_eq!(
        (config.rope_theta, config.bos, config.eos.as_slice()),
        (100_000.0, Some(1), &[2][..])
    );
    assert!(config.tied_head && !config.qkv_bias);
    assert_eq!(model.name, "SmolLM2-135M-Instruct.Q4_1");
    assert!(model.weights.bytes() > 96_000_000);
}
