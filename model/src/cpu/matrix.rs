//! A weight matrix in the order in which the kernels read it.
//!
//! Sixteen outputs form a *group*; a group's weights lie together, so that one vector of sixteen
//! 32-bit words holds the same inputs of sixteen outputs and every output's sum runs over its
//! inputs in order, whatever is computed beside it (PROTOCOL D1). Quantised weights stay
//! quantised. Per group:
//!
//! * `F32`, `F16`: `[input][16]`
//! * `Bf16`: `[input / 2][16][2]`: a word is two neighbouring inputs
//! * `Q8`: for each 32 inputs, 16 half-precision scales, then `[8][16][4]` bytes, each the stored
//!   signed byte plus 128: a word is four neighbouring inputs
//! * `Q4`: for each 32 inputs, 16 scales and 16 minima (half), then `[4][16][4]` bytes: of word
//!   `t` the low four bits of byte `j` are input `8t + j`, the high ones input `8t + 4 + j`
//!
//! The words of two and four inputs are what the dot-product instructions take (`super::dots`);
//! the kernels over [`Lanes`] take them apart.

use super::aligned::Aligned;
use super::lanes::{Lanes, Op};
use crate::weights::{
    TensorType, TensorView, bf16_to_f32, dequantize_row, f16_to_f32, f32_to_bf16,
};
use kvserve_kv::KvDtype;
use std::ops::Range;
use std::sync::Arc;

/// Outputs of a group.
pub(crate) const GROUP: usize = 16;
/// Inputs of a quantised block.
pub(crate) const BLOCK: usize = 32;

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
            Packing::F16 => inputs * GROUP * 2,
            Packing::Bf16 => inputs.div_ceil(2) * GROUP * 4,
            Packing::Q8 => inputs / BLOCK * Q8_BLOCK_BYTES,
            Packing::Q4 => inputs / BLOCK * Q4_BLOCK_BYTES,
        }
    }
}

/// Bytes of 16 scales.
pub(crate) const SCALES_BYTES: usize = GROUP * 2;
/// Bytes of a `Q8` block of a group.
pub(crate) const Q8_BLOCK_BYTES: usize = SCALES_BYTES + BLOCK * GROUP;
/// Bytes of a `Q4` block of a group.
pub(crate) const Q4_BLOCK_BYTES: usize = 2 * SCALES_BYTES + BLOCK * GROUP / 2;
/// What is added to a stored byte of `Q8`.
const Q8_OFFSET: f32 = 128.0;

/// A packed matrix: `outputs` rows of `inputs` weights, in an arena that many share.
pub(crate) struct Matrix {
    pub outputs: usize,
    pub inputs: usize,
    pub packing: Packing,
    pub group_bytes: usize,
    arena: Arc<Aligned<u8>>,
    start: usize,
}

impl Matrix {
    /// Bytes that a stored tensor takes when packed; a multiple of a cache line. With dtype
    /// bf16, f32 weights are rounded to bf16.
    pub fn packed_bytes(view: &TensorView<'_>, dtype: KvDtype) -> usize {
        let group_bytes = Packing::of(view.kind, dtype).group_bytes(view.columns);
        (view.rows.div_ceil(GROUP) * group_bytes).next_multiple_of(64)
    }

    /// The matrix at byte `start` of an arena of zeroes; [`Matrix::pack_groups`] fills it.
    pub fn place(
        view: &TensorView<'_>,
        dtype: KvDtype,
        arena: &Arc<Aligned<u8>>,
        start: usize,
    ) -> Matrix {
        let packing = Packing::of(view.kind, dtype);
        assert!(start.is_multiple_of(64));
        assert!(start + Self::packed_bytes(view, dtype) <= arena.len());
        Matrix {
            outputs: view.rows,
            inputs: view.columns,
            packing,
            group_bytes: packing.group_bytes(view.columns),
            arena: Arc::clone(arena),
            start,
        }
    }

    /// Packs a stored tensor into an arena of its own.
    #[cfg(test)]
    pub fn pack(view: &TensorView<'_>, dtype: KvDtype) -> Matrix {
        let arena = Arc::new(Aligned::zeroed(Self::packed_bytes(view, dtype)));
        let matrix = Matrix::place(view, dtype, &arena, 0);
        // SAFETY: the arena is this matrix's own.
        unsafe { matrix.pack_groups(view, 0..matrix.groups()) };
        matrix
    }

