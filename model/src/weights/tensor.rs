//! Element types, a view of one tensor, and its rows as f32.

use super::float::{bf16_to_f32, f16_to_f32};
use std::fmt;

/// How the elements of a tensor are stored. All little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// 4-byte IEEE.
    F32,
    /// 2-byte IEEE.
    F16,
    /// 2-byte brain float.
    Bf16,
    /// Blocks of 32: an f16 scale `d`, then 32 signed bytes `q`. Element = `d * q`. 34 bytes.
    Q8_0,
    /// Blocks of 32: an f16 scale `d`, an f16 minimum `m`, then 16 bytes of which byte `j` holds
    /// element `j` in the low and `j + 16` in the high four bits. Element = `d * q + m`. 20 bytes.
    Q4_1,
}

impl TensorType {
    /// Elements of one block (1 for the plain types).
    pub const fn block_elements(self) -> usize {
        match self {
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => 1,
            TensorType::Q8_0 | TensorType::Q4_1 => 32,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 | TensorType::Bf16 => 2,
            TensorType::Q8_0 => 34,
            TensorType::Q4_1 => 20,
        }
    }

    /// Bytes of a row of `columns` elements; `None` if the columns are no whole blocks or the
    /// size overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        if !columns.is_multiple_of(self.block_elements()) {
            return None;
        }
        (columns / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TensorType::F32 => "F32",
            TensorType::F16 => "F16",
            TensorType::Bf16 => "BF16",
            TensorType::Q8_0 => "Q8_0",
            TensorType::Q4_1 => "Q4_1",
        })
    }
}

/// A tensor in a mapped file. `bytes.len()` is exactly `rows` times the row's bytes. The bytes
/// are not always aligned to the element: read them as bytes or with unaligned loads.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Element type.
    pub kind: TensorType,
    /// Rows (outputs of a matrix); 1 for a vector.
    pub rows: usize,
    /// Columns (inputs of a matrix), or the length of a vector. A row is contiguous.
    pub columns: usize,
    /// The stored elements, row after row.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len() / self.rows
    }

    /// The stored bytes of a row.
    ///
    /// # Panics
    /// If `row >= rows`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let length = self.row_bytes();
        &self.bytes[row * length..(row + 1) * length]
    }
}

/// Widens row `row` of a tensor to f32. `out.len()` must be `view.columns`.
///
/// # Panics
/// If the row or the length of `out` is not the tensor's.
pub fn dequantize_row(view: &TensorView, row: usize, out: &mut [f32]) {
    assert_eq!(
        out.len(),
        view.columns,
        "row buffer of tensor {}",
        view.name
    );
    let bytes = view.row(row);
    match view.kind {
        TensorType::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        TensorType::F16 => widen(bytes, out, f16_to_f32),
        TensorType::Bf16 => widen(bytes, out, bf16_to_f32),
        TensorType::Q8_0 => {
            for (out, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(34)) {
                let scale = half_at(block, 0);
                for (out, q) in out.iter_mut().zip(&block[2..]) {
                    *out = scale * f32::from(*q as i8);
                }
            }
        }
        TensorType::Q4_1 => {
            for (out, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(20)) {
                let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
                let (low, high) = out.split_at_mut(16);
                for ((low, high), q) in low.iter_mut().zip(high).zip(&block[4..]) {
                    *low = f32::from(q & 15) * scale + minimum;
                    *high = f32::from(q >> 4) * scale + minimum;
                }
            }
        }
    }
}

fn widen(bytes: &[u8], out: &mut [f32], one: impl Fn(u16) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *out = one(u16::from_le_bytes([bytes[0], bytes[1]]));
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row_of(kind: TensorType, rows: usize, columns: usize, bytes: &[u8], row: usize) -> Vec<f32> {
        let view = TensorView {
            name: "t",
            kind,
            rows,
            columns,
            bytes,
        };
        let mut out = vec![f32::NAN; columns];
        dequantize_row(&view, row, &mut out);
        out
    }

    #[test]
    fn plain_types_widen() {
        let f32s: Vec<u8> = [1.5f32, -2.0, 3.25, 4.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        assert_eq!(row_of(TensorType::F32, 2, 2, &f32s, 1), [3.25, 4.0]);
        assert_eq!(
            row_of(TensorType::F16, 1, 2, &[0, 0x3c, 0, 0xc0], 0),
            [1.0, -2.0]
        );
        assert_eq!(
            row_of(TensorType::Bf16, 1, 2, &[0x80, 0x3f, 0, 0xc0], 0),
            [1.0, -2.0]
        );
    }

    #[test]
    fn eight_bit_blocks_scale_signed_bytes() {
        let mut block = vec![0, 0x38]; // 0.5
        block.extend((0..32).map(|i| (i as i8 - 16) as u8));
        let row = row_of(TensorType::Q8_0, 1, 32, &block, 0);
        assert_eq!((row[0], row[16], row[31]), (-8.0, 0.0, 7.5));
    }

    #[test]
    fn four_bit_blocks_have_low_halves_first() {
        let mut block = vec![0, 0x40, 0, 0xbc]; // scale 2, minimum -1
        block.extend((0..16).map(|i| i as u8 | ((15 - i as u8) << 4)));
        let row = row_of(TensorType::Q4_1, 1, 32, &block, 0);
        assert_eq!((row[0], row[1], row[15]), (-1.0, 1.0, 29.0));
        assert_eq!((row[16], row[31]), (29.0, -1.0));
    }

    #[test]
    fn row_sizes_count_whole_blocks() {
        assert_eq!(TensorType::Q4_1.row_bytes(64), Some(40));
        assert_eq!(TensorType::Q8_0.row_bytes(33), None);
        assert_eq!(TensorType::F32.row_bytes(usize::MAX / 2), None);
    }
}
