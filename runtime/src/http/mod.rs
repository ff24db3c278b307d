//! HTTP/1.1 on a shard: hyper's protocol on our own readiness sockets.
//!
//! **Owns** the connections of a listener ([`serve`]) and a pool of outgoing ones ([`Client`]).
//! **Never** blocks a shard, never spawns a thread, never keeps a future alive for a client
//! that has left. **Keeps** these invariants:
//!
//! * *Cancellation is Drop.* When the client leaves (end of stream, reset, a stream it does not
//!   read for [`HttpLimits::write_stall`]) the handler's future, or the stream it answered with,
//!   is dropped. The same on the other side: dropping a [`ClientResponse`] closes its connection.
//! * *Every wait ends.* Each phase of a connection has a limit in [`HttpLimits`], each step of a
//!   client takes a `Deadline`. Only the handler itself is not limited here: its owner does that.
//! * *Everything is bounded*: connections, head, body, chunks in flight, idle connections.
//! * *Every answer that is not 2xx has the same JSON shape*, for malformed HTTP too
//!   ([`error_json`]).
//!
//! ```text
//! accept ─ cap ─ connection task ─ hyper ─ Dispatch (checks) ─ Handler(Request) -> Response
//!                    │  First/Idle -> Head -> Handling -> Responding -> Idle ...
//!                    └─ one Alarm for the earliest limit; Drain marks, ends or cuts it
//! ```
//!
//! **Half-close.** A client that shuts down its sending side has left: on TCP that looks like a
//! closed client until something is written to it, and a cancelled request must stop computing
//! within 100 ms. Clients must keep their side open until they have read the answer.

mod alarm;
pub mod blocking;
mod body_budget;
mod client;
mod connection;
mod counters;
mod dispatch;
mod drain;
mod error_body;
mod limits;
mod reply;
mod request;
mod response;
mod server;
pub mod sse;
mod stream;

pub use body_budget::BodyBudget;
pub use client::{Client, ClientError, ClientLimits, ClientResponse, ClientStage, Resendable};
pub use counters::HttpCounters;
pub use drain::{Drain, DrainWatch};
pub use error_body::{error_json, escape_json};
pub use limits::HttpLimits;
pub use request::{BodyError, Request, RequestBody};
pub use response::Response;
pub use server::{Handler, Listener, ServeEnd, handler, serve, serve_counted};
pub use stream::{BodySender, ClientGone};

pub use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
pub use hyper::{Method, StatusCode, Uri};
