//! The simulated model. The keys and values of a token are a hash of all tokens up to it; a
//! sampled token is a hash of all the keys and values that were read for it. So wrong bytes
//! anywhere show as a wrong token, and the right text is a pure function of the prompt.

use super::random::mix;
use crate::engine::{FinishReason, GenerateRequest, SamplingParams};
use kvserve_runtime::Deadline;

/// Tokens of a page: small, so that short prompts fill several pages.
pub const PAGE_TOKENS: usize = 4;

/// Bytes of one token's keys and values.
pub const KV_BYTES: usize = 16;

/// Bytes of a page.
pub const PAGE_BYTES: usize = PAGE_TOKENS * KV_BYTES;

/// Token ids are below it.
pub const VOCAB: u32 = 512;

/// Token ids below it end a text: one in 64.
pub const STOP_IDS: u32 = 8;

/// One token's keys and values.
pub type Kv = [u8; KV_BYTES];

/// Keys and values of `token` after those of the token before it.
pub fn kv(before: &Kv, token: u32) -> Kv {
    let (low, high) = halves(before);
    let first = mix(low ^ high.rotate_left(17) ^ (u64::from(token) << 8 | 1));
    let second = mix(first ^ low);
    let mut bytes = [0; KV_BYTES];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

/// What is read so far, folded with one more token's keys and values.
pub fn fold(sum: u64, kv: &Kv) -> u64 {
    let (low, high) = halves(kv);
    mix(sum.rotate_left(5) ^ low ^ mix(high))
}

/// The token that follows what was read.
pub fn token(sum: u64) -> u32 {
    (sum % u64::from(VOCAB)) as u32
}

fn halves(kv: &Kv) -> (u64, u64) {
    let half = |from: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&kv[from..from + 8]);
        u64::from_le_bytes(word)
    };
    (half(0), half(8))
}

/// The keys and values of all of `tokens`.
pub fn all_kv(tokens: &[u32]) -> Vec<Kv> {
    let mut before = [0; KV_BYTES];
    let each = |token: &u32| {
        before = kv(&before, *token);
        before
    };
    tokens.iter().map(each).collect()
}

/// The text that a prompt must get: its tokens and how it ends. Knows nothing of pages.
pub fn oracle(prompt: &[u32], max_tokens: u32) -> (Vec<u32>, FinishReason) {
    let (mut before, mut sum) = ([0; KV_BYTES], 0);
    for id in prompt {
        before = kv(&before, *id);
        sum = fold(sum, &before);
    }
    let mut text = Vec::new();
    loop {
        let next = token(sum);
        if next < STOP_IDS {
            return (text, FinishReason::Stop);
        }
        text.push(next);
        if text.len() as u32 == max_tokens {
            return (text, FinishReason::Length);
        }
        before = kv(&before, next);
        sum = fold(sum, &before);
    }
}

/// A request for `prompt` as the API would make it.
pub fn request(prompt: Vec<u32>, max_tokens: u32, deadline: Deadline) -> GenerateRequest {
    GenerateRequest {
        prompt,
        max_tokens,
        sampling: SamplingParams {
            seed: 1,
            ..SamplingParams::default()
        },
        stop_token_ids: (0..STOP_IDS).collect(),
        cache_salt: String::new(),
        deadline,
        label: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_depends_on_every_token_and_byte() {
        let (text, _) = oracle(&[9, 10, 11, 12, 13], 12);
        for place in 0..5 {
            let mut other = vec![9, 10, 11, 12, 13];
            other[place] += 1;
            assert_ne!(oracle(&other, 12).0, text, "token {place}");
        }
        let kvs = all_kv(&[9, 10, 11]);
        let sum = |kvs: &[Kv]| kvs.iter().fold(0, fold);
        for byte in 0..KV_BYTES {
            let mut bent = kvs.clone();
            bent[0][byte] ^= 1;
            assert_ne!(sum(&bent), sum(&kvs), "byte {byte}");
        }
    }
}
