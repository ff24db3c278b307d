//! The API and the proxy over real sockets, with an engine that speaks slowly: answers, clients
//! that leave, nodes that die.

mod api_support;
use api_support::*;
use kvserve::api::ids::RandomIds;
use kvserve::api::{Api, ApiConfig, ApiMetrics, LocalFuture, http_handler};
use kvserve::engine::{
    Engine, FinishReason, GenerateEvent, GenerateRequest, Refusal, TokenEvent, TokenStream,
};
use kvserve::proxy::{NodeRecord, NodeRole, NodeTable, Proxy, ProxyConfig, ProxyMetrics};
use kvserve_runtime::http::blocking::{Answer, Streaming, request, stream};
use kvserve_runtime::http::{Client, ClientLimits, Drain, HttpLimits, serve};
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::side_pool::SidePool;
use kvserve_runtime::{Deadline, Nanos, Shard, ShardConfig};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Nothing here takes longer when it works.
const PATIENCE: Duration = Duration::from_secs(10);
/// A prompt that begins with this id gets no token at all.
const MUTE: u32 = 1;
/// A prompt that begins with this id gets tokens for ever.
const ENDLESS: u32 = 2;

/// Gives `max_tokens` times the letter `a`, one every 2 ms.
struct SlowEngine {
    shard: Shard,
    live: Arc<AtomicUsize>,
}

struct SlowStream {
    shard: Shard,
    live: Arc<AtomicUsize>,
    first_id: u32,
    left: u32,
    ended: bool,
}

impl Engine for SlowEngine {
    fn generate(&self, request: GenerateRequest) -> Result<Box<dyn TokenStream>, Refusal> {
        self.live.fetch_add(1, SeqCst);
        Ok(Box::new(SlowStream {
            shard: self.shard.clone(),
            live: self.live.clone(),
            first_id: request.prompt[0],
            left: request.max_tokens,
            ended: false,
        }))
    }
}

impl TokenStream for SlowStream {
    fn next(&mut self) -> LocalFuture<'_, Option<GenerateEvent>> {
        Box::pin(async move {
            if self.ended {
                return None;
            }
            if self.first_id == MUTE {
                self.shard.sleep(PATIENCE * 6).await;
            }
            self.shard.sleep(Duration::from_millis(2)).await;
            if self.left == 0 {
                self.ended = true;
                return Some(GenerateEvent::Finished {
                    reason: FinishReason::Length,
                    cached_tokens: 0,
                });
            }
            if self.first_id != ENDLESS {
                self.left -= 1;
            }
            Some(GenerateEvent::Token(TokenEvent {
                token: u32::from(b'a'),
                logprob: f32::NAN,
                top: Vec::new(),
            }))
        })
    }
}

impl Drop for SlowStream {
    fn drop(&mut self) {
        self.live.fetch_sub(1, SeqCst);
    }
}

/// A listener on a shard of its own.
struct Process {
    address: SocketAddr,
    drain: Drain,
    live: Arc<AtomicUsize>,
}

fn launch(name: &str) -> (ShardConfig, Drain, Arc<AtomicUsize>) {
    let config = ShardConfig {
        name: name.to_owned(),
        core: None,
    };
    (config, Drain::new(), Arc::default())
}

fn node(name: &str) -> Process {
    let (config, drain, live) = launch(name);
    let (tell, told) = std::sync::mpsc::channel();
    let (drain_there, live_there) = (drain.clone(), live.clone());
    kvserve_runtime::testing::launch(config, move |shard| async move {
        let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), false).unwrap();
        tell.send(listener.local_addr().unwrap()).unwrap();
        let metrics = Arc::new(ApiMetrics::default());
        let mut model = served_model(true);
        model.context_tokens = 100_000;
        let api = Api {
            engine: Rc::new(SlowEngine {
                shard: shard.clone(),
                live: live_there,
            }),
            model: Arc::new(model),
            config: ApiConfig {
                request_timeout: Duration::from_secs(60),
                debug_pages: true,
            },
            offload: Rc::new(SidePool::new(1, 16).unwrap()),
            clock: Rc::new(shard.clone()),
            pages: Rc::new(FakePages),
            all_metrics: vec![metrics.clone()],
            metrics,
            ids: RandomIds::default(),
        };
        let handler = http_handler(Rc::new(api));
        serve(shard, listener, HttpLimits::default(), handler, drain_there).await;
    })
    .unwrap();
    Process {
        address: told.recv_timeout(PATIENCE).unwrap(),
        drain,
        live,
    }
}

