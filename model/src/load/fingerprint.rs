//! A number for "the same weights": two nodes compare it before they exchange pages.
//!
//! It covers the configuration, the order of rotary pairs, every tensor's name, type and shape,
//! and samples of every tensor's bytes: [`SAMPLES`] runs of [`SAMPLE_BYTES`] spread evenly, ends
//! included. That tells apart models, quantisations, fine-tunes and other conversions for some
//! megabytes of reading; it is no proof against someone who changes bytes between the samples.

use crate::config::ModelConfig;
use crate::weights::{RopeLayout, Weights};
use xxhash_rust::xxh3::Xxh3;

/// Runs sampled per tensor: 8 x 272 tensors x one 4 KiB page is below 9 MB for SmolLM2-135M.
const SAMPLES: usize = 8;
/// Bytes of a run.
const SAMPLE_BYTES: usize = 256;

pub(super) fn of(config: &ModelConfig, rope: RopeLayout, weights: &Weights) -> u64 {
    let mut hash = Xxh3::new();
    let sizes = [
        config.layers,
        config.hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        config.vocab,
        config.context,
        usize::from(config.tied_head),
        usize::from(config.qkv_bias),
        usize::from(rope == RopeLayout::Interleaved),
    ];
    hash.update(format!("kvserve model v1 {}", config.architecture).as_bytes());
    for size in sizes {
        hash.update(&(size as u64).to_le_bytes());
    }
    hash.update(&config.rope_theta.to_bits().to_le_bytes());
    hash.update(&config.rms_norm_eps.to_bits().to_le_bytes());
    for id in weights.ids() {
        let view = weights.tensor(id);
        let described = format!(
            "{} {} {} {}\n",
            view.name, view.kind, view.rows, view.columns
        );
        hash.update(described.as_bytes());
        for run in sampled_runs(view.bytes) {
            hash.update(run);
        }
    }
    hash.digest()
}

fn sampled_runs(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = bytes.len() <= SAMPLES * SAMPLE_BYTES;
    let (runs, length) = if whole {
        (1, bytes.len())
    } else {
        (SAMPLES, SAMPLE_BYTES)
    };
    let last_start = bytes.len() - length;
    (0..runs).map(move |run| {
        let start = (last_start as u128 * run as u128 / (runs.max(2) - 1) as u128) as usize;
        &bytes[start..start + length]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_reach_both_ends_and_never_leave() {
        for length in [0, 1, 2048, 2049, 100_000] {
            let bytes: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let runs: Vec<_> = sampled_runs(&bytes).collect();
            assert_eq!(runs[0].as_ptr(), bytes.as_ptr());
            let last = runs[runs.len() - 1];
            assert_eq!(
                last.as_ptr() as usize + last.len(),
                bytes.as_ptr() as usize + length
            );
        }
    }
}
