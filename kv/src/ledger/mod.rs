//! The page ledger: which state each page of the pool is in and who names it (PROTOCOL 7).
//!
//! It owns the states and the guard table; it never touches the bytes of a page and knows no
//! clock and no socket. It keeps invariants I2 (a page that is handed out is named by no
//! outstanding operation) and I3 (the counts add up to the pool after every event).
//!
//! ```text
//!            allocate                 mark_ready            lease
//!   Free ───────────────▶ Building ──────────────▶ Ready ──────────▶ Leased
//!    ▲  └───────────────▶ Pulling ──commit────────▶  │ ◀──unlease─────  │
//!    │                       └──────adopt──▶ Building │                  │
//!    │        free, nobody names it                   ▼                  ▼
//!    ├───────────────────────────────── any of the four ────────────────┘
//!    │                                       │ free, still named
//!    └──────── last guard ends ◀── Stopping ◀┘
//!
//!   quarantine(guards): any state but Free ──▶ Quarantined, for the life of the process
//! ```
//!
//! Two ends of a page's use meet here. Its *owner* (a sequence, a lease, an attempt) gives it up
//! with [`Ledger::free`] or [`Ledger::end_lease`]; each *operation* that reads or writes it names
//! it by a guard, which the completion slab gives back at the physical end of the operation
//! (PROTOCOL E1). Only when both are through is the page Free.
//!
//! A page that is whole may have several owners ([`Ledger::share`]); they are counted, and the
//! states above are those of the last. The *prefix cache* ([`crate::prefix`]) is one owner more:
//! a page in it that has no other is handed out like a free one when Free pages run out.

mod books;
mod cached;
mod cell;
mod guards;
mod pages;
mod state;

#[cfg(test)]
mod cached_tests;

pub use cached::{PrefixCounters, PrefixFit};
pub use cell::LedgerCell;
pub use pages::{Ledger, NeedPages, PageCounts, PageView};
pub use state::{AllocateAs, IllegalEvent, PageEvent, PageState};
