//! A value handed from one task of a shard to another, under the same contract as any wait.

use super::future::Completion;
use super::hub::Hub;
use super::ids::{EndReason, SlotId};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

pub(super) fn pair<T>(hub: Hub, wait: Completion) -> (Completer<T>, OneshotCompletion<T>) {
    let value = Rc::new(Cell::new(None));
    let completer = Completer {
        hub,
        slot: wait.slot(),
        value: value.clone(),
        completed: false,
    };
    (completer, OneshotCompletion { wait, value })
}

/// The right to end one [`OneshotCompletion`] with a value, once. Dropping it ends the wait with
/// [`EndReason::CompleterDropped`].
#[must_use = "dropping a completer ends its wait without a value"]
pub struct Completer<T> {
    hub: Hub,
    slot: SlotId,
    value: Rc<Cell<Option<T>>>,
    completed: bool,
}

impl<T> Completer<T> {
    /// Hands the value over.
    ///
    /// # Errors
    /// The value, when the wait had ended already; nothing has changed then.
    pub fn complete(mut self, value: T) -> Result<(), T> {
        self.completed = true;
        self.value.set(Some(value));
        if self.hub.finish(self.slot, Ok(())) {
            return Ok(());
        }
        match self.value.take() {
            Some(value) => Err(value),
            // Only `complete` sets it, and the wait takes it only after a good end.
            None => unreachable!("an ended wait took a value it was not given"),
        }
    }

    /// Ends the wait with the completer's own error code.
    pub fn fail(mut self, code: u32) {
        self.completed = true;
        self.hub.finish(self.slot, Err(EndReason::Failed(code)));
    }

    /// Whether the wait is over already: then nobody wants the value.
    pub fn is_abandoned(&self) -> bool {
        !self.hub.is_waiting(self.slot)
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        if !self.completed {
            self.hub.finish(self.slot, Err(EndReason::CompleterDropped));
        }
    }
}

/// A wait for a value from a [`Completer`]; ends by its deadline at the latest. Dropping it
/// cancels the wait.
#[must_use = "dropping a completion cancels its slot"]
pub struct OneshotCompletion<T> {
    wait: Completion,
    value: Rc<Cell<Option<T>>>,
}

impl<T> OneshotCompletion<T> {
    /// The slot this waits for.
    pub fn slot(&self) -> SlotId {
        self.wait.slot()
    }
}

impl<T> Future for OneshotCompletion<T> {
    type Output = Result<T, EndReason>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pin::new(&mut self.wait).poll(cx));
        // Only a slot that was given posts behind its completer's back ends well without one.
        Poll::Ready(outcome.and_then(|()| self.value.take().ok_or(EndReason::CompleterDropped)))
    }
}
