//! What this machine can do at best: reading memory, and multiplying in registers.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// The best of so many measurements: a few ms each, so that one of them has the cores to itself.
const REPEATS: usize = 12;

/// A buffer to be read.
pub struct Reader(Vec<u64>);

impl Reader {
    /// Of so many bytes, touched.
    pub fn new(bytes: usize) -> Self {
        Reader(vec![1; bytes / 8])
    }

    /// Seconds that `threads` threads need to read all of it together.
    pub fn read(&self, threads: usize) -> f64 {
        together(threads, |thread| {
            let length = self.0.len();
            let part = &self.0[length * thread / threads..length * (thread + 1) / threads];
            let mut sums = [0u64; 32];
            for chunk in part.chunks_exact(32) {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        })
    }

    /// Bytes a second; the best of some.
    pub fn bandwidth(&self, threads: usize) -> f64 {
        let seconds = (0..REPEATS).map(|_| self.read(threads));
        (self.0.len() * 8) as f64 / seconds.fold(f64::INFINITY, f64::min)
    }
}

/// Seconds that the slowest of `threads` threads needs.
fn together(threads: usize, run: impl Fn(usize) + Sync) -> f64 {
    if threads == 1 {
        let start = Instant::now();
        run(0);
        return start.elapsed().as_secs_f64();
    }
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, run) = (&barrier, &run);
                scope.spawn(move || {
                    barrier.wait();
                    let start = Instant::now();
                    run(thread);
                    start.elapsed().as_secs_f64()
                })
            })
            .collect();
        let seconds = parts
            .into_iter()
            .map(|part| part.join().unwrap_or(f64::INFINITY));
        seconds.fold(0.0, f64::max)
    })
}

/// Multiplications (each with its addition) a second of one kind of instruction.
pub struct Peak {
    /// The instruction.
    pub name: &'static str,
    /// All threads together.
    pub per_second: f64,
}

/// Peaks of the instructions that the kernels use, as far as this processor has them.
#[cfg(target_arch = "x86_64")]
pub fn peaks(threads: usize) -> Vec<Peak> {
    let mut peaks = Vec::new();
    let mut add = |name, there: bool, products: usize, run: unsafe fn(usize) -> f32| {
        if there {
            let seconds = (0..REPEATS).map(|_| {
                together(threads, |_| {
                    // SAFETY: the processor has the instruction.
                    black_box(unsafe { run(black_box(peak::ROUNDS)) });
                })
            });
            let seconds = seconds.fold(f64::INFINITY, f64::min);
            let instructions = peak::ROUNDS * peak::CHAINS * threads;
            let per_second = (instructions * products) as f64 / seconds;
            peaks.push(Peak { name, per_second });
        }
    };
    let avx512 = is_x86_feature_detected!("avx512f");
    let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
    let bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    add("fma (f32, AVX-512)", avx512, 16, peak::fma);
    add("vdpbf16ps", bf16, 32, peak::bf16);
    add("vpdpbusd", vnni, 64, peak::bytes);
    peaks
}

/// No peaks are known elsewhere.
#[cfg(not(target_arch = "x86_64"))]
pub fn peaks(_threads: usize) -> Vec<Peak> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Independent sums: more than latency (4 to 6) times instructions a cycle (1 or 2).
    pub const CHAINS: usize = 16;
    /// Some 3 ms at 4 GHz.
    pub const ROUNDS: usize = 800_000;

    /// One operation over all chains, its operands hidden from the compiler.
    macro_rules! peak {
        ($name:ident, $features:literal, $instruction:literal) => {
            /// # Safety
            /// The processor has the instruction.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(rounds: usize) -> f32 {
                let mut sums = [_mm512_setzero_ps(); CHAINS];
                let (w, x) = (_mm512_setzero_ps(), _mm512_setzero_ps());
                for _ in 0..rounds {
                    for sum in &mut sums {
                        // SAFETY: registers only.
                        unsafe {
                            asm!($instruction, inout(zmm_reg) *sum, in(zmm_reg) w,
                                in(zmm_reg) x, options(pure, nomem, nostack));
                        }
                    }
                }
                let sum = sums.into_iter().reduce(|a, b| _mm512_add_ps(a, b));
                sum.map_or(0.0, |sum| _mm512_reduce_add_ps(sum))
            }
        };
    }
    peak!(fma, "avx512f", "vfmadd231ps {0}, {1}, {2}");
    peak!(bf16, "avx512f,avx512bf16", "vdpbf16ps {0}, {1}, {2}");
    peak!(bytes, "avx512f,avx512vnni", "vpdpbusd {0}, {1}, {2}");
}
