//! Activations times a weight matrix.
//!
//! One order of additions for every output element: `sum = 0; for k in order: sum = fma(w, x, sum)`,
//! each in its own lane. How many rows, groups or threads share a register block changes which
//! loads are shared, never an operand or the order, so that decode (one row, weights widened in
//! registers) and prefill (panels of widened weights in L2) give the same bits (PROTOCOL D1).

use super::dots::Arithmetic;
use super::dots::digits::{DigitInput, Digits};
use super::dots::pairs::PairInput;
#[cfg(target_arch = "x86_64")]
use super::dots::{brain, bytes};
use super::lanes::{Lanes, MicroArgs, Op, SumMode};
use super::matrix::{BLOCK, GROUP, Matrix, Packing, Unpack, Visit, widen};
use std::ops::Range;

/// Up to this many rows, weights are widened in registers and used at once; above it a panel is
/// widened once into scratch and used by all rows (widening costs about 4 operations a vector).
const DIRECT_ROWS_MAX: usize = 4;

/// Floats of panel scratch that a thread needs for a matrix with `inputs` inputs.
pub(crate) fn panel_len<S: Lanes>(inputs: usize) -> usize {
    inputs * S::MICRO_GROUPS * GROUP
}

/// A block of activations, `rows` rows at `stride`, and the same in the forms that dot products
/// take, where those were prepared.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub start: *const f32,
    pub stride: usize,
    pub rows: usize,
    /// Taken by `Q4` and `Q8` weights if it is there.
    pub digits: Option<DigitInput>,
    /// Taken by `Bf16` weights if it is there.
    pub pairs: Option<PairInput>,
}

/// Forms in which a product's activations must be prepared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forms {
    pub digits: Option<Digits>,
    pub pairs: bool,
}

impl Forms {
    /// Those that these weights take.
    pub fn of<const N: usize>(arithmetic: Arithmetic, matrices: [&Matrix; N]) -> Forms {
        let mut forms = Forms::default();
        let Arithmetic::Dots(digits) = arithmetic else {
            return forms;
        };
        for matrix in matrices {
            match matrix.packing {
                Packing::Q4 | Packing::Q8 => forms.digits = Some(digits),
                Packing::Bf16 => forms.pairs = true,
                Packing::F16 | Packing::F32 => {}
            }
        }
        forms
    }
}

/// Where results go: row 0 of output 0 of the matrix, rows at `stride`.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub start: *mut f32,
    pub stride: usize,
    pub mode: SumMode,
}

/// Computes `groups` of `matrix` for all rows.
///
/// # Safety
/// `x` has `rows` readable rows of `matrix.inputs`; `out` has `rows` rows that are writable at
/// all outputs of `groups` (whole groups, padding too), and nobody else touches those; the
/// processor has `S`; `panel` holds at least [`panel_len`] floats.
pub(crate) unsafe fn multiply<S: Lanes>(
    matrix: &Matrix,
    groups: Range<usize>,
    x: Input,
    out: Output,
    panel: &mut [f32],
) {
    assert!(groups.end <= matrix.groups());
    // SAFETY: the caller's contract, passed on; groups are in range by the assertion. Forms are
    // prepared only where the processor has the dot products that take them.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        match (matrix.packing, x.digits, x.pairs) {
            (Packing::Q4 | Packing::Q8, Some(digits), _) => {
                return multiply_digits(matrix, groups, x.rows, digits, out);
            }
            (Packing::Bf16, _, Some(pairs)) => {
                return multiply_pairs(matrix, groups, x.rows, pairs, out);
            }
            (_, _, _) => {}
        }
        if x.rows <= DIRECT_ROWS_MAX {
            multiply_direct::<S>(matrix, groups, x, out);
        } else {
            multiply_panels::<S>(matrix, groups, x, out, panel);
        }
    }
}

/// Rows whose digits stay in L2 (1 MiB) while all groups pass: 128 x 1,536 x 2.5 bytes are 480 KiB.
#[cfg(target_arch = "x86_64")]
const DIGIT_ROWS: usize = 128;

