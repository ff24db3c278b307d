//! Random bytes of the kernel.

use std::io;

/// `N` unpredictable bytes.
pub(super) fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut out = [0u8; N];
    let mut filled = 0;
    while filled < N {
        // SAFETY: the pointer and length lie inside `out`.
        let got = unsafe { libc::getrandom(out[filled..].as_mut_ptr().cast(), N - filled, 0) };
        if got < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        filled += got as usize;
    }
    Ok(out)
}

/// A fresh incarnation (PROTOCOL S2): the start time in ns, its last 16 bits (66 µs) random, so
/// that later starts compare greater and two starts at one moment differ.
pub fn fresh_incarnation() -> io::Result<u64> {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_err(io::Error::other)?;
    let random = u64::from(u16::from_le_bytes(bytes()?));
    Ok((since.as_nanos() as u64 & !0xFFFF) | random)
}

/// A fresh peer key.
pub fn fresh_key() -> io::Result<[u8; 32]> {
    bytes()
}
