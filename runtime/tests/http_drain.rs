//! A drain answers what runs and what is on its way, closes what idles, and ends.

mod http_support;

use http_support::*;
use kvserve_runtime::http::HttpLimits;
use kvserve_runtime::{Deadline, Nanos};
use std::io::{BufReader, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn requests_that_run_are_answered() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    let clients: Vec<_> = (0..40)
        .map(|number| {
            std::thread::spawn(move || {
                let path = match number % 2 {
                    0 => "/sleep?ms=400",
                    _ => "/events?n=40&ms=10",
                };
                request(address, "GET", path, &[], b"", PATIENCE).unwrap()
            })
        })
        .collect();
    wait_until("all run", || Seen::get(&served.seen.started) == 40);
    let seen = served.seen.clone();
    let (end, _) = served.end(PATIENCE);
    assert_eq!(end.cut, 0);
    assert_eq!(Seen::get(&seen.finished), 40);
    for client in clients {
        let answer = client.join().unwrap();
        assert_eq!(answer.status, 200);
        assert!(answer.text().ends_with("[DONE]\n\n") || answer.text() == "{\"slept\":true}");
    }
    assert!(std::net::TcpStream::connect(address).is_err());
}

/// Clients that send request after request on kept connections while the drain begins: each
/// request sent is answered whole; a connection ends only with an answer that says so.
#[test]
fn a_drain_under_load_cuts_no_request() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let (stop, answered) = (stop.clone(), answered.clone());
            std::thread::spawn(move || {
                let socket = std::net::TcpStream::connect(address).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut reader = BufReader::new(socket);
                while !stop.load(Ordering::SeqCst) {
                    let get = b"GET /sleep?ms=3 HTTP/1.1\r\nhost: x\r\n\r\n";
                    reader.get_mut().write_all(get).unwrap();
                    let answer = read_answer_from(&mut reader);
                    assert_eq!(answer.status, 200);
                    answered.fetch_add(1, Ordering::SeqCst);
                    if answer.header("connection") == Some("close") {
                        return true;
                    }
                }
                false
            })
        })
        .collect();
    wait_until("the load runs", || answered.load(Ordering::SeqCst) > 200);
    let (end, counts) = served.end(PATIENCE);
    assert_eq!(end.cut, 0);
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        assert!(client.join().unwrap(), "told to close by an answer");
    }
    assert_eq!(counts.requests, answered.load(Ordering::SeqCst));
}

#[test]
fn idle_connections_do_not_hold_a_drain() {
    let served = serve_app(HttpLimits::default());
    let mut reader = BufReader::new(served.connect());
    let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    reader.get_mut().write_all(get).unwrap();
    assert_eq!(read_answer_from(&mut reader).status, 200);
    let _silent = served.connect();
    let start = Instant::now();
    let (end, counts) = served.end(Duration::from_secs(60));
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    assert_eq!((end.cut, counts.connections_open), (0, 0));
    assert!(is_closed(reader.get_mut()));
}

#[test]
fn a_connection_in_the_kernels_queue_is_answered() {
    let served = serve_app(HttpLimits::default());
    // Many connects and the drain at once: some are still in the queue then.
    let mut sockets: Vec<_> = (0..50).map(|_| served.connect()).collect();
    served.drain.begin(Deadline::after(Nanos::now(), PATIENCE));
    for socket in &mut sockets {
        let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        socket.write_all(get).unwrap();
    }
    for socket in sockets {
        assert_eq!(read_answer(socket).status, 200);
    }
}

#[test]
fn the_deadline_cuts_what_still_runs() {
    let served = serve_app(HttpLimits::default());
    let mut socket = served.connect();
    let get = b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";
    socket.write_all(get).unwrap();
    wait_until("it runs", || Seen::get(&served.seen.started) == 1);
    let seen = served.seen.clone();
    let (end, counts) = served.end(Duration::from_millis(200));
    assert_eq!((end.cut, counts.connections_open), (1, 0));
    assert_eq!(Seen::get(&seen.dropped), 1);
    assert!(is_closed(&mut socket));
}
