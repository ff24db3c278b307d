//! The faults that servers of this kind fell to, each as a test on real processes: every one is
//! named by its number in the project's list of faults, and the texts stay right throughout.
//!
//! Nodes of the tiny random model are started one by one (`harness::Spec`), with a relay between
//! decode and prefill that acts at an exact frame (`harness::Relay`), with peers that hold the
//! key and lie (`harness::PeerEnd`, `harness::Liar`), with single threads held still
//! (`harness::StoppedThread`). Bounds are of liveness: seconds on a busy machine.
//!
//! Short forms run with `cargo test`; the full numbers are `#[ignore]`d and run by `tools/soak`.
//!
//! | fault | where it is shown |
//! |---|---|
//! | 1 dropped completer | runtime `completion_ends.rs`, `completion_dropped.rs`; simulator |
//! | 2 one message lost | cluster `completions_go_wrong.rs`, kv `peer_chaos.rs`; here `fault_02_*` per frame kind; simulator |
//! | 3 prefill dies at each step | here `a_waits.rs`; kv `peer_dies.rs`; simulator |
//! | 4 post k of n fails | runtime `completion_ends.rs` (`by_a_post_that_was_not_taken`), slab tests; simulator |
//! | 5 pinned pages and eviction | simulator (the prefix cache is not built yet) |
//! | 6 pool full of stuck transfers | simulator |
//! | 7 frozen peers | here `a_waits.rs`; cluster `node_dies.rs`; virtual machine |
//! | 8 retry settings of RDMA | RDMA issue |
//! | 9 lost acknowledgement, QP in error | RDMA issue |
//! | 10 status query fails | simulator |
//! | 11 nothing to transfer | here `a_waits.rs` |
//! | 12 either leg fails | here `a_waits.rs`; server `api_proxy.rs` |
//! | 13 bounded buffers full | here `a_waits.rs` |
//! | 14 slow registration | here `a_waits.rs` |
//! | 15 joins and leaves under load | here `a_waits.rs`; simulator |
//! | 16 no loop blocked by a peer | here `a_waits.rs`; runtime `shard_wedges.rs` |
//! | 17 restarts on the same address | here `b_identity.rs`; simulator |
//! | 18 three of four decode nodes die | here `b_identity.rs` |
//! | 19 random session kills | here `b_identity.rs` (sessions); RDMA issue (QPs) |
//! | 20 peers of other versions | here `b_identity.rs`; kv `handshake_tests.rs` |
//! | 21 client leaves at each stage | here `c_leaks.rs`; cluster `client_leaves.rs`; kv `peer_cancels.rs` |
//! | 22 decode rejects | here `c_leaks.rs`; simulator |
//! | 23 ten thousand aborts | here `c_leaks.rs` (fewer); simulator |
//! | 24 forged ids | here `c_leaks.rs`; kv `lease/tests.rs` |
//! | 25 constant memory | here `c_leaks.rs` |
//! | 26 stale page references | here `d_wrong_answers.rs`; kv `lease/tests.rs` |
//! | 27 delayed writes past an abort | kv `transfer_has_two_ends.rs`, conformance; simulator |
//! | 28 half-filled pages | here `d_wrong_answers.rs` (`fault_28_*`); simulator |
//! | 29 equal texts at concurrency | here `d_wrong_answers.rs`; cluster `concurrent_streams.rs` |
//! | 30 layouts | kv `layout.rs`, `handshake_tests.rs` (others are refused; no conversion is built) |
//! | 31 a flipped byte | here `d_wrong_answers.rs`; kv `checksum.rs`, `wire.rs`, `seal.rs` |
//! | 32 an error is never data | runtime `completion_ends.rs`, kv `transport_tcp_hostile.rs`; RDMA issue |
//! | 33 prompt lengths | here `d_wrong_answers.rs` |
//! | 34 garbage on the peer port | here `e_input_skew.rs`; kv `session/fuzz.rs`, `transport_tcp_hostile.rs` |
//! | 35 a thousand handshakes | here `e_input_skew.rs` |
//! | 36 an error completion fails one request | cluster `completions_go_wrong.rs`; simulator |
//! | 37 model files | model `malformed_files_are_refused.rs`; here `e_input_skew.rs` (the command) |
//! | 38 prefill nodes die | here `f_health_routing.rs` |
//! | 39 a wedged shard or lane | here `f_health_routing.rs`; runtime `shard_wedges.rs`, `lane_jobs.rs` |
//! | 40 twelve thousand requests | here `f_health_routing.rs` |
//! | 41 long prompts cancelled | here `f_health_routing.rs` |
//! | 42 back-off with jitter | here `a_waits.rs` (with 14); simulator |
//! | 43 authentication first | here `g_security.rs` |
//! | 44 registration of memory | kv `pool.rs` (sealed memfd); RDMA issue |
//! | 45 nothing named by clients | here `g_security.rs` |
//! | 46 shared memory is private | kv `pool.rs`; the shared-memory transport's tests |

#[path = "../harness/mod.rs"]
mod harness;

mod load;
mod steps;

mod a_waits;
mod b_identity;
mod c_leaks;
mod d_wrong_answers;
mod e_input_skew;
mod f_health_routing;
mod g_security;
mod h_transfers;
