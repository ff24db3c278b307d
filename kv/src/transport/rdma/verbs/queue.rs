//! A completion queue with its channel.

use super::{Device, VerbError, make_nonblocking};
use rdma_core_sys::{self as sys, ibv_comp_channel, ibv_cq, ibv_wc};
use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;

/// One completion. Of a failed one nothing else may be read (V6), of a good one nothing else is
/// needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// As posted.
    pub wr_id: u64,
    /// `ibv_wc_status`; zero is success.
    pub status: u32,
    /// The queue pair's number.
    pub pair: u32,
    /// The card's own words.
    pub vendor: u32,
}

/// Completions taken at once; one source hands out no more in a turn.
pub(crate) const TAKE_MAX: usize = kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;

/// A completion queue whose channel tells when it is no longer empty.
pub struct CompletionQueue {
    device: Rc<Device>,
    channel: *mut ibv_comp_channel,
    queue: *mut ibv_cq,
    /// Room for what one call gives; written anew by each.
    found: RefCell<Box<[ibv_wc; TAKE_MAX]>>,
}

impl CompletionQueue {
    /// A queue of `entries`.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(device: &Rc<Device>, entries: u32) -> Result<Rc<Self>, VerbError> {
        // SAFETY: a live context.
        let channel = unsafe { (device.verbs.create_comp_channel)(device.context) };
        if channel.is_null() {
            return Err(VerbError::last("ibv_create_comp_channel"));
        }
        let entries = entries as libc::c_int;
        let nothing = std::ptr::null_mut();
        // SAFETY: a live context and channel; no context pointer is passed.
        let queue =
            unsafe { (device.verbs.create_cq)(device.context, entries, nothing, channel, 0) };
        if queue.is_null() {
            let error = VerbError::last("ibv_create_cq");
            // SAFETY: nothing was made of the channel.
            unsafe { (device.verbs.destroy_comp_channel)(channel) };
            return Err(error);
        }
        let queue = Rc::new(CompletionQueue {
            device: device.clone(),
            channel,
            queue,
            found: RefCell::new(Box::new([ibv_wc::default(); TAKE_MAX])),
        });
        make_nonblocking(queue.descriptor())?;
        Ok(queue)
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.queue
    }

    /// Entries that it holds, at least what was asked for.
    pub fn entries(&self) -> u32 {
        // SAFETY: a live queue.
        unsafe { (*self.queue).cqe }.max(0) as u32
    }

    /// Turns readable at the first completion after [`CompletionQueue::request_notify`].
    pub fn descriptor(&self) -> RawFd {
        // SAFETY: a live channel, whose descriptor does not change.
        unsafe { (*self.channel).fd }
    }

    /// Takes up to 64 completions; fewer than 64 means that it was empty.
    ///
    /// # Errors
    /// That the queue is broken: nothing on it completes any more.
    pub fn take(&self, mut each: impl FnMut(Ended)) -> Result<usize, VerbError> {
        let mut found = self.found.borrow_mut();
        // SAFETY: a live queue, and room for as many as are asked for.
        let count =
            unsafe { sys::ibv_poll_cq(self.queue, TAKE_MAX as libc::c_int, found.as_mut_ptr()) };
        if count < 0 {
            return Err(VerbError::new("ibv_poll_cq", count.abs()));
        }
        for wc in found.iter().take(count as usize) {
            each(Ended {
                wr_id: wc.wr_id,
                status: wc.status,
                pair: wc.qp_num,
                vendor: wc.vendor_err,
            });
        }
        Ok(count as usize)
    }

    /// Asks for one event at the next completion. What completed before gives none: poll after.
    ///
    /// # Errors
    /// What the library says.
    pub fn request_notify(&self) -> Result<(), VerbError> {
        // SAFETY: a live queue made with a channel.
        let answer = unsafe { sys::ibv_req_notify_cq(self.queue, 0) };
        VerbError::check("ibv_req_notify_cq", answer)
    }

    /// Takes the events of the channel back; never blocks.
    pub fn take_events(&self) -> usize {
        let mut count = 0;
        loop {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a live channel, whose descriptor is non-blocking, and two places.
            let answer =
                unsafe { (self.device.verbs.get_cq_event)(self.channel, &mut queue, &mut context) };
            if answer != 0 {
                return count;
            }
            // SAFETY: the queue whose event was just given; each is acknowledged once.
            unsafe { (self.device.verbs.ack_cq_events)(queue, 1) };
            count += 1;
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: no queue pair uses it (V1) and all events are acknowledged. If the library
        // refuses, it leaks.
        unsafe {
            if (self.device.verbs.destroy_cq)(self.queue) == 0 {
                (self.device.verbs.destroy_comp_channel)(self.channel);
            }
        }
    }
}
