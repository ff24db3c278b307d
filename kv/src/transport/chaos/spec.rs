//! The grammar of `--chaos`, and the handle that draws faults from it.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Rules in one spec at most: each of the nine faults once, and some to spare.
const RULES_MAX: usize = 16;

/// The longest delay a rule may ask for: as long as the default request lives.
const LATE_MAX: Duration = Duration::from_secs(60);

/// What may happen to a good completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionFault {
    /// Nobody hears of it.
    Lose,
    /// It is told as an error.
    Fail,
    /// It is told twice.
    Duplicate,
    /// It is told so much later.
    Late(Duration),
}

/// What may happen to the proof that a killed channel is quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushFault {
    /// It never comes: the channel is stuck.
    Lose,
}

/// What may happen to a control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFault {
    /// It is not sent.
    Lose,
    /// It is sent so much later.
    Late(Duration),
    /// A bit of it is flipped.
    Corrupt,
}

/// One rule's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `completion=...`
    Completion(CompletionFault),
    /// `flush=...`
    Flush(FlushFault),
    /// `message=...`
    Message(MessageFault),
}

/// A fault and how often it strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rule {
    fault: Fault,
    /// Above 0 and at most 1.
    probability: f64,
}

/// A list of rules. For each event the first rule of its kind that strikes wins.
///
/// ```
/// use kvserve_kv::transport::chaos::ChaosSpec;
/// let spec: ChaosSpec = "completion=late:500ms@0.1,flush=lose".parse().unwrap();
/// assert_eq!(spec.to_string(), "completion=late:500ms@0.1,flush=lose");
/// assert!("".parse::<ChaosSpec>().unwrap().is_off());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChaosSpec {
    rules: Vec<Rule>,
}

impl ChaosSpec {
    /// Whether it has no rule.
    pub fn is_off(&self) -> bool {
        self.rules.is_empty()
    }
}

/// Why a text is no [`ChaosSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChaosSpecError {
    /// The rule at fault, as given.
    pub rule: String,
    /// What is wrong with it and what would be right.
    pub problem: &'static str,
}

impl fmt::Display for ChaosSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chaos rule {:?}: {}", self.rule, self.problem)
    }
}

impl std::error::Error for ChaosSpecError {}

impl FromStr for ChaosSpec {
    type Err = ChaosSpecError;

    /// Reads a comma list of `completion=lose|fail|duplicate|late:TIME`, `flush=lose`,
    /// `message=lose|late:TIME|corrupt`, each with an optional `@PROBABILITY`. TIME is a number
    /// with `ms` or `s`. Nothing, or `off`, is no chaos.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.is_empty() || text == "off" {
            return Ok(ChaosSpec::default());
        }
        let rules = text.split(',').map(|rule| {
            parse_rule(rule.trim()).map_err(|problem| ChaosSpecError {
                rule: rule.trim().chars().take(80).collect(),
                problem,
            })
        });
        let rules = rules
            .take(RULES_MAX + 1)
            .collect::<Result<Vec<_>, ChaosSpecError>>()?;
        if rules.len() > RULES_MAX {
            return Err(ChaosSpecError {
                rule: text.chars().take(80).collect(),
                problem: "more than 16 rules in one list",
            });
        }
        Ok(ChaosSpec { rules })
    }
}

