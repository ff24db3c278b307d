//! `model.safetensors.index.json`: which file holds which tensor.

use crate::weights::StoredTensor;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// Most files of a checkpoint: the largest published ones have some 200.
const FILES_MAX: usize = 1024;

/// The index of a sharded checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardIndex {
    /// The files in order of name.
    pub files: Vec<String>,
    weight_map: BTreeMap<String, String>,
}

/// An index that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// Not JSON of the right form.
    Json {
        /// What the parser says, with the place.
        problem: String,
    },
    /// A file that is no plain name within the folder.
    FileName {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// More files than a checkpoint may have, or none.
    Files {
        /// How many.
        found: usize,
    },
    /// A tensor is not in the file that the index names.
    Misplaced {
        /// The tensor.
        tensor: String,
        /// The file that the index names.
        file: String,
    },
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IndexError::Json { problem } => write!(f, "the index is wrong: {problem}"),
            IndexError::FileName { tensor, file } => {
                write!(
                    f,
                    "the index puts tensor \"{tensor}\" into {file:?}, which is no name of a .safetensors file in the same folder"
                )
            }
            IndexError::Files { found } => {
                write!(
                    f,
                    "the index names {found} files, it must be 1 to {FILES_MAX}"
                )
            }
            IndexError::Misplaced { tensor, file } => {
                write!(
                    f,
                    "the index puts tensor \"{tensor}\" into {file:?}, which does not hold it"
                )
            }
        }
    }
}

impl std::error::Error for IndexError {}

#[derive(Deserialize)]
struct Stored {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses an index.
    ///
    /// # Errors
    /// [`IndexError`] naming the tensor and file.
    pub fn parse(bytes: &[u8]) -> Result<Self, IndexError> {
        let Stored { weight_map } =
            serde_json::from_slice(bytes).map_err(|error| IndexError::Json {
                problem: error.to_string(),
            })?;
        let plain =
            |file: &str| file.ends_with(".safetensors") && !file.contains(['/', '\\', '\0']);
        if let Some((tensor, file)) = weight_map.iter().find(|(_, file)| !plain(file)) {
            let (tensor, file) = (tensor.clone(), file.clone());
            return Err(IndexError::FileName { tensor, file });
        }
        let mut files: Vec<_> = weight_map.values().cloned().collect();
        files.sort();
        files.dedup();
        if files.is_empty() || files.len() > FILES_MAX {
            return Err(IndexError::Files { found: files.len() });
        }
        Ok(Self { files, weight_map })
    }

    /// Checks that each tensor lies in the file that the index names; `stored[..].file` counts in
    /// [`ShardIndex::files`].
    ///
    /// # Errors
    /// [`IndexError::Misplaced`].
    pub fn check(&self, stored: &[StoredTensor]) -> Result<(), IndexError> {
        let holds: std::collections::HashSet<_> = stored
            .iter()
            .filter_map(|tensor| {
                Some((tensor.name.as_str(), self.files.get(tensor.file)?.as_str()))
            })
            .collect();
        for (tensor, file) in &self.weight_map {
            if !holds.contains(&(tensor.as_str(), file.as_str())) {
                let (tensor, file) = (tensor.clone(), file.clone());
                return Err(IndexError::Misplaced { tensor, file });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_in_the_folder() {
        for file in [
            "../x.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "x.bin",
        ] {
            let json = serde_json::json!({"weight_map": {"w": file}}).to_string();
            assert!(matches!(
                ShardIndex::parse(json.as_bytes()),
                Err(IndexError::FileName { .. })
            ));
        }
        let json =
            br#"{"weight_map":{"w":"b.safetensors","v":"a.safetensors","u":"b.safetensors"}}"#;
        assert_eq!(
            ShardIndex::parse(json).unwrap().files,
            ["a.safetensors", "b.safetensors"]
        );
        assert!(matches!(
            ShardIndex::parse(br#"{"weight_map":{}}"#),
            Err(IndexError::Files { found: 0 })
        ));
    }
}
