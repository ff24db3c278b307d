//! One page's copy, in pieces, with its hash.

use super::xxh3;
use super::{BLOCK_BYTES, Kernel, copy_stripes, portable, stripes_of_end};

/// A page being copied. It keeps no pointer: each step is given both ends anew, so that what
/// makes them valid is the caller's affair at each step.
#[derive(Clone, Debug)]
pub struct PageCopy {
    bytes: usize,
    done: usize,
    hashing: bool,
    acc: [u64; 8],
    hash: u64,
}

impl PageCopy {
    /// The copy of a page of `bytes` bytes, at least one; nothing is touched yet.
    pub fn new(bytes: usize, hashing: bool) -> Self {
        assert!(bytes > 0, "a page of no bytes");
        PageCopy {
            bytes,
            done: 0,
            hashing,
            acc: xxh3::START,
            hash: 0,
        }
    }

    /// Bytes copied so far.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Whether the whole page is in place. [`super::store_fence`] comes before anyone reads it.
    pub fn is_whole(&self) -> bool {
        self.done == self.bytes
    }

    /// The xxh3 of the bytes as they were stored, once whole and if it was to be computed.
    pub fn hash(&self) -> Option<u64> {
        (self.hashing && self.is_whole()).then_some(self.hash)
    }

    /// Copies about `bytes_max` bytes on, at least a block and never more than a block too many;
    /// returns how many. `source` and `target` are the page's first bytes.
    ///
    /// # Safety
    /// `source` is valid for reads of the page's bytes (another process may write them: what is
    /// read then is for the caller to reject) and `target` for writes; they do not overlap and
    /// nobody else touches the target between the first step and the last.
    pub unsafe fn step(
        &mut self,
        kernel: Kernel,
        source: *const u8,
        target: *mut u8,
        bytes_max: usize,
    ) -> usize {
        let before = self.done;
        let in_blocks = (self.bytes - 1) / BLOCK_BYTES * BLOCK_BYTES;
        let wanted = (bytes_max / BLOCK_BYTES).max(1);
        let blocks = wanted.min((in_blocks.saturating_sub(before)) / BLOCK_BYTES);
        let ends = before + blocks * BLOCK_BYTES == in_blocks;
        // A page of another length than whole stripes, or so short that the hash has another
        // formula, ends by way of `tail`.
        let end = match self.bytes {
            bytes if ends && bytes > xxh3::SHORT_MAX => stripes_of_end(bytes - in_blocks),
            _ => 0,
        };
        // SAFETY: the blocks and stripes lie inside the page; the rest is the caller's promise.
        unsafe {
            let (from, into) = (source.add(before), target.add(before));
            if self.hashing {
                copy_stripes::<true>(kernel, from, into, blocks, end, &mut self.acc);
            } else {
                copy_stripes::<false>(kernel, from, into, blocks, end, &mut self.acc);
            }
        }
        self.done += blocks * BLOCK_BYTES + end * 64;
        if end > 0 && self.hashing {
            self.hash = xxh3::merge(&self.acc, self.bytes);
        }
        if ends && end == 0 {
            // SAFETY: as for the blocks.
            unsafe { self.tail(source, target) };
        }
        self.done - before
    }

    /// The last block, 1 to 1,024 bytes of any number: by way of a buffer, so that what is hashed is what is
    /// stored although the last stripe reaches back over bytes that were mixed before.
    ///
    /// # Safety
    /// As [`PageCopy::step`].
    unsafe fn tail(&mut self, source: *const u8, target: *mut u8) {
        let at = self.done;
        let count = self.bytes - at;
        // 64 bytes before the tail, then the tail.
        let mut buffer = [0u8; 64 + BLOCK_BYTES];
        // SAFETY: inside the page; what lies before the tail has been stored by this copy.
        unsafe {
            if self.hashing && at > 0 {
                let before = target.add(at - 64);
                std::ptr::copy_nonoverlapping(before, buffer.as_mut_ptr(), 64);
            }
            portable::read_bytes(source.add(at), buffer.as_mut_ptr().add(64), count);
            std::ptr::copy_nonoverlapping(buffer.as_ptr().add(64), target.add(at), count);
        }
        self.done = self.bytes;
        if self.hashing {
            let tail = &buffer[64..64 + count];
            self.hash = if self.bytes <= xxh3::SHORT_MAX {
                xxhash_rust::xxh3::xxh3_64(tail)
            } else {
                let last = buffer[count..].first_chunk::<64>();
                let last = last.expect("the buffer holds 64 bytes before the tail");
                xxh3::finish(self.acc, tail, last, self.bytes)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, Kernel, Stores, store_fence};
    use super::*;

    /// The same sequence on each run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }
    }

    /// Every kernel, over lengths, alignments and pieces that no power of two divides, copies
    /// exactly the page and hashes it as the reference does.
    #[test]
    fn every_kernel_copies_what_memcpy_copies_and_hashes_what_it_stored() {
        const ROOM: usize = 40_000;
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let source: Vec<u8> = (0..ROOM).map(|_| random.below(256) as u8).collect();
        let mut target = vec![0u8; ROOM];
        let special = [
            1, 2, 63, 64, 65, 192, 240, 241, 256, 1023, 1024, 1025, 1088, 2048, 16_384, 20_000,
        ];
        for round in 0..1_500 {
            let bytes = match special.get(round) {
                Some(bytes) => *bytes,
                // Whole stripes, as pages have, and odd lengths in turn.
                None if round % 2 == 0 => 64 * (1 + random.below(280)),
                None => 1 + random.below(18_000),
            };
            let align = |random: &mut Random, base: *const u8| {
                let first = base.align_offset(64);
                first
                    + if random.below(2) == 0 {
                        0
                    } else {
                        random.below(128)
                    }
            };
            let from = align(&mut random, source.as_ptr());
            let into = 64 + align(&mut random, target.as_ptr());
            let isas = Isa::available();
            let isa = isas[random.below(isas.len())];
            let stores = [Stores::Streaming, Stores::Plain][random.below(2)];
            let kernel = Kernel::with_isa(isa, stores).expect("available");
            let hashing = random.below(4) > 0;
            let piece = 1 + random.below(6_000);
            target.fill(0xEE);
            let mut copy = PageCopy::new(bytes, hashing);
            assert_eq!(copy.hash(), None);
            while !copy.is_whole() {
                let before = copy.done();
                // SAFETY: both vectors have room for the page at these places.
                let count = unsafe {
                    copy.step(
                        kernel,
                        source.as_ptr().add(from),
                        target.as_mut_ptr().add(into),
                        piece,
                    )
                };
                assert!(count > 0 && count <= piece.max(BLOCK_BYTES) + BLOCK_BYTES);
                assert_eq!(copy.done(), before + count);
            }
            store_fence();
            let page = &source[from..from + bytes];
            assert!(
                target[into..into + bytes] == *page,
                "{kernel:?}, {bytes} bytes"
            );
            assert!(target[..into].iter().all(|byte| *byte == 0xEE));
            assert!(target[into + bytes..].iter().all(|byte| *byte == 0xEE));
            let expected = hashing.then(|| xxhash_rust::xxh3::xxh3_64(page));
            assert_eq!(copy.hash(), expected, "{kernel:?}, {bytes} bytes");
        }
    }
}
