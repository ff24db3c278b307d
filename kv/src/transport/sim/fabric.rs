//! The fabric: endpoints, links, and the step that moves one page.

use super::link::{Flush, Link, LinkId, LinkKind, Op, OpFault};
use super::memory::SimMemory;
use crate::pool::{PageId, PoolMemory};
use crate::transport::places::Place;
use crate::transport::{Posted, Read, code};
use kvserve_runtime::Reap;
use kvserve_runtime::{ChannelId, Completed, CompletionStatus, Nanos, WorkId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Reads a link takes at once; as many as the TCP transport.
pub const READS_IN_FLIGHT_MAX: usize = 64;

/// A touch of a page that is read.
#[derive(Clone, Copy, Debug)]
pub struct SourceTouch {
    /// The lease that the read names.
    pub lease: u64,
    /// Place of the page in the lease.
    pub index: u32,
    /// The page.
    pub page: PageId,
    /// The guard the server took for this read; `None` on a one-sided link.
    pub guard: Option<u64>,
}

/// Says whether an operation may touch a page of a node at this very moment.
pub trait Witness {
    /// A read with this tag is about to write `page`.
    ///
    /// # Errors
    /// Why it must not.
    fn write(&self, tag: u64, page: PageId) -> Result<(), String>;
    /// A read is about to copy from a page.
    ///
    /// # Errors
    /// Why it must not.
    fn read(&self, touch: SourceTouch) -> Result<(), String>;
    /// Whether the pages of this tag are quarantined: what is read for them is of no use to
    /// anybody, whatever it is, and reading changes nothing at its source.
    fn is_given_up(&self, tag: u64) -> bool;
}

struct Endpoint {
    incarnation: u64,
    memory: Rc<SimMemory>,
    witness: Rc<dyn Witness>,
    /// What one-sided reads find behind a lease: nothing ever takes it away.
    exports: BTreeMap<u64, Vec<Place>>,
    /// Where the generations of its pages are, if its readers map it.
    pool: Option<Arc<PoolMemory>>,
    /// Guards whose serving has ended.
    served: Vec<u64>,
    alive: bool,
}

impl Endpoint {
    fn generation(&self, page: PageId) -> u64 {
        let pool = self.pool.as_ref();
        pool.map_or(0, |pool| pool.generation(page))
    }
}

/// A read that waits for the server's software.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Endpoint that serves.
    pub server: usize,
    /// Its session with the reader.
    pub session: u64,
    /// The incarnation the reader means.
    pub incarnation: u64,
    /// Lease, epoch and run as the request names them.
    pub lease: u64,
    /// See `lease`.
    pub epoch: u32,
    /// See `lease`.
    pub first: u32,
    /// See `lease`.
    pub count: u32,
    /// The lease that was posted; another one than `lease` if a fault made the request stale.
    pub posted: u64,
}

/// What a step did.
#[derive(Debug)]
pub enum Stepped {
    /// Nothing to do until something is posted or changed.
    Idle,
    /// The server's software must answer; call [`Fabric::answer`].
    Asks(Ask),
    /// A page was moved, or a killed link came nearer to rest.
    Moved,
    /// An operation ended: its reader has a completion (or has lost it).
    Ended,
    /// An operation touched a page that it must not touch.
    Violation(String),
}

/// All simulated network cards. See the module's text.
#[derive(Default)]
pub struct Fabric {
    endpoints: Vec<Endpoint>,
    links: Vec<Link>,
    /// Links that have something to do since they were last asked for.
    awake: Vec<LinkId>,
    /// Sessions that their server has ended: no link of theirs stands any more.
    sessions_over: BTreeSet<(usize, u64)>,
    reuses_refused: u64,
}

impl Fabric {
    /// A new endpoint (one life of a node); its number.
    pub fn attach(
        &mut self,
        incarnation: u64,
        memory: Rc<SimMemory>,
        witness: Rc<dyn Witness>,
        pool: Option<Arc<PoolMemory>>,
    ) -> usize {
        self.endpoints.push(Endpoint {
            incarnation,
            memory,
            witness,
            exports: BTreeMap::new(),
            pool,
            served: Vec::new(),
            alive: true,
        });
        self.endpoints.len() - 1
    }

