//! Values of GGUF metadata, borrowed from the file.

use super::error::GgufError;
use super::reader::Reader;
use std::fmt;

/// Types of values, with their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueKind {
    /// 1 byte.
    U8 = 0,
    /// 1 byte.
    I8 = 1,
    /// 2 bytes.
    U16 = 2,
    /// 2 bytes.
    I16 = 3,
    /// 4 bytes.
    U32 = 4,
    /// 4 bytes.
    I32 = 5,
    /// 4 bytes.
    F32 = 6,
    /// 1 byte, 0 or 1.
    Bool = 7,
    /// 8 bytes of length, then UTF-8.
    Text = 8,
    /// Element type, count, elements.
    Array = 9,
    /// 8 bytes.
    U64 = 10,
    /// 8 bytes.
    I64 = 11,
    /// 8 bytes.
    F64 = 12,
}

impl ValueKind {
    fn from_number(number: u32) -> Option<Self> {
        const ALL: [ValueKind; 13] = [
            ValueKind::U8,
            ValueKind::I8,
            ValueKind::U16,
            ValueKind::I16,
            ValueKind::U32,
            ValueKind::I32,
            ValueKind::F32,
            ValueKind::Bool,
            ValueKind::Text,
            ValueKind::Array,
            ValueKind::U64,
            ValueKind::I64,
            ValueKind::F64,
        ];
        ALL.get(number as usize).copied()
    }

    /// Bytes of a value of fixed size.
    fn fixed_bytes(self) -> Option<u64> {
        match self {
            ValueKind::U8 | ValueKind::I8 | ValueKind::Bool => Some(1),
            ValueKind::U16 | ValueKind::I16 => Some(2),
            ValueKind::U32 | ValueKind::I32 | ValueKind::F32 => Some(4),
            ValueKind::U64 | ValueKind::I64 | ValueKind::F64 => Some(8),
            ValueKind::Text | ValueKind::Array => None,
        }
    }
}

/// A value. Integers are widened to 64 bits, keeping their sign.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A bool.
    Bool(bool),
    /// Text.
    Text(&'a str),
    /// An array of one type of fixed-size values or texts.
    Array(Array<'a>),
}

/// An array, checked to lie within the file; elements are read when asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    kind: ValueKind,
    count: usize,
    bytes: &'a [u8],
}

/// A key that is missing or is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyError {
    /// The key.
    pub key: String,
    /// What it must be.
    pub wanted: &'static str,
    /// What it is; `None` if the key is missing.
    pub found: Option<String>,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.found {
            None => write!(
                f,
                "key \"{}\" is missing, it must be {}",
                self.key, self.wanted
            ),
            Some(found) => {
                write!(
                    f,
                    "key \"{}\" is {found}, it must be {}",
                    self.key, self.wanted
                )
            }
        }
    }
}

impl std::error::Error for KeyError {}

impl fmt::Display for Value<'_> {
    /// Short: for error messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(value) => value.fmt(f),
            Value::Signed(value) => value.fmt(f),
            Value::Float(value) => value.fmt(f),
            Value::Bool(value) => value.fmt(f),
            Value::Text(text) => {
                let short: String = text.chars().take(40).collect();
                write!(f, "the text {short:?}")
            }
            Value::Array(array) => write!(f, "an array of {} {:?}", array.count, array.kind),
        }
    }
}

/// Reads the value of `key`, its type first.
pub(super) fn read_value<'a>(reader: &mut Reader<'a>, key: &str) -> Result<Value<'a>, GgufError> {
    let kind = read_kind(reader, key)?;
    if kind == ValueKind::Array {
        return read_array(reader, key).map(Value::Array);
    }
    read_single(reader, kind, key)
}

fn read_kind(reader: &mut Reader<'_>, key: &str) -> Result<ValueKind, GgufError> {
    let found = reader.u32(&|| format!("the type of key \"{key}\""))?;
    ValueKind::from_number(found).ok_or_else(|| GgufError::ValueType {
        key: key.into(),
        found,
    })
}

