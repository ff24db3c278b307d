//! What people run beside the server.