    /// The node is gone with its memory. `silent`: its peers' cards are not told.
    pub fn detach(&mut self, endpoint: usize, silent: bool) {
        self.endpoints[endpoint].alive = false;
        for number in 0..self.links.len() {
            let link = &mut self.links[number];
            if link.reader == endpoint {
                link.killed = true;
                link.quiet = true;
                self.drop_ops(LinkId(number));
            } else if link.server == endpoint {
                link.destroyed = true;
                link.silent |= silent;
                self.awake.push(LinkId(number));
            }
        }
    }

    /// Opens a link on which `reader` reads from `server`.
    #[allow(clippy::too_many_arguments)] // the two ends, what each calls it, and its nature
    pub fn connect(
        &mut self,
        reader: usize,
        channel: ChannelId,
        server: usize,
        server_incarnation: u64,
        session: u64,
        kind: LinkKind,
        flush: Flush,
    ) -> LinkId {
        let over = self.sessions_over.contains(&(server, session));
        self.links.push(Link {
            reader,
            channel,
            server,
            server_incarnation,
            session,
            kind,
            ops: VecDeque::new(),
            done: VecDeque::new(),
            killed: false,
            quiet: false,
            destroyed: over || !self.endpoints[server].alive,
            silent: false,
            stalled: false,
            fault: None,
            flush,
            bytes_moved: 0,
            bytes_seen: 0,
            moved_at: Nanos(0),
            posts_highest: 0,
            notices_in: 8,
        });
        LinkId(self.links.len() - 1)
    }

    /// A lease of `endpoint` stands on these pages: one-sided and mapped reads find them from now
    /// on.
    pub fn export(&mut self, endpoint: usize, lease: u64, pages: &[PageId]) {
        let endpoint = &mut self.endpoints[endpoint];
        let place = |page: &PageId| Place {
            page: page.0,
            generation: endpoint.generation(*page),
        };
        let places = pages.iter().map(place).collect();
        endpoint.exports.insert(lease, places);
    }

    /// Guards of `endpoint` whose serving has ended since the last call.
    pub fn take_served(&mut self, endpoint: usize) -> Vec<u64> {
        std::mem::take(&mut self.endpoints[endpoint].served)
    }

    /// Links that may be stepped, since the last call.
    pub fn take_awake(&mut self, out: &mut Vec<LinkId>) {
        out.append(&mut self.awake);
    }

    /// The server destroys all links of a session of its own; `over`: none may come any more.
    pub fn destroy_session(&mut self, server: usize, session: u64, over: bool) {
        for number in 0..self.links.len() {
            let link = &self.links[number];
            if link.server == server && link.session == session {
                self.destroy(LinkId(number));
            }
        }
        if over {
            self.sessions_over.insert((server, session));
        }
    }

    fn destroy(&mut self, link: LinkId) {
        self.links[link.0].destroyed = true;
        self.release_sources(link);
        self.awake.push(link);
    }

    /// Links that live, oldest first, with reader and server.
    pub fn live(&self) -> impl Iterator<Item = (LinkId, usize, usize)> {
        let live = |link: &Link| !link.quiet && !link.killed && !link.destroyed;
        (self.links.iter().enumerate())
            .filter(move |(_, link)| live(link))
            .map(|(number, link)| (LinkId(number), link.reader, link.server))
    }

    /// Whether the link takes posts and its other side is there.
    pub fn stands(&self, link: LinkId) -> bool {
        let link = &self.links[link.0];
        !link.killed && (!link.destroyed || link.silent)
    }

    /// The two ends of a link: reader, server.
    pub fn ends(&self, link: LinkId) -> (usize, usize) {
        (self.links[link.0].reader, self.links[link.0].server)
    }

    /// Links on which `reader` copies out of a map.
    pub fn mapped_of(&self, reader: usize) -> Vec<LinkId> {
        let copies = |link: &Link| link.reader == reader && link.kind == LinkKind::Mapped;
        (self.links.iter().enumerate())
            .filter(|(_, link)| copies(link) && !link.quiet)
            .map(|(number, _)| LinkId(number))
            .collect()
    }

    /// Copies that were given up since their page had been used for something else.
    pub fn reuses_refused(&self) -> u64 {
        self.reuses_refused
    }

    /// Who moves the bytes of a link.
    pub fn kind(&self, link: LinkId) -> LinkKind {
        self.links[link.0].kind
    }

