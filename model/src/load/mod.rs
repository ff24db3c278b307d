//! A model from its files, checked whole.
//!
//! * `gguf`: everything from one `.gguf` file
//! * `folder`: a Hugging Face folder
//! * `fingerprint`: a number that two nodes compare before they exchange pages

mod fingerprint;
mod folder;
mod gguf;

use crate::chat_template::ChatTemplate;
use crate::config::ModelConfig;
use crate::error::{LoadError, LoadProblem};
use crate::generation_config::GenerationDefaults;
use crate::tokenizer::Tokenizer;
use crate::weights::{RopeLayout, Weights};
use std::path::Path;

/// A loaded model: everything but the arithmetic.
#[derive(Debug)]
pub struct Model {
    /// Sizes and constants. `eos` has the ids of all files of the model.
    pub config: ModelConfig,
    /// Its tensors.
    pub weights: Weights,
    /// How query and key rows are ordered for the rotary embedding.
    pub rope: RopeLayout,
    /// `None` for a folder without `tokenizer.json`: it serves token ids only.
    pub tokenizer: Option<Tokenizer>,
    /// `None` for a model without one: it serves completions, no chat.
    pub chat_template: Option<ChatTemplate>,
    /// What a request gets when it does not say.
    pub generation: GenerationDefaults,
    /// The file's stem or the folder's name: what `/v1/models` lists.
    pub name: String,
    /// Equal on two nodes that hold the same weights in the same form: covers the
    /// configuration and every tensor's name, type, shape and samples of its bytes.
    pub fingerprint: u64,
}

impl Model {
    /// Loads a `.gguf` file or a Hugging Face folder.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and what is wrong with it.
    pub fn load(path: &Path) -> Result<Model, LoadError> {
        let metadata = std::fs::metadata(path).map_err(|error| LoadError::new(path, error))?;
        if metadata.is_dir() {
            return folder::load(path);
        }
        let is_gguf = path
            .extension()
            .is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
        if !is_gguf || !metadata.is_file() {
            return Err(LoadError {
                path: path.to_owned(),
                problem: LoadProblem::NoModel,
            });
        }
        gguf::load(path)
    }
}

/// The name of a file or folder, without `.gguf`.
fn name_of(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if whole.is_dir() {
        whole.file_name()
    } else {
        whole.file_stem()
    };
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// Adds ids that are not there yet.
fn add_ids(ids: &mut Vec<u32>, more: &[u32]) {
    for id in more {
        if !ids.contains(id) {
            ids.push(*id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_can_be_shared_between_threads() {
        fn shareable<T: Send + Sync>() {}
        shareable::<Model>();
        shareable::<Tokenizer>();
        shareable::<crate::detokenizer::Detokenizer>();
    }
}
