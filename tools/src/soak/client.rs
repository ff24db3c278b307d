//! HTTP/1.0, so that a body simply ends with the connection.

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than any request may take (60 s, and what a busy machine adds): past it a request has
/// no terminal state.
const NO_END: Duration = Duration::from_secs(120);

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The body.
    pub body: String,
}

impl Answer {
    /// The body as JSON; `Null` if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }
}

/// A streamed answer. Dropping it closes the connection, as a client that leaves does.
pub struct Stream {
    reader: BufReader<TcpStream>,
    /// HTTP status.
    pub status: u16,
}

fn send(address: SocketAddr, line: &str, body: &str) -> io::Result<Stream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(10))?;
    stream.set_read_timeout(Some(NO_END))?;
    stream.set_write_timeout(Some(NO_END))?;
    write!(
        stream,
        "{line} HTTP/1.0\r\nhost: soak\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(stream);
    let mut status = 0;
    loop {
        let mut head = String::new();
        if reader.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if head == "\r\n" {
            return Ok(Stream { reader, status });
        }
        if status == 0 {
            let code = head.split_whitespace().nth(1);
            status = code.and_then(|code| code.parse().ok()).unwrap_or(0);
        }
    }
}

/// `GET path`.
///
/// # Errors
/// Those of the connection.
pub fn get(address: SocketAddr, path: &str) -> io::Result<Answer> {
    send(address, &format!("GET {path}"), "")?.whole()
}

/// `POST path`.
///
/// # Errors
/// Those of the connection.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> io::Result<Answer> {
    stream(address, path, body)?.whole()
}

/// `POST path`, to be read event by event.
///
/// # Errors
/// Those of the connection.
pub fn stream(address: SocketAddr, path: &str, body: &Value) -> io::Result<Stream> {
    send(address, &format!("POST {path}"), &body.to_string())
}

impl Stream {
    /// The rest of the body.
    fn whole(mut self) -> io::Result<Answer> {
        let mut body = String::new();
        self.reader.read_to_string(&mut body)?;
        let status = self.status;
        Ok(Answer { status, body })
    }

    /// The next `data:` line; `None` at the end of the connection.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn next_data(&mut self) -> io::Result<Option<String>> {
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
}
