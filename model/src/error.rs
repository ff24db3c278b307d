//! Why a model cannot be loaded.

use crate::chat_template::TemplateError;
use crate::config::ConfigError;
use crate::gguf::GgufError;
use crate::safetensors::{IndexError, SafetensorsError};
use crate::tokenizer::TokenizerError;
use crate::weights::TensorError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A model that cannot be loaded: which file, and what is wrong with it.
#[derive(Debug)]
pub struct LoadError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong.
    pub problem: LoadProblem,
}

/// What is wrong with a file of a model.
#[derive(Debug)]
pub enum LoadProblem {
    /// It cannot be opened, read or mapped.
    Io(io::Error),
    /// Neither a `.gguf` file nor a folder.
    NoModel,
    /// The folder has no `*.safetensors`.
    NoWeights,
    /// A text file larger than such a file is.
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
        /// The most.
        most: u64,
    },
    /// The GGUF is malformed.
    Gguf(GgufError),
    /// The safetensors file is malformed.
    Safetensors(SafetensorsError),
    /// The index of a sharded checkpoint is wrong.
    Index(IndexError),
    /// The configuration is wrong or not supported.
    Config(ConfigError),
    /// A tensor is missing or has the wrong shape.
    Tensor(TensorError),
    /// The tokenizer cannot be built.
    Tokenizer(TokenizerError),
    /// The chat template cannot be compiled.
    Template(TemplateError),
}

impl LoadError {
    pub(crate) fn new(path: &Path, problem: impl Into<LoadProblem>) -> Self {
        Self {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.problem {
            LoadProblem::Io(error) => error.fmt(f),
            LoadProblem::NoModel => write!(f, "neither a .gguf file nor a Hugging Face folder"),
            LoadProblem::NoWeights => write!(
                f,
                "no model.safetensors, index or *.safetensors in this folder (.bin files are not read)"
            ),
            LoadProblem::TooLarge { bytes, most } => {
                write!(f, "{bytes} bytes, at most {most} are read")
            }
            LoadProblem::Gguf(error) => error.fmt(f),
            LoadProblem::Safetensors(error) => error.fmt(f),
            LoadProblem::Index(error) => error.fmt(f),
            LoadProblem::Config(error) => error.fmt(f),
            LoadProblem::Tensor(error) => error.fmt(f),
            LoadProblem::Tokenizer(error) => error.fmt(f),
            LoadProblem::Template(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.problem {
            LoadProblem::Io(error) => Some(error),
            LoadProblem::Gguf(error) => Some(error),
            LoadProblem::Safetensors(error) => Some(error),
            LoadProblem::Index(error) => Some(error),
            LoadProblem::Config(error) => Some(error),
            LoadProblem::Tensor(error) => Some(error),
            LoadProblem::Tokenizer(error) => Some(error),
            LoadProblem::Template(error) => Some(error),
            LoadProblem::NoModel | LoadProblem::NoWeights | LoadProblem::TooLarge { .. } => None,
        }
    }
}

macro_rules! from_problem {
    ($($error:ty => $problem:ident),* $(,)?) => {
        $(impl From<$error> for LoadProblem {
            fn from(error: $error) -> Self {
                LoadProblem::$problem(error)
            }
        })*
    };
}

from_problem! {
    io::Error => Io,
    GgufError => Gguf,
    SafetensorsError => Safetensors,
    IndexError => Index,
    ConfigError => Config,
    TensorError => Tensor,
    TokenizerError => Tokenizer,
    TemplateError => Template,
}