/// # Safety
/// As [`multiply`].
#[cfg(target_arch = "x86_64")]
unsafe fn multiply_digits(
    matrix: &Matrix,
    groups: Range<usize>,
    rows: usize,
    x: DigitInput,
    out: Output,
) {
    let groups_max = match rows {
        1 => bytes::SINGLE_ROW_GROUPS,
        _ => bytes::TILE_GROUPS,
    };
    for first_row in (0..rows).step_by(DIGIT_ROWS) {
        let rows = (rows - first_row).min(DIGIT_ROWS);
        let tiles = rows.div_ceil(bytes::TILE_ROWS);
        let mut group = groups.start;
        while group < groups.end {
            let left = Matrix::in_quad(group, groups.end - group);
            let count = if left >= groups_max {
                groups_max
            } else {
                left.min(2)
            };
            for tile in 0..tiles {
                // Tiles of nearly equal height: 5 rows as 3 + 2, not 4 + 1.
                let first = rows * tile / tiles;
                let height = rows * (tile + 1) / tiles - first;
                let row = first_row + first;
                // SAFETY: as `multiply`: rows and groups that exist.
                unsafe {
                    let part = bytes::Product {
                        weights: matrix.group(group),
                        q4: matrix.packing == Packing::Q4,
                        blocks: matrix.inputs / BLOCK,
                        x: x.skip_rows(row),
                        out: out.start.add(row * out.stride + group * GROUP),
                        out_stride: out.stride,
                        mode: out.mode,
                    };
                    bytes::multiply(&part, height, count);
                }
            }
            group += count;
        }
    }
}

/// # Safety
/// As [`multiply`].
#[cfg(target_arch = "x86_64")]
unsafe fn multiply_pairs(
    matrix: &Matrix,
    groups: Range<usize>,
    rows: usize,
    x: PairInput,
    out: Output,
) {
    let mut group = groups.start;
    while group < groups.end {
        let count = Matrix::in_quad(group, groups.end - group);
        // SAFETY: as `multiply`: a quad's groups, or some of them.
        unsafe {
            let product = brain::Product {
                x: x.words,
                x_stride: x.stride,
                w: matrix.group(group).cast(),
                w_pair: matrix.packing.chunk_step() / 4,
                w_group: matrix.packing.chunk_bytes() / 4,
                pairs: matrix.inputs.div_ceil(2),
                out: out.start.add(group * GROUP),
                out_stride: out.stride,
                mode: out.mode,
            };
            brain::multiply(&product, rows, count);
        }
        group += count;
    }
}

/// # Safety
/// As [`multiply`].
unsafe fn multiply_direct<S: Lanes>(matrix: &Matrix, groups: Range<usize>, x: Input, out: Output) {
    // One row has few sums: more groups keep the multipliers busy, as far as registers reach.
    let groups_max = match x.rows {
        0 => return,
        1 => S::DIRECT_GROUPS,
        _ => S::MICRO_GROUPS,
    };
    let mut group = groups.start;
    // SAFETY: as `multiply`; each call takes at most the groups that are left.
    unsafe {
        while group < groups.end {
            let count = (groups.end - group).min(groups_max);
            group += match (x.rows, count) {
                (1, 4..) => direct::<S, 1, 4>(matrix, group, x, out),
                (1, 2..) => direct::<S, 1, 2>(matrix, group, x, out),
                (1, _) => direct::<S, 1, 1>(matrix, group, x, out),
                (2, 2..) => direct::<S, 2, 2>(matrix, group, x, out),
                (2, _) => direct::<S, 2, 1>(matrix, group, x, out),
                (3, 2..) => direct::<S, 3, 2>(matrix, group, x, out),
                (3, _) => direct::<S, 3, 1>(matrix, group, x, out),
                (_, 2..) => direct::<S, 4, 2>(matrix, group, x, out),
                (_, _) => direct::<S, 4, 1>(matrix, group, x, out),
            };
        }
    }
}

/// # Safety
/// As [`multiply`], for `G` groups from `group` on.
unsafe fn direct<S: Lanes, const R: usize, const G: usize>(
    matrix: &Matrix,
    group: usize,
    x: Input,
    out: Output,
) -> usize {
    let groups = std::array::from_fn(|g| matrix.group(group + g));
    // SAFETY: as `multiply`.
    unsafe {
        S::enter(Direct::<R, G> {
            packing: matrix.packing,
            groups,
            inputs: matrix.inputs,
            x: x.start,
            x_stride: x.stride,
            out: out.start.add(group * GROUP),
            out_stride: out.stride,
            mode: out.mode,
        });
    }
    G
}

/// # Safety
/// As [`multiply`].
unsafe fn multiply_panels<S: Lanes>(
    matrix: &Matrix,
    groups: Range<usize>,
    x: Input,
    out: Output,
    panel: &mut [f32],
) {
    assert!(panel.len() >= panel_len::<S>(matrix.inputs));
    let panel = panel.as_mut_ptr();
    // Blocks of nearly equal height: 16 rows as 8 + 8, not 12 + 4.
    let blocks = x.rows.div_ceil(S::MICRO_ROWS);
    let mut group = groups.start;
    while group < groups.end {
        let count = (groups.end - group).min(S::MICRO_GROUPS);
        // SAFETY: as `multiply`; the panel is large enough by the assertion.
        unsafe {
            unpack::<S>(matrix, group, count, panel);
            for block in 0..blocks {
                let first = x.rows * block / blocks;
                let rows = x.rows * (block + 1) / blocks - first;
                let args = MicroArgs {
                    x: x.start.add(first * x.stride),
                    x_stride: x.stride,
                    w: panel,
                    w_stride: count * GROUP,
                    k: matrix.inputs,
                    out: out.start.add(first * out.stride + group * GROUP),
                    out_stride: out.stride,
                    mode: out.mode,
                };
                S::micro(args, rows, count);
            }
        }
        group += count;
    }
}

