//! Zeroed memory at page borders, for weights and scratch.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Huge pages are 2 MiB on x86-64: what is larger is mapped at such a border, so that the kernel
/// can back it with them (weights are streamed once a step; 4 KiB pages cost a TLB miss each).
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// What is smaller starts at a cache line.
const LINE_BYTES: usize = 64;

/// A fixed number of plain elements, zeroed, at a fixed address.
pub(crate) struct Aligned<T: Plain> {
    start: NonNull<T>,
    length: usize,
}

/// Types for which all-zero bytes are a value and which need no drop.
///
/// # Safety
/// Both must hold.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: zero bytes are the number zero.
unsafe impl Plain for u8 {}
// SAFETY: zero bytes are the number zero.
unsafe impl Plain for u32 {}
// SAFETY: zero bytes are the number zero.
unsafe impl Plain for f32 {}

// SAFETY: it owns its memory as a `Box<[T]>` does.
unsafe impl<T: Plain + Send> Send for Aligned<T> {}
// SAFETY: as above; `&Aligned` gives no safe way to write.
unsafe impl<T: Plain + Sync> Sync for Aligned<T> {}

impl<T: Plain> Aligned<T> {
    fn bytes(length: usize) -> usize {
        length
            .checked_mul(size_of::<T>())
            .expect("a buffer larger than the address space")
    }

    /// How a small buffer is allocated.
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes.max(1), LINE_BYTES)
            .expect("a buffer larger than the address space")
    }

    /// `length` zeroes. Pages of a large buffer are touched on first use, by whoever uses them.
    pub fn zeroed(length: usize) -> Self {
        let bytes = Self::bytes(length);
        let layout = Self::layout(bytes);
        let start = if bytes >= HUGE_PAGE_BYTES {
            map_huge(bytes)
        } else {
            // SAFETY: the layout has at least one byte.
            NonNull::new(unsafe { alloc_zeroed(layout) })
        };
        let Some(start) = start else {
            handle_alloc_error(layout)
        };
        let start = start.cast();
        Aligned { start, length }
    }

    /// All of it.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `length` initialised elements; nobody writes them while `&self` lives, except
        // through `as_ptr` under the caller's own care.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// All of it.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: `length` initialised elements, ours alone while `&mut self` lives.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    /// Its address, to be shared between the threads of a team: who writes what is their affair.
    pub fn as_ptr(&self) -> *mut T {
        self.start.as_ptr()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.length
    }
}

/// Maps zeroed memory at a huge-page border; `None` when there is none.
fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    let length = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    // One huge page more than asked for, so that a border lies in the first of them.
    let mapped = length.checked_add(HUGE_PAGE_BYTES)?;
    // SAFETY: a new private mapping; then the parts before and after the aligned one are given
    // back, which nobody has seen. Advice on the rest changes no result.
    unsafe {
        let base = libc::mmap(
            std::ptr::null_mut(),
            mapped,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        let before = base.align_offset(HUGE_PAGE_BYTES);
        let start = base.add(before);
        if before > 0 {
            libc::munmap(base.cast(), before);
        }
        let after = mapped - before - length;
        if after > 0 {
            libc::munmap(start.add(length).cast(), after);
        }
        libc::madvise(start.cast(), length, libc::MADV_HUGEPAGE);
        NonNull::new(start)
    }
}

impl<T: Plain> Drop for Aligned<T> {
    fn drop(&mut self) {
        let bytes = Self::bytes(self.length);
        let start = self.start.as_ptr();
        // SAFETY: made by `zeroed` in the same way, by the same length.
        unsafe {
            if bytes >= HUGE_PAGE_BYTES {
                libc::munmap(start.cast(), bytes.next_multiple_of(HUGE_PAGE_BYTES));
            } else {
                dealloc(start.cast(), Self::layout(bytes));
            }
        }
    }
}

/// A matrix of activations that a team of threads fills together: `[row][column]`.
///
/// Columns are padded to whole vectors (padding stays zero) plus one vector, so that rows whose
/// length is a power of two do not all fall into the same cache sets.
pub(crate) struct Rows {
    buffer: Aligned<f32>,
    rows: usize,
    stride: usize,
}

impl Rows {
    /// `rows` zeroed rows of `columns`.
    pub fn new(rows: usize, columns: usize) -> Self {
        let stride = columns.next_multiple_of(16) + 16;
        Rows {
            buffer: Aligned::zeroed(rows * stride),
            rows,
            stride,
        }
    }

    /// Elements between two rows; at least the columns rounded up to 16.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first element of a row. Panics if there is no such row.
    pub fn row(&self, row: usize) -> *mut f32 {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row lies in the buffer by the assertion.
        unsafe { self.buffer.as_ptr().add(row * self.stride) }
    }

    /// `count` elements of a row.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn read(&self, row: usize, count: usize) -> &[f32] {
        assert!(count <= self.stride);
        // SAFETY: inside the row by the assertion; quiet by the caller's word.
        unsafe { std::slice::from_raw_parts(self.row(row), count) }
    }

    /// `count` elements of a row, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[allow(
        clippy::mut_from_ref,
        reason = "the phases of a pass share the rows out"
    )]
    pub unsafe fn write(&self, row: usize, count: usize) -> &mut [f32] {
        assert!(count <= self.stride);
        // SAFETY: inside the row by the assertion; ours alone by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.row(row), count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_and_aligned() {
        for length in [0, 1, 1000, HUGE_PAGE_BYTES] {
            let buffer = Aligned::<f32>::zeroed(length);
            assert_eq!(buffer.len(), length);
            assert!(buffer.as_slice().iter().all(|x| x.to_bits() == 0));
            assert_eq!(buffer.as_ptr() as usize % LINE_BYTES, 0);
        }
    }

    #[test]
    #[should_panic(expected = "row 3 of 3")]
    fn a_row_beyond_the_end_is_refused() {
        Rows::new(3, 17).row(3);
    }
}
