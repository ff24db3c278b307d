//! `kvserve`: the server itself, as a library that the binary, the tools and the tests use.
//!
//! **What it is.** The command line, the OpenAI API, the scheduler and the engine's step loop,
//! the nodes of a cluster, the proxy, the supervisor of `kvserve up`.
//!
//! **What it is not.** It holds no kernel, no transport and no executor: those are the crates
//! below.

pub mod api;
pub mod cli;
pub mod cluster;
pub mod engine;
pub mod log;
pub mod metrics;
pub mod node;
pub mod perf;
pub mod placement;
pub mod proxy;
pub mod readiness;
pub mod run;
pub mod scheduler;
pub mod sim;
pub mod up;