    /// Arms a fault for the next operation that ends (or, for stale keys, is resolved).
    pub fn arm(&mut self, link: LinkId, fault: OpFault) {
        self.links[link.0].fault = Some(fault);
    }

    /// Takes back a fault that has not struck.
    pub fn disarm(&mut self, link: LinkId) {
        let link = &mut self.links[link.0];
        link.fault = None;
    }

    /// Stops or lets go all movement on a link.
    pub fn stall(&mut self, link: LinkId, stalled: bool) {
        self.links[link.0].stalled = stalled;
        self.awake.push(link);
    }

    /// How the link will come to rest once killed.
    pub fn set_flush(&mut self, link: LinkId, flush: Flush) {
        self.links[link.0].flush = flush;
    }

    /// Whether an operation that could still touch memory names a page of `reader` as its
    /// target (abandoned ones write to scrap).
    pub fn targets(&self, reader: usize, page: PageId) -> bool {
        (self.links.iter())
            .filter(|link| link.reader == reader && !link.quiet)
            .flat_map(|link| &link.ops)
            .any(|op| !op.abandoned && op.into[op.placed.min(op.into.len())..].contains(&page))
    }

    /// Whether a one-sided operation that could still read names this lease of `server`.
    pub fn names_lease(&self, server: usize, lease: u64) -> bool {
        (self.links.iter())
            .filter(|link| {
                let one_sided = link.kind == LinkKind::OneSided;
                link.server == server && one_sided && !link.destroyed && !link.quiet
            })
            .flat_map(|link| link.ops.iter().map(|op| (link.reader, op)))
            .filter(|(reader, op)| !self.endpoints[*reader].witness.is_given_up(op.tag))
            .any(|(_, op)| op.lease == lease && op.placed < op.into.len())
    }

    /// Whether the operation is still under way, and so not done.
    pub fn is_under_way(&self, link: LinkId, work: WorkId) -> bool {
        self.links[link.0].ops.iter().any(|op| op.work == work)
    }

    /// Operations under way on a link.
    pub fn in_flight(&self, link: LinkId) -> usize {
        self.links[link.0].ops.len()
    }

    /// Moves one page, or ends one operation.
    pub fn step(&mut self, id: LinkId) -> Stepped {
        let link = &mut self.links[id.0];
        if link.quiet || link.stalled && !link.killed {
            return Stepped::Idle;
        }
        if link.killed {
            return self.step_killed(id);
        }
        if link.destroyed && !(link.kind == LinkKind::Mapped && self.reads_on(id)) {
            return self.step_destroyed(id);
        }
        let link = &mut self.links[id.0];
        let Some(op) = link.ops.front_mut() else {
            return Stepped::Idle;
        };
        if op.source.is_none() {
            return self.resolve(id);
        }
        if op.placed < op.into.len() {
            return self.move_page(id);
        }
        self.end_front(id, CompletionStatus::Success)
    }

    /// The server's answer to an [`Ask`]: the pages and its guard on them, or a refusal code.
    /// Nothing happens if the read is gone meanwhile.
    pub fn answer(&mut self, id: LinkId, answer: Result<(Vec<PageId>, u64), u32>) {
        let link = &mut self.links[id.0];
        let server = link.server;
        let waits = !link.quiet && !link.killed && !link.destroyed;
        let front = link
            .ops
            .front_mut()
            .filter(|op| waits && op.source.is_none());
        match (front, answer) {
            (Some(op), Ok((pages, guard))) => op.source = Some((pages, Some(guard))),
            (Some(_), Err(refusal)) => {
                self.end_front(id, CompletionStatus::Error(refusal));
            }
            (None, Ok((_, guard))) => self.endpoints[server].served.push(guard),
            (None, Err(_)) => {}
        }
        self.awake.push(id);
    }

