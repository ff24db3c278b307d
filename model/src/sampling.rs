//! From logits to a token: greedy, temperature, min-p, top-k, top-p, and log-probabilities.
//!
//! A choice depends on the logits and the [`SampleSpec`] only: the random number is a hash of
//! (seed, choice, position), so that a retry, another batch or another node draws the same
//! (PROTOCOL R2, D1). A NaN among the logits counts as minus infinity.

use crate::backend::{SampleSpec, Sampled};
use crate::logit_rules::Shaper;
use std::cmp::Ordering;

/// `out[i] = e^((x[i] - shift) * scale)` with all results positive normal numbers.
pub type ExpInto = fn(x: &[f32], shift: f32, scale: f32, out: &mut [f32]);

/// Logits that one step of the search for the best passes over: 49,152 / 64 = 768 maxima.
const CHUNK: usize = 64;
/// Candidates that top-p looks at first; four times as many each time they do not suffice.
const TOP_P_FIRST: usize = 64;

/// Chooses tokens; keeps its memory between choices.
pub struct Sampler {
    exp_into: ExpInto,
    /// One per logit.
    weights: Vec<f32>,
    /// Largest logit of each chunk.
    maxima: Vec<f32>,
    /// Ids of the best, best first.
    best: Vec<u32>,
    shaper: Shaper,
}

impl Sampler {
    /// A sampler that computes exponentials by `exp_into`.
    pub fn new(exp_into: ExpInto) -> Self {
        Sampler {
            exp_into,
            weights: Vec::new(),
            maxima: Vec::new(),
            best: Vec::new(),
            shaper: Shaper::default(),
        }
    }

