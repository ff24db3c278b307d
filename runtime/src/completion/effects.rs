//! What the sans-IO core asks its shell to do. No callback ever runs inside the core.

use super::ids::{ChannelId, GuardToken, WorkId};
use super::slab::SourceId;
use std::collections::VecDeque;
use std::task::Waker;

/// What happens to a slot's guards at its physical end; each token comes out exactly once.
#[derive(Debug, PartialEq, Eq)]
pub enum GuardEnd {
    /// Nothing can touch the memory any more: it may be used again.
    Release(GuardToken),
    /// That could not be proven: the memory is lost for the life of the process.
    Quarantine(GuardToken),
}

/// What a source is to do for the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Stop this channel (the ladder's third rung).
    Kill {
        /// Whose channel.
        source: SourceId,
        /// Which.
        channel: ChannelId,
    },
    /// The waiter of this post is gone; take it back if you can (PROTOCOL E3).
    Abandon {
        /// Whose post.
        source: SourceId,
        /// Which.
        work: WorkId,
    },
}

/// Effects in the order in which they arose, per receiver.
#[derive(Debug, Default)]
pub struct Effects {
    /// Waiters whose logical end has come.
    pub wakes: VecDeque<Waker>,
    /// Wakers nobody needs any more. They are dropped by the shell, since the drop of a waker
    /// may drop a task, and with it futures that come back to the core.
    pub spent_wakers: Vec<Waker>,
    /// Guards whose physical end has come.
    pub guards: VecDeque<GuardEnd>,
    /// Orders to the sources.
    pub orders: VecDeque<Order>,
}

impl Effects {
    /// Whether only the poll loop can carry out what waits here.
    pub fn need_a_turn(&self) -> bool {
        !self.guards.is_empty() || !self.orders.is_empty()
    }
}
