//! Control connections between places: latency, cuts, and what goes wrong with bytes on the way.

use super::{Event, World};
use crate::sim::context::WireFault;
use crate::sim::node::{ConnId, Incoming};

pub(super) struct Conn {
    pub(super) ends: [(usize, u32); 2],
    open: [bool; 2],
    arrival: [u64; 2],
    held: [Option<Vec<u8>>; 2],
}

impl World {
    pub(super) fn connect(&mut self, node: usize, life: u32, peer: usize) {
        let span = self.latency();
        if self.cut(node, peer).is_some() {
            return; // the dialler's own limit ends it
        }
        let there = &self.places[peer];
        if there.node.is_none() {
            if !there.silent {
                let what = Incoming::ConnectFailed { peer };
                self.after(span, Event::Reaches { node, life, what });
            }
            return;
        }
        let ends = [(node, life), (peer, there.life)];
        self.numbered += 1;
        let conn = ConnId(self.numbered);
        let time = self.context.time;
        let made = Conn {
            ends,
            open: [true, true],
            arrival: [time + span; 2],
            held: [None, None],
        };
        self.conns.insert(conn, made);
        let (accepted, connected) = (
            Incoming::Accepted { conn },
            Incoming::Connected { conn, peer },
        );
        for (end, what) in [(ends[1], accepted), (ends[0], connected)] {
            let (node, life) = end;
            self.after(span, Event::Reaches { node, life, what });
        }
    }

    pub(super) fn send(&mut self, id: ConnId, from: (usize, u32), mut bytes: Vec<u8>, idle: bool) {
        let latency = self.latency();
        let cut = {
            let Some(conn) = self.conns.get(&id) else {
                return;
            };
            self.cut(conn.ends[0].0, conn.ends[1].0)
        };
        let strikes = !idle && !self.context.armed.wires.is_empty();
        let fault =
            (strikes && self.context.rng.percent(50)).then(|| self.context.armed.wires.remove(0));
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let side = usize::from(conn.ends[1] == from);
        if !conn.open[side] {
            return;
        }
        let mut arrival = (self.context.time + latency).max(conn.arrival[side] + 1);
        if let Some(until) = cut {
            arrival = arrival.max(until + latency);
        }
        let mut tampered = false;
        let mut again = None;
        match fault {
            None => {}
            Some(WireFault::Late(span)) => {
                self.context.fault("fault: frame late");
                arrival += span;
            }
            Some(WireFault::Corrupt) => {
                self.context.fault("fault: bytes corrupted");
                let bit = self.context.rng.below(bytes.len() as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
                tampered = true;
            }
            Some(WireFault::Truncate) => {
                self.context.fault("fault: bytes truncated");
                let left = self.context.rng.below(bytes.len() as u64) as usize;
                bytes.truncate(left);
                tampered = true;
            }
            Some(WireFault::Replay) => {
                self.context.fault("fault: bytes replayed");
                again = Some(bytes.clone());
            }
            Some(WireFault::Reorder) => {
                self.context.fault("fault: bytes reordered");
                conn.held[side] = Some(bytes);
                return;
            }
        }
        let held = conn.held[side].take();
        tampered |= held.is_some();
        conn.arrival[side] = arrival + 2;
        let (node, life) = conn.ends[1 - side];
        let give = |world: &mut World, after: u64, bytes: Vec<u8>, tampered: bool| {
            let conn = id;
            let what = Incoming::Bytes {
                conn,
                bytes,
                tampered,
            };
            world.at(arrival + after, Event::Reaches { node, life, what });
        };
        match held {
            // Nothing has overtaken what was held: it comes in its place, and what is gone is
            // missed behind it (seed 129041).
            Some(held) if bytes.is_empty() => {
                give(self, 0, held, false);
                give(self, 1, bytes, true);
            }
            held => {
                give(self, 0, bytes, tampered);
                for other in held.into_iter().chain(again) {
                    give(self, 1, other, true);
                }
            }
        }
    }

    pub(super) fn close_from(&mut self, id: ConnId, from: (usize, u32)) {
        let latency = self.latency();
        let time = self.context.time;
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let side = usize::from(conn.ends[1] == from);
        if !std::mem::replace(&mut conn.open[side], false) {
            return;
        }
        let at = (time + latency).max(conn.arrival[side] + 3);
        let (node, life) = conn.ends[1 - side];
        let (ends, other_open) = (conn.ends, conn.open[1 - side]);
        if !other_open {
            self.conns.remove(&id);
        }
        let at = self
            .cut(ends[0].0, ends[1].0)
            .map_or(at, |until| until.max(at));
        let what = Incoming::Closed { conn: id };
        self.at(at, Event::Reaches { node, life, what });
    }
}
