//! Sixteen lanes in plain Rust: for processors without AVX2, and the reference in tests.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is one step under the contract of `Lanes`"
)]

use super::lanes::{Lanes, MicroArgs, Op, dispatch_micro};
use crate::weights::f16_to_f32;

/// Plain Rust; multiplies and adds with two roundings.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Lanes for Portable {
    type V = [f32; 16];
    type Words = [u32; 16];
    // Two rows of sixteen lanes are eight SSE registers, half of what x86-64 has.
    const MICRO_ROWS: usize = 2;
    const MICRO_GROUPS: usize = 1;
    const DIRECT_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn enter<O: Op>(op: O) -> O::Out {
        op.run::<Self>()
    }

    unsafe fn micro(args: MicroArgs, rows: usize, groups: usize) {
        dispatch_micro!(Self, args, rows, groups, [1 2], [1])
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        from.cast::<[f32; 16]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        to.cast::<[f32; 16]>().write_unaligned(value)
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding and taking 1.5 * 2^23 rounds to even in the default rounding mode.
        const SHIFT: f32 = 12_582_912.0;
        a.map(|value| (value + SHIFT) - SHIFT)
    }
    #[inline(always)]
    unsafe fn scale_pow2(a: Self::V, n: Self::V) -> Self::V {
        map2(a, n, |a, n| {
            a * f32::from_bits(((n as i32 + 127) as u32) << 23)
        })
    }
    #[inline(always)]
    unsafe fn keep_first(a: Self::V, count: usize, fill: f32) -> Self::V {
        std::array::from_fn(|lane| if lane < count { a[lane] } else { fill })
    }
    #[inline(always)]
    unsafe fn reduce_sum(a: Self::V) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|lane| a[lane] + a[lane + 8]);
        let four: [f32; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::V) -> f32 {
        a.into_iter()
            .fold(a[0], |best, value| if value > best { value } else { best })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::V {
        from.cast::<[u16; 16]>().read_unaligned().map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        from.cast::<[u32; 16]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn low_nibble(words: Self::Words) -> Self::V {
        words.map(|word| (word & 15) as i32 as f32)
    }
    #[inline(always)]
    unsafe fn low_byte(words: Self::Words) -> Self::V {
        words.map(|word| (word & 255) as i32 as f32)
    }
    #[inline(always)]
    unsafe fn low_bf16(words: Self::Words) -> Self::V {
        words.map(|word| f32::from_bits(word << 16))
    }
    #[inline(always)]
    unsafe fn high_bf16(words: Self::Words) -> Self::V {
        words.map(|word| f32::from_bits(word & 0xFFFF_0000))
    }
    #[inline(always)]
    unsafe fn drop_nibble(words: Self::Words) -> Self::Words {
        words.map(|word| word >> 4)
    }
    #[inline(always)]
    unsafe fn drop_byte(words: Self::Words) -> Self::Words {
        words.map(|word| word >> 8)
    }
}
