//! The client: kept connections, dead ones, deadlines, limits, cancels.

mod http_support;

use bytes::Bytes;
use http_support::*;
use hyper::Request;
use kvserve_runtime::http::{
    Client, ClientError, ClientLimits, ClientStage, HttpLimits, Resendable,
};
use kvserve_runtime::{Deadline, Nanos, Shard};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn within(span: Duration) -> Deadline {
    Deadline::after(Nanos::now(), span)
}

fn soon() -> Deadline {
    within(PATIENCE)
}

fn get(path: &str) -> Request<Bytes> {
    Request::get(path).body(Bytes::new()).unwrap()
}

fn post(path: &str, body: impl Into<Bytes>) -> Request<Bytes> {
    Request::post(path).body(body.into()).unwrap()
}

/// Runs `body` with a client on a shard of its own.
fn with_client<F: Future<Output = ()> + 'static>(
    limits: ClientLimits,
    body: impl FnOnce(Client, Shard) -> F + Send + 'static,
) {
    let thread = kvserve_runtime::testing::launch(config("client-test"), move |shard| {
        let client = Client::new(shard.clone(), limits);
        body(client, shard)
    });
    thread.unwrap().join().unwrap();
}

/// A server of plain threads: `serve` gets each connection with its number.
fn plain_server(serve: impl Fn(usize, TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (number, socket) in listener.incoming().enumerate() {
            serve(number, socket.unwrap());
        }
    });
    address
}

fn read_head(socket: &mut TcpStream) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if socket.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(head)
}

#[test]
fn a_connection_is_used_again() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        for round in 0..30 {
            let body = format!("round {round}");
            let mut answer = client
                .send(address, post("/echo", body.clone()), soon())
                .await
                .unwrap();
            assert_eq!(answer.status, 200);
            assert_eq!(answer.read_all(1000, soon()).await.unwrap(), body);
            // An answer without a body is at its end at once.
            drop(client.send(address, get("/nowhere"), soon()).await.unwrap());
            // A streamed one when its end was read.
            let mut answer = client
                .send(address, get("/events?n=3"), soon())
                .await
                .unwrap();
            let text = answer.read_all(1000, soon()).await.unwrap();
            assert!(text.ends_with(b"data: [DONE]\n\n"));
        }
        assert_eq!((client.connected(), client.open()), (1, 1));
        client.forget(address);
        assert_eq!(client.open(), 0);
    });
}

#[test]
fn forwarded_framing_headers_do_no_harm() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        let mut request = post("http://elsewhere:1/echo?x=1", "hello");
        let headers = request.headers_mut();
        headers.insert("content-length", "999".parse().unwrap());
        headers.insert("transfer-encoding", "chunked".parse().unwrap());
        let mut answer = client.send(address, request, soon()).await.unwrap();
        assert_eq!(answer.read_all(100, soon()).await.unwrap(), "hello");
    });
}

#[test]
fn large_bodies_come_whole_both_ways() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        let body: Bytes = (0..5_000_000_u32).map(|i| (i * 13 % 251) as u8).collect();
        let mut answer = client
            .send(address, post("/echo", body.clone()), soon())
            .await
            .unwrap();
        let back = answer.read_all(body.len(), soon()).await.unwrap();
        assert!(back == body);
        let mut answer = client
            .send(address, post("/echo", body.clone()), soon())
            .await
            .unwrap();
        let error = answer.read_all(4_999_999, soon()).await.unwrap_err();
        assert!(
            matches!(
                error,
                ClientError::TooLarge {
                    bytes_max: 4_999_999,
                    ..
                }
            ),
            "{error}"
        );
        drop(answer);
        assert_eq!(client.open(), 0);
    });
}