    fn resolve(&mut self, id: LinkId) -> Stepped {
        let link = &mut self.links[id.0];
        let fault = link.fault;
        let Some(op) = link.ops.front_mut() else {
            return Stepped::Idle;
        };
        let (mut lease, mut epoch, mut incarnation) = (op.lease, op.epoch, link.server_incarnation);
        match fault {
            Some(OpFault::StaleLease) => lease = lease.wrapping_sub(1),
            Some(OpFault::StaleEpoch) => epoch = epoch.wrapping_sub(1),
            Some(OpFault::StaleIncarnation) => incarnation = incarnation.wrapping_sub(1),
            Some(
                OpFault::Error(_)
                | OpFault::Errors(_)
                | OpFault::Lost
                | OpFault::Duplicate
                | OpFault::Stray
                | OpFault::Corrupt
                | OpFault::Truncate,
            )
            | None => {}
        }
        let stale = (lease, epoch, incarnation) != (op.lease, op.epoch, link.server_incarnation);
        if stale {
            link.fault = None;
        }
        if link.kind == LinkKind::Served {
            return Stepped::Asks(Ask {
                server: link.server,
                session: link.session,
                incarnation,
                lease,
                epoch,
                first: op.first,
                count: op.into.len() as u32,
                posted: op.lease,
            });
        }
        let server = &self.endpoints[link.server];
        let run = op.first as usize..op.first as usize + op.into.len();
        let pages = (server.exports.get(&lease)).and_then(|pages| pages.get(run));
        match pages {
            // A key that is not the granted one: the other card refuses it.
            Some(places) if !stale && server.incarnation == incarnation => {
                op.source = Some((
                    places.iter().map(|place| PageId(place.page)).collect(),
                    None,
                ));
                op.places = places.to_vec();
                Stepped::Moved
            }
            Some(_) | None => self.end_front(id, CompletionStatus::Error(2)),
        }
    }

    /// A reader that maps the other side's memory notices only some copies later that its owner
    /// is gone, or not at all if nobody says so.
    fn reads_on(&mut self, id: LinkId) -> bool {
        let link = &mut self.links[id.0];
        match &mut link.notices_in {
            _ if link.silent => true,
            0 => false,
            copies => {
                *copies -= 1;
                true
            }
        }
    }

    /// Copies half a page out of a mapped pool; its generation is looked at before the first half
    /// and after each (PROTOCOL X2).
    fn copy_half(&mut self, id: LinkId) -> Stepped {
        let link = &mut self.links[id.0];
        let (reader, server) = (&self.endpoints[link.reader], &self.endpoints[link.server]);
        let Some(op) = link.ops.front_mut() else {
            return Stepped::Idle;
        };
        let (place, into) = (op.places[op.placed], op.into[op.placed]);
        let page = PageId(place.page);
        if place.generation != server.generation(page) {
            op.reused = Some(page);
        }
        if !place.holds(server.generation(page)) {
            self.reuses_refused += 1;
            return self.end_front(id, CompletionStatus::Error(code::GENERATION));
        }
        if !op.abandoned {
            if let Err(why) = reader.witness.write(op.tag, into) {
                return Stepped::Violation(why);
            }
            let bytes = reader.memory.page_bytes();
            let half = if op.half {
                bytes / 2..bytes
            } else {
                0..bytes / 2
            };
            let torn = op.half && link.fault == Some(OpFault::Truncate);
            server.memory.with_page(page, |from| {
                (reader.memory).change_page(into, |to| match torn {
                    true => to[half.clone()].fill(0xA5),
                    false => to[half.clone()].copy_from_slice(&from[half.clone()]),
                });
            });
            if op.half && link.fault == Some(OpFault::Corrupt) {
                (reader.memory).change_page(into, |page| page[bytes / 3] ^= 0x40);
                link.fault = None;
            }
            if torn {
                link.fault = None;
            }
        }
        if op.half {
            op.placed += 1;
            link.bytes_moved += reader.memory.page_bytes() as u64;
        }
        op.half = !op.half;
        Stepped::Moved
    }

    fn move_page(&mut self, id: LinkId) -> Stepped {
        if self.links[id.0].kind == LinkKind::Mapped {
            return self.copy_half(id);
        }
        let link = &mut self.links[id.0];
        let (reader, server) = (&self.endpoints[link.reader], &self.endpoints[link.server]);
        let Some(op) = link.ops.front_mut() else {
            return Stepped::Idle;
        };
        let Some((source, guard)) = &op.source else {
            return Stepped::Idle;
        };
        let (from, into) = (source[op.placed], op.into[op.placed]);
        let touch = SourceTouch {
            lease: op.lease,
            index: op.first + op.placed as u32,
            page: from,
            guard: *guard,
        };
        let given_up = reader.witness.is_given_up(op.tag);
        if let Err(why) = server.witness.read(touch)
            && !given_up
        {
            return Stepped::Violation(why);
        }
        let last = op.placed + 1 == op.into.len();
        if !op.abandoned {
            if let Err(why) = reader.witness.write(op.tag, into) {
                return Stepped::Violation(why);
            }
            let bytes = reader.memory.page_bytes();
            let torn = last && link.fault == Some(OpFault::Truncate);
            let count = if torn { bytes / 2 } else { bytes };
            reader.memory.copy_from(into, &server.memory, from, count);
            if torn {
                // What was there before is not zero in real memory either.
                (reader.memory).change_page(into, |page| page[count..].fill(0xA5));
                link.fault = None;
            }
            if last && link.fault == Some(OpFault::Corrupt) {
                reader
                    .memory
                    .change_page(into, |page| page[bytes / 3] ^= 0x40);
                link.fault = None;
            }
        }
        op.placed += 1;
        link.bytes_moved += reader.memory.page_bytes() as u64;
        Stepped::Moved
    }

