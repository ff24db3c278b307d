//! Attention over pages.

use super::{Check, Random, at_every_isa};
use crate::cpu::attention::{Scratch, Tile, attend, tile_rows};
use crate::cpu::lanes::Lanes;
use crate::cpu::paged_kv::{PagedKv, Plane};
use kvserve_kv::layout::KeyOrValue;
use kvserve_kv::{KvDtype, KvLayout, PageId, PoolMemory};
use std::sync::Arc;

struct Attention;

impl Check for Attention {
    fn check<S: Lanes>(&self) {
        for (head_dim, group, dtype) in [
            (64, 3, KvDtype::F32),
            (10, 1, KvDtype::F32),
            (32, 7, KvDtype::Bf16),
            (6, 50, KvDtype::F32),
        ] {
            let mut scratch = Scratch::new(head_dim, group);
            // SAFETY: the tile's buffers have its shape; `S` is there.
            let attend =
                |kv: &PagedKv, tile: &Tile<'_>| unsafe { attend::<S>(kv, tile, &mut scratch) };
            attention(head_dim, group, dtype, 1e-5, attend);
        }
    }
}

/// The same by bfloat16 pairs: queries and weights are rounded to 16 bits.
#[cfg(target_arch = "x86_64")]
pub(super) fn by_pairs(head_dim: usize, group: usize) {
    use crate::cpu::dots::attention as pairs;
    let mut scratch = pairs::Scratch::new(head_dim, group);
    // SAFETY: the tile's buffers have its shape; the caller has looked for the instructions.
    let attend = |kv: &PagedKv, tile: &Tile<'_>| unsafe { pairs::attend(kv, tile, &mut scratch) };
    attention(head_dim, group, KvDtype::Bf16, 2e-4, attend);
}

/// 700 tokens (over a span's border) of one key head; queries near block and span borders.
fn attention(
    head_dim: usize,
    group: usize,
    dtype: KvDtype,
    tolerance: f64,
    mut attend: impl FnMut(&PagedKv, &Tile<'_>),
) {
    const TOKENS: usize = 700;
    let layout = KvLayout {
        dtype,
        page_tokens: 16,
        layers: 1,
        kv_heads: 1,
        head_dim,
        kernel_class: "test".into(),
    };
    let pool = PoolMemory::memfd(TOKENS / 16 + 1, layout.page_bytes()).unwrap();
    let kv = PagedKv::new(Arc::new(pool), layout);
    let pages: Vec<PageId> = (0..TOKENS as u32 / 16 + 1).rev().map(PageId).collect();
    let plane = |part| Plane {
        layer: 0,
        part,
        head: 0,
    };
    let mut random = Random(8);
    for position in 0..TOKENS {
        for part in [KeyOrValue::Key, KeyOrValue::Value] {
            let row: Vec<f32> = random.floats(head_dim).iter().map(|x| x * 3.0).collect();
            kv.store(&pages, plane(part), position, &row);
        }
    }
    // What was stored, after rounding.
    let mut stored = [vec![0.0; TOKENS * head_dim], vec![0.0; TOKENS * head_dim]];
    kv.load(
        &pages,
        plane(KeyOrValue::Key),
        0,
        TOKENS,
        &mut stored[0],
        head_dim,
    );
    kv.load(
        &pages,
        plane(KeyOrValue::Value),
        0,
        TOKENS,
        &mut stored[1],
        head_dim,
    );

    let rows = tile_rows(group).min(20);
    let width = group * head_dim;
    for start in [0, 1, 50, 60, 100, 500, 511, TOKENS - rows] {
        let queries = random.floats(rows * width);
        let mut run = |first: usize, count: usize| {
            let mut out = vec![0.0f32; count * width];
            let tile = Tile {
                pages: &pages,
                layer: 0,
                kv_head: 0,
                group,
                position: start + first,
                rows: count,
                query: queries[first * width..].as_ptr(),
                query_stride: width,
                out: out.as_mut_ptr(),
                out_stride: width,
            };
            attend(&kv, &tile);
            out
        };
        let whole = run(0, rows);
        for row in 0..rows {
            let alone = run(row, 1);
            assert_eq!(
                alone,
                whole[row * width..(row + 1) * width],
                "row {row} at {start}"
            );
            for head in 0..group {
                let at = (row * group + head) * head_dim;
                let exact = exact(&queries[at..at + head_dim], &stored, start + row + 1);
                for (found, exact) in whole[at..].iter().zip(&exact) {
                    let error = (f64::from(*found) - exact).abs();
                    assert!(
                        error < tolerance,
                        "row {row} at {start}: {found} for {exact}"
                    );
                }
            }
        }
    }
}

fn exact(query: &[f32], [keys, values]: &[Vec<f32>; 2], tokens: usize) -> Vec<f64> {
    let dim = query.len();
    let dot = |key: &[f32]| -> f64 {
        query
            .iter()
            .zip(key)
            .map(|(q, k)| f64::from(*q) * f64::from(*k))
            .sum()
    };
    let scores: Vec<f64> = keys
        .chunks(dim)
        .take(tokens)
        .map(|k| dot(k) / (dim as f64).sqrt())
        .collect();
    let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - maximum).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..dim)
        .map(|d| {
            let column = values[d..].iter().step_by(dim);
            column
                .zip(&weights)
                .map(|(v, w)| f64::from(*v) * w)
                .sum::<f64>()
                / sum
        })
        .collect()
}

#[test]
fn attention_is_right_and_a_row_does_not_depend_on_its_tile() {
    at_every_isa(&Attention);
}
