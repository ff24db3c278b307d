//! Cards: a link moves a page at a time, whatever its reader does meanwhile.

use super::{Event, World};
use crate::sim::check::Invariant;
use crate::sim::clock;
use kvserve_kv::transport::sim::{Ask, LinkId, LinkKind, Stepped};

impl World {
    pub(super) fn wake_links(&mut self) {
        let mut awake = Vec::new();
        self.fabric.borrow_mut().take_awake(&mut awake);
        for link in awake {
            self.link_in(link, 3_000, 20_000);
        }
    }

    pub(super) fn link_in(&mut self, link: LinkId, from: u64, to: u64) {
        if self.linked.len() <= link.0 {
            self.linked.resize(link.0 + 1, false);
        }
        if !std::mem::replace(&mut self.linked[link.0], true) {
            let span = self.context.rng.range(from, to) * self.slow;
            self.after(span, Event::Link(link));
        }
    }

    pub(super) fn step_link(&mut self, link: LinkId) {
        self.linked[link.0] = false;
        let (reader, server) = {
            let (reader, server) = self.fabric.borrow().ends(link);
            (self.of_endpoint[reader], self.of_endpoint[server])
        };
        let frozen = |at: (usize, u32)| self.places[at.0].frozen_until;
        let cut = self.cut(reader.0, server.0);
        let stands_still = match self.fabric.borrow().kind(link) {
            LinkKind::Served => frozen(reader).or(frozen(server)).or(cut),
            LinkKind::OneSided => cut,
            // The reader's own core copies, on the same host.
            LinkKind::Mapped => frozen(reader),
        };
        if let Some(until) = stands_still {
            self.linked[link.0] = true;
            return self.at(until + 60_000, Event::Link(link));
        }
        let stepped = self.fabric.borrow_mut().step(link);
        match stepped {
            Stepped::Idle => {}
            Stepped::Asks(ask) => self.ask(link, server, &ask),
            Stepped::Moved => self.link_in(link, 3_000, 40_000),
            Stepped::Ended => {
                // Now and then the reader's shard has other things to do.
                let busy = self.context.rng.percent(20);
                self.want_turn(reader.0, if busy { 300_000 } else { 3_000 });
                self.want_turn(server.0, 10_000);
                self.link_in(link, 3_000, 40_000);
            }
            Stepped::Violation(what) => {
                let named = Invariant::ALL
                    .into_iter()
                    .find(|invariant| what.starts_with(&format!("{invariant:?}:")));
                self.context.broke(named.unwrap_or(Invariant::I2), what);
            }
        }
    }

    pub(super) fn ask(&mut self, link: LinkId, server: (usize, u32), ask: &Ask) {
        let place = &mut self.places[server.0];
        let now = place.clock.at(self.context.time);
        clock::set(now);
        if let Some(there) = place.node.as_mut().filter(|_| place.life == server.1) {
            let answer = there.resolve(&mut self.context, now, ask);
            let refused = answer.is_err();
            self.fabric.borrow_mut().answer(link, answer);
            if refused {
                let reader = self.fabric.borrow().ends(link).0;
                let reader = self.of_endpoint[reader].0;
                self.want_turn(reader, 3_000);
            }
        }
        self.link_in(link, 3_000, 60_000);
    }
}
