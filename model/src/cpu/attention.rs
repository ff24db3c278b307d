//! Causal attention of a tile of queries over paged keys and values.
//!
//! The positions 0, 1, 2, ... are cut at fixed absolute places: *blocks* of 64 run through one
//! online softmax, and each *span* of 512 starts a new one, whose result is then folded into what
//! came before. A query at position p thus always meets the same blocks in the same order,
//! whatever chunk, batch or thread it is computed in (PROTOCOL D1); spans are there so that later
//! a long sequence's spans can be computed by many threads without a change of bits.
//!
//! Queries of the `heads / kv_heads` heads that share a key head go together: vector
//! `row * group + head`. Keys of a block are transposed once into scratch, so that scores and
//! results both are products by [`super::matmul::Micro`].

use super::aligned::Aligned;
use super::elementwise::{SoftmaxBlock, exp};
use super::lanes::{Lanes, MicroArgs, Op, SumMode};
use super::paged_kv::{PagedKv, Plane};
use kvserve_kv::PageId;
use kvserve_kv::layout::KeyOrValue;

/// Tokens of a block: keys and values of one (64 x 64 floats each) stay in a 48 KiB L1.
pub(crate) const BLOCK_TOKENS: usize = 64;
/// Tokens of a span.
pub(crate) const SPAN_TOKENS: usize = 512;
/// Query vectors of a tile at most (unless one row has more heads): 4 full register blocks of 12.
const TILE_VECTORS: usize = 48;

/// Rows of a tile when `group` query heads share a key head.
pub(crate) fn tile_rows(group: usize) -> usize {
    (TILE_VECTORS / group).max(1)
}

/// Query rows of one sequence at consecutive positions, for one key head.
pub(crate) struct Tile<'a> {
    /// Page table of the sequence; covers all rows' positions.
    pub pages: &'a [PageId],
    pub layer: usize,
    pub kv_head: usize,
    /// Query heads per key head.
    pub group: usize,
    /// Position of row 0.
    pub position: usize,
    pub rows: usize,
    /// Row 0, first query head of the group: after rotation, `[row][head of group][head_dim]`.
    pub query: *const f32,
    pub query_stride: usize,
    /// Where results go, laid out as the queries.
    pub out: *mut f32,
    pub out_stride: usize,
}

/// A thread's scratch.
pub(crate) struct Scratch {
    head_dim: usize,
    padded_dim: usize,
    /// Rows as they lie in the pages, `[token][padded_dim]`, then values of the block.
    rows: Aligned<f32>,
    /// `[dimension][token]`
    keys: Aligned<f32>,
    /// `[vector][padded_dim]`
    queries: Aligned<f32>,
    /// `[vector][token]`
    scores: Aligned<f32>,
    spans: Spans,
}

/// Running maximum and sum of a vector that has met no token.
pub(crate) const NOTHING_YET: (f32, f32) = (f32::NEG_INFINITY, 0.0);

impl Scratch {
    pub fn new(head_dim: usize, group: usize) -> Self {
        let padded_dim = head_dim.next_multiple_of(16);
        let vectors = tile_rows(group) * group;
        Scratch {
            head_dim,
            padded_dim,
            rows: Aligned::zeroed(BLOCK_TOKENS * padded_dim),
            keys: Aligned::zeroed(padded_dim * BLOCK_TOKENS),
            queries: Aligned::zeroed(vectors * padded_dim),
            scores: Aligned::zeroed(vectors * BLOCK_TOKENS),
            spans: Spans::new(head_dim, padded_dim, vectors),
        }
    }
}

/// The present span's result of each vector of a tile, and that of all spans before.
pub(crate) struct Spans {
    head_dim: usize,
    padded_dim: usize,
    /// Vectors of the present tile.
    vectors: usize,
    /// `[vector][padded_dim]` of the present span.
    pub span: Aligned<f32>,
    /// Running maximum and sum of the present span.
    pub span_state: Vec<(f32, f32)>,
    /// `[vector][padded_dim]` of all spans before.
    total: Aligned<f32>,
    total_state: Vec<(f32, f32)>,
}

impl Spans {
    pub fn new(head_dim: usize, padded_dim: usize, vectors_max: usize) -> Self {
        Spans {
            head_dim,
            padded_dim,
            vectors: 0,
            span: Aligned::zeroed(vectors_max * padded_dim),
            total: Aligned::zeroed(vectors_max * padded_dim),
            span_state: vec![NOTHING_YET; vectors_max],
            total_state: vec![NOTHING_YET; vectors_max],
        }
    }

    /// Starts a tile.
    pub fn begin(&mut self, tile: &Tile<'_>) {
        self.vectors = tile.rows * tile.group;
        assert!(
            self.vectors <= self.span_state.len(),
            "a tile of {} rows",
            tile.rows
        );
        self.total_state[..self.vectors].fill(NOTHING_YET);
        self.total.as_mut_slice()[..self.vectors * self.padded_dim].fill(0.0);
    }

