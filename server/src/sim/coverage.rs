//! What the runs have met: every kind of fault, edge, end and (state, event) pair, counted.

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

/// Every kind of fault, by the name under which it is counted when it strikes.
pub const FAULTS: &[&str] = &[
    "fault: frame lost",
    "fault: frame doubled",
    "fault: frame late",
    "fault: bytes corrupted",
    "fault: bytes truncated",
    "fault: bytes replayed",
    "fault: bytes reordered",
    "fault: partition",
    "fault: freeze",
    "fault: kill",
    "fault: kill, peers not told",
    "fault: proxy killed",
    "fault: restart",
    "fault: completion with an error",
    "fault: completion lost",
    "fault: completion twice",
    "fault: completion stray",
    "fault: link stands still",
    "fault: flush never comes",
    "fault: destroy fails",
    "fault: post fails",
    "fault: page corrupted",
    "fault: page truncated",
    "fault: stale lease",
    "fault: stale epoch",
    "fault: stale incarnation",
    "fault: stale commit",
    "fault: watermark goes back",
    "fault: dead lease listed",
    "fault: step fails",
    "fault: step never ends",
    "fault: client leaves",
    "fault: clock drifts",
];

/// Ends, edges and reasons that 20,000 seeds must meet.
const NAMED: &[&str] = &[
    "slot ended: ok",
    "slot ended: failed",
    "slot ended: deadline",
    "slot ended: cancelled",
    "slot ended: channel stuck",
    "read posted again",
    "completion: late",
    "completion: duplicate",
    "completion: stray",
    "post: unposted",
    "post: lost with its channel",
    "post: taken back",
    "ladder: open to draining",
    "ladder: draining to free",
    "ladder: draining to quarantined",
    "guard: released",
    "guard: quarantined",
    "lease: granted",
    "lease: committed",
    "lease: released",
    "lease: unlisted",
    "lease: aborted",
    "lease: fenced",
    "lease: fence unanswered",
    "lease: ended with its session",
    "lease: commit refused",
    "lease: stale frame",
    "attempt failed: stage_limit",
    "attempt failed: deadline_exceeded",
    "attempt failed: busy",
    "attempt failed: aborted",
    "attempt failed: peer_lost",
    "attempt failed: read_failed",
    "attempt failed: no_post",
    "attempt failed: checksum",
    "attempt failed: commit_refused",
    "attempt failed: fenced",
    "attempt failed: cancelled",
    "attempt failed: violation",
    "commit answered: ok",
    "commit answered: unknown",
    "commit answered: expired",
    "commit answered: aborted",
    "commit answered: mismatch",
    "session ended: violation",
    "session ended: silent",
    "session ended: disconnected",
    "session ended: fence_unanswered",
    "session ended: superseded",
    "session ended: channel_stuck",
    "handshake failed",
    "request: finished",
    "request: failed, deadline_exceeded",
    "request: failed, peer_lost",
    "request: failed, engine_failed",
    "request: failed, not_ready",
    "request: client left",
    "request: computed here",
    "request: migrated",
    "request: retried",
    "request: ended with its first token",
    "later request: finished",
    "sequence preempted",
    "node aborted by its sentinel",
];

/// Pairs of the pull engine that must be met.
fn pull_pairs() -> impl Iterator<Item = (AttemptPhase, &'static str)> {
    use AttemptPhase::{Asked, Committing, Pulling, Stopping};
    let asked = [
        "granted",
        "busy",
        "first_token",
        "watermark",
        "complete",
        "cancel",
        "session_ended",
        "tick",
        "fence_query",
        "aborted",
    ];
    let pulling = [
        "granted",
        "watermark",
        "first_token",
        "complete",
        "aborted",
        "fence_query",
        "read_done",
        "read_ended",
        "not_posted",
        "checked",
        "checked_wrong",
        "cancel",
        "session_ended",
        "tick",
    ];
    let committing = [
        "commit_answer",
        "aborted",
        "fence_query",
        "cancel",
        "session_ended",
        "tick",
        "complete",
    ];
    let stopping = [
        "quiet",
        "stuck",
        "fence_query",
        "session_ended",
        "watermark",
        "complete",
        "aborted",
        "first_token",
        "cancel",
    ];
    (asked.into_iter().map(|event| (Asked, event)))
        .chain(pulling.into_iter().map(|event| (Pulling, event)))
        .chain(committing.into_iter().map(|event| (Committing, event)))
        .chain(stopping.into_iter().map(|event| (Stopping, event)))
}

/// Pairs of the lease table that must be met.
const LEASE_PAIRS: &[(&str, &[&str])] = &[
    ("asked", &["session ended"]),
    (
        "building",
        &[
            "watermark",
            "complete",
            "read",
            "renew, listed",
            "cancel",
            "release",
            "session ended",
            "tick",
            "renew, not listed",
            "commit",
        ],
    ),
    (
        "complete",
        &[
            "commit",
            "read",
            "renew, listed",
            "renew, not listed",
            "cancel",
            "release",
            "session ended",
            "tick",
        ],
    ),
    (
        "aborted",
        &[
            "release",
            "renew, not listed",
            "session ended",
            "read",
            "tick",
            "commit",
        ],
    ),
    (
        "fencing",
        &["fence answer", "release", "session ended", "tick", "commit"],
    ),
    ("draining", &["tick"]),
    (
        "gone",
        &["commit", "release", "cancel", "fence answer", "read"],
    ),
];

fn expected() -> Vec<String> {
    let names = FAULTS.iter().chain(NAMED).map(|name| (*name).to_owned());
    let pulls = pull_pairs().map(|(phase, event)| pair_name("pull", phase.label(), event));
    let leases = LEASE_PAIRS
        .iter()
        .flat_map(|(phase, events)| (events.iter()).map(|event| pair_name("lease", phase, event)));
    names.chain(pulls).chain(leases).collect()
}
