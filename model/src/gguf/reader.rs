//! A cursor over the bytes of a GGUF file. Each read checks what is left first.

use super::error::GgufError;

#[derive(Clone)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self {
            bytes,
            at: at.min(bytes.len()),
        }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `length` bytes.
    pub(super) fn take(
        &mut self,
        length: u64,
        reading: &dyn Fn() -> String,
    ) -> Result<&'a [u8], GgufError> {
        if length > self.left() as u64 {
            let (at, left) = (self.at, self.left());
            return Err(GgufError::Truncated {
                reading: reading(),
                at,
                wanted: length,
                left,
            });
        }
        let start = self.at;
        self.at += length as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(
        &mut self,
        reading: &dyn Fn() -> String,
    ) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64, reading)?;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }

    pub(super) fn u32(&mut self, reading: &dyn Fn() -> String) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(reading)?))
    }

    pub(super) fn u64(&mut self, reading: &dyn Fn() -> String) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(reading)?))
    }

    /// A length-prefixed text of at most `most` bytes.
    pub(super) fn text(
        &mut self,
        most: u64,
        reading: &dyn Fn() -> String,
    ) -> Result<&'a str, GgufError> {
        let length = self.u64(reading)?;
        if length > most {
            let what = format!("the length of {}", reading());
            return Err(GgufError::Count {
                what,
                found: length,
                most,
            });
        }
        let at = self.at;
        let bytes = self.take(length, reading)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::Utf8 {
            what: reading(),
            at,
        })
    }
}
