//! The counter-based generator Philox4x64-10 (Salmon et al., SC'11) as numpy runs it: the counter
//! is advanced before each block, so that the first block is that of counter 1.

const MULTIPLIERS: [u64; 2] = [0xd2e7_470e_e14c_6c93, 0xca5a_8263_9512_1157];
const KEY_STEPS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbb67_ae85_84ca_a73b];
const ROUNDS: usize = 10;

/// A stream of 64-bit numbers under a key.
pub(super) struct Philox {
    key: [u64; 2],
    counter: u64,
    block: [u64; 4],
    used: usize,
}

impl Philox {
    /// The stream of a key from its beginning.
    pub(super) fn new(key: [u64; 2]) -> Self {
        Self {
            key,
            counter: 0,
            block: [0; 4],
            used: 4,
        }
    }

    /// The next number.
    pub(super) fn next(&mut self) -> u64 {
        if self.used == self.block.len() {
            // 2^64 blocks are never used up, so the upper counter words stay 0.
            self.counter += 1;
            self.block = block([self.counter, 0, 0, 0], self.key);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }
}

fn block(mut counter: [u64; 4], mut key: [u64; 2]) -> [u64; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [
                key[0].wrapping_add(KEY_STEPS[0]),
                key[1].wrapping_add(KEY_STEPS[1]),
            ];
        }
        let (high0, low0) = wide_product(MULTIPLIERS[0], counter[0]);
        let (high1, low1) = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
    }
    counter
}

fn wide_product(a: u64, b: u64) -> (u64, u64) {
    let product = u128::from(a) * u128::from(b);
    ((product >> 64) as u64, product as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_test_vector_holds() {
        // Random123's kat_vectors: philox4x64 with 10 rounds, all zero.
        let expected = [
            0x1655_4d9e_ca36_314c,
            0xdb20_fe9d_672d_0fdc,
            0xd7e7_72ce_e186_176b,
            0x7e68_b68a_ec7b_a23b,
        ];
        assert_eq!(block([0; 4], [0; 2]), expected);
    }
}
