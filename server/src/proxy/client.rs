//! The runtime's HTTP client as the way to the nodes.

use super::forward::Proxy;
use super::upstream::{Upstream, UpstreamAnswer, UpstreamError};
use crate::api::http::Service;
use crate::api::route::Route;
use crate::api::{Answer, Call, LocalFuture};
use bytes::Bytes;
use hyper::{HeaderMap, Request, StatusCode};
use kvserve_runtime::http::{Client, ClientError, ClientResponse, Resendable, Response};
use kvserve_runtime::{Deadline, Nanos};
use std::net::SocketAddr;

impl Upstream for Client {
    fn send(
        &self,
        address: SocketAddr,
        mut request: Request<Bytes>,
        deadline: Deadline,
    ) -> LocalFuture<'_, Result<Box<dyn UpstreamAnswer>, UpstreamError>> {
        // A kept connection that the node had closed meanwhile is no lost node.
        request.extensions_mut().insert(Resendable);
        Box::pin(async move {
            match Client::send(self, address, request, deadline).await {
                Ok(response) => Ok(Box::new(response) as Box<dyn UpstreamAnswer>),
                Err(error) => Err(error.into()),
            }
        })
    }
}

impl UpstreamAnswer for ClientResponse {
    fn status(&self) -> StatusCode {
        self.status
    }

    fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    fn chunk(
        &mut self,
        deadline: Deadline,
    ) -> LocalFuture<'_, Result<Option<Bytes>, UpstreamError>> {
        Box::pin(async move {
            ClientResponse::chunk(self, deadline)
                .await
                .map_err(UpstreamError::from)
        })
    }
}

impl From<ClientError> for UpstreamError {
    fn from(error: ClientError) -> Self {
        let message = error.to_string();
        match error {
            ClientError::Refused { .. }
            | ClientError::Unreachable { .. }
            | ClientError::ConnectTimeout { .. } => UpstreamError::NotConnected { message },
            ClientError::Closed { bytes_received, .. } => UpstreamError::Closed {
                answered: bytes_received > 0,
                message,
            },
            ClientError::Deadline { .. } => UpstreamError::Deadline,
            ClientError::Protocol { .. } | ClientError::TooLarge { .. } => {
                UpstreamError::Malformed { message }
            }
            ClientError::TooManyConnections { open_max } => {
                UpstreamError::TooManyConnections { open_max }
            }
        }
    }
}

impl Service for Proxy {
    fn handle(&self, call: Call, arrived: Nanos) -> LocalFuture<'_, Answer> {
        Box::pin(Proxy::handle(self, call, arrived))
    }

    fn body_failed(&self, route: &Route, response: &Response) {
        self.http_metrics
            .answered(route.endpoint(), response.status());
    }
}
