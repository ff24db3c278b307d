//! What one node can be asked about after each of its turns: I1, I3, I4, I6, I7.

use super::{Node, PULLS};
use crate::sim::check::Invariant;
use crate::sim::context::Context;
use kvserve_runtime::completion::{SlotPhase, SlotView};
use std::time::Duration;

/// How late a deadline may fire: the wheel's tick.
const TICK: Duration = Duration::from_millis(2);

/// From the logical to the physical end of a read: the grace with progress, standing still, the
/// drain bound, and ticks between.
const STOP_BOUND_READ: Duration = Duration::from_millis(100 + 20 + 250 + 20);

/// The same for an engine step.
const STOP_BOUND_STEP: Duration = Duration::from_millis(1000 + 250 + 20);

impl Node {
    pub(super) fn check(&mut self, context: &mut Context) {
        if let Some(broken) = self.keeper.take_broken() {
            context.broke(broken.invariant, broken.what);
        }
        self.check_counters(context);
        self.check_slots(context);
        self.check_pages(context);
        self.check_credits(context);
        let most = self.pulls.values().map(super::Pull::reads_out).max();
        if most.is_some_and(|most| most > PULLS.reads_out_max) {
            context.broke(
                Invariant::I7,
                "an attempt has more reads out than its credits",
            );
        }
    }

    fn check_counters(&self, context: &mut Context) {
        let counters = self.hub.counters();
        let accounted = counters.posts_retired
            + counters.posts_lost
            + counters.posts_unposted
            + counters.posts_outstanding;
        if counters.posts_posted != accounted {
            let posted = counters.posts_posted;
            context.broke(
                Invariant::I4,
                format!("{posted} posts made, {accounted} known"),
            );
        }
        let ends = counters.guards_released + counters.guards_quarantined;
        if ends > counters.begun {
            context.broke(Invariant::I6, "more guards ended than slots were begun");
        }
    }

    fn check_slots(&mut self, context: &mut Context) {
        let now = self.turned_at;
        let views = self.hub.live();
        let waiting = views
            .iter()
            .filter(|v| v.phase == SlotPhase::Waiting)
            .count() as u64;
        let counters = self.hub.counters();
        if counters.begun != counters.ended() + waiting {
            let what = format!(
                "{} slots begun, {} ends, {waiting} waiting",
                counters.begun,
                counters.ended()
            );
            context.broke(Invariant::I6, what);
        }
        for wait in self.waits() {
            let view = views.iter().find(|view| view.slot == wait.slot());
            let ended = view.is_none_or(|view| view.phase != SlotPhase::Waiting);
            if ended && !wait.is_due() {
                let label = view.map_or("gone", |view| view.label);
                context.broke(
                    Invariant::I1,
                    format!("slot `{label}` has ended and its waiter was not woken"),
                );
            }
        }
        let overdue = |view: &&SlotView| {
            view.phase == SlotPhase::Waiting && view.deadline_left == Duration::ZERO
        };
        let stopping = |view: &&SlotView| view.phase == SlotPhase::Stopping;
        let mut seen = std::collections::BTreeMap::new();
        for view in views.iter().filter(overdue) {
            let name = Node::slot_name(view.slot);
            let since = *self.overdue.get(&name).unwrap_or(&now);
            if now.since(since) > TICK {
                let what = format!("slot `{}` waits past its deadline", view.label);
                context.broke(Invariant::I1, what);
            }
            seen.insert(name, since);
        }
        self.overdue = std::mem::take(&mut seen);
        for view in views.iter().filter(stopping) {
            let name = Node::slot_name(view.slot);
            let since = *self.stopping.get(&name).unwrap_or(&now);
            let bound = match view.label {
                "engine_step" => STOP_BOUND_STEP,
                _ => STOP_BOUND_READ,
            };
            if now.since(since) > bound {
                let what = format!("slot `{}` stops for {:?}", view.label, now.since(since));
                context.broke(Invariant::I1, what);
            }
            seen.insert(name, since);
        }
        self.stopping = seen;
    }

    fn check_pages(&self, context: &mut Context) {
        self.keeper.ledger.with(|ledger| ledger.assert_consistent());
        let fabric = self.fabric.borrow();
        self.keeper.note_states(|page| {
            if fabric.targets(self.endpoint, page) {
                let what = format!(
                    "{}: page {} is handed out while a read of it is under way",
                    self.plan.name, page.0
                );
                context.broke(Invariant::I2, what);
            }
        });
    }

    /// Nothing is under way any more: everything must be back.
    pub fn check_at_rest(&self, context: &mut Context) {
        // What only the prefix cache owns is as good as free.
        let (counts, free, guards) = self.keeper.ledger.with(|ledger| {
            let (counts, free) = (ledger.counts(), ledger.free_pages());
            (counts, free, ledger.guards_live())
        });
        if free + counts.quarantined != counts.total() || guards > 0 {
            let what = format!(
                "{}: at rest with {counts:?}, {guards} guards",
                self.plan.name
            );
            context.broke(Invariant::I3, what);
        }
        let slots = self.hub.live().len();
        if slots > 0 {
            let what = format!("{}: at rest with {slots} slots", self.plan.name);
            context.broke(Invariant::I9, what);
        }
    }
}