    fn end_front(&mut self, id: LinkId, status: CompletionStatus) -> Stepped {
        let link = &mut self.links[id.0];
        let Some(op) = link.ops.pop_front() else {
            return Stepped::Idle;
        };
        if let (CompletionStatus::Success, Some(page), false) = (status, op.reused, op.abandoned) {
            return Stepped::Violation(format!(
                "I10: a copy out of lease {} is called done, its page {} was used for something \
                 else meanwhile (X2)",
                op.lease, page.0
            ));
        }
        if let Some((_, Some(guard))) = op.source {
            self.endpoints[link.server].served.push(guard);
        }
        let (work, channel) = (op.work, link.channel);
        let status = if op.abandoned {
            CompletionStatus::Error(code::ABANDONED)
        } else {
            status
        };
        let give = |link: &mut Link, work, status| link.done.push_back(Completed { work, status });
        let fault = link.fault.take();
        match fault {
            Some(OpFault::Error(code)) => give(link, work, CompletionStatus::Error(code)),
            Some(OpFault::Errors(code)) => {
                link.fault = Some(OpFault::Error(code));
                give(link, work, CompletionStatus::Error(code));
            }
            Some(OpFault::Lost) => {}
            Some(OpFault::Duplicate) => {
                give(link, work, status);
                give(link, work, status);
            }
            Some(OpFault::Stray) => {
                give(link, work, status);
                let stray = WorkId::new(channel, link.posts_highest + 1000);
                give(link, stray, CompletionStatus::Success);
            }
            // These strike elsewhere and keep waiting.
            Some(
                OpFault::Corrupt
                | OpFault::Truncate
                | OpFault::StaleLease
                | OpFault::StaleEpoch
                | OpFault::StaleIncarnation,
            ) => {
                link.fault = fault;
                give(link, work, status);
            }
            None => give(link, work, status),
        }
        Stepped::Ended
    }

    /// The server's side is gone: every read fails, unless nobody says so.
    fn step_destroyed(&mut self, id: LinkId) -> Stepped {
        if self.links[id.0].silent || self.links[id.0].ops.is_empty() {
            return Stepped::Idle;
        }
        self.end_front(id, CompletionStatus::Flushed(code::PEER_CLOSED))
    }

    /// A killed one-sided link goes on touching memory until its flush has come.
    fn step_killed(&mut self, id: LinkId) -> Stepped {
        let link = &mut self.links[id.0];
        match &mut link.flush {
            Flush::After(0) => {
                link.quiet = true;
                self.drop_ops(id);
                Stepped::Ended
            }
            Flush::After(steps) => {
                *steps -= 1;
                self.move_if_resolved(id)
            }
            Flush::Never | Flush::DestroyFails => match self.move_if_resolved(id) {
                Stepped::Moved if self.links[id.0].ops.is_empty() => Stepped::Idle,
                stepped => stepped,
            },
        }
    }

    fn move_if_resolved(&mut self, id: LinkId) -> Stepped {
        let link = &self.links[id.0];
        let flushes = matches!(link.flush, Flush::After(_));
        match link.ops.front() {
            Some(op) if !link.destroyed && op.source.is_some() && op.placed < op.into.len() => {
                self.move_page(id)
            }
            Some(_) | None if flushes => Stepped::Moved,
            Some(_) | None => Stepped::Idle,
        }
    }

    fn release_sources(&mut self, id: LinkId) {
        let link = &mut self.links[id.0];
        for op in &mut link.ops {
            if let Some((_, guard)) = &mut op.source
                && let Some(guard) = guard.take()
            {
                self.endpoints[link.server].served.push(guard);
            }
        }
    }

