//! Attention over pages in bfloat16: as [`super::super::attention`], whose blocks, spans and order
//! it keeps, with scores and results by dot products of pairs.
//!
//! Keys of a block are turned to `[dimension / 2][token]` words, values to `[token / 2][dimension]`
//! words; queries and softmax weights become sums of two bfloat16. Every row takes all
//! that the tile has loaded of a block: the weights of tokens behind it are zero, which adds zeroes
//! to its sums.

use super::super::aligned::Aligned;
use super::super::attention::{BLOCK_TOKENS, SPAN_TOKENS, Spans, Tile, tile_rows};
use super::super::elementwise::SoftmaxBlock;
use super::super::lanes::{Lanes, SumMode};
use super::super::lanes_avx512::Avx512;
use super::super::paged_kv::{PagedKv, Plane};
use super::brain::{Product, multiply};
use super::pairs::split_row;
use kvserve_kv::layout::KeyOrValue;
use std::arch::x86_64::*;

/// A query or softmax weight is the sum of so many bfloat16: one alone would add half of the error
/// that keys and values in bfloat16 have already.
const PARTS: usize = 2;

/// A thread's scratch.
pub(crate) struct Scratch {
    /// A head's elements, rounded up to whole vectors of pairs.
    padded_dim: usize,
    /// Rows as they lie in the pages, `[token][padded_dim / 2]` words.
    rows: Aligned<u32>,
    /// `[padded_dim / 2][token]` words.
    keys: Aligned<u32>,
    /// `[token / 2][padded_dim]` words.
    values: Aligned<u32>,
    /// `[part][vector][padded_dim / 2]` words.
    queries: [Aligned<u32>; PARTS],
    /// One query, scaled, before it is rounded.
    query: Aligned<f32>,
    /// `[vector][token]`
    scores: Aligned<f32>,
    /// `[part][vector][token / 2]` words.
    weights: [Aligned<u32>; PARTS],
    pub spans: Spans,
}

impl Scratch {
    pub fn new(head_dim: usize, group: usize) -> Self {
        let padded_dim = head_dim.next_multiple_of(32);
        let vectors = tile_rows(group) * group;
        Scratch {
            padded_dim,
            rows: Aligned::zeroed(BLOCK_TOKENS * padded_dim / 2),
            keys: Aligned::zeroed(padded_dim / 2 * BLOCK_TOKENS),
            values: Aligned::zeroed(BLOCK_TOKENS / 2 * padded_dim),
            queries: [(); PARTS].map(|()| Aligned::zeroed(vectors * padded_dim / 2)),
            query: Aligned::zeroed(padded_dim),
            scores: Aligned::zeroed(vectors * BLOCK_TOKENS),
            weights: [(); PARTS].map(|()| Aligned::zeroed(vectors * BLOCK_TOKENS / 2)),
            spans: Spans::new(head_dim, padded_dim, vectors),
        }
    }
}

/// Computes a tile.
///
/// # Safety
/// As [`super::super::attention::attend`]; the processor has AVX-512 F and BF16, the pool holds
/// bfloat16.
pub(crate) unsafe fn attend(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch) {
    let end = tile.position + tile.rows;
    prefetch(kv, tile, 0);
    // SAFETY: passed on.
    unsafe {
        prepare(kv, tile, scratch);
        scratch.spans.begin(tile);
        for span_start in (0..end).step_by(SPAN_TOKENS) {
            span(kv, tile, scratch, span_start);
            scratch.spans.fold::<Avx512>();
        }
        scratch.spans.finish(tile);
    }
}

/// Rounds the tile's queries.
///
/// # Safety
/// As [`attend`].
pub(crate) unsafe fn prepare(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch) {
    let dim = kv.layout().head_dim;
    let scale = 1.0 / (dim as f32).sqrt();
    let words = scratch.padded_dim / 2;
    let vectors = tile.rows * tile.group;
    assert!(vectors * words <= scratch.queries[0].len());
    for vector in 0..vectors {
        let (row, head) = (vector / tile.group, vector % tile.group);
        // SAFETY: a head of a row of the tile; the scratch is sized for these vectors.
        unsafe {
            let from = std::slice::from_raw_parts(
                tile.query.add(row * tile.query_stride + head * dim),
                dim,
            );
            for (to, from) in scratch.query.as_mut_slice().iter_mut().zip(from) {
                *to = from * scale;
            }
            let [first, second] = &scratch.queries;
            let to = [first, second].map(|part| part.as_ptr().add(vector * words));
            split_row(scratch.query.as_ptr(), scratch.padded_dim, to);
        }
    }
}

/// One span of a prepared tile, into `scratch.spans`.
///
/// # Safety
/// As [`attend`].
pub(crate) unsafe fn span(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch, start: usize) {
    scratch.spans.begin_span();
    let end = (tile.position + tile.rows).min(start + SPAN_TOKENS);
    for block_start in (start..end).step_by(BLOCK_TOKENS) {
        // SAFETY: passed on.
        unsafe { block(kv, tile, scratch, block_start) };
    }
}

/// Asks for keys and values of the block from `start` on: the planes of a page are 2 KiB here and
/// there, too short for the processor to see a stream in them.
fn prefetch(kv: &PagedKv, tile: &Tile<'_>, start: usize) {
    let tokens = (tile.position + tile.rows - start).min(BLOCK_TOKENS);
    for part in [KeyOrValue::Key, KeyOrValue::Value] {
        let plane = Plane {
            layer: tile.layer,
            part,
            head: tile.kv_head,
        };
        kv.for_runs(tile.pages, plane, start, tokens, |run, bytes| {
            for line in (0..bytes).step_by(64) {
                // SAFETY: a prefetch touches nothing.
                unsafe { Avx512::prefetch(run.wrapping_add(line)) };
            }
        });
    }
}

