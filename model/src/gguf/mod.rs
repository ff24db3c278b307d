//! GGUF files (versions 2 and 3, little-endian): metadata and a list of tensors.
//!
//! The parser borrows from the mapped bytes and allocates nothing that the file merely claims:
//! every count is first compared with the bytes that are left. Nothing here knows what a key
//! means; `config` and `tokenizer` do.
//!
//! ```text
//! magic, version, tensor count, key count | keys and values | tensor list | padding | tensor bytes
//! ```

mod error;
mod file;
mod reader;
mod value;

pub use error::GgufError;
pub use file::{Gguf, GgufTensor};
pub use value::{Array, KeyError, Value, ValueKind};
