//! The arithmetic of xxh3 (64 bits, no seed, more than 240 bytes): what does not need speed.
//!
//! State: eight accumulators. A stripe is 64 bytes, one word for each; stripe `i` of a block is
//! mixed with the secret from `8 * i` on. After 16 stripes the accumulators are scrambled. The
//! last block is not, and the last 64 bytes of all are mixed once more at their own place.

/// Inputs up to this length have another formula.
pub(super) const SHORT_MAX: usize = 240;

/// Stripes of a block: what the secret has room for, (192 - 64) / 8.
pub(super) const STRIPES: usize = 16;

/// Where the secret for scrambling begins.
pub(super) const SCRAMBLE_AT: usize = 192 - 64;

/// Where the secret for the last stripe begins: never the place of another stripe.
const LAST_AT: usize = 192 - 64 - 7;

/// Where the secret for merging begins.
const MERGE_AT: usize = 11;

pub(super) const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

/// The accumulators before any input.
pub(super) const START: [u64; 8] = [
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
];

/// The secret that the algorithm fixes.
#[rustfmt::skip]
pub(super) static SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

fn secret_word(at: usize) -> u64 {
    word(&SECRET, at)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Mixes one stripe's words with the secret from `secret_at` on.
pub(super) fn accumulate(acc: &mut [u64; 8], stripe: &[u64; 8], secret_at: usize) {
    for lane in 0..8 {
        let keyed = stripe[lane] ^ secret_word(secret_at + 8 * lane);
        acc[lane ^ 1] = acc[lane ^ 1].wrapping_add(stripe[lane]);
        acc[lane] = acc[lane].wrapping_add((keyed & 0xFFFF_FFFF).wrapping_mul(keyed >> 32));
    }
}

/// After a whole block.
pub(super) fn scramble(acc: &mut [u64; 8]) {
    for (lane, value) in acc.iter_mut().enumerate() {
        let mixed = *value ^ (*value >> 47) ^ secret_word(SCRAMBLE_AT + 8 * lane);
        *value = mixed.wrapping_mul(PRIME32_1);
    }
}

fn stripe_of(bytes: &[u8], at: usize) -> [u64; 8] {
    std::array::from_fn(|lane| word(bytes, at + 8 * lane))
}

/// Where the secret for a stripe of the last block begins, which has `stripes` of them: the last
/// one of all has a place of its own. Only where the input's length is a multiple of 64: then
/// the last 64 bytes are a stripe of their own and not read twice.
pub(super) fn secret_of_end(stripe: usize, stripes: usize) -> usize {
    if stripe + 1 == stripes {
        LAST_AT
    } else {
        8 * stripe
    }
}

/// The hash, from the accumulators after all blocks but the last: `tail` is the last block
/// (1 to 1,024 bytes), `last` the last 64 bytes of all, `length` the length of all.
pub(super) fn finish(mut acc: [u64; 8], tail: &[u8], last: &[u8; 64], length: usize) -> u64 {
    for stripe in 0..(tail.len() - 1) / 64 {
        accumulate(&mut acc, &stripe_of(tail, 64 * stripe), 8 * stripe);
    }
    accumulate(&mut acc, &stripe_of(last, 0), LAST_AT);
    merge(&acc, length)
}

/// The hash of `length` bytes, from the accumulators after all of them.
pub(super) fn merge(acc: &[u64; 8], length: usize) -> u64 {
    let mut merged = (length as u64).wrapping_mul(PRIME64_1);
    for pair in 0..4 {
        let left = acc[2 * pair] ^ secret_word(MERGE_AT + 16 * pair);
        let right = acc[2 * pair + 1] ^ secret_word(MERGE_AT + 16 * pair + 8);
        let product = u128::from(left) * u128::from(right);
        merged = merged.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    merged ^= merged >> 37;
    merged = merged.wrapping_mul(AVALANCHE);
    merged ^ (merged >> 32)
}
