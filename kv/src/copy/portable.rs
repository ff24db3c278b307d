//! Blocks in words of 8 bytes, for any processor and any alignment.

use super::BLOCK_BYTES;
use super::xxh3::{STRIPES, accumulate, scramble};

/// Hashes whole blocks.
///
/// # Safety
/// `source` is valid for reads of the blocks and nobody writes them.
pub(super) unsafe fn hash(source: *const u8, blocks: usize, acc: &mut [u64; 8]) {
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // SAFETY: inside the blocks.
            let words: [u64; 8] = unsafe { source.add(at).cast::<[u64; 8]>().read_unaligned() };
            accumulate(acc, &words.map(u64::from_le), 8 * stripe);
        }
        scramble(acc);
    }
}

/// Copies whole blocks, hashing them if `HASH`.
///
/// # Safety
/// See [`super::copy_blocks`].
pub(super) unsafe fn copy<const HASH: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    acc: &mut [u64; 8],
) {
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            // SAFETY: inside the blocks; the write may be unaligned, the read asks for nothing.
            let words = unsafe {
                let words = read_stripe(source.add(at));
                target.add(at).cast::<[u64; 8]>().write_unaligned(words);
                words
            };
            if HASH {
                accumulate(acc, &words.map(u64::from_le), 8 * stripe);
            }
        }
        if HASH {
            scramble(acc);
        }
    }
}

/// Reads a stripe of memory that another process may write, each byte once.
///
/// # Safety
/// 64 bytes from `source` on are valid for reads.
unsafe fn read_stripe(source: *const u8) -> [u64; 8] {
    let mut words = [0u64; 8];
    // SAFETY: inside the stripe; words are read where they are aligned, else bytes.
    unsafe {
        if (source as usize).is_multiple_of(8) {
            for (at, word) in words.iter_mut().enumerate() {
                *word = source.cast::<u64>().add(at).read_volatile();
            }
        } else {
            read_bytes(source, words.as_mut_ptr().cast(), 64);
        }
    }
    words
}

/// Reads bytes of memory that another process may write, each once.
///
/// # Safety
/// `count` bytes are valid for reads at `source` and for writes at `target`.
pub(super) unsafe fn read_bytes(source: *const u8, target: *mut u8, count: usize) {
    let mut at = 0;
    // SAFETY: `at` stays below `count`.
    unsafe {
        if (source as usize).is_multiple_of(8) {
            while at + 8 <= count {
                let word = source.add(at).cast::<u64>().read_volatile();
                target.add(at).cast::<u64>().write_unaligned(word);
                at += 8;
            }
        }
        while at < count {
            target.add(at).write(source.add(at).read_volatile());
            at += 1;
        }
    }
}
