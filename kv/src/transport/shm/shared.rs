//! A peer's pool, validated before it is mapped, and read-only.

use super::sys::{self, ReadMap};
use crate::pool::{GENERATIONS_AT, HEAD_MAGIC, HUGE_PAGE_BYTES, head_bytes};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Without these a peer could make our map shorter than we think (a fault at a touch), longer,
/// or writable anew.
const SEALS: i32 =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// What a peer's pool must be like.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedPool {
    /// The nonce that the peer named in its sealed `Hello`: proof that this is its pool and that
    /// the map reaches it.
    pub nonce: [u8; 32],
    /// Bytes of a page.
    pub page_bytes: usize,
    /// The user who made it: this process's.
    pub uid: u32,
}

/// Why a descriptor is not taken for a peer's pool.
#[derive(Debug)]
pub enum MapRefusal {
    /// It belongs to another user: found, expected.
    Uid(u32, u32),
    /// Others than its owner may open it, or it is no file: its mode.
    Mode(u32),
    /// Seals are missing: found, expected.
    Seals(i32, i32),
    /// Its size, in bytes, fits no pool with such a head.
    Size(u64),
    /// Its head begins with another word.
    Magic(u64),
    /// The head's numbers do not fit together: head bytes, stride, pages.
    Head(u64, u64, u64),
    /// Pages of this stride hold no page of the layout: stride, page bytes.
    Stride(u64, usize),
    /// Another pool than the peer named.
    Nonce,
    /// The kernel refused.
    Io(io::Error),
}

impl fmt::Display for MapRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapRefusal::Uid(found, expected) => {
                write!(
                    f,
                    "the pool is user {found}'s, this node runs as {expected}"
                )
            }
            MapRefusal::Mode(mode) => write!(f, "the pool has mode {mode:o}, not a file's 600"),
            MapRefusal::Seals(found, expected) => {
                write!(f, "the pool has seals {found:#x} of {expected:#x}")
            }
            MapRefusal::Size(bytes) => write!(f, "{bytes} bytes are no pool of that head"),
            MapRefusal::Magic(word) => write!(f, "the head begins with {word:#018x}"),
            MapRefusal::Head(head, stride, pages) => write!(
                f,
                "a head of {head} bytes for {pages} pages of {stride} bytes does not add up"
            ),
            MapRefusal::Stride(stride, page_bytes) => {
                write!(f, "pages of {page_bytes} bytes do not lie {stride} apart")
            }
            MapRefusal::Nonce => f.write_str("this is not the pool that the peer named"),
            MapRefusal::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for MapRefusal {}

/// A peer's pool, mapped read-only.
pub struct SharedPool {
    map: ReadMap,
    head_bytes: usize,
    page_stride: usize,
    pages: usize,
}

impl SharedPool {
    /// Validates a descriptor that a peer has sent, and maps it. The descriptor is closed.
    ///
    /// # Errors
    /// [`MapRefusal`]; then nothing stays mapped.
    pub fn map(descriptor: OwnedFd, expected: &ExpectedPool) -> Result<SharedPool, MapRefusal> {
        let status = sys::status(&descriptor).map_err(MapRefusal::Io)?;
        if status.uid != expected.uid {
            return Err(MapRefusal::Uid(status.uid, expected.uid));
        }
        let is_file = status.mode & libc::S_IFMT == libc::S_IFREG;
        if !is_file || status.mode & 0o077 != 0 {
            return Err(MapRefusal::Mode(status.mode));
        }
        // Before anything is touched: from here on the size cannot change.
        let seals = sys::seals(&descriptor);
        if seals & SEALS != SEALS {
            return Err(MapRefusal::Seals(seals, SEALS));
        }
        let bytes = usize::try_from(status.bytes).unwrap_or(usize::MAX);
        if bytes < GENERATIONS_AT || bytes > isize::MAX as usize {
            return Err(MapRefusal::Size(status.bytes));
        }
        let map = ReadMap::new(&descriptor, bytes).map_err(MapRefusal::Io)?;
        // SAFETY: the map has at least 128 bytes, is aligned to a memory page, and is sealed
        // against shrinking; the peer may write it, so each word is read once.
        let word =
            |at: usize| u64::from_le(unsafe { map.start().cast::<u64>().add(at).read_volatile() });
        let (magic, head, stride, pages) = (word(0), word(1), word(2), word(3));
        if magic != HEAD_MAGIC {
            return Err(MapRefusal::Magic(magic));
        }
        let wrong_head = || MapRefusal::Head(head, stride, pages);
        let (Ok(pages_here), Ok(stride_here)) = (u32::try_from(pages), usize::try_from(stride))
        else {
            return Err(wrong_head());
        };
        let pages_here = pages_here as usize;
        let head_here = head_bytes(pages_here)
            .filter(|bytes| *bytes as u64 == head && pages_here > 0)
            .ok_or_else(wrong_head)?;
        if stride_here < expected.page_bytes || !stride_here.is_multiple_of(64) {
            return Err(MapRefusal::Stride(stride, expected.page_bytes));
        }
        let whole = pages_here
            .checked_mul(stride_here)
            .and_then(|pages| pages.checked_add(head_here));
        // A pool on huge pages ends at a multiple of one.
        let rounded = whole.and_then(|whole| whole.checked_next_multiple_of(HUGE_PAGE_BYTES));
        if whole != Some(bytes) && rounded != Some(bytes) {
            return Err(MapRefusal::Size(status.bytes));
        }
        let mut nonce = [0u8; 32];
        for (at, byte) in nonce.iter_mut().enumerate() {
            // SAFETY: bytes 32 to 64 of the head.
            *byte = unsafe { map.start().add(32 + at).read_volatile() };
        }
        if nonce != expected.nonce {
            return Err(MapRefusal::Nonce);
        }
        Ok(SharedPool {
            map,
            head_bytes: head_here,
            page_stride: stride_here,
            pages: pages_here,
        })
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.map.bytes()
    }

