//! The part of the verbs ABI that kvserve uses: C layouts under their C names, symbols found at run time.
//!
//! It owns no policy and no safety: whoever calls it (one thin wrapper in `kvserve-kv`) keeps the
//! rules of `libibverbs`. It never links a library: [`Verbs::load`] opens `libibverbs.so.1` when a
//! process asks for RDMA, so one binary runs on machines with and without it.
//!
//! The package of this name on crates.io vendors an rdma-core of 2018 that no longer builds;
//! this crate stands in for it and declares what the C header declares. Every size and offset is asserted at
//! compile time (`abi.rs`), and `tests/c_header_agrees.rs` compares them with the header of the
//! machine where there is one.
//!
//! ```text
//!  abi.rs      structs, enumerators, assertions    (the layouts of 64-bit Linux)
//!  symbols.rs  functions that the library exports   dlopen, dlsym
//!  inline.rs   functions that the header defines    through `ibv_context.ops`
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the verbs layouts in this crate are those of 64-bit Linux");

mod abi;
mod inline;
mod symbols;

pub use abi::*;
pub use inline::{ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_req_notify_cq};
pub use symbols::{DEFAULT_LIBRARY, LoadError, Verbs};
