//! Blocks in registers of 32 bytes: a stripe is two of everything.

use super::BLOCK_BYTES;
use super::xxh3::{PRIME32_1, SCRAMBLE_AT, SECRET, STRIPES};
use std::arch::x86_64::*;

/// Bytes that are asked for ahead of their load.
const AHEAD_BYTES: usize = 1024;

/// Hashes whole blocks.
///
/// # Safety
/// `source` is valid for reads of the blocks, nobody writes them, the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn hash(source: *const u8, blocks: usize, acc: &mut [u64; 8]) {
    let mut sums = load(acc);
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: inside the blocks.
                let words = unsafe { _mm256_loadu_si256(source.add(at + 32 * half).cast()) };
                *sum = accumulate(*sum, words, 8 * stripe + 32 * half);
            }
        }
        scramble(&mut sums);
    }
    store(acc, sums);
}

/// Copies whole blocks, hashing them if `HASH`, past the caches if `STREAM`.
///
/// # Safety
/// See [`super::copy_blocks`]; both are aligned to 64 and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy<const HASH: bool, const STREAM: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    acc: &mut [u64; 8],
) {
    let mut sums = load(acc);
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // A prefetch touches nothing, wherever it points.
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(at + AHEAD_BYTES).cast());
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: inside the blocks, aligned.
                let words = unsafe {
                    let from = source.add(at + 32 * half).cast::<__m256i>();
                    let into = target.add(at + 32 * half).cast::<__m256i>();
                    let words = from.read_volatile();
                    if STREAM {
                        _mm256_stream_si256(into, words);
                    } else {
                        _mm256_store_si256(into, words);
                    }
                    words
                };
                if HASH {
                    *sum = accumulate(*sum, words, 8 * stripe + 32 * half);
                }
            }
        }
        if HASH {
            scramble(&mut sums);
        }
    }
    store(acc, sums);
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(acc: &[u64; 8]) -> [__m256i; 2] {
    // SAFETY: two halves of 32 bytes.
    unsafe {
        [
            _mm256_loadu_si256(acc.as_ptr().cast()),
            _mm256_loadu_si256(acc.as_ptr().add(4).cast()),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(acc: &mut [u64; 8], sums: [__m256i; 2]) {
    // SAFETY: two halves of 32 bytes.
    unsafe {
        _mm256_storeu_si256(acc.as_mut_ptr().cast(), sums[0]);
        _mm256_storeu_si256(acc.as_mut_ptr().add(4).cast(), sums[1]);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn secret(at: usize) -> __m256i {
    debug_assert!(at + 32 <= SECRET.len());
    // SAFETY: the secret has 32 bytes from every place that is used on.
    unsafe { _mm256_loadu_si256(SECRET.as_ptr().add(at).cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn accumulate(sum: __m256i, words: __m256i, secret_at: usize) -> __m256i {
    let keyed = _mm256_xor_si256(words, secret(secret_at));
    let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(words);
    _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped))
}

#[inline]
#[target_feature(enable = "avx2")]
fn scramble(sums: &mut [__m256i; 2]) {
    let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
    for (half, sum) in sums.iter_mut().enumerate() {
        let mixed = _mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum));
        let mixed = _mm256_xor_si256(mixed, secret(SCRAMBLE_AT + 32 * half));
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
        *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
    }
}
