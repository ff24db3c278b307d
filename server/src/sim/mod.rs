//! The deterministic cluster simulator: whole clusters of the real sans-IO cores under a virtual
//! clock and a seeded scheduler, with faults at every step (DESIGN 8).
//!
//! Real: the completion hub with its slab, ladder and wheel; ledger, lease table, pull engine;
//! handshake, seal and frame codec; liveness; scheduler; the proxy's table; the decisions of a
//! request's attempts. Simulated: time, sockets, cards, pools, the model, and the shells that
//! tie the cores together (`node` follows them file by file).
//!
//! ```text
//!  seed ─▶ World::from_seed ─▶ [event]* with faults at moments ─▶ checks after each ─▶ SeedReport
//!                                 │
//!       places (Node per life) ── conns ── fabric (kv/src/transport/sim) ── proxy ── clients
//! ```
//! Wrong answers cannot hide: keys and values are a hash of all tokens before, tokens are a hash
//! of the bytes read, and the right text is a pure function (`model`). Pages are checked when
//! a card or a lane *touches* them (`keeper`).
//!
//! `cargo run --release -p kvserve-tools --bin sim -- --seeds 20000` runs it; `--replay SEED`
//! runs one seed again, exactly, with its trace. `planted/` holds bugs it must find
//! (`tools/src/bin/sim-planted.rs`); `expected` names what 20,000 seeds must meet.

mod calm;
mod check;
mod clock;
mod context;
mod coverage;
mod expected;
mod faults;
mod keeper;
mod lane;
mod model;
mod node;
mod proxy;
mod random;
mod run;
mod seed;
mod world;

pub use check::{Invariant, Violation};
pub use context::running;
pub use coverage::Coverage;
pub use run::{SeedReport, Shape, Summary, run_seed, run_seeds};
