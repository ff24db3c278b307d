//! A list of READs to be posted in one call. Its memory is used again from call to call.

use super::Region;
use crate::pool::PageId;
use rdma_core_sys::{self as sys, ibv_send_wr, ibv_send_wr_arms, ibv_send_wr_rdma, ibv_sge};
use std::rc::Rc;

/// One READ: a run of remote bytes into pages of ours.
#[derive(Clone, Copy, Debug)]
pub struct ReadWork {
    /// Comes back with its completion.
    pub wr_id: u64,
    /// Whether it gives a completion of its own when it succeeds.
    pub signalled: bool,
    /// Where to read.
    pub remote_address: u64,
    /// The peer's key.
    pub remote_key: u32,
}

/// Work requests in the making.
pub struct WorkBatch {
    region: Rc<Region>,
    requests: Vec<ibv_send_wr>,
    /// Where each request's entries begin in `scatter`.
    begins: Vec<usize>,
    scatter: Vec<ibv_sge>,
}

impl WorkBatch {
    /// An empty list of requests that land in `region`.
    pub fn new(region: Rc<Region>) -> Self {
        WorkBatch {
            region,
            requests: Vec::new(),
            begins: Vec::new(),
            scatter: Vec::new(),
        }
    }

    /// Requests in it.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Forgets all requests.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.begins.clear();
        self.scatter.clear();
    }

    /// Begins a request; its target follows by [`WorkBatch::into_page`].
    pub fn push(&mut self, work: ReadWork) {
        self.begins.push(self.scatter.len());
        self.requests.push(ibv_send_wr {
            wr_id: work.wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: sys::IBV_WR_RDMA_READ,
            send_flags: match work.signalled {
                true => sys::IBV_SEND_SIGNALED,
                false => 0,
            },
            imm_data: 0,
            wr: ibv_send_wr_arms {
                rdma: ibv_send_wr_rdma {
                    remote_addr: work.remote_address,
                    rkey: work.remote_key,
                },
            },
            xrc_remote_srqn: 0,
            rest: [0; 6],
        });
    }

    /// Lets the last request's next `bytes` land from the start of `page` on, in its stride (and
    /// in the strides of the pages after it, as far as `bytes` goes). Panics on bytes beyond the
    /// pool (V3).
    pub fn into_page(&mut self, page: PageId, bytes: usize) {
        let pool = self.region.pool();
        let last = page.0 as usize + bytes.div_ceil(pool.page_stride()).max(1) - 1;
        assert!(
            last < pool.pages(),
            "{bytes} bytes from page {} on end beyond a pool of {} pages",
            page.0,
            pool.pages()
        );
        self.scatter.push(ibv_sge {
            addr: self.region.page(page),
            length: bytes as u32,
            lkey: self.region.local_key(),
        });
    }

    /// Makes the last request give a completion.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= sys::IBV_SEND_SIGNALED;
        }
    }

    /// Links the list; the pointers hold until the next change.
    pub(super) fn linked(&mut self) -> &mut [ibv_send_wr] {
        let scatter = self.scatter.as_mut_ptr();
        for at in 0..self.requests.len() {
            let begin = self.begins[at];
            let end = self.begins.get(at + 1).copied();
            let end = end.unwrap_or(self.scatter.len());
            let request = &mut self.requests[at];
            request.sg_list = scatter.wrapping_add(begin);
            request.num_sge = (end - begin) as libc::c_int;
        }
        let first = self.requests.as_mut_ptr();
        for at in 1..self.requests.len() {
            self.requests[at - 1].next = first.wrapping_add(at);
        }
        &mut self.requests
    }

    pub(super) fn lands_in(&self, region: &Rc<Region>) -> bool {
        Rc::ptr_eq(&self.region, region)
    }
}
