//! A client that leaves, in each phase: whatever worked for it is dropped soon.

mod http_support;

use http_support::*;
use kvserve_runtime::http::HttpLimits;
use std::io::{BufReader, Write};
use std::net::Shutdown;
use std::time::Duration;

/// The promise is 100 ms; a test machine may be busy.
const SOON: Duration = Duration::from_secs(2);

fn started(served: &Served, count: u64) {
    wait_until("the handler runs", || {
        Seen::get(&served.seen.started) == count
    });
}

fn dropped_soon(served: &Served, count: u64) {
    let took = wait_until("the handler is dropped", || {
        Seen::get(&served.seen.dropped) == count
    });
    assert!(took < SOON, "{took:?}");
}

#[test]
fn before_the_head_is_complete() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    socket.write_all(b"GET / HT").unwrap();
    drop(socket);
    drop(served.connect());
    let (end, counts) = served.end(PATIENCE);
    assert_eq!((end.cut, counts.requests, counts.malformed), (0, 0, 0));
}

#[test]
fn in_the_middle_of_the_body() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let head = b"POST /slurp HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc";
    socket.write_all(head).unwrap();
    started(&served, 1);
    drop(socket);
    dropped_soon(&served, 1);
}

#[test]
fn while_the_handler_runs() {
    let served = serve_app(HttpLimits::default());
    for count in 1..=20 {
        let mut socket = served.connect();
        let get = b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";
        socket.write_all(get).unwrap();
        started(&served, count);
        drop(socket);
        dropped_soon(&served, count);
    }
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.clients_left, 20);
}

#[test]
fn while_the_handler_runs_by_a_reset() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let get = b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";
    socket.write_all(get).unwrap();
    started(&served, 1);
    socket2::SockRef::from(&socket)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(socket);
    dropped_soon(&served, 1);
}

#[test]
fn while_the_handler_runs_with_the_body_unread() {
    // The end of the stream stands behind bytes that nobody reads. (They fit the server's
    // socket buffer: TCP itself does not deliver an end behind bytes that do not.)
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let head = b"POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n";
    socket.write_all(head).unwrap();
    socket.write_all(&[b'x'; 60_000]).unwrap();
    started(&served, 1);
    drop(socket);
    dropped_soon(&served, 1);
}

#[test]
fn while_the_handler_runs_with_pipelined_requests_behind() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let get = b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";
    for _ in 0..500 {
        socket.write_all(get).unwrap();
    }
    started(&served, 1);
    drop(socket);
    dropped_soon(&served, 1);
    assert_eq!(Seen::get(&served.seen.started), 1);
}

#[test]
fn a_half_close_counts_as_leaving() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let get = b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";
    socket.write_all(get).unwrap();
    started(&served, 1);
    socket.shutdown(Shutdown::Write).unwrap();
    dropped_soon(&served, 1);
    assert!(is_closed(&mut socket));
}

#[test]
fn in_the_middle_of_a_stream() {
    for path in ["/events?n=1000000&ms=1", "/events-by-task?n=1000000&ms=1"] {
        let served = serve_app(HttpLimits::default());
        let streaming = stream(served.address, "GET", path, &[], b"", PATIENCE).unwrap();
        let mut events = streaming.events();
        assert_eq!(events.next().unwrap().unwrap(), "0");
        drop(events);
        dropped_soon(&served, 1);
        assert_eq!(Seen::get(&served.seen.finished), 0);
    }
}

#[test]
fn in_a_stream_that_says_nothing() {
    // Nothing is written that could fail: only the read side tells.
    for path in ["/events?n=2&ms=1000000", "/silent-by-task"] {
        let served = serve_app(HttpLimits::default());
        let streaming = stream(served.address, "GET", path, &[], b"", PATIENCE).unwrap();
        started(&served, 1);
        drop(streaming);
        dropped_soon(&served, 1);
    }
}

#[test]
fn after_the_answer_nothing_is_cancelled() {
    let served = serve_app(HttpLimits::default());
    let mut reader = BufReader::new(served.connect());
    let get = b"GET /sleep?ms=5 HTTP/1.1\r\nhost: x\r\n\r\n";
    reader.get_mut().write_all(get).unwrap();
    assert_eq!(read_answer_from(&mut reader).status, 200);
    drop(reader);
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.clients_left, 0);
}
