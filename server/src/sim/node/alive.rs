//! What a session does by the clock, and how it ends: channels first, then leases, then attempts
//! (PROTOCOL S3, S4, L2).

use super::{Key, Node, Outgoing, RENEW};
use crate::sim::context::Context;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::pull::PullEvent;
use kvserve_kv::session::{AttemptId, Frame, Pulse, RefuseReason};

impl Node {
    pub(super) fn session_numbers(&self) -> Vec<PeerSession> {
        self.sessions.keys().copied().collect()
    }

    /// What is due every heartbeat.
    pub(super) fn tick(&mut self, context: &mut Context) {
        let now = self.turned_at;
        self.tick_leases(context);
        for number in self.session_numbers() {
            let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
                continue;
            };
            if session.liveness.tick(now) == Pulse::Dead {
                self.end_session(number, RefuseReason::Silent, false);
                continue;
            }
            let renew = now.since(session.renewed_at) >= RENEW;
            let pulls = self.plan.role.pulls() && session.identity.role.serves();
            self.send(context, number, &Frame::Heartbeat);
            self.check_path(number);
            self.pump(context);
            if renew && pulls {
                self.renew(context, number);
            }
        }
    }

    pub(super) fn renew(&mut self, context: &mut Context, number: PeerSession) {
        let now = self.turned_at;
        let of = |((session, _), pull): (&Key, &super::Pull)| {
            let live = (*session == number)
                .then(|| pull.machine.lease_live())
                .flatten();
            live.map(|lease| (pull.machine.id(), lease))
        };
        let mut live: Vec<(AttemptId, u64)> = self.pulls.iter().filter_map(of).collect();
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        session.renewed_at = now;
        session.listed.extend(live.iter().copied());
        if now < self.lists_the_dead_until {
            live = session.listed.iter().copied().collect();
        }
        let grant_highest = session.grant_highest;
        let frame = Frame::Renew {
            grant_highest,
            live,
        };
        self.send(context, number, &frame);
    }

    /// After a long absence: expired leases and attempts end before any frame is read.
    pub(super) fn expire(&mut self, context: &mut Context) {
        self.tick_leases(context);
        let keys: Vec<Key> = self.pulls.keys().copied().collect();
        for key in keys {
            self.feed(context, key, PullEvent::Tick);
        }
        self.finish_sessions(context);
    }

    /// Marks a session as over; the first reason stays.
    pub(super) fn end_session(&mut self, number: PeerSession, reason: RefuseReason, by_peer: bool) {
        if let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) {
            if !by_peer {
                // The last word, sealed while the session still takes frames.
                let bytes = session.channel.seal(&Frame::Bye { reason });
                let conn = session.conn;
                self.out.push(Outgoing::Bytes {
                    conn,
                    bytes,
                    idle: true,
                });
            }
            session.ended = true;
            self.ending.push((number, reason, by_peer));
        }
    }

    /// Channels are destroyed first, then leases end, then attempts.
    pub(super) fn finish_sessions(&mut self, context: &mut Context) {
        while let Some((number, reason, _)) = self.ending.pop() {
            context.note(|| format!("{}: session {} ends: {reason:?}", self.plan.name, number.0));
            context.coverage.hit(match reason {
                RefuseReason::Violation => "session ended: violation",
                RefuseReason::Silent => "session ended: silent",
                RefuseReason::Disconnected => "session ended: disconnected",
                RefuseReason::FenceUnanswered => "session ended: fence_unanswered",
                RefuseReason::Superseded => "session ended: superseded",
                RefuseReason::Duplicate => "session ended: duplicate",
                RefuseReason::ChannelStuck => "session ended: channel_stuck",
                _ => "session ended: other",
            });
            self.close_path(number);
            self.credits.forget(number);
            let Some(session) = self.sessions.remove(&number) else {
                continue;
            };
            (self.fabric.borrow_mut()).destroy_session(self.endpoint, number.0, true);
            self.release_served();
            self.lease_session_ended(context, number);
            let of = |key: &&Key| key.0 == number;
            let keys: Vec<Key> = self.pulls.keys().filter(of).copied().collect();
            for key in keys {
                self.feed(context, key, PullEvent::SessionEnded);
            }
            self.close_line(session.conn);
        }
    }
}
