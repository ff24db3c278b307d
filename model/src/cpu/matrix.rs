//! A weight matrix in the order in which the kernels read it.
//!
//! Sixteen outputs form a *group*; a group's weights lie together, input by input, each input as
//! sixteen neighbouring outputs, so that one vector holds one input of sixteen outputs and every
//! output's sum runs over its inputs in order, whatever is computed beside it (PROTOCOL D1).
//! Quantised weights stay quantised. Per group:
//!
//! * `F32`, `F16`, `Bf16`: `[input][16]`
//! * `Q8`: for each 32 inputs, 16 half-precision scales, then `[32][16]` signed bytes
//! * `Q4`: for each 32 inputs, 16 scales and 16 minima (half), then four times 16 words of
//!   eight 4-bit numbers (the lowest bits are the first input)

use super::aligned::Aligned;
use super::lanes::{Lanes, Op};
use crate::weights::{
    TensorType, TensorView, bf16_to_f32, dequantize_row, f16_to_f32, f32_to_bf16,
};
use kvserve_kv::KvDtype;

/// Outputs of a group.
pub(crate) const GROUP: usize = 16;
/// Inputs of a quantised block.
const BLOCK: usize = 32;

/// How a packed matrix holds its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    F32,
    F16,
    Bf16,
    Q8,
    Q4,
}

impl Packing {
    fn of(kind: TensorType, dtype: KvDtype) -> Packing {
        match (kind, dtype) {
            (TensorType::F32, KvDtype::F32) => Packing::F32,
            (TensorType::F32, KvDtype::Bf16) | (TensorType::Bf16, _) => Packing::Bf16,
            (TensorType::F16, _) => Packing::F16,
            (TensorType::Q8_0, _) => Packing::Q8,
            (TensorType::Q4_1, _) => Packing::Q4,
        }
    }

    /// Bytes of one group with `inputs` inputs.
    fn group_bytes(self, inputs: usize) -> usize {
        match self {
            Packing::F32 => inputs * GROUP * 4,
            Packing::F16 | Packing::Bf16 => inputs * GROUP * 2,
            Packing::Q8 => inputs / BLOCK * Q8_BLOCK_BYTES,
            Packing::Q4 => inputs / BLOCK * Q4_BLOCK_BYTES,
        }
    }
}

const Q8_BLOCK_BYTES: usize = GROUP * 2 + BLOCK * GROUP;
const Q4_BLOCK_BYTES: usize = GROUP * 4 + BLOCK * GROUP / 2;

/// A packed matrix: `outputs` rows of `inputs` weights.
pub(crate) struct Matrix {
    pub outputs: usize,
    pub inputs: usize,
    pub packing: Packing,
    pub group_bytes: usize,
    bytes: Aligned<u8>,
}