    /// Starts a span.
    pub fn begin_span(&mut self) {
        self.span_state[..self.vectors].fill(NOTHING_YET);
        self.span.as_mut_slice()[..self.vectors * self.padded_dim].fill(0.0);
    }

    /// Folds the present span into the total.
    ///
    /// # Safety
    /// The processor has `S`.
    pub unsafe fn fold<S: Lanes>(&mut self) {
        // SAFETY: passed on.
        unsafe { S::enter(Fold(self)) }
    }

    /// Writes the tile's results.
    ///
    /// # Safety
    /// The tile's results are this thread's alone.
    pub unsafe fn finish(&self, tile: &Tile<'_>) {
        let dim = self.head_dim;
        let results = self.total.as_slice().chunks_exact(self.padded_dim);
        for (vector, from) in results.take(self.vectors).enumerate() {
            let (row, head) = (vector / tile.group, vector % tile.group);
            // SAFETY: a head of a row of the tile, ours to write.
            let to = unsafe {
                std::slice::from_raw_parts_mut(
                    tile.out.add(row * tile.out_stride + head * dim),
                    dim,
                )
            };
            let sum = self.total_state[vector].1;
            for (to, from) in to.iter_mut().zip(from) {
                // Plus zero: whether a zero has a sign depends on how many zeroes were added.
                *to = from / sum + 0.0;
            }
        }
    }
}

/// Computes a tile.
///
/// # Safety
/// The tile's queries are readable and its results writable by this thread alone; nobody writes
/// keys or values of positions up to the last row's; the processor has `S`.
pub(crate) unsafe fn attend<S: Lanes>(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch) {
    assert_eq!(scratch.head_dim, kv.layout().head_dim);
    scratch.spans.begin(tile);
    // SAFETY: passed on; the scratch was sized for this head and as many vectors.
    unsafe {
        gather_queries(tile, scratch);
        let end = tile.position + tile.rows;
        for span_start in (0..end).step_by(SPAN_TOKENS) {
            scratch.spans.begin_span();
            let span_end = end.min(span_start + SPAN_TOKENS);
            for block_start in (span_start..span_end).step_by(BLOCK_TOKENS) {
                block::<S>(kv, tile, scratch, block_start);
            }
            scratch.spans.fold::<S>();
        }
        scratch.spans.finish(tile);
    }
}

/// # Safety
/// As [`attend`].
unsafe fn gather_queries(tile: &Tile<'_>, scratch: &mut Scratch) {
    let (dim, padded) = (scratch.head_dim, scratch.padded_dim);
    let scale = 1.0 / (dim as f32).sqrt();
    let queries = scratch.queries.as_mut_slice().chunks_exact_mut(padded);
    for (vector, to) in queries.take(tile.rows * tile.group).enumerate() {
        let (row, head) = (vector / tile.group, vector % tile.group);
        // SAFETY: a head of a row of the tile.
        let from = unsafe {
            std::slice::from_raw_parts(tile.query.add(row * tile.query_stride + head * dim), dim)
        };
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * scale;
        }
    }
}

/// One block for all vectors that reach it.
///
/// # Safety
/// As [`attend`].
unsafe fn block<S: Lanes>(kv: &PagedKv, tile: &Tile<'_>, scratch: &mut Scratch, start: usize) {
    let (dim, padded, group) = (scratch.head_dim, scratch.padded_dim, tile.group);
    let last = tile.position + tile.rows - 1;
    let loaded = (last + 1 - start).min(BLOCK_TOKENS);
    // Rows before this one end before the block; from `first_full` on a row covers all of it.
    let first_row = start.saturating_sub(tile.position);
    let first_full = (start + BLOCK_TOKENS - 1)
        .saturating_sub(tile.position)
        .clamp(first_row, tile.rows);
    let plane = |part| Plane {
        layer: tile.layer,
        part,
        head: tile.kv_head,
    };
    // SAFETY: all pointers lie in the scratch, whose buffers are sized for these shapes.
    unsafe {
        let rows = scratch.rows.as_mut_slice();
        kv.load(
            tile.pages,
            plane(KeyOrValue::Key),
            start,
            loaded,
            rows,
            padded,
        );
        rows[loaded * padded..].fill(0.0);
        S::enter(TransposeKeys {
            from: rows.as_ptr(),
            to: scratch.keys.as_ptr(),
            dim: padded,
        });
        let vectors = first_row * group..tile.rows * group;
        let scores = MicroArgs {
            x: scratch.queries.as_ptr().add(vectors.start * padded),
            x_stride: padded,
            w: scratch.keys.as_ptr(),
            w_stride: BLOCK_TOKENS,
            k: dim,
            out: scratch.scores.as_ptr().add(vectors.start * BLOCK_TOKENS),
            out_stride: BLOCK_TOKENS,
            mode: SumMode::Store,
        };
        product::<S>(scores, vectors.len(), loaded.div_ceil(16));
        for vector in vectors.clone() {
            let valid = (tile.position + vector / group + 1 - start).min(BLOCK_TOKENS);
            let (maximum, sum) = scratch.spans.span_state[vector];
            scratch.spans.span_state[vector] = S::enter(SoftmaxBlock {
                scores: scratch.scores.as_ptr().add(vector * BLOCK_TOKENS),
                valid,
                length: BLOCK_TOKENS,
                result: scratch.spans.span.as_ptr().add(vector * padded),
                result_length: padded,
                maximum,
                sum,
            });
        }
        let rows = scratch.rows.as_mut_slice();
        kv.load(
            tile.pages,
            plane(KeyOrValue::Value),
            start,
            loaded,
            rows,
            padded,
        );
        let values = |first_vector: usize, tokens: usize| MicroArgs {
            x: scratch.scores.as_ptr().add(first_vector * BLOCK_TOKENS),
            x_stride: BLOCK_TOKENS,
            w: scratch.rows.as_ptr(),
            w_stride: padded,
            k: tokens,
            out: scratch.spans.span.as_ptr().add(first_vector * padded),
            out_stride: padded,
            mode: SumMode::Chain,
        };
        // A row that ends inside the block adds its own tokens only.
        for row in first_row..first_full {
            let tokens = tile.position + row + 1 - start;
            product::<S>(values(row * group, tokens), group, padded / 16);
        }
        let full = (tile.rows - first_full) * group;
        product::<S>(values(first_full * group, BLOCK_TOKENS), full, padded / 16);
    }
}