/// One block for all vectors that reach it.
///
/// # Safety
/// As [`attend`].
unsafe fn block(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch, start: usize) {
    let (padded, group) = (scratch.padded_dim, tile.group);
    let words = padded / 2;
    let last = tile.position + tile.rows - 1;
    let loaded = (last + 1 - start).min(BLOCK_TOKENS);
    // Groups of sixteen tokens, and pairs of tokens.
    let (groups, pairs) = (loaded.div_ceil(16), loaded.div_ceil(2));
    // Rows before this one end before the block.
    let first_row = start.saturating_sub(tile.position);
    let vectors = first_row * group..tile.rows * group;
    let plane = |part| Plane {
        layer: tile.layer,
        part,
        head: tile.kv_head,
    };
    if start + BLOCK_TOKENS <= last {
        prefetch(kv, tile, start + BLOCK_TOKENS);
    }
    // SAFETY: all pointers lie in the scratch, whose buffers are sized for these shapes.
    unsafe {
        let rows = scratch.rows.as_mut_slice();
        kv.load_words(
            tile.pages,
            plane(KeyOrValue::Key),
            start,
            loaded,
            rows,
            words,
        );
        rows[loaded * words..groups * 16 * words].fill(0);
        turn_keys(scratch.rows.as_ptr(), scratch.keys.as_ptr(), words, groups);
        let scores = |part: &Aligned<u32>, mode| Product {
            x: part.as_ptr().add(vectors.start * words),
            x_stride: words,
            w: scratch.keys.as_ptr(),
            w_pair: BLOCK_TOKENS,
            w_group: 16,
            pairs: words,
            out: scratch.scores.as_ptr().add(vectors.start * BLOCK_TOKENS),
            out_stride: BLOCK_TOKENS,
            mode,
        };
        let [first, second] = &scratch.queries;
        multiply(&scores(second, SumMode::Store), vectors.len(), groups);
        multiply(&scores(first, SumMode::Chain), vectors.len(), groups);
        for vector in vectors.clone() {
            let scores = scratch.scores.as_ptr().add(vector * BLOCK_TOKENS);
            let (maximum, sum) = scratch.spans.span_state[vector];
            scratch.spans.span_state[vector] = Avx512::enter(SoftmaxBlock {
                scores,
                valid: (tile.position + vector / group + 1 - start).min(BLOCK_TOKENS),
                length: BLOCK_TOKENS,
                result: scratch.spans.span.as_ptr().add(vector * padded),
                result_length: padded,
                maximum,
                sum,
            });
            let [first, second] = &scratch.weights;
            let to = [first, second].map(|part| part.as_ptr().add(vector * BLOCK_TOKENS / 2));
            split_row(scores, BLOCK_TOKENS, to);
        }
        let rows = scratch.rows.as_mut_slice();
        kv.load_words(
            tile.pages,
            plane(KeyOrValue::Value),
            start,
            loaded,
            rows,
            words,
        );
        rows[loaded * words..2 * pairs * words].fill(0);
        pair_values(
            scratch.rows.as_ptr(),
            scratch.values.as_ptr(),
            padded,
            pairs,
        );
        let results = |part: &Aligned<u32>| Product {
            x: part.as_ptr().add(vectors.start * BLOCK_TOKENS / 2),
            x_stride: BLOCK_TOKENS / 2,
            w: scratch.values.as_ptr(),
            w_pair: padded,
            w_group: 16,
            pairs,
            out: scratch.spans.span.as_ptr().add(vectors.start * padded),
            out_stride: padded,
            mode: SumMode::Chain,
        };
        for part in &scratch.weights {
            multiply(&results(part), vectors.len(), padded / 16);
        }
    }
}

/// `[token][words]` to `[words][token]` for so many groups of sixteen tokens of a block; `words`
/// is a multiple of 16.
///
/// # Safety
/// Both buffers hold a block; AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn turn_keys(from: *const u32, to: *mut u32, words: usize, groups: usize) {
    for token in (0..groups * 16).step_by(16) {
        for word in (0..words).step_by(16) {
            // SAFETY: inside the block. A transpose moves bits, whatever they mean.
            unsafe {
                Avx512::transpose(
                    from.add(token * words + word).cast(),
                    words,
                    to.add(word * BLOCK_TOKENS + token).cast(),
                    BLOCK_TOKENS,
                );
            }
        }
    }
}

/// `[token][dimension]` halves to `[token / 2][dimension]` words: the even token's half is low.
///
/// # Safety
/// Both buffers hold a block of `padded` elements a row, a multiple of 16; AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn pair_values(from: *const u32, to: *mut u32, padded: usize, pairs: usize) {
    let from = from.cast::<u16>();
    for pair in 0..pairs {
        for dimension in (0..padded).step_by(16) {
            // SAFETY: inside the block.
            unsafe {
                let wide = |token: usize| {
                    let at = from.add(token * padded + dimension);
                    _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()))
                };
                let odd = _mm512_slli_epi32::<16>(wide(2 * pair + 1));
                let words = _mm512_or_si512(wide(2 * pair), odd);
                _mm512_storeu_si512(to.add(pair * padded + dimension).cast(), words);
            }
        }
    }
}
