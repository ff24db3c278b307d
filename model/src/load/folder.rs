//! A Hugging Face folder.

use super::{Model, add_ids, fingerprint, name_of};
use crate::chat_template::ChatTemplate;
use crate::config::{self, ConfigError, hf_values};
use crate::error::{LoadError, LoadProblem};
use crate::generation_config::GenerationDefaults;
use crate::safetensors::{ShardIndex, parse_header};
use crate::tokenizer::Tokenizer;
use crate::weights::{MappedFile, Naming, RopeLayout, StoredTensor, Weights};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Largest `config.json`, `generation_config.json`, template: real ones are below 1 MiB.
const SMALL_FILE_BYTES_MAX: u64 = 4 << 20;
/// Largest index or `tokenizer.json`: the largest published tokenizers have some 30 MB.
const LARGE_FILE_BYTES_MAX: u64 = 256 << 20;
/// Most `*.safetensors` files taken without an index.
const FILES_MAX: usize = 1024;

const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

pub(super) fn load(folder: &Path) -> Result<Model, LoadError> {
    let path = folder.join("config.json");
    let bytes = read(&path, SMALL_FILE_BYTES_MAX)?;
    let mut config = config::from_hf(&bytes).map_err(|error| LoadError::new(&path, error))?;
    let weights = load_weights(folder, &config)?;
    let tokenizer = load_tokenizer(folder, config.vocab)?;
    let settings = load_tokenizer_settings(folder)?;
    let chat_template = load_chat_template(folder, &settings)?;
    let generation = load_generation(folder)?;
    add_ids(&mut config.eos, &generation.eos);
    if let (Some(tokenizer), Some(token)) = (&tokenizer, token_of(&settings, "eos_token"))
        && let Some(id) = tokenizer.token_id(token)
    {
        add_ids(&mut config.eos, &[id]);
    }
    config
        .check()
        .map_err(|error| LoadError::new(&path, error))?;
    let rope = RopeLayout::Halves;
    Ok(Model {
        fingerprint: fingerprint::of(&config, rope, &weights),
        name: name_of(folder),
        config,
        weights,
        rope,
        tokenizer,
        chat_template,
        generation,
    })
}

/// Reads a file whole if it is not larger than such a file is.
fn read(path: &Path, most: u64) -> Result<Vec<u8>, LoadError> {
    // Before opening: opening a named pipe would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(|error| LoadError::new(path, error))?;
    if !metadata.is_file() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        return Err(LoadError::new(path, error));
    }
    let file = File::open(path).map_err(|error| LoadError::new(path, error))?;
    let mut bytes = Vec::new();
    let taken = file.take(most + 1).read_to_end(&mut bytes);
    taken.map_err(|error| LoadError::new(path, error))?;
    if bytes.len() as u64 > most {
        let bytes = bytes.len() as u64;
        return Err(LoadError::new(path, LoadProblem::TooLarge { bytes, most }));
    }
    Ok(bytes)
}

