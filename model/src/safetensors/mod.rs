//! safetensors files: a JSON header of names, types, shapes and places, then the bytes.
//!
//! * [`header`](parse_header): one file, checked: places tile the file without gap or overlap
//! * [`index`](ShardIndex): which file of a sharded checkpoint holds which tensor

mod header;
mod index;

pub use header::{SafetensorsError, parse_header};
pub use index::{IndexError, ShardIndex};
