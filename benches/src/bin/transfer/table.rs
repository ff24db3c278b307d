//! What is printed.

use super::args::Args;
use super::measure::Line;
use kvserve_kv::ChecksumMode;
use kvserve_kv::copy::Isa;

pub fn head(args: &Args) {
    let cores = match args.cores {
        Some((decode, prefill)) => format!("decode on CPU {decode}, prefill on CPU {prefill}"),
        None => "not pinned".into(),
    };
    println!(
        "kernel {}, {cores}, both sides poll for {} us after a completion, then sleep",
        Isa::detect().label(),
        args.spin.as_micros(),
    );
    println!(
        "{:<14} {:<13}{:<8} {:>6} {:>9} {:>9} {:>7} {:>10} {:>7} {:>7}",
        "pages", "what", "sums", "pulls", "p50 us", "p99 us", "GB/s", "CPU s/GiB", "p50", "CPU"
    );
}

/// The lines of one size: each floor, then what is judged by it.
pub fn print(lines: &[Line]) {
    for floor in lines.iter().filter(|line| line.floor.is_none()) {
        row(floor, None);
        for line in lines.iter().filter(|line| line.floor == Some(floor.name)) {
            row(line, Some(floor));
        }
    }
}

fn row(line: &Line, floor: Option<&Line>) {
    let p50 = line.quantile(0.5);
    let (time, cpu) = match floor {
        Some(floor) => {
            let (time, cpu) = ratios(line, floor);
            (format!("{time:.2}x"), format!("{cpu:.2}x"))
        }
        None => ("floor".into(), String::new()),
    };
    let sums = match floor {
        Some(_) => line.checksums.label(),
        None => "",
    };
    println!(
        "{:<14} {:<13}{sums:<8} {:>6} {p50:>9.1} {:>9.1} {:>7.2} {:>10.3} {time:>7} {cpu:>7}",
        pages(line),
        line.name,
        line.nanos.len(),
        line.quantile(0.99),
        line.size.bytes() as f64 / p50 / 1000.0,
        line.cpu_per_gib(),
    );
}

fn pages(line: &Line) -> String {
    format!("{} x {} KiB", line.size.pages, line.size.page_bytes >> 10)
}

fn ratios(line: &Line, floor: &Line) -> (f64, f64) {
    (
        line.quantile(0.5) / floor.quantile(0.5),
        line.cpu_per_gib() / floor.cpu_per_gib(),
    )
}

/// The most that a pull may take of its floor's p50, and of its CPU where that has a bar.
fn bars(line: &Line) -> Option<(f64, Option<f64>)> {
    let bulk = line.size.pages >= 24 && line.size.page_bytes >= 1 << 20;
    match (line.name, line.checksums) {
        ("shm", _) if line.size.pages < 24 => None,
        ("shm", ChecksumMode::Off) => Some((1.3, Some(1.3))),
        ("shm", ChecksumMode::Full) => Some((1.6, Some(1.6))),
        ("tcp", ChecksumMode::Off) if bulk => Some((1.1, None)),
        ("tcp", ChecksumMode::Off) => Some((1.25, None)),
        ("tcp", ChecksumMode::Full) => Some((1.4, None)),
        _ => None,
    }
}

/// Which bars are met.
pub fn verdict(lines: &[Line]) {
    let mut missed = Vec::new();
    let mut met = 0;
    for line in lines {
        let floor = lines
            .iter()
            .find(|floor| Some(floor.name) == line.floor && floor.size == line.size);
        let (Some(floor), Some((time_max, cpu_max))) = (floor, bars(line)) else {
            continue;
        };
        let (time, cpu) = ratios(line, floor);
        let what = format!("{} {} {}", pages(line), line.name, line.checksums.label());
        let cpu_bar = cpu_max.map(|cpu_max| ("CPU", cpu, cpu_max));
        for (which, found, most) in [("p50", time, time_max)].into_iter().chain(cpu_bar) {
            if found <= most {
                met += 1;
            } else {
                missed.push(format!("{what}: {which} {found:.2}x, goal {most}x"));
            }
        }
    }
    println!("goals: {met} met, {} missed", missed.len());
    for miss in missed {
        println!("  {miss}");
    }
}

/// One line a way and size, for the script that puts other engines beside us.
pub fn write_csv(path: &str, lines: &[Line]) {
    let mut text =
        String::from("engine,checksums,page_bytes,pages,p50_us,p99_us,gbps,cpu_s_per_gib\n");
    for line in lines {
        let p50 = line.quantile(0.5);
        text += &format!(
            "{},{},{},{},{p50:.2},{:.2},{:.3},{:.4}\n",
            line.name,
            line.checksums.label(),
            line.size.page_bytes,
            line.size.pages,
            line.quantile(0.99),
            line.size.bytes() as f64 / p50 / 1000.0,
            line.cpu_per_gib(),
        );
    }
    std::fs::write(path, text).unwrap_or_else(|error| panic!("{path}: {error}"));
}
