//! Whole clusters of real processes on this machine: the promises of the README, as tests.
//!
//! One binary for all of them, and one cluster at a time: each takes both cores of a small
//! machine. `KVSERVE_TEST_RUNS` raises the number of runs of the fault tests (3 by default).

#[path = "../harness/mod.rs"]
mod harness;

mod client_leaves;
mod completions_go_wrong;
mod concurrent_streams;
mod greedy_fixtures;
mod node_dies;
mod prefix_cache;
mod rdma;
mod sampling_rules;
mod sigterm_drains;
mod up_command;
