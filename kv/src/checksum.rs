//! Checksums of pages: what a migration is checked against before it is committed.
//!
//! The prefill side computes one 64-bit value a page and sends it in an authenticated frame
//! (PROTOCOL S1, L4); the decode side computes it again over what has landed. A page is always
//! covered over the layout's whole page bytes: a page that holds fewer tokens is still moved
//! whole.

use crate::pool::{PageId, PoolMemory};
use std::fmt;
use std::str::FromStr;
use xxhash_rust::xxh3::Xxh3;

/// Bytes of each sample in [`ChecksumMode::Sampled`]: one cache line.
const SAMPLE_BYTES: usize = 64;

/// One sample every so many bytes: the smallest RDMA path MTU, so that no packet of a transfer
/// can be missing unseen.
const SAMPLE_EVERY_BYTES: usize = 1024;

/// Keeps the values of the two modes apart, so that peers of unlike modes never agree by chance.
const SAMPLED_SEED: u64 = 0x6b76_7361_6d70_6c65;

/// How much of a page its checksum covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ChecksumMode {
    /// None: lengths and COMMIT alone prove a migration.
    Off,
    /// A line of 64 bytes in every 1,024 and the last one: finds missing or misplaced packets.
    Sampled,
    /// Every byte.
    #[default]
    Full,
}

impl ChecksumMode {
    /// The name used on the command line.
    pub fn label(self) -> &'static str {
        match self {
            ChecksumMode::Off => "off",
            ChecksumMode::Sampled => "sampled",
            ChecksumMode::Full => "full",
        }
    }
}

impl fmt::Display for ChecksumMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// A word that is none of the three modes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownChecksumMode(
    /// What was given.
    pub String,
);

impl fmt::Display for UnknownChecksumMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown checksum mode {:?}: use off, sampled or full",
            self.0
        )
    }
}

impl std::error::Error for UnknownChecksumMode {}

impl FromStr for ChecksumMode {
    type Err = UnknownChecksumMode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Off, Self::Sampled, Self::Full]
            .into_iter()
            .find(|mode| mode.label() == text)
            .ok_or_else(|| UnknownChecksumMode(text.to_owned()))
    }
}

/// The checksum of one page's bytes; 0 when checksums are off.
pub fn checksum(mode: ChecksumMode, bytes: &[u8]) -> u64 {
    match mode {
        ChecksumMode::Off => 0,
        ChecksumMode::Full => crate::copy::hash(bytes),
        ChecksumMode::Sampled => {
            let mut hash = Xxh3::with_seed(SAMPLED_SEED);
            for block in bytes.chunks(SAMPLE_EVERY_BYTES) {
                hash.update(&block[..block.len().min(SAMPLE_BYTES)]);
            }
            hash.update(&bytes[bytes.len().saturating_sub(SAMPLE_BYTES)..]);
            hash.digest()
        }
    }
}

/// The checksum of a page where it lies in its pool, over `page_bytes` from its start (the
/// layout's page bytes, at most the pool's stride).
///
/// # Safety
/// Nothing may write the page during the call: the caller holds it by the ledger's rules (it
/// owns it or has it named, and whoever wrote it has ended).
pub unsafe fn page_checksum(
    mode: ChecksumMode,
    pool: &PoolMemory,
    page: PageId,
    page_bytes: usize,
) -> u64 {
    assert!(
        page_bytes <= pool.page_stride(),
        "a page of {page_bytes} bytes in a stride of {}",
        pool.page_stride()
    );
    // SAFETY: `page` checks the id, the assertion the length; nobody writes it by the contract.
    let bytes = unsafe { std::slice::from_raw_parts(pool.page(page), page_bytes) };
    checksum(mode, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_sees_every_byte() {
        let mut bytes: Vec<u8> = (0..4_200u32).map(|value| value as u8).collect();
        let whole = checksum(ChecksumMode::Full, &bytes);
        for place in 0..bytes.len() {
            bytes[place] ^= 1;
            assert_ne!(checksum(ChecksumMode::Full, &bytes), whole, "byte {place}");
            bytes[place] ^= 1;
        }
        assert_eq!(checksum(ChecksumMode::Full, &bytes), whole);
        assert_eq!(checksum(ChecksumMode::Off, &bytes), 0);
    }

    #[test]
    fn sampled_sees_a_missing_packet_anywhere() {
        let bytes: Vec<u8> = (0..16_384u32).map(|value| (value / 7) as u8 | 1).collect();
        let whole = checksum(ChecksumMode::Sampled, &bytes);
        assert_ne!(whole, checksum(ChecksumMode::Full, &bytes));
        for packet in 0..16 {
            let mut holed = bytes.clone();
            holed[packet * 1024..(packet + 1) * 1024].fill(0);
            assert_ne!(checksum(ChecksumMode::Sampled, &holed), whole);
        }
        for short in [0, 1, 63, 64, 65] {
            // No length panics.
            checksum(ChecksumMode::Sampled, &bytes[..short]);
        }
    }

    #[test]
    fn a_page_in_a_pool_is_covered_without_its_padding() {
        let pool = PoolMemory::memfd(2, 100).unwrap();
        // SAFETY: the test owns the pool.
        let sum =
            |pool: &PoolMemory| unsafe { page_checksum(ChecksumMode::Full, pool, PageId(1), 100) };
        let before = sum(&pool);
        // SAFETY: byte 100 is padding inside the stride of 128.
        unsafe { *pool.page(PageId(1)).add(100) = 9 };
        assert_eq!(sum(&pool), before);
        // SAFETY: byte 99 is the page's last.
        unsafe { *pool.page(PageId(1)).add(99) = 9 };
        assert_ne!(sum(&pool), before);
    }

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in [ChecksumMode::Off, ChecksumMode::Sampled, ChecksumMode::Full] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "crc".parse::<ChecksumMode>().unwrap_err();
        assert!(error.to_string().contains("off, sampled or full"));
    }
}
