//! Bounded ways between shards and plain threads.
//!
//! [`channel`]: anything (plain threads, engine lanes, other shards) sends, one shard receives.
//! [`to_thread`]: shards send, one plain thread receives and may block.
//!
//! Items travel through a bounded queue; a waiting receiver is rung through its seat, only when
//! it waits, once for all that comes before it looks. Nothing here grows beyond its capacity,
//! and no sender ever waits unseen: [`Sender::try_send`] gives the item back when it is full.

#![allow(
    clippy::disallowed_types,
    reason = "the one place where threads meet: bounded, and every wait above it has a deadline"
)]

use crate::shard::{DeadlinePassed, Notice, Seat, Shard};
use crate::time::Deadline;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A bounded channel from any threads to one shard.
///
/// `capacity` items at most wait in it (at least 1).
pub fn channel<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let (queue_in, queue_out) = flume::bounded(capacity.max(1));
    let doors = Arc::new(Doors::default());
    let sender = Sender {
        queue: queue_in,
        end: Arc::new(SenderEnd {
            doors: doors.clone(),
        }),
    };
    let receiver = Receiver {
        queue: queue_out,
        doors,
        seat: None,
    };
    (sender, receiver)
}

/// Why an item was not taken; it comes back.
#[derive(Debug, PartialEq, Eq)]
pub enum SendError<T> {
    /// The channel holds its capacity.
    Full(T),
    /// The receiver is gone.
    Closed(T),
}

impl<T> SendError<T> {
    /// The item that was not sent.
    pub fn into_inner(self) -> T {
        match self {
            SendError::Full(item) | SendError::Closed(item) => item,
        }
    }
}

/// How the two sides find each other when one of them waits.
#[derive(Debug, Default)]
pub(crate) struct Doors {
    /// The receiver has found nothing and waits (or is about to) on `receiver`.
    receiver_waits: AtomicBool,
    receiver: Mutex<Option<Arc<Notice>>>,
    /// Senders that wait for room, first come first; used by mailboxes only.
    pub(crate) senders: Mutex<std::collections::VecDeque<Arc<Notice>>>,
    pub(crate) senders_waiting: AtomicUsize,
}

impl Doors {
    fn ring_receiver(&self) {
        // After the push: either the receiver's second look sees the item, or we see that it
        // waits. The fences pair with each other.
        fence(Ordering::SeqCst);
        if self.receiver_waits.load(Ordering::Relaxed)
            && self.receiver_waits.swap(false, Ordering::AcqRel)
            && let Some(notice) = lock(&self.receiver).as_ref()
        {
            notice.ring();
        }
    }

    /// After a pop: tells the first sender that waits for room.
    pub(crate) fn ring_one_sender(&self) {
        fence(Ordering::SeqCst);
        if self.senders_waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let first = {
            let mut senders = lock(&self.senders);
            let first = senders.pop_front();
            self.senders_waiting.store(senders.len(), Ordering::Relaxed);
            first
        };
        if let Some(notice) = first {
            notice.ring();
        }
    }