impl Matrix {
    /// Packs a stored tensor. With dtype bf16, f32 weights are rounded to bf16.
    pub fn pack(view: &TensorView<'_>, dtype: KvDtype) -> Matrix {
        let packing = Packing::of(view.kind, dtype);
        let (outputs, inputs) = (view.rows, view.columns);
        let group_bytes = packing.group_bytes(inputs);
        let groups = outputs.div_ceil(GROUP);
        let mut bytes = Aligned::<u8>::zeroed(groups * group_bytes);
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            let group = &mut bytes.as_mut_slice()[output / GROUP * group_bytes..][..group_bytes];
            let lane = output % GROUP;
            match packing {
                Packing::F32 => {
                    dequantize_row(view, output, &mut row);
                    for (k, value) in row.iter().enumerate() {
                        put(group, (k * GROUP + lane) * 4, value.to_le_bytes());
                    }
                }
                Packing::Bf16 => {
                    dequantize_row(view, output, &mut row);
                    for (k, value) in row.iter().enumerate() {
                        put(
                            group,
                            (k * GROUP + lane) * 2,
                            f32_to_bf16(*value).to_le_bytes(),
                        );
                    }
                }
                Packing::F16 => {
                    for (k, half) in view.row(output).chunks_exact(2).enumerate() {
                        put(group, (k * GROUP + lane) * 2, [half[0], half[1]]);
                    }
                }
                Packing::Q8 => pack_q8(view.row(output), group, lane),
                Packing::Q4 => pack_q4(view.row(output), group, lane),
            }
        }
        Matrix {
            outputs,
            inputs,
            packing,
            group_bytes,
            bytes,
        }
    }

    /// Writes the weights of one output as f32: a row of an embedding. `out.len()` is `inputs`.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs && out.len() == self.inputs);
        let lane = output % GROUP;
        let group = &self.bytes.as_slice()[output / GROUP * self.group_bytes..][..self.group_bytes];
        let half = |at: usize| u16::from_le_bytes([group[at], group[at + 1]]);
        for (k, out) in out.iter_mut().enumerate() {
            let (block, within) = (k / BLOCK, k % BLOCK);
            *out = match self.packing {
                Packing::F32 => {
                    let at = (k * GROUP + lane) * 4;
                    f32::from_le_bytes([group[at], group[at + 1], group[at + 2], group[at + 3]])
                }
                Packing::F16 => f16_to_f32(half((k * GROUP + lane) * 2)),
                Packing::Bf16 => bf16_to_f32(half((k * GROUP + lane) * 2)),
                Packing::Q8 => {
                    let at = block * Q8_BLOCK_BYTES;
                    let q = group[at + GROUP * 2 + within * GROUP + lane] as i8;
                    f32::from(q) * f16_to_f32(half(at + lane * 2))
                }
                Packing::Q4 => {
                    let at = block * Q4_BLOCK_BYTES;
                    let word = at + GROUP * 4 + (within / 8 * GROUP + lane) * 4;
                    let q = group[word + within % 8 / 2] >> (4 * (within % 2)) & 15;
                    let scale = f16_to_f32(half(at + lane * 2));
                    f32::from(q) * scale + f16_to_f32(half(at + GROUP * 2 + lane * 2))
                }
            };
        }
    }

    /// Groups of sixteen outputs; the last may be partly padding (zero weights).
    pub fn groups(&self) -> usize {
        self.outputs.div_ceil(GROUP)
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// First byte of a group. Panics if there is no such group.
    pub fn group(&self, group: usize) -> *const u8 {
        assert!(group < self.groups(), "group {group} of {}", self.groups());
        // SAFETY: the group lies in the buffer by the assertion.
        unsafe { self.bytes.as_ptr().add(group * self.group_bytes) }
    }
}

fn put<const N: usize>(group: &mut [u8], at: usize, bytes: [u8; N]) {
    group[at..at + N].copy_from_slice(&bytes);
}

fn pack_q8(row: &[u8], group: &mut [u8], lane: usize) {
    let stored = row.chunks_exact(2 + BLOCK);
    for (stored, packed) in stored.zip(group.chunks_exact_mut(Q8_BLOCK_BYTES)) {
        put(packed, lane * 2, [stored[0], stored[1]]);
        for (k, q) in stored[2..].iter().enumerate() {
            packed[GROUP * 2 + k * GROUP + lane] = *q;
        }
    }
}

fn pack_q4(row: &[u8], group: &mut [u8], lane: usize) {
    let stored = row.chunks_exact(4 + BLOCK / 2);
    for (stored, packed) in stored.zip(group.chunks_exact_mut(Q4_BLOCK_BYTES)) {
        put(packed, lane * 2, [stored[0], stored[1]]);
        put(packed, GROUP * 2 + lane * 2, [stored[2], stored[3]]);
        for k in 0..BLOCK {
            let byte = stored[4 + k % 16];
            let q = if k < 16 { byte & 15 } else { byte >> 4 };
            // Word k / 8 of the lane, bits 4 * (k % 8): little-endian bytes of two numbers each.
            let at = GROUP * 4 + (k / 8 * GROUP + lane) * 4 + k % 8 / 2;
            packed[at] |= q << (4 * (k % 2));
        }
    }
}

/// Takes the weights of one input for `G` groups.
pub(crate) trait Visit<S: Lanes, const G: usize> {
    /// # Safety
    /// See the implementation, and [`Lanes`].
    unsafe fn visit(&mut self, input: usize, weights: [S::V; G]);
}

/// Asks for the lines of a block `ahead` bytes after `at`. Groups are a few KiB each, so the
/// processor's own prefetcher starts anew at every one; this has the next ones on their way
/// while the present ones are computed.
///
/// # Safety
/// [`Lanes`]; the address may lie anywhere.
#[inline(always)]
unsafe fn prefetch_block<S: Lanes>(at: *const u8, block_bytes: usize, ahead: usize) {
    for line in (0..block_bytes).step_by(64) {
        // SAFETY: a prefetch touches nothing.
        unsafe { S::prefetch(at.wrapping_add(ahead + line)) }
    }
}

