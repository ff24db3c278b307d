//! One outgoing connection: hyper's client state machine on our socket.

use super::pool::Permit;
use crate::net::{Peeked, Socket};
use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper::rt::ReadBufCursor;
use std::cell::Cell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

pub(super) struct ClientConnection {
    pub(super) sender: http1::SendRequest<Full<Bytes>>,
    /// Dropped as soon as it has ended: only that tells a queued request that it was not sent.
    hyper: Option<http1::Connection<Io, Full<Bytes>>>,
    wire: Rc<Wire>,
    _permit: Permit,
}

struct Wire {
    socket: Socket,
    bytes_received: Cell<u64>,
}

impl ClientConnection {
    pub(super) async fn handshake(
        socket: Socket,
        head_bytes_max: usize,
        permit: Permit,
    ) -> Result<Self, hyper::Error> {
        let wire = Rc::new(Wire {
            socket,
            bytes_received: Cell::new(0),
        });
        let io = Io { wire: wire.clone() };
        let (sender, hyper) = http1::Builder::new()
            .max_buf_size(head_bytes_max)
            .handshake(io)
            .await?;
        Ok(ClientConnection {
            sender,
            hyper: Some(hyper),
            wire,
            _permit: permit,
        })
    }

    /// Moves bytes both ways. An end or an error here also reaches whoever waits for the
    /// answer or the body; this only says that there is nothing more to drive.
    pub(super) fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(hyper) = &mut self.hyper
            && Pin::new(hyper).poll(cx).is_ready()
        {
            self.hyper = None;
        }
    }

    pub(super) fn start_exchange(&self) {
        self.wire.bytes_received.set(0);
    }

    pub(super) fn bytes_received(&self) -> u64 {
        self.wire.bytes_received.get()
    }

    /// Whether another request may be sent, as far as this side knows.
    pub(super) fn reusable(&self) -> bool {
        self.hyper.is_some() && self.sender.is_ready()
    }

    /// Whether the server has kept it open and quiet while it idled.
    pub(super) fn still_quiet(&self) -> bool {
        self.wire.socket.peek() == Peeked::Quiet
    }
}

struct Io {
    wire: Rc<Wire>,
}

impl hyper::rt::Read for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let wire = &self.wire;
        // SAFETY: `poll_recv` only writes received bytes into the slice, it never makes an
        // initialised byte uninitialised.
        let count = ready!(wire.socket.poll_recv(cx, unsafe { buffer.as_mut() }))?;
        // SAFETY: the kernel has just written `count` bytes to the start of the slice.
        unsafe { buffer.advance(count) };
        wire.bytes_received
            .set(wire.bytes_received.get() + count as u64);
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.wire.socket.poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wire.socket.poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.wire.socket.shutdown(std::net::Shutdown::Write))
    }
}
