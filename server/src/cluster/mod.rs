//! Who is in the cluster: nodes report to the proxy over their authenticated peer session, the
//! proxy keeps each for as long as it reports (a lease), and tells everybody who prefills.
//!
//! ```text
//!   node ── Report every 500 ms ──▶ proxy (keeps it while the session lives, and 3 s)
//!   node ◀── Roster of prefill nodes, on change and every second ── proxy
//! ```
//! The proxy holds no state that safety needs (PROTOCOL R7): after a restart nodes report again
//! by themselves. Only a peer that authenticated as a proxy is believed about addresses.

pub mod agent;
mod codec;
mod registry;

pub use codec::{CodecError, NodeReport, PATHS_MAX, PathReport, Roster, RosterEntry};
pub use registry::{Registered, Registry};

use std::time::Duration;

/// App frame kind of a [`NodeReport`].
pub const KIND_REPORT: u16 = 1;
/// App frame kind of a [`Roster`].
pub const KIND_ROSTER: u16 = 2;

/// How often a node reports.
pub const REPORT_EVERY: Duration = Duration::from_millis(500);
/// How long a report is believed: as long as a silent peer is (PROTOCOL S3); five may be lost.
pub const REPORT_TTL: Duration = Duration::from_secs(3);
/// How often the roster is told although nothing changed.
pub const ROSTER_EVERY: Duration = Duration::from_secs(1);
