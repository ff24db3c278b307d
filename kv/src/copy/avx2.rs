//! Blocks in registers of 32 bytes: a stripe is two of everything.

use super::BLOCK_BYTES;
use super::xxh3::{PRIME32_1, SCRAMBLE_AT, SECRET, STRIPES, secret_of_end};
use std::arch::x86_64::*;

/// Hashes whole blocks, then the `end` stripes of the last block (0: there is more to come).
///
/// # Safety
/// `source` is valid for reads of all of them, nobody writes them, the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn hash(source: *const u8, blocks: usize, end: usize, acc: &mut [u64; 8]) {
    let mut sums = load(acc);
    // SAFETY: inside the blocks and the end, as long as `at` is.
    let words = |at: usize| unsafe {
        [
            _mm256_loadu_si256(source.add(at).cast()),
            _mm256_loadu_si256(source.add(at + 32).cast()),
        ]
    };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let words = words(block * BLOCK_BYTES + stripe * 64);
            accumulate(&mut sums, words, 8 * stripe);
        }
        scramble(&mut sums);
    }
    for stripe in 0..end {
        let words = words(blocks * BLOCK_BYTES + stripe * 64);
        accumulate(&mut sums, words, secret_of_end(stripe, end));
    }
    store(acc, sums);
}

/// Copies whole blocks, then the `end` stripes of the last block (0: there is more to come);
/// hashes them if `HASH`, stores past the caches if `STREAM`.
///
/// # Safety
/// See [`super::copy_stripes`]; both are aligned to 64 and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy<const HASH: bool, const STREAM: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    end: usize,
    acc: &mut [u64; 8],
) {
    let mut sums = load(acc);
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // SAFETY: inside the blocks, aligned.
            let words = unsafe { carry::<STREAM>(source.add(at), target.add(at)) };
            if HASH {
                accumulate(&mut sums, words, 8 * stripe);
            }
        }
        if HASH {
            scramble(&mut sums);
        }
    }
    for stripe in 0..end {
        let at = blocks * BLOCK_BYTES + stripe * 64;
        // SAFETY: inside the end, aligned.
        let words = unsafe { carry::<STREAM>(source.add(at), target.add(at)) };
        if HASH {
            accumulate(&mut sums, words, secret_of_end(stripe, end));
        }
    }
    store(acc, sums);
}

/// Moves one stripe and gives its words, which are read once.
///
/// # Safety
/// See [`copy`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn carry<const STREAM: bool>(source: *const u8, target: *mut u8) -> [__m256i; 2] {
    let mut words = [_mm256_setzero_si256(); 2];
    for (half, word) in words.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        unsafe {
            *word = source.cast::<__m256i>().add(half).read_volatile();
            let into = target.cast::<__m256i>().add(half);
            if STREAM {
                _mm256_stream_si256(into, *word);
            } else {
                _mm256_store_si256(into, *word);
            }
        }
    }
    words
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
fn accumulate(sums: &mut [__m256i; 2], words: [__m256i; 2], secret_at: usize) {
    for (half, (sum, words)) in sums.iter_mut().zip(words).enumerate() {
        let keyed = _mm256_xor_si256(words, secret(secret_at + 32 * half));
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(words);
        // One addition a stripe in the chain from sum to sum.
        *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, swapped));
    }
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
