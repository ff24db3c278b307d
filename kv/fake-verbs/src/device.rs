//! What the library's pointers point at: the ABI's structs first, ours behind them.

use crate::card::Side;
use crate::wire::Shared;
use rdma_core_sys::{
    ibv_async_element, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_pd,
    ibv_qp, ibv_wc,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device in a list: what an `ibv_device` pointer means.
pub(crate) struct FakeDevice {
    pub shared: Arc<Shared>,
    pub side: Side,
    pub name: std::ffi::CString,
}

#[repr(C)]
pub(crate) struct FakeContext {
    pub abi: ibv_context,
    pub shared: Arc<Shared>,
    pub side: Side,
    pub events: EventQueue,
}

/// Asynchronous events of one context, with the descriptor that tells of them.
pub(crate) struct EventQueue {
    pub fd: libc::c_int,
    waiting: Mutex<VecDeque<ibv_async_event>>,
}

// SAFETY: the pointers in an event are names here: nobody but the library's caller, on its own
// thread, looks behind them.
unsafe impl Send for EventQueue {}
// SAFETY: as above; the queue itself is behind a lock.
unsafe impl Sync for EventQueue {}

impl EventQueue {
    pub fn new() -> Self {
        EventQueue {
            fd: event_fd(),
            waiting: Mutex::default(),
        }
    }

    pub fn push(&self, element: ibv_async_element, event_type: u32) {
        let event = ibv_async_event {
            element,
            event_type,
        };
        locked(&self.waiting).push_back(event);
        raise(self.fd);
    }

    pub fn pop(&self) -> Option<ibv_async_event> {
        take(self.fd).then(|| locked(&self.waiting).pop_front())?
    }
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        // SAFETY: made by `event_fd`, closed once.
        unsafe { libc::close(self.fd) };
    }
}

#[repr(C)]
pub(crate) struct FakeDomain {
    pub abi: ibv_pd,
}

#[repr(C)]
pub(crate) struct FakeRegion {
    pub abi: ibv_mr,
    pub shared: Arc<Shared>,
    pub side: Side,
}

#[repr(C)]
pub(crate) struct FakeChannel {
    pub abi: ibv_comp_channel,
    /// Queues with an event that nobody took.
    pub waiting: Mutex<VecDeque<usize>>,
}

#[repr(C)]
pub(crate) struct FakeQueue {
    pub abi: ibv_cq,
    pub core: Arc<QueueCore>,
}

/// The part of a completion queue that the wire's thread reaches.
pub(crate) struct QueueCore {
    pub entries: Mutex<Entries>,
    /// Address of its channel (0: none) and of itself, as names.
    pub channel: usize,
    pub itself: AtomicUsize,
}

#[derive(Default)]
pub(crate) struct Entries {
    pub list: VecDeque<ibv_wc>,
    pub capacity: usize,
    pub armed: bool,
    pub overruns: u64,
}

/// When the newest completion of any queue in this process was put there, nanoseconds of
/// `CLOCK_MONOTONIC`.
pub(crate) static LAST_COMPLETION_NS: AtomicU64 = AtomicU64::new(0);

fn monotonic_ns() -> u64 {
    let mut spec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid struct for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut spec) };
    spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64
}

impl QueueCore {
    /// One more completion; rings the channel if it was asked to.
    pub fn push(&self, wc: ibv_wc) {
        LAST_COMPLETION_NS.store(monotonic_ns(), Ordering::Release);
        let rings = {
            let mut entries = locked(&self.entries);
            if entries.list.len() >= entries.capacity {
                entries.overruns += 1;
                return;
            }
            entries.list.push_back(wc);
            std::mem::take(&mut entries.armed)
        };
        if rings && self.channel != 0 {
            let channel = self.channel as *const FakeChannel;
            let itself = self.itself.load(Ordering::Acquire);
            // SAFETY: a queue's channel outlives the queue (the verbs' own rule), and the wire's
            // thread reaches a queue only while a queue pair of it exists.
            unsafe {
                locked(&(*channel).waiting).push_back(itself);
                raise((*channel).abi.fd);
            }
        }
    }
}

#[repr(C)]
pub(crate) struct FakePair {
    pub abi: ibv_qp,
    pub shared: Arc<Shared>,
    pub side: Side,
}

/// Counts readiness up: one read takes one.
pub(crate) fn event_fd() -> libc::c_int {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
    assert!(fd >= 0, "eventfd: {}", std::io::Error::last_os_error());
    fd
}

pub(crate) fn raise(fd: libc::c_int) {
    let one = 1_u64;
    // SAFETY: eight valid bytes.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Takes one; `false` when there is none and the descriptor is non-blocking.
pub(crate) fn take(fd: libc::c_int) -> bool {
    let mut count = 0_u64;
    // SAFETY: room for eight bytes.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) == 8 }
}

/// A lock whose holder panicked is as good as any in a test's library.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
