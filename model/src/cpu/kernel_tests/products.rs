//! Products with packed weights.

use super::{Check, Random, at_every_isa};
use crate::cpu::aligned::{Aligned, Rows};
use crate::cpu::lanes::{Lanes, SumMode};
use crate::cpu::lanes_portable::Portable;
use crate::cpu::matmul::{Input, Output, multiply, panel_len};
use crate::cpu::matrix::{GROUP, Matrix};
use crate::weights::{TensorType, TensorView, dequantize_row};
use kvserve_kv::KvDtype;

/// Random stored weights.
pub(super) fn stored(
    random: &mut Random,
    kind: TensorType,
    rows: usize,
    columns: usize,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rows * columns / kind.block_elements() {
        // Halves between 1/64 and 2: finite and of one magnitude.
        let half = |random: &mut Random| (0x2400 + (random.next() % 0x1C00) as u16).to_le_bytes();
        match kind {
            TensorType::F32 => bytes.extend(random.float().to_le_bytes()),
            TensorType::F16 => bytes.extend(half(random)),
            TensorType::Bf16 => {
                bytes.extend(((random.float().to_bits() >> 16) as u16).to_le_bytes())
            }
            TensorType::Q8_0 => {
                bytes.extend(half(random));
                bytes.extend((0..32).map(|_| random.next() as u8));
            }
            TensorType::Q4_1 => {
                bytes.extend(half(random));
                bytes.extend(half(random));
                bytes.extend((0..16).map(|_| random.next() as u8));
            }
        }
    }
    bytes
}

const KINDS: [TensorType; 5] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::Bf16,
    TensorType::Q8_0,
    TensorType::Q4_1,
];

#[test]
fn packed_rows_are_the_stored_rows() {
    let mut random = Random(1);
    for kind in KINDS {
        let (rows, columns) = (37, 96);
        let bytes = stored(&mut random, kind, rows, columns);
        let view = TensorView {
            name: "t",
            kind,
            rows,
            columns,
            bytes: &bytes,
        };
        let packed = Matrix::pack(&view, KvDtype::F32);
        let (mut a, mut b) = (vec![0.0; columns], vec![0.0; columns]);
        for row in 0..rows {
            dequantize_row(&view, row, &mut a);
            packed.row(row, &mut b);
            assert_eq!(a, b, "{kind} row {row}");
        }
    }
}

struct Products;

impl Check for Products {
    fn check<S: Lanes>(&self) {
        let mut random = Random(2);
        for kind in KINDS {
            for (outputs, blocks) in [(1usize, 1usize), (16, 2), (33, 3), (80, 5), (130, 1)] {
                // Plain types have no blocks: an odd length too.
                let inputs = blocks * 32 - usize::from(kind.block_elements() == 1);
                let bytes = stored(&mut random, kind, outputs, inputs);
                let view = TensorView {
                    name: "t",
                    kind,
                    rows: outputs,
                    columns: inputs,
                    bytes: &bytes,
                };
                product::<S>(&view, &mut random);
            }
        }
    }
}

/// 30 rows at once, then in smaller numbers and other groups: near the f64 sums, equal bits.
fn product<S: Lanes>(view: &TensorView<'_>, random: &mut Random) {
    const ROWS: usize = 30;
    let matrix = Matrix::pack(view, KvDtype::F32);
    let (outputs, inputs) = (view.rows, view.columns);
    let x = Rows::new(ROWS, inputs);
    for row in 0..ROWS {
        // SAFETY: single-threaded test.
        unsafe { x.write(row, inputs) }.copy_from_slice(&random.floats(inputs));
    }
    let run = |first: usize, rows: usize, step: usize, mode: SumMode| {
        let out = Rows::new(ROWS, outputs);
        let mut panel = Aligned::zeroed(panel_len::<S>(inputs));
        for row in 0..ROWS {
            // SAFETY: single-threaded test.
            unsafe { out.write(row, outputs) }.fill(0.5);
        }
        for start in (0..matrix.groups()).step_by(step) {
            let input = Input {
                start: x.row(first),
                stride: x.stride(),
                rows,
                digits: None,
                pairs: None,
            };
            let output = Output {
                start: out.row(first),
                stride: out.stride(),
                mode,
            };
            let groups = start..(start + step).min(matrix.groups());
            // SAFETY: rows and groups are in range; `S` is there.
            unsafe { multiply::<S>(&matrix, groups, input, output, panel.as_mut_slice()) };
        }
        out
    };
    let whole = run(0, ROWS, matrix.groups(), SumMode::Store);
    let added = run(0, ROWS, matrix.groups(), SumMode::Add);
    let mut weights = vec![0.0; inputs];
    for output in 0..outputs {
        dequantize_row(view, output, &mut weights);
        for row in 0..ROWS {
            // SAFETY: single-threaded test.
            let (x, found, added) = unsafe {
                (
                    x.read(row, inputs),
                    whole.read(row, outputs)[output],
                    added.read(row, outputs)[output],
                )
            };
            let terms = || {
                x.iter()
                    .zip(&weights)
                    .map(|(x, w)| f64::from(*x) * f64::from(*w))
            };
            let (exact, scale): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            let error = (f64::from(found) - exact).abs();
            assert!(
                error <= scale * 1e-6 + 1e-30,
                "{} {row} {output}: {found} for {exact}",
                view.kind
            );
            assert_eq!(added, 0.5 + found);
        }
    }
    for rows in [1usize, 2, 3, 4, 5, 7, 12, 13, 29] {
        for (first, step) in [(0, 1), (ROWS - rows, 3), (ROWS - rows, 100)] {
            let part = run(first, rows, step, SumMode::Store);
            for row in first..first + rows {
                // SAFETY: single-threaded test.
                let (a, b) = unsafe { (part.read(row, outputs), whole.read(row, outputs)) };
                assert_eq!(
                    a, b,
                    "{} rows {rows} from {first}, {step} groups",
                    view.kind
                );
            }
        }
    }
}

#[test]
fn products_are_right_and_do_not_depend_on_what_is_beside_them() {
    at_every_isa(&Products);
}

#[test]
fn padding_of_outputs_is_zero() {
    let mut random = Random(9);
    let bytes = stored(&mut random, TensorType::F32, 3, 5);
    let view = TensorView {
        name: "t",
        kind: TensorType::F32,
        rows: 3,
        columns: 5,
        bytes: &bytes,
    };
    let matrix = Matrix::pack(&view, KvDtype::F32);
    let (x, out) = (Rows::new(1, 5), Rows::new(1, 3));
    // SAFETY: single-threaded test, shapes as made.
    unsafe {
        x.write(0, 5).fill(1.0);
        out.write(0, GROUP).fill(7.0);
        let input = Input {
            start: x.row(0),
            stride: x.stride(),
            rows: 1,
            digits: None,
            pairs: None,
        };
        let output = Output {
            start: out.row(0),
            stride: out.stride(),
            mode: SumMode::Store,
        };
        multiply::<Portable>(&matrix, 0..1, input, output, &mut []);
        assert!(out.read(0, GROUP)[3..].iter().all(|x| *x == 0.0));
    }
}