    /// First byte of a page: valid for volatile reads of a page's bytes as long as `self` lives.
    /// Panics on a page that the pool lacks: places are checked when they are learnt.
    pub(super) fn page(&self, page: u32) -> *const u8 {
        let page = page as usize;
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.map
            .start()
            .wrapping_add(self.head_bytes + page * self.page_stride)
    }

    /// A page's generation now. What the caller reads afterwards was written after it was set.
    pub(super) fn generation(&self, page: u32) -> u64 {
        let page = page as usize;
        assert!(page < self.pages, "page {page} of {}", self.pages);
        let at = self.map.start().wrapping_add(GENERATIONS_AT + 8 * page);
        // SAFETY: an aligned word of the head, mapped as long as `self` lives; it is only
        // loaded, which a read-only map allows, and the peer touches it by atomics.
        let word = unsafe { AtomicU64::from_ptr(at.cast_mut().cast()) };
        word.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{PageId, PoolMemory};
    use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};

    fn descriptor(pool: &PoolMemory) -> OwnedFd {
        let fd = pool.memfd_raw().unwrap();
        // SAFETY: the pool's descriptor is open for this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        fd.try_clone_to_owned().unwrap()
    }

    fn expected(pool: &PoolMemory) -> ExpectedPool {
        ExpectedPool {
            nonce: pool.nonce(),
            page_bytes: 100,
            uid: sys::own_uid(),
        }
    }

