//! A blocking HTTP client of a few lines: HTTP/1.0, so that a body simply ends with the
//! connection.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than any request of these tests may take; a liveness bound, not a speed.
const READ_LIMIT: Duration = Duration::from_secs(90);

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    /// The lines above the body.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// Value of a header, by its lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.to_ascii_lowercase() == name).then_some(value.trim())
        })
    }

    /// Code of the error object.
    pub fn error_code(&self) -> String {
        let code = &self.json()["error"]["code"];
        code.as_str().unwrap_or_default().to_string()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body)
            .unwrap_or_else(|error| panic!("no JSON ({error}) in: {}", self.body))
    }
}

fn send(address: SocketAddr, head: &str, body: &str) -> std::io::Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(READ_LIMIT))?;
    stream.set_write_timeout(Some(READ_LIMIT))?;
    write!(
        stream,
        "{head} HTTP/1.0\r\nhost: test\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(BufReader::new(stream))
}

fn read_head(reader: &mut BufReader<TcpStream>) -> std::io::Result<(u16, String)> {
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    let status = head
        .split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    Ok((status, head))
}

fn whole(address: SocketAddr, head: &str, body: &str) -> std::io::Result<Answer> {
    let mut reader = send(address, head, body)?;
    let (status, head) = read_head(&mut reader)?;
    let mut body = String::new();
    reader.read_to_string(&mut body)?;
    Ok(Answer { status, head, body })
}

pub fn try_post(address: SocketAddr, path: &str, body: &Value) -> std::io::Result<Answer> {
    whole(address, &format!("POST {path}"), &body.to_string())
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    try_post(address, path, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
}

/// A POST with further header lines, each ending with CRLF.
pub fn post_with(address: SocketAddr, path: &str, headers: &str, body: &Value) -> Answer {
    // The request line ends where further headers may begin.
    let head = format!("POST {path} HTTP/1.0\r\n{headers}x-end: 1");
    whole_raw(address, &head, &body.to_string())
        .unwrap_or_else(|error| panic!("POST {path}: {error}"))
}

fn whole_raw(address: SocketAddr, head: &str, body: &str) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(READ_LIMIT))?;
    write!(
        stream,
        "{head}\r\nhost: test\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(stream);
    let (status, head) = read_head(&mut reader)?;
    let mut body = String::new();
    reader.read_to_string(&mut body)?;
    Ok(Answer { status, head, body })
}

pub fn get(address: SocketAddr, path: &str) -> std::io::Result<Answer> {
    whole(address, &format!("GET {path}"), "")
}

/// A streamed answer. Dropping it closes the connection, as a client that leaves does.
pub struct Stream {
    reader: BufReader<TcpStream>,
    pub status: u16,
}

pub fn post_stream(address: SocketAddr, path: &str, body: &Value) -> std::io::Result<Stream> {
    let mut reader = send(address, &format!("POST {path}"), &body.to_string())?;
    let (status, _) = read_head(&mut reader)?;
    Ok(Stream { reader, status })
}

impl Stream {
    /// The next `data:` line; `None` at the end of the connection.
    pub fn next_data(&mut self) -> std::io::Result<Option<String>> {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return Ok(Some(data.to_string()));
            }
        }
    }

    /// All `data:` lines to the end, and whether the connection ended in order.
    pub fn rest(mut self) -> (Vec<String>, bool) {
        let mut lines = Vec::new();
        loop {
            match self.next_data() {
                Ok(Some(line)) => lines.push(line),
                Ok(None) => return (lines, true),
                Err(_) => return (lines, false),
            }
        }
    }
}
