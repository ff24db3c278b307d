//! The queue and the accounts of one shard.

use super::rate::Rate;
use super::usage::{Credit, Short, Usage};
use super::{CreditError, CreditLimits};
use kvserve_runtime::{ChannelId, Nanos};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

/// What a read asks for.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// Bytes of its pages.
    pub bytes: u64,
    /// When it is of no use any more.
    pub deadline: Nanos,
}

/// What was counted since the start; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreditCounters {
    /// Credits taken.
    pub taken: u64,
    /// Credits given back.
    pub given_back: u64,
    /// Reads refused as hopeless.
    pub hopeless: u64,
    /// Reads refused because the queue was full.
    pub queue_full: u64,
}

/// How a peer stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCredits {
    /// Reads in flight.
    pub reads: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that wait.
    pub waiting: usize,
    /// Measured bytes per second; 0 while unknown.
    pub bytes_per_s: u64,
}

/// A read in the queue. The heap gives the greatest first: the earliest deadline, and of equal
/// ones the one that came first.
#[derive(Debug)]
struct Waiting<T> {
    want: Want,
    number: u64,
    item: T,
}

impl<T> Ord for Waiting<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |waiting: &Self| (waiting.want.deadline, waiting.number);
        key(other).cmp(&key(self))
    }
}

impl<T> PartialOrd for Waiting<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Waiting<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Waiting<T> {}

#[derive(Debug)]
struct Peer<T> {
    usage: Usage,
    rate: Rate,
    waiting: BinaryHeap<Waiting<T>>,
    /// Its session has ended: the entry goes with its last credit.
    gone: bool,
}

/// See the module's text. `P` names a peer, `T` is what the owner wants back with the credit.
#[derive(Debug)]
pub struct Credits<P, T> {
    limits: CreditLimits,
    shard: Usage,
    peers: BTreeMap<P, Peer<T>>,
    /// By channel index.
    channels: Vec<Usage>,
    waiting: usize,
    number_next: u64,
    counters: CreditCounters,
}

impl<P: Copy + Ord, T> Credits<P, T> {
    /// Nothing in flight, nobody waits.
    pub fn new(limits: CreditLimits) -> Self {
        Credits {
            limits,
            shard: Usage::default(),
            peers: BTreeMap::new(),
            channels: Vec::new(),
            waiting: 0,
            number_next: 0,
            counters: CreditCounters::default(),
        }
    }

    /// Queues a read of `peer`; [`Credits::next`] gives it back with its credit.
    ///
    /// # Errors
    /// [`CreditError`] with the item: it is hopeless, or too many wait. A read with nothing
    /// ahead of it is never called hopeless: a rate measured in a bad moment must not keep
    /// itself alive by refusing everything.
    pub fn queue(
        &mut self,
        now: Nanos,
        peer: P,
        want: Want,
        item: T,
    ) -> Result<(), (CreditError, T)> {
        if self.waiting >= self.limits.waiting_max {
            self.counters.queue_full += 1;
            let error = CreditError::QueueFull {
                waiting: self.waiting,
                waiting_max: self.limits.waiting_max,
            };
            return Err((error, item));
        }
        let entry = self.peers.entry(peer).or_insert_with(|| Peer {
            usage: Usage::default(),
            rate: Rate::default(),
            waiting: BinaryHeap::new(),
            gone: false,
        });
        let before = entry.waiting.iter();
        let queued: u64 = before
            .filter(|waiting| waiting.want.deadline <= want.deadline)
            .map(|waiting| waiting.want.bytes)
            .sum();
        let ahead_bytes = entry.usage.bytes.saturating_add(queued);
        let left = want.deadline.since(now);
        let needs = entry.rate.span_of(ahead_bytes.saturating_add(want.bytes));
        if ahead_bytes > 0 && needs.is_some_and(|needs| needs > left) {
            self.counters.hopeless += 1;
            let error = CreditError::Hopeless {
                ahead_bytes,
                bytes: want.bytes,
                bytes_per_s: entry.rate.bytes_per_s(),
                left,
            };
            return Err((error, item));
        }
        entry.waiting.push(Waiting {
            want,
            number: self.number_next,
            item,
        });
        self.number_next += 1;
        self.waiting += 1;
        Ok(())
    }

