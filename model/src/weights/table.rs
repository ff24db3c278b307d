//! Which tensors a model has: found by name, checked against the configuration, then reached by
//! [`TensorId`] without any way to fail.

use super::map::MappedFile;
use super::tensor::{TensorType, TensorView};
use crate::config::ModelConfig;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

/// A tensor of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// `[vocab][hidden]`
    Embedding,
    /// `[hidden]`
    OutputNorm,
    /// `[vocab][hidden]`; the embedding itself when tied.
    Head,
    /// One of layer `.0`.
    Layer(usize, LayerTensor),
}

/// A tensor of a layer. Shapes are `[rows][columns]` = `[outputs][inputs]`; `q` = heads x
/// head_dim, `kv` = kv_heads x head_dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerTensor {
    /// `[hidden]`
    AttentionNorm,
    /// `[q][hidden]`
    Query,
    /// `[kv][hidden]`
    Key,
    /// `[kv][hidden]`
    Value,
    /// `[q]`, only with `qkv_bias`
    QueryBias,
    /// `[kv]`, only with `qkv_bias`
    KeyBias,
    /// `[kv]`, only with `qkv_bias`
    ValueBias,
    /// `[hidden][q]`
    AttentionOutput,
    /// `[hidden]`
    FeedForwardNorm,
    /// `[ffn][hidden]`
    Gate,
    /// `[ffn][hidden]`
    Up,
    /// `[hidden][ffn]`
    Down,
}

impl LayerTensor {
    /// All of them.
    pub const ALL: [LayerTensor; 12] = [
        LayerTensor::AttentionNorm,
        LayerTensor::Query,
        LayerTensor::Key,
        LayerTensor::Value,
        LayerTensor::QueryBias,
        LayerTensor::KeyBias,
        LayerTensor::ValueBias,
        LayerTensor::AttentionOutput,
        LayerTensor::FeedForwardNorm,
        LayerTensor::Gate,
        LayerTensor::Up,
        LayerTensor::Down,
    ];

    /// Exists only in a model with biases on query, key and value.
    pub fn is_bias(self) -> bool {
        matches!(
            self,
            LayerTensor::QueryBias | LayerTensor::KeyBias | LayerTensor::ValueBias
        )
    }
}

/// How the rows of query and key are ordered within a head, hence which elements rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Pairs `(i, i + head_dim / 2)`: HF folders, Qwen2 GGUFs.
    Halves,
    /// Pairs `(2i, 2i + 1)`: llama-arch GGUFs store the rows of q and k permuted for it.
    Interleaved,
}

/// The two conventions for tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    Hf,
}

impl Naming {
    /// The name of a tensor.
    pub fn name(self, id: TensorId) -> String {
        match (self, id) {
            (Naming::Gguf, TensorId::Embedding) => "token_embd.weight".into(),
            (Naming::Gguf, TensorId::OutputNorm) => "output_norm.weight".into(),
            (Naming::Gguf, TensorId::Head) => "output.weight".into(),
            (Naming::Gguf, TensorId::Layer(layer, tensor)) => {
                format!("blk.{layer}.{}", gguf_suffix(tensor))
            }
            (Naming::Hf, TensorId::Embedding) => "model.embed_tokens.weight".into(),
            (Naming::Hf, TensorId::OutputNorm) => "model.norm.weight".into(),
            (Naming::Hf, TensorId::Head) => "lm_head.weight".into(),
            (Naming::Hf, TensorId::Layer(layer, tensor)) => {
                format!("model.layers.{layer}.{}", hf_suffix(tensor))
            }
        }
    }
}

fn gguf_suffix(tensor: LayerTensor) -> &'static str {
    match tensor {
        LayerTensor::AttentionNorm => "attn_norm.weight",
        LayerTensor::Query => "attn_q.weight",
        LayerTensor::Key => "attn_k.weight",
        LayerTensor::Value => "attn_v.weight",
        LayerTensor::QueryBias => "attn_q.bias",
        LayerTensor::KeyBias => "attn_k.bias",
        LayerTensor::ValueBias => "attn_v.bias",
        LayerTensor::AttentionOutput => "attn_output.weight",
        LayerTensor::FeedForwardNorm => "ffn_norm.weight",
        LayerTensor::Gate => "ffn_gate.weight",
        LayerTensor::Up => "ffn_up.weight",
        LayerTensor::Down => "ffn_down.weight",
    }
}

fn hf_suffix(tensor: LayerTensor) -> &'static str {
    match tensor {
        LayerTensor::AttentionNorm => "input_layernorm.weight",
        LayerTensor::Query => "self_attn.q_proj.weight",
        LayerTensor::Key => "self_attn.k_proj.weight",
        LayerTensor::Value => "self_attn.v_proj.weight",
        LayerTensor::QueryBias => "self_attn.q_proj.bias",
        LayerTensor::KeyBias => "self_attn.k_proj.bias",
        LayerTensor::ValueBias => "self_attn.v_proj.bias",
        LayerTensor::AttentionOutput => "self_attn.o_proj.weight",
        LayerTensor::FeedForwardNorm => "post_attention_layernorm.weight",
        LayerTensor::Gate => "mlp.gate_proj.weight",
        LayerTensor::Up => "mlp.up_proj.weight",
        LayerTensor::Down => "mlp.down_proj.weight",
    }
}

