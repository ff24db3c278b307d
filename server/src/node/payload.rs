//! What crosses between decode and prefill node inside a `Prefill` frame's opaque bytes and
//! comes back with the first token. Fixed layouts, little-endian, length caps (PROTOCOL S5).

use crate::engine::SamplingParams;
use kvserve_kv::prefix::CACHE_SALT_BYTES_MAX;
use kvserve_model::logit_rules::BIASED_IDS_MAX;
use kvserve_model::{LogitRules, Sampled};
use std::sync::Arc;

/// Alternatives a first token can carry: the API's own cap on `top_logprobs`.
const TOP_MAX: usize = 20;

/// Bytes of encoded sampling parameters without rules.
const SAMPLING_BYTES: usize = 4 + 4 + 4 + 4 + 8 + 1 + 4 + 1;

/// Ids that may not come early: stop ids of a request and of a model.
const EARLY_IDS_MAX: usize = 1024;

/// A payload that is not what this version writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadError {
    /// What was being read.
    pub what: &'static str,
    /// Bytes that came.
    pub bytes: usize,
}

impl std::fmt::Display for PayloadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} bytes are not a valid {}; are both nodes of one version?",
            self.bytes, self.what
        )
    }
}

/// `logprobs` byte that means "not asked for".
const NO_LOGPROBS: u8 = 0xFF;

/// Writes sampling parameters, and how many of the prompt's tokens are answer already.
pub fn encode_sampling(params: &SamplingParams, generated: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(SAMPLING_BYTES);
    out.extend_from_slice(&params.temperature.to_le_bytes());
    out.extend_from_slice(&params.top_k.to_le_bytes());
    out.extend_from_slice(&params.top_p.to_le_bytes());
    out.extend_from_slice(&params.min_p.to_le_bytes());
    out.extend_from_slice(&params.seed.to_le_bytes());
    out.push(params.logprobs.unwrap_or(NO_LOGPROBS));
    out.extend_from_slice(&generated.to_le_bytes());
    out.push(u8::from(params.rules.is_some()));
    if let Some(rules) = &params.rules {
        encode_rules(rules, &mut out);
    }
    out
}

fn encode_rules(rules: &LogitRules, out: &mut Vec<u8>) {
    out.extend_from_slice(&rules.repetition.to_le_bytes());
    out.extend_from_slice(&rules.presence.to_le_bytes());
    out.extend_from_slice(&rules.frequency.to_le_bytes());
    out.extend_from_slice(&rules.early_tokens.to_le_bytes());
    let early = &rules.early_banned[..rules.early_banned.len().min(EARLY_IDS_MAX)];
    out.extend_from_slice(&(early.len() as u16).to_le_bytes());
    for id in early {
        out.extend_from_slice(&id.to_le_bytes());
    }
    let bias = &rules.bias[..rules.bias.len().min(BIASED_IDS_MAX)];
    out.extend_from_slice(&(bias.len() as u16).to_le_bytes());
    for (id, value) in bias {
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&value.to_le_bytes());
    }
}

fn decode_rules(reader: &mut Reader<'_>) -> Option<LogitRules> {
    let mut rules = LogitRules {
        repetition: f32::from_le_bytes(reader.take()?),
        presence: f32::from_le_bytes(reader.take()?),
        frequency: f32::from_le_bytes(reader.take()?),
        early_tokens: u32::from_le_bytes(reader.take()?),
        ..LogitRules::default()
    };
    let numbers = [rules.repetition, rules.presence, rules.frequency];
    if !numbers.iter().all(|number| number.is_finite()) || rules.repetition <= 0.0 {
        return None;
    }
    let early = u16::from_le_bytes(reader.take()?) as usize;
    if early > EARLY_IDS_MAX {
        return None;
    }
    for _ in 0..early {
        rules.early_banned.push(u32::from_le_bytes(reader.take()?));
    }
    let bias = u16::from_le_bytes(reader.take()?) as usize;
    if bias > BIASED_IDS_MAX {
        return None;
    }
    for _ in 0..bias {
        let id = u32::from_le_bytes(reader.take()?);
        let value = f32::from_le_bytes(reader.take()?);
        if !value.is_finite() {
            return None;
        }
        rules.bias.push((id, value));
    }
    Some(rules)
}

