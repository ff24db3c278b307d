//! Every kernel at every instruction set of this machine: against sums in f64, over odd shapes,
//! and bit-equal whatever stands beside a row.

mod attention;
#[cfg(target_arch = "x86_64")]
mod dots;
mod elementwise;
mod products;

use super::isa::{Isa, Level};
use super::lanes::Lanes;
use super::lanes_portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{lanes_avx2::Avx2, lanes_avx512::Avx512};

/// A test that is run once per instruction set.
pub(super) trait Check {
    fn check<S: Lanes>(&self);
}

pub(super) fn at_every_isa(check: &impl Check) {
    for isa in Isa::available() {
        match isa.0 {
            Level::Portable => check.check::<Portable>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => check.check::<Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Int8 | Level::Avx512Dots => {}
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => check.check::<Avx512>(),
        }
    }
}

/// Numbers that look random; the same in every run.
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(99);
        (self.0 ^ (self.0 >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 16
    }

    pub fn float(&mut self) -> f32 {
        (self.next() & 0xFF_FFFF) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}