fn proxy(nodes: &[SocketAddr]) -> Process {
    let (config, drain, live) = launch("proxy");
    let (tell, told) = std::sync::mpsc::channel();
    let drain_there = drain.clone();
    let records: Vec<NodeRecord> = nodes
        .iter()
        .map(|address| NodeRecord {
            node: format!("node-{}", address.port()),
            incarnation: 1,
            address: *address,
            url: format!("http://{address}"),
            role: NodeRole::Hybrid,
            models: vec!["tiny".into()],
            ready: true,
            paths: Vec::new(),
        })
        .collect();
    kvserve_runtime::testing::launch(config, move |shard| async move {
        let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), false).unwrap();
        tell.send(listener.local_addr().unwrap()).unwrap();
        let mut table = NodeTable::default();
        for record in records {
            table.upsert(record).unwrap();
        }
        let proxy = Proxy {
            table: Rc::new(RefCell::new(table)),
            upstream: Rc::new(Client::new(shard.clone(), ClientLimits::default())),
            clock: Rc::new(shard.clone()),
            pages: Rc::new(FakePages),
            config: ProxyConfig {
                request_timeout: Duration::from_secs(60),
                debug_pages: true,
            },
            http_metrics: Arc::default(),
            all_http_metrics: Vec::new(),
            metrics: Arc::new(ProxyMetrics::default()),
            all_metrics: Vec::new(),
        };
        let handler = http_handler(Rc::new(proxy));
        serve(shard, listener, HttpLimits::default(), handler, drain_there).await;
    })
    .unwrap();
    Process {
        address: told.recv_timeout(PATIENCE).unwrap(),
        drain,
        live,
    }
}

impl Process {
    /// Dies as a killed process does: every connection is cut.
    fn die(&self) {
        self.drain
            .begin(Deadline::after(Nanos::now(), Duration::ZERO));
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        request(self.address, "POST", path, &[], body.as_bytes(), PATIENCE).unwrap()
    }

    fn stream(&self, body: &Value) -> Streaming {
        let body = body.to_string();
        let path = "/v1/completions";
        stream(self.address, "POST", path, &[], body.as_bytes(), PATIENCE).unwrap()
    }

    /// Requests that the proxy counts at its nodes.
    fn unfinished(&self) -> u64 {
        let answer = request(self.address, "GET", "/nodes/status", &[], b"", PATIENCE).unwrap();
        let page: Value = serde_json::from_slice(&answer.body).unwrap();
        let nodes = page.as_object().unwrap().values();
        nodes.map(|node| node["unfinished"].as_u64().unwrap()).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.die();
    }
}

#[track_caller]
fn soon(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn plain_and_streamed_answers_arrive_whole_directly_and_through_the_proxy() {
    let node = node("node");
    let proxy = proxy(&[node.address]);
    for door in [&node, &proxy] {
        let answer = door.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 5}));
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(body["choices"][0]["text"], "aaaaa");

        let streaming = door.stream(&json!({"prompt": "x", "max_tokens": 5, "stream": true}));
        assert_eq!(streaming.status, 200);
        assert_eq!(streaming.header("content-type"), Some("text/event-stream"));
        let events: Vec<String> = streaming.events().map(Result::unwrap).collect();
        assert_eq!(events.len(), 7);
        assert_eq!(events[6], "[DONE]");
        let text: String = events[..6]
            .iter()
            .map(|event| serde_json::from_str::<Value>(event).unwrap())
            .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(text, "aaaaa");
    }
    assert_eq!(proxy.unfinished(), 0);
    assert_eq!(node.live.load(SeqCst), 0);
}

#[test]
fn a_large_body_is_tokenised_beside_the_shard() {
    let node = node("node");
    let text = "x".repeat(50_000);
    let body = json!({"prompt": text, "max_tokens": 1});
    let answer = node.post("/v1/completions", &body);
    let body: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body["usage"]["prompt_tokens"], 50_001);
}

