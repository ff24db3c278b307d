//! Stopping channels: the ladder's steps and their consequences (PROTOCOL E2, E5).

use super::{Slab, SourceId};
use crate::completion::channel::Entry;
use crate::completion::effects::Order;
use crate::completion::ids::{ChannelId, EndReason};
use crate::completion::ladder::{self, Action, Event, Phase};
use crate::completion::slot::State;
use crate::source::Reap;
use crate::time::Nanos;

impl Slab {
    /// Channels that must be looked at each turn, by place in an internal list that a look may
    /// shorten: go through it from the end.
    pub fn stopping_len(&self) -> usize {
        self.stopping.len()
    }

    /// The stopping channel at `place`: its source, and whether it is killed (so that the
    /// source must be asked what became of it) or in grace (how much it has moved).
    pub fn stopping_at(&self, place: usize) -> Option<(SourceId, ChannelId, bool)> {
        let channel = &self.channels[*self.stopping.get(place)? as usize];
        let killed = !channel.phase.takes_posts();
        Some((channel.source, channel.id, killed))
    }

    /// How much a channel in grace says it has moved.
    pub fn look(&mut self, channel: ChannelId, moved: u64, now: Nanos) {
        if let Some(number) = self.find_channel(channel) {
            let event = self.channels[number as usize].tick(moved);
            self.climb(number, event, now);
        }
    }

    /// What a killed channel's source says became of it.
    pub fn reaped(&mut self, channel: ChannelId, reap: Reap, now: Nanos) {
        if let Some(number) = self.find_channel(channel) {
            self.climb(number, Event::Reaped(reap), now);
        }
    }

    /// One step of a channel on the ladder, with its consequences.
    pub(super) fn climb(&mut self, number: u16, event: Event, now: Nanos) {
        let channel = &mut self.channels[number as usize];
        let (phase, action) = ladder::step(channel.phase, event, &channel.rule, now);
        let was_stopping = channel.phase.is_stopping();
        match (channel.phase, phase) {
            (Phase::Open, Phase::Grace(_)) => self.counters.channels_graced += 1,
            (Phase::Grace(_), Phase::Open) => self.counters.channels_recovered += 1,
            (Phase::Grace(_), Phase::Draining { .. }) => {
                self.counters.channels_killed_in_grace += 1;
            }
            _ => {}
        }
        channel.phase = phase;
        match (was_stopping, phase.is_stopping()) {
            (false, true) => self.stopping.push(number),
            (true, false) => self.stopping.retain(|&kept| kept != number),
            (false, false) | (true, true) => {}
        }
        match action {
            Action::None => {}
            Action::Kill => self.on_killed(number, now),
            Action::Quiet => {
                self.counters.channels_quiet += 1;
                self.lose_posts(number, false, now);
                self.channels_free.push_back(number);
            }
            Action::Stuck => {
                self.counters.channels_stuck += 1;
                self.channels_quarantined += 1;
                self.lose_posts(number, true, now);
            }
        }
    }

    /// Orders the kill. Waiters with posts on the channel wait on if they may post again once it
    /// is quiet (E5); the others end at once, and their guards stay until it is.
    fn on_killed(&mut self, number: u16, now: Nanos) {
        self.counters.channels_killed += 1;
        let channel = &self.channels[number as usize];
        self.effects.orders.push_back(Order::Kill {
            source: channel.source,
            channel: channel.id,
        });
        for position in channel.unretired() {
            let Entry::Posted(index) = self.channels[number as usize].entry(position) else {
                continue;
            };
            let state = self.slots.at(index).state;
            match state {
                State::Waiting if self.may_post_again(index) => {}
                State::Waiting => {
                    let reason = match self.channels[number as usize].broken {
                        Some((first, code)) if position >= first => EndReason::Failed(code),
                        Some(_) | None => EndReason::ChannelKilled,
                    };
                    self.end_logically(index, Err(reason), now);
                }
                State::Free | State::Stopping(_) | State::Ended(_) => {}
            }
        }
    }

    /// The channel is gone and what it had not completed is lost (I4): quiet memory may go or be
    /// posted again, memory of a stuck channel is quarantined at its slot's physical end.
    fn lose_posts(&mut self, number: u16, stuck: bool, now: Nanos) {
        loop {
            let channel = &mut self.channels[number as usize];
            // Losing is no progress: the time of the last completion does not matter any more.
            let Some(entry) = channel.retire_next(u64::MAX, Nanos(0)) else {
                break;
            };
            match entry {
                Entry::Void => continue,
                Entry::TakenBack => {}
                Entry::Posted(index) => self.post_lost(index, number, stuck, now),
            }
            self.counters.posts_lost += 1;
            self.counters.posts_outstanding -= 1;
        }
        self.channels[number as usize].close();
        self.counters.channels_open -= 1;
    }
}
