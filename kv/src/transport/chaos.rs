//! Faults on purpose, between any transport's `poll` and the slab.
//!
//! [`ChaosTransport`] wraps a transport and lets its completions get lost, fail, come twice or
//! come late: the bytes do land, nothing above knows of it. It keeps the promises that a real
//! transport keeps, so that what it shows can happen in the field: completions of a channel stay
//! in order (a late one holds up those behind it), and none comes after a channel was reaped.
//! Errors of the inner transport are never hidden: by PROTOCOL P3 the next completion of the
//! channel would then make a failed read look good, which no device does.
//!
//! [`ChaosHandle`] is what the command line and `/debug/chaos` hold: the rules, the seeded
//! random numbers and the counters, shared by all wrapped transports of a process and by the
//! control frames ([`ChaosHandle::on_message`]).

mod spec;
mod wrapper;

pub use spec::{
    ChaosCounters, ChaosHandle, ChaosSpec, ChaosSpecError, CompletionFault, Fault, FlushFault,
    MessageFate, MessageFault,
};
pub use wrapper::ChaosTransport;
