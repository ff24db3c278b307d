//! What people run beside the server; each tool's own parts.

pub mod soak;
