//! HTTP/1.1 as clients use it: kept connections, pipelines, both framings, odd methods.

mod http_support;

use http_support::*;
use kvserve_runtime::http::HttpLimits;
use std::io::{BufReader, Read, Write};

#[test]
fn a_connection_serves_many_requests() {
    let served = serve_app(HttpLimits::default());
    let mut reader = BufReader::new(served.connect());
    for _ in 0..50 {
        let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        reader.get_mut().write_all(get).unwrap();
        let answer = read_answer_from(&mut reader);
        assert_eq!(
            (answer.status, answer.text().as_str()),
            (200, "{\"ok\":true}")
        );
    }
    drop(reader);
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.requests, 50);
    assert_eq!(counts.clients_left, 0);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let served = serve_app(HttpLimits::default());
    let mut reader = BufReader::new(served.connect());
    let mut all = Vec::new();
    for number in 0..40 {
        // The first ones are slow: later ones must not overtake them.
        if number < 3 {
            all.extend_from_slice(b"GET /sleep?ms=20 HTTP/1.1\r\nhost: x\r\n\r\n");
        }
        let body = format!("number {number}");
        let head = format!(
            "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        all.extend_from_slice(head.as_bytes());
        all.extend_from_slice(body.as_bytes());
    }
    reader.get_mut().write_all(&all).unwrap();
    for number in 0..40 {
        if number < 3 {
            assert_eq!(read_answer_from(&mut reader).text(), "{\"slept\":true}");
        }
        let answer = read_answer_from(&mut reader);
        assert_eq!(answer.text(), format!("number {number}"));
    }
}

#[test]
fn bodies_of_both_framings_come_whole() {
    let served = serve_app(HttpLimits::default());
    for size in [0, 1, 1000, 65_536, 3_000_000] {
        let body: Vec<u8> = (0..size).map(|i| (i * 7 % 251) as u8).collect();
        assert!(served.post("/echo", &body).body == body, "{size} bytes");

        let mut socket = served.connect();
        let mut writer = socket.try_clone().unwrap();
        let chunks = body.clone();
        let sender = std::thread::spawn(move || {
            let head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
            writer.write_all(head).unwrap();
            for chunk in chunks.chunks(7001) {
                write!(writer, "{:x}\r\n", chunk.len()).unwrap();
                writer.write_all(chunk).unwrap();
                writer.write_all(b"\r\n").unwrap();
            }
            writer.write_all(b"0\r\n\r\n").unwrap();
        });
        let answer = read_answer_from(&mut BufReader::new(socket.try_clone().unwrap()));
        sender.join().unwrap();
        assert!(answer.body == body, "{size} bytes in chunks");
        // And the connection is still good.
        socket
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .unwrap();
        assert_eq!(read_answer(socket).status, 200);
    }
}

#[test]
fn a_streamed_answer_is_chunked_and_flushed_at_once() {
    let served = serve_app(HttpLimits::default());
    // 1,000 s between the events: only flushing at once lets the first one through.
    let streaming = stream(
        served.address,
        "GET",
        "/events?n=2&ms=1000000",
        &[],
        b"",
        PATIENCE,
    );
    let streaming = streaming.unwrap();
    assert_eq!(streaming.header("content-type"), Some("text/event-stream"));
    assert_eq!(streaming.header("transfer-encoding"), Some("chunked"));
    assert_eq!(streaming.events().next().unwrap().unwrap(), "0");
}

#[test]
fn events_come_in_order_and_end() {
    let served = serve_app(HttpLimits::default());
    for path in ["/events?n=500", "/events-by-task?n=500"] {
        let streaming = stream(served.address, "GET", path, &[], b"", PATIENCE).unwrap();
        let events: Vec<String> = streaming.events().map(Result::unwrap).collect();
        let mut expected: Vec<String> = (0..500).map(|number| number.to_string()).collect();
        expected.push("[DONE]".to_owned());
        assert_eq!(events, expected);
    }
}

#[test]
fn an_aborted_stream_is_no_whole_answer() {
    let served = serve_app(HttpLimits::default());
    let answer = request(served.address, "GET", "/abort", &[], b"", PATIENCE);
    assert!(answer.is_err(), "{answer:?}");
    // HTTP/1.0 knows no chunks: there only a reset tells.
    let mut socket = served.connect();
    socket.write_all(b"GET /abort HTTP/1.0\r\n\r\n").unwrap();
    let mut all = Vec::new();
    assert!(socket.read_to_end(&mut all).is_err());
}

#[test]
fn unusual_methods_do_no_harm() {
    let served = serve_app(HttpLimits::default());
    let head = request(served.address, "HEAD", "/", &[], b"", PATIENCE).unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), Some("11"));
    // A stream has no body for HEAD either: its producer is dropped.
    let head = request(
        served.address,
        "HEAD",
        "/events?n=9&ms=100000",
        &[],
        b"",
        PATIENCE,
    )
    .unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    let options = request(served.address, "OPTIONS", "/", &[], b"", PATIENCE).unwrap();
    assert_eq!(options.status, 200);
    let connect = served.raw(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n");
    assert_error(&connect, 405, "method_not_allowed");
    let upgrade = served
        .raw(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
    assert_eq!(upgrade.status, 200);
}

#[test]
fn http_1_0_and_expect_continue_work() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    socket.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut all = String::new();
    socket.read_to_string(&mut all).unwrap();
    assert!(all.starts_with("HTTP/1.0 200 OK\r\n"), "{all}");
    assert!(all.ends_with("{\"ok\":true}"), "{all}");

    let mut socket = served.connect();
    let head =
        b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n";
    socket.write_all(head).unwrap();
    let mut go = [0; 25];
    socket.read_exact(&mut go).unwrap();
    assert_eq!(&go, b"HTTP/1.1 100 Continue\r\n\r\n");
    socket.write_all(b"abc").unwrap();
    assert_eq!(read_answer(socket).text(), "abc");
}

#[test]
fn an_answer_before_the_body_was_read_arrives() {
    let served = serve_app(HttpLimits::default());
    for _ in 0..20 {
        let answer = served.post("/impatient", &vec![b'x'; 2_000_000]);
        assert_eq!(answer.status, 200);
    }
}
