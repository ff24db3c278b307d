//! The proxy over scripted nodes: choice, retries, streams that lose their node.

mod api_support;
use api_support::*;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Request, StatusCode};
use kvserve::api::{Answer, ApiMetrics, LocalFuture};
use kvserve::proxy::{
    NodeRecord, NodeRole, NodeTable, Proxy, ProxyConfig, ProxyMetrics, Upstream, UpstreamAnswer,
    UpstreamError,
};
use kvserve_runtime::Deadline;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;

type Chunk = Result<Option<Bytes>, UpstreamError>;

/// What a node does with one request.
#[derive(Clone)]
enum Node {
    Fails(UpstreamError),
    /// Status, content type, chunks; then silence unless the chunks end it.
    Answers(u16, &'static str, Vec<Chunk>),
    Silent,
}

#[derive(Default)]
struct Nodes {
    scripts: RefCell<VecDeque<Node>>,
    asked: RefCell<Vec<(SocketAddr, Request<Bytes>)>>,
    /// Exchanges alive now.
    live: Rc<Cell<usize>>,
}

struct Live(Rc<Cell<usize>>);

impl Live {
    fn new(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Live(count.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

struct FakeAnswer {
    status: StatusCode,
    headers: HeaderMap,
    chunks: VecDeque<Chunk>,
    _live: Live,
}

impl UpstreamAnswer for FakeAnswer {
    fn status(&self) -> StatusCode {
        self.status
    }
    fn headers(&self) -> &HeaderMap {
        &self.headers
    }
    fn chunk(&mut self, _: Deadline) -> LocalFuture<'_, Chunk> {
        Box::pin(poll_fn(|_| match self.chunks.pop_front() {
            Some(chunk) => Poll::Ready(chunk),
            None => Poll::Pending,
        }))
    }
}

impl Upstream for Nodes {
    fn send(
        &self,
        address: SocketAddr,
        request: Request<Bytes>,
        _: Deadline,
    ) -> LocalFuture<'_, Result<Box<dyn UpstreamAnswer>, UpstreamError>> {
        self.asked.borrow_mut().push((address, request));
        let script = self.scripts.borrow_mut().pop_front();
        let live = Live::new(&self.live);
        Box::pin(async move {
            match script.expect("the test scripted fewer exchanges") {
                Node::Fails(error) => Err(error),
                Node::Answers(status, content_type, chunks) => {
                    let mut headers = HeaderMap::new();
                    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
                    headers.insert("x-node", HeaderValue::from_static("yes"));
                    headers.insert("connection", HeaderValue::from_static("close"));
                    Ok(Box::new(FakeAnswer {
                        status: StatusCode::from_u16(status).unwrap(),
                        headers,
                        chunks: chunks.into(),
                        _live: live,
                    }) as Box<dyn UpstreamAnswer>)
                }
                Node::Silent => {
                    let _live = live;
                    std::future::pending().await
                }
            }
        })
    }
}

struct Setting {
    proxy: Proxy,
    nodes: Rc<Nodes>,
    clock: HandClock,
}

fn record(name: &str, port: u16, role: NodeRole) -> NodeRecord {
    NodeRecord {
        node: name.into(),
        incarnation: 1,
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        url: format!("http://127.0.0.1:{port}"),
        role,
        models: vec!["tiny".into()],
        ready: true,
        paths: Vec::new(),
    }
}

fn setting(decodes: u16, scripts: Vec<Node>) -> Setting {
    let mut table = NodeTable::default();
    table.upsert(record("p0", 8000, NodeRole::Prefill)).unwrap();
    for place in 0..decodes {
        let name = format!("d{place}");
        table
            .upsert(record(&name, 9000 + place, NodeRole::Decode))
            .unwrap();
    }
    let nodes = Rc::new(Nodes {
        scripts: RefCell::new(scripts.into()),
        ..Nodes::default()
    });
    let clock = HandClock::default();
    let metrics = Arc::new(ProxyMetrics::default());
    let http_metrics = Arc::new(ApiMetrics::default());
    Setting {
        proxy: Proxy {
            table: Rc::new(RefCell::new(table)),
            upstream: nodes.clone(),
            clock: Rc::new(clock.clone()),
            pages: Rc::new(FakePages),
            config: ProxyConfig {
                request_timeout: Duration::from_secs(60),
                debug_pages: true,
            },
            all_http_metrics: vec![http_metrics.clone()],
            http_metrics,
            all_metrics: vec![metrics.clone()],
            metrics,
        },
        nodes,
        clock,
    }
}

impl Setting {
    fn post(&self, headers: &[(&'static str, &str)]) -> Answer {
        let call = call("POST", "/v1/completions", b"the very body", headers);
        run(self.proxy.handle(call, self.proxy.clock.now()))
    }

    fn unfinished(&self) -> u64 {
        self.proxy.table.borrow().unfinished()
    }

    fn node_lost(&self, name: &str) {
        self.proxy.table.borrow_mut().remove(name, 1).unwrap();
    }
}

fn plain(body: &'static [u8]) -> Node {
    let chunks = vec![Ok(Some(Bytes::from_static(body))), Ok(None)];
    Node::Answers(200, "application/json", chunks)
}

fn sse(chunks: Vec<Chunk>) -> Node {
    Node::Answers(200, "text/event-stream", chunks)
}

fn bytes(text: &'static str) -> Chunk {
    Ok(Some(Bytes::from_static(text.as_bytes())))
}

fn refused() -> Node {
    Node::Fails(UpstreamError::NotConnected {
        message: "connection refused".into(),
    })
}

fn reset(answered: bool) -> UpstreamError {
    UpstreamError::Closed {
        answered,
        message: "connection reset".into(),
    }
}

fn error_code(answer: Answer) -> (u16, Value) {
    let status = answer.status.as_u16();
    (status, body_json(answer)["error"]["code"].clone())
}

#[test]
fn body_and_headers_go_through_as_they_are() {
    let setting = setting(1, vec![plain(b"{\"answer\":1}")]);
    setting.clock.pass(Duration::from_secs(5));
    let arrived = setting.proxy.clock.now();
    setting.clock.pass(Duration::from_millis(100));
    let mut call = call(
        "POST",
        "/v1/completions",
        b"the very body",
        &[
            ("content-type", "application/json"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("host", "proxy:8000"),
            ("x-kvserve-timeout-ms", "2000"),
            ("x-request-id", "mine"),
        ],
    );
    call.query = Some("a=b".into());
    let answer = run(setting.proxy.handle(call, arrived));
    assert_eq!(answer.status, 200);
    let names: Vec<&str> = answer
        .headers
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["x-node", "x-request-id"]);
    assert_eq!(body_bytes(answer), "{\"answer\":1}");
    let asked = setting.nodes.asked.borrow();
    let (address, request) = &asked[0];
    assert_eq!(address.port(), 9000);
    assert_eq!(request.uri(), "/v1/completions?a=b");
    assert_eq!(request.body(), "the very body");
    let mut names: Vec<&str> = request.headers().keys().map(|name| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["content-type", "x-kvserve-timeout-ms", "x-request-id"]
    );
    assert_eq!(request.headers()["x-kvserve-timeout-ms"], "1900");
    assert_eq!(setting.unfinished(), 0);
    assert_eq!(setting.nodes.live.get(), 0);
}

#[test]
fn an_unanswered_request_is_tried_at_one_other_node() {
    for first in [refused(), Node::Fails(reset(false))] {
        let setting = setting(3, vec![first, plain(b"{}")]);
        assert_eq!(setting.post(&[]).status, 200);
        let ports: Vec<u16> = setting
            .nodes
            .asked
            .borrow()
            .iter()
            .map(|(address, _)| address.port())
            .collect();
        assert_eq!(ports.len(), 2);
        assert_ne!(ports[0], ports[1]);
        assert_eq!(setting.proxy.metrics.retried.load(Relaxed), 1);
        assert_eq!(setting.unfinished(), 0);
    }
    let setting = setting(3, vec![refused(), refused(), plain(b"never asked")]);
    assert_eq!(error_code(setting.post(&[])), (503, json!("peer_lost")));
    assert_eq!(setting.nodes.asked.borrow().len(), 2);
}

#[test]
fn what_was_answered_in_part_is_not_tried_again() {
    let half = Node::Answers(
        200,
        "application/json",
        vec![bytes("{\"ha"), Err(reset(true))],
    );
    for (first, status, code) in [
        (Node::Fails(reset(true)), 503, "peer_lost"),
        (half, 503, "peer_lost"),
        (
            Node::Fails(UpstreamError::Malformed {
                message: "no HTTP".into(),
            }),
            502,
            "bad_gateway",
        ),
        (
            Node::Fails(UpstreamError::Deadline),
            504,
            "deadline_exceeded",
        ),
        (
            Node::Fails(UpstreamError::TooManyConnections { open_max: 9 }),
            503,
            "overloaded",
        ),
    ] {
        let setting = setting(2, vec![first]);
        assert_eq!(error_code(setting.post(&[])), (status, json!(code)));
        assert_eq!(setting.nodes.asked.borrow().len(), 1);
        assert_eq!(setting.unfinished(), 0);
    }
}

#[test]
fn a_draining_node_gives_way_to_another_if_there_is_one() {
    let draining = || {
        let body = bytes("{\"error\":{\"code\":\"draining\"}}");
        Node::Answers(503, "application/json", vec![body, Ok(None)])
    };
    let pair = setting(2, vec![draining(), plain(b"{}")]);
    assert_eq!(pair.post(&[]).status, 200);
    let alone = setting(1, vec![draining()]);
    assert_eq!(error_code(alone.post(&[])), (503, json!("draining")));
    let both = setting(2, vec![draining(), draining()]);
    assert_eq!(error_code(both.post(&[])), (503, json!("draining")));
}

#[test]
fn errors_of_a_node_are_passed_on_with_their_status() {
    let body = bytes("{\"error\":{\"code\":\"invalid_value\"}}");
    let node = Node::Answers(400, "application/json", vec![body, Ok(None)]);
    assert_eq!(
        error_code(setting(2, vec![node]).post(&[])),
        (400, json!("invalid_value"))
    );
}

#[test]
fn without_nodes_the_answer_names_what_is_missing() {
    let setting = setting(0, vec![]);
    let answer = setting.post(&[]);
    assert!(answer.headers.iter().any(|(name, _)| name == "retry-after"));
    let body = body_json(answer);
    assert_eq!(body["error"]["code"], "not_ready");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("no decode node"), "{message}");
}

#[test]
fn a_stream_is_passed_on_in_whole_events() {
    let chunks = vec![
        bytes("data: 1\n\n"),
        bytes("data: 2\n"),
        bytes("\ndata: 3"),
        bytes("\n\ndata: [DONE]\n\n"),
        Ok(None),
    ];
    let setting = setting(1, vec![sse(chunks)]);
    let answer = setting.post(&[]);
    assert_eq!(answer.content_type, "text/event-stream");
    let mut source = events(answer);
    let mut passed = Vec::new();
    while let Some(bytes) = run(source.next()) {
        passed.push(String::from_utf8(bytes.to_vec()).unwrap());
    }
    assert_eq!(
        passed,
        ["data: 1\n\n", "data: 2\n\n", "data: 3\n\ndata: [DONE]\n\n"]
    );
    assert_eq!(setting.unfinished(), 0);
    assert_eq!(
        setting.proxy.table.borrow().status()["http://127.0.0.1:9000"]["finished"],
        1
    );
}

#[test]
fn a_node_lost_in_mid_stream_is_an_error_event_and_the_end() {
    for (error, code) in [
        (reset(true), "peer_lost"),
        (UpstreamError::Deadline, "deadline_exceeded"),
    ] {
        let chunks = vec![bytes("data: 1\n\ndata: {\"half"), Err(error)];
        let setting = setting(2, vec![sse(chunks)]);
        let mut source = events(setting.post(&[]));
        let text = drain(&mut *source);
        let chunks = data(&text);
        assert_eq!(chunks.len(), 2, "{text}");
        assert_eq!(chunks[0], 1);
        assert_eq!(chunks[1]["error"]["code"], code);
        assert_eq!(setting.unfinished(), 0);
        assert!(run(source.next()).is_none());
        drop(source);
        assert_eq!(setting.nodes.live.get(), 0);
    }
}

#[test]
fn a_frozen_node_is_given_up_when_its_lease_ends() {
    let setting = setting(1, vec![sse(vec![bytes("data: 1\n\n")])]);
    let mut source = events(setting.post(&[]));
    assert!(run(source.next()).is_some());
    let mut waiting = Box::pin(source.next());
    assert!(poll_once(&mut waiting).is_pending());
    assert_eq!(setting.unfinished(), 1);
    setting.node_lost("d0");
    let event = run(waiting).unwrap();
    assert!(event.starts_with(b"data: {\"error\""));
    assert!(String::from_utf8_lossy(&event).contains("\"peer_lost\""));
    assert!(run(source.next()).is_none());
}

#[test]
fn a_node_frozen_before_its_answer_gives_way_when_its_lease_ends() {
    let setting = setting(2, vec![Node::Silent, plain(b"{}")]);
    let call = call("POST", "/v1/completions", b"", &[]);
    let mut handling = Box::pin(setting.proxy.handle(call, setting.proxy.clock.now()));
    assert!(poll_once(&mut handling).is_pending());
    let port = setting.nodes.asked.borrow()[0].0.port();
    setting.node_lost(&format!("d{}", port - 9000));
    assert_eq!(run(handling).status, 200);
    assert_ne!(setting.nodes.asked.borrow()[1].0.port(), port);
}

#[test]
fn dropping_either_end_cancels_the_exchange() {
    let streaming = setting(1, vec![sse(vec![bytes("data: 1\n\n")])]);
    let source = events(streaming.post(&[]));
    assert_eq!((streaming.nodes.live.get(), streaming.unfinished()), (1, 1));
    drop(source);
    assert_eq!((streaming.nodes.live.get(), streaming.unfinished()), (0, 0));

    let waiting = setting(1, vec![Node::Silent]);
    let call = call("POST", "/v1/completions", b"", &[]);
    let mut handling = Box::pin(waiting.proxy.handle(call, Default::default()));
    assert!(poll_once(&mut handling).is_pending());
    assert_eq!((waiting.nodes.live.get(), waiting.unfinished()), (1, 1));
    drop(handling);
    assert_eq!((waiting.nodes.live.get(), waiting.unfinished()), (0, 0));
}

#[test]
fn a_request_without_time_left_is_not_sent() {
    let setting = setting(1, vec![]);
    setting.clock.pass(Duration::from_secs(61));
    let call = call("POST", "/v1/completions", b"", &[]);
    let answer = run(setting.proxy.handle(call, Default::default()));
    assert_eq!(error_code(answer), (504, json!("deadline_exceeded")));
    assert!(setting.nodes.asked.borrow().is_empty());
}

#[test]
fn the_proxy_answers_its_own_pages() {
    let setting = setting(1, vec![plain(b"{\"data\":[]}")]);
    let get = |path: &str| {
        let call = call("GET", path, b"", &[]);
        run(setting.proxy.handle(call, Default::default()))
    };
    assert_eq!(get("/health").status, 200);
    assert_eq!(
        get("/ready").status,
        503,
        "the process says that it is not ready"
    );
    let status = body_json(get("/nodes/status"));
    assert_eq!(status["http://127.0.0.1:8000"]["role"], 2);
    assert_eq!(status["http://127.0.0.1:9000"]["role"], 3);
    assert_eq!(status["http://127.0.0.1:9000"]["unfinished"], 0);
    let text = body_bytes(get("/metrics"));
    assert!(String::from_utf8_lossy(&text).contains("kvserve_proxy_retried_total 0"));
    assert!(setting.nodes.asked.borrow().is_empty());
    assert_eq!(get("/v1/models").status, 200);
    assert_eq!(setting.nodes.asked.borrow().len(), 1);
    assert_eq!(get("/v1/embeddings").status, 501);
    assert_eq!(get("/v1/completions").status, 405);
}
