//! The only place where the CPU backend touches the pool's memory.
//!
//! Every access is checked against the layout and the pool, so that no plan, however wrong, can
//! reach outside. What is *not* checked here is who else touches the page: the page ledger
//! promises that only this step writes the pages it names for its new tokens (DESIGN 4).

use crate::weights::{bf16_to_f32, f32_to_bf16};
use kvserve_kv::layout::KeyOrValue;
use kvserve_kv::{KvDtype, KvLayout, PageId, PoolMemory};
use std::sync::Arc;

/// One head's keys or values of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plane {
    pub layer: usize,
    pub part: KeyOrValue,
    pub head: usize,
}

/// The pool, read and written as rows of f32.
pub(crate) struct PagedKv {
    pool: Arc<PoolMemory>,
    layout: KvLayout,
}

impl PagedKv {
    /// Panics if the pool's pages are smaller than the layout's or not in host memory.
    pub fn new(pool: Arc<PoolMemory>, layout: KvLayout) -> Self {
        assert!(pool.page_stride() >= layout.page_bytes());
        assert_eq!(pool.kind(), kvserve_kv::PoolKind::Memfd);
        PagedKv { pool, layout }
    }

    pub fn pool(&self) -> &Arc<PoolMemory> {
        &self.pool
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// First byte of `count` tokens of a plane; all lie in one page.
    fn place(&self, page: PageId, plane: Plane, token: usize, count: usize) -> *mut u8 {
        let layout = &self.layout;
        assert!(
            plane.layer < layout.layers
                && plane.head < layout.kv_heads
                && count >= 1
                && token + count <= layout.page_tokens,
            "{plane:?}, tokens {token}..{} of {layout}",
            token + count
        );
        let offset = layout.offset(plane.layer, plane.part, plane.head, token);
        // SAFETY: by the assertions the place lies within a page of the layout, and `new` made
        // sure that the pool's pages are at least as large; `page` checks the id.
        unsafe { self.pool.page(page).add(offset) }
    }

    /// Writes the row of the token at `position`; rounded to bf16 where the pool holds that.
    /// `pages` is the sequence's page table. Panics if it does not cover the position.
    pub fn store(&self, pages: &[PageId], plane: Plane, position: usize, row: &[f32]) {
        let layout = &self.layout;
        assert_eq!(row.len(), layout.head_dim);
        let page = pages[position / layout.page_tokens];
        let place = self.place(page, plane, position % layout.page_tokens, 1);
        match layout.dtype {
            KvDtype::F32 => {
                // SAFETY: `head_dim` floats lie in the page at `place`, aligned to 4 since pages
                // start at multiples of 64 and rows are whole floats.
                unsafe {
                    std::ptr::copy_nonoverlapping(row.as_ptr(), place.cast::<f32>(), row.len());
                }
            }
            KvDtype::Bf16 => {
                let place = place.cast::<u16>();
                for (i, value) in row.iter().enumerate() {
                    // SAFETY: as above with elements of 2 bytes.
                    unsafe { place.add(i).write(f32_to_bf16(*value)) }
                }
            }
        }
    }

    /// Reads the rows of `count` tokens from `first` on into `out`, one every `stride` elements.
    /// Panics if the page table does not cover them or `out` is too short.
    pub fn load(
        &self,
        pages: &[PageId],
        plane: Plane,
        first: usize,
        count: usize,
        out: &mut [f32],
        stride: usize,
    ) {
        let (page_tokens, head_dim) = (self.layout.page_tokens, self.layout.head_dim);
        assert!(stride >= head_dim && out.len() >= count * stride);
        let mut done = 0;
        while done < count {
            let token = (first + done) % page_tokens;
            let run = (page_tokens - token).min(count - done);
            let place = self.place(pages[(first + done) / page_tokens], plane, token, run);
            for (i, out) in out[done * stride..]
                .chunks_mut(stride)
                .take(run)
                .enumerate()
            {
                let out = &mut out[..head_dim];
                match self.layout.dtype {
                    // SAFETY: row `token + i` of the plane, `head_dim` aligned floats (see
                    // `store`); `out` is other memory.
                    KvDtype::F32 => unsafe {
                        let row = place.cast::<f32>().add(i * head_dim);
                        std::ptr::copy_nonoverlapping(row, out.as_mut_ptr(), head_dim);
                    },
                    KvDtype::Bf16 => {
                        // SAFETY: as above with elements of 2 bytes.
                        let row = unsafe {
                            std::slice::from_raw_parts(
                                place.cast::<u16>().add(i * head_dim),
                                head_dim,
                            )
                        };
                        for (out, bits) in out.iter_mut().zip(row) {
                            *out = bf16_to_f32(*bits);
                        }
                    }
                }
            }
            done += run;
        }
    }

    /// Where the rows of `count` tokens from `first` on lie, page by page: address and bytes.
    /// Panics if the page table does not cover them.
    pub fn for_runs(
        &self,
        pages: &[PageId],
        plane: Plane,
        first: usize,
        count: usize,
        mut visit: impl FnMut(*const u8, usize),
    ) {
        let page_tokens = self.layout.page_tokens;
        let row_bytes = self.layout.head_dim * self.layout.dtype.bytes();
        let mut done = 0;
        while done < count {
            let token = (first + done) % page_tokens;
            let run = (page_tokens - token).min(count - done);
            let place = self.place(pages[(first + done) / page_tokens], plane, token, run);
            visit(place, run * row_bytes);
            done += run;
        }
    }

    /// Reads the bfloat16 rows of `count` tokens from `first` on into `out`, one every `stride`
    /// words, as they lie in the pages; what lies between a row's end and the next stays.
    /// Panics if the page table does not cover them, `out` is too short, or the pool holds f32.
    pub fn load_words(
        &self,
        pages: &[PageId],
        plane: Plane,
        first: usize,
        count: usize,
        out: &mut [u32],
        stride: usize,
    ) {
        let (page_tokens, head_dim) = (self.layout.page_tokens, self.layout.head_dim);
        assert_eq!(self.layout.dtype, KvDtype::Bf16);
        assert!(stride * 2 >= head_dim && out.len() >= count * stride);
        let mut done = 0;
        while done < count {
            let token = (first + done) % page_tokens;
            let run = (page_tokens - token).min(count - done);
            let place = self.place(pages[(first + done) / page_tokens], plane, token, run);
            let row_bytes = head_dim * 2;
            let rows = out[done * stride..].chunks_mut(stride).take(run);
            if stride * 4 == row_bytes {
                let to = out[done * stride..][..run * stride].as_mut_ptr();
                // SAFETY: `run` rows of the plane; `out` is other memory with room for them.
                unsafe {
                    std::ptr::copy_nonoverlapping(place, to.cast::<u8>(), run * row_bytes);
                }
            } else {
                for (i, row) in rows.enumerate() {
                    // SAFETY: row `token + i` of the plane; the stride has room for it.
                    unsafe {
                        let from = place.add(i * row_bytes);
                        std::ptr::copy_nonoverlapping(from, row.as_mut_ptr().cast(), row_bytes);
                    }
                }
            }
            done += run;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paged(dtype: KvDtype) -> PagedKv {
        let layout = KvLayout {
            dtype,
            page_tokens: 4,
            layers: 2,
            kv_heads: 3,
            head_dim: 6,
            kernel_class: "test".into(),
        };
        let pool = PoolMemory::memfd(5, layout.page_bytes()).unwrap();
        PagedKv::new(Arc::new(pool), layout)
    }

    fn row(plane: Plane, position: usize) -> Vec<f32> {
        let base = plane.layer * 64 + plane.part as usize * 32 + plane.head * 8 + position;
        (0..6).map(|i| (base + i) as f32 / 2.0).collect()
    }

    #[test]
    fn rows_come_back_over_page_borders() {
        for dtype in [KvDtype::F32, KvDtype::Bf16] {
            let kv = paged(dtype);
            let pages = [PageId(3), PageId(0), PageId(4)];
            let mut planes = Vec::new();
            for layer in 0..2 {
                for part in [KeyOrValue::Key, KeyOrValue::Value] {
                    planes.extend((0..3).map(|head| Plane { layer, part, head }));
                }
            }
            for plane in &planes {
                for position in 0..11 {
                    kv.store(&pages, *plane, position, &row(*plane, position));
                }
            }
            for plane in &planes {
                let mut out = vec![-1.0; 7 * 9];
                kv.load(&pages, *plane, 2, 9, &mut out, 7);
                for i in 0..9 {
                    assert_eq!(out[i * 7..i * 7 + 6], row(*plane, 2 + i), "{dtype:?}");
                    assert_eq!(out[i * 7 + 6], -1.0, "nothing is written between rows");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 5 of 5")]
    fn a_page_outside_the_pool_is_refused() {
        let plane = Plane {
            layer: 0,
            part: KeyOrValue::Key,
            head: 0,
        };
        paged(KvDtype::F32).store(&[PageId(5)], plane, 0, &[0.0; 6]);
    }
}