fn parse_rule(text: &str) -> Result<Rule, &'static str> {
    let (text, probability) = match text.split_once('@') {
        None => (text, 1.0),
        Some((rule, given)) => {
            let probability = given
                .parse::<f64>()
                .ok()
                .filter(|value| *value > 0.0 && *value <= 1.0)
                .ok_or("after @ comes a probability above 0 and up to 1, e.g. @0.1")?;
            (rule, probability)
        }
    };
    let (target, what) = text
        .split_once('=')
        .ok_or("a rule is completion=..., flush=... or message=...")?;
    let (what, delay) = match what.split_once(':') {
        None => (what, None),
        Some((what, delay)) => (what, Some(parse_delay(delay)?)),
    };
    let fault = match (target, what, delay) {
        ("completion", "lose", None) => Fault::Completion(CompletionFault::Lose),
        ("completion", "fail", None) => Fault::Completion(CompletionFault::Fail),
        ("completion", "duplicate", None) => Fault::Completion(CompletionFault::Duplicate),
        ("completion", "late", Some(delay)) => Fault::Completion(CompletionFault::Late(delay)),
        ("flush", "lose", None) => Fault::Flush(FlushFault::Lose),
        ("message", "lose", None) => Fault::Message(MessageFault::Lose),
        ("message", "late", Some(delay)) => Fault::Message(MessageFault::Late(delay)),
        ("message", "corrupt", None) => Fault::Message(MessageFault::Corrupt),
        ("completion" | "message", "late", None) => {
            return Err("late needs a time, e.g. late:500ms");
        }
        ("completion", _, _) => return Err("completion is lose, fail, duplicate or late:TIME"),
        ("flush", _, _) => return Err("flush is lose"),
        ("message", _, _) => return Err("message is lose, late:TIME or corrupt"),
        (_, _, _) => return Err("a rule is completion=..., flush=... or message=..."),
    };
    Ok(Rule { fault, probability })
}

fn parse_delay(text: &str) -> Result<Duration, &'static str> {
    let delay = if let Some(number) = text.strip_suffix("ms") {
        number.parse().ok().map(Duration::from_millis)
    } else if let Some(number) = text.strip_suffix('s') {
        number.parse().ok().map(Duration::from_secs)
    } else {
        None
    };
    delay
        .filter(|delay| *delay <= LATE_MAX)
        .ok_or("a time is a whole number with ms or s, at most 60s, e.g. late:500ms")
}

impl fmt::Display for ChaosSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_off() {
            return f.write_str("off");
        }
        for (place, rule) in self.rules.iter().enumerate() {
            if place > 0 {
                f.write_str(",")?;
            }
            match rule.fault {
                Fault::Completion(CompletionFault::Lose) => f.write_str("completion=lose")?,
                Fault::Completion(CompletionFault::Fail) => f.write_str("completion=fail")?,
                Fault::Completion(CompletionFault::Duplicate) => {
                    f.write_str("completion=duplicate")?;
                }
                Fault::Completion(CompletionFault::Late(delay)) => {
                    write!(f, "completion=late:{}ms", delay.as_millis())?;
                }
                Fault::Flush(FlushFault::Lose) => f.write_str("flush=lose")?,
                Fault::Message(MessageFault::Lose) => f.write_str("message=lose")?,
                Fault::Message(MessageFault::Late(delay)) => {
                    write!(f, "message=late:{}ms", delay.as_millis())?;
                }
                Fault::Message(MessageFault::Corrupt) => f.write_str("message=corrupt")?,
            }
            if rule.probability < 1.0 {
                write!(f, "@{}", rule.probability)?;
            }
        }
        Ok(())
    }
}

/// What the chaos of a process has done since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChaosCounters {
    /// Completions that nobody heard of.
    pub completions_lost: u64,
    /// Good completions told as errors.
    pub completions_failed: u64,
    /// Completions told twice.
    pub completions_duplicated: u64,
    /// Completions held back.
    pub completions_late: u64,
    /// Killed channels that were told to be stuck.
    pub flushes_lost: u64,
    /// Control frames not sent.
    pub messages_lost: u64,
    /// Control frames held back.
    pub messages_late: u64,
    /// Control frames with a flipped bit.
    pub messages_corrupted: u64,
}

/// What to do with one control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFate {
    /// Send it.
    Deliver,
    /// Do not send it, and tell nobody.
    Lose,
    /// Send it so much later; frames behind it wait too, as in any ordered stream.
    Late(Duration),
    /// Flip a bit of the encoded frame, then send it. `seed` says which: any bit, by
    /// `seed % bits`.
    Corrupt {
        /// A random number.
        seed: u64,
    },
}

