//! The memory that pages lie in: one memfd, mapped once (PROTOCOL X2, DESIGN section 2).
//!
//! The pool knows nothing of page states. Whoever reads or writes a page through
//! [`PoolMemory::page`] must hold it by the ledger's rules; that is what makes the raw pointers
//! sound, and why they are only dereferenced in the backend's kernels and the transports.
//!
//! Before the pages lies a head that a peer on this host reads through its own map:
//!
//! ```text
//! 0 magic 8 · 8 head bytes 8 · 16 page stride 8 · 24 pages 8 · 32 nonce 32 · 64 zero 64
//! 128 one generation word of 8 bytes a page, then zeros up to a multiple of 4,096: the pages
//! ```
//!
//! Nobody can take such a map back, so a page's generation is raised before the page is used for
//! anything else ([`crate::ledger::Ledger::of_pool`] does it), and a reader compares it before
//! and after its copy.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// First word of a pool's head; the number is the layout's version.
pub(crate) const HEAD_MAGIC: u64 = u64::from_le_bytes(*b"kvspool1");

/// Where the generation words begin.
pub(crate) const GENERATIONS_AT: usize = 128;

/// The pages begin at a multiple of this: a memory page, so that a page of KV never shares one
/// with the head.
const HEAD_ALIGN: usize = 4096;

/// Bytes of the head of a pool of so many pages; `None` when that overflows.
pub(crate) fn head_bytes(pages: usize) -> Option<usize> {
    let generations = pages.checked_mul(8)?;
    GENERATIONS_AT
        .checked_add(generations)?
        .checked_next_multiple_of(HEAD_ALIGN)
}

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

/// What size of memory pages backs a pool: fewer and larger ones cost fewer TLB misses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolBacking {
    /// Reserved huge pages of 2 MiB (`vm.nr_hugepages`).
    HugeTlb,
    /// Ordinary memory that the kernel may join to huge pages.
    Transparent,
    /// Ordinary pages of 4 KiB.
    Small,
}

impl PoolBacking {
    /// A short stable label for status and logs.
    pub fn label(self) -> &'static str {
        match self {
            PoolBacking::HugeTlb => "hugetlb",
            PoolBacking::Transparent => "transparent_huge",
            PoolBacking::Small => "small",
        }
    }
}

/// Bytes of a huge page. A pool on huge pages is rounded up to a multiple.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A pool of equal pages at a fixed address.
pub struct PoolMemory {
    /// Start of the mapping: the head.
    head: NonNull<u8>,
    /// The first page.
    base: NonNull<u8>,
    mapped_bytes: usize,
    nonce: [u8; 32],
    page_stride: usize,
    pages: usize,
    kind: PoolKind,
    backing: PoolBacking,
    memfd: Option<OwnedFd>,
}

// SAFETY: the pool is plain memory; which thread may touch which page is the ledger's business
// (module docs). The struct itself is immutable after construction.
unsafe impl Send for PoolMemory {}
// SAFETY: as above.
unsafe impl Sync for PoolMemory {}

