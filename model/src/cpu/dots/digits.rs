//! Activations as whole numbers of two digits.
//!
//! A row is cut into blocks of 32, as the weights are. Within a block `x ~ scale * a` with
//! `|a| <= 32,512`, and `a = 256 * high + low`, both signed bytes. A block is one cache line: 32
//! high digits, then 32 low ones. Its header has what the sum of products needs besides.
//!
//! With one digit (`KVSERVE_ACTIVATIONS=int8`) `|a| <= 127` and there are no low digits: half the
//! work, at the accuracy that other servers have.

use super::super::aligned::Aligned;
use super::super::matrix::BLOCK;

/// Bytes of a block's digits.
pub(crate) const DIGITS_BYTES: usize = 2 * BLOCK;
/// The largest number of two digits whose high digit stays within a signed byte after rounding.
const TWO_DIGITS_MAX: f32 = 32_512.0;
const ONE_DIGIT_MAX: f32 = 127.0;
/// Blocks whose largest element is below this count as zero: its reciprocal stays finite.
const SMALLEST: f32 = 1e-30;

/// What belongs to a block besides its digits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(16))]
pub(crate) struct Header {
    /// `x = scale * a`; NaN if the block held an infinity or NaN.
    pub scale: f32,
    /// `scale * sum of a`: what a minimum of the weights is multiplied by.
    pub scaled_sum: f32,
    /// 128 times the sum of all `a`: what the offset of `Q8` bytes adds to a dot product.
    pub offset: i32,
    /// Keeps the size at 16 bytes.
    pub pad: u32,
}
// SAFETY: zero bytes are a header of zeroes.
unsafe impl super::super::aligned::Plain for Header {}

/// How many digits an activation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Digits {
    One,
    Two,
}

/// Room for some rows.
pub(crate) struct DigitRows {
    digits: Aligned<u8>,
    headers: Aligned<Header>,
    rows: usize,
    blocks: usize,
}

/// Rows as the kernel reads them.
#[derive(Clone, Copy)]
pub(crate) struct DigitInput {
    /// `[row][block][64]`
    pub digits: *const u8,
    /// `[row][block]`
    pub headers: *const Header,
    /// Blocks from one row to the next.
    pub stride: usize,
    pub count: Digits,
}

impl DigitInput {
    /// The same from a later row on, which must exist.
    ///
    /// # Safety
    /// The row exists.
    pub unsafe fn skip_rows(self, row: usize) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            DigitInput {
                digits: self.digits.add(row * self.stride * DIGITS_BYTES),
                headers: self.headers.add(row * self.stride),
                ..self
            }
        }
    }
}

impl DigitRows {
    /// For `rows` rows of at most `columns`.
    pub fn new(rows: usize, columns: usize) -> Self {
        // One block more than needed, so that rows of a power of two spread over the cache.
        let blocks = columns.div_ceil(BLOCK) + 1;
        DigitRows {
            digits: Aligned::zeroed(rows * blocks * DIGITS_BYTES),
            headers: Aligned::zeroed(rows * blocks),
            rows,
            blocks,
        }
    }

    /// From row 0 on.
    pub fn input(&self, count: Digits) -> DigitInput {
        DigitInput {
            digits: self.digits.as_ptr(),
            headers: self.headers.as_ptr(),
            stride: self.blocks,
            count,
        }
    }

    /// Fills a row from `columns` floats, a multiple of 32.
    ///
    /// # Safety
    /// `x` has `columns` readable floats; nobody else reads or writes this row; the processor has
    /// AVX-512 F, BW and VL.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn fill(&self, row: usize, x: *const f32, columns: usize, count: Digits) {
        assert!(row < self.rows && columns.is_multiple_of(BLOCK));
        assert!(columns / BLOCK <= self.blocks);
        // SAFETY: the row lies in the buffers by the assertions; the rest is the caller's word.
        unsafe {
            let digits = self.digits.as_ptr().add(row * self.blocks * DIGITS_BYTES);
            let headers = self.headers.as_ptr().add(row * self.blocks);
            avx512::cut(x, columns / BLOCK, digits, headers, count);
        }
    }
}

/// Scale and reciprocal of a block whose largest magnitude has these bits.
#[inline(always)]
fn scales(largest: u32, count: Digits) -> (f32, f32) {
    let limit = match count {
        Digits::One => ONE_DIGIT_MAX,
        Digits::Two => TWO_DIGITS_MAX,
    };
    let value = f32::from_bits(largest);
    if !value.is_finite() {
        (f32::NAN, 0.0)
    } else if value < SMALLEST {
        (0.0, 0.0)
    } else {
        (value / limit, limit / value)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    #![allow(unsafe_op_in_unsafe_fn, reason = "a few intrinsics under one contract")]
    use super::{DIGITS_BYTES, Digits, Header, scales};
    use std::arch::x86_64::*;

    /// # Safety
    /// `blocks` blocks of floats, digits and headers; AVX-512 F, BW and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn cut(
        x: *const f32,
        blocks: usize,
        digits: *mut u8,
        headers: *mut Header,
        count: Digits,
    ) {
        let magnitude = _mm512_set1_epi32(0x7FFF_FFFF);
        for block in 0..blocks {
            let x = x.add(block * 32);
            let (first, second) = (_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)));
            // As whole numbers, magnitudes keep their order, and NaN is the largest.
            let largest = _mm512_reduce_max_epu32(_mm512_max_epu32(
                _mm512_and_si512(_mm512_castps_si512(first), magnitude),
                _mm512_and_si512(_mm512_castps_si512(second), magnitude),
            ));
            let (scale, reciprocal) = scales(largest, count);
            let factor = _mm512_set1_ps(reciprocal);
            let a = _mm512_cvtps_epi32(_mm512_mul_ps(first, factor));
            let b = _mm512_cvtps_epi32(_mm512_mul_ps(second, factor));
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
            let to = digits.add(block * DIGITS_BYTES);
            let store = |at: usize, a: __m512i| {
                _mm_storeu_si128(to.add(at).cast(), _mm512_cvtepi32_epi8(a));
            };
            match count {
                Digits::One => {
                    store(0, a);
                    store(16, b);
                }
                Digits::Two => {
                    let half = _mm512_set1_epi32(128);
                    let high = |a: __m512i| _mm512_srai_epi32::<8>(_mm512_add_epi32(a, half));
                    store(0, high(a));
                    store(16, high(b));
                    // The lowest byte, as signed: a - 256 * high.
                    store(32, a);
                    store(48, b);
                }
            }
            *headers.add(block) = Header {
                scale,
                scaled_sum: scale * sum as f32,
                offset: 128 * sum,
                pad: 0,
            };
        }
    }
}

#[cfg(test)]
pub(crate) mod reference {
    //! The same in plain Rust.
    use super::{BLOCK, Digits, Header, scales};

    /// Numbers and header of a block.
    pub fn cut(x: &[f32], count: Digits) -> (Vec<i32>, Header) {
        assert_eq!(x.len(), BLOCK);
        let bits = x.iter().map(|x| x.to_bits() & 0x7FFF_FFFF);
        let (scale, reciprocal) = scales(bits.max().unwrap_or(0), count);
        let whole = |x: &f32| (x * reciprocal).round_ties_even() as i32;
        let numbers: Vec<i32> = x.iter().map(whole).collect();
        let sum: i32 = numbers.iter().sum();
        let header = Header {
            scale,
            scaled_sum: scale * sum as f32,
            offset: 128 * sum,
            pad: 0,
        };
        (numbers, header)
    }
}