    fn ring_all_senders(&self) {
        let all = {
            let mut senders = lock(&self.senders);
            self.senders_waiting.store(0, Ordering::Relaxed);
            std::mem::take(&mut *senders)
        };
        for notice in all {
            notice.ring();
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells the receiver when the last sender is gone.
struct SenderEnd {
    doors: Arc<Doors>,
}

impl Drop for SenderEnd {
    fn drop(&mut self) {
        // The queue's own sender is dropped before this (field order of `Sender`), so the
        // receiver that is rung here finds the channel closed.
        self.doors.ring_receiver();
    }
}

/// The sending half: any thread, any number of clones.
pub struct Sender<T> {
    // Before `end`: see `SenderEnd`.
    queue: flume::Sender<T>,
    end: Arc<SenderEnd>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender {
            queue: self.queue.clone(),
            end: self.end.clone(),
        }
    }
}

impl<T: Send> Sender<T> {
    /// Sends without waiting.
    ///
    /// # Errors
    /// The item, when the channel is full or closed.
    pub fn try_send(&self, item: T) -> Result<(), SendError<T>> {
        match self.queue.try_send(item) {
            Ok(()) => {
                self.end.doors.ring_receiver();
                Ok(())
            }
            Err(flume::TrySendError::Full(item)) => Err(SendError::Full(item)),
            Err(flume::TrySendError::Disconnected(item)) => Err(SendError::Closed(item)),
        }
    }

    /// Sends from a plain thread, waiting at most `span` for room. Never call it on a shard.
    ///
    /// # Errors
    /// The item, when the channel stayed full or is closed.
    pub fn send_timeout(&self, item: T, span: Duration) -> Result<(), SendError<T>> {
        match self.queue.send_timeout(item, span) {
            Ok(()) => {
                self.end.doors.ring_receiver();
                Ok(())
            }
            Err(flume::SendTimeoutError::Timeout(item)) => Err(SendError::Full(item)),
            Err(flume::SendTimeoutError::Disconnected(item)) => Err(SendError::Closed(item)),
        }
    }

    /// Items waiting in the channel now.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether no item waits now.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the receiver is gone.
    pub fn is_closed(&self) -> bool {
        self.queue.is_disconnected()
    }

    pub(crate) fn doors(&self) -> &Arc<Doors> {
        &self.end.doors
    }
}

/// The receiving half. It may be sent to a shard, and takes its seat there at its first wait.
pub struct Receiver<T> {
    queue: flume::Receiver<T>,
    doors: Arc<Doors>,
    seat: Option<Seat>,
}

impl<T: Send> Receiver<T> {
    /// Takes an item that is there.
    pub fn try_recv(&mut self) -> Option<T> {
        let item = self.queue.try_recv().ok()?;
        self.doors.ring_one_sender();
        Some(item)
    }

    /// Waits for an item, on a shard. `None`: every sender is gone and nothing is left. A
    /// service loop waits here without a deadline by its nature; anything that a request waits
    /// for uses [`Receiver::recv_until`].
    ///
    /// # Panics
    /// Outside a shard.
    pub async fn recv(&mut self) -> Option<T> {
        loop {
            match self.try_next() {
                Next::Item(item) => return Some(item),
                Next::Closed => return None,
                Next::Nothing => {}
            }
            let shard = Shard::current().expect("a bridge is received from on a shard");
            self.sit_down(&shard);
            // Second look, after `receiver_waits` is up.
            match self.try_next() {
                Next::Item(item) => {
                    self.doors.receiver_waits.store(false, Ordering::Relaxed);
                    return Some(item);
                }
                Next::Closed => return None,
                Next::Nothing => {}
            }
            if let Some(seat) = &mut self.seat {
                seat.rung().await;
            }
        }
    }

    /// As [`Receiver::recv`], at most to `deadline`.
    ///
    /// # Errors
    /// [`DeadlinePassed`]; no item is lost by it.
    pub async fn recv_until(&mut self, deadline: Deadline) -> Result<Option<T>, DeadlinePassed> {
        let shard = Shard::current().expect("a bridge is received from on a shard");
        shard.until(deadline, self.recv()).await
    }

    /// Items waiting in the channel now.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether no item waits now.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    fn try_next(&mut self) -> Next<T> {
        match self.queue.try_recv() {
            Ok(item) => {
                self.doors.ring_one_sender();
                Next::Item(item)
            }
            Err(flume::TryRecvError::Empty) => Next::Nothing,
            Err(flume::TryRecvError::Disconnected) => Next::Closed,
        }
    }

    fn sit_down(&mut self, shard: &Shard) {
        if !self.seat.as_ref().is_some_and(|seat| seat.is_on(shard)) {
            let seat = Seat::on(shard);
            *lock(&self.doors.receiver) = Some(seat.notice().clone());
            self.seat = Some(seat);
        }
        self.doors.receiver_waits.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

enum Next<T> {
    Item(T),
    Nothing,
    Closed,
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        *lock(&self.doors.receiver) = None;
        // What waits in the queue goes with the receiver, so that senders see it closed.
        while self.queue.try_recv().is_ok() {}
        let (_, nothing) = flume::bounded(1);
        drop(std::mem::replace(&mut self.queue, nothing));
        self.doors.ring_all_senders();
    }
}

/// A bounded channel from shards to one plain thread. `capacity` items at most wait in it.
pub fn to_thread<T: Send>(capacity: usize) -> (ThreadSender<T>, ThreadReceiver<T>) {
    let (queue_in, queue_out) = flume::bounded(capacity.max(1));
    (
        ThreadSender { queue: queue_in },
        ThreadReceiver { queue: queue_out },
    )
}

/// The shards' half of [`to_thread`]: never waits.
pub struct ThreadSender<T> {
    queue: flume::Sender<T>,
}

impl<T> Clone for ThreadSender<T> {
    fn clone(&self) -> Self {
        ThreadSender {
            queue: self.queue.clone(),
        }
    }
}

impl<T: Send> ThreadSender<T> {
    /// Sends without waiting.
    ///
    /// # Errors
    /// The item, when the channel is full or the thread is gone.
    pub fn try_send(&self, item: T) -> Result<(), SendError<T>> {
        self.queue.try_send(item).map_err(|error| match error {
            flume::TrySendError::Full(item) => SendError::Full(item),
            flume::TrySendError::Disconnected(item) => SendError::Closed(item),
        })
    }
}

/// The thread's half of [`to_thread`].
pub struct ThreadReceiver<T> {
    queue: flume::Receiver<T>,
}

/// What a plain thread's wait for an item gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<T> {
    /// An item.
    Item(T),
    /// Nothing came within the span.
    TimedOut,
    /// Every sender is gone and nothing is left.
    Closed,
}

impl<T: Send> ThreadReceiver<T> {
    /// Waits for an item, blocking the thread, at most for `span`.
    pub fn recv_timeout(&self, span: Duration) -> Received<T> {
        match self.queue.recv_timeout(span) {
            Ok(item) => Received::Item(item),
            Err(flume::RecvTimeoutError::Timeout) => Received::TimedOut,
            Err(flume::RecvTimeoutError::Disconnected) => Received::Closed,
        }
    }
}
