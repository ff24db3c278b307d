//! One request through the proxy.

use super::stream::{AVOID, ForwardedStream};
use super::table::NodeTable;
use super::ticket::Ticket;
use super::upstream::{Upstream, UpstreamAnswer, UpstreamError};
use crate::api::call::METRICS_TEXT;
use crate::api::error::{DEADLINE_EXCEEDED, OVERLOADED, SERVER};
use crate::api::handler::{client_label, request_timeout, version, with_label};
use crate::api::metrics::{Endpoint, header, line};
use crate::api::route::Route;
use crate::api::{
    AdminPages, Answer, ApiError, ApiMetrics, Call, Clock, EventSource, TIMEOUT_HEADER,
};
use bytes::{Bytes, BytesMut};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use hyper::{HeaderMap, Request, StatusCode};
use kvserve_runtime::{Deadline, Nanos};
use serde_json::json;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// How long after the request's deadline the node's own answer is waited for: it knows the
/// stage. One engine step and the way back.
pub const ANSWER_SLACK: Duration = Duration::from_millis(250);

/// Nodes that one request is tried at.
const TRIES_MAX: usize = 2;

/// Longest answer that is not a stream: 128 choices of 128 Ki tokens at 4 bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Settings of the proxy.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// The request timeout; a header may lower it.
    pub request_timeout: Duration,
    /// Whether `/debug/*` is served here (only on loopback or the admin listener).
    pub debug_pages: bool,
}

/// Counters of one shard's proxy.
#[derive(Debug, Default)]
pub struct ProxyMetrics {
    /// Requests that were tried at a second node.
    pub retried: AtomicU64,
    /// Streams that ended with an error event made here.
    pub streams_broken: AtomicU64,
    /// Requests that no node was there for.
    pub without_node: AtomicU64,
}

impl ProxyMetrics {
    /// Adds one.
    pub fn count(&self, counter: impl Fn(&ProxyMetrics) -> &AtomicU64) {
        counter(self).fetch_add(1, Relaxed);
    }
}

/// The proxy of one shard.
pub struct Proxy {
    /// The nodes; the cluster layer writes to it.
    pub table: Rc<RefCell<NodeTable>>,
    /// The way to them.
    pub upstream: Rc<dyn Upstream>,
    /// Time.
    pub clock: Rc<dyn Clock>,
    /// Pages of this process.
    pub pages: Rc<dyn AdminPages>,
    /// Settings.
    pub config: ProxyConfig,
    /// HTTP counters of this shard.
    pub http_metrics: Arc<ApiMetrics>,
    /// HTTP counters of all shards, for `/metrics`.
    pub all_http_metrics: Vec<Arc<ApiMetrics>>,
    /// Counters of this shard.
    pub metrics: Arc<ProxyMetrics>,
    /// Counters of all shards, for `/metrics`.
    pub all_metrics: Vec<Arc<ProxyMetrics>>,
}

/// What one try at one node came to.
enum Try {
    /// The node's answer, whatever its status.
    Answer(Box<dyn UpstreamAnswer>, Ticket),
    /// No byte of an answer came: another node may have it.
    Unanswered(ApiError),
    /// It is over.
    Failed(ApiError),
}

impl Proxy {
    /// Answers a request whose body has been read.
    pub async fn handle(&self, call: Call, arrived: Nanos) -> Answer {
        let (endpoint, result) = match Route::find(&call.method, &call.path) {
            Ok(route) => (route.endpoint(), self.answer(route, &call, arrived).await),
            Err(error) => (Endpoint::Unknown, Err(error)),
        };
        let answer = result.unwrap_or_else(Answer::from);
        self.http_metrics.answered(endpoint, answer.status);
        match client_label(&call.headers) {
            Some(label) => with_label(answer, label),
            None => answer,
        }
    }