    /// Fills some groups from the stored tensor.
    ///
    /// # Safety
    /// `view` has the shape and type that the matrix was placed for; the groups are still zero,
    /// and nobody else reads or writes them now.
    pub unsafe fn pack_groups(&self, view: &TensorView<'_>, groups: Range<usize>) {
        let mut row = vec![0.0; self.inputs];
        for index in groups {
            let start = self.group(index).cast_mut();
            // SAFETY: a group of this matrix, ours alone by the caller's word.
            let group = unsafe { std::slice::from_raw_parts_mut(start, self.group_bytes) };
            let outputs = index * GROUP..self.outputs.min((index + 1) * GROUP);
            for (lane, output) in outputs.enumerate() {
                match self.packing {
                    Packing::F32 => {
                        dequantize_row(view, output, &mut row);
                        for (k, value) in row.iter().enumerate() {
                            put(group, (k * GROUP + lane) * 4, value.to_le_bytes());
                        }
                    }
                    Packing::Bf16 => {
                        dequantize_row(view, output, &mut row);
                        for (k, value) in row.iter().enumerate() {
                            let bytes = f32_to_bf16(*value).to_le_bytes();
                            put(group, bf16_place(k, lane), bytes);
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
        }
    }

    /// Writes the weights of one output as f32: a row of an embedding. `out.len()` is `inputs`.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs && out.len() == self.inputs);
        let lane = output % GROUP;
        // SAFETY: a group of this matrix, which nobody writes once it is packed.
        let group =
            unsafe { std::slice::from_raw_parts(self.group(output / GROUP), self.group_bytes) };
        let half = |at: usize| u16::from_le_bytes([group[at], group[at + 1]]);
        match self.packing {
            Packing::F32 => {
                for (k, out) in out.iter_mut().enumerate() {
                    let at = (k * GROUP + lane) * 4;
                    *out = f32::from_le_bytes([
                        group[at],
                        group[at + 1],
                        group[at + 2],
                        group[at + 3],
                    ]);
                }
            }
            Packing::F16 => {
                for (k, out) in out.iter_mut().enumerate() {
                    *out = f16_to_f32(half((k * GROUP + lane) * 2));
                }
            }
            Packing::Bf16 => {
                for (k, out) in out.iter_mut().enumerate() {
                    *out = bf16_to_f32(half(bf16_place(k, lane)));
                }
            }
            Packing::Q8 => {
                let blocks = group.chunks_exact(Q8_BLOCK_BYTES);
                for (out, block) in out.chunks_exact_mut(BLOCK).zip(blocks) {
                    let scale =
                        f16_to_f32(u16::from_le_bytes([block[lane * 2], block[lane * 2 + 1]]));
                    for (k, out) in out.iter_mut().enumerate() {
                        let byte = block[SCALES_BYTES + (k / 4 * GROUP + lane) * 4 + k % 4];
                        *out = (f32::from(byte) - Q8_OFFSET) * scale;
                    }
                }
            }
            Packing::Q4 => {
                let blocks = group.chunks_exact(Q4_BLOCK_BYTES);
                for (out, block) in out.chunks_exact_mut(BLOCK).zip(blocks) {
                    let half =
                        |at: usize| f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]));
                    let (scale, minimum) = (half(lane * 2), half(SCALES_BYTES + lane * 2));
                    for (k, out) in out.iter_mut().enumerate() {
                        let byte = block[2 * SCALES_BYTES + (k / 8 * GROUP + lane) * 4 + k % 4];
                        let q = byte >> (k % 8 / 4 * 4) & 15;
                        *out = f32::from(q) * scale + minimum;
                    }
                }
            }
        }
    }

    /// Groups of sixteen outputs; the last may be partly padding (zero weights).
    pub fn groups(&self) -> usize {
        self.outputs.div_ceil(GROUP)
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.groups() * self.group_bytes
    }

    /// First byte of a group. Panics if there is no such group.
    pub fn group(&self, group: usize) -> *const u8 {
        assert!(group < self.groups(), "group {group} of {}", self.groups());
        // SAFETY: the group lies in the arena: `place` has checked the whole matrix.
        unsafe {
            self.arena
                .as_ptr()
                .add(self.start + group * self.group_bytes)
        }
    }
}

