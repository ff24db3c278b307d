//! Products by dot-product instructions (AVX-512 VNNI and BF16), for dtype bf16.
//!
//! One instruction multiplies and adds four bytes, or two bfloat16, per 32-bit lane: four and two
//! times what a fused multiply does in f32. So the activations of a product are first brought into
//! one of two forms, once for all weights that they meet:
//!
//! * [`digits`]: for `Q4` and `Q8` weights. An activation is a whole number of 16 bits, cut into
//!   two signed bytes, with a scale for each block of 32. Sums within a block are whole numbers,
//!   hence exact; what is lost is the rounding of activations to 1/32,512 of their block's
//!   largest, which is finer than bfloat16.
//! * [`pairs`]: for `Bf16` weights. Activations are rounded to bfloat16, two to a word.
//!
//! [`bytes`] and [`brain`] are the kernels. Per output element there is one order of additions
//! (block by block, pair by pair), whatever rows and groups share a register block: what is said
//! in [`super::matmul`] about PROTOCOL D1 holds here too. Matrices of other packings (`F16`) take
//! the kernels over `Lanes`.

#[cfg(target_arch = "x86_64")]
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
pub(crate) mod brain;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes;
pub(crate) mod digits;
pub(crate) mod pairs;

/// How products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// In f32, by the kernels over `Lanes`.
    Float,
    /// By dot products where the weights' packing has them; quantised weights meet activations
    /// of so many digits.
    Dots(digits::Digits),
}