/// Rows and columns that a tensor must have; a vector is one row.
fn wanted_shape(config: &ModelConfig, id: TensorId) -> (usize, usize) {
    let (hidden, ffn) = (config.hidden, config.ffn);
    let query = config.heads * config.head_dim;
    let key = config.kv_heads * config.head_dim;
    match id {
        TensorId::Embedding | TensorId::Head => (config.vocab, hidden),
        TensorId::OutputNorm => (1, hidden),
        TensorId::Layer(_, tensor) => match tensor {
            LayerTensor::AttentionNorm | LayerTensor::FeedForwardNorm => (1, hidden),
            LayerTensor::Query => (query, hidden),
            LayerTensor::Key | LayerTensor::Value => (key, hidden),
            LayerTensor::QueryBias => (1, query),
            LayerTensor::KeyBias | LayerTensor::ValueBias => (1, key),
            LayerTensor::AttentionOutput => (hidden, query),
            LayerTensor::Gate | LayerTensor::Up => (ffn, hidden),
            LayerTensor::Down => (hidden, ffn),
        },
    }
}

/// A tensor as a file lists it, its place already checked to lie within the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Element type.
    pub kind: TensorType,
    /// Sizes, slowest first (`[rows, columns]` for a matrix).
    pub shape: Vec<usize>,
    /// Which of the files.
    pub file: usize,
    /// First byte in that file.
    pub start: usize,
    /// Bytes.
    pub length: usize,
}

/// What is wrong with a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    /// The model needs it and no file has it.
    Missing,
    /// Its shape is not what the configuration asks for.
    Shape {
        /// Slowest first.
        found: Vec<usize>,
        /// Slowest first.
        wanted: Vec<usize>,
    },
    /// A name the architecture has no use for: the file is of another kind of model.
    Unexpected,
    /// Two files have it.
    Duplicate,
    /// Its row is no whole number of blocks, or its bytes are not those of its shape.
    Size {
        /// Bytes that the file gives it.
        found: usize,
        /// Sizes, slowest first.
        shape: Vec<usize>,
        /// Element type.
        kind: TensorType,
    },
}

/// A tensor that keeps a model from loading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorError {
    /// Its name.
    pub name: String,
    /// The file it lies in, when one does.
    pub path: Option<PathBuf>,
    /// What is wrong.
    pub problem: TensorProblem,
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor \"{}\"", self.name)?;
        if let Some(path) = &self.path {
            write!(f, " in {}", path.display())?;
        }
        match &self.problem {
            TensorProblem::Missing => write!(f, " is missing from the file"),
            TensorProblem::Shape { found, wanted } => {
                write!(
                    f,
                    " has shape {found:?}, the configuration asks for {wanted:?}"
                )
            }
            TensorProblem::Unexpected => {
                write!(
                    f,
                    " is not part of this architecture; computing without it would be wrong"
                )
            }
            TensorProblem::Duplicate => write!(f, " is there twice"),
            TensorProblem::Size { found, shape, kind } => {
                write!(
                    f,
                    " has {found} bytes, which is not the size of {kind} {shape:?}"
                )
            }
        }
    }
}

impl std::error::Error for TensorError {}

#[derive(Debug)]
struct Entry {
    name: String,
    kind: TensorType,
    rows: usize,
    columns: usize,
    file: usize,
    start: usize,
    length: usize,
}

/// All tensors of a model, owning the maps of their files.
#[derive(Debug)]
pub struct Weights {
    files: Vec<MappedFile>,
    embedding: Entry,
    output_norm: Entry,
    head: Option<Entry>,
    layers: Vec<[Option<Entry>; LayerTensor::ALL.len()]>,
}

