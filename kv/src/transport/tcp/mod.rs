//! Pages over TCP (PROTOCOL X4): one data connection per pair of cores, readiness and
//! non-blocking vectored calls only.
//!
//! ```text
//!   decode node                              prefill node
//!   TcpTransport ── 64-byte read requests ─▶ TcpReadServer ── resolve ─▶ ReadAuthority (leases)
//!        ▲                                        │ names the pages until the kernel has them
//!        └──── 32-byte header + page bytes ◀──────┘
//! ```
//!
//! No pointer of ours is ever in the kernel's hands between two calls (PROTOCOL E6), so closing a
//! connection is its physical end on both sides: a killed channel is quiet at once.
//!
//! Connections come in already authenticated: the peer hub makes the handshake on the control
//! protocol and hands the socket over.

mod channel;
mod client;
mod served;
mod server;
pub mod wire;

pub use client::{ChannelState, TcpConfig, TcpCounters, TcpTransport};
pub use server::{ConnectionId, ReadAuthority, ServerConfig, ServerCounters, TcpReadServer};
pub use wire::{READ_BYTES_MAX, READS_IN_FLIGHT_MAX, pages_per_read_max};
