//! What the runs have met: every kind of fault, edge, end and (state, event) pair, counted.

use super::expected::{
    FAULTS, LEASE_EVENTS, LEASE_NEVER, LEASE_PHASES, NAMED, PULL_EVENTS, PULL_NEVER, PULL_PHASES,
    RARE,
};
use kvserve_kv::pull::{AttemptPhase, PullEvent};
use std::collections::BTreeMap;

/// Counts by name. Merged over all runs.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    named: BTreeMap<&'static str, u64>,
    pairs: BTreeMap<(&'static str, &'static str, &'static str), u64>,
}

impl Coverage {
    /// Counts one more of `name`.
    pub fn hit(&mut self, name: &'static str) {
        *self.named.entry(name).or_default() += 1;
    }

    /// Counts so many more of `name`.
    pub fn add(&mut self, name: &'static str, count: u64) {
        if count > 0 {
            *self.named.entry(name).or_default() += count;
        }
    }

    /// Counts an event of a machine in a state.
    pub fn pair(&mut self, machine: &'static str, state: &'static str, event: &'static str) {
        *self.pairs.entry((machine, state, event)).or_default() += 1;
    }

    /// Adds another run's counts.
    pub fn merge(&mut self, other: &Coverage) {
        for (name, count) in &other.named {
            *self.named.entry(name).or_default() += count;
        }
        for (pair, count) in &other.pairs {
            *self.pairs.entry(*pair).or_default() += count;
        }
    }

    /// All counts in order, those that must not be zero included.
    pub fn table(&self) -> Vec<(String, u64)> {
        let mut all: BTreeMap<String, u64> = BTreeMap::new();
        for name in expected() {
            all.insert(name, 0);
        }
        for (name, count) in &self.named {
            all.insert((*name).to_owned(), *count);
        }
        for ((machine, state, event), count) in &self.pairs {
            all.insert(pair_name(machine, state, event), *count);
        }
        all.into_iter().collect()
    }

    /// What was met although a reason is given why it cannot be.
    pub fn impossible(&self) -> Vec<String> {
        let met = |(machine, state, event): &&(&'static str, &'static str, &'static str)| {
            never(machine)
                .iter()
                .any(|(phase, events, _)| phase == state && events.contains(event))
        };
        let name = |(machine, state, event): &(&str, &str, &str)| pair_name(machine, state, event);
        self.pairs.keys().filter(met).map(name).collect()
    }

    /// What must have been met and was not.
    pub fn zeros(&self) -> Vec<String> {
        let missing = |(name, count): (String, u64)| (count == 0).then_some(name);
        self.table().into_iter().filter_map(missing).collect()
    }
}

fn pair_name(machine: &str, state: &str, event: &str) -> String {
    format!("{machine}: {state} x {event}")
}

/// A pull event's name.
pub fn pull_event(event: &PullEvent) -> &'static str {
    match event {
        PullEvent::Granted { .. } => "granted",
        PullEvent::Busy { .. } => "busy",
        PullEvent::Refused { .. } => "refused",
        PullEvent::Queued => "queued",
        PullEvent::Watermark { .. } => "watermark",
        PullEvent::FirstToken(_) => "first_token",
        PullEvent::Complete { .. } => "complete",
        PullEvent::Aborted(_) => "aborted",
        PullEvent::CommitAnswer { .. } => "commit_answer",
        PullEvent::FenceQuery { .. } => "fence_query",
        PullEvent::ReadDone(_) => "read_done",
        PullEvent::ReadEnded(..) => "read_ended",
        PullEvent::NotPosted(_) => "not_posted",
        PullEvent::NoCredit(..) => "no_credit",
        PullEvent::Moved(_) => "moved",
        PullEvent::Checked { wrong: None, .. } => "checked",
        PullEvent::Checked { wrong: Some(_), .. } => "checked_wrong",
        PullEvent::Cancel => "cancel",
        PullEvent::SessionEnded => "session_ended",
        PullEvent::Quiet => "quiet",
        PullEvent::Stuck => "stuck",
        PullEvent::Tick => "tick",
    }
}

/// What cannot be met, of a machine.
fn never(machine: &str) -> &'static [(&'static str, &'static [&'static str], &'static str)] {
    match machine {
        "pull" => PULL_NEVER,
        "lease" => LEASE_NEVER,
        _ => &[],
    }
}

fn product<'a>(
    machine: &'static str,
    phases: impl Iterator<Item = &'a str>,
    events: &[&str],
) -> Vec<String> {
    let possible = |phase: &str, event: &str| {
        let never =
            |(of, events, _): &(&str, &[&str], &str)| *of == phase && events.contains(&event);
        let rare = |(of, at, what, _): &(&str, &str, &str, &str)| {
            (*of, *at, *what) == (machine, phase, event)
        };
        !self::never(machine).iter().any(never) && !RARE.iter().any(rare)
    };
    phases
        .flat_map(|phase| {
            let met = events.iter().filter(move |event| possible(phase, event));
            met.map(move |event| pair_name(machine, phase, event))
        })
        .collect()
}

fn expected() -> Vec<String> {
    let names = FAULTS.iter().chain(NAMED).map(|name| (*name).to_owned());
    let pulls = PULL_PHASES.iter().map(|phase: &AttemptPhase| phase.label());
    names
        .chain(product("pull", pulls, PULL_EVENTS))
        .chain(product("lease", LEASE_PHASES.iter().copied(), LEASE_EVENTS))
        .collect()
}