    /// Chooses a token. `logits` are changed: NaN and banned ones become minus infinity, and the
    /// request's own rules are applied; `history` is what `spec.shaping` names of the step's.
    ///
    /// If every logit is minus infinity or banned, the lowest id that is not banned is chosen
    /// (0 if there is none).
    ///
    /// # Panics
    /// If there are no logits.
    pub fn choose(&mut self, logits: &mut [f32], spec: &SampleSpec, history: &[u32]) -> Sampled {
        assert!(!logits.is_empty(), "a token of an empty vocabulary");
        for logit in logits.iter_mut() {
            *logit = if logit.is_nan() {
                f32::NEG_INFINITY
            } else {
                logit.min(f32::MAX)
            };
        }
        // Log-probabilities are those of the model: before bans, temperature and filters.
        let (log_total, top) = match spec.logprobs {
            Some(count) => self.log_probabilities(logits, usize::from(count)),
            None => (f64::NAN, Vec::new()),
        };
        match &spec.shaping {
            Some(shaping) => self.shaper.apply(logits, shaping, history),
            None => self.shaper.reset(),
        }
        for banned in &spec.banned {
            if let Some(logit) = logits.get_mut(*banned as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let token = if spec.temperature > 0.0 {
            self.draw(logits, spec)
        } else {
            None
        };
        let token = token.unwrap_or_else(|| greedy(logits, &spec.banned));
        let raw = self.shaper.raw_of(token);
        let logit = raw.unwrap_or(logits[token as usize]);
        Sampled {
            token,
            logprob: (f64::from(logit) - log_total) as f32,
            top,
        }
    }

    /// Logarithm of the sum of all e^logit, and the best `count` with their log-probabilities.
    fn log_probabilities(&mut self, logits: &[f32], count: usize) -> (f64, Vec<(u32, f32)>) {
        let maximum = largest(logits);
        if maximum == f32::NEG_INFINITY {
            return (0.0, Vec::new());
        }
        let total = self.weigh(logits, maximum, 1.0);
        let log_total = f64::from(maximum) + total.ln();
        self.find_best(logits, count);
        let log = |id: &u32| (*id, (f64::from(logits[*id as usize]) - log_total) as f32);
        (log_total, self.best.iter().map(log).collect())
    }

    /// Fills `weights` with e^((logit - maximum) * scale), zero for minus infinity; gives the sum.
    fn weigh(&mut self, logits: &[f32], maximum: f32, scale: f32) -> f64 {
        self.weights.resize(logits.len(), 0.0);
        (self.exp_into)(logits, maximum, scale, &mut self.weights);
        for (weight, logit) in self.weights.iter_mut().zip(logits) {
            if *logit == f32::NEG_INFINITY {
                *weight = 0.0;
            }
        }
        total(&self.weights)
    }

    /// Draws by temperature, min-p, top-k and top-p; `None` when nothing can be drawn.
    fn draw(&mut self, logits: &[f32], spec: &SampleSpec) -> Option<u32> {
        let maximum = largest(logits);
        if maximum == f32::NEG_INFINITY {
            return None;
        }
        // Below 1e-4 only exact ties differ from greedy; the bound keeps the scale finite.
        let scale = 1.0 / spec.temperature.max(1e-4);
        let mut all = self.weigh(logits, maximum, scale);
        if spec.min_p > 0.0 {
            // The best one's weight is 1.
            let least = spec.min_p.min(1.0);
            for weight in &mut self.weights {
                *weight = if *weight < least { 0.0 } else { *weight };
            }
            all = total(&self.weights);
        }
        let random = uniform(spec.seed, spec.choice, spec.position);
        let top_k = match spec.top_k as usize {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        let top_p = f64::from(spec.top_p);
        let filtered_p = top_p < 1.0;
        if top_k == logits.len() && !filtered_p {
            return walk(self.weights.chunks(CHUNK), all * random);
        }
        if top_k < logits.len() {
            self.find_best(logits, top_k);
        }
        if filtered_p {
            let mass = if top_k < logits.len() {
                self.mass_of_best(self.best.len())
            } else {
                all
            };
            let kept = self.keep_mass(logits, top_k, mass * top_p.max(0.0));
            self.best.truncate(kept);
        }
        let mass = self.mass_of_best(self.best.len());
        let mut target = mass * random;
        for id in &self.best {
            target -= f64::from(self.weights[*id as usize]);
            if target < 0.0 {
                return Some(*id);
            }
        }
        let weights = &self.weights;
        let mut from_last = self.best.iter().rev();
        from_last.find(|id| weights[**id as usize] > 0.0).copied()
    }

    fn mass_of_best(&self, count: usize) -> f64 {
        let weight = |id: &u32| f64::from(self.weights[*id as usize]);
        self.best[..count].iter().map(weight).sum()
    }

    /// How many of the best reach `wanted`; at least 1. Looks at more of them as needed when
    /// `top_k` does not say how many.
    fn keep_mass(&mut self, logits: &[f32], top_k: usize, wanted: f64) -> usize {
        let mut looked_at = if top_k < logits.len() {
            top_k
        } else {
            TOP_P_FIRST
        };
        loop {
            if top_k == logits.len() {
                self.find_best(logits, looked_at);
            }
            let mut mass = 0.0;
            for (i, id) in self.best.iter().enumerate() {
                mass += f64::from(self.weights[*id as usize]);
                if mass >= wanted {
                    return i + 1;
                }
            }
            if looked_at >= top_k {
                return self.best.len();
            }
            looked_at = (looked_at * 4).min(top_k);
        }
    }

    /// Fills `best` with the ids of the `count` largest logits (fewer if there are fewer), best
    /// first, lower ids first among equals. Minus infinity is never among them.
    ///
    /// The count-th largest of the chunks' maxima cannot exceed the count-th largest logit, so
    /// only logits from there on are sorted.
    fn find_best(&mut self, logits: &[f32], count: usize) {
        self.best.clear();
        if count == 0 {
            return;
        }
        self.maxima.clear();
        self.maxima.extend(logits.chunks(CHUNK).map(largest));
        let threshold = if count < self.maxima.len() {
            let (_, threshold, _) = self
                .maxima
                .select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
            *threshold
        } else {
            f32::NEG_INFINITY
        };
        for (id, logit) in logits.iter().enumerate() {
            if *logit >= threshold && *logit > f32::NEG_INFINITY {
                self.best.push(id as u32);
            }
        }
        let order = |a: &u32, b: &u32| -> Ordering {
            let (x, y) = (logits[*a as usize], logits[*b as usize]);
            // Finite numbers: `partial_cmp` cannot fail; -0 and 0 are equal.
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
        };
        if count < self.best.len() {
            self.best.select_nth_unstable_by(count - 1, order);
            self.best.truncate(count);
        }
        self.best.sort_unstable_by(order);
    }
}

/// The largest logit; no NaN among them.
fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut chunks = logits.chunks_exact(16);
    for chunk in &mut chunks {
        for (best, logit) in lanes.iter_mut().zip(chunk) {
            *best = if *logit > *best { *logit } else { *best };
        }
    }
    let rest = chunks.remainder().iter().copied();
    lanes
        .into_iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, f32::max)
}

/// The sum, in a fixed order.
fn total(weights: &[f32]) -> f64 {
    weights.chunks(CHUNK).map(chunk_total).sum()
}

fn chunk_total(chunk: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 4];
    for four in chunk.chunks(4) {
        for (sum, weight) in lanes.iter_mut().zip(four) {
            *sum += f64::from(*weight);
        }
    }
    (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
}

/// The token at which the running sum of weights passes `target`: chunk by chunk, then one by
/// one. Rounding may leave a little at the end: then the last token with any weight.
fn walk<'a>(chunks: impl Iterator<Item = &'a [f32]>, mut target: f64) -> Option<u32> {
    let mut last = None;
    for (index, chunk) in chunks.enumerate() {
        let sum = chunk_total(chunk);
        let inside = sum > target;
        if !inside && sum == 0.0 {
            continue;
        }
        for (i, weight) in chunk.iter().enumerate() {
            if *weight > 0.0 {
                last = Some((index * CHUNK + i) as u32);
                if inside && target < f64::from(*weight) {
                    return last;
                }
            }
            if inside {
                target -= f64::from(*weight);
            }
        }
        if inside {
            return last;
        }
        target -= sum;
    }
    last
}

