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
        path.display(),
        engine.layout().kernel_class,
        bytes as f64 / 1e6,
        start.elapsed().as_secs_f64() * 1e3
    );
    let before = read_bandwidth(bytes, threads);
    let mut rows = Vec::new();
    for streams in STREAMS {
        let tokens = decode(&mut engine, streams, 32);
        rows.push((format!("decode, {streams} streams, 32 tokens deep"), tokens));
    }
    if model.config.context > LONG_TOKENS {
        let tokens = decode(&mut engine, 1, LONG_TOKENS - DECODE_STEPS - 1);
        rows.push((format!("decode, 1 stream, {LONG_TOKENS} tokens deep"), tokens));
    }
    for tokens in PROMPT_TOKENS {
        rows.push((format!("prefill, {tokens} tokens"), prefill(&mut engine, tokens)));
    }
    let bandwidth = before.max(read_bandwidth(bytes, threads));
    let floor = bandwidth / bytes as f64;
    println!("read bandwidth {:.1} GB/s, floor {floor:.0} tokens/s at one stream", bandwidth / 1e9);
    println!("{:<40} {:>10} {:>12}", "", "tokens/s", "of the floor");
    for (name, tokens) in rows {
        println!("{name:<40} {tokens:>10.1} {:>11.0}%", tokens / floor * 100.0);
    }
    Ok(())
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
            let seconds = parts.into_iter().map(|part| part.join().unwrap_or(f64::INFINITY));
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
        banned: Vec::new(),
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
fn decode(engine: &mut CpuEngine, streams: usize, depth: usize) -> f64 {
    let mut step = Step::default();
    let context: Vec<u32> = (0..depth as u32).map(|i| 100 + i % 900).collect();
    for stream in 0..streams {
        step.clear();
        push(&mut step, stream, &context, 0, None);
        run_step(engine, &mut step);
    }
    let mut best = 0.0f64;
    for _ in 0..REPEATS {
        let mut tokens = vec![7u32; streams];
        let start = Instant::now();
        for position in depth..depth + DECODE_STEPS {
            step.clear();
            for (stream, token) in tokens.iter().enumerate() {
                push(&mut step, stream, &[*token], position, greedy(position + 1));
            }
            run_step(engine, &mut step);
            for (token, sampled) in tokens.iter_mut().zip(&step.sampled) {
                *token = sampled.as_ref().map_or(7, |sampled| sampled.token);
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        best = best.max((streams * DECODE_STEPS) as f64 / seconds);
    }
    best
}

/// Prompt tokens a second, the first token sampled; the best of three runs.
fn prefill(engine: &mut CpuEngine, tokens: usize) -> f64 {
    let prompt: Vec<u32> = (0..tokens as u32).map(|i| 100 + i % 900).collect();
    let mut step = Step::default();
    let mut best = 0.0f64;
    for _ in 0..REPEATS {
        step.clear();
        push(&mut step, 0, &prompt, 0, greedy(tokens));
        let start = Instant::now();
        run_step(engine, &mut step);
        best = best.max(tokens as f64 / start.elapsed().as_secs_f64());
    }
    best
}
