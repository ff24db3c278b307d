//! Blocks in registers of 64 bytes: a stripe is one load, one store and one accumulator.

use super::BLOCK_BYTES;
use super::xxh3::{PRIME32_1, SCRAMBLE_AT, SECRET, STRIPES};
use std::arch::x86_64::*;

/// Bytes that are asked for ahead of their load: some 8 stripes' time is a memory access.
const AHEAD_BYTES: usize = 1024;

/// Hashes whole blocks.
///
/// # Safety
/// `source` is valid for reads of the blocks, nobody writes them, the processor has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn hash(source: *const u8, blocks: usize, acc: &mut [u64; 8]) {
    // SAFETY: 8 words are 64 bytes.
    let mut sum = unsafe { _mm512_loadu_si512(acc.as_ptr().cast()) };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            // SAFETY: inside the blocks.
            let words =
                unsafe { _mm512_loadu_si512(source.add(block * BLOCK_BYTES + stripe * 64).cast()) };
            sum = accumulate(sum, words, stripe);
        }
        sum = scramble(sum);
    }
    // SAFETY: as for the load.
    unsafe { _mm512_storeu_si512(acc.as_mut_ptr().cast(), sum) };
}

/// Copies whole blocks, hashing them if `HASH`, past the caches if `STREAM`.
///
/// # Safety
/// See [`super::copy_blocks`]; both are aligned to 64 and the processor has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy<const HASH: bool, const STREAM: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    acc: &mut [u64; 8],
) {
    // SAFETY: 8 words are 64 bytes.
    let mut sum = unsafe { _mm512_loadu_si512(acc.as_ptr().cast()) };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // A prefetch touches nothing, wherever it points.
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(at + AHEAD_BYTES).cast());
            // SAFETY: inside the blocks, aligned.
            let words = unsafe {
                let words = source.add(at).cast::<__m512i>().read_volatile();
                let into = target.add(at).cast::<__m512i>();
                if STREAM {
                    _mm512_stream_si512(into, words);
                } else {
                    _mm512_store_si512(into, words);
                }
                words
            };
            if HASH {
                sum = accumulate(sum, words, stripe);
            }
        }
        if HASH {
            sum = scramble(sum);
        }
    }
    // SAFETY: as for the load.
    unsafe { _mm512_storeu_si512(acc.as_mut_ptr().cast(), sum) };
}

#[inline]
#[target_feature(enable = "avx512f")]
fn secret(at: usize) -> __m512i {
    debug_assert!(at + 64 <= SECRET.len());
    // SAFETY: the secret has 64 bytes from every place that is used on.
    unsafe { _mm512_loadu_si512(SECRET.as_ptr().add(at).cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn accumulate(sum: __m512i, words: __m512i, stripe: usize) -> __m512i {
    let keyed = _mm512_xor_si512(words, secret(8 * stripe));
    let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed));
    let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(words);
    _mm512_add_epi64(product, _mm512_add_epi64(sum, swapped))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn scramble(sum: __m512i) -> __m512i {
    let mixed = _mm512_xor_si512(sum, _mm512_srli_epi64::<47>(sum));
    let mixed = _mm512_xor_si512(mixed, secret(SCRAMBLE_AT));
    let prime = _mm512_set1_epi64(PRIME32_1 as i64);
    let low = _mm512_mul_epu32(mixed, prime);
    let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
    _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high))
}