/// The chaos of a process: cheap to clone, changed from any thread while it runs.
///
/// With the same seed and the same order of events the same faults strike.
#[derive(Clone)]
pub struct ChaosHandle {
    shared: Arc<Shared>,
}

struct Shared {
    /// Whether there is any rule: what every poll looks at.
    on: AtomicBool,
    state: Mutex<State>,
}

struct State {
    spec: ChaosSpec,
    random: u64,
    counters: ChaosCounters,
}

impl ChaosHandle {
    /// A handle with these rules.
    pub fn new(spec: ChaosSpec, seed: u64) -> Self {
        ChaosHandle {
            shared: Arc::new(Shared {
                on: AtomicBool::new(!spec.is_off()),
                state: Mutex::new(State {
                    spec,
                    random: seed,
                    counters: ChaosCounters::default(),
                }),
            }),
        }
    }

    /// A handle without rules, to be given some later.
    pub fn off() -> Self {
        ChaosHandle::new(ChaosSpec::default(), 0)
    }

    /// Replaces the rules. What was already held back or lost stays so.
    pub fn set(&self, spec: ChaosSpec) {
        let mut state = self.state();
        self.shared.on.store(!spec.is_off(), Ordering::Relaxed);
        state.spec = spec;
    }

    /// The rules in force.
    pub fn spec(&self) -> ChaosSpec {
        self.state().spec.clone()
    }

    /// Whether there is any rule.
    pub fn is_on(&self) -> bool {
        self.shared.on.load(Ordering::Relaxed)
    }

    /// What was done since the start.
    pub fn counters(&self) -> ChaosCounters {
        self.state().counters
    }

    /// Draws what happens to one control frame that is about to be sent.
    pub fn on_message(&self) -> MessageFate {
        if !self.is_on() {
            return MessageFate::Deliver;
        }
        let mut state = self.state();
        let fault = state.draw(|fault| match fault {
            Fault::Message(fault) => Some(fault),
            Fault::Completion(_) | Fault::Flush(_) => None,
        });
        match fault {
            None => MessageFate::Deliver,
            Some(MessageFault::Lose) => {
                state.counters.messages_lost += 1;
                MessageFate::Lose
            }
            Some(MessageFault::Late(delay)) => {
                state.counters.messages_late += 1;
                MessageFate::Late(delay)
            }
            Some(MessageFault::Corrupt) => {
                state.counters.messages_corrupted += 1;
                MessageFate::Corrupt {
                    seed: state.next_random(),
                }
            }
        }
    }

    /// Draws what happens to one good completion.
    pub(super) fn on_completion(&self) -> Option<CompletionFault> {
        if !self.is_on() {
            return None;
        }
        let mut state = self.state();
        let fault = state.draw(|fault| match fault {
            Fault::Completion(fault) => Some(fault),
            Fault::Flush(_) | Fault::Message(_) => None,
        });
        match fault {
            None => {}
            Some(CompletionFault::Lose) => state.counters.completions_lost += 1,
            Some(CompletionFault::Fail) => state.counters.completions_failed += 1,
            Some(CompletionFault::Duplicate) => state.counters.completions_duplicated += 1,
            Some(CompletionFault::Late(_)) => state.counters.completions_late += 1,
        }
        fault
    }

