//! Tokens per second of the CPU backend, beside the memory's floor in the same run.
//!
//! `cargo run --release -p kvserve-benches --bin cpu_model -- MODEL [THREADS] [f32|bf16]`
//!
//! *Floor* is what decode at one stream could reach if it only read the packed weights once a
//! token: the bandwidth of a plain read of a buffer of their size by as many threads, measured
//! before and after (the lower one would flatter, so the higher one is taken).

use kvserve_kv::{KvDtype, PageId};
use kvserve_model::{CpuEngine, CpuOptions, Model, SampleSpec, Step, StepSequence};
use std::hint::black_box;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Instant;

/// Streams in the decode rows; the most a pool below must hold.
const STREAMS: [usize; 4] = [1, 4, 16, 64];
const STREAMS_MAX: usize = 64;
const PAGE_TOKENS: usize = 16;
/// Prompt tokens of the prefill rows, and of the long-context decode row.
const PROMPT_TOKENS: [usize; 2] = [128, 512];
const LONG_TOKENS: usize = 2048;
/// Pages per stream: 256 tokens for decode; the first streams' pages together hold the prompts.
const STREAM_PAGES: usize = 256 / PAGE_TOKENS;
const DECODE_STEPS: usize = 64;
/// Tokens of one decode measurement over all streams, so that 64 streams do not take minutes.
const DECODE_TOKENS_MAX: usize = 512;
const REPEATS: usize = 3;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else {
        eprintln!("usage: cpu_model MODEL [THREADS] [f32|bf16]");
        return ExitCode::FAILURE;
    };
    let threads = match arguments.get(1).map(|text| text.parse()) {
        Some(Ok(threads)) => threads,
        Some(Err(_)) => {
            eprintln!("THREADS must be a number, not {:?}", arguments[1]);
            return ExitCode::FAILURE;
        }
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let dtype = match arguments.get(2).map(String::as_str) {
        None | Some("f32") => KvDtype::F32,
        Some("bf16") => KvDtype::Bf16,
        Some(other) => {
            eprintln!("the dtype must be f32 or bf16, not {other:?}");
            return ExitCode::FAILURE;
        }
    };
    match run(Path::new(path), threads, dtype) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &Path, threads: usize, dtype: KvDtype) -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(path)?;
    let options = CpuOptions {
        threads,
        cores: Vec::new(),
        nice: 0,
        dtype,
        pool_pages: STREAMS_MAX * STREAM_PAGES,
        page_tokens: PAGE_TOKENS,
        isa: None,
    };
    let start = Instant::now();
    let mut engine = CpuEngine::new(&model.config, &model.weights, model.rope, &options)?;
    let bytes = engine.streamed_bytes();
    println!(
        "{} · {threads} threads · {} · weights {:.1} MB a token, packed in {:.0} ms",
        path.file_name().unwrap_or_default().display(),
        engine.layout().kernel_class,
        bytes as f64 / 1e6,
        start.elapsed().as_secs_f64() * 1e3
    );
    let before = read_bandwidth(bytes, threads);
    println!("{:<40} {:>10} {:>14}", "", "tokens/s", "ms of CPU each");
    let mut single = 0.0;
    for streams in STREAMS {
        let row = decode(&mut engine, streams, 32);
        print(&format!("decode, {streams} streams, 32 tokens deep"), row);
        if streams == 1 {
            single = row.tokens_per_second;
        }
    }
    if model.config.context > LONG_TOKENS {
        let row = decode(&mut engine, 1, LONG_TOKENS - DECODE_STEPS - 1);
        print(&format!("decode, 1 stream, {LONG_TOKENS} tokens deep"), row);
    }
    for tokens in PROMPT_TOKENS {
        print(
            &format!("prefill, {tokens} tokens"),
            prefill(&mut engine, tokens),
        );
    }
    let bandwidth = before.max(read_bandwidth(bytes, threads));
    let floor = bandwidth / bytes as f64;
    println!(
        "read bandwidth {:.1} GB/s: floor {floor:.0} tokens/s at one stream, reached {:.0}%",
        bandwidth / 1e9,
        single / floor * 100.0
    );
    Ok(())
}

/// One line of the table.
#[derive(Clone, Copy)]
struct Rate {
    tokens_per_second: f64,
    /// CPU time of the whole process per token: what is left to compare when others use the cores.
    cpu_ms_per_token: f64,
}

fn print(name: &str, rate: Rate) {
    let Rate {
        tokens_per_second,
        cpu_ms_per_token,
    } = rate;
    println!("{name:<40} {tokens_per_second:>10.1} {cpu_ms_per_token:>14.3}");
}

