//! Products of bfloat16 pairs: weights, and the scores and results of attention.
//!
//! One `vpdpbf16ps` multiplies two bfloat16 of sixteen columns by two of a row and adds both
//! products to an f32. Per pair of inputs, 16 outputs and one row: one instruction for 32
//! products, against two in f32.
#![allow(
    clippy::needless_range_loop,
    reason = "rows and groups of a register block are indices of several arrays"
)]

use super::super::lanes::SumMode;
use std::arch::x86_64::*;

/// Rows of the largest register block: 6 rows x 4 groups of sums, 4 registers of weights and a
/// broadcast are 29 of 32.
const TILE_ROWS: usize = 6;

/// Rows times columns. Columns come in groups of 16.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// Row 0, `[row][pair]`.
    pub x: *const u32,
    pub x_stride: usize,
    /// First group, `[pair][16 columns]`.
    pub w: *const u32,
    /// Words from one pair to the next.
    pub w_pair: usize,
    /// Words from one group to the next.
    pub w_group: usize,
    /// Pairs of inputs.
    pub pairs: usize,
    /// Row 0, first group.
    pub out: *mut f32,
    pub out_stride: usize,
    pub mode: SumMode,
}

/// Computes `rows` x `groups` of any number.
///
/// # Safety
/// Weights, activations and results have these shapes, results are this thread's alone; the
/// processor has AVX-512 F and BF16.
pub(crate) unsafe fn multiply(product: &Product, rows: usize, groups: usize) {
    let tiles = rows.div_ceil(TILE_ROWS);
    let mut group = 0;
    while group < groups {
        let count = match groups - group {
            0 | 1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        for tile in 0..tiles {
            // Tiles of nearly equal height: 8 rows as 4 + 4, not 6 + 2.
            let first = rows * tile / tiles;
            let height = rows * (tile + 1) / tiles - first;
            // SAFETY: a part of the caller's product.
            unsafe {
                let part = Product {
                    x: product.x.add(first * product.x_stride),
                    w: product.w.add(group * product.w_group),
                    out: product.out.add(first * product.out_stride + group * 16),
                    ..*product
                };
                by_shape(&part, height, count);
            }
        }
        group += count;
    }
}

/// # Safety
/// As [`multiply`], for at most 6 rows and 1, 2 or 4 groups.
unsafe fn by_shape(product: &Product, rows: usize, groups: usize) {
    macro_rules! shapes {
        ($($r:literal)*) => {
            match (rows, groups) {
                $(($r, 1) => tile::<$r, 1>(product),
                ($r, 2) => tile::<$r, 2>(product),
                ($r, 4) => tile::<$r, 4>(product),)*
                (_, _) => unreachable!("a register block of {rows} rows and {groups} groups"),
            }
        };
    }
    // SAFETY: passed on.
    unsafe { shapes!(1 2 3 4 5 6) }
}

/// # Safety
/// As [`multiply`], for `R` rows and `G` groups.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const R: usize, const G: usize>(p: &Product) {
    let mut sums = [[_mm512_setzero_ps(); G]; R];
    // SAFETY: weights, activations and results lie where `Product` says, by its caller's word.
    unsafe {
        if p.mode == SumMode::Chain {
            for r in 0..R {
                for g in 0..G {
                    sums[r][g] = _mm512_loadu_ps(p.out.add(r * p.out_stride + g * 16));
                }
            }
        }
        for pair in 0..p.pairs {
            let mut w = [_mm512_setzero_si512(); G];
            for g in 0..G {
                let at = p.w.add(pair * p.w_pair + g * p.w_group);
                w[g] = _mm512_loadu_si512(at.cast());
            }
            for r in 0..R {
                let word = (*p.x.add(r * p.x_stride + pair)).cast_signed();
                let x = bits(_mm512_set1_epi32(word));
                for g in 0..G {
                    sums[r][g] = _mm512_dpbf16_ps(sums[r][g], bits(w[g]), x);
                }
            }
        }
        for r in 0..R {
            for g in 0..G {
                let to = p.out.add(r * p.out_stride + g * 16);
                let value = match p.mode {
                    SumMode::Store | SumMode::Chain => sums[r][g],
                    SumMode::Add => _mm512_add_ps(_mm512_loadu_ps(to), sums[r][g]),
                };
                _mm512_storeu_ps(to, value);
            }
        }
    }
}

/// The same bits as bfloat16.
#[inline(always)]
fn bits(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { std::mem::transmute(words) }
}
