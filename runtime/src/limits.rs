//! Limits of the process that the kernel sets.

use std::io;

/// The limit on open descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFilesLimit {
    /// The soft limit that the process was started with.
    pub soft_at_start: u64,
    /// The soft limit now.
    pub soft: u64,
    /// The hard limit.
    pub hard: u64,
}

/// Raises the soft limit on open descriptors to the hard one: each connection, lane and shard
/// takes some, and the usual soft limit of 1,024 is there for programs that use `select`.
///
/// # Errors
/// When the kernel refuses to tell or to raise it; the old limit stays then.
pub fn raise_open_files() -> io::Result<OpenFilesLimit> {
    let at_start = read_limit()?;
    let wanted = libc::rlimit {
        rlim_cur: at_start.rlim_max,
        rlim_max: at_start.rlim_max,
    };
    // SAFETY: `wanted` is a valid rlimit for the whole call.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &wanted) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let now = read_limit()?;
    Ok(OpenFilesLimit {
        soft_at_start: at_start.rlim_cur,
        soft: now.rlim_cur,
        hard: now.rlim_max,
    })
}

fn read_limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid, writable rlimit for the whole call.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_reaches_the_hard_one() {
        let limit = raise_open_files().unwrap();
        assert_eq!(limit.soft, limit.hard);
        assert!(limit.soft_at_start <= limit.soft);
        assert_eq!(raise_open_files().unwrap().soft_at_start, limit.hard);
    }
}
