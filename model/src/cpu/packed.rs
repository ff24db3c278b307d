//! All weights of a model in the form in which the kernels read them.

use super::aligned::Aligned;
use super::matrix::Matrix;
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
    /// Packs every tensor that `tensor` gives; their shapes are those of `config` (checked by
    /// [`crate::weights::Weights`] at load). Panics if one is missing or misshapen.
    pub fn pack<'a>(
        config: &ModelConfig,
        dtype: KvDtype,
        tensor: impl Fn(TensorId) -> TensorView<'a>,
    ) -> Self {
        let query = config.heads * config.head_dim;
        let key = config.kv_heads * config.head_dim;
        let matrix = |id, outputs: usize, inputs: usize| {
            let view = tensor(id);
            assert_eq!((view.rows, view.columns), (outputs, inputs), "{id:?}");
            Matrix::pack(&view, dtype)
        };
        let layer = |index| {
            let id = |part| TensorId::Layer(index, part);
            let biases = config.qkv_bias.then(|| {
                [
                    vector(&tensor(id(LayerTensor::QueryBias)), query),
                    vector(&tensor(id(LayerTensor::KeyBias)), key),
                    vector(&tensor(id(LayerTensor::ValueBias)), key),
                ]
            });
            let (hidden, ffn) = (config.hidden, config.ffn);
            Layer {
                attention_norm: norm(&tensor(id(LayerTensor::AttentionNorm)), hidden),
                query: matrix(id(LayerTensor::Query), query, hidden),
                key: matrix(id(LayerTensor::Key), key, hidden),
                value: matrix(id(LayerTensor::Value), key, hidden),
                biases,
                attention_output: matrix(id(LayerTensor::AttentionOutput), hidden, query),
                feed_forward_norm: norm(&tensor(id(LayerTensor::FeedForwardNorm)), hidden),
                gate: matrix(id(LayerTensor::Gate), ffn, hidden),
                up: matrix(id(LayerTensor::Up), ffn, hidden),
                down: matrix(id(LayerTensor::Down), hidden, ffn),
            }
        };
        let embedding = Arc::new(matrix(TensorId::Embedding, config.vocab, config.hidden));
        let head = if config.tied_head {
            Arc::clone(&embedding)
        } else {
            Arc::new(matrix(TensorId::Head, config.vocab, config.hidden))
        };
        PackedModel {
            embedding,
            layers: (0..config.layers).map(layer).collect(),
            output_norm: norm(&tensor(TensorId::OutputNorm), config.hidden),
            head,
            config: config.clone(),
        }
    }

    /// Bytes that a decode step streams: all matrices but an untied embedding.
    pub fn streamed_bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            [
                &layer.query,
                &layer.key,
                &layer.value,
                &layer.attention_output,
                &layer.gate,
                &layer.up,
                &layer.down,
            ]
            .map(Matrix::bytes)
            .iter()
            .sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
    }
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