    /// A memfd of our own making: what a lying peer could send.
    fn forged(bytes: &[u8], length: usize, mode: u32, seals: i32) -> OwnedFd {
        // SAFETY: plain calls on a descriptor that this function makes and owns.
        unsafe {
            let fd = libc::memfd_create(c"forged".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0);
            assert_eq!(libc::ftruncate(fd, length as libc::off_t), 0);
            assert_eq!(libc::fchmod(fd, mode), 0);
            let written = libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), 0);
            assert_eq!(written, bytes.len() as isize);
            if seals != 0 {
                assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
            }
            OwnedFd::from_raw_fd(fd)
        }
    }

    fn head(magic: u64, head: u64, stride: u64, pages: u64, nonce: [u8; 32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [magic, head, stride, pages] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&nonce);
        bytes
    }

    #[test]
    fn a_pool_is_mapped_and_its_pages_and_generations_are_read() {
        let pool = PoolMemory::memfd(5, 100).unwrap();
        // SAFETY: page 4 is the test's.
        unsafe { pool.page(PageId(4)).write(9) };
        pool.raise_generation(PageId(4));
        let shared = SharedPool::map(descriptor(&pool), &expected(&pool)).unwrap();
        assert_eq!((shared.pages(), shared.bytes()), (5, pool.bytes()));
        // SAFETY: a byte of a mapped page.
        assert_eq!(unsafe { shared.page(4).read_volatile() }, 9);
        assert_eq!((shared.generation(4), shared.generation(3)), (1, 0));
        pool.raise_generation(PageId(4));
        assert_eq!(shared.generation(4), 2, "it is the same memory");
        drop(pool);
        // The map outlives its owner: a peer that dies takes nothing away under a copy.
        // SAFETY: as above.
        assert_eq!(unsafe { shared.page(4).read_volatile() }, 9);
    }

    #[test]
    fn a_descriptor_of_a_pool_allows_no_writable_map_and_no_resize() {
        let pool = PoolMemory::memfd(5, 100).unwrap();
        let sent = descriptor(&pool);
        for protection in [libc::PROT_WRITE, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: a refused mapping.
            let address = unsafe {
                let fd = sent.as_raw_fd();
                libc::mmap(
                    std::ptr::null_mut(),
                    4096,
                    protection,
                    libc::MAP_SHARED,
                    fd,
                    0,
                )
            };
            assert_eq!(address, libc::MAP_FAILED);
        }
        // SAFETY: plain calls that must fail, and a query.
        unsafe {
            assert_ne!(libc::ftruncate(sent.as_raw_fd(), 4096), 0);
            assert_ne!(libc::ftruncate(sent.as_raw_fd(), 1 << 20), 0);
            assert_ne!(
                libc::pwrite(sent.as_raw_fd(), [1u8].as_ptr().cast(), 1, 0),
                1
            );
        }
        let shared = SharedPool::map(sent, &expected(&pool)).unwrap();
        // A read-only map cannot be made writable either.
        // SAFETY: a refused change of our own mapping.
        let changed = unsafe {
            let start = shared.map.start().cast_mut().cast();
            libc::mprotect(start, 4096, libc::PROT_READ | libc::PROT_WRITE)
        };
        assert_ne!(changed, 0);
    }

    #[test]
    fn a_lying_peer_is_refused_by_name() {
        let pool = PoolMemory::memfd(5, 100).unwrap();
        let good = expected(&pool);
        let refusal = |fd: OwnedFd, expected: &ExpectedPool| {
            SharedPool::map(fd, expected).map(|_| ()).unwrap_err()
        };
        let other_user = ExpectedPool {
            uid: good.uid + 1,
            ..good
        };
        assert!(matches!(
            refusal(descriptor(&pool), &other_user),
            MapRefusal::Uid(found, wanted) if found + 1 == wanted
        ));
        let other_pool = ExpectedPool {
            nonce: [1; 32],
            ..good
        };
        assert!(matches!(
            refusal(descriptor(&pool), &other_pool),
            MapRefusal::Nonce
        ));
        let longer = ExpectedPool {
            page_bytes: 129,
            ..good
        };
        assert!(matches!(
            refusal(descriptor(&pool), &longer),
            MapRefusal::Stride(128, 129)
        ));
        let whole = 4096 + 5 * 128;
        let fair = head(HEAD_MAGIC, 4096, 128, 5, good.nonce);
        let forge = |bytes: &[u8], length, seals| forged(bytes, length, 0o600, seals);
        assert!(SharedPool::map(forge(&fair, whole, SEALS), &good).is_ok());
        for missing in [
            libc::F_SEAL_SHRINK,
            libc::F_SEAL_GROW,
            libc::F_SEAL_FUTURE_WRITE,
            libc::F_SEAL_SEAL,
        ] {
            let fd = forge(&fair, whole, SEALS & !missing);
            assert!(matches!(refusal(fd, &good), MapRefusal::Seals(..)));
        }
        assert!(matches!(
            refusal(forged(&fair, whole, 0o644, SEALS), &good),
            MapRefusal::Mode(_)
        ));
        // SAFETY: eventfd takes no pointer; the descriptor is owned from here on.
        let no_file = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, 0)) };
        assert!(SharedPool::map(no_file, &good).is_err());
        for length in [64, 4096, whole - 1, whole + 1, whole + 4096] {
            let fd = forge(&fair, length, SEALS);
            assert!(
                matches!(refusal(fd, &good), MapRefusal::Size(_)),
                "{length}"
            );
        }
        let magic = head(HEAD_MAGIC + 1, 4096, 128, 5, good.nonce);
        assert!(matches!(
            refusal(forge(&magic, whole, SEALS), &good),
            MapRefusal::Magic(_)
        ));
        for (head_bytes, stride, pages) in [
            (0, 128, 5),
            (8192, 128, 5),
            (4096, 128, 0),
            (4096, 128, u64::MAX),
            (4096, 128, 1 << 32),
            (u64::MAX, 128, 5),
        ] {
            let lie = head(HEAD_MAGIC, head_bytes, stride, pages, good.nonce);
            let found = refusal(forge(&lie, whole, SEALS), &good);
            assert!(matches!(found, MapRefusal::Head(..)), "{found}");
        }
        for stride in [0, 64, 120, 129, u64::MAX, 1 << 63] {
            let lie = head(HEAD_MAGIC, 4096, stride, 5, good.nonce);
            let found = refusal(forge(&lie, whole, SEALS), &good);
            let named = matches!(found, MapRefusal::Stride(..) | MapRefusal::Size(_));
            assert!(named, "{found}");
        }
    }
}
