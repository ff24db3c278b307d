//! Mailboxes between shards: bounded, ordered per sender; a full one makes its sender wait, at
//! most to the sender's deadline.

use crate::bridge::{self, Doors, SendError, lock};
use crate::shard::{Seat, Shard};
use crate::time::Deadline;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

pub use crate::bridge::Receiver;

/// A mailbox that holds at most `capacity` items (at least 1). Any number of shards may send.
pub fn channel<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = bridge::channel(capacity);
    (Sender { sender }, receiver)
}

/// One mailbox for each of `shards` shards, and the senders to all of them for each. End `i`
/// is for shard `i`.
pub fn mesh<T: Send>(shards: usize, capacity: usize) -> Vec<MeshEnd<T>> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..shards).map(|_| channel(capacity)).unzip();
    receivers
        .into_iter()
        .enumerate()
        .map(|(index, inbox)| MeshEnd {
            index,
            inbox,
            senders: senders.clone(),
        })
        .collect()
}

/// A shard's end of a [`mesh`].
pub struct MeshEnd<T> {
    /// Which shard this end is for.
    pub index: usize,
    /// What the others send to it.
    pub inbox: Receiver<T>,
    /// Senders to every shard, by index; one's own is among them.
    pub senders: Vec<Sender<T>>,
}

/// The sending half: any shard, any number of clones.
pub struct Sender<T> {
    sender: bridge::Sender<T>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender {
            sender: self.sender.clone(),
        }
    }
}

impl<T: Send> Sender<T> {
    /// Sends without waiting.
    ///
    /// # Errors
    /// The item, when the mailbox is full or its owner is gone.
    pub fn try_send(&self, item: T) -> Result<(), SendError<T>> {
        self.sender.try_send(item)
    }

    /// Sends, waiting for room at most to `deadline`. Dropped while it waits, it has sent
    /// nothing.
    ///
    /// # Errors
    /// The item: `Full` at the deadline, `Closed` when the owner is gone.
    pub async fn send(&self, item: T, deadline: Deadline) -> Result<(), SendError<T>> {
        let mut item = match self.sender.try_send(item) {
            Err(SendError::Full(item)) => item,
            done => return done,
        };
        let shard = Shard::current().expect("a mailbox is sent to from a shard");
        let mut place = WaitForRoom {
            doors: self.sender.doors(),
            seat: Seat::on(&shard),
        };
        loop {
            place.queue_up();
            // Second look, after the receiver can see that somebody waits.
            item = match self.sender.try_send(item) {
                Err(SendError::Full(item)) => item,
                done => return done,
            };
            if shard.until(deadline, place.seat.rung()).await.is_err() {
                return Err(SendError::Full(item));
            }
        }
    }

    /// Items waiting in the mailbox now.
    pub fn len(&self) -> usize {
        self.sender.len()
    }

    /// Whether no item waits now.
    pub fn is_empty(&self) -> bool {
        self.sender.is_empty()
    }
}

/// A sender's place among those who wait for room.
struct WaitForRoom<'a> {
    doors: &'a Arc<Doors>,
    seat: Seat,
}

impl WaitForRoom<'_> {
    fn queue_up(&self) {
        let mut senders = lock(&self.doors.senders);
        let notice = self.seat.notice();
        if !senders.iter().any(|waiting| Arc::ptr_eq(waiting, notice)) {
            senders.push_back(notice.clone());
        }
        self.doors
            .senders_waiting
            .store(senders.len(), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

impl Drop for WaitForRoom<'_> {
    fn drop(&mut self) {
        let was_called = {
            let mut senders = lock(&self.doors.senders);
            let before = senders.len();
            senders.retain(|waiting| !Arc::ptr_eq(waiting, self.seat.notice()));
            self.doors
                .senders_waiting
                .store(senders.len(), Ordering::Relaxed);
            senders.len() == before
        };
        // Whoever was called and leaves hands the call on: it may not have used the room.
        // (Having used it, the next one looks once for nothing.)
        if was_called {
            self.doors.ring_one_sender();
        }
    }
}
