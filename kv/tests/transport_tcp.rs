//! The TCP transport against its own server: the suite that every transport must pass.

mod conformance;

use conformance::tcp_rig::TcpRig;

conformance_suite!(TcpRig);
