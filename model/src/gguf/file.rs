//! The parsed head of a GGUF file.

use super::error::GgufError;
use super::reader::Reader;
use super::value::{Array, KeyError, Value, read_value};
use crate::weights::{StoredTensor, TensorType};
use std::collections::{BTreeMap, HashSet};

/// Longest key: what the format allows.
const KEY_BYTES_MAX: u64 = 65_535;
/// Longest tensor name. The format says 64; some writers go beyond it.
const NAME_BYTES_MAX: u64 = 256;
/// A key takes its length (8), a type (4) and a value (at least 1).
const KEY_BYTES_LEAST: u64 = 13;
/// A tensor takes its name's length (8), dimensions (4 + 8), type (4) and offset (8).
const TENSOR_BYTES_LEAST: u64 = 32;
/// What tensors are aligned to unless `general.alignment` says otherwise.
const ALIGNMENT_DEFAULT: u32 = 32;
/// Largest alignment: the largest page size of the machines we run on.
const ALIGNMENT_MAX: u32 = 65_536;

/// A tensor of the file: its place is checked to lie within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type.
    pub kind: TensorType,
    /// Sizes, slowest first (the file has them fastest first).
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub start: usize,
    /// Bytes.
    pub length: usize,
}

/// Metadata and tensor list of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Gguf<'a> {
    /// Version of the format.
    pub version: u32,
    /// Keys and values.
    pub metadata: BTreeMap<&'a str, Value<'a>>,
    /// Tensors in the order of the file.
    pub tensors: Vec<GgufTensor<'a>>,
}

/// A tensor's entry before its place is checked.
struct Listed<'a> {
    name: &'a str,
    kind: TensorType,
    shape: Vec<usize>,
    offset: u64,
    length: u64,
}

impl<'a> Gguf<'a> {
    /// Parses and checks everything but the elements of tensors.
    ///
    /// # Errors
    /// [`GgufError`] naming the key or tensor.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut reader = Reader::new(bytes, 0);
        let head = || "the header".to_owned();
        let magic = reader.take(4, &head)?;
        if magic != b"GGUF" {
            return Err(GgufError::Magic {
                found: [magic[0], magic[1], magic[2], magic[3]],
            });
        }
        let version = reader.u32(&head)?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { found: version });
        }
        let tensor_count = reader.u64(&head)?;
        let key_count = reader.u64(&head)?;
        let metadata = read_metadata(&mut reader, key_count)?;
        let alignment = alignment(&metadata)?;
        let listed = read_tensor_list(&mut reader, tensor_count)?;
        let tensors = place_tensors(listed, reader.at(), bytes.len(), alignment)?;
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }

    /// The tensors as file number `file` of a table of weights.
    pub fn stored_tensors(&self, file: usize) -> Vec<StoredTensor> {
        let stored = |tensor: &GgufTensor<'_>| StoredTensor {
            name: tensor.name.to_owned(),
            kind: tensor.kind,
            shape: tensor.shape.clone(),
            file,
            start: tensor.start,
            length: tensor.length,
        };
        self.tensors.iter().map(stored).collect()
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor<'a>> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// A text.
    ///
    /// # Errors
    /// [`KeyError`] if it is there and is no text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, KeyError> {
        self.typed(key, "a text", |value| match value {
            Value::Text(text) => Some(text),
            _ => None,
        })
    }

    /// An unsigned integer; signed ones that are not negative count.
    ///
    /// # Errors
    /// [`KeyError`] if it is there and is none.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, KeyError> {
        self.typed(key, "an integer of at least 0", |value| match value {
            Value::Unsigned(number) => Some(number),
            Value::Signed(number) => u64::try_from(number).ok(),
            _ => None,
        })
    }

    /// A float.
    ///
    /// # Errors
    /// [`KeyError`] if it is there and is none.
    pub fn float(&self, key: &str) -> Result<Option<f64>, KeyError> {
        self.typed(key, "a float", |value| match value {
            Value::Float(number) => Some(number),
            _ => None,
        })
    }

    /// A bool.
    ///
    /// # Errors
    /// [`KeyError`] if it is there and is none.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, KeyError> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(yes) => Some(yes),
            _ => None,
        })
    }

    /// An array.
    ///
    /// # Errors
    /// [`KeyError`] if it is there and is none.
    pub fn array(&self, key: &str) -> Result<Option<Array<'a>>, KeyError> {
        self.typed(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &'static str,
        take: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, KeyError> {
        let Some(value) = self.metadata.get(key) else {
            return Ok(None);
        };
        match take(*value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(KeyError {
                key: key.to_owned(),
                wanted,
                found: Some(value.to_string()),
            }),
        }
    }
}

fn read_metadata<'a>(
    reader: &mut Reader<'a>,
    count: u64,
) -> Result<BTreeMap<&'a str, Value<'a>>, GgufError> {
    check_count(
        "the number of keys",
        count,
        reader.left() as u64 / KEY_BYTES_LEAST,
    )?;
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let key = reader.text(KEY_BYTES_MAX, &|| format!("key number {index}"))?;
        let value = read_value(reader, key)?;
        if metadata.insert(key, value).is_some() {
            return Err(GgufError::DuplicateKey {
                key: key.to_owned(),
            });
        }
    }
    Ok(metadata)
}

fn check_count(what: &str, found: u64, most: u64) -> Result<(), GgufError> {
    if found > most {
        return Err(GgufError::Count {
            what: what.to_owned(),
            found,
            most,
        });
    }
    Ok(())
}

