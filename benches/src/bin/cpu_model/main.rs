//! Tokens per second of the CPU backend, beside the memory's floor in the same run.
//!
//! `cargo run --release -p kvserve-benches --bin cpu_model -- MODEL [THREADS] [bf16|f32|accuracy]`
//! (`accuracy` compares the log-probabilities of each instruction set in bf16 with f32, instead.)
//!
//! *Floor* is what decode at one stream could reach if it only read the packed weights once a
//! token: the bandwidth of a plain read of a buffer of their size by as many threads, measured
//! before and after (the lower one would flatter, so the higher one is taken).

mod accuracy;
mod floors;
mod load;

use floors::{Peak, Reader};
use kvserve_kv::KvDtype;
use kvserve_model::cpu::{Phase, PhaseCost};
use kvserve_model::{CpuEngine, CpuOptions, Model, Step};
use load::{PAGE_TOKENS, STREAM_PAGES, greedy, push, run_step};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Streams in the decode rows; the most a pool below must hold.
const STREAMS: [usize; 4] = [1, 4, 16, 64];
const STREAMS_MAX: usize = 64;
/// Prompt tokens of the prefill rows, and of the long-context decode row.
const PROMPT_TOKENS: [usize; 2] = [128, 512];
const LONG_TOKENS: usize = 2048;
const DECODE_STEPS: usize = 64;
/// Tokens of one decode measurement over all streams, so that 64 streams do not take minutes.
const DECODE_TOKENS_MAX: usize = 512;
const REPEATS: usize = 3;
/// Decode rows whose phases are shown.
const PHASES_OF_STREAMS: [usize; 2] = [1, 16];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else {
        eprintln!("usage: cpu_model MODEL [THREADS] [bf16|f32|accuracy]");
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
    let (dtype, accuracy) = match arguments.get(2).map(String::as_str) {
        Some("f32") => (KvDtype::F32, false),
        None | Some("bf16") => (KvDtype::Bf16, false),
        Some("accuracy") => (KvDtype::Bf16, true),
        Some(other) => {
            eprintln!("the third argument must be bf16, f32 or accuracy, not {other:?}");
            return ExitCode::FAILURE;
        }
    };
    match run(Path::new(path), threads, dtype, accuracy) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(
    path: &Path,
    threads: usize,
    dtype: KvDtype,
    accuracy: bool,
) -> Result<(), Box<dyn std::error::Error>> {
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
    if accuracy {
        return accuracy::print(&model, &options);
    }
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
    let reader = Reader::new(bytes);
    let bandwidth = reader.bandwidth(threads);
    let peaks = floors::peaks(threads);
    println!(
        "reading {:.1} MB: {:.1} GB/s",
        bytes as f64 / 1e6,
        bandwidth / 1e9
    );
    for peak in &peaks {
        println!(
            "{:<20} {:>7.0} G products/s",
            peak.name,
            peak.per_second / 1e9
        );
    }
    println!(
        "\n{:<40} {:>10} {:>14} {:>14}",
        "", "tokens/s", "fastest step", "ms of CPU each"
    );
    let mut single = NO_RATE;
    for streams in STREAMS {
        let row = decode(&mut engine, streams, 32);
        print(&format!("decode, {streams} streams, 32 tokens deep"), row);
        if streams == 1 {
            single = row;
        }
        if PHASES_OF_STREAMS.contains(&streams) {
            table(
                &engine.phases(),
                decode_steps(streams) * REPEATS,
                streams,
                bandwidth,
                &peaks,
            );
        }
    }
    if model.config.context > LONG_TOKENS {
        let row = decode(&mut engine, 1, LONG_TOKENS - DECODE_STEPS - 1);
        print(&format!("decode, 1 stream, {LONG_TOKENS} tokens deep"), row);
        table(
            &engine.phases(),
            DECODE_STEPS * REPEATS,
            1,
            bandwidth,
            &peaks,
        );
    }
    for tokens in PROMPT_TOKENS {
        engine.reset_phases();
        let row = prefill(&mut engine, tokens);
        print(&format!("prefill, {tokens} tokens"), row);
        table(&engine.phases(), REPEATS, tokens, bandwidth, &peaks);
    }
    beside_reads(&mut engine, &reader, threads);
    let bandwidth = bandwidth.max(reader.bandwidth(threads));
    let floor = bandwidth / bytes as f64;
    println!(
        "read bandwidth {:.1} GB/s: floor {floor:.0} tokens/s at one stream, reached {:.0}% ({:.0}% in the fastest step)",
        bandwidth / 1e9,
        single.tokens_per_second / floor * 100.0,
        single.fastest_step / floor * 100.0
    );
    Ok(())
}

/// Where a step of `rows` rows spends its time: time of each phase, weights it reads and the time
/// that this takes at the bandwidth, products and the time that they take at each peak.
fn table(phases: &[PhaseCost], steps: usize, rows: usize, bandwidth: f64, peaks: &[Peak]) {
    print!(
        "    {:<16} {:>9} {:>9} {:>9}",
        "phase of a step", "us", "MB", "read us"
    );
    for peak in peaks {
        print!(" {:>18}", peak.name);
    }
    println!();
    for cost in phases {
        let rows = if cost.phase == Phase::Head && rows > STREAMS_MAX {
            1
        } else {
            rows
        };
        let products = (cost.row_products * rows) as f64;
        print!(
            "    {:<16} {:>9.1} {:>9.2} {:>9.1}",
            cost.phase.name(),
            cost.nanoseconds as f64 / 1e3 / steps as f64,
            cost.weight_bytes as f64 / 1e6,
            cost.weight_bytes as f64 / bandwidth * 1e6
        );
        for peak in peaks {
            print!(" {:>15.1} us", products / peak.per_second * 1e6);
        }
        println!();
    }
}

/// One line of the table.
#[derive(Clone, Copy)]
struct Rate {
    tokens_per_second: f64,
    /// Tokens a second in the fastest single step: what is left when others use the cores, as long
    /// as a step is shorter than their turns.
    fastest_step: f64,
    /// CPU time of the whole process per token: what is left to compare when others use the cores.
    cpu_ms_per_token: f64,
}

fn print(name: &str, rate: Rate) {
    let Rate {
        tokens_per_second,
        fastest_step,
        cpu_ms_per_token,
    } = rate;
    println!("{name:<40} {tokens_per_second:>10.1} {fastest_step:>14.1} {cpu_ms_per_token:>14.3}");
}

/// Times one run of `steps` steps of `rows` tokens; `run` gives the fastest step's nanoseconds.
fn timed(steps: usize, rows: usize, run: impl FnOnce() -> u64) -> Rate {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let fastest_ns = run();
    let tokens = steps * rows;
    Rate {
        tokens_per_second: tokens as f64 / start.elapsed().as_secs_f64(),
        fastest_step: rows as f64 * 1e9 / fastest_ns as f64,
        cpu_ms_per_token: (cpu_seconds() - cpu) * 1e3 / tokens as f64,
    }
}

/// The faster, and the cheaper, of two runs.
fn better(a: Rate, b: Rate) -> Rate {
    Rate {
        tokens_per_second: a.tokens_per_second.max(b.tokens_per_second),
        fastest_step: a.fastest_step.max(b.fastest_step),
        cpu_ms_per_token: a.cpu_ms_per_token.min(b.cpu_ms_per_token),
    }
}

const NO_RATE: Rate = Rate {
    tokens_per_second: 0.0,
    fastest_step: 0.0,
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

fn decode_steps(streams: usize) -> usize {
    (DECODE_TOKENS_MAX / streams).min(DECODE_STEPS)
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
    let steps = decode_steps(streams);
    engine.reset_phases();
    for _ in 0..REPEATS {
        let mut tokens = vec![7u32; streams];
        let rate = timed(steps, streams, || {
            let mut fastest = u64::MAX;
            for position in depth..depth + steps {
                step.clear();
                for (stream, token) in tokens.iter().enumerate() {
                    push(&mut step, stream, &[*token], position, greedy(position + 1));
                }
                fastest = fastest.min(run_step(engine, &mut step));
                for (token, sampled) in tokens.iter_mut().zip(&step.sampled) {
                    *token = sampled.as_ref().map_or(7, |sampled| sampled.token);
                }
            }
            fastest
        });
        best = better(best, rate);
    }
    best
}

/// Decode steps of one stream and reads of as many bytes in turns, so that both meet the same load:
/// the share of the floor that is left when others use the cores.
fn beside_reads(engine: &mut CpuEngine, reader: &Reader, threads: usize) {
    let mut step = Step::default();
    let (mut steps, mut reads) = (Vec::new(), Vec::new());
    let mut cpu = [0.0, 0.0];
    for position in 0..2 * DECODE_STEPS {
        step.clear();
        push(&mut step, 0, &[7], position, greedy(position + 1));
        let start = cpu_seconds();
        steps.push(run_step(engine, &mut step) as f64 / 1e6);
        let between = cpu_seconds();
        reads.push(reader.read(threads) * 1e3);
        cpu[0] += between - start;
        cpu[1] += cpu_seconds() - between;
    }
    steps.sort_unstable_by(f64::total_cmp);
    reads.sort_unstable_by(f64::total_cmp);
    let quarter = DECODE_STEPS / 2;
    println!(
        "in turns, decode step and plain read of its weights: fastest {:.2} and {:.2} ms ({:.0}% of the floor), first quartile {:.2} and {:.2} ms ({:.0}%), CPU {:.0}%",
        steps[0],
        reads[0],
        reads[0] / steps[0] * 100.0,
        steps[quarter],
        reads[quarter],
        reads[quarter] / steps[quarter] * 100.0,
        cpu[1] / cpu[0] * 100.0
    );
}

/// Prompt tokens a second, the first token sampled; the best of three runs.
fn prefill(engine: &mut CpuEngine, tokens: usize) -> Rate {
    let prompt: Vec<u32> = (0..tokens as u32).map(|i| 100 + i % 900).collect();
    let mut step = Step::default();
    let mut best = NO_RATE;
    for _ in 0..REPEATS {
        step.clear();
        push(&mut step, 0, &prompt, 0, greedy(tokens));
        best = better(best, timed(1, tokens, || run_step(engine, &mut step)));
    }
    best
}
