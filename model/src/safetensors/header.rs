//! The header of one safetensors file.
//!
//! ```text
//! header length (8 bytes) | {"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...} | bytes
//! ```

use crate::weights::{StoredTensor, TensorType};
use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// Longest header: what the reference reader takes (100 MB).
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Most dimensions of a tensor: a weight of these models has 1 or 2.
const DIMENSIONS_MAX: usize = 8;

/// A file that is no usable safetensors. Offsets and sizes are in bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum SafetensorsError {
    /// Shorter than its own header.
    Truncated {
        /// Bytes that the header takes, with its length field.
        wanted: u64,
        /// Bytes of the file.
        file_bytes: usize,
    },
    /// The header claims to be longer than a header may be.
    HeaderLength {
        /// Its claim.
        found: u64,
    },
    /// The header is not UTF-8, not JSON, or not of the right form; a name that is there twice.
    Header {
        /// What the parser says, with the place.
        problem: String,
    },
    /// A tensor's element type is not one that the engine computes with.
    ElementType {
        /// The tensor.
        name: String,
        /// The type.
        found: String,
    },
    /// Too many dimensions, an empty dimension, or a size that overflows.
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The places of a tensor's bytes do not fit its shape.
    Size {
        /// The tensor.
        name: String,
        /// `[begin, end)` within the bytes.
        offsets: [u64; 2],
        /// Bytes that its shape takes.
        wanted: u64,
    },
    /// A tensor's bytes do not begin where the ones before it end.
    Place {
        /// The tensor.
        name: String,
        /// Where it begins.
        found: u64,
        /// Where the ones before it end.
        wanted: u64,
    },
    /// The tensors end elsewhere than the file.
    End {
        /// Bytes that the tensors take.
        wanted: u64,
        /// Bytes behind the header.
        found: u64,
    },
}

impl fmt::Display for SafetensorsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SafetensorsError::Truncated { wanted, file_bytes } => {
                write!(
                    f,
                    "the file of {file_bytes} bytes ends within its header of {wanted} bytes"
                )
            }
            SafetensorsError::HeaderLength { found } => {
                write!(
                    f,
                    "the header claims {found} bytes, at most {HEADER_BYTES_MAX} are read"
                )
            }
            SafetensorsError::Header { problem } => write!(f, "the header is wrong: {problem}"),
            SafetensorsError::ElementType { name, found } => write!(
                f,
                "tensor \"{name}\" is of type {found:?}; this engine computes with F32, F16 and BF16"
            ),
            SafetensorsError::Shape { name, shape } => {
                write!(
                    f,
                    "tensor \"{name}\" has shape {shape:?}: empty, too large, or over {DIMENSIONS_MAX} dimensions"
                )
            }
            SafetensorsError::Size {
                name,
                offsets: [begin, end],
                wanted,
            } => write!(
                f,
                "tensor \"{name}\" lies at [{begin}, {end}), its shape takes {wanted} bytes"
            ),
            SafetensorsError::Place {
                name,
                found,
                wanted,
            } => write!(
                f,
                "tensor \"{name}\" begins at byte {found}, the tensors before it end at {wanted}: a gap or an overlap"
            ),
            SafetensorsError::End { wanted, found } => {
                write!(
                    f,
                    "the tensors take {wanted} bytes, the file has {found} behind its header"
                )
            }
        }
    }
}

impl std::error::Error for SafetensorsError {}

#[derive(Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's entries in order; refuses a name that comes twice, which a map would swallow.
struct Entries(Vec<(String, Described)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut names = HashSet::new();
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("\"{name}\" is there twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            entries.push((name, map.next_value::<Described>()?));
        }
        Ok(Entries(entries))
    }
}

