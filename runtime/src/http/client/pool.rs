//! The pool of kept connections, and the sending of requests.

use super::connection::ClientConnection;
use super::error::{ClientError, ClientStage};
use super::response::ClientResponse;
use crate::http::alarm::{Alarm, until};
use crate::net::TcpStream;
use crate::shard::Shard;
use crate::time::{Deadline, Nanos};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, HOST, HeaderValue, TRANSFER_ENCODING};
use hyper::{Request, Response, Uri};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Limits of one client (one shard).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// For a connection to be accepted.
    pub connect: Duration,
    /// Kept connections without a request, per address; more are closed.
    pub idle_per_host_max: usize,
    /// A kept connection is not used after idling this long. It must be well below the
    /// server's keep-alive time (75 s here), or requests race with the server's close.
    pub idle_age_max: Duration,
    /// Connections open at a time, busy and idle.
    pub open_max: usize,
    /// Longest head of an answer, bytes; at least 8,192.
    pub head_bytes_max: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        ClientLimits {
            connect: Duration::from_secs(1),
            idle_per_host_max: 64,
            idle_age_max: Duration::from_secs(30),
            open_max: 4096,
            head_bytes_max: 64 * 1024,
        }
    }
}

/// hyper refuses a smaller buffer.
const HEAD_BYTES_MIN: usize = 8192;

/// Put into a request's extensions: it may be sent a second time when a kept connection turns
/// out to be dead before any byte of the answer came. GET, HEAD, OPTIONS, PUT, DELETE and TRACE
/// always may.
#[derive(Clone, Copy, Debug)]
pub struct Resendable;

/// An HTTP client of this shard; clones share the pool.
#[derive(Clone)]
pub struct Client {
    inner: Rc<Inner>,
}

pub(super) struct Inner {
    pub(super) shard: Shard,
    limits: ClientLimits,
    idle: RefCell<HashMap<SocketAddr, Vec<Idle>>>,
    open: Cell<usize>,
    connected: Cell<u64>,
    swept: Cell<Nanos>,
}

struct Idle {
    connection: ClientConnection,
    since: Nanos,
}

/// One of the connections that may be open.
pub(super) struct Permit(Rc<Inner>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
    }
}

/// A failed exchange, and whether it may be tried again.
struct Failed {
    error: ClientError,
    /// The connection died before any byte of an answer.
    unanswered: bool,
    /// The request, if none of it was written.
    unsent: Option<Request<Full<Bytes>>>,
}

impl Client {
    /// A client without connections.
    pub fn new(shard: Shard, limits: ClientLimits) -> Self {
        Client {
            inner: Rc::new(Inner {
                swept: Cell::new(shard.now()),
                shard,
                limits,
                idle: RefCell::default(),
                open: Cell::new(0),
                connected: Cell::new(0),
            }),
        }
    }

    /// Sends `request` and waits for the head of the answer, until `deadline`. The URI's path
    /// and query are used; `Host` is set when it is missing; `content-length` and
    /// `transfer-encoding` are set by the client itself. Dropping the future cancels.
    ///
    /// # Errors
    /// [`ClientError`]. An answer with any status is no error.
    pub async fn send(
        &self,
        address: SocketAddr,
        request: Request<Bytes>,
        deadline: Deadline,
    ) -> Result<ClientResponse, ClientError> {
        let mut request = prepare(address, request);
        if let Some(connection) = self.inner.take_idle(address) {
            let again = resendable(&request).then(|| request.clone());
            match self.exchange(address, connection, request, deadline).await {
                Ok(response) => return Ok(response),
                Err(failed) => match failed.unsent.or(again.filter(|_| failed.unanswered)) {
                    Some(same) => request = same,
                    None => return Err(failed.error),
                },
            }
        }
        let connection = self.connect(address, deadline).await?;
        self.exchange(address, connection, request, deadline)
            .await
            .map_err(|failed| failed.error)
    }

    /// Connections made so far, re-used ones not counted.
    pub fn connected(&self) -> u64 {
        self.inner.connected.get()
    }

    /// Connections open now, busy and idle.
    pub fn open(&self) -> usize {
        self.inner.open.get()
    }

    /// Closes the kept connections to `address`, e.g. when it is known to be gone.
    pub fn forget(&self, address: SocketAddr) {
        let idle = self.inner.idle.borrow_mut().remove(&address);
        drop(idle);
    }