/// Widens the weights of `G` groups input by input, in order. `group_bytes` is the matrix's.
///
/// # Safety
/// `groups` are groups of a matrix with this packing and at least `inputs` inputs; [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn widen<S: Lanes, const G: usize>(
    packing: Packing,
    groups: [*const u8; G],
    inputs: usize,
    group_bytes: usize,
    visit: &mut impl Visit<S, G>,
) {
    let ahead = G * group_bytes;
    // SAFETY: every load stays within the group by the layouts of the module docs.
    unsafe {
        match packing {
            Packing::F32 => {
                for k in 0..inputs {
                    let w = groups.map(|group| {
                        let at = group.cast::<f32>().add(k * GROUP);
                        prefetch_block::<S>(at.cast(), GROUP * 4, ahead);
                        S::load(at)
                    });
                    visit.visit(k, w);
                }
            }
            Packing::F16 => {
                for k in 0..inputs {
                    let w = groups.map(|group| {
                        let at = group.cast::<u16>().add(k * GROUP);
                        if k % 2 == 0 {
                            prefetch_block::<S>(at.cast(), GROUP * 4, ahead);
                        }
                        S::load_f16(at)
                    });
                    visit.visit(k, w);
                }
            }
            Packing::Bf16 => {
                for k in 0..inputs {
                    let w = groups.map(|group| {
                        let at = group.cast::<u16>().add(k * GROUP);
                        if k % 2 == 0 {
                            prefetch_block::<S>(at.cast(), GROUP * 4, ahead);
                        }
                        S::load_bf16(at)
                    });
                    visit.visit(k, w);
                }
            }
            Packing::Q8 => {
                for block in 0..inputs / BLOCK {
                    let at = groups.map(|group| group.add(block * Q8_BLOCK_BYTES));
                    for at in at {
                        prefetch_block::<S>(at, Q8_BLOCK_BYTES, ahead);
                    }
                    let scale = at.map(|at| S::load_f16(at.cast()));
                    for k in 0..BLOCK {
                        let w = std::array::from_fn(|g| {
                            let q = S::load_i8(at[g].add(GROUP * 2 + k * GROUP).cast());
                            S::mul(q, scale[g])
                        });
                        visit.visit(block * BLOCK + k, w);
                    }
                }
            }
            Packing::Q4 => {
                for block in 0..inputs / BLOCK {
                    let at = groups.map(|group| group.add(block * Q4_BLOCK_BYTES));
                    for at in at {
                        prefetch_block::<S>(at, Q4_BLOCK_BYTES, ahead);
                    }
                    let scale = at.map(|at| S::load_f16(at.cast()));
                    let minimum = at.map(|at| S::load_f16(at.add(GROUP * 2).cast()));
                    for word in 0..BLOCK / 8 {
                        let mut q =
                            at.map(|at| S::load_nibbles(at.add(GROUP * 4 + word * GROUP * 4)));
                        for k in 0..8 {
                            // A 4-bit number times an 11-bit scale is exact in f32, so this is
                            // the stored weight, rounded once, with or without a fused multiply.
                            let w = std::array::from_fn(|g| {
                                S::fma(S::lowest(q[g]), scale[g], minimum[g])
                            });
                            visit.visit(block * BLOCK + word * 8 + k, w);
                            q = q.map(|q| S::next(q));
                        }
                    }
                }
            }
        }
    }
}

/// Widens `G` groups into a panel `[input][G * 16]`.
pub(crate) struct Unpack<const G: usize> {
    pub packing: Packing,
    pub groups: [*const u8; G],
    pub inputs: usize,
    pub group_bytes: usize,
    pub panel: *mut f32,
}

struct StorePanel(*mut f32);

impl<S: Lanes, const G: usize> Visit<S, G> for StorePanel {
    /// The panel has room for `input`.
    #[inline(always)]
    unsafe fn visit(&mut self, input: usize, weights: [S::V; G]) {
        for (g, w) in weights.into_iter().enumerate() {
            // SAFETY: inside the panel by its size.
            unsafe { S::store(self.0.add((input * G + g) * GROUP), w) }
        }
    }
}

impl<const G: usize> Op for Unpack<G> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let mut store = StorePanel(self.panel);
        // SAFETY: the op's contract is that of `widen`, and the panel has `inputs * G * 16` places.
        unsafe {
            widen::<S, G>(
                self.packing,
                self.groups,
                self.inputs,
                self.group_bytes,
                &mut store,
            )
        }
    }
}
