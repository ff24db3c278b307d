//! One shard serves a small JSON; plain threads load it and print requests/s and latency.
//!
//! ```text
//! cargo run --release -p kvserve-runtime --example http_hello -- [CONNECTIONS [SECONDS]]
//! cargo run --release -p kvserve-runtime --example http_hello -- serve 127.0.0.1:8080
//! ```
//!
//! Load and server share the machine's cores, so the figure is a floor for the server.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

use hdrhistogram::Histogram;
use kvserve_runtime::http::{Drain, HttpLimits, Response, StatusCode, handler, serve};
use kvserve_runtime::net::TcpListener;
use kvserve_runtime::shard::ShardHandle;
use kvserve_runtime::{Deadline, Nanos, ShardConfig};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest latency recorded: a minute, in nanoseconds.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let drain = Drain::new();
    if arguments.first().is_some_and(|first| first == "serve") {
        let address = arguments.get(1).map_or("127.0.0.1:8080", String::as_str);
        let (address, thread) = start(address.parse()?, drain)?;
        println!("http://{address}/");
        thread.join().map_err(|_| "the shard ended by a panic")?;
        return Ok(());
    }
    let connections = number(&arguments, 0, 32)?;
    let seconds = number(&arguments, 1, 3)?;
    let (address, thread) = start(([127, 0, 0, 1], 0).into(), drain.clone())?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let clients: Vec<_> = (0..connections)
        .map(|_| std::thread::spawn(move || load(address, end)))
        .collect();
    let mut all = Histogram::<u64>::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
    for client in clients {
        let one = client.join().map_err(|_| "a client ended by a panic")??;
        all.add(one)?;
    }
    println!(
        "{connections} connections: {:.0} requests/s, p50 {:.0} µs, p99 {:.0} µs",
        all.len() as f64 / seconds as f64,
        all.value_at_quantile(0.5) as f64 / 1e3,
        all.value_at_quantile(0.99) as f64 / 1e3,
    );
    drain.begin(Deadline::after(Nanos::now(), Duration::from_secs(5)));
    thread.join().map_err(|_| "the shard ended by a panic")?;
    Ok(())
}

fn number(arguments: &[String], at: usize, default: u64) -> Result<u64, std::num::ParseIntError> {
    arguments.get(at).map_or(Ok(default), |text| text.parse())
}

type Started = (SocketAddr, ShardHandle<()>);

fn start(address: SocketAddr, drain: Drain) -> std::io::Result<Started> {
    let config = ShardConfig {
        name: "http".to_owned(),
        core: None,
    };
    let (tell, told) = std::sync::mpsc::channel();
    let thread = kvserve_runtime::testing::launch(config, move |shard| async move {
        let listener = match TcpListener::bind(address, false) {
            Ok(listener) => listener,
            Err(error) => {
                let _ = tell.send(Err(error));
                return;
            }
        };
        let _ = tell.send(listener.local_addr());
        let hello = handler(|_request| async {
            Response::json(StatusCode::OK, "{\"hello\":\"world\",\"from\":\"a shard\"}")
        });
        serve(shard, listener, HttpLimits::default(), hello, drain).await;
    })?;
    let address = told
        .recv()
        .unwrap_or_else(|_| Err(std::io::Error::other("the shard did not start")))?;
    Ok((address, thread))
}

/// Sends requests on one kept connection until `end`; gives their latencies in nanoseconds.
fn load(address: SocketAddr, end: Instant) -> std::io::Result<Histogram<u64>> {
    let mut latencies =
        Histogram::<u64>::new_with_bounds(1, LATENCY_NS_MAX, 3).map_err(std::io::Error::other)?;
    let mut socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut buffer = [0; 4096];
    loop {
        let start = Instant::now();
        if start > end {
            return Ok(latencies);
        }
        socket.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")?;
        let mut length = 0;
        while !buffer[..length].ends_with(b"}") {
            match socket.read(&mut buffer[length..])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => length += count,
            }
        }
        latencies.saturating_record(start.elapsed().as_nanos() as u64);
    }
}
