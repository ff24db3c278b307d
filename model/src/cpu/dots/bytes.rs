//! Products of digits with `Q4` and `Q8` weights.
//!
//! Weights stay packed: 64 bytes are four inputs of sixteen outputs (eight of them for `Q4`, taken
//! apart by a mask and a shift), and one `vpdpbusd` multiplies them by four digits of a row and
//! adds. Sums of high and low digits run side by side over a block, are joined to one whole
//! number, and enter the f32 sum by the block's scales:
//!
//! `sum = fma(fma-free: (256 * high + low) * x.scale, w.scale, sum)`, then for `Q4`
//! `sum = fma(w.minimum, x.scaled_sum, sum)`.
//!
//! Per block of 32 inputs, 16 outputs and one row: 16 dot products and 3 or 2 f32 operations on
//! the two multiplying pipes for 512 products, against 32 in f32.
#![allow(
    clippy::needless_range_loop,
    reason = "rows and groups of a register block are indices of several arrays"
)]

use super::super::lanes::SumMode;
use super::super::matrix::{GROUP, Q4_BLOCK_BYTES, Q8_BLOCK_BYTES, QUAD, SCALES_BYTES};
use super::digits::{DIGITS_BYTES, DigitInput, Digits, Header};
use std::arch::x86_64::*;

/// Rows of the largest register block: 4 rows x 2 groups x (high, low, f32 sum) are 24 of 32
/// registers, weights 4, broadcasts.
pub(crate) const TILE_ROWS: usize = 4;
/// Groups of a register block of several rows, and of a single one.
pub(crate) const TILE_GROUPS: usize = 2;
pub(crate) const SINGLE_ROW_GROUPS: usize = 4;

/// Rows times some neighbouring groups of one quad.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// First byte of the first group.
    pub weights: *const u8,
    /// `Q4` or else `Q8`.
    pub q4: bool,
    /// Blocks of 32 inputs.
    pub blocks: usize,
    /// Row 0.
    pub x: DigitInput,
    /// Row 0 of the first group's outputs.
    pub out: *mut f32,
    pub out_stride: usize,
    pub mode: SumMode,
}

/// Computes `rows` x `groups`, at most [`TILE_ROWS`] x [`TILE_GROUPS`] or 1 x
/// [`SINGLE_ROW_GROUPS`].
///
/// # Safety
/// Weights, activations and results have these shapes, results are this thread's alone; the
/// processor has AVX-512 F, BW, VL and VNNI.
pub(crate) unsafe fn multiply(product: &Product, rows: usize, groups: usize) {
    debug_assert!(product.mode != SumMode::Chain);
    // SAFETY: passed on.
    unsafe {
        match (product.x.count, product.q4) {
            (Digits::Two, true) => by_shape::<true, true>(product, rows, groups),
            (Digits::Two, false) => by_shape::<false, true>(product, rows, groups),
            (Digits::One, true) => by_shape::<true, false>(product, rows, groups),
            (Digits::One, false) => by_shape::<false, false>(product, rows, groups),
        }
    }
}

/// # Safety
/// As [`multiply`].
unsafe fn by_shape<const Q4: bool, const TWO: bool>(product: &Product, rows: usize, groups: usize) {
    // SAFETY: passed on.
    unsafe {
        match (rows, groups) {
            (1, 1) => tile::<1, 1, Q4, TWO>(product),
            (1, 2) => tile::<1, 2, Q4, TWO>(product),
            (1, 4) => tile::<1, 4, Q4, TWO>(product),
            (2, 1) => tile::<2, 1, Q4, TWO>(product),
            (2, 2) => tile::<2, 2, Q4, TWO>(product),
            (3, 1) => tile::<3, 1, Q4, TWO>(product),
            (3, 2) => tile::<3, 2, Q4, TWO>(product),
            (4, 1) => tile::<4, 1, Q4, TWO>(product),
            (4, 2) => tile::<4, 2, Q4, TWO>(product),
            (_, _) => unreachable!("a register block of {rows} rows and {groups} groups"),
        }
    }
}

/// Dot products of one block, not yet scaled.
struct Sums<const R: usize, const G: usize> {
    high: [[__m512i; G]; R],
    low: [[__m512i; G]; R],
}