/// Byte of input `k` of a lane in a `Bf16` group.
fn bf16_place(k: usize, lane: usize) -> usize {
    (k / 2 * GROUP + lane) * 4 + k % 2 * 2
}

fn put<const N: usize>(group: &mut [u8], at: usize, bytes: [u8; N]) {
    group[at..at + N].copy_from_slice(&bytes);
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn pack_q8(row: &[u8], group: &mut [u8], lane: usize) {
    let stored = row.chunks_exact(2 + BLOCK);
    for (stored, packed) in stored.zip(group.chunks_exact_mut(Q8_BLOCK_BYTES)) {
        put(packed, lane * 2, [stored[0], stored[1]]);
        for t in 0..BLOCK / 4 {
            // Plus 128, for all four bytes.
            let four = word(stored, 2 + 4 * t) ^ 0x8080_8080;
            put(
                packed,
                SCALES_BYTES + (t * GROUP + lane) * 4,
                four.to_le_bytes(),
            );
        }
    }
}

fn pack_q4(row: &[u8], group: &mut [u8], lane: usize) {
    const LOW: u32 = 0x0F0F_0F0F;
    let stored = row.chunks_exact(4 + BLOCK / 2);
    for (stored, packed) in stored.zip(group.chunks_exact_mut(Q4_BLOCK_BYTES)) {
        put(packed, lane * 2, [stored[0], stored[1]]);
        put(packed, SCALES_BYTES + lane * 2, [stored[2], stored[3]]);
        for t in 0..BLOCK / 8 {
            // Stored byte j has input j low and input j + 16 high.
            let (first, second) = (word(stored, 4 + t % 2 * 8), word(stored, 8 + t % 2 * 8));
            let shift = t / 2 * 4;
            let eight = (first >> shift & LOW) | ((second >> shift & LOW) << 4);
            let at = 2 * SCALES_BYTES + (t * GROUP + lane) * 4;
            put(packed, at, eight.to_le_bytes());
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
/// `groups` are groups of a matrix with this packing and `inputs` inputs; [`Lanes`].
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
                for pair in 0..inputs.div_ceil(2) {
                    let words = groups.map(|group| {
                        let at = group.add(pair * GROUP * 4);
                        prefetch_block::<S>(at, GROUP * 4, ahead);
                        S::load_words(at)
                    });
                    visit.visit(2 * pair, words.map(|words| S::low_bf16(words)));
                    if 2 * pair + 1 < inputs {
                        visit.visit(2 * pair + 1, words.map(|words| S::high_bf16(words)));
                    }
                }
            }
            Packing::Q8 => {
                for block in 0..inputs / BLOCK {
                    let at = groups.map(|group| group.add(block * Q8_BLOCK_BYTES));
                    for at in at {
                        prefetch_block::<S>(at, Q8_BLOCK_BYTES, ahead);
                    }
                    let scale = at.map(|at| S::load_f16(at.cast()));
                    for four in 0..BLOCK / 4 {
                        let mut words =
                            at.map(|at| S::load_words(at.add(SCALES_BYTES + four * GROUP * 4)));
                        for k in 0..4 {
                            let w = std::array::from_fn(|g| {
                                let q = S::sub(S::low_byte(words[g]), S::splat(Q8_OFFSET));
                                S::mul(q, scale[g])
                            });
                            visit.visit(block * BLOCK + four * 4 + k, w);
                            words = words.map(|words| S::drop_byte(words));
                        }
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
                    let minimum = at.map(|at| S::load_f16(at.add(SCALES_BYTES).cast()));
                    for eight in 0..BLOCK / 8 {
                        let low = at
                            .map(|at| S::load_words(at.add(2 * SCALES_BYTES + eight * GROUP * 4)));
                        let high = low.map(|words| S::drop_nibble(words));
                        for (half, mut words) in [low, high].into_iter().enumerate() {
                            for k in 0..4 {
                                // A 4-bit number times an 11-bit scale is exact in f32, so this
                                // is the stored weight, rounded once, fused or not.
                                let w = std::array::from_fn(|g| {
                                    S::fma(S::low_nibble(words[g]), scale[g], minimum[g])
                                });
                                visit.visit(block * BLOCK + eight * 8 + half * 4 + k, w);
                                words = words.map(|words| S::drop_byte(words));
                            }
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