    async fn answer(&self, route: Route, call: &Call, arrived: Nanos) -> Result<Answer, ApiError> {
        match route {
            Route::Generate(_)
            | Route::Tokenize
            | Route::Detokenize
            | Route::Models
            | Route::Model(_) => self.forward(call, arrived).await,
            Route::Health => Ok(self.pages.health().into()),
            Route::Ready => Ok(self.ready()),
            Route::Progress => Ok(self.pages.progress().into()),
            Route::Metrics => Ok(self.metrics_page()),
            Route::Version => Ok(Answer::json(StatusCode::OK, &version())),
            Route::NodesStatus => Ok(Answer::json(StatusCode::OK, &self.table.borrow().status())),
            Route::Debug => self.debug(call).await,
        }
    }

    fn ready(&self) -> Answer {
        let page = self.pages.ready();
        if page.status != StatusCode::OK {
            return page.into();
        }
        let missing = self.table.borrow().missing();
        match missing {
            None => Answer::json(StatusCode::OK, &json!({"ready": true})),
            Some(missing) => Answer::json(
                StatusCode::SERVICE_UNAVAILABLE,
                &json!({"ready": false, "missing": missing}),
            ),
        }
    }

    fn metrics_page(&self) -> Answer {
        let mut text = String::new();
        ApiMetrics::render(&self.all_http_metrics, &mut text);
        type Counter = for<'a> fn(&'a ProxyMetrics) -> &'a AtomicU64;
        let counters: [(&str, &str, Counter); 3] = [
            (
                "kvserve_proxy_retried_total",
                "Requests tried at a second node.",
                |metrics| &metrics.retried,
            ),
            (
                "kvserve_proxy_streams_broken_total",
                "Streams that lost their node.",
                |metrics| &metrics.streams_broken,
            ),
            (
                "kvserve_proxy_without_node_total",
                "Requests that no node was there for.",
                |metrics| &metrics.without_node,
            ),
        ];
        for (name, help, counter) in counters {
            let sum: u64 = self
                .all_metrics
                .iter()
                .map(|shard| counter(shard).load(Relaxed))
                .sum();
            header(&mut text, name, "counter", help);
            line(&mut text, format_args!("{name} {sum}"));
        }
        self.pages.metrics(&mut text);
        Answer::full(StatusCode::OK, METRICS_TEXT, text)
    }

    async fn debug(&self, call: &Call) -> Result<Answer, ApiError> {
        let unknown = || ApiError::unknown_path(call.method.as_str(), &call.path);
        if !self.config.debug_pages {
            return Err(unknown());
        }
        let page = self
            .pages
            .debug(call.method.clone(), call.path.clone(), call.body.clone())
            .await?;
        page.map(Answer::from).ok_or_else(unknown)
    }

    async fn forward(&self, call: &Call, arrived: Nanos) -> Result<Answer, ApiError> {
        let timeout = request_timeout(&call.headers, self.config.request_timeout)?;
        let deadline = Deadline::after(arrived, timeout);
        let wait_until = Deadline::after(arrived, timeout + ANSWER_SLACK);
        let mut tried: Vec<String> = Vec::new();
        let mut last_error = None;
        while let Some(ticket) = self.choose(&tried) {
            tried.push(ticket.node.clone());
            if tried.len() > 1 {
                self.metrics.count(|metrics| &metrics.retried);
            }
            let may_retry = tried.len() < TRIES_MAX;
            match self
                .try_at(ticket, call, deadline, wait_until, timeout)
                .await
            {
                Try::Answer(answer, ticket) => {
                    // A node that drains or is full says so at once: another may not be.
                    if answer.status() == StatusCode::SERVICE_UNAVAILABLE
                        && may_retry
                        && self.choose(&tried).is_some()
                    {
                        continue;
                    }
                    return self.pass_on(answer, ticket, wait_until, timeout).await;
                }
                Try::Unanswered(error) if may_retry => last_error = Some(error),
                Try::Unanswered(error) | Try::Failed(error) => return Err(error),
            }
        }
        Err(last_error.unwrap_or_else(|| self.nobody()))
    }

    fn choose(&self, tried: &[String]) -> Option<Ticket> {
        self.table.borrow_mut().choose(self.clock.now(), tried)
    }

    fn nobody(&self) -> ApiError {
        self.metrics.count(|metrics| &metrics.without_node);
        let missing = self.table.borrow().missing();
        let missing = missing.unwrap_or("no node that takes requests is ready");
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "not_ready",
            format!("not ready to serve: {missing}"),
        )
        .with_retry_after(Duration::from_secs(1))
    }

    async fn try_at(
        &self,
        ticket: Ticket,
        call: &Call,
        deadline: Deadline,
        wait_until: Deadline,
        timeout: Duration,
    ) -> Try {
        let now = self.clock.now();
        let left_ms = deadline.left(now).as_millis() as u64;
        if left_ms == 0 {
            return Try::Failed(deadline_exceeded(timeout));
        }
        let request = match request_for_node(call, left_ms) {
            Ok(request) => request,
            Err(error) => return Try::Failed(error),
        };
        let sending = self.upstream.send(ticket.address, request, wait_until);
        let outcome = ticket.unless_gone(sending).await;
        let now = self.clock.now();
        match outcome {
            Some(Ok(answer)) => {
                ticket.answered(now);
                Try::Answer(answer, ticket)
            }
            None => {
                let error = peer_lost(&ticket.node, "its lease ended");
                ticket.fail(now.after(AVOID));
                Try::Unanswered(error)
            }
            Some(Err(UpstreamError::NotConnected { message }))
            | Some(Err(UpstreamError::Closed {
                answered: false,
                message,
            })) => {
                let error = peer_lost(&ticket.node, &message);
                ticket.fail(now.after(AVOID));
                Try::Unanswered(error)
            }
            Some(Err(UpstreamError::Closed {
                answered: true,
                message,
            })) => {
                let error = peer_lost(&ticket.node, &message);
                ticket.fail(now.after(AVOID));
                Try::Failed(error)
            }
            Some(Err(UpstreamError::Malformed { message })) => {
                let error = bad_gateway(&ticket.node, &message);
                ticket.fail(now.after(AVOID));
                Try::Failed(error)
            }
            Some(Err(UpstreamError::Deadline)) => Try::Failed(deadline_exceeded(timeout)),
            Some(Err(UpstreamError::TooManyConnections { open_max })) => {
                Try::Failed(too_many_connections(open_max))
            }
        }
    }

    async fn pass_on(
        &self,
        answer: Box<dyn UpstreamAnswer>,
        ticket: Ticket,
        wait_until: Deadline,
        timeout: Duration,
    ) -> Result<Answer, ApiError> {
        let status = answer.status();
        let content_type = answer
            .headers()
            .get(CONTENT_TYPE)
            .cloned()
            .unwrap_or(HeaderValue::from_static("application/octet-stream"));
        let headers = end_to_end(answer.headers())
            .filter(|(name, _)| *name != CONTENT_TYPE)
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let mut passed = if content_type.as_bytes().starts_with(b"text/event-stream") {
            let source: Box<dyn EventSource> = Box::new(ForwardedStream {
                answer,
                ticket: Some(ticket),
                deadline: wait_until,
                timeout,
                clock: self.clock.clone(),
                metrics: self.metrics.clone(),
                held: BytesMut::new(),
                events: 0,
            });
            Answer::events(source)
        } else {
            let body = self.whole_body(answer, ticket, wait_until, timeout).await?;
            Answer::full(status, "application/json", body)
        };
        passed.status = status;
        passed.content_type = content_type;
        passed.headers = headers;
        Ok(passed)
    }

    /// Reads a plain answer whole, so that a node lost in its middle is still a status.
    async fn whole_body(
        &self,
        mut answer: Box<dyn UpstreamAnswer>,
        ticket: Ticket,
        wait_until: Deadline,
        timeout: Duration,
    ) -> Result<Bytes, ApiError> {
        let mut whole = BytesMut::new();
        let mut first: Option<Bytes> = None;
        loop {
            let chunk = ticket.unless_gone(answer.chunk(wait_until)).await;
            let lost = match chunk {
                Some(Ok(Some(bytes))) => {
                    if whole.len() + bytes.len() > ANSWER_BYTES_MAX {
                        let what = format!("its answer is longer than {ANSWER_BYTES_MAX} bytes");
                        return Err(bad_gateway(&ticket.node, &what));
                    }
                    match first.take() {
                        None if whole.is_empty() => first = Some(bytes),
                        earlier => {
                            whole.extend_from_slice(&earlier.unwrap_or_default());
                            whole.extend_from_slice(&bytes);
                        }
                    }
                    continue;
                }
                Some(Ok(None)) => {
                    ticket.finish(self.clock.now(), 0);
                    return Ok(first.unwrap_or_else(|| whole.freeze()));
                }
                Some(Err(UpstreamError::Deadline)) => return Err(deadline_exceeded(timeout)),
                Some(Err(
                    UpstreamError::Closed { message, .. }
                    | UpstreamError::NotConnected { message }
                    | UpstreamError::Malformed { message },
                )) => peer_lost(&ticket.node, &message),
                Some(Err(UpstreamError::TooManyConnections { open_max })) => {
                    too_many_connections(open_max)
                }
                None => peer_lost(&ticket.node, "its lease ended"),
            };
            ticket.fail(self.clock.now().after(AVOID));
            return Err(lost);
        }
    }
}