impl Weights {
    /// Finds and checks every tensor that `config` asks for. Tensors of a file that the
    /// architecture does not know are refused, but for the few that carry no weights of their
    /// own (rotary tables that follow from the configuration, a second copy of a tied head).
    ///
    /// # Errors
    /// [`TensorError`] for the first tensor that is missing, doubled, misshapen or unknown.
    pub fn assemble(
        files: Vec<MappedFile>,
        stored: Vec<StoredTensor>,
        naming: Naming,
        config: &ModelConfig,
    ) -> Result<Self, TensorError> {
        let mut by_name = HashMap::with_capacity(stored.len());
        for tensor in stored {
            let path = Some(files[tensor.file].path().to_owned());
            if let Some(twice) = by_name.insert(tensor.name.clone(), tensor) {
                let problem = TensorProblem::Duplicate;
                return Err(TensorError {
                    name: twice.name,
                    path,
                    problem,
                });
            }
        }
        let mut take = |id| take_checked(&mut by_name, &files, naming, config, id);
        let embedding = take(TensorId::Embedding)?;
        let output_norm = take(TensorId::OutputNorm)?;
        let head = if config.tied_head {
            None
        } else {
            Some(take(TensorId::Head)?)
        };
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let mut tensors = [const { None }; LayerTensor::ALL.len()];
            for tensor in LayerTensor::ALL {
                if config.qkv_bias || !tensor.is_bias() {
                    tensors[tensor as usize] = Some(take(TensorId::Layer(layer, tensor))?);
                }
            }
            layers.push(tensors);
        }
        if config.tied_head {
            by_name.remove(&naming.name(TensorId::Head));
        }
        let mut unknown: Vec<_> = by_name
            .into_values()
            .filter(|t| !is_derived(&t.name))
            .collect();
        unknown.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(tensor) = unknown.into_iter().next() {
            let path = Some(files[tensor.file].path().to_owned());
            return Err(TensorError {
                name: tensor.name,
                path,
                problem: TensorProblem::Unexpected,
            });
        }
        Ok(Self {
            files,
            embedding,
            output_norm,
            head,
            layers,
        })
    }

    /// A tensor of the model.
    ///
    /// # Panics
    /// If the model has no such tensor: a layer beyond `config.layers`, or a bias where
    /// `config.qkv_bias` is false. See [`Weights::get`].
    pub fn tensor(&self, id: TensorId) -> TensorView<'_> {
        self.get(id)
            .unwrap_or_else(|| panic!("this model has no tensor {id:?}"))
    }

    /// A tensor, or `None` where the model has none of that kind.
    pub fn get(&self, id: TensorId) -> Option<TensorView<'_>> {
        let entry = match id {
            TensorId::Embedding => &self.embedding,
            TensorId::OutputNorm => &self.output_norm,
            TensorId::Head => self.head.as_ref().unwrap_or(&self.embedding),
            TensorId::Layer(layer, tensor) => self.layers.get(layer)?[tensor as usize].as_ref()?,
        };
        Some(TensorView {
            name: &entry.name,
            kind: entry.kind,
            rows: entry.rows,
            columns: entry.columns,
            bytes: &self.files[entry.file].bytes()[entry.start..entry.start + entry.length],
        })
    }

    /// Every tensor in a fixed order: embedding, output norm, head (if not tied), then the layers.
    pub fn ids(&self) -> impl Iterator<Item = TensorId> + '_ {
        let head = self.head.as_ref().map(|_| TensorId::Head);
        let layers = (0..self.layers.len())
            .flat_map(|layer| LayerTensor::ALL.map(|tensor| TensorId::Layer(layer, tensor)));
        [TensorId::Embedding, TensorId::OutputNorm]
            .into_iter()
            .chain(head)
            .chain(layers.filter(|id| self.get(*id).is_some()))
    }

    /// Bytes of all tensors, as stored.
    pub fn bytes(&self) -> u64 {
        self.ids()
            .filter_map(|id| self.get(id))
            .map(|view| view.bytes.len() as u64)
            .sum()
    }

    /// The mapped files.
    pub fn files(&self) -> &[MappedFile] {
        &self.files
    }
}

/// Tensors that old checkpoints carry though they follow from the configuration.
fn is_derived(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

fn take_checked(
    by_name: &mut HashMap<String, StoredTensor>,
    files: &[MappedFile],
    naming: Naming,
    config: &ModelConfig,
    id: TensorId,
) -> Result<Entry, TensorError> {
    let name = naming.name(id);
    let Some(stored) = by_name.remove(&name) else {
        return Err(TensorError {
            name,
            path: None,
            problem: TensorProblem::Missing,
        });
    };
    let path = || Some(files[stored.file].path().to_owned());
    let (rows, columns) = wanted_shape(config, id);
    let vector = rows == 1 && stored.shape == [columns];
    if !vector && stored.shape != [rows, columns] {
        let wanted = if rows == 1 {
            vec![columns]
        } else {
            vec![rows, columns]
        };
        let problem = TensorProblem::Shape {
            found: stored.shape.clone(),
            wanted,
        };
        return Err(TensorError {
            name,
            path: path(),
            problem,
        });
    }
    let size = stored
        .kind
        .row_bytes(columns)
        .and_then(|row| row.checked_mul(rows));
    let within = stored
        .start
        .checked_add(stored.length)
        .is_some_and(|end| end <= files[stored.file].bytes().len());
    if size != Some(stored.length) || !within {
        let problem = TensorProblem::Size {
            found: stored.length,
            shape: stored.shape.clone(),
            kind: stored.kind,
        };
        return Err(TensorError {
            name,
            path: path(),
            problem,
        });
    }
    Ok(Entry {
        name,
        kind: stored.kind,
        rows,
        columns,
        file: stored.file,
        start: stored.start,
        length: stored.length,
    })
}
