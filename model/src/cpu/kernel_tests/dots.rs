//! Products by dot-product instructions: bit-equal to the same sums in plain Rust where those are
//! whole numbers, near sums in f64, and independent of what stands beside a row.

use super::products::stored;
use super::{Random, attention};
use crate::cpu::aligned::Rows;
use crate::cpu::dots::digits::{DigitRows, Digits, reference};
use crate::cpu::dots::pairs::PairRows;
use crate::cpu::isa::{Isa, Level};
use crate::cpu::lanes::SumMode;
use crate::cpu::lanes_avx512::Avx512;
use crate::cpu::matmul::{Input, Output, multiply};
use crate::cpu::matrix::{BLOCK, Matrix};
use crate::weights::{
    TensorType, TensorView, bf16_to_f32, dequantize_row, f16_to_f32, f32_to_bf16,
};
use kvserve_kv::KvDtype;

/// Rows of the widest product; not a multiple of any register block.
const ROWS: usize = 31;

/// Whether this processor has the instructions; a test without them says so.
fn usable() -> bool {
    let usable = Isa::available()
        .iter()
        .any(|isa| isa.0 == Level::Avx512Dots);
    if !usable {
        eprintln!("skipped: this processor lacks AVX-512 VNNI or BF16");
    }
    usable
}

/// Rows of random numbers, some of them large: what a block's scale must live with.
fn activations(random: &mut Random, inputs: usize) -> Rows {
    let x = Rows::new(ROWS, inputs);
    for row in 0..ROWS {
        // SAFETY: single-threaded test.
        let to = unsafe { x.write(row, inputs) };
        to.copy_from_slice(&random.floats(inputs));
        if row % 3 == 0 {
            to[random.next() as usize % inputs] *= 1000.0;
        }
        if row == 5 {
            to[..inputs.min(BLOCK)].fill(0.0);
        }
    }
    x
}

/// The product of all rows from `first` on, `step` groups at a time.
fn run(matrix: &Matrix, x: &Rows, form: Form<'_>, first: usize, rows: usize, step: usize) -> Rows {
    let out = Rows::new(ROWS, matrix.outputs);
    for start in (0..matrix.groups()).step_by(step) {
        let groups = start..(start + step).min(matrix.groups());
        // SAFETY: rows and groups are in range; the instructions are there.
        unsafe {
            let (digits, pairs) = match form {
                Form::Digits(of, count) => (Some(of.input(count).skip_rows(first)), None),
                Form::Pairs(of) => {
                    let mut input = of.input();
                    input.words = input.words.add(first * input.stride);
                    (None, Some(input))
                }
            };
            let input = Input {
                start: x.row(first),
                stride: x.stride(),
                rows,
                digits,
                pairs,
            };
            let output = Output {
                start: out.row(first),
                stride: out.stride(),
                mode: if step == 1 {
                    SumMode::Add
                } else {
                    SumMode::Store
                },
            };
            multiply::<Avx512>(matrix, groups, input, output, &mut []);
        }
    }
    out
}