/// The request as the node gets it: same body, remaining time in the header.
fn request_for_node(call: &Call, left_ms: u64) -> Result<Request<Bytes>, ApiError> {
    let target = match &call.query {
        Some(query) => format!("{}?{query}", call.path),
        None => call.path.clone(),
    };
    let mut request = Request::new(call.body.clone());
    *request.method_mut() = call.method.clone();
    *request.uri_mut() = target
        .parse()
        .map_err(|_| ApiError::unknown_path(call.method.as_str(), &call.path))?;
    let headers = request.headers_mut();
    for (name, value) in end_to_end(&call.headers) {
        headers.append(name.clone(), value.clone());
    }
    headers.insert(
        HeaderName::from_static(TIMEOUT_HEADER),
        HeaderValue::from(left_ms),
    );
    Ok(request)
}

/// Headers that belong to the message and not to one connection (RFC 9110, 7.6.1): neither the
/// well-known ones nor those that `Connection` names.
fn end_to_end(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    headers.iter().filter(|(name, _)| {
        let of_connection = [
            CONNECTION,
            CONTENT_LENGTH,
            EXPECT,
            HOST,
            TE,
            TRAILER,
            TRANSFER_ENCODING,
            UPGRADE,
        ]
        .contains(name)
            || matches!(
                name.as_str(),
                "keep-alive" | "proxy-connection" | "proxy-authenticate" | "proxy-authorization"
            );
        !of_connection && !named_by_connection(headers, name)
    })
}

fn named_by_connection(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|named| named.trim().eq_ignore_ascii_case(name.as_str()))
}

/// The node died, or its connection.
pub(super) fn peer_lost(node: &str, what: &str) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        OVERLOADED,
        "peer_lost",
        format!("node {node} was lost while it had the request: {what}; send it again"),
    )
    .with_retry_after(Duration::from_secs(1))
}

/// The request's time is over and the node has not said so itself.
pub(super) fn deadline_exceeded(timeout: Duration) -> ApiError {
    ApiError::new(
        StatusCode::GATEWAY_TIMEOUT,
        DEADLINE_EXCEEDED,
        DEADLINE_EXCEEDED,
        format!(
            "the request did not end within its {} ms (stage: forward)",
            timeout.as_millis()
        ),
    )
}

fn bad_gateway(node: &str, what: &str) -> ApiError {
    ApiError::new(
        StatusCode::BAD_GATEWAY,
        SERVER,
        "bad_gateway",
        format!("node {node} did not answer properly: {what}"),
    )
}

fn too_many_connections(open_max: usize) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        OVERLOADED,
        "overloaded",
        format!("this proxy has {open_max} connections to nodes, which is the limit; come again"),
    )
    .with_retry_after(Duration::from_secs(1))
}
