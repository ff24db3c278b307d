//! A memory region over a pool's pages.

use super::{Device, VerbError};
use crate::pool::{PageId, PoolMemory};
use rdma_core_sys::{self as sys, ibv_mr};
use std::rc::Rc;
use std::sync::Arc;

/// What a region is for (PROTOCOL X3). Remote writing cannot be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Peers read it.
    pub serves: bool,
    /// Pulls land in it.
    pub lands: bool,
}

impl Access {
    /// The verbs' flags.
    pub fn flags(self) -> i32 {
        let mut flags = 0;
        if self.serves {
            flags |= sys::IBV_ACCESS_REMOTE_READ;
        }
        if self.lands {
            flags |= sys::IBV_ACCESS_LOCAL_WRITE;
        }
        flags
    }
}

/// A pool's pages (not its head), registered. Holds the mapping.
pub struct Region {
    device: Rc<Device>,
    mr: *mut ibv_mr,
    pool: Arc<PoolMemory>,
    relaxed: bool,
}

impl Region {
    /// Registers the pages of `pool`; with relaxed ordering where the library offers it.
    ///
    /// # Errors
    /// What the library says; `ENOMEM` mostly means the locked-memory limit.
    pub fn register(
        device: &Rc<Device>,
        pool: &Arc<PoolMemory>,
        access: Access,
    ) -> Result<Rc<Self>, VerbError> {
        let start = pool.base().as_ptr();
        let length = pool.pages() * pool.page_stride();
        let flags = access.flags();
        let mut relaxed = false;
        let mut mr = std::ptr::null_mut();
        if let Some(register) = device.verbs.reg_mr_iova2 {
            let with = (flags | sys::IBV_ACCESS_RELAXED_ORDERING) as libc::c_uint;
            // SAFETY: the pages are mapped for as long as `pool` is held, which is past the
            // deregistration (V1, V2); a live protection domain.
            mr = unsafe { register(device.domain, start.cast(), length, start as u64, with) };
            relaxed = !mr.is_null();
        }
        if mr.is_null() {
            // SAFETY: as above.
            mr = unsafe { (device.verbs.reg_mr)(device.domain, start.cast(), length, flags) };
        }
        if mr.is_null() {
            return Err(VerbError::last("ibv_reg_mr"));
        }
        Ok(Rc::new(Region {
            device: device.clone(),
            mr,
            pool: pool.clone(),
            relaxed,
        }))
    }

    /// The key that a peer's READs name.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the region is registered as long as `self` lives.
        unsafe { (*self.mr).rkey }
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr).lkey }
    }

    /// Address of the first page.
    pub fn base(&self) -> u64 {
        self.pool.base().as_ptr() as u64
    }

    /// Address of a page; panics on one that the pool does not have (V3).
    pub(super) fn page(&self, page: PageId) -> u64 {
        self.pool.page(page) as u64
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<PoolMemory> {
        &self.pool
    }

    /// Whether the card may reorder its writes.
    pub fn relaxed_ordering(&self) -> bool {
        self.relaxed
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: no queue pair that could use it lives (V1).
        let done = unsafe { (self.device.verbs.dereg_mr)(self.mr) };
        if done != 0 {
            // Still registered: the mapping must stay (V2), and the device with it.
            std::mem::forget(self.pool.clone());
            std::mem::forget(self.device.clone());
        }
    }
}
