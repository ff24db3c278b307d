//! A weight matrix in the order in which the kernels read it.
//!
//! Sixteen outputs form a *group*; a group's weights lie together, so that one vector of sixteen
//! 32-bit words holds the same inputs of sixteen outputs and every output's sum runs over its
//! inputs in order, whatever is computed beside it (PROTOCOL D1). Quantised weights stay
//! quantised. A group's inputs are cut into *chunks*:
//!
//! * `F32`, `F16`: one input, `[16]`
//! * `Bf16`: two inputs, `[16][2]`
//! * `Q8`: 32 inputs: 16 half-precision scales, then `[8][16][4]` bytes, each the stored signed
//!   byte plus 128: a word is four neighbouring inputs
//! * `Q4`: 32 inputs: 16 scales and 16 minima (half), then `[4][16][4]` bytes: of word `t` the low
//!   four bits of byte `j` are input `8t + j`, the high ones input `8t + 4 + j`
//!
//! Four groups form a *quad*: `[quad][chunk][group of the quad]`. A single row takes a quad at a
//! time and so reads one stream, which the processor's own prefetcher can follow, where separate
//! groups would be four streams of a few KiB each.
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

    /// Inputs of a chunk.
    fn chunk_inputs(self) -> usize {
        match self {
            Packing::F32 | Packing::F16 => 1,
            Packing::Bf16 => 2,
            Packing::Q8 | Packing::Q4 => BLOCK,
        }
    }

    /// Bytes of a chunk of one group.
    pub fn chunk_bytes(self) -> usize {
        match self {
            Packing::F32 | Packing::Bf16 => GROUP * 4,
            Packing::F16 => GROUP * 2,
            Packing::Q8 => Q8_BLOCK_BYTES,
            Packing::Q4 => Q4_BLOCK_BYTES,
        }
    }

    /// Bytes from a chunk of a group to its next.
    pub fn chunk_step(self) -> usize {
        QUAD * self.chunk_bytes()
    }

    /// Bytes of four groups with `inputs` inputs.
    fn quad_bytes(self, inputs: usize) -> usize {
        inputs.div_ceil(self.chunk_inputs()) * self.chunk_step()
    }
}

/// Groups of a quad.
pub(crate) const QUAD: usize = 4;
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
    quad_bytes: usize,
    arena: Arc<Aligned<u8>>,
    start: usize,
}