/// Reads sampling parameters of a peer.
///
/// # Errors
/// [`PayloadError`] when the length or a value is out of range.
pub fn decode_sampling(bytes: &[u8]) -> Result<(SamplingParams, u32), PayloadError> {
    let (params, generated, cache_salt) = decode_ask(bytes)?;
    match cache_salt.is_empty() {
        true => Ok((params, generated)),
        false => Err(PayloadError {
            what: "set of sampling parameters",
            bytes: bytes.len(),
        }),
    }
}

/// Writes what a `Prefill` frame carries beside its prompt: sampling parameters, how many of the
/// prompt's tokens are answer already, then the cache salt with its length.
pub fn encode_ask(params: &SamplingParams, generated: u32, cache_salt: &str) -> Vec<u8> {
    let salt = cache_salt.as_bytes();
    let salt = &salt[..salt.len().min(CACHE_SALT_BYTES_MAX)];
    let mut out = encode_sampling(params, generated);
    out.push(salt.len() as u8);
    out.extend_from_slice(salt);
    out
}

/// Reads it; sampling parameters alone have no salt.
///
/// # Errors
/// [`PayloadError`] when a length or a value is out of range.
pub fn decode_ask(bytes: &[u8]) -> Result<(SamplingParams, u32, Vec<u8>), PayloadError> {
    let error = PayloadError {
        what: "set of sampling parameters and salt",
        bytes: bytes.len(),
    };
    let mut reader = Reader(bytes);
    let read = (|| {
        let mut params = SamplingParams {
            temperature: f32::from_le_bytes(reader.take()?),
            top_k: u32::from_le_bytes(reader.take()?),
            top_p: f32::from_le_bytes(reader.take()?),
            min_p: f32::from_le_bytes(reader.take()?),
            rules: None,
            seed: u64::from_le_bytes(reader.take()?),
            logprobs: match u8::from_le_bytes(reader.take()?) {
                NO_LOGPROBS => None,
                count => Some(count),
            },
        };
        let generated = u32::from_le_bytes(reader.take()?);
        if u8::from_le_bytes(reader.take()?) == 1 {
            params.rules = Some(Arc::new(decode_rules(&mut reader)?));
        }
        Some((params, generated))
    })();
    let (params, generated) = read.ok_or(error)?;
    let cache_salt = match reader.0.split_first() {
        None => &[],
        Some((length, salt))
            if usize::from(*length) == salt.len() && salt.len() <= CACHE_SALT_BYTES_MAX =>
        {
            salt
        }
        Some(_) => return Err(error),
    };
    let sane = params.temperature.is_finite()
        && params.temperature >= 0.0
        && params.top_p.is_finite()
        && (0.0..=1.0).contains(&params.min_p)
        && params.logprobs.unwrap_or(0) as usize <= TOP_MAX;
    if sane {
        Ok((params, generated, cache_salt.to_vec()))
    } else {
        Err(error)
    }
}

/// Writes the first token of a prefill and how many of the prompt's tokens were in the prefix
/// cache, for the client's usage.
pub fn encode_first(sampled: &Sampled, cached_tokens: u32) -> Vec<u8> {
    let mut out = encode_token(sampled);
    out.extend_from_slice(&cached_tokens.to_le_bytes());
    out
}

/// Reads them; a token alone says nothing of a cache.
///
/// # Errors
/// [`PayloadError`] as [`decode_token`].
pub fn decode_first(bytes: &[u8], vocab_size: usize) -> Result<(Sampled, u32), PayloadError> {
    if let Ok(sampled) = decode_token(bytes, vocab_size) {
        return Ok((sampled, 0));
    }
    let error = PayloadError {
        what: "first token",
        bytes: bytes.len(),
    };
    let (token, cached) = bytes.split_last_chunk::<4>().ok_or(error)?;
    let sampled = decode_token(token, vocab_size).map_err(|_| error)?;
    Ok((sampled, u32::from_le_bytes(*cached)))
}

/// Writes a sampled token.
pub fn encode_token(sampled: &Sampled) -> Vec<u8> {
    let top = &sampled.top[..sampled.top.len().min(TOP_MAX)];
    let mut out = Vec::with_capacity(9 + top.len() * 8);
    out.extend_from_slice(&sampled.token.to_le_bytes());
    out.extend_from_slice(&sampled.logprob.to_le_bytes());
    out.push(top.len() as u8);
    for (token, logprob) in top {
        out.extend_from_slice(&token.to_le_bytes());
        out.extend_from_slice(&logprob.to_le_bytes());
    }
    out
}

