//! Blocks in words of 8 bytes, for any processor and any alignment.

use super::BLOCK_BYTES;
use super::xxh3::{STRIPES, accumulate, scramble, secret_of_end};

/// Hashes whole blocks, then the `end` stripes of the last block (0: there is more to come).
///
/// # Safety
/// `source` is valid for reads of all of them and nobody writes them.
pub(super) unsafe fn hash(source: *const u8, blocks: usize, end: usize, acc: &mut [u64; 8]) {
    // SAFETY: inside the blocks and the end, as long as `at` is.
    let words = |at: usize| unsafe {
        let words: [u64; 8] = source.add(at).cast::<[u64; 8]>().read_unaligned();
        words.map(u64::from_le)
    };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let at = block * BLOCK_BYTES + stripe * 64;
            accumulate(acc, &words(at), 8 * stripe);
        }
        scramble(acc);
    }
    for stripe in 0..end {
        let at = blocks * BLOCK_BYTES + stripe * 64;
        accumulate(acc, &words(at), secret_of_end(stripe, end));
    }
}

/// Copies whole blocks, then the `end` stripes of the last block (0: there is more to come);
/// hashes them if `HASH`.
///
/// # Safety
/// See [`super::copy_stripes`].
pub(super) unsafe fn copy<const HASH: bool>(
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    end: usize,
    acc: &mut [u64; 8],
) {
    // SAFETY: inside the blocks and the end, as long as `at` is; the write may be unaligned,
    // the read asks for nothing.
    let carry = |at: usize| unsafe {
        let words = read_stripe(source.add(at));
        target.add(at).cast::<[u64; 8]>().write_unaligned(words);
        words.map(u64::from_le)
    };
    for block in 0..blocks {
        for stripe in 0..STRIPES {
            let words = carry(block * BLOCK_BYTES + stripe * 64);
            if HASH {
                accumulate(acc, &words, 8 * stripe);
            }
        }
        if HASH {
            scramble(acc);
        }
    }
    for stripe in 0..end {
        let words = carry(blocks * BLOCK_BYTES + stripe * 64);
        if HASH {
            accumulate(acc, &words, secret_of_end(stripe, end));
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
