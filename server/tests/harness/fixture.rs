//! Ground truth, made once with transformers in f32 (the files say with which versions).

use kvserve_model::testing::random_qwen2::RandomQwen2;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Of the tiny checkpoint's `model.safetensors` in f32 with seed 1, which the fixture is for.
const TINY_F32_SHA256: &str = "c718eabf43fc602523dc1abba06927be26613567c6de2753309820c44f3e0e32";

/// One prompt and its 48 greedy tokens.
pub struct Case {
    pub id: String,
    pub prompt_ids: Vec<u32>,
    pub gen_ids: Vec<u32>,
    pub margin: Vec<f64>,
    pub top5: Vec<Vec<(u32, f64)>>,
}

pub fn fixture(name: &str) -> Vec<Case> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    let text = std::fs::read_to_string(&path).expect("fixture is in the repository");
    let root: Value = serde_json::from_str(&text).expect("fixture is JSON");
    let ids = |value: &Value| -> Vec<u32> {
        value
            .as_array()
            .expect("ids")
            .iter()
            .map(|id| id.as_u64().expect("id") as u32)
            .collect()
    };
    root["cases"]
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| Case {
            id: case["id"].as_str().expect("id").to_string(),
            prompt_ids: ids(&case["prompt_ids"]),
            gen_ids: ids(&case["gen_ids"]),
            margin: case["margin"]
                .as_array()
                .expect("margin")
                .iter()
                .map(|m| m.as_f64().expect("number"))
                .collect(),
            top5: case["top5"]
                .as_array()
                .expect("top5")
                .iter()
                .map(|step| {
                    step.as_array()
                        .expect("step")
                        .iter()
                        .map(|pair| {
                            (
                                pair[0].as_u64().expect("id") as u32,
                                pair[1].as_f64().expect("logprob"),
                            )
                        })
                        .collect()
                })
                .collect(),
        })
        .collect()
}

/// The random tiny Qwen2 folder in f32, made once a run.
pub fn tiny_qwen2() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("qwen2-tiny-f32");
            let sha256 = RandomQwen2::TINY
                .write(&folder)
                .expect("checkpoint is written");
            assert_eq!(sha256, TINY_F32_SHA256);
            folder
        })
        .clone()
}
