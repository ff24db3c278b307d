//! `kvserve-kv`: pages of KV cache, who may touch them, and how they move between nodes.
//!
//! **What it is.** The page layout and its hash, the pool (one memfd), the page ledger, leases,
//! peer sessions, the pull engine, and the transports under one face.
//!
//! **What it is not.** It knows no model and no HTTP: a prompt is a list of token ids, sampling
//! parameters are opaque bytes.

pub mod checksum;
pub mod copy;
pub mod credits;
pub mod layout;
pub mod lease;
pub mod ledger;
pub mod peer;
pub mod pool;
pub mod prefix;
pub mod pull;
pub mod session;
pub mod transport;

pub use checksum::ChecksumMode;
pub use layout::{KvDtype, KvLayout};
pub use ledger::{AllocateAs, Ledger, LedgerCell};
pub use pool::{PageId, PoolBacking, PoolKind, PoolMemory};
pub use transport::{Posted, Read, Transport};
