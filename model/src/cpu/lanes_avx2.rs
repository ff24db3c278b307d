//! Sixteen lanes as two AVX2 registers.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is a few intrinsics under the contract of `Lanes`"
)]

use super::lanes::{Lanes, MicroArgs, Op, dispatch_micro};
use std::arch::x86_64::*;

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[derive(Clone, Copy)]
pub(crate) struct Pair(__m256, __m256);

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn enter_avx2<O: Op>(op: O) -> O::Out {
    op.run::<Avx2>()
}

#[inline(always)]
unsafe fn halves(a: Pair) -> (__m128, __m128) {
    (_mm256_castps256_ps128(a.0), _mm256_extractf128_ps::<1>(a.0))
}

#[inline(always)]
unsafe fn masked(words: (__m256i, __m256i), mask: i32) -> Pair {
    let mask = _mm256_set1_epi32(mask);
    Pair(
        _mm256_cvtepi32_ps(_mm256_and_si256(words.0, mask)),
        _mm256_cvtepi32_ps(_mm256_and_si256(words.1, mask)),
    )
}

impl Lanes for Avx2 {
    type V = Pair;
    type Words = (__m256i, __m256i);
    // 6 rows x 2 registers of sums, 2 of weights, 1 broadcast: 15 of 16 registers.
    const MICRO_ROWS: usize = 6;
    const MICRO_GROUPS: usize = 1;
    const DIRECT_GROUPS: usize = 2;

    #[inline(always)]
    unsafe fn enter<O: Op>(op: O) -> O::Out {
        enter_avx2(op)
    }

    unsafe fn micro(args: MicroArgs, rows: usize, groups: usize) {
        dispatch_micro!(Self, args, rows, groups, [1 2 3 4 5 6], [1])
    }

    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Pair {
        let both = _mm256_set1_ps(value);
        Pair(both, both)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Pair {
        Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Pair) {
        _mm256_storeu_ps(to, value.0);
        _mm256_storeu_ps(to.add(8), value.1);
    }
    #[inline(always)]
    unsafe fn add(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn sub(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn div(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn max(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn min(a: Pair, b: Pair) -> Pair {
        Pair(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        Pair(
            _mm256_fmadd_ps(a.0, b.0, c.0),
            _mm256_fmadd_ps(a.1, b.1, c.1),
        )
    }
    #[inline(always)]
    unsafe fn round(a: Pair) -> Pair {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Pair(
            _mm256_round_ps::<NEAREST>(a.0),
            _mm256_round_ps::<NEAREST>(a.1),
        )
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: Pair, n: Pair) -> Pair {
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias));
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias));
        Pair(
            _mm256_mul_ps(a.0, _mm256_castsi256_ps(low)),
            _mm256_mul_ps(a.1, _mm256_castsi256_ps(high)),
        )
    }
    #[inline(always)]
    unsafe fn keep_first(a: Pair, count: usize, fill: f32) -> Pair {
        let count = _mm256_set1_epi32(count.min(16) as i32);
        let low = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        let high = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
        let fill = _mm256_set1_ps(fill);
        Pair(
            _mm256_blendv_ps(fill, a.0, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(fill, a.1, _mm256_castsi256_ps(high)),
        )
    }
    #[inline(always)]
    unsafe fn reduce_sum(a: Pair) -> f32 {
        let eight = Pair(_mm256_add_ps(a.0, a.1), a.1);
        let (low, high) = halves(eight);
        let four = _mm_add_ps(low, high);
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Pair) -> f32 {
        let eight = Pair(_mm256_max_ps(a.0, a.1), a.1);
        let (low, high) = halves(eight);
        let four = _mm_max_ps(low, high);
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Pair {
        Pair(
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
        )
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        (
            _mm256_loadu_si256(from.cast()),
            _mm256_loadu_si256(from.add(32).cast()),
        )
    }
    #[inline(always)]
    unsafe fn low_nibble(words: Self::Words) -> Pair {
        masked(words, 15)
    }
    #[inline(always)]
    unsafe fn low_byte(words: Self::Words) -> Pair {
        masked(words, 255)
    }
    #[inline(always)]
    unsafe fn low_bf16(words: Self::Words) -> Pair {
        Pair(
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words.0)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words.1)),
        )
    }
    #[inline(always)]
    unsafe fn high_bf16(words: Self::Words) -> Pair {
        let mask = _mm256_set1_epi32(-0x1_0000);
        Pair(
            _mm256_castsi256_ps(_mm256_and_si256(words.0, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(words.1, mask)),
        )
    }
    #[inline(always)]
    unsafe fn drop_nibble(words: Self::Words) -> Self::Words {
        (
            _mm256_srli_epi32::<4>(words.0),
            _mm256_srli_epi32::<4>(words.1),
        )
    }
    #[inline(always)]
    unsafe fn drop_byte(words: Self::Words) -> Self::Words {
        (
            _mm256_srli_epi32::<8>(words.0),
            _mm256_srli_epi32::<8>(words.1),
        )
    }
}
