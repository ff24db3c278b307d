//! The API (or the proxy) behind a listener: bodies in, streams out.
//!
//! Invariants: a path or method that is wrong is answered without reading the body; an event
//! source lives inside its connection, so the client's leaving drops it.

use super::call::{Answer, AnswerBody, Call};
use super::clock::LocalFuture;
use super::handler::{Api, BODY_BYTES_MAX};
use super::route::Route;
use bytes::Bytes;
use hyper::Method;
use kvserve_runtime::Nanos;
use kvserve_runtime::http::{BodySender, Handler, Request, Response, handler};
use std::rc::Rc;

/// What can stand behind a listener.
pub trait Service: 'static {
    /// Answers a request whose body has been read.
    fn handle(&self, call: Call, arrived: Nanos) -> LocalFuture<'_, Answer>;
    /// Counts a request whose body could not be read.
    fn body_failed(&self, route: &Route, response: &Response);
}

impl Service for Api {
    fn handle(&self, call: Call, arrived: Nanos) -> LocalFuture<'_, Answer> {
        Box::pin(Api::handle(self, call, arrived))
    }

    fn body_failed(&self, route: &Route, response: &Response) {
        self.metrics.answered(route.endpoint(), response.status());
    }
}

/// The handler for `http::serve`.
pub fn http_handler(service: Rc<dyn Service>) -> Handler {
    handler(move |request| answer(service.clone(), request))
}

async fn answer(service: Rc<dyn Service>, request: Request) -> Response {
    let arrived = Nanos::now();
    let Request { parts, body, .. } = request;
    let route = Route::find(&parts.method, parts.uri.path());
    let body = match route {
        Ok(route) if parts.method == Method::POST => {
            match body.read_all(BODY_BYTES_MAX as u64).await {
                Ok(body) => body,
                Err(error) => {
                    let response = error.response();
                    service.body_failed(&route, &response);
                    return response;
                }
            }
        }
        Ok(_) | Err(_) => Bytes::new(),
    };
    let call = Call {
        method: parts.method,
        path: parts.uri.path().to_owned(),
        query: parts.uri.query().map(str::to_owned),
        headers: parts.headers,
        body,
    };
    response(service.handle(call, arrived).await)
}

fn response(answer: Answer) -> Response {
    let content_type = answer.content_type.to_str().unwrap_or("").to_owned();
    let mut response = match answer.body {
        AnswerBody::Full(body) => Response::bytes(answer.status, &content_type, body),
        AnswerBody::Events(mut source) => Response::producing(
            answer.status,
            &content_type,
            move |mut sender: BodySender| async move {
                while let Some(bytes) = source.next().await {
                    if sender.send(bytes).await.is_err() {
                        return;
                    }
                }
            },
        )
        .header("x-accel-buffering", "no"),
    };
    for (name, value) in answer.headers {
        response = response.header(name, value);
    }
    response
}
