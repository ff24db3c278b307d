//! The sockets below: both directions at once, vectored calls, futures dropped in mid-wait.

mod http_support;

use http_support::config;
use kvserve_runtime::Shard;
use kvserve_runtime::net::{TcpListener, TcpStream};
use std::future::poll_fn;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

const BYTES: usize = 8_000_000;

fn pattern(at: usize) -> u8 {
    (at * 31 % 251) as u8
}

/// Runs `body` with the two ends of a connection on one shard.
fn with_pair<F: Future<Output = ()> + 'static>(
    body: impl FnOnce(Shard, Rc<TcpStream>, Rc<TcpStream>) -> F + Send + 'static,
) {
    let thread = kvserve_runtime::testing::launch(config("socket-test"), move |shard| async move {
        let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), true).unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = shard.spawn(async move { TcpStream::connect(address).await.unwrap() });
        let (accepted, peer) = listener.accept().await.unwrap();
        let connected = connecting.await;
        assert_eq!(connected.local_addr().unwrap(), peer);
        body(shard, Rc::new(connected), Rc::new(accepted)).await;
    });
    thread.unwrap().join().unwrap();
}

async fn write_pattern(stream: Rc<TcpStream>) {
    let whole: Vec<u8> = (0..BYTES).map(pattern).collect();
    for part in whole.chunks(1_000_000) {
        let (first, rest) = part.split_at(333_333);
        let mut slices = [IoSlice::new(first), IoSlice::new(&[]), IoSlice::new(rest)];
        stream.write_vectored_all(&mut slices).await.unwrap();
    }
}

async fn read_pattern(stream: Rc<TcpStream>) {
    let mut at = 0;
    let (mut first, mut second) = (vec![0; 5_000], vec![0; 70_000]);
    while at < BYTES {
        let mut slices = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        let count = stream.read_vectored(&mut slices).await.unwrap();
        assert!(count > 0, "ended at {at}");
        for (offset, byte) in first.iter().chain(&second).take(count).enumerate() {
            assert_eq!(*byte, pattern(at + offset));
        }
        at += count;
    }
}

#[test]
fn four_streams_of_bytes_at_once_lose_nothing() {
    with_pair(|shard, left, right| async move {
        let tasks = [
            shard.spawn(write_pattern(left.clone())),
            shard.spawn(write_pattern(right.clone())),
            shard.spawn(read_pattern(left)),
            shard.spawn(read_pattern(right)),
        ];
        for task in tasks {
            task.await;
        }
    });
}

#[test]
fn a_read_dropped_while_it_waits_loses_no_byte() {
    with_pair(|shard, left, right| async move {
        let mut got = Vec::new();
        for round in 0..200_u8 {
            let waiting = {
                let right = right.clone();
                shard.spawn(async move { right.read(&mut [0; 16]).await.unwrap() })
            };
            // Let it wait, drop it, and only then send.
            shard.sleep(Duration::from_micros(500)).await;
            drop(waiting);
            left.write_all(&[round; 3]).await.unwrap();
            let mut bytes = [0; 3];
            right.read_exact(&mut bytes).await.unwrap();
            got.push(bytes);
        }
        assert!(
            got.iter()
                .enumerate()
                .all(|(round, bytes)| *bytes == [round as u8; 3])
        );
    });
}

#[test]
fn the_end_of_a_stream_comes_after_its_bytes() {
    with_pair(|shard, left, right| async move {
        left.write_all(b"last words").await.unwrap();
        left.shutdown(std::net::Shutdown::Write).unwrap();
        shard.sleep(Duration::from_millis(5)).await;
        assert!(right.hung_up());
        let mut bytes = [0; 100];
        assert_eq!(right.read(&mut bytes).await.unwrap(), 10);
        assert_eq!(right.read(&mut bytes).await.unwrap(), 0);
        assert_eq!(right.read(&mut bytes).await.unwrap(), 0);
        assert!(right.read_exact(&mut bytes).await.is_err());
        assert!(!left.hung_up());
    });
}

#[test]
fn a_dropped_socket_is_closed_even_if_its_shard_ends_at_once() {
    for way in ["drop", "reset"] {
        let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = plain.local_addr().unwrap();
        let thread =
            kvserve_runtime::testing::launch(config("socket-test"), move |shard| async move {
                let stream = Rc::new(TcpStream::connect(address).await.unwrap());
                let reading = {
                    let stream = stream.clone();
                    shard.spawn(async move { stream.read(&mut [0; 16]).await.is_ok() })
                };
                // The read's registration is out; then everything goes at once.
                shard.sleep(Duration::from_millis(20)).await;
                if way == "reset" {
                    stream.reset();
                }
                drop(reading);
                drop(stream);
            });
        let (mut peer, _) = plain.accept().unwrap();
        thread.unwrap().join().unwrap();
        peer.set_read_timeout(Some(http_support::PATIENCE)).unwrap();
        let end = std::io::Read::read(&mut peer, &mut [0; 16]);
        match way {
            "drop" => assert_eq!(end.unwrap(), 0),
            _ => assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn a_dropped_listener_refuses_at_once() {
    let thread = kvserve_runtime::testing::launch(config("socket-test"), move |shard| async move {
        let listener = TcpListener::bind(([127, 0, 0, 1], 0).into(), false).unwrap();
        let address = listener.local_addr().unwrap();
        // Begin to wait for a connection, and let the kernel know of it.
        poll_fn(|cx| {
            assert!(listener.poll_accept(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        shard.sleep(Duration::from_millis(20)).await;
        drop(listener);
        // Not a turn later: a blocking connect on this very thread.
        assert!(std::net::TcpStream::connect(address).is_err());
    });
    thread.unwrap().join().unwrap();
}
