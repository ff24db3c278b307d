//! The scheduler: which tokens of which sequences the next engine step computes.
//!
//! Sans-IO: it is given the time, the page ledger and the samples of the last step, and fills
//! a [`kvserve_model::Step`]. It owns the sequences and their page tables; it never owns a
//! socket, a clock or a thread.
//!
//! ```text
//!            submit                 plan (pages there)          finished, cancelled, expired
//!   request ────────▶ waiting (FIFO) ─────────────────▶ running ───────────────────────────▶ gone
//!                        ▲                                 │
//!                        └──────── preempted (youngest) ◀──┘
//! ```
//!
//! What it keeps:
//! * the oldest running sequence is never preempted, so somebody always ends (PROTOCOL C3);
//! * pages of a lease and pages not yet proven by COMMIT are never preempted (PROTOCOL L1, L5);
//! * a sequence starts after its cached prefix; its own whole pages enter the cache when the
//!   step that filled them has ended, but nothing on top of pages not yet proven (PROTOCOL C2);
//! * a token is reported once; a preempted sequence recomputes tokens, it never samples them
//!   again (PROTOCOL R2).

mod limits;
mod plan;
mod sequence;
mod table;

#[cfg(test)]
mod prefix_tests;
#[cfg(test)]
mod tests;

pub use limits::SchedulerLimits;
pub use sequence::{PagesFrom, SequenceId, SequenceSpec, SequenceView};
pub use table::{QueueFull, Scheduler, SchedulerEvent};
