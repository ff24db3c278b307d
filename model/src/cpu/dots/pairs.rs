//! Activations rounded to bfloat16, two neighbours to a word.

use super::super::aligned::Aligned;

/// Room for some rows.
pub(crate) struct PairRows {
    words: Aligned<u32>,
    rows: usize,
    stride: usize,
}

/// Rows as the kernel reads them.
#[derive(Clone, Copy)]
pub(crate) struct PairInput {
    /// `[row][pair]`
    pub words: *const u32,
    /// Words from one row to the next.
    pub stride: usize,
}

impl PairRows {
    /// For `rows` rows of at most `columns`.
    pub fn new(rows: usize, columns: usize) -> Self {
        // A cache line more than needed, so that rows of a power of two spread over the cache.
        let stride = columns.next_multiple_of(32) / 2 + 16;
        PairRows {
            words: Aligned::zeroed(rows * stride),
            rows,
            stride,
        }
    }

    /// From row 0 on.
    pub fn input(&self) -> PairInput {
        PairInput {
            words: self.words.as_ptr(),
            stride: self.stride,
        }
    }

    /// Fills a row from `columns` floats.
    ///
    /// # Safety
    /// `x` has `columns` readable floats, rounded up to 16, those beyond `columns` zero; nobody
    /// else reads or writes this row; the processor has AVX-512 F and BF16.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn fill(&self, row: usize, x: *const f32, columns: usize) {
        assert!(row < self.rows && columns.next_multiple_of(16) / 2 <= self.stride);
        // SAFETY: the row lies in the buffer by the assertion; the rest is the caller's word.
        unsafe { round_row(x, columns, self.words.as_ptr().add(row * self.stride)) }
    }
}

/// Rounds floats to bfloat16, sixteen at a time (subnormals become zero).
///
/// # Safety
/// `columns` floats rounded up to 16, and room for as many bfloat16; AVX-512 F and BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn round_row(x: *const f32, columns: usize, to: *mut u32) {
    use std::arch::x86_64::*;
    for k in (0..columns).step_by(16) {
        // SAFETY: sixteen floats and eight words, by the caller's word.
        unsafe {
            let halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(x.add(k)));
            to.add(k / 2).cast::<__m256bh>().write_unaligned(halves);
        }
    }
}

/// As [`round_row`], and to the second place what rounding has left, rounded in turn.
///
/// # Safety
/// As [`round_row`], for both places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn split_row(x: *const f32, columns: usize, to: [*mut u32; 2]) {
    use std::arch::x86_64::*;
    for k in (0..columns).step_by(16) {
        // SAFETY: sixteen floats and twice eight words, by the caller's word.
        unsafe {
            let x = _mm512_loadu_ps(x.add(k));
            let halves = _mm512_cvtneps_pbh(x);
            to[0].add(k / 2).cast::<__m256bh>().write_unaligned(halves);
            let words = _mm256_loadu_si256(to[0].add(k / 2).cast());
            let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words));
            let rest = _mm512_cvtneps_pbh(_mm512_sub_ps(x, _mm512_castsi512_ps(wide)));
            to[1].add(k / 2).cast::<__m256bh>().write_unaligned(rest);
        }
    }
}
