//! A cluster of real processes under load, cancels and restarts, judged at the end: every text
//! is the one that `serve` alone gives, every request has one terminal state, nothing leaks.
//!
//! | file | what |
//! |---|---|
//! | `client` | a blocking HTTP client of a few lines |
//! | `cluster` | processes of this very binary: nodes, their ports, signals, pages |
//! | `load` | what is asked, by whom, and how each request ended |
//! | `judge` | what must hold when the last request has ended |
//! | `timings` | how exactly stage limits are kept, from the nodes' own counters |

pub mod client;
pub mod cluster;
pub mod judge;
pub mod load;
pub mod timings;

/// The first argument with which the soak starts itself as a `kvserve` process.
pub const AS_KVSERVE: &str = "--as-kvserve";
