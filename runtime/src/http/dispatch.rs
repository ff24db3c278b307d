//! From a parsed head to the handler: the checks that the parser does not make, the handler's
//! future, and the marks that tell the connection's task which phase it is in.

use super::connection::{Conn, Phase};
use super::counters::count;
use super::error_body::error_json;
use super::reply;
use super::request::{Request, RequestBody};
use super::response::{AnswerBody, Response};
use super::server::{Server, Stage};
use hyper::body::{Body, Incoming};
use hyper::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use hyper::{Method, StatusCode};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

/// hyper's service: checks what the parser does not, then calls the handler.
pub(super) struct Dispatch {
    pub(super) server: Rc<Server>,
    pub(super) conn: Rc<Conn>,
}

impl hyper::service::Service<hyper::Request<Incoming>> for Dispatch {
    type Response = hyper::Response<AnswerBody<BodyGuard>>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: hyper::Request<Incoming>) -> Answering {
        count(&self.server.counters.requests);
        let conn = &self.conn;
        conn.begin_request();
        let state = match self.refuse(&request) {
            Some(response) => State::Refused(Some(response)),
            None => {
                let (parts, incoming) = request.into_parts();
                let shard = self.server.shard.clone();
                let body = RequestBody::new(incoming, shard, &self.server.limits);
                let peer = conn.peer();
                State::Running((self.server.handler)(Request { parts, body, peer }))
            }
        };
        Answering {
            server: self.server.clone(),
            conn: conn.clone(),
            state,
        }
    }
}

impl Dispatch {
    fn refuse(&self, request: &hyper::Request<Incoming>) -> Option<Response> {
        let limits = &self.server.limits;
        let (status, code, message) = if request_line_bytes(request) > limits.request_line_bytes_max
        {
            let message = reply::line_message(limits);
            (StatusCode::URI_TOO_LONG, "request_line_too_long", message)
        } else if request.headers().len() > limits.header_fields_max
            || header_bytes(request) > limits.header_bytes_max
        {
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            (status, "headers_too_large", reply::head_message(limits))
        } else if request.method() == Method::CONNECT {
            let message = "this server is no tunnel".to_owned();
            (
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                message,
            )
        } else if let Some(coding) = unknown_coding(request) {
            let message = format!(
                "transfer coding `{coding}` is not understood; send the body as it is, by \
                 content-length or chunked"
            );
            (StatusCode::NOT_IMPLEMENTED, "transfer_coding", message)
        } else {
            let announced = request.body().size_hint().exact().unwrap_or(0);
            if announced <= limits.body_bytes_max {
                return None;
            }
            let message = format!(
                "the request body of {announced} bytes is longer than the limit of {} bytes",
                limits.body_bytes_max
            );
            (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
        };
        let json = error_json(&message, "invalid_request_error", None, code);
        Some(Response::json(status, json).closing())
    }
}

/// The first transfer coding that is not `chunked` (RFC 9112, 6.1: such a request is answered
/// with 501, since its body cannot be told).
fn unknown_coding(request: &hyper::Request<Incoming>) -> Option<String> {
    let values = request.headers().get_all(TRANSFER_ENCODING).iter();
    let texts = values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    for text in texts {
        let mut codings = text.split(',').map(str::trim);
        if let Some(coding) = codings.find(|coding| !coding.eq_ignore_ascii_case("chunked")) {
            return Some(coding.chars().take(CODING_CHARS_MAX).collect());
        }
    }
    None
}

/// What is repeated of a coding in an error.
const CODING_CHARS_MAX: usize = 40;

/// `METHOD SP target SP HTTP/1.1`
fn request_line_bytes(request: &hyper::Request<Incoming>) -> usize {
    let uri = request.uri();
    let scheme = uri.scheme_str().map_or(0, |scheme| scheme.len() + 3);
    let authority = uri.authority().map_or(0, |a| a.as_str().len());
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    request.method().as_str().len() + scheme + authority + path + " ".len() * 2 + "HTTP/1.1".len()
}

/// `name: value CR LF` for each field.
fn header_bytes(request: &hyper::Request<Incoming>) -> usize {
    let fields = request.headers().iter();
    fields
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum()
}

/// The handler's future, or an answer that needed none.
pub(super) struct Answering {
    server: Rc<Server>,
    conn: Rc<Conn>,
    state: State,
}

enum State {
    Refused(Option<Response>),
    Running(Pin<Box<dyn Future<Output = Response>>>),
}

impl Future for Answering {
    type Output = Result<hyper::Response<AnswerBody<BodyGuard>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = match &mut self.state {
            // hyper does not poll an answer again after it was ready.
            State::Refused(response) => response
                .take()
                .unwrap_or_else(|| Response::empty(StatusCode::INTERNAL_SERVER_ERROR)),
            State::Running(future) => ready!(future.as_mut().poll(cx)),
        };
        self.conn.set_phase(Phase::Responding);
        let mut answer = response.into_hyper(BodyGuard {
            conn: self.conn.clone(),
            request: self.conn.request(),
        });
        if self.server.stage.get() != Stage::Open {
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
        Poll::Ready(Ok(answer))
    }
}

/// Dropped with an answer's body: the body is done, or nobody wants it any more.
pub(super) struct BodyGuard {
    conn: Rc<Conn>,
    request: u64,
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        self.conn.end_body(self.request);
    }
}