fn alignment(metadata: &BTreeMap<&str, Value<'_>>) -> Result<u64, GgufError> {
    let key = "general.alignment";
    let found = match metadata.get(key) {
        None => ALIGNMENT_DEFAULT,
        Some(Value::Unsigned(found)) => u32::try_from(*found).unwrap_or(u32::MAX),
        Some(other) => {
            let (wanted, found) = ("an unsigned integer", Some(other.to_string()));
            return Err(KeyError {
                key: key.into(),
                wanted,
                found,
            }
            .into());
        }
    };
    if !found.is_power_of_two() || !(8..=ALIGNMENT_MAX).contains(&found) {
        return Err(GgufError::Alignment { found });
    }
    Ok(u64::from(found))
}

fn read_tensor_list<'a>(reader: &mut Reader<'a>, count: u64) -> Result<Vec<Listed<'a>>, GgufError> {
    check_count(
        "the number of tensors",
        count,
        reader.left() as u64 / TENSOR_BYTES_LEAST,
    )?;
    let mut names = HashSet::new();
    let mut listed = Vec::new();
    for index in 0..count {
        let name = reader.text(NAME_BYTES_MAX, &|| format!("the name of tensor {index}"))?;
        if !names.insert(name) {
            return Err(GgufError::DuplicateTensor {
                name: name.to_owned(),
            });
        }
        listed.push(read_tensor_entry(reader, name)?);
    }
    Ok(listed)
}

fn read_tensor_entry<'a>(reader: &mut Reader<'a>, name: &'a str) -> Result<Listed<'a>, GgufError> {
    let reading = || format!("the entry of tensor \"{name}\"");
    let count = reader.u32(&reading)?;
    if !(1..=4).contains(&count) {
        return Err(GgufError::Dimensions {
            name: name.to_owned(),
            found: count,
        });
    }
    let mut dimensions = Vec::with_capacity(count as usize);
    for _ in 0..count {
        dimensions.push(reader.u64(&reading)?);
    }
    let number = reader.u32(&reading)?;
    let offset = reader.u64(&reading)?;
    let (kind, called) = element_type(number);
    let Some(kind) = kind else {
        return Err(GgufError::ElementType {
            name: name.to_owned(),
            found: number,
            called,
        });
    };
    let size = || GgufError::Size {
        name: name.to_owned(),
        dimensions: dimensions.clone(),
        kind: called,
    };
    let length = tensor_bytes(kind, &dimensions).ok_or_else(size)?;
    let shape = dimensions.iter().rev().map(|size| *size as usize).collect();
    Ok(Listed {
        name,
        kind,
        shape,
        offset,
        length,
    })
}

/// Bytes of a tensor; `None` if empty, not whole blocks, or more than memory can address.
fn tensor_bytes(kind: TensorType, dimensions: &[u64]) -> Option<u64> {
    let (columns, rest) = dimensions.split_first()?;
    if dimensions.contains(&0) {
        return None;
    }
    let row = kind.row_bytes(usize::try_from(*columns).ok()?)?;
    let total = rest
        .iter()
        .try_fold(row as u64, |bytes, size| bytes.checked_mul(*size))?;
    // Far below the end of the address range, so that later sums cannot overflow.
    (total <= u64::MAX >> 8).then_some(total)
}

fn place_tensors<'a>(
    listed: Vec<Listed<'a>>,
    list_end: usize,
    file_bytes: usize,
    alignment: u64,
) -> Result<Vec<GgufTensor<'a>>, GgufError> {
    let first = (list_end as u64).next_multiple_of(alignment);
    let available = (file_bytes as u64).saturating_sub(first);
    let mut tensors = Vec::with_capacity(listed.len());
    for Listed {
        name,
        kind,
        shape,
        offset,
        length,
    } in listed
    {
        let fits = offset
            .checked_add(length)
            .is_some_and(|end| end <= available);
        if !fits || !offset.is_multiple_of(alignment) {
            let name = name.to_owned();
            return Err(GgufError::Place {
                name,
                offset,
                length,
                available,
                alignment,
            });
        }
        let start = (first + offset) as usize;
        tensors.push(GgufTensor {
            name,
            kind,
            shape,
            start,
            length: length as usize,
        });
    }
    let mut by_place: Vec<_> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| tensor.start);
    for pair in by_place.windows(2) {
        if pair[0].start + pair[0].length > pair[1].start {
            let (first, second) = (pair[0].name.to_owned(), pair[1].name.to_owned());
            return Err(GgufError::Overlap { first, second });
        }
    }
    Ok(tensors)
}

/// The element type of a number in the file, and its name.
fn element_type(number: u32) -> (Option<TensorType>, &'static str) {
    match number {
        0 => (Some(TensorType::F32), "F32"),
        1 => (Some(TensorType::F16), "F16"),
        3 => (Some(TensorType::Q4_1), "Q4_1"),
        8 => (Some(TensorType::Q8_0), "Q8_0"),
        30 => (Some(TensorType::Bf16), "BF16"),
        2 => (None, "Q4_0"),
        6 => (None, "Q5_0"),
        7 => (None, "Q5_1"),
        9 => (None, "Q8_1"),
        10 => (None, "Q2_K"),
        11 => (None, "Q3_K"),
        12 => (None, "Q4_K"),
        13 => (None, "Q5_K"),
        14 => (None, "Q6_K"),
        15 => (None, "Q8_K"),
        16..=19 | 21..=23 | 29 => (None, "an IQ quantisation"),
        20 => (None, "IQ4_NL"),
        24..=27 => (None, "an integer type"),
        28 => (None, "F64"),
        34 | 35 => (None, "a ternary quantisation"),
        39 => (None, "MXFP4"),
        _ => (None, "unknown"),
    }
}
