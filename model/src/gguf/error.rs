//! What can be wrong with a GGUF file.

use super::value::KeyError;
use std::fmt;

/// A file that is no usable GGUF. Offsets and sizes are in bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufError {
    /// It does not begin with `GGUF`.
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A version that this reader does not know.
    Version {
        /// It.
        found: u32,
    },
    /// The file ends within something.
    Truncated {
        /// What was being read.
        reading: String,
        /// Where it begins.
        at: usize,
        /// Bytes it takes.
        wanted: u64,
        /// Bytes that are left.
        left: usize,
    },
    /// A count that the rest of the file cannot hold.
    Count {
        /// Of what.
        what: String,
        /// The count.
        found: u64,
        /// The most that can be.
        most: u64,
    },
    /// Text that is not UTF-8.
    Utf8 {
        /// Of what.
        what: String,
        /// Where the text begins.
        at: usize,
    },
    /// A key that is there twice.
    DuplicateKey {
        /// It.
        key: String,
    },
    /// A tensor name that is there twice.
    DuplicateTensor {
        /// It.
        name: String,
    },
    /// A value's type that does not exist or is not read here.
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        found: u32,
    },
    /// A bool that is neither 0 nor 1.
    Bool {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// `general.alignment` is no power of two within bounds.
    Alignment {
        /// It.
        found: u32,
    },
    /// A tensor's number of dimensions is not 1 to 4.
    Dimensions {
        /// The tensor.
        name: String,
        /// The number.
        found: u32,
    },
    /// A tensor's element type is not one that the engine computes with.
    ElementType {
        /// The tensor.
        name: String,
        /// The type's number.
        found: u32,
        /// The type's name, where known.
        called: &'static str,
    },
    /// A tensor's size is zero, overflows, or its row is no whole number of blocks.
    Size {
        /// The tensor.
        name: String,
        /// Sizes as in the file, fastest first.
        dimensions: Vec<u64>,
        /// The element type's name.
        kind: &'static str,
    },
    /// A tensor's bytes lie outside the file or are not aligned.
    Place {
        /// The tensor.
        name: String,
        /// Its offset within the tensor bytes.
        offset: u64,
        /// Its size.
        length: u64,
        /// Bytes that the file has for tensors.
        available: u64,
        /// The alignment.
        alignment: u64,
    },
    /// Two tensors share bytes.
    Overlap {
        /// The first by place.
        first: String,
        /// The second by place.
        second: String,
    },
    /// A key is missing or of another type than it should have.
    Key(KeyError),
}

impl From<KeyError> for GgufError {
    fn from(error: KeyError) -> Self {
        GgufError::Key(error)
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufError::Magic { found } => {
                write!(
                    f,
                    "not a GGUF file: it begins with {found:02x?}, not with \"GGUF\""
                )
            }
            GgufError::Version { found } if found.swap_bytes() <= 3 => {
                write!(
                    f,
                    "a big-endian GGUF file; this reader takes little-endian ones"
                )
            }
            GgufError::Version { found } => {
                write!(
                    f,
                    "GGUF version {found}; this reader takes versions 2 and 3"
                )
            }
            GgufError::Truncated {
                reading,
                at,
                wanted,
                left,
            } => write!(
                f,
                "the file ends within {reading}: at byte {at}, {wanted} bytes needed, {left} left"
            ),
            GgufError::Count { what, found, most } => {
                write!(
                    f,
                    "{what} claims {found}, the file has room for at most {most}"
                )
            }
            GgufError::Utf8 { what, at } => write!(f, "{what} at byte {at} is not UTF-8"),
            GgufError::DuplicateKey { key } => write!(f, "key \"{key}\" is there twice"),
            GgufError::DuplicateTensor { name } => write!(f, "tensor \"{name}\" is there twice"),
            GgufError::ValueType { key, found } => {
                write!(
                    f,
                    "key \"{key}\" has value type {found}, which is not known"
                )
            }
            GgufError::Bool { key, found } => {
                write!(
                    f,
                    "key \"{key}\" is a bool of value {found}, it must be 0 or 1"
                )
            }
            GgufError::Alignment { found } => write!(
                f,
                "key \"general.alignment\" is {found}, it must be a power of two from 8 to 65536"
            ),
            GgufError::Dimensions { name, found } => {
                write!(
                    f,
                    "tensor \"{name}\" has {found} dimensions, it must have 1 to 4"
                )
            }
            GgufError::ElementType {
                name,
                found,
                called,
            } => write!(
                f,
                "tensor \"{name}\" is of type {called} ({found}); this engine computes with F32, F16, BF16, Q8_0 and Q4_1"
            ),
            GgufError::Size {
                name,
                dimensions,
                kind,
            } => write!(
                f,
                "tensor \"{name}\" of type {kind} has sizes {dimensions:?}: empty, too large, or no whole blocks in a row"
            ),
            GgufError::Place {
                name,
                offset,
                length,
                available,
                alignment,
            } => write!(
                f,
                "tensor \"{name}\" is at offset {offset} with {length} bytes; the file has {available} bytes of tensors, aligned to {alignment}"
            ),
            GgufError::Overlap { first, second } => {
                write!(f, "tensors \"{first}\" and \"{second}\" share bytes")
            }
            GgufError::Key(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for GgufError {}
