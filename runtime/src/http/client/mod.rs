//! The client: requests over kept connections, each step with a deadline.
//!
//! A connection belongs to one exchange at a time and is driven by whoever waits for that
//! exchange; no task runs for it. Dropping the exchange at any point closes the socket, so the
//! server sees the cancel. Only a connection whose answer was read to its end goes back to the
//! pool.

mod connection;
mod error;
mod pool;
mod response;

pub use error::{ClientError, ClientStage};
pub use pool::{Client, ClientLimits, Resendable};
pub use response::ClientResponse;