#[derive(Clone, Copy)]
enum Form<'a> {
    Digits(&'a DigitRows, Digits),
    Pairs(&'a PairRows),
}

fn parts_are_the_whole(matrix: &Matrix, x: &Rows, form: Form<'_>, whole: &Rows) {
    for rows in [1usize, 2, 3, 4, 5, 6, 7, 9, 30] {
        for (first, step) in [(0, 1), (ROWS - rows, 3), (1, 5), (ROWS - rows, 100)] {
            let part = run(matrix, x, form, first, rows, step);
            for row in first..first + rows {
                // SAFETY: single-threaded test.
                let (a, b) = unsafe {
                    (
                        part.read(row, matrix.outputs),
                        whole.read(row, matrix.outputs),
                    )
                };
                assert_eq!(a, b, "{rows} rows from {first}, {step} groups");
            }
        }
    }
}

/// The kernel's sum for one element, in plain Rust: the same operations in the same order.
fn exact_digits(view: &TensorView<'_>, output: usize, x: &[f32], count: Digits) -> f32 {
    let half = |bytes: &[u8]| f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]));
    let mut sum = 0.0f32;
    let block_bytes = view.kind.block_bytes();
    let blocks = view.row(output).chunks_exact(block_bytes);
    for (stored, x) in blocks.zip(x.chunks_exact(BLOCK)) {
        let (numbers, header) = reference::cut(x, count);
        let dot = |q: &dyn Fn(usize) -> i32| -> i32 {
            numbers.iter().enumerate().map(|(k, a)| a * q(k)).sum()
        };
        match view.kind {
            TensorType::Q8_0 => {
                let whole = dot(&|k| i32::from(stored[2 + k] as i8));
                sum = (whole as f32 * header.scale).mul_add(half(stored), sum);
            }
            TensorType::Q4_1 => {
                let whole = dot(&|k| i32::from(stored[4 + k % 16] >> (k / 16 * 4) & 15));
                sum = (whole as f32 * header.scale).mul_add(half(stored), sum);
                sum = half(&stored[2..]).mul_add(header.scaled_sum, sum);
            }
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => unreachable!(),
        }
    }
    sum
}

#[test]
fn products_of_digits_are_those_of_plain_rust() {
    if !usable() {
        return;
    }
    let mut random = Random(21);
    for kind in [TensorType::Q8_0, TensorType::Q4_1] {
        for (outputs, blocks) in [
            (1usize, 1usize),
            (16, 2),
            (33, 3),
            (80, 5),
            (130, 1),
            (112, 18),
        ] {
            let inputs = blocks * BLOCK;
            let bytes = stored(&mut random, kind, outputs, inputs);
            let view = TensorView {
                name: "t",
                kind,
                rows: outputs,
                columns: inputs,
                bytes: &bytes,
            };
            let matrix = Matrix::pack(&view, KvDtype::Bf16);
            let x = activations(&mut random, inputs);
            for count in [Digits::One, Digits::Two] {
                let digits = DigitRows::new(ROWS, inputs);
                for row in 0..ROWS {
                    // SAFETY: single-threaded test; the instructions are there.
                    unsafe { digits.fill(row, x.row(row), inputs, count) };
                }
                let form = Form::Digits(&digits, count);
                let whole = run(&matrix, &x, form, 0, ROWS, 100);
                for output in 0..outputs {
                    for row in 0..ROWS {
                        // SAFETY: single-threaded test.
                        let (x, found) =
                            unsafe { (x.read(row, inputs), whole.read(row, outputs)[output]) };
                        let exact = exact_digits(&view, output, x, count);
                        assert_eq!(
                            found.to_bits(),
                            exact.to_bits(),
                            "{kind} {count:?} {row} {output}: {found} for {exact}"
                        );
                    }
                }
                parts_are_the_whole(&matrix, &x, form, &whole);
            }
        }
    }
}

#[test]
fn two_digits_are_finer_than_bfloat16() {
    if !usable() {
        return;
    }
    let mut random = Random(22);
    let (outputs, inputs) = (48, 576);
    let bytes = stored(&mut random, TensorType::Q8_0, outputs, inputs);
    let view = TensorView {
        name: "t",
        kind: TensorType::Q8_0,
        rows: outputs,
        columns: inputs,
        bytes: &bytes,
    };
    let matrix = Matrix::pack(&view, KvDtype::Bf16);
    let x = activations(&mut random, inputs);
    let digits = DigitRows::new(ROWS, inputs);
    for row in 0..ROWS {
        // SAFETY: single-threaded test; the instructions are there.
        unsafe { digits.fill(row, x.row(row), inputs, Digits::Two) };
    }
    let found = run(&matrix, &x, Form::Digits(&digits, Digits::Two), 0, ROWS, 9);
    let mut weights = vec![0.0; inputs];
    let (mut ours, mut bf16s) = (0.0f64, 0.0f64);
    for output in 0..outputs {
        dequantize_row(&view, output, &mut weights);
        for row in 0..ROWS {
            // SAFETY: single-threaded test.
            let (x, found) = unsafe { (x.read(row, inputs), found.read(row, outputs)[output]) };
            let sum = |round: &dyn Fn(f32) -> f32| -> f64 {
                let terms = x.iter().zip(&weights);
                terms
                    .map(|(x, w)| f64::from(round(*x)) * f64::from(*w))
                    .sum()
            };
            let exact = sum(&|x| x);
            ours += (f64::from(found) - exact).powi(2);
            bf16s += (sum(&|x| bf16_to_f32(f32_to_bf16(x))) - exact).powi(2);
        }
    }
    assert!(
        ours * 100.0 < bf16s,
        "squares of errors: {ours} and {bf16s}"
    );
}