fn read_single<'a>(
    reader: &mut Reader<'a>,
    kind: ValueKind,
    key: &str,
) -> Result<Value<'a>, GgufError> {
    let reading = || format!("the value of key \"{key}\"");
    let Some(length) = kind.fixed_bytes() else {
        return match kind {
            ValueKind::Text => reader.text(u64::MAX, &reading).map(Value::Text),
            _ => Err(GgufError::ValueType {
                key: key.into(),
                found: kind as u32,
            }),
        };
    };
    let mut wide = [0u8; 8];
    let bytes = reader.take(length, &reading)?;
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    // Shifting up and down again extends the sign of the narrower integers.
    let unused_bits = 64 - 8 * length as u32;
    let signed = ((unsigned << unused_bits) as i64) >> unused_bits;
    Ok(match kind {
        ValueKind::U8 | ValueKind::U16 | ValueKind::U32 | ValueKind::U64 => {
            Value::Unsigned(unsigned)
        }
        ValueKind::I8 | ValueKind::I16 | ValueKind::I32 | ValueKind::I64 => Value::Signed(signed),
        ValueKind::F32 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
        ValueKind::F64 => Value::Float(f64::from_bits(unsigned)),
        ValueKind::Bool if unsigned <= 1 => Value::Bool(unsigned == 1),
        ValueKind::Bool => {
            return Err(GgufError::Bool {
                key: key.into(),
                found: unsigned as u8,
            });
        }
        ValueKind::Text | ValueKind::Array => {
            return Err(GgufError::ValueType {
                key: key.into(),
                found: kind as u32,
            });
        }
    })
}

/// Reads an array of texts or fixed-size values; arrays of arrays are in no model and refused.
fn read_array<'a>(reader: &mut Reader<'a>, key: &str) -> Result<Array<'a>, GgufError> {
    let kind = read_kind(reader, key)?;
    let what = || format!("the array of key \"{key}\"");
    let count = reader.u64(&what)?;
    // A text takes at least the 8 bytes of its length.
    let least = match kind {
        ValueKind::Array => {
            return Err(GgufError::ValueType {
                key: key.into(),
                found: kind as u32,
            });
        }
        _ => kind.fixed_bytes().unwrap_or(8),
    };
    let most = reader.left() as u64 / least;
    if count > most {
        return Err(GgufError::Count {
            what: what(),
            found: count,
            most,
        });
    }
    let start = reader.clone();
    match kind.fixed_bytes() {
        Some(length) => {
            reader.take(count * length, &what)?;
        }
        None => {
            for index in 0..count {
                reader.text(u64::MAX, &|| format!("element {index} of key \"{key}\""))?;
            }
        }
    }
    let length = (reader.at() - start.at()) as u64;
    let bytes = start.clone().take(length, &what)?;
    let array = Array {
        kind,
        count: count as usize,
        bytes,
    };
    let odd = array.bytes.iter().find(|byte| **byte > 1);
    if let (ValueKind::Bool, Some(found)) = (kind, odd) {
        return Err(GgufError::Bool {
            key: key.into(),
            found: *found,
        });
    }
    Ok(array)
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// No element.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Its elements.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut reader = Reader::new(self.bytes, 0);
        let kind = self.kind;
        // All elements were read once at load: none fails here.
        (0..self.count).map_while(move |_| read_single(&mut reader, kind, "array element").ok())
    }

    /// Its elements, if they are texts.
    pub fn texts(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        (self.kind == ValueKind::Text).then(|| {
            self.iter().filter_map(|value| match value {
                Value::Text(text) => Some(text),
                _ => None,
            })
        })
    }

    /// Its elements, if they are integers that fit an `i64`.
    pub fn integers(&self) -> Option<impl Iterator<Item = i64> + use<'a>> {
        let integers = matches!(
            self.kind,
            ValueKind::U8
                | ValueKind::I8
                | ValueKind::U16
                | ValueKind::I16
                | ValueKind::U32
                | ValueKind::I32
                | ValueKind::I64
        );
        integers.then(|| {
            self.iter().filter_map(|value| match value {
                Value::Unsigned(value) => i64::try_from(value).ok(),
                Value::Signed(value) => Some(value),
                _ => None,
            })
        })
    }
}
