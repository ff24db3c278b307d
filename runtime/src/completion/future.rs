//! The future of one slot.

use super::hub::Hub;
use super::ids::{EndReason, SlotId};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// A wait that always ends: by the posts of its slot, or with a typed reason, by its deadline at
/// the latest. Dropping it at any point cancels the slot and never blocks; the guards stay with
/// the slot until its physical end.
#[must_use = "dropping a completion cancels its slot"]
pub struct Completion {
    hub: Hub,
    slot: SlotId,
    taken: bool,
}

impl Completion {
    pub(super) fn new(hub: Hub, slot: SlotId) -> Self {
        Completion {
            hub,
            slot,
            taken: false,
        }
    }

    /// The slot this waits for.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The hub it belongs to.
    pub fn hub(&self) -> &Hub {
        &self.hub
    }
}

impl Future for Completion {
    type Output = Result<(), EndReason>;

    /// # Panics
    /// When polled again after it was ready, like any future.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!self.taken, "completion polled after it was ready");
        let outcome = ready!(self.hub.poll_slot(self.slot, cx.waker()));
        self.taken = true;
        Poll::Ready(outcome)
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if !self.taken {
            self.hub.forget(self.slot);
        }
    }
}
