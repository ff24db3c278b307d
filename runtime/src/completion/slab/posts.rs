//! Channels, posts and completions (PROTOCOL P2, P3).

use super::{Slab, SourceId};
use crate::completion::channel::{Channel, Entry, Position, RING_MAX};
use crate::completion::errors::{OpenError, PostError};
use crate::completion::ids::{ChannelId, ChannelKind, Completed, CompletionStatus, EndReason};
use crate::completion::ids::{SlotId, WorkId};
use crate::completion::ladder::{Event, Phase};
use crate::completion::slot::{CHANNELS_PER_SLOT_MAX, State};
use crate::time::Nanos;

impl Slab {
    /// Opens a channel of `source` whose ring holds at least `ring` posts.
    ///
    /// # Errors
    /// [`OpenError`] when numbers are used up or the ring's size is out of bounds.
    pub fn open_channel(
        &mut self,
        kind: ChannelKind,
        source: SourceId,
        ring: usize,
        now: Nanos,
    ) -> Result<ChannelId, OpenError> {
        if ring == 0 || ring > RING_MAX {
            return Err(OpenError::RingSize {
                wanted: ring,
                ring_max: RING_MAX,
            });
        }
        // Numbers never used come first, then the one that has been free longest: completions
        // that come late for a closed channel then meet a free number and change nothing.
        let index = if self.channels.len() < ChannelId::COUNT_MAX {
            self.channels.len() as u16
        } else if let Some(index) = self.channels_free.pop_front() {
            index
        } else {
            return Err(OpenError::ChannelsExhausted {
                channels_max: ChannelId::COUNT_MAX,
                quarantined: self.channels_quarantined,
            });
        };
        let id = ChannelId { kind, index };
        if index as usize == self.channels.len() {
            self.channels.push(Channel::closed(id, source));
        }
        self.channels[index as usize].open(id, source, ring);
        self.climb(index, Event::Opened, now);
        self.counters.channels_open += 1;
        Ok(id)
    }

    /// Takes a channel down the ladder; nothing happens if it is on its way already.
    pub fn close_channel(&mut self, channel: ChannelId, now: Nanos) {
        if let Some(index) = self.find_channel(channel) {
            self.climb(index, Event::Kill, now);
        }
    }

    /// Whether posts may be made on `channel`.
    pub fn takes_posts(&self, channel: ChannelId) -> bool {
        self.find_channel(channel)
            .is_some_and(|index| self.channels[index as usize].phase.takes_posts())
    }

    /// Whether any channel of `source` is in use.
    pub fn uses_source(&self, source: SourceId) -> bool {
        self.channels.iter().any(|channel| {
            channel.source == source && (channel.phase.takes_posts() || channel.phase.is_stopping())
        })
    }

    /// Gives `posts` positions of `channel` to a waiting slot; returns the first.
    ///
    /// # Errors
    /// [`PostError`]; nothing has changed then.
    pub fn reserve(
        &mut self,
        name: SlotId,
        channel: ChannelId,
        posts: usize,
        now: Nanos,
    ) -> Result<WorkId, PostError> {
        if posts == 0 {
            return Err(PostError::NoPosts);
        }
        let index = self.slots.find(name).ok_or(PostError::SlotEnded)?;
        match self.slots.at(index).state {
            State::Waiting => {}
            State::Free | State::Stopping(_) | State::Ended(_) => return Err(PostError::SlotEnded),
        }
        let number = (self.find_channel(channel))
            .filter(|&number| self.channels[number as usize].phase.takes_posts())
            .ok_or(PostError::ChannelClosed(channel))?;
        let posted_on = &mut self.channels[number as usize];
        if !posted_on.can_number(posts) {
            return Err(PostError::PositionsUsedUp);
        }
        if posts > posted_on.room() {
            return Err(PostError::RingFull {
                wanted: posts,
                free: posted_on.room(),
            });
        }
        if !self.slots.at(index).share_add(number, posts as u32) {
            return Err(PostError::TooManyChannels {
                channels_max: CHANNELS_PER_SLOT_MAX,
            });
        }
        self.counters.posts_posted += posts as u64;
        self.counters.posts_outstanding += posts as u64;
        self.pay_owed(index, posts as u32);
        let posted_on = &mut self.channels[number as usize];
        Ok(posted_on.reserve(index, posts, now))
    }

    /// Takes back `count` reserved positions from `first` on that were not posted after all,
    /// and fails their slots with `code`.
    pub fn unpost(&mut self, first: WorkId, count: usize, code: u32, now: Nanos) {
        let Some(number) = self.find_channel(first.channel()) else {
            return;
        };
        for position in first.position()..first.position().saturating_add(count as u64) {
            let channel = &mut self.channels[number as usize];
            if position >= channel.unretired().end {
                break;
            }
            if let Some(index) = channel.void(position) {
                self.counters.posts_unposted += 1;
                self.counters.posts_outstanding -= 1;
                self.after_post(index, number, CompletionStatus::Error(code), now);
            }
        }
        self.channels[number as usize].skip_void();
        let event = self.channels[number as usize].retired();
        self.climb(number, event, now);
    }

