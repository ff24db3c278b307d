//! What a listener has seen; plain numbers of one shard.

use std::cell::Cell;

/// Counters of one listener; read them from the same shard at any time.
#[derive(Debug, Default)]
pub struct HttpCounters {
    /// Connections open now.
    pub connections_open: Cell<u64>,
    /// Connections accepted.
    pub accepted: Cell<u64>,
    /// Connections answered with 503 (or dropped) because of the connection limit.
    pub over_limit: Cell<u64>,
    /// Accepts that failed (for example: no descriptors left).
    pub accept_failed: Cell<u64>,
    /// Requests whose head was read whole.
    pub requests: Cell<u64>,
    /// Heads that were no HTTP, or too large.
    pub malformed: Cell<u64>,
    /// Heads that did not come in time.
    pub head_timeouts: Cell<u64>,
    /// Clients that left while a request of theirs ran or streamed.
    pub clients_left: Cell<u64>,
    /// Clients that stopped reading their answer.
    pub stalled: Cell<u64>,
    /// Connections cut at the deadline of a drain with a request running.
    pub cut: Cell<u64>,
}

pub(super) fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}
