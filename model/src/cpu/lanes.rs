//! Sixteen f32 lanes: the one vector type that every kernel is written over, once.
//!
//! A kernel is an [`Op`] whose `run` is generic over [`Lanes`]; [`Lanes::enter`] compiles it with
//! the features of one instruction set. Every lane computes by itself and every sum over lanes is
//! taken in one fixed tree, so that within an instruction set a result depends on its own inputs
//! only (PROTOCOL D1).
//!
//! # Safety
//! All methods of [`Lanes`] ask the same: the processor has the instruction set (kept by
//! [`super::isa::Isa`], the only maker of a choice), pointers are valid for the 16 elements that
//! the method names (64 bytes of words), and no alignment is asked for.

/// A kernel, to be run at one instruction set.
pub(crate) trait Op {
    /// What it gives.
    type Out;

    /// The body; must be `#[inline(always)]`, so that it takes on the features of its caller.
    ///
    /// # Safety
    /// The contract of the op's own fields, and [`Lanes`].
    unsafe fn run<S: Lanes>(self) -> Self::Out;
}

/// One row block times one panel of columns; see [`super::matmul::micro`].
#[derive(Clone, Copy)]
pub(crate) struct MicroArgs {
    /// Rows of activations, `[row][k]`.
    pub x: *const f32,
    /// Elements between two rows of `x`.
    pub x_stride: usize,
    /// The panel, `[k][column]`.
    pub w: *const f32,
    /// Elements between two `k` of `w`.
    pub w_stride: usize,
    /// Length of the sums.
    pub k: usize,
    /// Results, `[row][column]`.
    pub out: *mut f32,
    /// Elements between two rows of `out`.
    pub out_stride: usize,
    /// What happens to the sum.
    pub mode: SumMode,
}

/// What a matrix kernel does with its sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SumMode {
    /// `out = sum`, the sum starting at zero.
    Store,
    /// `out = out + sum`, the sum starting at zero.
    Add,
    /// The sum starts at `out` and ends there.
    Chain,
}

/// Sixteen lanes at one instruction set. For safety see the module's docs.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Sixteen floats.
    type V: Copy;
    /// Sixteen 32-bit words, each with numbers of 4, 8 or 16 bits, the lowest first.
    type Words: Copy;
    /// Rows of the largest register block.
    const MICRO_ROWS: usize;
    /// Column groups (of 16) of the largest register block.
    const MICRO_GROUPS: usize;

    /// Column groups at once when a single row meets packed weights: 1, 2 or 4.
    const DIRECT_GROUPS: usize;

    /// Runs an op compiled for this instruction set.
    unsafe fn enter<O: Op>(op: O) -> O::Out;
    /// Runs the register block of `rows <= MICRO_ROWS` and `groups <= MICRO_GROUPS`.
    unsafe fn micro(args: MicroArgs, rows: usize, groups: usize);

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, value: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`; one rounding where the instruction set has it.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest whole number, ties to even; |a| < 2^22.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for whole `n` in [-126, 127].
    unsafe fn scale_pow2(a: Self::V, n: Self::V) -> Self::V;
    /// Lanes from `count` on become `fill`.
    unsafe fn keep_first(a: Self::V, count: usize, fill: f32) -> Self::V;
    /// Sum by halves: lane i with i + 8, then + 4, + 2, + 1.
    unsafe fn reduce_sum(a: Self::V) -> f32;
    /// The largest lane.
    unsafe fn reduce_max(a: Self::V) -> f32;
    /// Sixteen half-precision numbers.
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// 64 bytes.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// The lowest 4 bits of each word as a float.
    unsafe fn low_nibble(words: Self::Words) -> Self::V;
    /// The lowest 8 bits of each word as a float, 0 to 255.
    unsafe fn low_byte(words: Self::Words) -> Self::V;
    /// The lowest 16 bits of each word, a bfloat16.
    unsafe fn low_bf16(words: Self::Words) -> Self::V;
    /// The highest 16 bits of each word, a bfloat16.
    unsafe fn high_bf16(words: Self::Words) -> Self::V;
    /// Drops the lowest 4 bits of each word.
    unsafe fn drop_nibble(words: Self::Words) -> Self::Words;
    /// Drops the lowest 8 bits of each word.
    unsafe fn drop_byte(words: Self::Words) -> Self::Words;

    /// Asks for a cache line that will be read soon; any address may be given.
    #[inline(always)]
    unsafe fn prefetch(_line: *const u8) {}

    /// Writes the transpose of a 16 x 16 block.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..16 {
            for column in 0..16 {
                // SAFETY: both blocks are 16 x 16 at their strides, by the contract.
                unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) }
            }
        }
    }
}

/// Calls the register block with constant shape: `dispatch_micro!(Self, args, rows, groups; ROWS...; GROUPS...)`.
macro_rules! dispatch_micro {
    ($lanes:ty, $args:ident, $rows:ident, $groups:ident, [$($r:literal)*], $gs:tt) => {
        match $rows {
            $($r => dispatch_micro!(@groups $lanes, $args, $groups, $r, $gs),)*
            _ => unreachable!("a register block of {} rows", $rows),
        }
    };
    (@groups $lanes:ty, $args:ident, $groups:ident, $r:literal, [$($g:literal)*]) => {
        match $groups {
            $($g => <$lanes as $crate::cpu::lanes::Lanes>::enter(
                $crate::cpu::matmul::Micro::<$r, $g>($args)),)*
            _ => unreachable!("a register block of {} column groups", $groups),
        }
    };
}
pub(crate) use dispatch_micro;