#[test]
fn chunks_come_as_they_are_sent() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        // 1,000 s between two events.
        let path = "/events?n=2&ms=1000000";
        let mut answer = client.send(address, get(path), soon()).await.unwrap();
        assert_eq!(answer.chunk(soon()).await.unwrap().unwrap(), "data: 0\n\n");
        let error = answer
            .chunk(within(Duration::from_millis(50)))
            .await
            .unwrap_err();
        let stage = ClientStage::Body;
        assert!(
            matches!(error, ClientError::Deadline { stage: s, .. } if s == stage),
            "{error}"
        );
        // After an error the body is over.
        assert!(answer.chunk(soon()).await.unwrap().is_none());
    });
}

#[test]
fn dropping_an_answer_cancels_at_the_server() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        let path = "/events?n=2&ms=1000000";
        let mut answer = client.send(address, get(path), soon()).await.unwrap();
        answer.chunk(soon()).await.unwrap();
        drop(answer);
        assert_eq!(client.open(), 0);
    });
    wait_until("the stream is dropped", || {
        Seen::get(&served.seen.dropped) == 1
    });
}

#[test]
fn a_deadline_before_the_head_cancels_at_the_server() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    with_client(ClientLimits::default(), move |client, _| async move {
        let error = client
            .send(address, get("/hang"), within(Duration::from_millis(100)))
            .await
            .err()
            .unwrap();
        let stage = ClientStage::Head;
        assert!(
            matches!(error, ClientError::Deadline { stage: s, .. } if s == stage),
            "{error}"
        );
        assert_eq!(client.open(), 0);
    });
    wait_until("the handler is dropped", || {
        Seen::get(&served.seen.dropped) == 1
    });
}

#[test]
fn dropping_the_send_cancels_at_the_server() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    let seen = served.seen.clone();
    with_client(ClientLimits::default(), move |client, shard| async move {
        let call = {
            let client = client.clone();
            shard.spawn(async move { client.send(address, get("/hang"), soon()).await.is_ok() })
        };
        while Seen::get(&seen.started) == 0 {
            shard.sleep(Duration::from_millis(2)).await;
        }
        drop(call);
        shard.sleep(Duration::from_millis(20)).await;
        assert_eq!(client.open(), 0);
    });
    wait_until("the handler is dropped", || {
        Seen::get(&served.seen.dropped) == 1
    });
}

