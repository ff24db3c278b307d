//! What the command line says.

use super::size::{SIZES, Size};
use std::time::Duration;

/// Measured time of each way at each size when none is asked for: hundreds of the short pulls
/// and some 40 of the longest.
const MEASURED: Duration = Duration::from_millis(700);

/// How long a side polls on after something completed before it sleeps: what an adaptive shard
/// of the server does.
const SPIN: Duration = Duration::from_micros(50);

/// Settings of a run.
pub struct Args {
    /// CPUs of the decode and the prefill side.
    pub cores: Option<(usize, usize)>,
    /// Of both sides.
    pub spin: Duration,
    /// `SO_SNDBUF` and `SO_RCVBUF` of all sockets; 0 leaves them to the kernel.
    pub buffer_bytes: usize,
    /// Of each way at each size.
    pub measured: Duration,
    pub sizes: Vec<Size>,
    pub csv: Option<String>,
}

/// Settings of the child.
pub struct PrefillArgs {
    pub core: Option<usize>,
    pub spin: Duration,
    pub buffer_bytes: usize,
    pub size: Size,
}

pub enum Task {
    Measure(Args),
    Prefill(PrefillArgs),
}

impl Args {
    /// # Errors
    /// What is wrong, and what can be said instead.
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Task, String> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut args = Args {
            cores: (cpus > 1).then_some((0, 1)),
            spin: SPIN,
            buffer_bytes: 0,
            measured: MEASURED,
            sizes: SIZES.to_vec(),
            csv: None,
        };
        let mut prefill = false;
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            if word == "prefill" {
                prefill = true;
                continue;
            }
            let value = words.next().unwrap_or_default();
            let number = || {
                let number: Result<u64, _> = value.parse();
                number.map_err(|_| format!("{word} takes a number, not {value:?}"))
            };
            match word.as_str() {
                "--cores" => args.cores = cores(&value)?,
                "--spin-us" => args.spin = Duration::from_micros(number()?),
                "--buffer-kib" => args.buffer_bytes = (number()? as usize) << 10,
                "--ms" => args.measured = Duration::from_millis(number()?.max(1)),
                "--sizes" => args.sizes = sizes(&value)?,
                "--csv" => args.csv = Some(value),
                other => {
                    return Err(format!(
                        "unknown flag {other}: use --cores D,P (or none), --spin-us N, --buffer-kib N, \
                         --ms N, \
                         --sizes 24x16,... (pages x KiB), --csv FILE"
                    ));
                }
            }
        }
        if !prefill {
            return Ok(Task::Measure(args));
        }
        Ok(Task::Prefill(PrefillArgs {
            core: args.cores.map(|(_, prefill)| prefill),
            spin: args.spin,
            buffer_bytes: args.buffer_bytes,
            size: args.sizes[0],
        }))
    }
}

fn cores(value: &str) -> Result<Option<(usize, usize)>, String> {
    if value == "none" {
        return Ok(None);
    }
    let wrong = || format!("--cores takes two CPUs or none, not {value:?}");
    let (decode, prefill) = value.split_once(',').ok_or_else(wrong)?;
    match (decode.parse(), prefill.parse()) {
        (Ok(decode), Ok(prefill)) => Ok(Some((decode, prefill))),
        _ => Err(wrong()),
    }
}

fn sizes(value: &str) -> Result<Vec<Size>, String> {
    let size = |word: &str| {
        let wrong = || format!("--sizes takes pages x KiB, as 24x16, not {word:?}");
        let (pages, kib) = word.split_once('x').ok_or_else(wrong)?;
        let (pages, kib): (usize, usize) = match (pages.parse(), kib.parse()) {
            (Ok(pages), Ok(kib)) => (pages, kib),
            _ => return Err(wrong()),
        };
        match (1..=4096).contains(&pages) && (1..=16 << 10).contains(&kib) {
            true => Ok(Size {
                pages,
                page_bytes: kib << 10,
            }),
            false => Err(wrong()),
        }
    };
    value.split(',').map(size).collect()
}