fn read_if_there(path: &Path, most: u64) -> Result<Option<Vec<u8>>, LoadError> {
    match read(path, most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(LoadError {
            problem: LoadProblem::Io(error),
            ..
        }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn load_weights(folder: &Path, config: &config::ModelConfig) -> Result<Weights, LoadError> {
    let index_path = folder.join("model.safetensors.index.json");
    let single = folder.join("model.safetensors");
    if single.is_file() {
        let (files, stored) = open_files(&[single])?;
        return assemble(folder, files, stored, config);
    }
    if let Some(bytes) = read_if_there(&index_path, LARGE_FILE_BYTES_MAX)? {
        let wrong = |error| LoadError::new(&index_path, LoadProblem::Index(error));
        let index = ShardIndex::parse(&bytes).map_err(wrong)?;
        let paths: Vec<_> = index.files.iter().map(|file| folder.join(file)).collect();
        let (files, stored) = open_files(&paths)?;
        index.check(&stored).map_err(wrong)?;
        return assemble(folder, files, stored, config);
    }
    let (files, stored) = open_files(&listed_safetensors(folder)?)?;
    assemble(folder, files, stored, config)
}

fn assemble(
    folder: &Path,
    files: Vec<MappedFile>,
    stored: Vec<StoredTensor>,
    config: &config::ModelConfig,
) -> Result<Weights, LoadError> {
    Weights::assemble(files, stored, Naming::Hf, config)
        .map_err(|error| LoadError::new(folder, error))
}

fn listed_safetensors(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let wrong = |error: io::Error| LoadError::new(folder, error);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.extension().is_some_and(|ext| ext == "safetensors") && paths.len() < FILES_MAX {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(LoadError::new(folder, LoadProblem::NoWeights));
    }
    paths.sort();
    Ok(paths)
}

fn open_files(paths: &[PathBuf]) -> Result<(Vec<MappedFile>, Vec<StoredTensor>), LoadError> {
    let (mut files, mut stored) = (Vec::new(), Vec::new());
    for (number, path) in paths.iter().enumerate() {
        let file = MappedFile::open(path).map_err(|error| LoadError::new(path, error))?;
        let tensors = parse_header(file.bytes(), number);
        stored.extend(tensors.map_err(|error| LoadError::new(path, error))?);
        files.push(file);
    }
    Ok((files, stored))
}

fn load_tokenizer(folder: &Path, vocab: usize) -> Result<Option<Tokenizer>, LoadError> {
    let path = folder.join("tokenizer.json");
    let Some(bytes) = read_if_there(&path, LARGE_FILE_BYTES_MAX)? else {
        return Ok(None);
    };
    Tokenizer::from_json(&bytes, vocab)
        .map(Some)
        .map_err(|error| LoadError::new(&path, error))
}

fn load_tokenizer_settings(folder: &Path) -> Result<Map<String, Value>, LoadError> {
    let path = folder.join("tokenizer_config.json");
    let Some(bytes) = read_if_there(&path, SMALL_FILE_BYTES_MAX)? else {
        return Ok(Map::new());
    };
    hf_values::object(&bytes).map_err(|error| LoadError::new(&path, error))
}

/// A special token's text: written as a text or as an object with `content`.
fn token_of<'a>(settings: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    let value = settings.get(key)?;
    value
        .as_str()
        .or_else(|| value.get("content").and_then(Value::as_str))
}

/// `chat_template.jinja` wins over the template in `tokenizer_config.json`, which is a text or a
/// list of named ones (`default`, `tool_use`).
fn load_chat_template(
    folder: &Path,
    settings: &Map<String, Value>,
) -> Result<Option<ChatTemplate>, LoadError> {
    let special_tokens = SPECIAL_TOKENS
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), token_of(settings, name)?.to_owned())))
        .collect();
    let compile = |path: &Path, source: &str, tool_source: Option<&str>| {
        ChatTemplate::new(source, tool_source, special_tokens)
            .map(Some)
            .map_err(|error| LoadError::new(path, error))
    };
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_if_there(&path, SMALL_FILE_BYTES_MAX)? {
        let source = String::from_utf8(bytes).map_err(|error| {
            let error = io::Error::new(io::ErrorKind::InvalidData, error);
            LoadError::new(&path, error)
        })?;
        return compile(&path, &source, None);
    }
    let path = folder.join("tokenizer_config.json");
    let key = "chat_template";
    match settings.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => compile(&path, source, None),
        Some(Value::Array(named)) => {
            let of_name = |name: &str| {
                let entry = named.iter().find(|entry| entry["name"] == name);
                entry.and_then(|entry| entry["template"].as_str())
            };
            match of_name("default") {
                Some(source) => compile(&path, source, of_name("tool_use")),
                None => {
                    let key = "chat_template[name=default]".to_owned();
                    Err(LoadError::new(&path, ConfigError::Missing { key }))
                }
            }
        }
        Some(other) => {
            let wanted = "a text or a list of named templates";
            let found = hf_values::short(other);
            let error = ConfigError::Type {
                key: key.to_owned(),
                wanted,
                found,
            };
            Err(LoadError::new(&path, error))
        }
    }
}

fn load_generation(folder: &Path) -> Result<GenerationDefaults, LoadError> {
    let path = folder.join("generation_config.json");
    match read_if_there(&path, SMALL_FILE_BYTES_MAX)? {
        Some(bytes) => {
            GenerationDefaults::parse(&bytes).map_err(|error| LoadError::new(&path, error))
        }
        None => Ok(GenerationDefaults::default()),
    }
}