/// Reads a peer's sampled token; every id must be below `vocab_size`.
///
/// # Errors
/// [`PayloadError`] when the length or an id is out of range.
pub fn decode_token(bytes: &[u8], vocab_size: usize) -> Result<Sampled, PayloadError> {
    let error = PayloadError {
        what: "first token",
        bytes: bytes.len(),
    };
    let mut reader = Reader(bytes);
    let sampled = (|| {
        let token = u32::from_le_bytes(reader.take()?);
        let logprob = f32::from_le_bytes(reader.take()?);
        let count = u8::from_le_bytes(reader.take()?) as usize;
        if count > TOP_MAX {
            return None;
        }
        let mut top = Vec::with_capacity(count);
        for _ in 0..count {
            let id = u32::from_le_bytes(reader.take()?);
            top.push((id, f32::from_le_bytes(reader.take()?)));
        }
        Some(Sampled {
            token,
            logprob,
            top,
        })
    })()
    .ok_or(error)?;
    let known = |id: u32| (id as usize) < vocab_size;
    let sane =
        reader.0.is_empty() && known(sampled.token) && sampled.top.iter().all(|(id, _)| known(*id));
    if sane { Ok(sampled) } else { Err(error) }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_parameters_survive_the_way_and_garbage_does_not() {
        for logprobs in [None, Some(0), Some(20)] {
            let params = SamplingParams {
                temperature: 0.7,
                top_k: 40,
                top_p: 0.9,
                min_p: 0.05,
                rules: logprobs.map(|_| {
                    Arc::new(LogitRules {
                        bias: vec![(3, -1.5), (9, 100.0)],
                        repetition: 1.25,
                        presence: -0.5,
                        frequency: 2.0,
                        early_banned: vec![0, 7],
                        early_tokens: 12,
                    })
                }),
                seed: u64::MAX - 3,
                logprobs,
            };
            let bytes = encode_sampling(&params, 17);
            assert_eq!(decode_sampling(&bytes), Ok((params, 17)));
            for length in 0..bytes.len() {
                assert!(decode_sampling(&bytes[..length]).is_err());
            }
        }
        let not_a_number = SamplingParams {
            temperature: f32::NAN,
            ..SamplingParams::default()
        };
        let mut bytes = encode_sampling(&not_a_number, 0);
        assert!(decode_sampling(&bytes).is_err());
        bytes.push(0);
        assert!(decode_sampling(&bytes).is_err());
    }

    #[test]
    fn salts_and_cached_tokens_survive_the_way_and_wrong_lengths_do_not() {
        let params = SamplingParams::default();
        let longest = "x".repeat(CACHE_SALT_BYTES_MAX);
        for salt in ["", "a", &longest] {
            let mut bytes = encode_ask(&params, 5, salt);
            let whole = (params.clone(), 5, salt.as_bytes().to_vec());
            assert_eq!(decode_ask(&bytes), Ok(whole));
            let alone = (params.clone(), 5, Vec::new());
            assert_eq!(decode_ask(&bytes[..SAMPLING_BYTES]), Ok(alone));
            bytes.push(0);
            assert!(decode_ask(&bytes).is_err());
            assert!(decode_ask(&bytes[..SAMPLING_BYTES - 1]).is_err());
        }
        let mut long = encode_ask(&params, 0, "");
        long[SAMPLING_BYTES] = CACHE_SALT_BYTES_MAX as u8 + 1;
        long.extend(vec![b'x'; CACHE_SALT_BYTES_MAX + 1]);
        assert!(decode_ask(&long).is_err());

        let sampled = Sampled {
            token: 7,
            logprob: -0.5,
            top: vec![(7, -0.5), (3, -1.5)],
        };
        let bytes = encode_first(&sampled, 48);
        assert_eq!(decode_first(&bytes, 8), Ok((sampled.clone(), 48)));
        let alone = encode_token(&sampled);
        assert_eq!(decode_first(&alone, 8), Ok((sampled, 0)));
        for length in (0..bytes.len()).filter(|length| *length != alone.len()) {
            assert!(decode_first(&bytes[..length], 8).is_err(), "{length}");
        }
    }

    #[test]
    fn a_first_token_survives_the_way_and_unknown_ids_do_not() {
        let sampled = Sampled {
            token: 7,
            logprob: -0.5,
            top: vec![(7, -0.5), (3, -1.5)],
        };
        let bytes = encode_token(&sampled);
        assert_eq!(decode_token(&bytes, 8), Ok(sampled));
        assert!(decode_token(&bytes, 7).is_err());
        for length in 0..bytes.len() {
            assert!(decode_token(&bytes[..length], 8).is_err());
        }
    }
}
