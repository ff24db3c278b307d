//! The RDMA transport on the fake wire, and with `KVSERVE_TEST_VERBS=system` on soft-RoCE: the
//! suite that every transport must pass, in the form of a transport that drains, and what only
//! RDMA can show.

mod conformance;
mod rdma_cases;

use conformance::rdma_rig::RdmaRig;

conformance_suite!(by_the_card RdmaRig);
