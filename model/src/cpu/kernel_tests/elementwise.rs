//! Exponentials, norms, activations, and what they are made of.

use super::{Check, Random, at_every_isa};
use crate::cpu::elementwise::{RmsNorm, SiluMul, exp, exp_into};
use crate::cpu::lanes::{Lanes, Op};

struct Elementwise;

/// `exp` of sixteen numbers.
struct ExpOf(*mut f32);

impl Op for ExpOf {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: sixteen floats.
        unsafe { S::store(self.0, exp::<S>(S::load(self.0))) }
    }
}

impl Check for Elementwise {
    fn check<S: Lanes>(&self) {
        for i in 0..2000 {
            let x = -80.0 + i as f32 * 0.083;
            let mut sixteen = [x; 16];
            // SAFETY: sixteen floats; `S` is there.
            unsafe { S::enter(ExpOf(sixteen.as_mut_ptr())) };
            let exact = f64::from(x).exp();
            let error = (f64::from(sixteen[0]) - exact).abs() / exact;
            assert!(error < 5e-7, "exp({x}) = {} is off by {error}", sixteen[0]);
        }
        for extreme in [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY, f32::NAN] {
            let mut sixteen = [extreme; 16];
            // SAFETY: as above.
            unsafe { S::enter(ExpOf(sixteen.as_mut_ptr())) };
            assert!(sixteen[0] > 0.0 && sixteen[0].is_finite(), "exp({extreme})");
        }
        let mut random = Random(5);
        for length in [1usize, 15, 16, 50, 576] {
            norm::<S>(&mut random, length);
            let x = random.floats(length);
            let mut out = vec![0.0; length];
            exp_into::<S>(&x, 0.5, 3.0, &mut out);
            for (x, found) in x.iter().zip(&out) {
                let exact = ((x - 0.5) * 3.0).exp();
                assert!((found - exact).abs() <= exact * 1e-6);
            }
        }
        let mut gate: Vec<f32> = random.floats(48).iter().map(|x| x * 100.0).collect();
        let (before, up) = (gate.clone(), random.floats(48));
        let op = SiluMul {
            gate: gate.as_mut_ptr(),
            up: up.as_ptr(),
            length: 48,
        };
        // SAFETY: 48 floats each.
        unsafe { S::enter(op) };
        for ((found, gate), up) in gate.iter().zip(&before).zip(&up) {
            let gate = f64::from(*gate);
            let exact = gate / (1.0 + (-gate).exp()) * f64::from(*up);
            assert!(
                (f64::from(*found) - exact).abs() < 1e-5,
                "{found} for {exact}"
            );
        }
        transpose::<S>(&mut random);
        lanes_beyond::<S>(&mut random);
    }
}

fn norm<S: Lanes>(random: &mut Random, length: usize) {
    let padded = length.next_multiple_of(16);
    let pad = |mut x: Vec<f32>| {
        x.resize(padded, 0.0);
        x
    };
    let (x, weight) = (pad(random.floats(length)), pad(random.floats(length)));
    let mut out = vec![0.0; padded];
    let op = RmsNorm {
        x: x.as_ptr(),
        weight: weight.as_ptr(),
        out: out.as_mut_ptr(),
        length,
        epsilon: 1e-5,
    };
    // SAFETY: padded rows.
    unsafe { S::enter(op) };
    let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let rms = (squares / length as f64 + 1e-5).sqrt();
    for i in 0..length {
        let exact = f64::from(x[i]) / rms * f64::from(weight[i]);
        assert!(
            (f64::from(out[i]) - exact).abs() < 2e-6,
            "{} for {exact}",
            out[i]
        );
    }
    assert!(out[length..].iter().all(|pad| *pad == 0.0));
}

struct TransposeOf {
    from: *const f32,
    to: *mut f32,
}

impl Op for TransposeOf {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: 16 rows at strides 19 and 21.
        unsafe { S::transpose(self.from, 19, self.to, 21) }
    }
}

fn transpose<S: Lanes>(random: &mut Random) {
    let from = random.floats(16 * 19);
    let mut to = vec![0.0f32; 16 * 21];
    let op = TransposeOf {
        from: from.as_ptr(),
        to: to.as_mut_ptr(),
    };
    // SAFETY: 16 rows at their strides.
    unsafe { S::enter(op) };
    for row in 0..16 {
        for column in 0..16 {
            assert_eq!(to[column * 21 + row], from[row * 19 + column]);
        }
    }
}

struct Beyond {
    x: *mut f32,
    count: usize,
}

impl Op for Beyond {
    type Out = (f32, f32);

    #[inline(always)]
    unsafe fn run<S: Lanes>(self) -> (f32, f32) {
        // SAFETY: sixteen floats.
        unsafe {
            let kept = S::keep_first(S::load(self.x), self.count, -9.0);
            S::store(self.x, kept);
            (S::reduce_sum(kept), S::reduce_max(kept))
        }
    }
}

fn lanes_beyond<S: Lanes>(random: &mut Random) {
    for count in 0..=20 {
        let before = random.floats(16);
        let mut x = before.clone();
        let op = Beyond {
            x: x.as_mut_ptr(),
            count,
        };
        // SAFETY: sixteen floats.
        let (sum, max) = unsafe { S::enter(op) };
        for lane in 0..16 {
            let expected = if lane < count { before[lane] } else { -9.0 };
            assert_eq!(x[lane], expected);
        }
        assert_eq!(max, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        // The tree that the module's docs promise, at every instruction set.
        let mut tree = x;
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                tree[lane] += tree[lane + half];
            }
        }
        assert_eq!(sum.to_bits(), tree[0].to_bits());
    }
}

#[test]
fn elementwise_kernels_are_right() {
    at_every_isa(&Elementwise);
}
