//! What a handler answers, and the body hyper writes from it.

use super::stream::{self, Aborted, BodyReceiver, BodySender};
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// An answer: status, headers, and a body that is whole or streamed.
pub struct Response {
    status: StatusCode,
    headers: HeaderMap,
    kind: Kind,
}

enum Kind {
    Empty,
    Whole(Bytes),
    Stream(BodyReceiver),
    Producing(BodyReceiver, Option<Pin<Box<dyn Future<Output = ()>>>>),
}

impl Response {
    /// No body.
    pub fn empty(status: StatusCode) -> Self {
        Response {
            status,
            headers: HeaderMap::new(),
            kind: Kind::Empty,
        }
    }

    /// A whole body.
    pub fn bytes(status: StatusCode, content_type: &str, body: impl Into<Bytes>) -> Self {
        let body = body.into();
        let kind = if body.is_empty() {
            Kind::Empty
        } else {
            Kind::Whole(body)
        };
        Response {
            status,
            headers: HeaderMap::new(),
            kind,
        }
        .header("content-type", content_type)
    }

    /// A JSON body.
    pub fn json(status: StatusCode, json: impl Into<Bytes>) -> Self {
        Self::bytes(status, "application/json", json)
    }

    /// A streamed body, fed through the sender by a task of the caller's.
    pub fn stream(status: StatusCode, content_type: &str) -> (Self, BodySender) {
        let (sender, receiver) = stream::channel();
        let response = Response {
            status,
            headers: HeaderMap::new(),
            kind: Kind::Stream(receiver),
        }
        .header("content-type", content_type);
        (response, sender)
    }

    /// A streamed body made by a future that lives inside the connection: it is dropped when
    /// the client leaves, at whatever it waits for. The body ends when the future does.
    pub fn producing<F>(
        status: StatusCode,
        content_type: &str,
        produce: impl FnOnce(BodySender) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + 'static,
    {
        let (sender, receiver) = stream::channel();
        let producer = Box::pin(produce(sender));
        Response {
            status,
            headers: HeaderMap::new(),
            kind: Kind::Producing(receiver, Some(producer)),
        }
        .header("content-type", content_type)
    }

    /// Sets a header. What could break or split the answer is left out: invalid names and
    /// values, and `content-length` and `transfer-encoding`, which the connection sets itself.
    pub fn header(
        mut self,
        name: impl TryInto<HeaderName>,
        value: impl TryInto<HeaderValue>,
    ) -> Self {
        if let (Ok(name), Ok(value)) = (name.try_into(), value.try_into())
            && name != header::CONTENT_LENGTH
            && name != header::TRANSFER_ENCODING
        {
            self.headers.insert(name, value);
        }
        self
    }

    /// Closes the connection after this answer.
    pub fn closing(self) -> Self {
        self.header(header::CONNECTION, HeaderValue::from_static("close"))
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The headers set so far.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// What hyper writes; `guard` is dropped when the body is done or given up.
    pub(super) fn into_hyper<G: Unpin>(self, guard: G) -> hyper::Response<AnswerBody<G>> {
        let mut response = hyper::Response::new(AnswerBody {
            kind: self.kind,
            _guard: guard,
        });
        // An informational status is no answer: hyper would refuse it in mid-connection.
        *response.status_mut() = if self.status.is_informational() {
            StatusCode::INTERNAL_SERVER_ERROR
        } else {
            self.status
        };
        *response.headers_mut() = self.headers;
        response
    }
}

/// The body of an answer as hyper reads it.
pub(super) struct AnswerBody<G> {
    kind: Kind,
    _guard: G,
}

impl<G: Unpin> Body for AnswerBody<G> {
    type Data = Bytes;
    type Error = Aborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        match &mut self.kind {
            Kind::Empty => Poll::Ready(None),
            Kind::Whole(body) => {
                let body = std::mem::take(body);
                self.kind = Kind::Empty;
                Poll::Ready(Some(Ok(Frame::data(body))))
            }
            Kind::Stream(receiver) => poll_receiver(receiver, cx),
            Kind::Producing(receiver, producer) => {
                if let Some(future) = producer
                    && future.as_mut().poll(cx).is_ready()
                {
                    *producer = None;
                }
                poll_receiver(receiver, cx)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Empty => true,
            Kind::Whole(_) | Kind::Stream(_) | Kind::Producing(..) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Empty => SizeHint::with_exact(0),
            Kind::Whole(body) => SizeHint::with_exact(body.len() as u64),
            Kind::Stream(_) | Kind::Producing(..) => SizeHint::default(),
        }
    }
}

fn poll_receiver(
    receiver: &mut BodyReceiver,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
    receiver
        .poll_chunk(cx)
        .map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
}
