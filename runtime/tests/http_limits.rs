//! Each limit ends what it limits, says so in the error's JSON, and leaves others alone.

mod http_support;

use http_support::*;
use kvserve_runtime::http::{BodyBudget, HttpLimits};
use std::io::{BufReader, Read, Write};
use std::time::Duration;

fn short() -> HttpLimits {
    HttpLimits {
        header_read: Duration::from_millis(300),
        body_read: Duration::from_millis(300),
        keep_alive_idle: Duration::from_millis(300),
        write_stall: Duration::from_millis(300),
        ..HttpLimits::default()
    }
}

#[test]
fn a_long_request_line_is_414() {
    let served = serve_app(HttpLimits::default());
    for length in [8 * 1024, 20_000, 200_000] {
        let line = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(length));
        let answer = served.raw(line.as_bytes());
        assert_error(&answer, 414, "request_line_too_long");
        assert!(answer.text().contains("8192"), "{}", answer.text());
    }
    let fits = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(8000));
    assert_eq!(served.raw(fits.as_bytes()).status, 404);
}

#[test]
fn too_many_or_too_long_headers_are_431() {
    let served = serve_app(HttpLimits::default());
    for (fields, length) in [(101, 1), (500, 1), (40, 1000), (10, 30_000)] {
        let mut head = "GET / HTTP/1.1\r\n".to_owned();
        for number in 0..fields {
            head.push_str(&format!("x-{number}: {}\r\n", "v".repeat(length)));
        }
        head.push_str("\r\n");
        let answer = served.raw(head.as_bytes());
        assert_error(&answer, 431, "headers_too_large");
        assert!(answer.text().contains("32768 bytes or 100 fields"));
    }
    let mut fits = "GET / HTTP/1.1\r\n".to_owned();
    for number in 0..100 {
        fits.push_str(&format!("x-{number}: {}\r\n", "v".repeat(300)));
    }
    fits.push_str("\r\n");
    assert_eq!(served.raw(fits.as_bytes()).status, 200);
}

#[test]
fn a_long_body_is_413_however_it_is_framed() {
    let limits = HttpLimits {
        body_bytes_max: 1000,
        ..HttpLimits::default()
    };
    let served = serve_app(limits);
    assert_eq!(served.post("/echo", &[b'x'; 1000]).status, 200);
    // Announced: refused before the handler runs, even if much more than a socket holds comes.
    for size in [1001, 5_000_000] {
        let answer = served.post("/echo", &vec![b'x'; size]);
        assert_error(&answer, 413, "body_too_large");
        assert!(answer.text().contains("1000 bytes"), "{}", answer.text());
    }
    let mut chunked =
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..11 {
        chunked.extend_from_slice(b"64\r\n");
        chunked.extend_from_slice(&[b'x'; 100]);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    assert_error(&served.raw(&chunked), 413, "body_too_large");
}

#[test]
fn malformed_http_is_a_400_with_the_same_json() {
    let served = serve_app(HttpLimits::default());
    let cases: [&[u8]; 8] = [
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x01T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: minus one\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello",
    ];
    for case in cases {
        let answer = served.raw(case);
        assert_error(&answer, 400, "malformed_http");
        assert_eq!(answer.header("connection"), Some("close"));
    }
    let h2 = served.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    assert_error(&h2, 505, "http_version");
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.malformed, 9);
}

#[test]
fn malformed_http_on_a_kept_connection_is_told_too() {
    let served = serve_app(HttpLimits::default());
    let mut reader = BufReader::new(served.connect());
    let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    reader.get_mut().write_all(get).unwrap();
    assert_eq!(read_answer_from(&mut reader).status, 200);
    reader.get_mut().write_all(b"nonsense\r\n\r\n").unwrap();
    assert_error(&read_answer_from(&mut reader), 400, "malformed_http");
    assert!(is_closed(reader.get_mut()));
}

#[test]
fn a_broken_chunk_is_a_400() {
    let served = serve_app(HttpLimits::default());
    let answer = served
        .raw(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\nabc\r\n");
    assert_error(&answer, 400, "body_malformed");
}

#[test]
fn a_slow_head_is_408() {
    let served = serve_app(short());
    let mut socket = served.connect();
    socket.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    // A byte now and then does not help.
    let mut writer = socket.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        while writer.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    assert_error(&read_answer(socket), 408, "header_timeout");
    dripping.join().unwrap();
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.head_timeouts, 1);
}

