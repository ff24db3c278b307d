//! Norms, exponentials, activations: kernels over one row.

use super::lanes::{Lanes, Op};

/// `e^x` per lane, relative error below 3e-7. Inputs are clamped to where the result is a normal
/// number, so that it is never zero, infinite or subnormal.
///
/// # Safety
/// [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Lanes>(x: S::V) -> S::V {
    // ln 2 in two parts: n * LN2_HIGH is exact for |n| < 2^9.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Taylor terms 1/6! .. 1/0!: on |r| <= ln 2 / 2 the first one left out is below 1.2e-7.
    const TERMS: [f32; 6] = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // SAFETY: lanes only.
    unsafe {
        let x = S::min(S::max(x, S::splat(-87.0)), S::splat(88.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN2_HIGH), x);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(1.0 / 720.0);
        for term in TERMS {
            p = S::fma(p, r, S::splat(term));
        }
        S::scale_pow2(p, n)
    }
}

/// `out = x / rms(x) * weight`. `x`, `weight` and `out` are padded to whole vectors with zeroes.
pub(crate) struct RmsNorm {
    pub x: *const f32,
    pub weight: *const f32,
    pub out: *mut f32,
    pub length: usize,
    pub epsilon: f32,
}

impl Op for RmsNorm {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: the three rows are valid up to the padded length.
        unsafe {
            let padded = self.length.next_multiple_of(16);
            let mut squares = S::splat(0.0);
            for i in (0..padded).step_by(16) {
                let x = S::load(self.x.add(i));
                squares = S::fma(x, x, squares);
            }
            let mean = S::reduce_sum(squares) / self.length as f32;
            let scale = S::splat(1.0 / (mean + self.epsilon).sqrt());
            for i in (0..padded).step_by(16) {
                let x = S::mul(S::load(self.x.add(i)), scale);
                S::store(self.out.add(i), S::mul(x, S::load(self.weight.add(i))));
            }
        }
    }
}

/// `gate = silu(gate) * up` over `length` elements, a multiple of 16.
pub(crate) struct SiluMul {
    pub gate: *mut f32,
    pub up: *const f32,
    pub length: usize,
}

impl Op for SiluMul {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: both rows are valid for `length`.
        unsafe {
            let one = S::splat(1.0);
            for i in (0..self.length).step_by(16) {
                let gate = S::load(self.gate.add(i));
                let e = exp::<S>(S::sub(S::splat(0.0), gate));
                let silu = S::div(gate, S::add(one, e));
                S::store(self.gate.add(i), S::mul(silu, S::load(self.up.add(i))));
            }
        }
    }
}

/// `out[i] = e^((x[i] - shift) * scale)`, over slices of one length.
pub(crate) struct ExpInto<'a> {
    pub x: &'a [f32],
    pub shift: f32,
    pub scale: f32,
    pub out: &'a mut [f32],
}

impl Op for ExpInto<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let one = |x: S::V| {
            // SAFETY: lanes only.
            unsafe {
                exp::<S>(S::mul(
                    S::sub(x, S::splat(self.shift)),
                    S::splat(self.scale),
                ))
            }
        };
        let mut x = self.x.chunks_exact(16);
        let mut out = self.out.chunks_exact_mut(16);
        for (x, out) in (&mut x).zip(&mut out) {
            // SAFETY: chunks of sixteen.
            unsafe { S::store(out.as_mut_ptr(), one(S::load(x.as_ptr()))) }
        }
        let (rest, out) = (x.remainder(), out.into_remainder());
        let mut padded = [0.0f32; 16];
        padded[..rest.len()].copy_from_slice(rest);
        // SAFETY: sixteen floats.
        unsafe { S::store(padded.as_mut_ptr(), one(S::load(padded.as_ptr()))) }
        out.copy_from_slice(&padded[..out.len()]);
    }
}

/// One block of online softmax for one query: scores become weights, and the running maximum,
/// sum and result are brought to the new maximum.
pub(crate) struct SoftmaxBlock {
    /// Scores of a block, padded to whole vectors; become weights (0 from `valid` on).
    pub scores: *mut f32,
    /// How many of them count; at least 1.
    pub valid: usize,
    /// Length of the block.
    pub length: usize,
    /// Running result, `result_length` (a multiple of 16) elements.
    pub result: *mut f32,
    pub result_length: usize,
    pub maximum: f32,
    pub sum: f32,
}

impl Op for SoftmaxBlock {
    /// New maximum and sum.
    type Out = (f32, f32);

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) -> (f32, f32) {
        // SAFETY: the op's pointers are valid for its lengths.
        unsafe {
            let mut best = S::splat(f32::NEG_INFINITY);
            let valid_padded = self.valid.next_multiple_of(16);
            for i in (0..valid_padded).step_by(16) {
                let score = S::load(self.scores.add(i));
                let left = self.valid - i;
                best = S::max(best, S::keep_first(score, left, f32::NEG_INFINITY));
            }
            let maximum = self.maximum.max(S::reduce_max(best));
            let shift = S::splat(maximum);
            let mut sum = S::splat(0.0);
            for i in (0..valid_padded).step_by(16) {
                let weight = exp::<S>(S::sub(S::load(self.scores.add(i)), shift));
                let weight = S::keep_first(weight, self.valid - i, 0.0);
                sum = S::add(sum, weight);
                S::store(self.scores.add(i), weight);
            }
            for i in (valid_padded..self.length).step_by(16) {
                S::store(self.scores.add(i), S::splat(0.0));
            }
            let sum = S::reduce_sum(sum);
            if self.maximum == f32::NEG_INFINITY {
                return (maximum, sum);
            }
            let mut one = [0.0f32; 16];
            S::store(one.as_mut_ptr(), exp::<S>(S::splat(self.maximum - maximum)));
            let fade = S::splat(one[0]);
            for i in (0..self.result_length).step_by(16) {
                let result = S::load(self.result.add(i));
                S::store(self.result.add(i), S::mul(result, fade));
            }
            (maximum, self.sum * one[0] + sum)
        }
    }
}

/// [`ExpInto`] as a plain function, for the sampler. Handed out only by an engine whose
/// instruction set is `S`.
pub(crate) fn exp_into<S: Lanes>(x: &[f32], shift: f32, scale: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    // SAFETY: slices of one length; the engine has found `S` on this processor.
    unsafe {
        S::enter(ExpInto {
            x,
            shift,
            scale,
            out,
        });
    }
}
