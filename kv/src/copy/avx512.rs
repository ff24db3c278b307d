//! Blocks in registers of 64 bytes: a stripe is one load, one store and one accumulator.

use super::BLOCK_BYTES;
use super::xxh3::{PRIME32_1, SCRAMBLE_AT, SECRET, STRIPES, secret_of_end};
use std::arch::x86_64::*;

/// Hashes whole blocks, then the `end` stripes of the last block (0: there is more to come).
///
/// # Safety
/// `source` is valid for reads of all of them, nobody writes them, the processor has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn hash(source: *const u8, blocks: usize, end: usize, acc: &mut [u64; 8]) {
    // SAFETY: 8 words are 64 bytes.
    let mut sum = unsafe { _mm512_loadu_si512(acc.as_ptr().cast()) };
    // SAFETY: inside the blocks and the end, as long as `at` is.
    let words = |at: usize| unsafe { _mm512_loadu_si512(source.add(at).cast()) };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            sum = accumulate(sum, words(block * BLOCK_BYTES + stripe * 64), 8 * stripe);
        }
        sum = scramble(sum);
    }
    for stripe in 0..end {
        let words = words(blocks * BLOCK_BYTES + stripe * 64);
        sum = accumulate(sum, words, secret_of_end(stripe, end));
    }
    // SAFETY: as for the load.
    unsafe { _mm512_storeu_si512(acc.as_mut_ptr().cast(), sum) };
}

/// Copies whole blocks, then the `end` stripes of the last block (0: there is more to come);
/// hashes them if `HASH`, stores past the caches if `STREAM`.
///
/// # Safety
/// See [`super::copy_stripes`]; both are aligned to 64 and the processor has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy<const HASH: bool, const STREAM: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    end: usize,
    acc: &mut [u64; 8],
) {
    // SAFETY: 8 words are 64 bytes.
    let mut sum = unsafe { _mm512_loadu_si512(acc.as_ptr().cast()) };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // SAFETY: inside the blocks, aligned.
            let words = unsafe { carry::<STREAM>(source.add(at), target.add(at)) };
            if HASH {
                sum = accumulate(sum, words, 8 * stripe);
            }
        }
        if HASH {
            sum = scramble(sum);
        }
    }
    for stripe in 0..end {
        let at = blocks * BLOCK_BYTES + stripe * 64;
        // SAFETY: inside the end, aligned.
        let words = unsafe { carry::<STREAM>(source.add(at), target.add(at)) };
        if HASH {
            sum = accumulate(sum, words, secret_of_end(stripe, end));
        }
    }
    // SAFETY: as for the load.
    unsafe { _mm512_storeu_si512(acc.as_mut_ptr().cast(), sum) };
}

/// Moves one stripe and gives its words, which are read once.
///
/// # Safety
/// See [`copy`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn carry<const STREAM: bool>(source: *const u8, target: *mut u8) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let words = source.cast::<__m512i>().read_volatile();
        if STREAM {
            _mm512_stream_si512(target.cast(), words);
        } else {
            _mm512_store_si512(target.cast(), words);
        }
        words
    }
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
fn accumulate(sum: __m512i, words: __m512i, secret_at: usize) -> __m512i {
    let keyed = _mm512_xor_si512(words, secret(secret_at));
    let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed));
    let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(words);
    // One addition a stripe in the chain from sum to sum.
    _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped))
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
