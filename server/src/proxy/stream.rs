//! A node's event stream on its way to the client.
//!
//! Invariant: the client gets whole events only, so that an error event never lands inside a
//! broken one; after an error event nothing follows.

use super::forward::{ProxyMetrics, deadline_exceeded, peer_lost};
use super::ticket::Ticket;
use super::upstream::{UpstreamAnswer, UpstreamError};
use crate::api::{Clock, EventSource, LocalFuture};
use bytes::{Bytes, BytesMut};
use kvserve_runtime::{Deadline, Nanos};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// An event longer than this is passed on in pieces: 1 MiB is far above any event of ours (a
/// token with 20 log-probabilities is some 4 KiB) and bounds what a stream holds.
const HELD_BYTES_MAX: usize = 1024 * 1024;

/// See [`Ticket::fail`]: until a lost node's lease ends (3 s) or it answers again.
pub(super) const AVOID: Duration = Duration::from_secs(1);

/// The stream.
pub(super) struct ForwardedStream {
    pub(super) answer: Box<dyn UpstreamAnswer>,
    /// Taken when the stream has ended.
    pub(super) ticket: Option<Ticket>,
    pub(super) deadline: Deadline,
    pub(super) timeout: Duration,
    pub(super) clock: Rc<dyn Clock>,
    pub(super) metrics: Arc<ProxyMetrics>,
    /// The beginning of an event whose end has not come.
    pub(super) held: BytesMut,
    pub(super) events: u64,
}

impl ForwardedStream {
    async fn pull(&mut self) -> Option<Bytes> {
        loop {
            let ticket = self.ticket.as_ref()?;
            let chunk = ticket.unless_gone(self.answer.chunk(self.deadline)).await;
            let now = self.clock.now();
            match chunk {
                Some(Ok(Some(bytes))) => {
                    if let Some(events) = self.whole_events(bytes) {
                        return Some(events);
                    }
                }
                Some(Ok(None)) => {
                    let ticket = self.ticket.take()?;
                    ticket.finish(now, self.events);
                    let rest = self.held.split().freeze();
                    return (!rest.is_empty()).then_some(rest);
                }
                Some(Err(error)) => return self.fail(Some(error), now),
                None => return self.fail(None, now),
            }
        }
    }

    /// What can be passed on: everything up to the last end of an event.
    fn whole_events(&mut self, bytes: Bytes) -> Option<Bytes> {
        self.events += ends_of_events(&bytes).count() as u64;
        if self.held.is_empty() && bytes.ends_with(b"\n\n") {
            return Some(bytes);
        }
        self.held.extend_from_slice(&bytes);
        let end = match ends_of_events(&self.held).last() {
            Some(end) => end,
            None if self.held.len() > HELD_BYTES_MAX => self.held.len(),
            None => return None,
        };
        Some(self.held.split_to(end).freeze())
    }

    fn fail(&mut self, error: Option<UpstreamError>, now: Nanos) -> Option<Bytes> {
        let ticket = self.ticket.take()?;
        self.held.clear();
        let error = match error {
            Some(UpstreamError::Deadline) => deadline_exceeded(self.timeout),
            Some(
                UpstreamError::NotConnected { message }
                | UpstreamError::Closed { message, .. }
                | UpstreamError::Malformed { message },
            ) => peer_lost(&ticket.node, &message),
            Some(UpstreamError::TooManyConnections { open_max }) => peer_lost(
                &ticket.node,
                &format!("more than {open_max} connections are open"),
            ),
            None => peer_lost(&ticket.node, "its lease ended"),
        };
        ticket.fail(now.after(AVOID));
        self.metrics.count(|metrics| &metrics.streams_broken);
        Some(error.to_sse().into())
    }
}

/// Places just after each blank line.
fn ends_of_events(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let mut from = 0;
    std::iter::from_fn(move || {
        let place = bytes[from..].windows(2).position(|pair| pair == b"\n\n")?;
        from += place + 2;
        Some(from)
    })
}

impl EventSource for ForwardedStream {
    fn next(&mut self) -> LocalFuture<'_, Option<Bytes>> {
        Box::pin(self.pull())
    }
}
