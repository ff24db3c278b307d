//! A served listener on its own shard, and a small application for the HTTP tests.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]
#![allow(dead_code, unused_imports)]

use bytes::Bytes;
use kvserve_runtime::http::{
    BodySender, Drain, Handler, HttpCounters, HttpLimits, Request, Response, ServeEnd, StatusCode,
    handler, serve_counted, sse,
};
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::shard::ShardHandle;
use kvserve_runtime::{Deadline, Nanos, Shard, ShardConfig};
use std::future::pending;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use kvserve_runtime::http::blocking::{Answer, Streaming, request, stream};

/// Nothing here takes longer when it works.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A shard named `name`, not pinned.
pub fn config(name: &str) -> ShardConfig {
    ShardConfig {
        name: name.to_owned(),
        core: None,
    }
}

/// What handlers tell the tests.
#[derive(Default)]
pub struct Seen {
    pub started: AtomicU64,
    pub dropped: AtomicU64,
    pub finished: AtomicU64,
    pub sent: AtomicU64,
}

impl Seen {
    pub fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::SeqCst)
    }
}

/// Counts a handler (or stream) that is dropped before it finished.
pub struct Running {
    seen: Arc<Seen>,
    finished: bool,
}

impl Running {
    pub fn new(seen: &Arc<Seen>) -> Self {
        seen.started.fetch_add(1, Ordering::SeqCst);
        Running {
            seen: seen.clone(),
            finished: false,
        }
    }

    pub fn finish(mut self) {
        self.finished = true;
        self.seen.finished.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.finished {
            self.seen.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The counters of a listener at its end.
pub type Totals = (ServeEnd, Counts);

#[derive(Clone, Copy, Debug)]
pub struct Counts {
    pub requests: u64,
    pub malformed: u64,
    pub head_timeouts: u64,
    pub clients_left: u64,
    pub stalled: u64,
    pub over_limit: u64,
    pub connections_open: u64,
}

pub struct Served {
    pub address: SocketAddr,
    pub drain: Drain,
    pub seen: Arc<Seen>,
    thread: Option<ShardHandle<Totals>>,
}

/// Serves [`app`] on a shard of its own.
pub fn serve_app(limits: HttpLimits) -> Served {
    let seen = Arc::new(Seen::default());
    let drain = Drain::new();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = {
        let (seen, drain) = (seen.clone(), drain.clone());
        kvserve_runtime::testing::launch(config("http-test"), move |shard| async move {
            let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), false).unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            let counters = Rc::new(HttpCounters::default());
            let app = app(shard.clone(), seen);
            let end = serve_counted(shard, listener, limits, app, drain, counters.clone()).await;
            let counts = Counts {
                requests: counters.requests.get(),
                malformed: counters.malformed.get(),
                head_timeouts: counters.head_timeouts.get(),
                clients_left: counters.clients_left.get(),
                stalled: counters.stalled.get(),
                over_limit: counters.over_limit.get(),
                connections_open: counters.connections_open.get(),
            };
            (end, counts)
        })
        .unwrap()
    };
    Served {
        address: told.recv_timeout(PATIENCE).unwrap(),
        drain,
        seen,
        thread: Some(thread),
    }
}

impl Served {
    pub fn get(&self, path: &str) -> Answer {
        request(self.address, "GET", path, &[], b"", PATIENCE).unwrap()
    }

    pub fn post(&self, path: &str, body: &[u8]) -> Answer {
        request(self.address, "POST", path, &[], body, PATIENCE).unwrap()
    }

    pub fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        socket.set_nodelay(true).unwrap();
        socket
    }

    /// Writes raw bytes and reads one answer.
    pub fn raw(&self, bytes: &[u8]) -> Answer {
        let mut socket = self.connect();
        socket.write_all(bytes).unwrap();
        read_answer(socket)
    }

