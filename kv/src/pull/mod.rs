//! One attempt of a migration as the decode side drives it (PROTOCOL 4, 5). Sans-IO.
//!
//! Owns: what is posted, placed and checked; the stage limits; what the peer is told.
//! Never does: reads, frees or sends by itself; it answers with [`PullEffect`]s.
//! Keeps: L4 (nothing is read beyond the watermark), L5 (COMMIT only when every byte is in and
//! checked), L7 (RELEASE on every other way out, after the last post is quiet), I6, I12.
//!
//! ```text
//!            Granted              all placed, checked, Complete
//!   Asked ───────────▶ Pulling ─────────────────────────────────▶ Committing ──OK──▶ Ended
//!     │ failure           │ failure, cancel                           │ refused, silent
//!     ▼                   ▼                                           ▼
//!   Ended            Stopping ── last post quiet: RELEASE ──▶ Ended ◀─┘ RELEASE
//! ```

mod attempt;
mod events;
mod failure;
mod runs;

pub use attempt::Attempt;
pub use events::{AttemptPhase, PullEffect, PullEvent, PullLimits, PullNews};
pub use failure::{FailReason, MigrationError, NotBegun, Retry, Stage};
pub use runs::READ_BYTES_MAX;

#[cfg(test)]
mod tests;