    async fn connect(
        &self,
        address: SocketAddr,
        deadline: Deadline,
    ) -> Result<ClientConnection, ClientError> {
        let inner = &self.inner;
        let permit = inner.permit()?;
        let limit = inner.limits.connect;
        let by_limit = Deadline::after(inner.shard.now(), limit);
        let connecting = TcpStream::connect(address);
        let stream = match until(&inner.shard, by_limit.earlier(deadline), connecting).await {
            Some(Ok(stream)) => stream,
            Some(Err(source)) => return Err(ClientError::from_connect(address, source)),
            None if deadline <= by_limit => {
                return Err(ClientError::Deadline {
                    address,
                    stage: ClientStage::Connect,
                });
            }
            None => return Err(ClientError::ConnectTimeout { address, limit }),
        };
        inner.connected.set(inner.connected.get() + 1);
        let head_bytes_max = inner.limits.head_bytes_max.max(HEAD_BYTES_MIN);
        ClientConnection::handshake(stream.into_inner(), head_bytes_max, permit)
            .await
            .map_err(|source| ClientError::from_hyper(address, 0, source))
    }

    async fn exchange(
        &self,
        address: SocketAddr,
        mut connection: ClientConnection,
        request: Request<Full<Bytes>>,
        deadline: Deadline,
    ) -> Result<ClientResponse, Failed> {
        connection.start_exchange();
        let mut alarm = Alarm::new(self.inner.shard.clone());
        let outcome = {
            let mut answer = pin!(connection.sender.try_send_request(request));
            let connection = &mut connection;
            poll_fn(|cx| {
                connection.drive(cx);
                match answer.as_mut().poll(cx) {
                    Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                    Poll::Pending => alarm.poll_until(cx, deadline.at()).map(|()| None),
                }
            })
            .await
        };
        match outcome {
            Some(Ok(response)) => Ok(self.response(address, connection, response)),
            Some(Err(mut failed)) => {
                let unsent = failed.take_message();
                let received = connection.bytes_received();
                let error = ClientError::from_hyper(address, received, failed.into_error());
                let unanswered = received == 0 && matches!(error, ClientError::Closed { .. });
                Err(Failed {
                    error,
                    unanswered,
                    unsent,
                })
            }
            None => Err(Failed {
                error: ClientError::Deadline {
                    address,
                    stage: ClientStage::Head,
                },
                unanswered: false,
                unsent: None,
            }),
        }
    }

    fn response(
        &self,
        address: SocketAddr,
        connection: ClientConnection,
        response: Response<Incoming>,
    ) -> ClientResponse {
        let (parts, body) = response.into_parts();
        ClientResponse::new(self.inner.clone(), address, connection, parts, body)
    }
}

impl Inner {
    fn permit(self: &Rc<Self>) -> Result<Permit, ClientError> {
        if self.open.get() >= self.limits.open_max {
            // Idle connections to others must not keep anyone from being called.
            let idle = std::mem::take(&mut *self.idle.borrow_mut());
            drop(idle);
        }
        if self.open.get() >= self.limits.open_max {
            return Err(ClientError::TooManyConnections {
                open_max: self.limits.open_max,
            });
        }
        self.open.set(self.open.get() + 1);
        Ok(Permit(self.clone()))
    }

    /// The youngest kept connection that is still good.
    fn take_idle(&self, address: SocketAddr) -> Option<ClientConnection> {
        let now = self.shard.now();
        self.sweep(now);
        loop {
            let idle = self.idle.borrow_mut().get_mut(&address)?.pop()?;
            let fresh = now.since(idle.since) < self.limits.idle_age_max;
            if fresh && idle.connection.reusable() && idle.connection.still_quiet() {
                return Some(idle.connection);
            }
        }
    }

    pub(super) fn keep(&self, address: SocketAddr, connection: ClientConnection) {
        let now = self.shard.now();
        self.sweep(now);
        let mut all = self.idle.borrow_mut();
        let idle = all.entry(address).or_default();
        if idle.len() < self.limits.idle_per_host_max {
            idle.push(Idle {
                connection,
                since: now,
            });
        }
    }

    /// Drops what is too old, of every address; at most once a second.
    fn sweep(&self, now: Nanos) {
        if now.since(self.swept.get()) < Duration::from_secs(1) {
            return;
        }
        self.swept.set(now);
        let age_max = self.limits.idle_age_max;
        self.idle.borrow_mut().retain(|_, idle| {
            idle.retain(|idle| now.since(idle.since) < age_max && idle.connection.still_quiet());
            !idle.is_empty()
        });
    }
}

fn prepare(address: SocketAddr, request: Request<Bytes>) -> Request<Full<Bytes>> {
    let mut request = request.map(Full::new);
    let path = request.uri().path_and_query().cloned();
    if request.uri().authority().is_some() {
        *request.uri_mut() = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    }
    // The framing is ours: a forwarded header must not contradict it.
    request.headers_mut().remove(CONTENT_LENGTH);
    request.headers_mut().remove(TRANSFER_ENCODING);
    if !request.headers().contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(&address.to_string())
    {
        request.headers_mut().insert(HOST, host);
    }
    request
}

fn resendable(request: &Request<Full<Bytes>>) -> bool {
    request.method().is_idempotent() || request.extensions().get::<Resendable>().is_some()
}