    /// The waiting read with the earliest deadline that may be posted now, and its credit.
    /// `channel_of` says which channel of a peer takes a read now, if one does.
    pub fn next(
        &mut self,
        now: Nanos,
        mut channel_of: impl FnMut(P) -> Option<ChannelId>,
    ) -> Option<(Credit<P>, T)> {
        let mut best: Option<(Nanos, u64, P, ChannelId)> = None;
        for (peer, entry) in &self.peers {
            let Some(first) = entry.waiting.peek() else {
                continue;
            };
            let (deadline, number) = (first.want.deadline, first.number);
            let later = best.is_some_and(|(by, at, ..)| (by, at) < (deadline, number));
            if later || self.short_of(entry, None, first.want.bytes).is_some() {
                continue;
            }
            let Some(channel) = channel_of(*peer) else {
                continue;
            };
            if (self.short_of(entry, Some(channel), first.want.bytes)).is_none() {
                best = Some((deadline, number, *peer, channel));
            }
        }
        let (.., peer, channel) = best?;
        let entry = self.peers.get_mut(&peer)?;
        let Waiting { want, item, .. } = entry.waiting.pop()?;
        self.waiting -= 1;
        if entry.usage.reads == 0 {
            entry.rate.begin(now);
        }
        let index = channel.index as usize;
        if self.channels.len() <= index {
            self.channels.resize(index + 1, Usage::default());
        }
        for usage in [&mut self.shard, &mut entry.usage, &mut self.channels[index]] {
            usage.take(want.bytes);
        }
        self.counters.taken += 1;
        let credit = Credit {
            peer,
            channel,
            bytes: want.bytes,
        };
        Some((credit, item))
    }

    /// A read has ended physically. `in_place`: all its bytes came, which is what the path's
    /// rate is measured by.
    pub fn give_back(&mut self, now: Nanos, credit: Credit<P>, in_place: bool) {
        let Credit {
            peer,
            channel,
            bytes,
        } = credit;
        self.counters.given_back += 1;
        self.shard.give_back(bytes);
        if let Some(usage) = self.channels.get_mut(channel.index as usize) {
            usage.give_back(bytes);
        }
        let Some(entry) = self.peers.get_mut(&peer) else {
            debug_assert!(false, "a peer stays until its last credit is back");
            return;
        };
        entry.usage.give_back(bytes);
        let idle = entry.usage.reads == 0;
        if in_place {
            entry.rate.moved(now, bytes, idle);
        }
        if idle && entry.gone {
            self.peers.remove(&peer);
        }
    }

    /// Takes waiting reads of a peer out of the queue: those that `keep` does not keep.
    pub fn retain(&mut self, peer: P, mut keep: impl FnMut(&T) -> bool) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            let before = entry.waiting.len();
            entry.waiting.retain(|waiting| keep(&waiting.item));
            self.waiting -= before - entry.waiting.len();
        }
    }

    /// A peer's session has ended: nothing of it waits any more. Its reads in flight keep their
    /// credits until they end.
    pub fn forget(&mut self, peer: P) {
        self.retain(peer, |_| false);
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.gone = true;
            if entry.usage.reads == 0 {
                self.peers.remove(&peer);
            }
        }
    }

    /// What the first waiting read of a peer is short of; `None` when none waits, or nothing.
    /// With [`Short::Shard`] whatever moves on the shard is ahead of it (PROTOCOL L2).
    pub fn short_of_peer(&self, peer: P, channel: Option<ChannelId>) -> Option<Short> {
        let entry = self.peers.get(&peer)?;
        let first = entry.waiting.peek()?;
        match channel {
            Some(_) => self.short_of(entry, channel, first.want.bytes),
            None => Some(Short::Channel),
        }
    }

    /// How a peer stands.
    pub fn peer(&self, peer: P) -> PeerCredits {
        let entry = self.peers.get(&peer);
        entry.map_or(PeerCredits::default(), |entry| PeerCredits {
            reads: entry.usage.reads,
            bytes: entry.usage.bytes,
            waiting: entry.waiting.len(),
            bytes_per_s: entry.rate.bytes_per_s(),
        })
    }

    /// Reads that wait over all peers.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Reads in flight on the shard, and their bytes.
    pub fn in_flight(&self) -> (u32, u64) {
        (self.shard.reads, self.shard.bytes)
    }

    /// What was counted since the start.
    pub fn counters(&self) -> CreditCounters {
        self.counters
    }

    fn short_of(&self, peer: &Peer<T>, channel: Option<ChannelId>, bytes: u64) -> Option<Short> {
        if !self.shard.has_room(bytes, &self.limits.shard) {
            return Some(Short::Shard);
        }
        if !peer.usage.has_room(bytes, &self.limits.peer) {
            return Some(Short::Peer);
        }
        let used = channel.and_then(|channel| self.channels.get(channel.index as usize));
        let fits = used.is_none_or(|used| used.has_room(bytes, &self.limits.channel));
        (!fits).then_some(Short::Channel)
    }
}