    /// Draws whether the proof of one killed channel's quiet gets lost.
    pub(super) fn on_flush(&self) -> bool {
        if !self.is_on() {
            return false;
        }
        let mut state = self.state();
        let fault = state.draw(|fault| match fault {
            Fault::Flush(fault) => Some(fault),
            Fault::Completion(_) | Fault::Message(_) => None,
        });
        match fault {
            None => false,
            Some(FlushFault::Lose) => {
                state.counters.flushes_lost += 1;
                true
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is plain numbers: whole even if a holder panicked.
        let lock = self.shared.state.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The first rule that `pick` takes and whose probability strikes.
    fn draw<F: Copy>(&mut self, pick: impl Fn(Fault) -> Option<F>) -> Option<F> {
        for place in 0..self.spec.rules.len() {
            let rule = self.spec.rules[place];
            let Some(fault) = pick(rule.fault) else {
                continue;
            };
            // 53 random bits: an even number in [0, 1).
            let drawn = (self.next_random() >> 11) as f64 / (1u64 << 53) as f64;
            if drawn < rule.probability {
                return Some(fault);
            }
        }
        None
    }

    /// A Weyl sequence through a 64-bit mixer: small, seedable, good enough for faults.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_is_read_and_written_alike() {
        for text in [
            "completion=lose",
            "completion=fail@0.5",
            "completion=duplicate",
            "completion=late:500ms@0.25",
            "flush=lose",
            "message=lose@0.01",
            "message=late:20ms",
            "message=corrupt",
            "completion=lose@0.1,completion=fail@0.1,flush=lose,message=late:3000ms",
            "off",
        ] {
            let spec: ChaosSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!(
            "completion=lose@1, flush=lose".parse::<ChaosSpec>(),
            "completion=lose,flush=lose".parse()
        );
        assert_eq!(
            "message=late:3s".parse::<ChaosSpec>(),
            "message=late:3000ms".parse()
        );
        assert!("  ".parse::<ChaosSpec>().unwrap().is_off());
    }

    #[test]
    fn every_mistake_is_named() {
        for (text, expected) in [
            ("completion", "a rule is"),
            ("completion=", "completion is"),
            ("completion=corrupt", "completion is"),
            ("completion=lose:5ms", "completion is"),
            ("completion=late", "late needs a time"),
            ("completion=late:5", "whole number"),
            ("completion=late:-5ms", "whole number"),
            ("completion=late:61s", "at most 60s"),
            ("completion=lose@0", "probability"),
            ("completion=lose@1.5", "probability"),
            ("completion=lose@NaN", "probability"),
            ("flush=late:5ms", "flush is lose"),
            ("message=duplicate", "message is"),
            ("disk=lose", "a rule is"),
            ("completion=lose,,flush=lose", "a rule is"),
        ] {
            let error = text.parse::<ChaosSpec>().unwrap_err();
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
        let long = vec!["flush=lose"; RULES_MAX + 1].join(",");
        assert!(long.parse::<ChaosSpec>().is_err());
    }

    #[test]
    fn the_same_seed_draws_the_same_faults_and_about_as_many_as_asked() {
        let draw = |seed| {
            let spec = "message=lose@0.25,message=corrupt@0.5".parse().unwrap();
            let handle = ChaosHandle::new(spec, seed);
            let fates: Vec<_> = (0..2000).map(|_| handle.on_message()).collect();
            (fates, handle.counters())
        };
        let (first, counters) = draw(7);
        assert_eq!(draw(7).0, first);
        assert_ne!(draw(8).0, first);
        // Expected 500 lost; then half of the other 1,500.
        assert!((400..600).contains(&counters.messages_lost), "{counters:?}");
        let corrupted = counters.messages_corrupted;
        assert!((650..850).contains(&corrupted), "{counters:?}");
        assert_eq!(counters.completions_lost, 0);
    }

    #[test]
    fn rules_change_at_run_time_for_every_holder() {
        let handle = ChaosHandle::off();
        let other = handle.clone();
        assert_eq!(other.on_message(), MessageFate::Deliver);
        handle.set("message=lose".parse().unwrap());
        assert_eq!(other.on_message(), MessageFate::Lose);
        assert_eq!(other.spec().to_string(), "message=lose");
        handle.set(ChaosSpec::default());
        assert_eq!(other.on_message(), MessageFate::Deliver);
        assert!(!other.is_on());
    }
}
