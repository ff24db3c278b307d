//! Asking a node whether it is ready, with plain sockets: the supervisor has no runtime.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Bound of each step of the question.
const STEP: Duration = Duration::from_millis(500);
/// The answer's first bytes are enough.
const ANSWER_MAX: u64 = 4096;

/// Asks `GET /ready`.
///
/// # Errors
/// What is missing, in words.
pub fn check(address: SocketAddr) -> Result<(), String> {
    let answer = ask(address).map_err(|_| format!("the proxy on {address} to listen"))?;
    if answer.starts_with("HTTP/1.1 200") {
        return Ok(());
    }
    let body = answer.split("\r\n\r\n").nth(1).unwrap_or_default();
    Err(format!("the proxy to be ready: {}", body.trim()))
}

fn ask(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, STEP)?;
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(STEP))?;
    stream.write_all(b"GET /ready HTTP/1.1\r\nhost: kvserve\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
