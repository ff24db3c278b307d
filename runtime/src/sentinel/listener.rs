//! The health port: just enough HTTP/1.1 for `GET /health`, driven by the sentinel's poll.
//!
//! Each connection is one request of at most [`REQUEST_MAX`] bytes, answered and closed. There
//! are at most [`CONNECTIONS_MAX`]; the oldest gives way to a new one, so that slow clients
//! cannot keep a health check out.

use super::health::HealthView;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Health checks come from a handful of places (`up`, the proxy, systemd, a scraper).
const CONNECTIONS_MAX: usize = 16;
/// A request line and the headers that clients send by themselves; more is refused.
const REQUEST_MAX: usize = 4096;
/// How long a client may take for its request: on one host it is a millisecond.
const REQUEST_TIME: Duration = Duration::from_secs(2);

pub(super) struct HealthListener {
    listener: TcpListener,
    connections: Vec<Connection>,
    /// Accepting failed (no descriptors): try again at the next tick, not at once.
    paused: bool,
}

struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    ends: Instant,
}

/// What became of a connection after it was looked at.
#[derive(PartialEq)]
enum Progress {
    Waiting,
    Done,
}

impl HealthListener {
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        let bound = socket
            .bind(&address.into())
            .and_then(|()| socket.listen(64));
        bound.map_err(|error| {
            let why = format!("the health port cannot listen on {address}: {error}");
            io::Error::new(error.kind(), why)
        })?;
        Ok(HealthListener {
            listener: socket.into(),
            connections: Vec::with_capacity(CONNECTIONS_MAX),
            paused: false,
        })
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Descriptors to wait on for readability.
    pub fn descriptors(&self, out: &mut Vec<RawFd>) {
        if !self.paused {
            out.push(self.listener.as_raw_fd());
        }
        out.extend(self.connections.iter().map(|c| c.stream.as_raw_fd()));
    }

    /// Takes what came in. Never blocks.
    pub fn serve(&mut self, now: Instant, health: &HealthView) {
        self.accept(now);
        self.connections
            .retain_mut(|connection| connection.advance(health) == Progress::Waiting);
    }

    /// Once a tick: lets go of connections whose time is over.
    pub fn tick(&mut self, now: Instant) {
        self.paused = false;
        self.connections.retain(|connection| now < connection.ends);
    }

    fn accept(&mut self, now: Instant) {
        // At most a backlog's worth a call: the rest comes at the next.
        for _ in 0..CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.connections.remove(0);
                    }
                    self.connections.push(Connection {
                        stream,
                        request: Vec::new(),
                        ends: now + REQUEST_TIME,
                    });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.paused = true;
                    return;
                }
            }
        }
    }
}

impl Connection {
    fn advance(&mut self, health: &HealthView) -> Progress {
        let mut buffer = [0u8; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Progress::Done,
                Ok(count) => self.request.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::Waiting,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Progress::Done,
            }
            let complete = self.request.windows(4).any(|end| end == b"\r\n\r\n");
            if complete || self.request.len() >= REQUEST_MAX {
                let answer = match complete {
                    true => answer(&self.request, health),
                    false => response(431, "{\"status\":\"request_too_large\"}", true),
                };
                self.send(&answer);
                return Progress::Done;
            }
        }
    }

    /// The answer is far smaller than any socket buffer: it fits whole, or the client, which
    /// filled its window before, does without.
    fn send(&mut self, answer: &[u8]) {
        if let Ok(written) = self.stream.write(answer)
            && written == answer.len()
        {
            let _client_left = self.stream.shutdown(Shutdown::Write);
        }
    }
}

fn answer(request: &[u8], health: &HealthView) -> Vec<u8> {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target) = (words.next().unwrap_or(&[]), words.next().unwrap_or(&[]));
    let path = target.split(|byte| *byte == b'?').next().unwrap_or(&[]);
    let with_body = match method {
        b"GET" => true,
        b"HEAD" => false,
        _ => return response(405, "{\"status\":\"method_not_allowed\"}", true),
    };
    if path != b"/health" {
        return response(404, "{\"status\":\"only_health_is_here\"}", with_body);
    }
    let (status, body) = health.answer();
    response(status, &body, with_body)
}

fn response(status: u16, body: &str, with_body: bool) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    };
    let length = body.len();
    let body = if with_body { body } else { "" };
    format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_line(request: &str) -> String {
        let answer = answer(request.as_bytes(), &HealthView::default());
        let text = String::from_utf8(answer).unwrap();
        text.lines().next().unwrap().to_owned()
    }

    #[test]
    fn only_get_and_head_of_health_are_answered() {
        assert_eq!(
            first_line("GET /health HTTP/1.1\r\n\r\n"),
            "HTTP/1.1 200 OK"
        );
        assert_eq!(
            first_line("HEAD /health?x HTTP/1.1\r\n\r\n"),
            "HTTP/1.1 200 OK"
        );
        assert_eq!(
            first_line("GET / HTTP/1.1\r\n\r\n"),
            "HTTP/1.1 404 Not Found"
        );
        assert!(first_line("POST /health HTTP/1.1\r\n\r\n").contains("405"));
        assert!(first_line("\r\n\r\n").contains("405"));
    }

    #[test]
    fn slow_clients_give_way_and_time_out() {
        let health = HealthView::default();
        let mut port = HealthListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = port.local_addr().unwrap();
        let start = Instant::now();
        let slow: Vec<TcpStream> = (0..CONNECTIONS_MAX + 4)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        for _ in 0..4 {
            port.serve(start, &health);
        }
        assert_eq!(port.connections.len(), CONNECTIONS_MAX);
        port.tick(start + REQUEST_TIME);
        assert!(port.connections.is_empty());
        drop(slow);
    }

    #[test]
    fn an_endless_request_is_refused_at_its_bound() {
        let health = HealthView::default();
        let mut port = HealthListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut client = TcpStream::connect(port.local_addr().unwrap()).unwrap();
        client.write_all(&[b'x'; 2 * REQUEST_MAX]).unwrap();
        let start = Instant::now();
        while port.connections.is_empty() && start.elapsed() < Duration::from_secs(5) {
            port.accept(start);
        }
        while !port.connections.is_empty() && start.elapsed() < Duration::from_secs(5) {
            port.serve(start, &health);
        }
        assert!(port.connections.is_empty());
    }
}
