//! Server-sent events: the framing, and an answer that is not buffered on its way.

use super::response::Response;
use super::stream::BodySender;
use bytes::Bytes;
use hyper::StatusCode;

/// The last event of an OpenAI stream.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A comment: keeps the connection alive and says nothing.
pub const HEARTBEAT: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// A 200 answer that streams events. Spawn a task that feeds the sender; dropping the sender
/// ends the stream.
pub fn stream() -> (Response, BodySender) {
    let (response, sender) = Response::stream(StatusCode::OK, "text/event-stream");
    (headers(response), sender)
}

/// A 200 answer whose events `produce` makes. Its future runs inside the connection and is
/// dropped when the client leaves: cancellation is Drop.
pub fn producing<F>(produce: impl FnOnce(BodySender) -> F) -> Response
where
    F: Future<Output = ()> + 'static,
{
    headers(Response::producing(
        StatusCode::OK,
        "text/event-stream",
        produce,
    ))
}

fn headers(response: Response) -> Response {
    response
        .header("cache-control", "no-cache")
        .header("x-accel-buffering", "no")
}

/// An event with `text` as its data; several lines become several data lines.
pub fn data(text: &str) -> Bytes {
    let mut event = String::with_capacity(text.len() + 8);
    push_data(text, &mut event);
    event.into()
}

/// An event with a name.
pub fn event(name: &str, text: &str) -> Bytes {
    let mut event = String::with_capacity(name.len() + text.len() + 16);
    event.push_str("event: ");
    event.extend(name.chars().filter(|c| *c != '\n' && *c != '\r'));
    event.push('\n');
    push_data(text, &mut event);
    event.into()
}

fn push_data(text: &str, event: &mut String) {
    for line in text.split('\n') {
        event.push_str("data: ");
        event.push_str(line.strip_suffix('\r').unwrap_or(line));
        event.push('\n');
    }
    event.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_names_are_framed() {
        assert_eq!(data("a"), "data: a\n\n");
        assert_eq!(data("a\r\nb"), "data: a\ndata: b\n\n");
        assert_eq!(event("er\nror", "x"), "event: error\ndata: x\n\n");
    }
}
