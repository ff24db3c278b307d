//! Answers that hyper does not give: to what is no HTTP, to heads that are too long or too
//! slow, and to connections over the limit. Written onto the socket as plain bytes.

use super::error_body::error_json;
use super::limits::HttpLimits;
use hyper::StatusCode;

/// A whole response, ready to write; the connection closes after it.
pub(super) fn closing_response(
    status: StatusCode,
    kind: &str,
    code: &str,
    message: &str,
    extra_header: &str,
) -> Vec<u8> {
    let json = error_json(message, kind, None, code);
    format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{extra_header}connection: close\r\n\r\n{json}",
        status.as_u16(),
        status.canonical_reason().unwrap_or("Error"),
        json.len(),
    )
    .into_bytes()
}

/// The answer to a head that hyper refused. `unparsed` is what it had read of it.
pub(super) fn malformed(error: &hyper::Error, unparsed: &[u8], limits: &HttpLimits) -> Vec<u8> {
    if error.is_parse_too_large() {
        let line_end = unparsed.iter().position(|&byte| byte == b'\n');
        let line_bytes = line_end.unwrap_or(unparsed.len());
        return if line_bytes > limits.request_line_bytes_max {
            line_too_long(limits)
        } else {
            head_too_large(limits)
        };
    }
    if error.is_parse_version_h2() {
        return closing_response(
            StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            "invalid_request_error",
            "http_version",
            "HTTP/2 is not spoken here; use HTTP/1.1",
            "",
        );
    }
    closing_response(
        StatusCode::BAD_REQUEST,
        "invalid_request_error",
        "malformed_http",
        &format!("the request is not valid HTTP/1.1: {error}"),
        "",
    )
}

/// 414.
pub(super) fn line_too_long(limits: &HttpLimits) -> Vec<u8> {
    closing_response(
        StatusCode::URI_TOO_LONG,
        "invalid_request_error",
        "request_line_too_long",
        &line_message(limits),
        "",
    )
}

pub(super) fn line_message(limits: &HttpLimits) -> String {
    format!(
        "the request line is longer than the limit of {} bytes",
        limits.request_line_bytes_max
    )
}

/// 431.
pub(super) fn head_too_large(limits: &HttpLimits) -> Vec<u8> {
    closing_response(
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "invalid_request_error",
        "headers_too_large",
        &head_message(limits),
        "",
    )
}

pub(super) fn head_message(limits: &HttpLimits) -> String {
    format!(
        "the headers are over the limit of {} bytes or {} fields",
        limits.header_bytes_max, limits.header_fields_max
    )
}

/// 408 for a head.
pub(super) fn head_timeout(limits: &HttpLimits) -> Vec<u8> {
    closing_response(
        StatusCode::REQUEST_TIMEOUT,
        "invalid_request_error",
        "header_timeout",
        &format!(
            "the request's head was not complete within {} ms",
            limits.header_read.as_millis()
        ),
        "",
    )
}

/// 503 for a connection over the limit.
pub(super) fn over_limit(limits: &HttpLimits) -> Vec<u8> {
    closing_response(
        StatusCode::SERVICE_UNAVAILABLE,
        "overloaded_error",
        "connection_limit",
        &format!(
            "{} connections are open, which is the limit; retry later",
            limits.connections_max
        ),
        "retry-after: 1\r\n",
    )
}