/// # Safety
/// As [`multiply_panels`]; `count` is 1 or 2.
unsafe fn unpack<S: Lanes>(matrix: &Matrix, group: usize, count: usize, panel: *mut f32) {
    let (packing, inputs) = (matrix.packing, matrix.inputs);
    // SAFETY: the groups exist, the panel has room.
    unsafe {
        if count == 2 {
            let groups = [matrix.group(group), matrix.group(group + 1)];
            S::enter(Unpack {
                packing,
                groups,
                inputs,
                panel,
            });
        } else {
            assert_eq!(count, 1, "a panel of {count} groups");
            let groups = [matrix.group(group)];
            S::enter(Unpack {
                packing,
                groups,
                inputs,
                panel,
            });
        }
    }
}

/// Writes `R x G` sums as the mode says.
///
/// # Safety
/// `out` has `R` rows of `G * 16` at the stride.
#[inline(always)]
unsafe fn finish<S: Lanes, const R: usize, const G: usize>(
    sums: [[S::V; G]; R],
    out: *mut f32,
    stride: usize,
    mode: SumMode,
) {
    for (r, row) in sums.into_iter().enumerate() {
        for (g, sum) in row.into_iter().enumerate() {
            // SAFETY: the caller's word.
            unsafe {
                let to = out.add(r * stride + g * GROUP);
                let value = match mode {
                    SumMode::Store | SumMode::Chain => sum,
                    SumMode::Add => S::add(S::load(to), sum),
                };
                S::store(to, value);
            }
        }
    }
}

/// A register block over weights that are already f32.
pub(crate) struct Micro<const R: usize, const G: usize>(pub MicroArgs);

impl<const R: usize, const G: usize> Op for Micro<R, G> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let a = self.0;
        // SAFETY: `MicroArgs` describe readable rows, a readable panel and writable results.
        unsafe {
            let mut sums = [[S::splat(0.0); G]; R];
            if a.mode == SumMode::Chain {
                for (r, row) in sums.iter_mut().enumerate() {
                    for (g, sum) in row.iter_mut().enumerate() {
                        *sum = S::load(a.out.add(r * a.out_stride + g * GROUP));
                    }
                }
            }
            for k in 0..a.k {
                let w: [S::V; G] =
                    std::array::from_fn(|g| S::load(a.w.add(k * a.w_stride + g * GROUP)));
                for (r, row) in sums.iter_mut().enumerate() {
                    let x = S::splat(*a.x.add(r * a.x_stride + k));
                    for (g, sum) in row.iter_mut().enumerate() {
                        *sum = S::fma(w[g], x, *sum);
                    }
                }
            }
            finish::<S, R, G>(sums, a.out, a.out_stride, a.mode);
        }
    }
}

/// A register block over packed weights.
struct Direct<const R: usize, const G: usize> {
    packing: Packing,
    groups: [*const u8; G],
    inputs: usize,
    x: *const f32,
    x_stride: usize,
    out: *mut f32,
    out_stride: usize,
    mode: SumMode,
}

struct Sums<S: Lanes, const R: usize, const G: usize> {
    sums: [[S::V; G]; R],
    x: *const f32,
    x_stride: usize,
}

impl<S: Lanes, const R: usize, const G: usize> Visit<S, G> for Sums<S, R, G> {
    /// `x` has `R` rows with an element `input`.
    #[inline(always)]
    unsafe fn visit(&mut self, input: usize, weights: [S::V; G]) {
        for (r, row) in self.sums.iter_mut().enumerate() {
            // SAFETY: inside the row by the caller's word.
            unsafe {
                let x = S::splat(*self.x.add(r * self.x_stride + input));
                for (g, sum) in row.iter_mut().enumerate() {
                    *sum = S::fma(weights[g], x, *sum);
                }
            }
        }
    }
}

impl<const R: usize, const G: usize> Op for Direct<R, G> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        debug_assert!(self.mode != SumMode::Chain);
        // SAFETY: the contract of `multiply`.
        unsafe {
            let mut sums = Sums::<S, R, G> {
                sums: [[S::splat(0.0); G]; R],
                x: self.x,
                x_stride: self.x_stride,
            };
            widen::<S, G>(self.packing, self.groups, self.inputs, &mut sums);
            finish::<S, R, G>(sums.sums, self.out, self.out_stride, self.mode);
        }
    }
}