/// A product of any number of rows and column groups by register blocks.
///
/// # Safety
/// As [`MicroArgs`] says, for `rows` and `groups`.
unsafe fn product<S: Lanes>(args: MicroArgs, rows: usize, groups: usize) {
    let blocks = rows.div_ceil(S::MICRO_ROWS);
    for group in (0..groups).step_by(S::MICRO_GROUPS) {
        let count = (groups - group).min(S::MICRO_GROUPS);
        for block in 0..blocks {
            let first = rows * block / blocks;
            let height = rows * (block + 1) / blocks - first;
            // SAFETY: a part of the caller's product.
            unsafe {
                let part = MicroArgs {
                    x: args.x.add(first * args.x_stride),
                    w: args.w.add(group * 16),
                    out: args.out.add(first * args.out_stride + group * 16),
                    ..args
                };
                S::micro(part, height, count);
            }
        }
    }
}

/// `[token][dim]` to `[dim][token]` for one block; `dim` is a multiple of 16.
struct TransposeKeys {
    from: *const f32,
    to: *mut f32,
    dim: usize,
}

impl Op for TransposeKeys {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for token in (0..BLOCK_TOKENS).step_by(16) {
            for d in (0..self.dim).step_by(16) {
                // SAFETY: both buffers hold `BLOCK_TOKENS * dim` floats.
                unsafe {
                    S::transpose(
                        self.from.add(token * self.dim + d),
                        self.dim,
                        self.to.add(d * BLOCK_TOKENS + token),
                        BLOCK_TOKENS,
                    );
                }
            }
        }
    }
}

/// Folds the present span into the total.
struct Fold<'a>(&'a mut Spans);

impl Op for Fold<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let padded = self.0.padded_dim;
        for vector in 0..self.0.vectors {
            let (span_maximum, span_sum) = self.0.span_state[vector];
            if span_maximum == f32::NEG_INFINITY {
                continue; // the vector's position lies before this span
            }
            let range = vector * padded..(vector + 1) * padded;
            let span = &self.0.span.as_slice()[range.clone()];
            let total = &mut self.0.total.as_mut_slice()[range];
            let (maximum, sum) = self.0.total_state[vector];
            if maximum == f32::NEG_INFINITY {
                total.copy_from_slice(span);
                self.0.total_state[vector] = (span_maximum, span_sum);
                continue;
            }
            let new = maximum.max(span_maximum);
            let mut fades = [0.0f32; 16];
            fades[0] = maximum - new;
            fades[1] = span_maximum - new;
            // SAFETY: sixteen floats, and rows of a multiple of 16.
            unsafe {
                S::store(fades.as_mut_ptr(), exp::<S>(S::load(fades.as_ptr())));
                let (old, add) = (S::splat(fades[0]), S::splat(fades[1]));
                for i in (0..padded).step_by(16) {
                    let faded = S::mul(S::load(total.as_ptr().add(i)), old);
                    let value = S::fma(S::load(span.as_ptr().add(i)), add, faded);
                    S::store(total.as_mut_ptr().add(i), value);
                }
            }
            self.0.total_state[vector] = (new, sum * fades[0] + span_sum * fades[1]);
        }
    }
}