    /// The source has promised that `work`, of an ended waiter, touches no memory any more.
    pub fn taken_back(&mut self, work: WorkId) {
        let Some(number) = self.find_channel(work.channel()) else {
            return;
        };
        if let Some(index) = self.channels[number as usize].take_back(work.position()) {
            self.counters.posts_taken_back += 1;
            let state = self.release_post(index, number);
            debug_assert!(matches!(state, State::Stopping(_)), "only orphans are");
            self.end_physically_if_quiet(index);
        }
    }

    /// Applies one completion (P3).
    pub fn complete(&mut self, completed: Completed, now: Nanos) {
        let position = completed.work.position();
        let Some(number) = self.find_channel(completed.work.channel()) else {
            // No channel of that number and kind was ever open, or another kind has it now.
            self.counters.completions_late += 1;
            return;
        };
        let channel = &self.channels[number as usize];
        if channel.is_flushed(position) {
            // Known since the channel's first flush; they end with the channel.
            self.counters.completions_late += 1;
            return;
        }
        match channel.phase {
            Phase::Free | Phase::Quarantined => self.counters.completions_late += 1,
            Phase::Open | Phase::Grace(_) | Phase::Draining { .. } => {
                match channel.position(position) {
                    Position::Outstanding => self.retire(number, position, completed.status, now),
                    Position::Retired => {
                        self.counters.completions_duplicate += 1;
                        self.climb(number, Event::Kill, now);
                    }
                    Position::NeverPosted => {
                        self.counters.completions_stray += 1;
                        self.climb(number, Event::Kill, now);
                    }
                }
            }
        }
    }

    /// Retires all posts of a channel up to `last`. Those before it, having said nothing,
    /// succeeded; `status` is the last one's.
    fn retire(&mut self, number: u16, last: u64, status: CompletionStatus, now: Nanos) {
        let flushed = match status {
            CompletionStatus::Flushed(code) => {
                self.channels[number as usize].break_at(last, code);
                true
            }
            CompletionStatus::Success | CompletionStatus::Error(_) => false,
        };
        loop {
            let channel = &mut self.channels[number as usize];
            let position = channel.unretired().start;
            if flushed && position == last {
                break; // it ends with its channel
            }
            let Some(entry) = channel.retire_next(last, now) else {
                break;
            };
            let own_status = if position == last {
                status
            } else {
                CompletionStatus::Success
            };
            match entry {
                Entry::Void => {}
                Entry::TakenBack => {
                    self.count_retired();
                    self.counters.completions_late += 1;
                }
                Entry::Posted(index) => {
                    self.count_retired();
                    self.after_post(index, number, own_status, now);
                }
            }
        }
        let channel = &mut self.channels[number as usize];
        channel.skip_void();
        let event = channel.retired();
        let failed = channel.rule.error_is_terminal && status != CompletionStatus::Success;
        let terminal = failed || flushed;
        self.climb(number, event, now);
        if terminal {
            self.climb(number, Event::Kill, now);
        }
    }

    /// What the end of one post means to its slot.
    fn after_post(&mut self, index: u32, number: u16, status: CompletionStatus, now: Nanos) {
        match (self.release_post(index, number), status) {
            (State::Waiting, CompletionStatus::Error(code)) => {
                self.end_logically(index, Err(EndReason::Failed(code)), now);
            }
            (State::Waiting, CompletionStatus::Success) => {
                let slot = self.slots.at(index);
                if slot.outstanding == 0 && slot.owed == 0 {
                    self.end_logically(index, Ok(()), now);
                }
            }
            // Not retired on its own: it ends with its channel, see `again`.
            (State::Waiting, CompletionStatus::Flushed(_)) => {
                debug_assert!(false, "a flushed post ends with its channel");
            }
            (
                State::Stopping(_),
                CompletionStatus::Success
                | CompletionStatus::Error(_)
                | CompletionStatus::Flushed(_),
            ) => {
                self.counters.completions_late += 1;
                self.end_physically_if_quiet(index);
            }
            // Reported by `release_post`; a release build changes nothing.
            (
                State::Free | State::Ended(_),
                CompletionStatus::Success
                | CompletionStatus::Error(_)
                | CompletionStatus::Flushed(_),
            ) => {}
        }
    }

    pub(super) fn end_physically_if_quiet(&mut self, index: u32) {
        if self.slots.at(index).outstanding == 0 {
            self.end_physically(index);
        }
    }

    fn count_retired(&mut self) {
        self.counters.posts_retired += 1;
        self.counters.posts_outstanding -= 1;
    }

    pub(super) fn find_channel(&self, id: ChannelId) -> Option<u16> {
        let channel = self.channels.get(id.index as usize)?;
        (channel.id == id).then_some(id.index)
    }
}
