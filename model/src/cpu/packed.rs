//! All weights of a model in the form in which the kernels read them.

use super::aligned::Aligned;
use super::matrix::Matrix;
use super::phases::Phase;
use super::team::Team;
use crate::config::ModelConfig;
use crate::weights::{LayerTensor, TensorId, TensorView, dequantize_row};
use kvserve_kv::KvDtype;
use std::sync::Arc;

/// A transformer layer.
pub(crate) struct Layer {
    pub attention_norm: Aligned<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    /// Biases of query, key and value.
    pub biases: Option<[Vec<f32>; 3]>,
    pub attention_output: Matrix,
    pub feed_forward_norm: Aligned<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// A model, packed.
pub(crate) struct PackedModel {
    pub config: ModelConfig,
    pub embedding: Arc<Matrix>,
    pub layers: Vec<Layer>,
    pub output_norm: Aligned<f32>,
    /// The embedding itself when tied.
    pub head: Arc<Matrix>,
}

impl PackedModel {
    /// Packs every tensor that `tensor` gives, by all members of the team; their shapes are those
    /// of `config` (checked by [`crate::weights::Weights`] at load). Panics if one is missing or
    /// misshapen.
    pub fn pack<'a>(
        config: &ModelConfig,
        dtype: KvDtype,
        tensor: impl Fn(TensorId) -> TensorView<'a>,
        team: &mut Team,
    ) -> Self {
        let query = config.heads * config.head_dim;
        let key = config.kv_heads * config.head_dim;
        let (hidden, ffn) = (config.hidden, config.ffn);
        let mut parts = Vec::new();
        let mut total = 0;
        let mut part = |id, outputs: usize, inputs: usize| {
            let view = tensor(id);
            assert_eq!((view.rows, view.columns), (outputs, inputs), "{id:?}");
            parts.push((view, total));
            total += Matrix::packed_bytes(&view, dtype);
            parts.len() - 1
        };
        // In the order in which a step reads them.
        let embedding = part(TensorId::Embedding, config.vocab, hidden);
        let indices: Vec<[usize; 7]> = (0..config.layers)
            .map(|index| {
                let mut part =
                    |of, outputs, inputs| part(TensorId::Layer(index, of), outputs, inputs);
                [
                    part(LayerTensor::Query, query, hidden),
                    part(LayerTensor::Key, key, hidden),
                    part(LayerTensor::Value, key, hidden),
                    part(LayerTensor::AttentionOutput, hidden, query),
                    part(LayerTensor::Gate, ffn, hidden),
                    part(LayerTensor::Up, ffn, hidden),
                    part(LayerTensor::Down, hidden, ffn),
                ]
            })
            .collect();
        let head = if config.tied_head {
            embedding
        } else {
            part(TensorId::Head, config.vocab, hidden)
        };
        let mut matrices = pack_all(&parts, total, dtype, team);
        let mut take = |index: usize| matrices[index].take().expect("each matrix is taken once");
        let embedding = Arc::new(take(embedding));
        let layer = |(index, parts): (usize, [usize; 7])| {
            let id = |part| TensorId::Layer(index, part);
            let biases = config.qkv_bias.then(|| {
                [
                    vector(&tensor(id(LayerTensor::QueryBias)), query),
                    vector(&tensor(id(LayerTensor::KeyBias)), key),
                    vector(&tensor(id(LayerTensor::ValueBias)), key),
                ]
            });
            let [query, key, value, attention_output, gate, up, down] = parts.map(&mut take);
            Layer {
                attention_norm: norm(&tensor(id(LayerTensor::AttentionNorm)), hidden),
                query,
                key,
                value,
                biases,
                attention_output,
                feed_forward_norm: norm(&tensor(id(LayerTensor::FeedForwardNorm)), hidden),
                gate,
                up,
                down,
            }
        };
        let layers = indices.into_iter().enumerate().map(layer).collect();
        let head = if config.tied_head {
            Arc::clone(&embedding)
        } else {
            Arc::new(matrices[head].take().expect("each matrix is taken once"))
        };
        PackedModel {
            embedding,
            layers,
            output_norm: norm(&tensor(TensorId::OutputNorm), config.hidden),
            head,
            config: config.clone(),
        }
    }

    /// Bytes of the weights that a phase reads, and how many products a row needs with them.
    pub fn weights_of(&self, phase: Phase) -> (usize, usize) {
        let of_layers = |pick: fn(&Layer) -> Vec<&Matrix>| -> Vec<&Matrix> {
            self.layers.iter().flat_map(pick).collect()
        };
        let matrices = match phase {
            Phase::Embed | Phase::Attention | Phase::Sample => Vec::new(),
            Phase::QueryKeyValue => of_layers(|l| vec![&l.query, &l.key, &l.value]),
            Phase::AttentionOutput => of_layers(|l| vec![&l.attention_output]),
            Phase::GateUp => of_layers(|l| vec![&l.gate, &l.up]),
            Phase::Down => of_layers(|l| vec![&l.down]),
            Phase::Head => vec![&*self.head],
        };
        let bytes = matrices.iter().map(|m| m.bytes()).sum();
        let products = matrices.iter().map(|m| m.outputs * m.inputs).sum();
        (bytes, products)
    }

    /// Bytes that a decode step streams: all matrices but an untied embedding.
    pub fn streamed_bytes(&self) -> usize {
        let bytes = |phase: &Phase| self.weights_of(*phase).0;
        Phase::ALL.iter().map(bytes).sum()
    }
}

/// Groups that a member packs at a time, whole quads: some 100 KiB.
const PACK_GROUPS: usize = 16;

/// Packs tensors at their places in one arena, so that huge pages hold even small matrices.
fn pack_all(
    parts: &[(TensorView<'_>, usize)],
    total: usize,
    dtype: KvDtype,
    team: &mut Team,
) -> Vec<Option<Matrix>> {
    let arena = Arc::new(Aligned::zeroed(total));
    let place =
        |(view, start): &(TensorView<'_>, usize)| Matrix::place(view, dtype, &arena, *start);
    let matrices: Vec<Matrix> = parts.iter().map(place).collect();
    let mut units = Vec::new();
    for (index, matrix) in matrices.iter().enumerate() {
        let starts = (0..matrix.groups()).step_by(PACK_GROUPS);
        units.extend(starts.map(|start| (index, start)));
    }
    team.run(&|member| {
        while let Some(claimed) = member.claim(units.len(), 1) {
            for (index, start) in &units[claimed] {
                let end = matrices[*index].groups().min(start + PACK_GROUPS);
                // SAFETY: the units part the groups of all matrices; this one is ours.
                unsafe { matrices[*index].pack_groups(&parts[*index].0, *start..end) };
            }
        }
    });
    matrices.into_iter().map(Some).collect()
}

fn vector(view: &TensorView<'_>, length: usize) -> Vec<f32> {
    assert_eq!((view.rows, view.columns), (1, length), "{}", view.name);
    let mut out = vec![0.0; length];
    dequantize_row(view, 0, &mut out);
    out
}

/// A norm's weights, padded with zeroes to whole vectors.
fn norm(view: &TensorView<'_>, length: usize) -> Aligned<f32> {
    let mut padded = Aligned::zeroed(length.next_multiple_of(16));
    padded.as_mut_slice()[..length].copy_from_slice(&vector(view, length));
    padded
}