impl Matrix {
    /// Bytes that a stored tensor takes when packed; a multiple of a cache line. With dtype
    /// bf16, f32 weights are rounded to bf16.
    pub fn packed_bytes(view: &TensorView<'_>, dtype: KvDtype) -> usize {
        let quad_bytes = Packing::of(view.kind, dtype).quad_bytes(view.columns);
        view.rows.div_ceil(QUAD * GROUP) * quad_bytes
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
            quad_bytes: packing.quad_bytes(view.columns),
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

    /// Fills some groups, beginning with a quad's first, from the stored tensor.
    ///
    /// # Safety
    /// `view` has the shape and type that the matrix was placed for; nobody else reads or writes
    /// the quads of these groups now.
    pub unsafe fn pack_groups(&self, view: &TensorView<'_>, groups: Range<usize>) {
        assert!(groups.start.is_multiple_of(QUAD));
        let mut row = vec![0.0; self.inputs];
        let step = self.packing.chunk_step();
        for index in groups {
            // SAFETY: a quad of this matrix, ours alone by the caller's word.
            let quad = unsafe {
                let start = self.group(index / QUAD * QUAD).cast_mut();
                std::slice::from_raw_parts_mut(start, self.quad_bytes)
            };
            let first = index % QUAD * self.packing.chunk_bytes();
            let group = &mut quad[first..];
            let outputs = index * GROUP..self.outputs.min((index + 1) * GROUP);
            for (lane, output) in outputs.enumerate() {
                match self.packing {
                    Packing::F32 => {
                        dequantize_row(view, output, &mut row);
                        for (k, value) in row.iter().enumerate() {
                            put(group, k * step + lane * 4, value.to_le_bytes());
                        }
                    }
                    Packing::Bf16 => {
                        dequantize_row(view, output, &mut row);
                        for (k, value) in row.iter().enumerate() {
                            let bytes = f32_to_bf16(*value).to_le_bytes();
                            put(group, k / 2 * step + lane * 4 + k % 2 * 2, bytes);
                        }
                    }
                    Packing::F16 => {
                        for (k, half) in view.row(output).chunks_exact(2).enumerate() {
                            put(group, k * step + lane * 2, [half[0], half[1]]);
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
        let (lane, index) = (output % GROUP, output / GROUP);
        // SAFETY: a quad of this matrix, which nobody writes once it is packed.
        let quad =
            unsafe { std::slice::from_raw_parts(self.group(index / QUAD * QUAD), self.quad_bytes) };
        let first = index % QUAD * self.packing.chunk_bytes();
        let chunks = quad.chunks_exact(self.packing.chunk_step());
        let outs = out.chunks_mut(self.packing.chunk_inputs());
        for (out, chunk) in outs.zip(chunks) {
            let chunk = &chunk[first..][..self.packing.chunk_bytes()];
            let half = |at: usize| u16::from_le_bytes([chunk[at], chunk[at + 1]]);
            match self.packing {
                Packing::F32 => out[0] = f32::from_bits(word(chunk, lane * 4)),
                Packing::F16 => out[0] = f16_to_f32(half(lane * 2)),
                Packing::Bf16 => {
                    for (k, out) in out.iter_mut().enumerate() {
                        *out = bf16_to_f32(half(lane * 4 + k * 2));
                    }
                }
                Packing::Q8 => {
                    let scale = f16_to_f32(half(lane * 2));
                    for (k, out) in out.iter_mut().enumerate() {
                        let byte = chunk[SCALES_BYTES + (k / 4 * GROUP + lane) * 4 + k % 4];
                        *out = (f32::from(byte) - Q8_OFFSET) * scale;
                    }
                }
                Packing::Q4 => {
                    let scale = f16_to_f32(half(lane * 2));
                    let minimum = f16_to_f32(half(SCALES_BYTES + lane * 2));
                    for (k, out) in out.iter_mut().enumerate() {
                        let byte = chunk[2 * SCALES_BYTES + (k / 8 * GROUP + lane) * 4 + k % 4];
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
        self.groups().div_ceil(QUAD) * self.quad_bytes
    }

    /// First byte of a group; its chunks lie [`Packing::chunk_step`] apart, and the groups after
    /// it in the same quad [`Packing::chunk_bytes`]. Panics if there is no such group.
    pub fn group(&self, group: usize) -> *const u8 {
        assert!(group < self.groups(), "group {group} of {}", self.groups());
        let within = group % QUAD * self.packing.chunk_bytes();
        let at = self.start + group / QUAD * self.quad_bytes + within;
        // SAFETY: the group lies in the arena: `place` has checked the whole matrix.
        unsafe { self.arena.as_ptr().add(at) }
    }

    /// How many of `wanted` groups from `group` on lie in its quad.
    pub fn in_quad(group: usize, wanted: usize) -> usize {
        wanted.min(QUAD - group % QUAD)
    }
}

fn put<const N: usize>(group: &mut [u8], at: usize, bytes: [u8; N]) {
    group[at..at + N].copy_from_slice(&bytes);
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn pack_q8(row: &[u8], group: &mut [u8], lane: usize) {
    let stored = row.chunks_exact(2 + BLOCK);
    for (stored, packed) in stored.zip(group.chunks_mut(QUAD * Q8_BLOCK_BYTES)) {
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
    for (stored, packed) in stored.zip(group.chunks_mut(QUAD * Q4_BLOCK_BYTES)) {
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

/// Widens the weights of `G` groups input by input, in order.
///
/// # Safety
/// `groups` are groups of a matrix with this packing and `inputs` inputs; [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn widen<S: Lanes, const G: usize>(
    packing: Packing,
    groups: [*const u8; G],
    inputs: usize,
    visit: &mut impl Visit<S, G>,
) {
    let step = packing.chunk_step();
    // SAFETY: every load stays within the group by the layouts of the module docs.
    unsafe {
        match packing {
            Packing::F32 => {
                for k in 0..inputs {
                    let w = groups.map(|group| S::load(group.add(k * step).cast()));
                    visit.visit(k, w);
                }
            }
            Packing::F16 => {
                for k in 0..inputs {
                    let w = groups.map(|group| S::load_f16(group.add(k * step).cast()));
                    visit.visit(k, w);
                }
            }
            Packing::Bf16 => {
                for pair in 0..inputs.div_ceil(2) {
                    let words = groups.map(|group| S::load_words(group.add(pair * step)));
                    visit.visit(2 * pair, words.map(|words| S::low_bf16(words)));
                    if 2 * pair + 1 < inputs {
                        visit.visit(2 * pair + 1, words.map(|words| S::high_bf16(words)));
                    }
                }
            }
            Packing::Q8 => {
                for block in 0..inputs / BLOCK {
                    let at = groups.map(|group| group.add(block * step));
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
                    let at = groups.map(|group| group.add(block * step));
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
        unsafe { widen::<S, G>(self.packing, self.groups, self.inputs, &mut store) }
    }
}