/// Parses the header of a file as file number `file` of a table of weights.
///
/// # Errors
/// [`SafetensorsError`] naming the tensor.
pub fn parse_header(bytes: &[u8], file: usize) -> Result<Vec<StoredTensor>, SafetensorsError> {
    let file_bytes = bytes.len();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(SafetensorsError::Truncated {
            wanted: 8,
            file_bytes,
        });
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(SafetensorsError::HeaderLength { found: length });
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(SafetensorsError::Truncated {
            wanted: length + 8,
            file_bytes,
        });
    };
    let Entries(mut entries) =
        serde_json::from_slice(header).map_err(|error| SafetensorsError::Header {
            problem: error.to_string(),
        })?;
    entries.sort_by_key(|(_, described)| described.data_offsets);
    let mut end = 0;
    let mut stored = Vec::with_capacity(entries.len());
    for (name, described) in entries {
        let [begin, tensor_end] = described.data_offsets;
        if begin != end {
            return Err(SafetensorsError::Place {
                name,
                found: begin,
                wanted: end,
            });
        }
        let tensor = store(name, described, file, length + 8)?;
        end = tensor_end;
        stored.push(tensor);
    }
    if end != data.len() as u64 {
        return Err(SafetensorsError::End {
            wanted: end,
            found: data.len() as u64,
        });
    }
    Ok(stored)
}

fn store(
    name: String,
    described: Described,
    file: usize,
    data_start: u64,
) -> Result<StoredTensor, SafetensorsError> {
    let Described {
        dtype,
        shape,
        data_offsets: [begin, end],
    } = described;
    let kind = match dtype.as_str() {
        "F32" => TensorType::F32,
        "F16" => TensorType::F16,
        "BF16" => TensorType::Bf16,
        _ => return Err(SafetensorsError::ElementType { name, found: dtype }),
    };
    let element = kind.block_bytes() as u64;
    let wanted = shape
        .iter()
        .try_fold(element, |bytes, size| bytes.checked_mul(*size));
    let wanted = match wanted {
        // Far below the end of the address range, so that later sums cannot overflow.
        Some(wanted) if wanted > 0 && wanted <= u64::MAX >> 8 && shape.len() <= DIMENSIONS_MAX => {
            wanted
        }
        _ => return Err(SafetensorsError::Shape { name, shape }),
    };
    if begin.checked_add(wanted) != Some(end) {
        return Err(SafetensorsError::Size {
            name,
            offsets: [begin, end],
            wanted,
        });
    }
    let start = data_start
        .checked_add(begin)
        .and_then(|start| usize::try_from(start).ok());
    let Some(start) = start else {
        return Err(SafetensorsError::Size {
            name,
            offsets: [begin, end],
            wanted,
        });
    };
    let shape = shape.into_iter().map(|size| size as usize).collect();
    Ok(StoredTensor {
        name,
        kind,
        shape,
        file,
        start,
        length: wanted as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn error(header: &str, data: usize) -> String {
        parse_header(&file(header, data), 0)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn places_count_from_the_end_of_the_header() {
        let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]},
            "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
        let tensors = parse_header(&file(header, 28), 5).unwrap();
        assert_eq!(tensors[0].name, "a");
        assert_eq!(
            (tensors[0].start, tensors[0].length),
            (header.len() + 8, 24)
        );
        assert_eq!((tensors[1].start, tensors[1].file), (header.len() + 32, 5));
    }

    #[test]
    fn lies_are_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(
            error(&one("F32", "[2,3]", "[0,20]"), 20)
                .contains("\"w\" lies at [0, 20), its shape takes 24")
        );
        assert!(error(&one("F32", "[2,3]", "[4,28]"), 28).contains("begins at byte 4"));
        assert!(
            error(&one("F32", "[2,3]", "[0,24]"), 23).contains("take 24 bytes, the file has 23")
        );
        assert!(error(&one("I64", "[3]", "[0,24]"), 24).contains("\"w\" is of type \"I64\""));
        assert!(error(&one("F32", "[0]", "[0,0]"), 0).contains("empty"));
        let huge = one("F32", "[4294967296,4294967296]", "[0,8]");
        assert!(error(&huge, 8).contains("too large"));
        let twice = r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert!(error(twice, 8).contains("\"w\" is there twice"));
        assert!(error("[]", 0).contains("header is wrong"));
        assert!(parse_header(&[1, 2], 0).is_err());
        assert!(parse_header(&u64::MAX.to_le_bytes(), 0).is_err());
        assert!(
            parse_header(&50u64.to_le_bytes(), 0)
                .unwrap_err()
                .to_string()
                .contains("58 bytes")
        );
    }
}
