//! Which instruction set the kernels use: found at run time, or forced by `KVSERVE_CPU`.

use super::dots::Arithmetic;
#[cfg(target_arch = "x86_64")]
use super::dots::digits::Digits;
use kvserve_kv::KvDtype;
use std::fmt;

/// Instruction sets that kernels exist for. A value other than `Portable` exists only where
/// the processor has it: [`Isa::detect`] and [`Isa::available`] are the only makers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(crate) Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// [`Level::Avx512Dots`] with activations of one digit.
    #[cfg(target_arch = "x86_64")]
    Avx512Int8,
    /// With VNNI and BF16. In f32 it is the same as [`Level::Avx512`].
    #[cfg(target_arch = "x86_64")]
    Avx512Dots,
}

/// `KVSERVE_CPU` names an instruction set that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableIsa {
    /// What it names.
    pub wanted: String,
    /// What could be used.
    pub available: Vec<&'static str>,
}

impl fmt::Display for UnusableIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "KVSERVE_CPU={:?} cannot be used on this processor; use one of {}, or leave it unset",
            self.wanted,
            self.available.join(", ")
        )
    }
}

impl std::error::Error for UnusableIsa {}

impl Isa {
    /// The instruction sets of this processor; never empty, the one to take by default last.
    pub fn available() -> Vec<Isa> {
        let mut all = vec![Isa(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                all.push(Isa(Level::Avx2));
            }
            if avx2 && is_x86_feature_detected!("avx512f") {
                all.push(Isa(Level::Avx512));
                let dots = is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512bf16");
                if dots {
                    all.push(Isa(Level::Avx512Int8));
                    all.push(Isa(Level::Avx512Dots));
                }
            }
        }
        all
    }

    /// The best one, or the one that the environment variable `KVSERVE_CPU` names
    /// (`portable`, `avx2`, `avx512`, `avx512bf16`; `avx512int8` is the last with activations of
    /// eight bits).
    ///
    /// # Errors
    /// [`UnusableIsa`] when the variable names an unknown one or one the processor lacks.
    pub fn detect() -> Result<Isa, UnusableIsa> {
        match std::env::var("KVSERVE_CPU") {
            Ok(wanted) if !wanted.is_empty() => Isa::named(&wanted),
            Ok(_) | Err(_) => Ok(*Isa::available().last().expect("portable is always there")),
        }
    }

    /// The one of that name, if this processor has it.
    ///
    /// # Errors
    /// [`UnusableIsa`].
    pub fn named(wanted: &str) -> Result<Isa, UnusableIsa> {
        let available = Isa::available();
        available
            .iter()
            .copied()
            .find(|isa| isa.name() == wanted)
            .ok_or_else(|| UnusableIsa {
                wanted: wanted.to_string(),
                available: available.iter().map(|isa| isa.name()).collect(),
            })
    }

    /// Its name, as in `KVSERVE_CPU`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Int8 => "avx512int8",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Dots => "avx512bf16",
        }
    }

    /// The class of results (`KvLayout::kernel_class`): within one class they are bit-equal.
    pub fn kernel_class(self, dtype: KvDtype) -> String {
        let (name, version) = match self.arithmetic(dtype) {
            Arithmetic::Dots(_) => (self.name(), DOTS_VERSION),
            Arithmetic::Float => (self.float_name(), FLOAT_VERSION),
        };
        let dtype = match dtype {
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
        };
        format!("cpu-{name}-{dtype}-v{version}")
    }

    /// What the kernels over `Lanes` are compiled for.
    fn float_name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Int8 | Level::Avx512Dots => "avx512",
        }
    }

    /// How products are computed: by dot products only where the dtype allows their rounding.
    pub(crate) fn arithmetic(self, dtype: KvDtype) -> Arithmetic {
        match (self.0, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512Dots, KvDtype::Bf16) => Arithmetic::Dots(Digits::Two),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512Int8, KvDtype::Bf16) => Arithmetic::Dots(Digits::One),
            (_, KvDtype::F32 | KvDtype::Bf16) => Arithmetic::Float,
        }
    }
}

/// Raised with every change of the order of additions in any kernel over `Lanes`.
const FLOAT_VERSION: u32 = 1;
/// Raised with every such change, or one of rounding, in the kernels of `super::dots`.
const DOTS_VERSION: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_says_what_could_be_used() {
        let error = Isa::named("avx9000").unwrap_err().to_string();
        assert!(
            error.contains("avx9000") && error.contains("portable"),
            "{error}"
        );
    }

    #[test]
    fn classes_part_by_instruction_set_and_dtype() {
        let portable = Isa::named("portable").unwrap();
        assert_eq!(portable.kernel_class(KvDtype::F32), "cpu-portable-f32-v1");
        assert_eq!(portable.kernel_class(KvDtype::Bf16), "cpu-portable-bf16-v1");
    }
}