impl PoolMemory {
    /// Maps `pages` pages of `page_bytes` (rounded up to 64 bytes) in a new memfd of mode 0600,
    /// sealed against growth and shrinking; on reserved huge pages where there are enough of them
    /// (PROTOCOL X2). Memory is touched on first use, or by [`PoolMemory::populate`].
    ///
    /// # Errors
    /// When the size overflows or the kernel refuses the memfd, its size or the mapping.
    pub fn memfd(pages: usize, page_bytes: usize) -> io::Result<Self> {
        let impossible = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a KV pool of {pages} pages of {page_bytes} bytes cannot be mapped"),
            )
        };
        let page_stride = page_bytes
            .checked_next_multiple_of(64)
            .ok_or_else(impossible)?;
        let head_bytes = head_bytes(pages).ok_or_else(impossible)?;
        let mapped_bytes = pages
            .checked_mul(page_stride)
            .filter(|bytes| *bytes > 0)
            .and_then(|bytes| bytes.checked_add(head_bytes))
            .filter(|bytes| *bytes <= isize::MAX as usize)
            .ok_or_else(impossible)?;
        let mut nonce = [0u8; 32];
        fill_random(&mut nonce)?;
        let (memfd, head, mapped_bytes, backing) = map_best(mapped_bytes)?;
        let fd = memfd.as_raw_fd();
        let words = [
            HEAD_MAGIC,
            head_bytes as u64,
            page_stride as u64,
            pages as u64,
        ];
        for (at, word) in words.into_iter().enumerate() {
            // SAFETY: the head has more than 64 bytes, is aligned, and nobody else maps it yet.
            unsafe { head.cast::<u64>().add(at).write(word.to_le()) };
        }
        // SAFETY: as above; the nonce lies at 32 .. 64.
        unsafe { head.add(32).cast::<[u8; 32]>().write(nonce) };
        let pool = PoolMemory {
            head,
            // SAFETY: the head is shorter than the mapping.
            base: unsafe { head.add(head_bytes) },
            mapped_bytes,
            nonce,
            page_stride,
            pages,
            kind: PoolKind::Memfd,
            backing,
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

    /// Bytes mapped, the head included.
    pub fn bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Where the memory lives.
    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// What backs it.
    pub fn backing(&self) -> PoolBacking {
        self.backing
    }

    /// Touches all of it now, so that no step pays for a first use; some 0.3 s a GiB.
    ///
    /// # Errors
    /// When there is not that much memory, or the kernel is older than 5.14.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the mapping is this pool's; populating writes no byte that was written before.
        let code = unsafe {
            libc::madvise(
                self.head.as_ptr().cast(),
                self.mapped_bytes,
                libc::MADV_POPULATE_WRITE,
            )
        };
        match code {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Address of the first page.
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

    /// A page's generation, as a lease of it is granted with.
    pub fn generation(&self, page: PageId) -> u64 {
        self.generation_word(page).load(Ordering::Acquire)
    }

    /// Raises a page's generation: from here on a peer's copy that names the old one fails.
    /// Called before anything is written into a page that a peer may have been reading.
    pub fn raise_generation(&self, page: PageId) {
        self.generation_word(page).fetch_add(1, Ordering::AcqRel);
        // The words of the page are written after this, never before: a reader that sees one of
        // them sees the new generation too.
        fence(Ordering::Release);
    }

    fn generation_word(&self, page: PageId) -> &AtomicU64 {
        assert!(
            (page.0 as usize) < self.pages,
            "page {} of {}",
            page.0,
            self.pages
        );
        // SAFETY: the head holds one aligned word for each page, mapped as long as `self` lives,
        // and this process touches it by atomic operations only.
        unsafe {
            AtomicU64::from_ptr(
                self.head
                    .add(GENERATIONS_AT)
                    .cast::<u64>()
                    .add(page.0 as usize)
                    .as_ptr(),
            )
        }
    }

    /// Random bytes in the pool's head: who maps it and finds them has mapped this very pool.
    pub fn nonce(&self) -> [u8; 32] {
        self.nonce
    }

    /// The memfd, to pass to an authenticated peer on the same host.
    pub fn memfd_raw(&self) -> Option<RawFd> {
        self.memfd.as_ref().map(|fd| fd.as_raw_fd())
    }
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `memfd` with this address and length.
        unsafe { libc::munmap(self.head.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// A new private memfd of at least so many bytes, mapped: on reserved huge pages if that succeeds.
fn map_best(bytes: usize) -> io::Result<(OwnedFd, NonNull<u8>, usize, PoolBacking)> {
    let rounded = bytes.checked_next_multiple_of(HUGE_PAGE_BYTES);
    // Below one huge page most of it would be wasted.
    if let Some(rounded) = rounded.filter(|_| bytes >= HUGE_PAGE_BYTES)
        && let Ok((memfd, head)) = map_memfd(rounded, libc::MFD_HUGETLB)
    {
        return Ok((memfd, head, rounded, PoolBacking::HugeTlb));
    }
    let (memfd, head) = map_memfd(bytes, 0)?;
    // A hint that a kernel may decline.
    // SAFETY: the mapping was just made with this length.
    unsafe { libc::madvise(head.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    Ok((memfd, head, bytes, backing_of_shared_memory()))
}

fn map_memfd(bytes: usize, flags: libc::c_uint) -> io::Result<(OwnedFd, NonNull<u8>)> {
    // SAFETY: the name is a valid C string; the flags ask for a sealable descriptor.
    let fd = unsafe {
        libc::memfd_create(
            c"kvserve-kv-pool".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just created and nobody else owns it.
    let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain calls on an owned descriptor.
    let sized =
        unsafe { libc::fchmod(fd, 0o600) == 0 && libc::ftruncate(fd, bytes as libc::off_t) == 0 };
    if !sized {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh shared mapping of the whole descriptor; the address is the kernel's choice.
    // Huge pages are reserved by this call or it fails, so that no later touch can.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let head = NonNull::new(address.cast::<u8>()).expect("mmap gave a null mapping");
    Ok((memfd, head))
}

/// Whether this kernel joins pages of a memfd that asks for it (`shmem_enabled` in sysfs).
fn backing_of_shared_memory() -> PoolBacking {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let joins = |text: &str| {
        ["[always]", "[within_size]", "[advise]", "[force]"]
            .iter()
            .any(|chosen| text.contains(chosen))
    };
    match setting {
        Ok(text) if joins(&text) => PoolBacking::Transparent,
        Ok(_) | Err(_) => PoolBacking::Small,
    }
}

/// Fills `bytes` from the kernel's generator.
fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: the slice is valid for writes; up to 256 bytes come whole or not at all.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if count == bytes.len() as isize {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
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
    fn a_populated_pool_keeps_its_bytes_and_says_what_backs_it() {
        let pool = PoolMemory::memfd(600, 8192).unwrap();
        // SAFETY: the page is the test's alone.
        unsafe { *pool.page(PageId(599)) = 7 };
        pool.populate().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { *pool.page(PageId(599)) }, 7);
        match pool.backing() {
            PoolBacking::HugeTlb => assert_eq!(pool.bytes() % HUGE_PAGE_BYTES, 0),
            PoolBacking::Transparent | PoolBacking::Small => {
                assert_eq!(pool.bytes(), 8192 + 600 * 8192);
            }
        }
        assert!(!pool.backing().label().is_empty());
    }

    #[test]
    fn generations_belong_to_one_page_each_and_pages_start_behind_them() {
        let pool = PoolMemory::memfd(600, 64).unwrap();
        assert_eq!(pool.page(PageId(0)) as usize % HEAD_ALIGN, 0);
        assert_eq!(pool.bytes(), 8192 + 600 * 64);
        pool.raise_generation(PageId(599));
        pool.raise_generation(PageId(599));
        pool.raise_generation(PageId(3));
        for page in 0..600 {
            let expected = match page {
                599 => 2,
                3 => 1,
                _ => 0,
            };
            assert_eq!(pool.generation(PageId(page)), expected, "page {page}");
        }
        // SAFETY: the first page is the test's.
        assert_eq!(
            // SAFETY: page 0 lies in the mapping and nobody else uses it.
            unsafe { *pool.page(PageId(0)) },
            0,
            "no word lies in a page"
        );
        let other = PoolMemory::memfd(1, 64).unwrap();
        assert_ne!(pool.nonce(), other.nonce());
    }

    #[test]
    fn an_impossible_size_is_refused() {
        assert!(PoolMemory::memfd(usize::MAX, 64).is_err());
        assert!(PoolMemory::memfd(0, 64).is_err());
    }
}
