//! The `kvserve` binary.
fn main() {}