#[test]
fn nobody_there_is_refused_at_once() {
    with_client(ClientLimits::default(), |client, _| async move {
        let gone = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let start = Instant::now();
        let error = client.send(gone, get("/"), soon()).await.err().unwrap();
        assert!(matches!(error, ClientError::Refused { .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(2));
        assert_eq!(client.open(), 0);
    });
}

#[test]
fn a_full_queue_is_a_connect_timeout() {
    // A listener whose queue is full drops further connects silently.
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let _first = TcpStream::connect(address).unwrap();
    let limits = ClientLimits {
        connect: Duration::from_millis(200),
        ..ClientLimits::default()
    };
    with_client(limits, move |client, _| async move {
        let error = loop {
            // The queue may take one or two more than it says.
            match client
                .send(address, get("/"), within(Duration::from_secs(1)))
                .await
            {
                Err(ClientError::Deadline {
                    stage: ClientStage::Head,
                    ..
                }) => {}
                Err(error) => break error,
                Ok(_) => panic!("an answer from nobody"),
            }
        };
        assert!(
            matches!(error, ClientError::ConnectTimeout { .. }),
            "{error}"
        );
        let error = client
            .send(address, get("/"), within(Duration::from_millis(50)))
            .await;
        let error = error.err().unwrap();
        let stage = ClientStage::Connect;
        assert!(
            matches!(error, ClientError::Deadline { stage: s, .. } if s == stage),
            "{error}"
        );
    });
}

/// Answers one request a connection and then closes it, after the client has kept it.
fn closes_after_one() -> SocketAddr {
    plain_server(|_, mut socket| {
        std::thread::spawn(move || {
            if read_head(&mut socket).is_some() {
                let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
            }
        });
    })
}

#[test]
fn a_connection_closed_while_idle_is_not_used() {
    let address = closes_after_one();
    with_client(ClientLimits::default(), move |client, shard| async move {
        for round in 1..=10 {
            // A POST without leave to be sent twice: it must not meet the dead connection.
            let mut answer = client.send(address, post("/", "x"), soon()).await.unwrap();
            assert_eq!(answer.read_all(10, soon()).await.unwrap(), "ok");
            shard.sleep(Duration::from_millis(20)).await;
            assert_eq!(client.connected(), round);
        }
    });
}

/// Answers the first request of a connection and closes it on the second without a byte.
fn dies_on_the_second() -> SocketAddr {
    plain_server(|_, mut socket| {
        std::thread::spawn(move || {
            read_head(&mut socket);
            let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
            read_head(&mut socket);
        });
    })
}

#[test]
fn a_request_on_a_dying_connection_is_sent_again_if_it_may_be() {
    let address = dies_on_the_second();
    with_client(ClientLimits::default(), move |client, _| async move {
        let mut first = client.send(address, get("/"), soon()).await.unwrap();
        first.read_all(10, soon()).await.unwrap();
        let mut second = client.send(address, get("/"), soon()).await.unwrap();
        assert_eq!(second.read_all(10, soon()).await.unwrap(), "ok");
        assert_eq!(client.connected(), 2);
        // A POST may have been acted upon: it is the caller's decision.
        let error = client
            .send(address, post("/", ""), soon())
            .await
            .err()
            .unwrap();
        let unanswered = matches!(
            error,
            ClientError::Closed {
                bytes_received: 0,
                ..
            }
        );
        assert!(unanswered, "{error}");
        let mut third = client.send(address, get("/"), soon()).await.unwrap();
        third.read_all(10, soon()).await.unwrap();
        let mut allowed = post("/", "");
        allowed.extensions_mut().insert(Resendable);
        let mut fourth = client.send(address, allowed, soon()).await.unwrap();
        assert_eq!(fourth.read_all(10, soon()).await.unwrap(), "ok");
    });
}

#[test]
fn a_cut_answer_is_closed_and_garbage_is_protocol() {
    let address = plain_server(|number, mut socket| {
        read_head(&mut socket);
        let answer: &[u8] = match number {
            0 => b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
            1 => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            2 => b"HTTP/1.1 200",
            3 => b"SSH-2.0-nonsense\r\n\r\n",
            _ => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        };
        socket.write_all(answer).unwrap();
    });
    with_client(ClientLimits::default(), move |client, _| async move {
        for _ in 0..2 {
            let mut answer = client.send(address, get("/"), soon()).await.unwrap();
            let error = answer.read_all(100, soon()).await.unwrap_err();
            assert!(matches!(error, ClientError::Closed { .. }), "{error}");
        }
        let error = client.send(address, get("/"), soon()).await.err().unwrap();
        let some = matches!(
            error,
            ClientError::Closed {
                bytes_received: 12,
                ..
            }
        );
        assert!(some, "{error}");
        let error = client.send(address, get("/"), soon()).await.err().unwrap();
        assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
        let mut answer = client.send(address, get("/"), soon()).await.unwrap();
        let error = answer.read_all(100, soon()).await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
        drop(answer);
        assert_eq!(client.open(), 0);
    });
}

#[test]
fn the_pool_is_bounded_in_number_and_age() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    let limits = ClientLimits {
        idle_per_host_max: 2,
        idle_age_max: Duration::from_millis(100),
        open_max: 4,
        ..ClientLimits::default()
    };
    with_client(limits, move |client, shard| async move {
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(client.send(address, get("/"), soon()).await.unwrap());
        }
        let error = client.send(address, get("/"), soon()).await.err().unwrap();
        assert!(
            matches!(error, ClientError::TooManyConnections { open_max: 4 }),
            "{error}"
        );
        for mut answer in answers {
            answer.read_all(100, soon()).await.unwrap();
        }
        assert_eq!(client.open(), 2);
        shard.sleep(Duration::from_millis(150)).await;
        let mut answer = client.send(address, get("/"), soon()).await.unwrap();
        answer.read_all(100, soon()).await.unwrap();
        assert_eq!(client.connected(), 5);
        assert_eq!(client.open(), 1);
    });
}