#[test]
fn a_slow_body_is_408() {
    let served = serve_app(short());
    let answer = served.raw(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc");
    assert_error(&answer, 408, "body_timeout");
    assert!(
        answer.text().contains("300 ms (3 bytes came)"),
        "{}",
        answer.text()
    );
}

#[test]
fn silent_connections_are_closed() {
    let served = serve_app(short());
    let mut never_spoke = served.connect();
    assert!(is_closed(&mut never_spoke));
    let mut reader = BufReader::new(served.connect());
    let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    reader.get_mut().write_all(get).unwrap();
    assert_eq!(read_answer_from(&mut reader).status, 200);
    assert!(is_closed(reader.get_mut()));
}

#[test]
fn a_slow_handler_is_not_the_clients_fault() {
    // Longer than every limit of the connection: none of them is about the handler.
    let served = serve_app(short());
    assert_eq!(served.get("/sleep?ms=900").status, 200);
}

#[test]
fn a_client_that_does_not_read_is_dropped() {
    let served = serve_app(short());
    let mut socket = served.connect();
    socket
        .write_all(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        .unwrap();
    wait_until("the stream is dropped", || {
        Seen::get(&served.seen.dropped) == 1
    });
    // What was taken in is bounded by buffers (a few MiB of socket buffers at most).
    let chunks = Seen::get(&served.seen.sent);
    assert!(chunks < 64 * 1024 * 1024 / (64 * 1024), "{chunks} chunks");
    // The client sees an error, not an end.
    let mut all = Vec::new();
    assert!(socket.read_to_end(&mut all).is_err());
    let (_, counts) = served.end(PATIENCE);
    assert_eq!((counts.stalled, counts.connections_open), (1, 0));
}

#[test]
fn a_slow_but_steady_reader_is_served() {
    let served = serve_app(short());
    let mut streaming = stream(served.address, "GET", "/flood", &[], b"", PATIENCE).unwrap();
    for _ in 0..12 {
        std::thread::sleep(Duration::from_millis(100));
        for _ in 0..64 {
            assert!(streaming.next_piece().unwrap().is_some());
        }
    }
    assert_eq!(Seen::get(&served.seen.dropped), 0);
}

#[test]
fn over_the_connection_limit_is_503_and_heals() {
    let limits = HttpLimits {
        connections_max: 8,
        ..HttpLimits::default()
    };
    let served = serve_app(limits);
    let held: Vec<_> = (0..8)
        .map(|_| {
            let mut reader = BufReader::new(served.connect());
            let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
            reader.get_mut().write_all(get).unwrap();
            assert_eq!(read_answer_from(&mut reader).status, 200);
            reader
        })
        .collect();
    for _ in 0..20 {
        let answer = served.get("/");
        assert_error(&answer, 503, "connection_limit");
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    drop(held);
    wait_until("a connection is accepted again", || {
        served.get("/").status == 200
    });
    let (_, counts) = served.end(PATIENCE);
    assert!(counts.over_limit >= 20);
}

#[test]
fn bodies_together_are_bounded_and_given_back() {
    let limits = HttpLimits {
        bodies: BodyBudget::new(10_000),
        ..HttpLimits::default()
    };
    let budget = limits.bodies.clone();
    let served = serve_app(limits);
    for _ in 0..20 {
        assert_eq!(served.post("/echo", &[b'x'; 9_000]).status, 200);
    }
    let answer = served.post("/echo", &[b'x'; 10_001]);
    assert_error(&answer, 503, "overloaded");
    assert!(answer.text().contains("10000 bytes"), "{}", answer.text());
    assert_eq!(served.post("/echo", &[b'x'; 9_000]).status, 200);
    let begun = std::time::Instant::now();
    while budget.bytes_held() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{budget:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_transfer_coding_that_is_not_understood_is_501() {
    let served = serve_app(HttpLimits::default());
    for coding in ["gzip, chunked", "gzip", "identity, chunked"] {
        let request = format!(
            "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\n\r\n0\r\n\r\n"
        );
        let answer = served.raw(request.as_bytes());
        assert!(
            answer.status == 501 || answer.status == 400,
            "{coding}: {} {}",
            answer.status,
            answer.text()
        );
    }
    let chunked =
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
    assert_eq!(served.raw(chunked).status, 200);
}