/// Adds the products of four inputs: `weights` of each group by the digits at byte `at`.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn four_inputs<const R: usize, const G: usize, const TWO: bool>(
    sums: &mut Sums<R, G>,
    weights: [__m512i; G],
    x: [*const u8; R],
    at: usize,
) {
    for r in 0..R {
        // SAFETY: within the block's digits.
        unsafe {
            let high = _mm512_set1_epi32(x[r].add(at).cast::<i32>().read_unaligned());
            for g in 0..G {
                sums.high[r][g] = _mm512_dpbusd_epi32(sums.high[r][g], weights[g], high);
            }
            if TWO {
                let low = x[r].add(DIGITS_BYTES / 2 + at);
                let low = _mm512_set1_epi32(low.cast::<i32>().read_unaligned());
                for g in 0..G {
                    sums.low[r][g] = _mm512_dpbusd_epi32(sums.low[r][g], weights[g], low);
                }
            }
        }
    }
}

/// # Safety
/// As [`multiply`], for `R` rows and `G` groups.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tile<const R: usize, const G: usize, const Q4: bool, const TWO: bool>(p: &Product) {
    let block_bytes = if Q4 { Q4_BLOCK_BYTES } else { Q8_BLOCK_BYTES };
    let zero = _mm512_setzero_si512();
    let nibble = _mm512_set1_epi8(15);
    let mut results = [[_mm512_setzero_ps(); G]; R];
    // SAFETY: weights, digits, headers and results lie where `Product` says, by its caller's word.
    unsafe {
        for block in 0..p.blocks {
            let mut at = [p.weights; G];
            for (g, at) in at.iter_mut().enumerate() {
                *at = p.weights.add((block * QUAD + g) * block_bytes);
            }
            let mut x = [p.x.digits; R];
            for (r, x) in x.iter_mut().enumerate() {
                *x = p.x.digits.add((r * p.x.stride + block) * DIGITS_BYTES);
            }
            let mut sums = Sums::<R, G> {
                high: [[zero; G]; R],
                low: [[zero; G]; R],
            };
            if Q4 {
                for t in 0..4 {
                    let mut even = [zero; G];
                    let mut odd = [zero; G];
                    for g in 0..G {
                        let words = at[g].add(2 * SCALES_BYTES + t * 64);
                        let words = _mm512_loadu_si512(words.cast());
                        even[g] = _mm512_and_si512(words, nibble);
                        odd[g] = _mm512_and_si512(_mm512_srli_epi16::<4>(words), nibble);
                    }
                    four_inputs::<R, G, TWO>(&mut sums, even, x, t * 8);
                    four_inputs::<R, G, TWO>(&mut sums, odd, x, t * 8 + 4);
                }
            } else {
                for t in 0..8 {
                    let mut words = [zero; G];
                    for g in 0..G {
                        words[g] = _mm512_loadu_si512(at[g].add(SCALES_BYTES + t * 64).cast());
                    }
                    four_inputs::<R, G, TWO>(&mut sums, words, x, t * 4);
                }
            }
            let mut scale = [_mm512_setzero_ps(); G];
            let mut minimum = [_mm512_setzero_ps(); G];
            for g in 0..G {
                scale[g] = _mm512_cvtph_ps(_mm256_loadu_si256(at[g].cast()));
                if Q4 {
                    let halves = _mm256_loadu_si256(at[g].add(SCALES_BYTES).cast());
                    minimum[g] = _mm512_cvtph_ps(halves);
                }
            }
            for r in 0..R {
                let header: *const Header = p.x.headers.add(r * p.x.stride + block);
                let x_scale = _mm512_set1_ps((*header).scale);
                for g in 0..G {
                    let mut whole = sums.high[r][g];
                    if TWO {
                        whole = _mm512_add_epi32(_mm512_slli_epi32::<8>(whole), sums.low[r][g]);
                    }
                    if !Q4 {
                        whole = _mm512_sub_epi32(whole, _mm512_set1_epi32((*header).offset));
                    }
                    let value = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), x_scale);
                    results[r][g] = _mm512_fmadd_ps(value, scale[g], results[r][g]);
                    if Q4 {
                        let sum = _mm512_set1_ps((*header).scaled_sum);
                        results[r][g] = _mm512_fmadd_ps(minimum[g], sum, results[r][g]);
                    }
                }
            }
        }
        for r in 0..R {
            for g in 0..G {
                let to = p.out.add(r * p.out_stride + g * GROUP);
                let value = match p.mode {
                    SumMode::Store | SumMode::Chain => results[r][g],
                    SumMode::Add => _mm512_add_ps(_mm512_loadu_ps(to), results[r][g]),
                };
                _mm512_storeu_ps(to, value);
            }
        }
    }
}
