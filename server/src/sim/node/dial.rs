//! Nodes that are kept dialled, with growing pauses.

use super::Session;
use super::path::PullPath;
use super::session::Line;
use super::{BACK_OFF, ConnId, HANDSHAKE, Node, Outgoing};
use crate::sim::context::Context;
use kvserve_kv::lease::PeerSession;
use kvserve_runtime::Nanos;
use std::time::Duration;

/// One node that is kept dialled.
pub struct Dial {
    pub(super) peer: usize,
    pub(super) state: DialState,
    pub(super) pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialState {
    Idle(Nanos),
    Dialling(Nanos),
    Up(PeerSession),
}

impl Dial {
    pub(super) fn new(peer: usize, now: Nanos) -> Self {
        Dial {
            peer,
            state: DialState::Idle(now),
            pause: BACK_OFF.0,
        }
    }
}

impl Node {
    pub(super) fn turn_dials(&mut self, context: &mut Context) {
        let now = self.turned_at;
        for dial in &mut self.dials {
            match dial.state {
                DialState::Idle(at) if now >= at => {
                    dial.state = DialState::Dialling(now.after(HANDSHAKE));
                    self.out.push(Outgoing::Connect { peer: dial.peer });
                }
                DialState::Dialling(by) if now >= by => {
                    dial.state = DialState::Idle(now.after(back_off(dial, context)));
                }
                DialState::Up(number) if !self.sessions.contains_key(&number) => {
                    dial.state = DialState::Idle(now.after(back_off(dial, context)));
                }
                DialState::Idle(_) | DialState::Dialling(_) | DialState::Up(_) => {}
            }
        }
        let late = |line: &Line| matches!(line, Line::Shaking { by, .. } if now >= *by);
        let expired: Vec<ConnId> = (self.lines.iter())
            .filter(|(_, line)| late(line))
            .map(|(conn, _)| *conn)
            .collect();
        for conn in expired {
            context.coverage.hit("handshake failed");
            self.close_line(conn);
        }
        for number in self.session_numbers() {
            self.open_data(number);
        }
    }

    pub(super) fn next_dial(&self) -> Nanos {
        let at = |dial: &Dial| match dial.state {
            DialState::Idle(at) | DialState::Dialling(at) => at,
            DialState::Up(_) => Nanos(u64::MAX),
        };
        let data = |session: &Session| match session.path {
            PullPath::None(at) | PullPath::Opening(at) if session.peer.is_some() => at,
            PullPath::None(_) | PullPath::Opening(_) | PullPath::Open(..) => Nanos(u64::MAX),
        };
        let dials = self.dials.iter().map(at);
        let paths = self.sessions.values().map(data);
        dials.chain(paths).min().unwrap_or(Nanos(u64::MAX))
    }

    pub(super) fn dial_failed(&mut self, peer: usize, context: &mut Context) {
        let now = self.turned_at;
        for dial in &mut self.dials {
            if dial.peer == peer && matches!(dial.state, DialState::Dialling(_)) {
                dial.state = DialState::Idle(now.after(back_off(dial, context)));
            }
        }
    }

    pub(super) fn close_line(&mut self, conn: ConnId) {
        if self.lines.remove(&conn).is_some() {
            self.out.push(Outgoing::Close { conn });
        }
    }
}

fn back_off(dial: &mut Dial, context: &mut Context) -> Duration {
    dial.pause = (dial.pause * 2).min(BACK_OFF.1);
    dial.pause + dial.pause.mul_f64(context.rng.below(250) as f64 / 1000.0)
}