/// Times one run of `tokens` tokens.
fn timed(tokens: usize, run: impl FnOnce()) -> Rate {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    run();
    Rate {
        tokens_per_second: tokens as f64 / start.elapsed().as_secs_f64(),
        cpu_ms_per_token: (cpu_seconds() - cpu) * 1e3 / tokens as f64,
    }
}

/// The faster, and the cheaper, of two runs.
fn better(a: Rate, b: Rate) -> Rate {
    Rate {
        tokens_per_second: a.tokens_per_second.max(b.tokens_per_second),
        cpu_ms_per_token: a.cpu_ms_per_token.min(b.cpu_ms_per_token),
    }
}

const NO_RATE: Rate = Rate {
    tokens_per_second: 0.0,
    cpu_ms_per_token: f64::INFINITY,
};

fn cpu_seconds() -> f64 {
    // SAFETY: a plain query into a local.
    unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    }
}

/// Bytes a second that `threads` threads read from a buffer of `bytes`; the best of three.
fn read_bandwidth(bytes: usize, threads: usize) -> f64 {
    let buffer = vec![1u64; bytes / 8];
    let mut best = 0.0f64;
    for _ in 0..REPEATS {
        let barrier = Barrier::new(threads);
        let seconds = std::thread::scope(|scope| {
            let parts: Vec<_> = (0..threads)
                .map(|thread| {
                    let from = buffer.len() * thread / threads;
                    let part = &buffer[from..buffer.len() * (thread + 1) / threads];
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        let start = Instant::now();
                        let mut sums = [0u64; 32];
                        for chunk in part.chunks_exact(32) {
                            for (sum, word) in sums.iter_mut().zip(chunk) {
                                *sum ^= word;
                            }
                        }
                        black_box(sums);
                        start.elapsed().as_secs_f64()
                    })
                })
                .collect();
            let seconds = parts
                .into_iter()
                .map(|part| part.join().unwrap_or(f64::INFINITY));
            seconds.fold(0.0, f64::max)
        });
        best = best.max(bytes as f64 / seconds);
    }
    best
}

fn greedy(position: usize) -> Option<SampleSpec> {
    Some(SampleSpec {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        seed: 0,
        choice: 0,
        position: position as u32,
        logprobs: None,
        min_p: 0.0,
        banned: Vec::new(),
        shaping: None,
    })
}

fn push(step: &mut Step, stream: usize, tokens: &[u32], start: usize, sample: Option<SampleSpec>) {
    let first = step.tokens.len();
    step.tokens.extend(tokens);
    let first_page = step.pages.len();
    let needed = (start + tokens.len()).div_ceil(PAGE_TOKENS);
    let page = |i| PageId((stream * STREAM_PAGES + i) as u32);
    step.pages.extend((0..needed).map(page));
    step.sequences.push(StepSequence {
        tokens: first..step.tokens.len(),
        start,
        pages: first_page..step.pages.len(),
        sample,
    });
}

fn run_step(engine: &mut CpuEngine, step: &mut Step) {
    engine.run(step).expect("the bench plans valid steps");
}

/// Tokens a second over all streams, `depth` tokens into each; the best of three runs.
fn decode(engine: &mut CpuEngine, streams: usize, depth: usize) -> Rate {
    let mut step = Step::default();
    let context: Vec<u32> = (0..depth as u32).map(|i| 100 + i % 900).collect();
    for stream in 0..streams {
        step.clear();
        push(&mut step, stream, &context, 0, None);
        run_step(engine, &mut step);
    }
    let mut best = NO_RATE;
    let steps = (DECODE_TOKENS_MAX / streams).min(DECODE_STEPS);
    for _ in 0..REPEATS {
        let mut tokens = vec![7u32; streams];
        let rate = timed(streams * steps, || {
            for position in depth..depth + steps {
                step.clear();
                for (stream, token) in tokens.iter().enumerate() {
                    push(&mut step, stream, &[*token], position, greedy(position + 1));
                }
                run_step(engine, &mut step);
                for (token, sampled) in tokens.iter_mut().zip(&step.sampled) {
                    *token = sampled.as_ref().map_or(7, |sampled| sampled.token);
                }
            }
        });
        best = better(best, rate);
    }
    best
}

/// Prompt tokens a second, the first token sampled; the best of three runs.
fn prefill(engine: &mut CpuEngine, tokens: usize) -> Rate {
    let prompt: Vec<u32> = (0..tokens as u32).map(|i| 100 + i % 900).collect();
    let mut step = Step::default();
    let mut best = NO_RATE;
    for _ in 0..REPEATS {
        step.clear();
        push(&mut step, 0, &prompt, 0, greedy(tokens));
        best = better(best, timed(tokens, || run_step(engine, &mut step)));
    }
    best
}
