//! Leases: the prefill side's promise that pages stay as they are while a peer reads them
//! (PROTOCOL 5). Sans-IO.
//!
//! Owns: which attempt holds which pages, how far they are ready, and how each lease ends.
//! Never does: send, free or read a page itself; it answers with [`LeaseEffect`]s.
//! Keeps: L3 (expiry alone never frees), L5 (a COMMIT is OK only for this very grant, complete,
//! unexpired, never fenced; repeated, it gets the same answer), I10, I12.
//!
//! ```text
//!          grant             complete            commit OK ─────────────┐
//! Asked ─────────▶ Building ─────────▶ Complete ──────────▶ ended: tombstone, pages free
//!   │                │  │ abort, cancel   │ │                   ▲  ▲  (once the producer
//!   │ cancel         │  └───────▶ Aborted ◀┘ │ release, not      │  │   has let go as well)
//!   ▼                │ expiry        │ 2 s   │ listed in Renew ──┘  │
//! ended              └─────────▶ Fencing ◀───┘ expiry               │
//!                                   │ answer, or the session has ended
//!                                   └───────────────────────────────┘
//! ```

mod frames;
mod table;
mod types;

pub use table::LeaseTable;
pub use types::{
    AskVerdict, GrantError, LeaseCounters, LeaseEffect, LeaseLimits, LeasePhase, LeaseView,
    PeerSession, ReadRefusal,
};

#[cfg(test)]
mod tests;