/// The lowest id of the largest logit.
fn greedy(logits: &[f32], banned: &[u32]) -> u32 {
    let maximum = largest(logits);
    if maximum == f32::NEG_INFINITY {
        let free = (0..logits.len() as u32).find(|id| !banned.contains(id));
        return free.unwrap_or(0);
    }
    let id = logits.iter().position(|logit| *logit == maximum);
    id.unwrap_or(0) as u32
}

/// A number in [0, 1) that (seed, choice, position) alone decide.
fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let place = (u64::from(choice) << 32) | u64::from(position);
    let bits = scramble(scramble(seed).wrapping_add(scramble(place ^ 0x5DEE_CE66_D1CE_4E5B)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The finaliser of SplitMix64: a bijection in which every input bit moves half the output bits.
fn scramble(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logit_rules::{LogitRules, Shaping};
    use std::sync::Arc;

    fn exp_scalar(x: &[f32], shift: f32, scale: f32, out: &mut [f32]) {
        for (x, out) in x.iter().zip(out) {
            *out = ((x - shift) * scale).max(-87.0).exp();
        }
    }

    fn spec() -> SampleSpec {
        SampleSpec {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 7,
            choice: 0,
            position: 0,
            logprobs: None,
            min_p: 0.0,
            banned: Vec::new(),
            shaping: None,
        }
    }

    fn choose(logits: &[f32], spec: &SampleSpec) -> Sampled {
        Sampler::new(exp_scalar).choose(&mut logits.to_vec(), spec, &[])
    }

    /// Draws at many positions and counts.
    fn frequencies(logits: &[f32], spec: &SampleSpec, draws: u32) -> Vec<f64> {
        let mut sampler = Sampler::new(exp_scalar);
        let mut counts = vec![0.0; logits.len()];
        for position in 0..draws {
            let spec = SampleSpec {
                position,
                ..spec.clone()
            };
            let token = sampler.choose(&mut logits.to_vec(), &spec, &[]).token;
            counts[token as usize] += 1.0 / f64::from(draws);
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_no_nan() {
        assert_eq!(choose(&[1.0, 3.0, f32::NAN, 3.0], &spec()).token, 1);
        assert_eq!(choose(&[f32::NAN; 4], &spec()).token, 0);
        assert_eq!(choose(&[0.0, f32::INFINITY, 1.0], &spec()).token, 1);
    }

    #[test]
    fn a_banned_token_is_never_chosen() {
        let logits = [0.0, 9.0, 1.0];
        let mut spec = SampleSpec {
            banned: vec![1, 77],
            ..spec()
        };
        assert_eq!(choose(&logits, &spec).token, 2);
        spec.temperature = 5.0;
        assert_eq!(frequencies(&logits, &spec, 500)[1], 0.0);
        spec.banned = vec![0, 1, 2];
        assert_eq!(choose(&logits, &spec).token, 0);
    }

    #[test]
    fn rules_change_the_choice_and_not_the_log_probabilities() {
        let logits = [1.0f32, 2.0, 0.5];
        let plain = SampleSpec {
            logprobs: Some(3),
            ..spec()
        };
        let rules = LogitRules {
            bias: vec![(2, 100.0)],
            ..LogitRules::default()
        };
        let shaped = SampleSpec {
            shaping: Some(Shaping {
                rules: Arc::new(rules),
                history: 0..0,
                generated: 0,
            }),
            ..plain.clone()
        };
        let mut sampler = Sampler::new(exp_scalar);
        let biased = sampler.choose(&mut logits.to_vec(), &shaped, &[]);
        let free = sampler.choose(&mut logits.to_vec(), &plain, &[]);
        assert_eq!((biased.token, free.token), (2, 1));
        assert_eq!(biased.top, free.top);
        assert_eq!(biased.logprob, free.top[2].1);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_logits() {
        let logits = [1.0f32, 2.0, 0.5, 2.0, f32::NEG_INFINITY];
        let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let spec = SampleSpec {
            temperature: 0.3,
            top_k: 1,
            logprobs: Some(3),
            banned: vec![1],
            ..spec()
        };
        let sampled = choose(&logits, &spec);
        let log = |x: f64| (x - sum.ln()) as f32;
        assert_eq!(sampled.token, 3);
        assert!((sampled.logprob - log(2.0)).abs() < 1e-6);
        let ids: Vec<u32> = sampled.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0]);
        assert!((sampled.top[2].1 - log(1.0)).abs() < 1e-6);
        assert!(choose(&logits, &self::spec()).logprob.is_nan());
    }

    #[test]
    fn the_best_are_those_of_a_full_sort() {
        let mut sampler = Sampler::new(exp_scalar);
        for length in [1usize, 63, 64, 65, 1000, 5000] {
            let logits: Vec<f32> = (0..length as u64)
                .map(|i| (scramble(i) % 700) as f32 / 10.0)
                .collect();
            let mut sorted: Vec<u32> = (0..length as u32).collect();
            sorted.sort_by(|a, b| {
                logits[*b as usize]
                    .total_cmp(&logits[*a as usize])
                    .then(a.cmp(b))
            });
            for count in [1usize, 2, 5, 20, 63, 64, 300, 6000] {
                sampler.find_best(&logits, count);
                assert_eq!(
                    sampler.best,
                    sorted[..count.min(length)],
                    "{count} of {length}"
                );
            }
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.1f32.ln(), 0.2f32.ln(), 0.3f32.ln(), 0.4f32.ln()];
        let mut spec = SampleSpec {
            temperature: 1.0,
            ..spec()
        };
        let close = |found: Vec<f64>, wanted: [f64; 4]| {
            for (found, wanted) in found.iter().zip(wanted) {
                assert!((found - wanted).abs() < 0.02, "{found} for {wanted}");
            }
        };
        close(frequencies(&logits, &spec, 20_000), [0.1, 0.2, 0.3, 0.4]);
        spec.top_k = 2;
        close(
            frequencies(&logits, &spec, 20_000),
            [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0],
        );
        spec.top_k = 0;
        spec.top_p = 0.85;
        close(
            frequencies(&logits, &spec, 20_000),
            [0.0, 2.0 / 9.0, 3.0 / 9.0, 4.0 / 9.0],
        );
        spec.top_k = 3;
        spec.top_p = 0.5;
        close(
            frequencies(&logits, &spec, 20_000),
            [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0],
        );
        spec.top_p = 0.0;
        close(frequencies(&logits, &spec, 100), [0.0, 0.0, 0.0, 1.0]);
        // Half of the best one's 0.4, alone and beside top-k and top-p.
        spec.min_p = 0.6;
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.99)] {
            (spec.top_k, spec.top_p) = (top_k, top_p);
            close(
                frequencies(&logits, &spec, 20_000),
                [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0],
            );
        }
    }

    #[test]
    fn a_flat_distribution_is_walked_to_its_end() {
        let logits = vec![0.0f32; 1000];
        let mut spec = SampleSpec {
            temperature: 1.0,
            ..spec()
        };
        let found = frequencies(&logits, &spec, 50_000);
        assert!(found[..500].iter().sum::<f64>() > 0.48);
        assert!(found[900..].iter().sum::<f64>() > 0.09);
        // 0.95 of a flat thousand needs 950 candidates: more than the first look.
        spec.top_p = 0.95;
        let found = frequencies(&logits, &spec, 20_000);
        assert!(found[940..949].iter().sum::<f64>() > 0.0);
        assert_eq!(found[951..].iter().sum::<f64>(), 0.0);
    }

    #[test]
    fn a_draw_depends_on_seed_choice_and_position_only() {
        let logits: Vec<f32> = (0..300).map(|i| (i % 7) as f32).collect();
        let base = SampleSpec {
            temperature: 1.0,
            position: 5,
            ..spec()
        };
        let mut used = Sampler::new(exp_scalar);
        used.choose(&mut vec![1.0; 777], &base, &[]);
        let first = used.choose(&mut logits.clone(), &base, &[]);
        assert_eq!(first.token, choose(&logits, &base).token);
        let mut seen = std::collections::HashSet::new();
        for i in 0..20 {
            seen.insert(uniform(i, 0, 0).to_bits());
            seen.insert(uniform(7, 1 + i as u32, 0).to_bits());
            seen.insert(uniform(7, 0, 1 + i as u32).to_bits());
        }
        assert_eq!(seen.len(), 60);
    }

    #[test]
    fn odd_temperatures_do_not_break_it() {
        let logits = [0.0, 1.0, 2.0];
        for temperature in [f32::NAN, -1.0, f32::MIN_POSITIVE, f32::INFINITY, 1e30] {
            for top_p in [f32::NAN, 0.5, -3.0] {
                let spec = SampleSpec {
                    temperature,
                    top_p,
                    ..spec()
                };
                assert!(choose(&logits, &spec).token < 3, "{temperature} {top_p}");
            }
        }
    }
}
