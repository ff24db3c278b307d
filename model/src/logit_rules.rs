//! What a request does to logits before a token is chosen: bias, penalties, tokens that may not come yet.
//!
//! The order is that of vLLM, so that a client gets what it knows: tokens that may not come yet and
//! bias, then the repetition penalty (of the CTRL paper, over prompt and answer), then frequency
//! and presence penalties (OpenAI's formula, over the answer alone).

use std::ops::Range;
use std::sync::Arc;

/// Ids that one request may bias (the API's cap).
pub const BIASED_IDS_MAX: usize = 1024;

/// Rules of one request; the neutral value of each leaves logits as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitRules {
    /// Added to the logits of these ids.
    pub bias: Vec<(u32, f32)>,
    /// Positive logits of tokens seen in prompt or answer are divided by it, negative ones
    /// multiplied; 1 is neutral.
    pub repetition: f32,
    /// Taken once from the logit of each token seen in the answer; 0 is neutral.
    pub presence: f32,
    /// Taken from the logit of a token for each time it is seen in the answer; 0 is neutral.
    pub frequency: f32,
    /// Tokens that may not be chosen before the answer has `early_tokens` tokens.
    pub early_banned: Vec<u32>,
    /// See `early_banned`; 0 is neutral.
    pub early_tokens: u32,
}

impl Default for LogitRules {
    fn default() -> Self {
        LogitRules {
            bias: Vec::new(),
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            early_banned: Vec::new(),
            early_tokens: 0,
        }
    }
}

impl LogitRules {
    /// Whether they change nothing, ever.
    pub fn is_neutral(&self) -> bool {
        self.bias.is_empty()
            && !self.wants_history()
            && (self.early_tokens == 0 || self.early_banned.is_empty())
    }

    /// Whether they look at the tokens so far.
    pub fn wants_history(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }
}

/// The rules of one sequence in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Shaping {
    /// The request's rules.
    pub rules: Arc<LogitRules>,
    /// Prompt and answer so far, as a range of the step's `history`; empty unless the rules
    /// want it.
    pub history: Range<usize>,
    /// Tokens of the answer so far: the last ones of the history.
    pub generated: u32,
}

/// Applies rules; keeps its memory between choices.
#[derive(Debug, Default)]
pub(crate) struct Shaper {
    /// By id: [`SEEN`] and how often it is in the answer. All zero between two calls.
    marks: Vec<u32>,
    /// What changed logits were before.
    raw: Vec<(u32, f32)>,
}

/// The token occurs in prompt or answer.
const SEEN: u32 = 1 << 31;

impl Shaper {
    /// Changes `logits` by `shaping`; `history` is what its range names.
    pub(crate) fn apply(&mut self, logits: &mut [f32], shaping: &Shaping, history: &[u32]) {
        self.raw.clear();
        let rules = &*shaping.rules;
        if shaping.generated < rules.early_tokens {
            for id in &rules.early_banned {
                self.change(logits, *id, |_| f32::NEG_INFINITY);
            }
        }
        for (id, bias) in &rules.bias {
            self.change(logits, *id, |logit| logit + bias);
        }
        if rules.wants_history() {
            self.penalise(logits, rules, history, shaping.generated as usize);
        }
    }

    /// The model's own logit of a token after [`Shaper::apply`].
    pub(crate) fn raw_of(&self, token: u32) -> Option<f32> {
        let first = self.raw.iter().find(|(id, _)| *id == token);
        first.map(|(_, logit)| *logit)
    }

    /// Nothing was changed for the present choice.
    pub(crate) fn reset(&mut self) {
        self.raw.clear();
    }

    fn change(&mut self, logits: &mut [f32], id: u32, to: impl Fn(f32) -> f32) {
        if let Some(logit) = logits.get_mut(id as usize) {
            self.raw.push((id, *logit));
            *logit = to(*logit);
        }
    }

    fn penalise(
        &mut self,
        logits: &mut [f32],
        rules: &LogitRules,
        history: &[u32],
        generated: usize,
    ) {
        self.marks.resize(logits.len(), 0);
        let answer_from = history.len().saturating_sub(generated);
        for (place, id) in history.iter().enumerate() {
            if let Some(mark) = self.marks.get_mut(*id as usize) {
                *mark = (*mark | SEEN) + u32::from(place >= answer_from);
            }
        }
        for id in history {
            let Some(mark) = self.marks.get_mut(*id as usize) else {
                continue;
            };
            // Zero once it has been dealt with.
            let mark = std::mem::take(mark);
            if mark == 0 {
                continue;
            }
            let count = (mark & !SEEN) as f32;
            let present = f32::from(count > 0.0);
            self.change(logits, *id, |logit| {
                let repeated = if logit > 0.0 {
                    logit / rules.repetition
                } else {
                    logit * rules.repetition
                };
                repeated - rules.frequency * count - rules.presence * present
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shaped(rules: LogitRules, history: &[u32], generated: u32, logits: &[f32]) -> Vec<f32> {
        let shaping = Shaping {
            rules: Arc::new(rules),
            history: 0..history.len(),
            generated,
        };
        let mut logits = logits.to_vec();
        let mut shaper = Shaper::default();
        // Twice: nothing is left of the first time.
        shaper.apply(&mut logits.clone(), &shaping, history);
        shaper.apply(&mut logits, &shaping, history);
        logits
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let logits = [2.0, -2.0, 1.0, 0.5];
        // Prompt: 0, 2; answer: 1, 1, 2.
        let history = [0, 2, 1, 1, 2];
        let rules = LogitRules {
            repetition: 2.0,
            ..LogitRules::default()
        };
        assert_eq!(shaped(rules, &history, 3, &logits), [1.0, -4.0, 0.5, 0.5]);
        let rules = LogitRules {
            presence: 0.5,
            frequency: 0.25,
            ..LogitRules::default()
        };
        assert_eq!(shaped(rules, &history, 3, &logits), [2.0, -3.0, 0.25, 0.5]);
    }

    #[test]
    fn bias_is_added_and_early_tokens_are_banned_until_their_time() {
        let rules = LogitRules {
            bias: vec![(1, 3.0), (9, 1.0)],
            early_banned: vec![0],
            early_tokens: 2,
            ..LogitRules::default()
        };
        let logits = [1.0, 1.0];
        let early = shaped(rules.clone(), &[], 1, &logits);
        assert_eq!(early, [f32::NEG_INFINITY, 4.0]);
        assert_eq!(shaped(rules, &[], 2, &logits), [1.0, 4.0]);
    }

    #[test]
    fn unknown_ids_and_short_histories_are_passed_over() {
        let rules = LogitRules {
            presence: 1.0,
            ..LogitRules::default()
        };
        assert_eq!(shaped(rules, &[7, 0], 5, &[1.0, 1.0]), [0.0, 1.0]);
    }

    #[test]
    fn only_neutral_rules_are_neutral() {
        assert!(LogitRules::default().is_neutral());
        let some = LogitRules {
            frequency: 0.1,
            ..LogitRules::default()
        };
        assert!(!some.is_neutral());
    }
}
