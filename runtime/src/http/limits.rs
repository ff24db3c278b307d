//! What a client may cost.

use super::body_budget::BodyBudget;
use std::time::Duration;

/// Limits of one listener on one shard. Each is told in the error of whoever meets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Longest request line, bytes; longer: 414.
    pub request_line_bytes_max: usize,
    /// Longest header block without the request line, bytes; longer: 431.
    pub header_bytes_max: usize,
    /// Most header fields; more: 431.
    pub header_fields_max: usize,
    /// From the first byte of a request (or the accept) to the end of its head; later: 408.
    pub header_read: Duration,
    /// Longest request body, bytes; longer: 413.
    pub body_bytes_max: u64,
    /// All bodies in memory at once, over every listener with a clone of it; above it: 503.
    pub bodies: BodyBudget,
    /// From the end of the head to the end of the body, while the handler reads it; later: 408.
    pub body_read: Duration,
    /// A connection without a request is closed after this.
    pub keep_alive_idle: Duration,
    /// A client that takes no byte of its answer for this long has left.
    pub write_stall: Duration,
    /// Open connections; above it a connection is answered with 503. A connection holds 64 KiB
    /// of buffers in each direction at most: 4,096 are 512 MiB a shard, if all are hostile.
    pub connections_max: usize,
    /// After a drain has begun, a connection without a request stays this long, so that a
    /// request already on its way is answered (with `connection: close`) and not reset.
    pub drain_idle_grace: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        HttpLimits {
            request_line_bytes_max: 8 * 1024,
            header_bytes_max: 32 * 1024,
            header_fields_max: 100,
            header_read: Duration::from_secs(10),
            body_bytes_max: 8 * 1024 * 1024,
            bodies: BodyBudget::of_process(),
            body_read: Duration::from_secs(30),
            keep_alive_idle: Duration::from_secs(75),
            write_stall: Duration::from_secs(30),
            connections_max: 4096,
            drain_idle_grace: Duration::from_millis(300),
        }
    }
}

impl HttpLimits {
    /// Bytes of a whole head that the parser takes before it gives up.
    pub(super) fn head_bytes_max(&self) -> usize {
        self.request_line_bytes_max + self.header_bytes_max
    }
}