#[test]
fn what_is_not_a_number_stays_none() {
    if !usable() {
        return;
    }
    let mut random = Random(23);
    let bytes = stored(&mut random, TensorType::Q4_1, 16, 64);
    let view = TensorView {
        name: "t",
        kind: TensorType::Q4_1,
        rows: 16,
        columns: 64,
        bytes: &bytes,
    };
    let matrix = Matrix::pack(&view, KvDtype::Bf16);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let x = activations(&mut random, 64);
        let digits = DigitRows::new(ROWS, 64);
        // SAFETY: single-threaded test; the instructions are there.
        let out = unsafe {
            x.write(0, 64)[40] = odd;
            for row in 0..ROWS {
                digits.fill(row, x.row(row), 64, Digits::Two);
            }
            run(&matrix, &x, Form::Digits(&digits, Digits::Two), 0, ROWS, 4)
        };
        // SAFETY: single-threaded test.
        let (first, second) = unsafe { (out.read(0, 16), out.read(1, 16)) };
        assert!(first.iter().all(|value| value.is_nan()), "{odd}: {first:?}");
        assert!(second.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn products_of_pairs_are_near_the_exact_sums() {
    if !usable() {
        return;
    }
    let mut random = Random(24);
    for (outputs, inputs) in [
        (1usize, 1usize),
        (16, 7),
        (33, 96),
        (80, 161),
        (130, 32),
        (144, 2),
    ] {
        let bytes = stored(&mut random, TensorType::Bf16, outputs, inputs);
        let view = TensorView {
            name: "t",
            kind: TensorType::Bf16,
            rows: outputs,
            columns: inputs,
            bytes: &bytes,
        };
        let matrix = Matrix::pack(&view, KvDtype::Bf16);
        let x = activations(&mut random, inputs);
        let pairs = PairRows::new(ROWS, inputs);
        for row in 0..ROWS {
            // SAFETY: single-threaded test; the instructions are there.
            unsafe { pairs.fill(row, x.row(row), inputs) };
        }
        let whole = run(&matrix, &x, Form::Pairs(&pairs), 0, ROWS, 100);
        let mut weights = vec![0.0; inputs];
        for output in 0..outputs {
            dequantize_row(&view, output, &mut weights);
            for row in 0..ROWS {
                // SAFETY: single-threaded test.
                let (x, found) = unsafe { (x.read(row, inputs), whole.read(row, outputs)[output]) };
                let terms = || {
                    let terms = x.iter().zip(&weights);
                    terms.map(|(x, w)| f64::from(bf16_to_f32(f32_to_bf16(*x))) * f64::from(*w))
                };
                let (exact, scale): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                let error = (f64::from(found) - exact).abs();
                assert!(
                    error <= scale * 2e-6 + 1e-30,
                    "{row} {output}: {found} for {exact}"
                );
            }
        }
        parts_are_the_whole(&matrix, &x, Form::Pairs(&pairs), &whole);
    }
}

#[test]
fn attention_by_pairs_is_right_and_a_row_does_not_depend_on_its_tile() {
    if !usable() {
        return;
    }
    for (head_dim, group) in [(64, 3), (10, 1), (32, 7), (6, 50), (128, 4)] {
        attention::by_pairs(head_dim, group);
    }
}
