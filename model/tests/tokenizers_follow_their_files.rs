//! Each way of splitting text that a GGUF can name, and `tokenizer.json` files, right and wrong.

use kvserve_model::gguf::Gguf;
use kvserve_model::testing::small_gguf;
use kvserve_model::{Architecture, Tokenizer};
use serde_json::{Value, json};

#[path = "common/random.rs"]
mod random;
use random::Random;

fn of_gguf(pre: &str) -> Tokenizer {
    let bytes = small_gguf(Architecture::Llama, pre).bytes();
    Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap(), 266).unwrap()
}

/// The tokens of a text as their bytes.
fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, false).unwrap();
    ids.iter()
        .map(|id| String::from_utf8_lossy(tokenizer.piece(*id)).into_owned())
        .collect()
}

#[test]
fn each_pre_splits_in_its_way() {
    // "12" and "34" are tokens: what splits every digit never makes them.
    assert_eq!(pieces(&of_gguf("gpt-2"), "1234"), ["12", "34"]);
    assert_eq!(pieces(&of_gguf("smollm"), "1234"), ["1", "2", "3", "4"]);
    assert_eq!(pieces(&of_gguf("qwen2"), "1234"), ["1", "2", "3", "4"]);
    assert_eq!(pieces(&of_gguf("llama-bpe"), "1234"), ["12", "3", "4"]);
    // "zq" is a token that no merge makes.
    assert_eq!(pieces(&of_gguf("llama-bpe"), "zq"), ["zq"]);
    assert_eq!(pieces(&of_gguf("gpt-2"), "zq"), ["z", "q"]);
    // Only Qwen2 composes characters first: e + accent is 3 bytes, é is 2.
    assert_eq!(of_gguf("qwen2").encode("e\u{301}", false).unwrap().len(), 2);
    assert_eq!(of_gguf("gpt-2").encode("e\u{301}", false).unwrap().len(), 3);
    for pre in ["gpt-2", "smollm", "qwen2", "llama-bpe"] {
        let tokenizer = of_gguf(pre);
        assert_eq!(pieces(&tokenizer, "hello"), ["hello"], "{pre}");
        assert_eq!(
            pieces(&tokenizer, "he<|end|>llo"),
            ["he", "<|end|>", "ll", "o"],
            "{pre}"
        );
        assert_eq!(
            tokenizer.decode(&tokenizer.encode(" a\n\té", false).unwrap(), false),
            " a\n\té"
        );
    }
}

#[test]
fn the_file_says_what_is_put_around_and_what_is_special() {
    let tokenizer = of_gguf("smollm");
    let begin = tokenizer.token_id("<|begin|>").unwrap();
    assert_eq!(tokenizer.encode("o", true).unwrap()[0], begin);
    assert_ne!(tokenizer.encode("o", false).unwrap()[0], begin);
    let tool = tokenizer.token_id("<tool>").unwrap();
    assert!(tokenizer.is_special(begin) && !tokenizer.is_special(tool));
    assert_eq!(tokenizer.decode(&[begin, tool], true), "<tool>");
    assert_eq!(tokenizer.decode(&[begin, tool], false), "<|begin|><tool>");
    // Ids without a token give nothing.
    assert_eq!(tokenizer.decode(&[266, u32::MAX], false), "");
}

fn small_json() -> Value {
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [
            {"id": 5, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true}
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4}, "merges": [["a", "b"], ["Ġ", "ab"]]}
    })
}

#[test]
fn a_tokenizer_json_is_followed_and_never_cuts() {
    let tokenizer = Tokenizer::from_json(small_json().to_string().as_bytes(), 6).unwrap();
    assert_eq!(
        tokenizer.encode("ab ab b<s>a", false).unwrap(),
        [3, 4, 2, 1, 5, 0]
    );
    assert_eq!(tokenizer.encode("ab ab b", true).unwrap(), [5, 3, 4, 2, 1]);
    assert_eq!(tokenizer.decode(&[5, 3, 4], false), "<s>ab ab");
    assert_eq!(tokenizer.decode(&[5, 3, 4], true), "ab ab");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let refused = |json: &Value, vocab| {
        Tokenizer::from_json(json.to_string().as_bytes(), vocab)
            .unwrap_err()
            .to_string()
    };
    let error = refused(&small_json(), 5);
    assert!(error.contains("id 5") && error.contains("has 5"), "{error}");
    let mut other = small_json();
    other["decoder"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    assert!(refused(&other, 6).contains("Metaspace"));
    other["decoder"] = Value::Null;
    assert!(refused(&other, 6).contains("decoder is missing"));
    other["model"]["merges"] = json!([["a", "x"]]);
    assert!(refused(&other, 6).contains('x'));
    assert!(Tokenizer::from_json(b"not json", 6).is_err());
    let mut other = small_json();
    other["added_tokens"][0]["id"] = json!(7);
    let error = refused(&other, 10);
    assert!(
        error.contains("<s>") && error.contains('7') && error.contains('5'),
        "{error}"
    );
    let mut other = small_json();
    other["model"]["vocab"]["b"] = json!(0);
    assert!(refused(&other, 10).contains("two tokens have the id 0"));
    let mut other = small_json();
    other["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([77]);
    assert!(refused(&other, 10).contains("id 77"));
    other["post_processor"]["special_tokens"] = json!({});
    assert!(refused(&other, 10).contains("does not define the token \"<s>\""));
    other["post_processor"] = json!({"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 99]});
    assert!(refused(&other, 10).contains("BertProcessing"));
    other["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "x"});
    assert!(refused(&other, 10).contains("precompiled"));
}

#[test]
fn mutated_tokenizer_jsons_never_panic() {
    let valid = small_json().to_string().into_bytes();
    let mut built = 0;
    for seed in 0..4000 {
        let mut random = Random::new(seed);
        let mut bytes = valid.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            match random.below(4) {
                0 => bytes[at] = b'0' + random.below(10) as u8,
                1 => bytes[at] = b' ' + random.below(95) as u8,
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, b'a' + random.below(26) as u8),
            }
        }
        if let Ok(tokenizer) = Tokenizer::from_json(&bytes, 100) {
            built += 1;
            if let Ok(ids) = tokenizer.encode("ab <s>ab é", true) {
                tokenizer.decode(&ids, true);
            }
        }
    }
    assert!(built > 50, "only {built} mutants built");
}
