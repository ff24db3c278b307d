//! A Hugging Face folder whose files disagree gives an error that names the file and what is wrong.

use kvserve_model::Model;
use kvserve_model::safetensors::parse_header;
use kvserve_model::testing::random_qwen2::RandomQwen2;
use std::path::Path;

#[path = "common/temp_folder.rs"]
mod temp_folder;
use temp_folder::TempFolder;

fn folder_refused(change: impl Fn(&Path), says: &[&str]) {
    let folder = TempFolder::new("folder");
    RandomQwen2::TINY.write(folder.path()).unwrap();
    change(folder.path());
    let error = Model::load(folder.path()).expect_err(says[0]).to_string();
    for word in says {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn folders_are_refused_by_file_and_name() {
    let edit = |name: &'static str, from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let path = folder.join(name);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(from), "{text}");
            std::fs::write(&path, text.replace(from, to)).unwrap();
        }
    };
    let hidden = edit(
        "config.json",
        "\"intermediate_size\": 352",
        "\"intermediate_size\": 353",
    );
    folder_refused(
        hidden,
        &["mlp.gate_proj.weight", "[352, 128]", "[353, 128]"],
    );
    let layers = edit(
        "config.json",
        "\"num_hidden_layers\": 2",
        "\"num_hidden_layers\": 3",
    );
    folder_refused(
        layers,
        &["model.layers.2.input_layernorm.weight", "missing"],
    );
    let layers = edit(
        "config.json",
        "\"num_hidden_layers\": 2",
        "\"num_hidden_layers\": 1",
    );
    folder_refused(layers, &["model.layers.1.", "not part of"]);
    let untied = edit(
        "config.json",
        "\"tie_word_embeddings\": true",
        "\"tie_word_embeddings\": false",
    );
    folder_refused(untied, &["lm_head.weight", "missing"]);
    folder_refused(
        |folder| std::fs::remove_file(folder.join("config.json")).unwrap(),
        &["config.json"],
    );
    let no_weights =
        |folder: &Path| std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    folder_refused(no_weights, &["no model.safetensors"]);
    let cut = |folder: &Path| {
        let path = folder.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    };
    folder_refused(cut, &["model.safetensors", "behind its header"]);
    let tokenizer = |folder: &Path| std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    folder_refused(tokenizer, &["tokenizer.json"]);
    let template = |folder: &Path| {
        std::fs::write(folder.join("chat_template.jinja"), "{% if %}").unwrap();
    };
    folder_refused(template, &["chat_template.jinja"]);
}

#[test]
fn a_sharded_folder_is_checked_against_its_index() {
    let folder = TempFolder::new("sharded");
    RandomQwen2::TINY.write(folder.path()).unwrap();
    let one = folder.path().join("one.safetensors");
    std::fs::rename(folder.path().join("model.safetensors"), &one).unwrap();
    let expected = Model::load(folder.path()).unwrap().fingerprint;
    let names: Vec<String> = parse_header(&std::fs::read(&one).unwrap(), 0)
        .unwrap()
        .into_iter()
        .map(|t| t.name)
        .collect();
    let index_path = folder.path().join("model.safetensors.index.json");
    let write_index = |file_of: &dyn Fn(&str) -> &'static str| {
        let map: serde_json::Map<_, _> = names
            .iter()
            .map(|name| (name.clone(), file_of(name).into()))
            .collect();
        std::fs::write(
            &index_path,
            serde_json::json!({"weight_map": map}).to_string(),
        )
        .unwrap();
    };
    write_index(&|_| "one.safetensors");
    assert_eq!(Model::load(folder.path()).unwrap().fingerprint, expected);
    std::fs::copy(&one, folder.path().join("two.safetensors")).unwrap();
    write_index(&|name| {
        if name == "model.norm.weight" {
            "two.safetensors"
        } else {
            "one.safetensors"
        }
    });
    let error = Model::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("twice"), "{error}");
    write_index(&|name| {
        if name == "model.norm.weight" {
            "none.safetensors"
        } else {
            "one.safetensors"
        }
    });
    let error = Model::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("none.safetensors"), "{error}");
}

#[test]
fn what_is_no_model_is_told() {
    let folder = TempFolder::new("no-model");
    let path = folder.path().join("model.bin");
    std::fs::write(&path, "x").unwrap();
    assert!(
        Model::load(&path)
            .unwrap_err()
            .to_string()
            .contains("neither a .gguf")
    );
    assert!(Model::load(&folder.path().join("absent.gguf")).is_err());
    let folder_as_file = folder.path().join("config.json");
    std::fs::create_dir(&folder_as_file).unwrap();
    let error = Model::load(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("config.json") && error.contains("not a regular file"),
        "{error}"
    );
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, "").unwrap();
    assert!(
        Model::load(&empty)
            .unwrap_err()
            .to_string()
            .contains("the file ends")
    );
}