    /// Begins a drain and waits for the end.
    pub fn end(mut self, within: Duration) -> Totals {
        self.drain.begin(Deadline::after(Nanos::now(), within));
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.drain
                .begin(Deadline::after(Nanos::now(), Duration::ZERO));
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

pub fn read_answer(socket: TcpStream) -> Answer {
    read_answer_from(&mut BufReader::new(socket))
}

/// Reads one answer and leaves what follows it in the reader.
pub fn read_answer_from(reader: &mut BufReader<TcpStream>) -> Answer {
    // The reader of the library owns its reader: hand it a view of the same socket only when
    // nothing is buffered, else parse here.
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap_or_else(|error| {
            panic!(
                "no whole head: {error}; so far {:?}",
                String::from_utf8_lossy(&head)
            )
        });
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap()[9..12].parse().unwrap();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let length = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .map_or(0, |(_, value)| value.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    Answer {
        status,
        headers,
        body,
    }
}

/// Whether the server has closed (or reset) the connection within the patience.
pub fn is_closed(socket: &mut TcpStream) -> bool {
    let mut byte = [0];
    match socket.read(&mut byte) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Waits until `condition` holds and gives the time it took.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < PATIENCE,
            "still not so after 10 s: {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

/// Asserts the one shape of an error.
pub fn assert_error(answer: &Answer, status: u16, code: &str) {
    let text = answer.text();
    assert_eq!(answer.status, status, "{text}");
    assert!(text.starts_with("{\"error\":{\"message\":\""), "{text}");
    assert!(text.contains(&format!("\"code\":\"{code}\"")), "{text}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
}

fn app(shard: Shard, seen: Arc<Seen>) -> Handler {
    handler(move |request| route(shard.clone(), seen.clone(), request))
}

fn number(request: &Request, name: &str) -> u64 {
    let query = request.parts.uri.query().unwrap_or_default();
    query
        .split('&')
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        .unwrap_or(0)
}

async fn route(shard: Shard, seen: Arc<Seen>, request: Request) -> Response {
    match request.path() {
        "/" => Response::json(StatusCode::OK, "{\"ok\":true}"),
        "/echo" => match request.body.read_all(u64::MAX).await {
            Ok(body) => Response::bytes(StatusCode::OK, "application/octet-stream", body),
            Err(error) => error.response(),
        },
        // A handler that answers before it has read the body.
        "/impatient" => Response::json(StatusCode::OK, "{\"ok\":true}"),
        "/sleep" => {
            let running = Running::new(&seen);
            shard
                .sleep(Duration::from_millis(number(&request, "ms")))
                .await;
            running.finish();
            Response::json(StatusCode::OK, "{\"slept\":true}")
        }
        // Holds the request (its body unread) and never answers.
        "/hang" => {
            let _running = Running::new(&seen);
            pending::<()>().await;
            unreachable!()
        }
        // Reads the body under a guard.
        "/slurp" => {
            let running = Running::new(&seen);
            match request.body.read_all(u64::MAX).await {
                Ok(body) => {
                    running.finish();
                    Response::json(StatusCode::OK, format!("{}", body.len()))
                }
                Err(error) => error.response(),
            }
        }
        "/events" => {
            let (count, pause) = (number(&request, "n"), number(&request, "ms"));
            sse::producing(move |sender| events(shard, seen, sender, count, pause))
        }
        // The same by a task that holds the sender.
        "/events-by-task" => {
            let (count, pause) = (number(&request, "n"), number(&request, "ms"));
            let (response, sender) = sse::stream();
            shard
                .spawn(events(shard.clone(), seen, sender, count, pause))
                .detach();
            response
        }
        // Sends nothing and waits for the client to leave.
        "/silent-by-task" => {
            let (response, mut sender) = sse::stream();
            let running = Running::new(&seen);
            shard
                .spawn(async move {
                    sender.closed().await;
                    drop(running);
                })
                .detach();
            response
        }
        "/flood" => {
            let (response, mut sender) =
                Response::stream(StatusCode::OK, "application/octet-stream");
            let running = Running::new(&seen);
            shard
                .spawn(async move {
                    let chunk = Bytes::from(vec![b'x'; 64 * 1024]);
                    while sender.send(chunk.clone()).await.is_ok() {
                        seen.sent.fetch_add(1, Ordering::SeqCst);
                    }
                    drop(running);
                })
                .detach();
            response
        }
        "/abort" => {
            let (response, mut sender) = Response::stream(StatusCode::OK, "text/plain");
            shard
                .spawn(async move {
                    let _ = sender.send(Bytes::from_static(b"half")).await;
                    sender.abort();
                })
                .detach();
            response
        }
        _ => Response::empty(StatusCode::NOT_FOUND),
    }
}

async fn events(shard: Shard, seen: Arc<Seen>, mut sender: BodySender, count: u64, pause_ms: u64) {
    let running = Running::new(&seen);
    for number in 0..count {
        if sender.send(sse::data(&format!("{number}"))).await.is_err() {
            return;
        }
        seen.sent.fetch_add(1, Ordering::SeqCst);
        if pause_ms > 0 {
            shard.sleep(Duration::from_millis(pause_ms)).await;
        }
    }
    let _ = sender.send(sse::DONE).await;
    running.finish();
}
