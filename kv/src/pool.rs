//! The memory that pages lie in: one memfd, mapped once (PROTOCOL X2, DESIGN section 2).
//!
//! The pool knows nothing of page states. Whoever reads or writes a page through
//! [`PoolMemory::page`] must hold it by the ledger's rules; that is what makes the raw pointers
//! sound, and why they are only dereferenced in the backend's kernels and the transports.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// A page's place in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// Where a pool's memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// Host memory in a sealed memfd.
    Memfd,
    /// Device memory of a GPU.
    Device,
}

/// A pool of equal pages at a fixed address.
pub struct PoolMemory {
    base: NonNull<u8>,
    mapped_bytes: usize,
    page_stride: usize,
    pages: usize,
    kind: PoolKind,
    memfd: Option<OwnedFd>,
}

// SAFETY: the pool is plain memory; which thread may touch which page is the ledger's business
// (module docs). The struct itself is immutable after construction.
unsafe impl Send for PoolMemory {}
// SAFETY: as above.
unsafe impl Sync for PoolMemory {}

impl PoolMemory {
    /// Maps `pages` pages of `page_bytes` (rounded up to 64 bytes) in a new memfd of mode 0600,
    /// sealed against growth and shrinking. Pages are touched on first use.
    ///
    /// # Errors
    /// When the size overflows or the kernel refuses the memfd, its size or the mapping.
    pub fn memfd(pages: usize, page_bytes: usize) -> io::Result<Self> {
        let page_stride = page_bytes.next_multiple_of(64);
        let mapped_bytes = pages
            .checked_mul(page_stride)
            .filter(|bytes| *bytes > 0 && *bytes <= isize::MAX as usize)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("a KV pool of {pages} pages of {page_bytes} bytes cannot be mapped"),
                )
            })?;
        // SAFETY: the name is a valid C string; the flags ask for a sealable descriptor.
        let fd = unsafe {
            libc::memfd_create(
                c"kvserve-kv-pool".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just created and nobody else owns it.
        let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain calls on an owned descriptor.
        let sized = unsafe {
            libc::fchmod(fd, 0o600) == 0 && libc::ftruncate(fd, mapped_bytes as libc::off_t) == 0
        };
        if !sized {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh shared mapping of the whole descriptor; the address is the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast::<u8>()).expect("mmap gave a null mapping");
        let pool = PoolMemory {
            base,
            mapped_bytes,
            page_stride,
            pages,
            kind: PoolKind::Memfd,
            memfd: Some(memfd),
        };
        // SAFETY: sealing an owned descriptor; FUTURE_WRITE leaves our own mapping writable.
        let sealed = unsafe {
            libc::fcntl(
                fd,
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK
                    | libc::F_SEAL_GROW
                    | libc::F_SEAL_FUTURE_WRITE
                    | libc::F_SEAL_SEAL,
            )
        };
        if sealed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pool)
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes from one page to the next; at least the layout's page bytes.
    pub fn page_stride(&self) -> usize {
        self.page_stride
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Where the memory lives.
    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// Base address of the mapping.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// First byte of a page. Panics on an id that is not of this pool: ids come from the
    /// ledger, never from a peer.
    pub fn page(&self, page: PageId) -> *mut u8 {
        assert!(
            (page.0 as usize) < self.pages,
            "page {} of {}",
            page.0,
            self.pages
        );
        // SAFETY: the offset lies inside the mapping by the assertion.
        unsafe { self.base.as_ptr().add(page.0 as usize * self.page_stride) }
    }

    /// The memfd, to pass to an authenticated peer on the same host.
    pub fn memfd_raw(&self) -> Option<RawFd> {
        self.memfd.as_ref().map(|fd| fd.as_raw_fd())
    }
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `memfd` with this address and length.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_private_sealed_and_zeroed() {
        let pool = PoolMemory::memfd(3, 100).unwrap();
        assert_eq!(pool.page_stride(), 128);
        let fd = pool.memfd_raw().unwrap();
        // SAFETY: plain queries on an open descriptor.
        let (seals, stat) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(fd, &mut stat), 0);
            (libc::fcntl(fd, libc::F_GET_SEALS), stat)
        };
        assert_eq!(stat.st_mode & 0o777, 0o600);
        for seal in [
            libc::F_SEAL_SHRINK,
            libc::F_SEAL_GROW,
            libc::F_SEAL_FUTURE_WRITE,
            libc::F_SEAL_SEAL,
        ] {
            assert_ne!(seals & seal, 0);
        }
        // SAFETY: a refused or fresh mapping of our own descriptor.
        let writable = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                128,
                libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        assert_eq!(
            writable,
            libc::MAP_FAILED,
            "a new writable map must be refused"
        );
        // SAFETY: page 2 lies in the mapping and nobody else uses it.
        unsafe {
            assert_eq!(*pool.page(PageId(2)), 0);
            *pool.page(PageId(2)) = 7;
            assert_eq!(*pool.page(PageId(2)), 7);
        }
    }

    #[test]
    fn an_impossible_size_is_refused() {
        assert!(PoolMemory::memfd(usize::MAX, 64).is_err());
        assert!(PoolMemory::memfd(0, 64).is_err());
    }
}
