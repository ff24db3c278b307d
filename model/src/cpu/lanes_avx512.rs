//! Sixteen lanes as one AVX-512 register.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is a few intrinsics under the contract of `Lanes`"
)]

use super::lanes::{Lanes, MicroArgs, Op, dispatch_micro};
use std::arch::x86_64::*;

/// AVX-512F.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn enter_avx512<O: Op>(op: O) -> O::Out {
    op.run::<Avx512>()
}

#[inline(always)]
unsafe fn low_and_high(a: __m512) -> (__m256, __m256) {
    let bits = _mm512_castps_si512(a);
    (
        _mm512_castps512_ps256(a),
        _mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(bits)),
    )
}

impl Lanes for Avx512 {
    type V = __m512;
    type Words = __m512i;
    // 12 rows x 2 registers of sums, 2 of weights, the broadcasts: 28 of 32 registers.
    const MICRO_ROWS: usize = 12;
    const MICRO_GROUPS: usize = 2;
    const DIRECT_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn enter<O: Op>(op: O) -> O::Out {
        enter_avx512(op)
    }

    unsafe fn micro(args: MicroArgs, rows: usize, groups: usize) {
        dispatch_micro!(Self, args, rows, groups, [1 2 3 4 5 6 7 8 9 10 11 12], [1 2])
    }

    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        _mm512_storeu_ps(to, value)
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(a, n)
    }
    #[inline(always)]
    unsafe fn keep_first(a: __m512, count: usize, fill: f32) -> __m512 {
        let mask = ((1u32 << count.min(16)) - 1) as __mmask16;
        _mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), a)
    }
    #[inline(always)]
    unsafe fn reduce_sum(a: __m512) -> f32 {
        let (low, high) = low_and_high(a);
        let eight = _mm256_add_ps(low, high);
        let four = _mm_add_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps::<1>(eight),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: __m512) -> f32 {
        let (low, high) = low_and_high(a);
        let eight = _mm256_max_ps(low, high);
        let four = _mm_max_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps::<1>(eight),
        );
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> __m512i {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn low_nibble(words: __m512i) -> __m512 {
        // A permute reads the low four bits of each index only: mask and conversion in one.
        let table = _mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
        );
        _mm512_permutexvar_ps(words, table)
    }
    #[inline(always)]
    unsafe fn low_byte(words: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(255)))
    }
    #[inline(always)]
    unsafe fn low_bf16(words: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
    #[inline(always)]
    unsafe fn high_bf16(words: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-0x1_0000)))
    }
    #[inline(always)]
    unsafe fn drop_nibble(words: __m512i) -> __m512i {
        _mm512_srli_epi32::<4>(words)
    }
    #[inline(always)]
    unsafe fn drop_byte(words: __m512i) -> __m512i {
        _mm512_srli_epi32::<8>(words)
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        let mut a = [_mm512_setzero_ps(); 16];
        let mut b = a;
        for (row, value) in a.iter_mut().enumerate() {
            *value = _mm512_loadu_ps(from.add(row * from_stride));
        }
        // Within 128-bit lanes: pairs of rows, then fours.
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        for i in 0..4 {
            let pd = |v: __m512| _mm512_castps_pd(v);
            let ps = |v: __m512d| _mm512_castpd_ps(v);
            let (r0, r1, r2, r3) = (b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]);
            a[4 * i] = ps(_mm512_unpacklo_pd(pd(r0), pd(r2)));
            a[4 * i + 1] = ps(_mm512_unpackhi_pd(pd(r0), pd(r2)));
            a[4 * i + 2] = ps(_mm512_unpacklo_pd(pd(r1), pd(r3)));
            a[4 * i + 3] = ps(_mm512_unpackhi_pd(pd(r1), pd(r3)));
        }
        // a[4i + j] holds, in lane block l, column 4l + j of rows 4i..4i+4. Transpose the blocks.
        for j in 0..4 {
            let low01 = _mm512_shuffle_f32x4::<0x44>(a[j], a[4 + j]);
            let high01 = _mm512_shuffle_f32x4::<0xEE>(a[j], a[4 + j]);
            let low23 = _mm512_shuffle_f32x4::<0x44>(a[8 + j], a[12 + j]);
            let high23 = _mm512_shuffle_f32x4::<0xEE>(a[8 + j], a[12 + j]);
            b[j] = _mm512_shuffle_f32x4::<0x88>(low01, low23);
            b[4 + j] = _mm512_shuffle_f32x4::<0xDD>(low01, low23);
            b[8 + j] = _mm512_shuffle_f32x4::<0x88>(high01, high23);
            b[12 + j] = _mm512_shuffle_f32x4::<0xDD>(high01, high23);
        }
        for (column, value) in b.into_iter().enumerate() {
            _mm512_storeu_ps(to.add(column * to_stride), value);
        }
    }
}
