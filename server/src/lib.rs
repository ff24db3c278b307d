//! `kvserve`: the server itself, as a library that the binary, the tools and the tests use.

pub mod api;
pub mod engine;
pub mod proxy;
