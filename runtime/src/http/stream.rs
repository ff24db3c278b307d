//! The bounded channel between whoever produces a streamed body and its connection.

use bytes::Bytes;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Chunks between producer and connection. The connection takes them at once while the client
/// reads; two let the producer make one while the other is being written.
const CHUNKS_MAX: usize = 2;

/// The client has left (or stopped reading): stop producing for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientGone;

impl fmt::Display for ClientGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client left before the answer was complete")
    }
}

impl std::error::Error for ClientGone {}

/// The producer gave up in mid-body; the connection is cut so that the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aborted;

impl fmt::Display for Aborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer was aborted by its producer")
    }
}

impl std::error::Error for Aborted {}

#[derive(Default)]
struct Channel {
    chunks: VecDeque<Bytes>,
    end: Option<Result<(), Aborted>>,
    receiver_gone: bool,
    producer: Option<Waker>,
    connection: Option<Waker>,
}

/// The producing end of a streamed body. Each chunk is written and flushed at once.
///
/// Dropping it ends the body normally; [`BodySender::abort`] cuts the connection instead.
pub struct BodySender {
    channel: Rc<RefCell<Channel>>,
}

/// The connection's end.
pub(super) struct BodyReceiver {
    channel: Rc<RefCell<Channel>>,
}

pub(super) fn channel() -> (BodySender, BodyReceiver) {
    let channel = Rc::new(RefCell::new(Channel::default()));
    (
        BodySender {
            channel: channel.clone(),
        },
        BodyReceiver { channel },
    )
}

impl BodySender {
    /// Hands a chunk to the connection, waiting while the client is behind. The wait is bounded
    /// by the write-stall limit. Empty chunks send nothing.
    ///
    /// # Errors
    /// [`ClientGone`] when nobody takes the body any more.
    pub async fn send(&mut self, chunk: Bytes) -> Result<(), ClientGone> {
        let mut chunk = Some(chunk);
        poll_fn(|cx| {
            let mut channel = self.channel.borrow_mut();
            if channel.receiver_gone {
                return Poll::Ready(Err(ClientGone));
            }
            if channel.chunks.len() >= CHUNKS_MAX {
                channel.producer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            if let Some(chunk) = chunk.take().filter(|chunk| !chunk.is_empty()) {
                channel.chunks.push_back(chunk);
                wake(&mut channel.connection);
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Resolves when the client has left: select it against work that sends nothing for a while.
    pub async fn closed(&mut self) {
        poll_fn(|cx| {
            let mut channel = self.channel.borrow_mut();
            if channel.receiver_gone {
                return Poll::Ready(());
            }
            channel.producer = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Whether the client has left.
    pub fn is_closed(&self) -> bool {
        self.channel.borrow().receiver_gone
    }

    /// Ends the body as a failure: the connection is cut after the chunks sent so far, so that
    /// the client cannot take it for a whole answer.
    pub fn abort(self) {
        let mut channel = self.channel.borrow_mut();
        channel.end = Some(Err(Aborted));
        wake(&mut channel.connection);
    }
}

impl Drop for BodySender {
    fn drop(&mut self) {
        let mut channel = self.channel.borrow_mut();
        channel.end.get_or_insert(Ok(()));
        wake(&mut channel.connection);
    }
}

impl BodyReceiver {
    pub(super) fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Aborted>>> {
        let mut channel = self.channel.borrow_mut();
        if let Some(chunk) = channel.chunks.pop_front() {
            wake(&mut channel.producer);
            return Poll::Ready(Some(Ok(chunk)));
        }
        match channel.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(aborted)) => Poll::Ready(Some(Err(aborted))),
            None => {
                channel.connection = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for BodyReceiver {
    fn drop(&mut self) {
        let mut channel = self.channel.borrow_mut();
        channel.receiver_gone = true;
        channel.chunks.clear();
        wake(&mut channel.producer);
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;

    fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_full_channel_makes_the_producer_wait() {
        let (mut sender, mut receiver) = channel();
        for _ in 0..CHUNKS_MAX {
            assert!(poll_once(sender.send(Bytes::from_static(b"x"))).is_ready());
        }
        assert!(poll_once(sender.send(Bytes::from_static(b"y"))).is_pending());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(receiver.poll_chunk(&mut cx).is_ready());
        assert!(poll_once(sender.send(Bytes::from_static(b"y"))).is_ready());
    }

    #[test]
    fn a_dropped_receiver_ends_the_producer() {
        let (mut sender, receiver) = channel();
        assert!(poll_once(sender.closed()).is_pending());
        drop(receiver);
        assert_eq!(
            poll_once(sender.send(Bytes::from_static(b"x"))),
            Poll::Ready(Err(ClientGone))
        );
        assert!(poll_once(sender.closed()).is_ready());
    }

    #[test]
    fn chunks_come_before_the_end_and_abort_is_not_an_end() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut sender, mut receiver) = channel();
        assert!(poll_once(sender.send(Bytes::from_static(b"x"))).is_ready());
        sender.abort();
        assert!(matches!(
            receiver.poll_chunk(&mut cx),
            Poll::Ready(Some(Ok(_)))
        ));
        assert!(matches!(
            receiver.poll_chunk(&mut cx),
            Poll::Ready(Some(Err(Aborted)))
        ));
        let (sender, mut receiver) = channel();
        drop(sender);
        assert!(matches!(receiver.poll_chunk(&mut cx), Poll::Ready(None)));
    }
}
