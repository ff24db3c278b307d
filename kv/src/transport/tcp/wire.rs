//! The two fixed layouts on a data connection, little-endian.
//!
//! ```text
//! request (64): magic 4 · kind 2 · zero 2 · incarnation 8 · lease 8 · epoch 4 · first 4 · count 4
//!               · page bytes 4 · position 8 · zero 8 · check 8
//! answer  (32): magic 4 · code 4 · position 8 · count 4 · page bytes 4 · check 8
//!               then, only with code 0, count x page bytes
//! ```
//!
//! `check` is the hash of all bytes before it: page checksums cover the pages, this covers the
//! numbers that say which pages they are (fault 31).

use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a request.
pub const REQUEST_BYTES: usize = 64;

/// Bytes of an answer before the pages.
pub const ANSWER_BYTES: usize = 32;

/// Bytes that one read carries at most (PROTOCOL L4), unless a single page is longer.
pub const READ_BYTES_MAX: usize = 1 << 20;

/// Reads on their way on one connection at most: 256 x 1 MiB is more than a pull of the longest
/// context has posted at once, and 256 requests are 16 KiB of queue on the serving side.
pub const READS_IN_FLIGHT_MAX: usize = 256;

/// Pages that one read names at most, however small they are: one vectored call takes 1,024
/// buffers, and one of them is the header.
pub const PAGES_PER_READ_MAX: usize = 1023;

const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"kvR1");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"kvA1");
const KIND_READ: u16 = 1;

/// Pages of `page_bytes` that one read may name.
pub fn pages_per_read_max(page_bytes: usize) -> usize {
    (READ_BYTES_MAX / page_bytes.max(1)).clamp(1, PAGES_PER_READ_MAX)
}

/// A read request: `count` pages of a lease from page `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Incarnation of the node that granted the lease.
    pub incarnation: u64,
    /// The lease.
    pub lease: u64,
    /// Its epoch.
    pub epoch: u32,
    /// First page, counted within the lease.
    pub first: u32,
    /// Pages.
    pub count: u32,
    /// Bytes of each page on the wire.
    pub page_bytes: u32,
    /// Position of the read on its channel; comes back in the answer.
    pub position: u64,
}

/// The head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// 0: the pages follow. Else: refused, nothing follows.
    pub code: u32,
    /// Position of the read.
    pub position: u64,
    /// Pages that were asked for.
    pub count: u32,
    /// Bytes of each page.
    pub page_bytes: u32,
}

/// Bytes that are no request or answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// They do not begin with the magic of their kind.
    Magic,
    /// Their check does not match: damaged on the way.
    Check,
    /// An unknown kind or a field that must be zero is not.
    Kind,
}

impl ReadRequest {
    /// Appends the request's 64 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&REQUEST_MAGIC.to_le_bytes());
        out.extend_from_slice(&KIND_READ.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.incarnation.to_le_bytes());
        out.extend_from_slice(&self.lease.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.page_bytes.to_le_bytes());
        out.extend_from_slice(&self.position.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        let check = xxh3_64(&out[start..]);
        out.extend_from_slice(&check.to_le_bytes());
        debug_assert_eq!(out.len() - start, REQUEST_BYTES);
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`WireError`] when the bytes are not one.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        if u32_at(bytes, 0) != REQUEST_MAGIC {
            return Err(WireError::Magic);
        }
        if u64_at(bytes, 56) != xxh3_64(&bytes[..56]) {
            return Err(WireError::Check);
        }
        if bytes[4..8] != [KIND_READ as u8, 0, 0, 0] || u64_at(bytes, 48) != 0 {
            return Err(WireError::Kind);
        }
        Ok(ReadRequest {
            incarnation: u64_at(bytes, 8),
            lease: u64_at(bytes, 16),
            epoch: u32_at(bytes, 24),
            first: u32_at(bytes, 28),
            count: u32_at(bytes, 32),
            page_bytes: u32_at(bytes, 36),
            position: u64_at(bytes, 40),
        })
    }
}

impl AnswerHead {
    /// The head's 32 bytes.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[0..4].copy_from_slice(&ANSWER_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.code.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.position.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.count.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.page_bytes.to_le_bytes());
        let check = xxh3_64(&bytes[..24]);
        bytes[24..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads a head.
    ///
    /// # Errors
    /// [`WireError`] when the bytes are not one.
    pub fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<Self, WireError> {
        if u32_at(bytes, 0) != ANSWER_MAGIC {
            return Err(WireError::Magic);
        }
        if u64_at(bytes, 24) != xxh3_64(&bytes[..24]) {
            return Err(WireError::Check);
        }
        Ok(AnswerHead {
            code: u32_at(bytes, 4),
            position: u64_at(bytes, 8),
            count: u32_at(bytes, 16),
            page_bytes: u32_at(bytes, 20),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ReadRequest {
        ReadRequest {
            incarnation: 0x0102_0304_0506_0708,
            lease: 77,
            epoch: 3,
            first: 5,
            count: 24,
            page_bytes: 16_384,
            position: (1 << 48) - 1,
        }
    }

    #[test]
    fn both_layouts_come_back_and_no_flipped_bit_passes() {
        let mut bytes = Vec::new();
        request().encode(&mut bytes);
        let mut bytes: [u8; REQUEST_BYTES] = bytes.try_into().unwrap();
        assert_eq!(ReadRequest::decode(&bytes), Ok(request()));
        for bit in 0..REQUEST_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(ReadRequest::decode(&bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let head = AnswerHead {
            code: 9,
            position: 12,
            count: 24,
            page_bytes: 16_384,
        };
        let mut bytes = head.encode();
        assert_eq!(AnswerHead::decode(&bytes), Ok(head));
        for bit in 0..ANSWER_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(AnswerHead::decode(&bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_read_always_has_room_for_a_page() {
        assert_eq!(pages_per_read_max(16_384), 64);
        assert_eq!(pages_per_read_max(5 << 20), 1);
        assert_eq!(pages_per_read_max(64), PAGES_PER_READ_MAX);
        assert_eq!(pages_per_read_max(0), PAGES_PER_READ_MAX);
    }
}
