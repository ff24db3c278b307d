//! The floors: what the machine gives for the same pages without any protocol around them.

use super::child::{Serves, Setup};
use super::measure::Way;
use super::prefill::REQUEST_BYTES;
use super::sys;
use super::wait::Waiter;
use kvserve_kv::copy::{Isa, store_fence};
use kvserve_kv::{ChecksumMode, PageId, PoolMemory};
use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// A plain loop of loads and streaming stores out of the child's pool.
pub struct MemcpyFloor<'a> {
    setup: &'a Setup,
}

impl<'a> MemcpyFloor<'a> {
    pub fn new(setup: &'a Setup) -> Self {
        MemcpyFloor { setup }
    }
}

impl Way for MemcpyFloor<'_> {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    fn floor(&self) -> Option<&'static str> {
        None
    }

    fn checksums(&self) -> ChecksumMode {
        ChecksumMode::Off
    }

    fn needs(&self) -> Serves {
        Serves::Nothing
    }

    fn pull(&mut self, first: u32, into: &[PageId]) {
        let bytes = self.setup.size.page_bytes;
        for (place, into) in self.setup.places[first as usize..].iter().zip(into) {
            let from = self.setup.source.page(*place, bytes);
            // SAFETY: pages of two pools; the source is not written, the target is this thread's.
            unsafe { stream_copy(from, self.setup.target.page(*into), bytes) };
        }
        store_fence();
    }
}

/// # Safety
/// Both are aligned to 64 and valid for `bytes`, a multiple of 64.
unsafe fn stream_copy(from: *const u8, into: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller promises, and the processor has the instructions.
    unsafe {
        match Isa::detect() {
            Isa::Avx512 => return stream_copy_512(from, into, bytes),
            Isa::Avx2 => return stream_copy_256(from, into, bytes),
            Isa::Portable => {}
        }
    }
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
}

/// # Safety
/// As [`stream_copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_copy_512(from: *const u8, into: *mut u8, bytes: usize) {
    use std::arch::x86_64::*;
    for at in (0..bytes).step_by(64) {
        // SAFETY: inside both.
        unsafe {
            let words = _mm512_load_si512(from.add(at).cast());
            _mm512_stream_si512(into.add(at).cast(), words);
        }
    }
}

/// # Safety
/// As [`stream_copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_copy_256(from: *const u8, into: *mut u8, bytes: usize) {
    use std::arch::x86_64::*;
    for at in (0..bytes).step_by(32) {
        // SAFETY: inside both.
        unsafe {
            let words = _mm256_load_si256(from.add(at).cast());
            _mm256_stream_si256(into.add(at).cast(), words);
        }
    }
}

/// One request of 64 bytes, answered by `writev` of the pages and taken by `readv`.
pub struct TcpFloor<'a> {
    setup: &'a Setup,
    stream: TcpStream,
    waiter: Waiter,
}

impl<'a> TcpFloor<'a> {
    pub fn new(setup: &'a Setup, spin: Duration) -> Self {
        let stream = setup.connect(Serves::Floor);
        stream.set_nonblocking(true).expect("an option");
        sys::set_buffers(&stream, setup.buffer_bytes);
        TcpFloor {
            setup,
            stream,
            waiter: Waiter::new(spin),
        }
    }
}

impl Way for TcpFloor<'_> {
    fn name(&self) -> &'static str {
        "writev/readv"
    }

    fn floor(&self) -> Option<&'static str> {
        None
    }

    fn checksums(&self) -> ChecksumMode {
        ChecksumMode::Off
    }

    fn needs(&self) -> Serves {
        Serves::Floor
    }

    fn pull(&mut self, first: u32, into: &[PageId]) {
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&first.to_le_bytes());
        self.stream.write_all(&request).expect("room for a request");
        let socket = self.stream.as_raw_fd();
        let bytes = self.setup.size.page_bytes;
        let pages: Vec<u32> = into.iter().map(|page| page.0).collect();
        move_pages(&self.setup.target, &pages, bytes, |vectors| {
            // SAFETY: the vectors name pages that only this thread touches.
            let count = unsafe { libc::readv(socket, vectors.as_ptr(), vectors.len() as _) };
            if count < 0 {
                self.waiter.wait(&[(socket, libc::POLLIN)]);
            }
            count
        });
        self.waiter.completed();
    }
}

/// The child's half of the floor.
pub fn write_pages(
    stream: &TcpStream,
    pool: &PoolMemory,
    pages: &[u32],
    page_bytes: usize,
    waiter: &Waiter,
) {
    let socket = stream.as_raw_fd();
    move_pages(pool, pages, page_bytes, |vectors| {
        // SAFETY: the vectors name pages of a pool that lives on.
        let count = unsafe { libc::writev(socket, vectors.as_ptr(), vectors.len() as _) };
        if count < 0 {
            waiter.wait(&[(socket, libc::POLLOUT)]);
        }
        count
    });
}

/// The most buffers of one vectored call.
const IOVECS_MAX: usize = 1024;

/// Moves all of `pages` by a vectored call that never blocks; it waits by itself when it gives
/// less than nothing.
fn move_pages(
    pool: &PoolMemory,
    pages: &[u32],
    page_bytes: usize,
    mut call: impl FnMut(&[libc::iovec]) -> isize,
) {
    let total = pages.len() * page_bytes;
    let mut done = 0;
    let mut vectors: Vec<libc::iovec> = Vec::with_capacity(pages.len().min(IOVECS_MAX));
    while done < total {
        vectors.clear();
        let mut at = done;
        while at < total && vectors.len() < IOVECS_MAX {
            let offset = at % page_bytes;
            let start = pool.page(PageId(pages[at / page_bytes]));
            vectors.push(libc::iovec {
                iov_base: start.wrapping_add(offset).cast(),
                iov_len: page_bytes - offset,
            });
            at += page_bytes - offset;
        }
        match call(&vectors) {
            count if count > 0 => done += count as usize,
            0 => panic!("the other side is gone"),
            _ => {
                let error = std::io::Error::last_os_error();
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            }
        }
    }
}