#[test]
fn a_client_that_leaves_in_mid_stream_cancels_the_generation() {
    let node = node("node");
    let proxy = proxy(&[node.address]);
    for door in [&node, &proxy] {
        let mut streaming = door.stream(&json!({"prompt": [ENDLESS], "stream": true}));
        for _ in 0..3 {
            assert!(streaming.next_piece().unwrap().is_some());
        }
        assert_eq!(node.live.load(SeqCst), 1);
        drop(streaming);
        soon("the generation is dropped", || node.live.load(SeqCst) == 0);
        soon("the proxy counts nothing", || proxy.unfinished() == 0);
    }
}

#[test]
fn a_client_that_leaves_before_the_first_token_cancels_the_generation() {
    let node = node("node");
    let proxy = proxy(&[node.address]);
    for door in [&node, &proxy] {
        for streamed in [false, true] {
            let address = door.address;
            let body = json!({"prompt": [MUTE], "stream": streamed}).to_string();
            let gone = std::thread::spawn(move || {
                let brief = Duration::from_millis(300);
                let path = "/v1/completions";
                let answer = stream(address, "POST", path, &[], body.as_bytes(), brief);
                assert!(
                    answer.is_err(),
                    "nothing is answered before the first token"
                );
            });
            soon("the generation begins", || node.live.load(SeqCst) == 1);
            gone.join().unwrap();
            soon("the generation is dropped", || node.live.load(SeqCst) == 0);
            soon("the proxy counts nothing", || proxy.unfinished() == 0);
        }
    }
}

#[test]
fn a_node_that_dies_in_mid_stream_is_an_error_event_and_no_done() {
    let node = node("node");
    let proxy = proxy(&[node.address]);
    let streaming = proxy.stream(&json!({"prompt": [ENDLESS], "stream": true}));
    let mut events = streaming.events();
    assert!(events.next().unwrap().unwrap().contains("\"text\":\"a\""));
    node.die();
    let rest: Vec<String> = events.map(Result::unwrap).collect();
    let last: Value = serde_json::from_str(rest.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "peer_lost");
    assert!(rest.iter().all(|event| event != "[DONE]"));
    soon("the proxy counts nothing", || proxy.unfinished() == 0);
}

#[test]
fn a_dead_node_gives_way_to_a_live_one_and_without_any_the_error_is_typed() {
    let (dead, live) = (node("dead"), node("live"));
    let proxy = proxy(&[dead.address, live.address]);
    dead.die();
    soon("the dead node's port is closed", || {
        std::net::TcpStream::connect(dead.address).is_err()
    });
    let body = json!({"prompt": "x", "max_tokens": 2});
    for _ in 0..4 {
        assert_eq!(proxy.post("/v1/completions", &body).status, 200);
    }
    live.die();
    soon("the other port is closed too", || {
        std::net::TcpStream::connect(live.address).is_err()
    });
    let answer = proxy.post("/v1/completions", &body);
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    let error: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(error["error"]["code"], "peer_lost");
}

#[test]
fn refusals_are_json_on_every_way_in() {
    let node = node("node");
    let proxy = proxy(&[node.address]);
    let too_long = vec![b' '; 8 * 1024 * 1024 + 1];
    for door in [&node, &proxy] {
        for (method, path, body, status, code) in [
            ("POST", "/v1/completions", &b"{"[..], 400, "invalid_json"),
            (
                "POST",
                "/v1/completions",
                &too_long[..],
                413,
                "body_too_large",
            ),
            ("POST", "/v1/nothing", &b"{}"[..], 404, "not_found"),
            (
                "GET",
                "/v1/chat/completions",
                &b""[..],
                405,
                "method_not_allowed",
            ),
            ("POST", "/v1/embeddings", &b"{}"[..], 501, "not_supported"),
        ] {
            let headers = [("x-request-id", "label-1")];
            let answer = request(door.address, method, path, &headers, body, PATIENCE).unwrap();
            assert_eq!(answer.status, status, "{method} {path}");
            let error: Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(error["error"]["code"], code);
            if status != 413 {
                assert_eq!(answer.header("x-request-id"), Some("label-1"));
            }
        }
    }
    assert_eq!(node.live.load(SeqCst), 0);
}
