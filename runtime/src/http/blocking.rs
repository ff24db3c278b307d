//! A small blocking client on plain sockets, for tests and tools. Never for a shard: it blocks.
//! One connection a request; every read and write is bounded by the time-out given.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest head, or line, that is taken.
const LINE_BYTES_MAX: u64 = 64 * 1024;

/// Longest whole body that is taken: far above any answer of a test.
const BODY_BYTES_MAX: usize = 256 * 1024 * 1024;

/// An answer read whole.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Names in lower case, with their values, in order.
    pub headers: Vec<(String, String)>,
    /// The body, unframed.
    pub body: Vec<u8>,
}

impl Answer {
    /// The first value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The body as text (invalid UTF-8 replaced).
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// An answer whose body is still on its way. Dropping it closes the connection.
pub struct Streaming {
    /// The status code.
    pub status: u16,
    /// Names in lower case, with their values, in order.
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    framing: Framing,
}

enum Framing {
    Length(u64),
    Chunked,
    ToClose,
    Done,
}

/// Sends a request and reads the whole answer. `timeout` bounds the connect, the whole answer,
/// and each single read.
///
/// # Errors
/// What the sockets say; `InvalidData` when the answer is not HTTP/1.1; `UnexpectedEof` when
/// it is cut; `TimedOut`.
pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    timeout: Duration,
) -> io::Result<Answer> {
    let end = Instant::now() + timeout;
    let mut streaming = stream(address, method, path, headers, body, timeout)?;
    let mut whole = Vec::new();
    while let Some(piece) = streaming.next_piece()? {
        whole.extend_from_slice(&piece);
        if whole.len() > BODY_BYTES_MAX {
            return Err(invalid("the body is longer than 256 MiB"));
        }
        if Instant::now() > end {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(Answer {
        status: streaming.status,
        headers: std::mem::take(&mut streaming.headers),
        body: whole,
    })
}

/// Sends a request and reads the head of the answer.
///
/// # Errors
/// Those of [`request`].
pub fn stream(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    timeout: Duration,
) -> io::Result<Streaming> {
    let mut socket = TcpStream::connect_timeout(&address, timeout)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    let mut message =
        format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    for (name, value) in headers {
        message.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() || method == "POST" {
        message.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    message.push_str("\r\n");
    let mut message = message.into_bytes();
    message.extend_from_slice(body);
    // The server may answer (413) and close before it has read everything: then the answer
    // counts, not the failed write.
    let written = socket.write_all(&message);
    match Streaming::read_head(BufReader::new(socket), method == "HEAD") {
        Ok(streaming) => Ok(streaming),
        Err(error) => Err(written.err().unwrap_or(error)),
    }
}

impl Streaming {
    /// Reads the head of an answer from a connection, e.g. one that a test wrote raw bytes to.
    ///
    /// # Errors
    /// Those of [`request`].
    pub fn read_head(mut reader: BufReader<TcpStream>, head_only: bool) -> io::Result<Self> {
        loop {
            let line = read_line(&mut reader)?;
            let status: u16 = line
                .strip_prefix("HTTP/1.")
                .and_then(|rest| rest.get(2..5)?.parse().ok())
                .ok_or_else(|| invalid(&format!("no status line: {line:?}")))?;
            let mut headers = Vec::new();
            loop {
                let line = read_line(&mut reader)?;
                if line.is_empty() {
                    break;
                }
                let (name, value) = line
                    .split_once(':')
                    .ok_or_else(|| invalid(&format!("no header: {line:?}")))?;
                headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
            if status < 200 {
                continue;
            }
            let framing = framing(&headers, status, head_only)?;
            return Ok(Streaming {
                status,
                headers,
                reader,
                framing,
            });
        }
    }

    /// The first value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The next piece of the body (a chunk, or what one read gave), or `None` at its end.
    ///
    /// # Errors
    /// Those of [`request`].
    pub fn next_piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        match self.framing {
            Framing::Done => Ok(None),
            Framing::Length(0) => {
                self.framing = Framing::Done;
                Ok(None)
            }
            Framing::Length(left) => {
                let mut piece = vec![0; left.min(64 * 1024) as usize];
                let count = self.reader.read(&mut piece)?;
                if count == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                piece.truncate(count);
                self.framing = Framing::Length(left - count as u64);
                Ok(Some(piece))
            }
            Framing::Chunked => self.next_chunk(),
            Framing::ToClose => {
                let mut piece = vec![0; 64 * 1024];
                let count = self.reader.read(&mut piece)?;
                piece.truncate(count);
                if count == 0 {
                    self.framing = Framing::Done;
                    return Ok(None);
                }
                Ok(Some(piece))
            }
        }
    }

    fn next_chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let line = read_line(&mut self.reader)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let length = usize::from_str_radix(digits, 16)
            .map_err(|_| invalid(&format!("no chunk length: {line:?}")))?;
        if length == 0 {
            while !read_line(&mut self.reader)?.is_empty() {}
            self.framing = Framing::Done;
            return Ok(None);
        }
        if length > BODY_BYTES_MAX {
            return Err(invalid("a chunk is longer than 256 MiB"));
        }
        let mut piece = vec![0; length];
        self.reader.read_exact(&mut piece)?;
        if !read_line(&mut self.reader)?.is_empty() {
            return Err(invalid("a chunk is longer than its length"));
        }
        Ok(Some(piece))
    }

    /// The events of a `text/event-stream` body: the data of each, lines joined by `\n`.
    /// Comments and other fields are skipped; the iterator ends with the stream.
    pub fn events(self) -> Events {
        Events {
            streaming: self,
            pending: Vec::new(),
        }
    }

    /// The connection, e.g. to look whether it was closed.
    pub fn into_reader(self) -> BufReader<TcpStream> {
        self.reader
    }
}

/// The events of a stream; see [`Streaming::events`].
pub struct Events {
    streaming: Streaming,
    pending: Vec<u8>,
}

impl Iterator for Events {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        loop {
            if let Some(end) = self.pending.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.pending.drain(..end + 2).collect();
                let text = String::from_utf8_lossy(&event);
                let lines: Vec<&str> = text
                    .lines()
                    .filter_map(|line| line.strip_prefix("data:"))
                    .map(|data| data.strip_prefix(' ').unwrap_or(data))
                    .collect();
                if !lines.is_empty() {
                    return Some(Ok(lines.join("\n")));
                }
                continue;
            }
            if self.pending.len() > BODY_BYTES_MAX {
                return Some(Err(invalid("an event is longer than 256 MiB")));
            }
            match self.streaming.next_piece() {
                Ok(Some(piece)) => self.pending.extend_from_slice(&piece),
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn framing(headers: &[(String, String)], status: u16, head_only: bool) -> io::Result<Framing> {
    if head_only || status == 204 || status == 304 {
        return Ok(Framing::Done);
    }
    if find(headers, "transfer-encoding").is_some_and(|value| value.contains("chunked")) {
        return Ok(Framing::Chunked);
    }
    match find(headers, "content-length") {
        Some(value) => value
            .parse()
            .map(Framing::Length)
            .map_err(|_| invalid(&format!("no content-length: {value:?}"))),
        None => Ok(Framing::ToClose),
    }
}

fn find<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let mut all = headers.iter();
    all.find(|(known, _)| known == name)
        .map(|(_, value)| value.as_str())
}

fn read_line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = Vec::new();
    let count = reader.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if count == 0 || line.last() != Some(&b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    line.pop();
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    String::from_utf8(line).map_err(|_| invalid("a head that is no text"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}
