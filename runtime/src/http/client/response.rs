//! An answer whose body is still on its way.

use super::connection::ClientConnection;
use super::error::{ClientError, ClientStage};
use super::pool::Inner;
use crate::http::alarm::Alarm;
use crate::time::Deadline;
use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Incoming};
use hyper::{HeaderMap, StatusCode};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The head of an answer, and its body piece by piece. Dropping it before the end closes the
/// connection: the server sees the cancel.
pub struct ClientResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    address: SocketAddr,
    pool: Rc<Inner>,
    alarm: Alarm,
    body: Incoming,
    /// Taken when it goes back to the pool or is given up.
    connection: Option<ClientConnection>,
}

impl ClientResponse {
    pub(super) fn new(
        pool: Rc<Inner>,
        address: SocketAddr,
        connection: ClientConnection,
        parts: hyper::http::response::Parts,
        body: Incoming,
    ) -> Self {
        ClientResponse {
            status: parts.status,
            headers: parts.headers,
            address,
            alarm: Alarm::new(pool.shard.clone()),
            pool,
            body,
            connection: Some(connection),
        }
    }

    /// A header's value, if it is there and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next piece of the body as it came, or `None` at its end.
    ///
    /// # Errors
    /// [`ClientError::Deadline`], [`ClientError::Closed`], [`ClientError::Protocol`]; after an
    /// error the connection is closed and the body is over.
    pub async fn chunk(&mut self, deadline: Deadline) -> Result<Option<Bytes>, ClientError> {
        let outcome = poll_fn(|cx| match self.poll_chunk(cx) {
            Poll::Ready(outcome) => Poll::Ready(outcome),
            Poll::Pending => self.alarm.poll_until(cx, deadline.at()).map(|()| {
                Err(ClientError::Deadline {
                    address: self.address,
                    stage: ClientStage::Body,
                })
            }),
        })
        .await;
        match &outcome {
            Ok(Some(_)) => {}
            Ok(None) => self.finish(),
            Err(_) => self.connection = None,
        }
        outcome
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ClientError>> {
        let Some(connection) = &mut self.connection else {
            return Poll::Ready(Ok(None));
        };
        // Asking for a frame tells hyper that one is wanted; only then does it read more.
        for _ in 0..2 {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => return Poll::Ready(Ok(Some(data))),
                    // Trailers: nobody asks for them, and they come last.
                    Err(_) => return Poll::Ready(Ok(None)),
                },
                Poll::Ready(Some(Err(source))) => {
                    let received = connection.bytes_received();
                    return Poll::Ready(Err(ClientError::from_hyper(
                        self.address,
                        received,
                        source,
                    )));
                }
                Poll::Pending => connection.drive(cx),
            }
        }
        Poll::Pending
    }

    /// Reads the rest of the body.
    ///
    /// # Errors
    /// Those of [`ClientResponse::chunk`], and [`ClientError::TooLarge`] above `bytes_max`.
    pub async fn read_all(
        &mut self,
        bytes_max: usize,
        deadline: Deadline,
    ) -> Result<Bytes, ClientError> {
        let mut whole = BytesMut::new();
        while let Some(chunk) = self.chunk(deadline).await? {
            if whole.len() + chunk.len() > bytes_max {
                self.connection = None;
                return Err(ClientError::TooLarge {
                    address: self.address,
                    bytes_max,
                });
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }

    /// The body has been read to its end: the connection may serve the next request.
    fn finish(&mut self) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        // hyper notices in its next turn that the exchange is over. Nobody waits for this
        // connection any more, so nobody has to be woken.
        let mut cx = Context::from_waker(Waker::noop());
        connection.drive(&mut cx);
        if connection.reusable() {
            self.pool.keep(self.address, connection);
        }
    }
}

impl Drop for ClientResponse {
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            self.finish();
        }
    }
}
