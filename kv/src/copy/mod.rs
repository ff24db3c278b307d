//! Copying pages out of memory that another process may be writing, with the checksum fused in.
//!
//! **Owns** the kernels (AVX-512, AVX2, portable; chosen at run time) and the xxh3 arithmetic.
//! **Never** decides whether a copy is good: the caller compares the page's generation before
//! and after (PROTOCOL X2) and the checksum with the one that came in an authenticated frame.
//! **Keeps**: the checksum is over the very bytes that were stored, each read once from the
//! source. Reads of the source are volatile, so nothing is read twice or ahead of its check.
//!
//! No kernel prefetches: asking 1 KiB ahead cost 10 % at 24 x 1 MiB and won nothing at 24 x 16 KiB
//! (`benches/src/bin/transfer`), since the processor's own prefetchers see the order anyway.
//!
//! | file | what |
//! |---|---|
//! | `page.rs` | one page's copy, in pieces |
//! | `xxh3.rs` | constants, start, end and tail of the hash |
//! | `avx512.rs`, `avx2.rs`, `portable.rs` | blocks of 1,024 bytes and what ends a page: copy, hash or both |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod page;
mod portable;
mod xxh3;

pub use page::PageCopy;

/// Bytes of a block: 16 stripes of 64, after which the hash scrambles its state.
pub const BLOCK_BYTES: usize = 1024;

/// Which instructions the kernels use. All give the same bytes and the same hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Words of 8 bytes.
    Portable,
    /// 32 bytes.
    Avx2,
    /// 64 bytes.
    Avx512,
}

impl Isa {
    /// The widest that this processor has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                return Isa::Avx512;
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// All that this processor has, the narrowest first.
    pub fn available() -> Vec<Isa> {
        let widest = Isa::detect();
        [Isa::Portable, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .filter(|isa| *isa as u8 <= widest as u8)
            .collect()
    }

    /// A short stable label.
    pub fn label(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }
}

/// How copied bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stores {
    /// Past the caches: the target is not read soon, and its lines are not fetched first.
    Streaming,
    /// Through the caches: the decode step that reads the pages follows at once.
    Plain,
}

/// The instructions and the stores of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Instructions; must be among [`Isa::available`].
    isa: Isa,
    stores: Stores,
}

impl Kernel {
    /// A kernel with the widest instructions of this processor.
    pub fn detect(stores: Stores) -> Kernel {
        Kernel {
            isa: Isa::detect(),
            stores,
        }
    }

    /// A kernel with the given instructions, or `None` where the processor lacks them.
    pub fn with_isa(isa: Isa, stores: Stores) -> Option<Kernel> {
        Isa::available()
            .contains(&isa)
            .then_some(Kernel { isa, stores })
    }

    /// Its instructions.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Its stores.
    pub fn stores(self) -> Stores {
        self.stores
    }
}

/// All stores before this are visible before any after it, streaming ones included.
pub fn store_fence() {
    // SAFETY: SSE is part of every x86-64 processor.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// The xxh3 (64 bits, no seed) of `bytes`.
pub fn hash(bytes: &[u8]) -> u64 {
    static ISA: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
    hash_with(*ISA.get_or_init(Isa::detect), bytes)
}

/// As [`hash`], with the given instructions, which the processor must have.
fn hash_with(isa: Isa, bytes: &[u8]) -> u64 {
    if bytes.len() <= xxh3::SHORT_MAX {
        return xxhash_rust::xxh3::xxh3_64(bytes);
    }
    let blocks = (bytes.len() - 1) / BLOCK_BYTES;
    let tail = &bytes[blocks * BLOCK_BYTES..];
    let end = stripes_of_end(tail.len());
    let mut acc = xxh3::START;
    // SAFETY: the slice holds that many whole blocks and stripes and is only read.
    unsafe { hash_stripes(isa, bytes.as_ptr(), blocks, end, &mut acc) };
    if end > 0 {
        return xxh3::merge(&acc, bytes.len());
    }
    let last = bytes.last_chunk::<64>().expect("longer than 240 bytes");
    xxh3::finish(acc, tail, last, bytes.len())
}

/// Stripes of a last block of 1 to 1,024 bytes that the kernels take; 0 if it is no whole number
/// of stripes, which no layout's page is.
fn stripes_of_end(tail_bytes: usize) -> usize {
    if tail_bytes.is_multiple_of(64) {
        tail_bytes / 64
    } else {
        0
    }
}

/// Hashes whole blocks, then the `end` stripes of the last block (0: there is more to come).
///
/// # Safety
/// `source` is valid for reads of all of them, nobody writes them, and the processor has `isa`.
unsafe fn hash_stripes(isa: Isa, source: *const u8, blocks: usize, end: usize, acc: &mut [u64; 8]) {
    // SAFETY: as the caller promises.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::hash(source, blocks, end, acc),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::hash(source, blocks, end, acc),
            _ => portable::hash(source, blocks, end, acc),
        }
    }
}

/// Copies whole blocks, then the `end` stripes of the last block (0: there is more to come);
/// hashes them if `HASH`.
///
/// # Safety
/// `source` is valid for (volatile) reads and `target` for writes of all of them, they do not
/// overlap, nobody else touches the target, and the processor has the kernel's instructions.
unsafe fn copy_stripes<const HASH: bool>(
    kernel: Kernel,
    source: *const u8,
    target: *mut u8,
    blocks: usize,
    end: usize,
    acc: &mut [u64; 8],
) {
    let aligned = (source as usize | target as usize).is_multiple_of(64);
    // SAFETY: as the caller promises; the wide kernels get aligned pages only.
    unsafe {
        match (kernel.isa, kernel.stores, aligned) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, Stores::Streaming, true) => {
                avx512::copy::<HASH, true>(source, target, blocks, end, acc);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, Stores::Plain, true) => {
                avx512::copy::<HASH, false>(source, target, blocks, end, acc);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Stores::Streaming, true) => {
                avx2::copy::<HASH, true>(source, target, blocks, end, acc);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Stores::Plain, true) => {
                avx2::copy::<HASH, false>(source, target, blocks, end, acc);
            }
            // Pages of a pool are aligned; anything else is only slower.
            _ => portable::copy::<HASH>(source, target, blocks, end, acc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isa_hashes_as_the_reference_does() {
        let bytes: Vec<u8> = (0..20_000u32)
            .map(|at| (at * 31 + (at >> 7)) as u8)
            .collect();
        let lengths = (0..2_500).chain([4096, 16_384, 16_385, 19_999, 20_000]);
        for length in lengths {
            for shift in [0, 1, 8] {
                let Some(part) = bytes.get(shift..shift + length) else {
                    continue;
                };
                let expected = xxhash_rust::xxh3::xxh3_64(part);
                for isa in Isa::available() {
                    assert_eq!(hash_with(isa, part), expected, "{isa:?}, {length} bytes");
                }
                assert_eq!(hash(part), expected);
            }
        }
    }

    #[test]
    fn no_kernel_is_made_of_instructions_that_are_not_there() {
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let made = Kernel::with_isa(isa, Stores::Plain).is_some();
            assert_eq!(made, Isa::available().contains(&isa));
        }
    }
}