    fn drop_ops(&mut self, id: LinkId) {
        self.release_sources(id);
        self.links[id.0].ops.clear();
    }

    // ---- the reader's side, see `SimTransport` ----------------------------------------------

    fn of_channel(&self, reader: usize, channel: ChannelId) -> Option<LinkId> {
        let of = |link: &Link| link.reader == reader && link.channel == channel;
        // Channel numbers come again: the newest is meant.
        self.links.iter().rposition(of).map(LinkId)
    }

    pub(super) fn post(
        &mut self,
        reader: usize,
        channel: ChannelId,
        first: WorkId,
        reads: Vec<Read>,
        tag: u64,
    ) -> Result<(), Posted> {
        let refused = |posted, code| Err(Posted { posted, code });
        let id = self.of_channel(reader, channel);
        let Some(id) = id.filter(|id| !self.links[id.0].killed) else {
            return refused(0, code::NOT_CONNECTED);
        };
        let link = &mut self.links[id.0];
        for (posted, read) in reads.into_iter().enumerate() {
            if link.ops.len() >= READS_IN_FLIGHT_MAX {
                return refused(posted, code::BUSY);
            }
            let work = first.offset(posted as u64);
            link.posts_highest = work.position();
            link.ops.push_back(Op {
                work,
                tag,
                lease: read.lease,
                epoch: read.epoch,
                first: read.first,
                into: read.into,
                abandoned: false,
                placed: 0,
                half: false,
                reused: None,
                places: Vec::new(),
                source: None,
            });
        }
        self.awake.push(id);
        Ok(())
    }

    pub(super) fn poll(
        &mut self,
        reader: usize,
        now: Nanos,
        most: usize,
        out: &mut Vec<Completed>,
    ) -> usize {
        let before = out.len();
        for link in &mut self.links {
            if link.reader == reader && link.bytes_seen != link.bytes_moved {
                link.bytes_seen = link.bytes_moved;
                link.moved_at = now;
            }
            while link.reader == reader && out.len() - before < most {
                match link.done.pop_front() {
                    Some(completed) => out.push(completed),
                    None => break,
                }
            }
        }
        out.len() - before
    }

    pub(super) fn posts_under_way(&self, reader: usize) -> usize {
        let of = |link: &&Link| link.reader == reader && !link.quiet;
        self.links
            .iter()
            .filter(of)
            .map(|link| link.ops.len())
            .sum()
    }

    pub(super) fn kill(&mut self, reader: usize, channel: ChannelId) {
        let Some(id) = self.of_channel(reader, channel) else {
            return;
        };
        let link = &mut self.links[id.0];
        link.killed = true;
        if link.kind != LinkKind::OneSided {
            // Closing a socket is the physical end of everything on it (PROTOCOL E6).
            link.quiet = true;
            self.drop_ops(id);
        }
        self.awake.push(id);
    }

    pub(super) fn reap(&self, reader: usize, channel: ChannelId) -> Reap {
        let Some(id) = self.of_channel(reader, channel) else {
            return Reap::Quiet;
        };
        let link = &self.links[id.0];
        match link.flush {
            _ if link.quiet => Reap::Quiet,
            Flush::DestroyFails => Reap::Stuck,
            Flush::After(_) | Flush::Never => Reap::Draining(link.ops.len()),
        }
    }

    pub(super) fn moved(&self, reader: usize, channel: ChannelId) -> u64 {
        let link = self.of_channel(reader, channel);
        link.map_or(0, |id| self.links[id.0].bytes_moved)
    }

    pub(super) fn moved_at(&self, reader: usize, channel: ChannelId) -> Nanos {
        let link = self.of_channel(reader, channel);
        link.map_or(Nanos(0), |id| self.links[id.0].moved_at)
    }

    pub(super) fn abandon(&mut self, reader: usize, work: WorkId) -> bool {
        let Some(id) = self.of_channel(reader, work.channel()) else {
            return false;
        };
        let link = &mut self.links[id.0];
        if link.kind == LinkKind::OneSided {
            return false;
        }
        match link.ops.iter_mut().find(|op| op.work == work) {
            Some(op) => op.abandoned = true,
            // Ended: it touches nothing any more.
            None => return true,
        }
        true
    }
}
