//! Control connections: dials, handshakes, sealed frames, data connections, and how a session
//! ends (channels first, then leases, then attempts; PROTOCOL S3).

use super::{
    BACK_OFF, ConnId, HANDSHAKE, Incoming, Key, LIVENESS, Node, Outgoing, RENEW, ordinary_flush,
};
use crate::sim::check::Invariant;
use crate::sim::context::{Context, FrameFault};
use crate::sim::model::PAGE_BYTES;
use kvserve_kv::ChecksumMode;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::pull::PullEvent;
use kvserve_kv::session::frame::DataOpen;
use kvserve_kv::session::handshake::Refusal;
use kvserve_kv::session::seal::{open_plain, plain};
use kvserve_kv::session::{
    AttemptId, Frame, FrameStream, Handshake, Liveness, LocalNode, PeerIdentity, Pulse,
    RefuseReason, Role, SealedChannel, ShmOffer, Step,
};
use kvserve_kv::transport::sim::LinkId;
use kvserve_runtime::{ChannelId, ChannelKind, Nanos};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Posts a pull channel's ring holds.
const RING_POSTS: usize = 128;

/// Pause before a data connection is tried again.
const DATA_PAUSE: Duration = Duration::from_millis(20);

/// One node that is kept dialled.
pub struct Dial {
    peer: usize,
    state: DialState,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DialState {
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

/// What a connection is.
pub enum Line {
    /// Not proven yet.
    Shaking {
        handshake: Box<Handshake>,
        frames: FrameStream,
        by: Nanos,
        dialled: Option<usize>,
        tampered: bool,
    },
    /// A session's.
    Session {
        number: PeerSession,
        frames: FrameStream,
        tampered: bool,
    },
}

/// The data connection over which this node pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPath {
    /// None; to be opened at this time.
    None(Nanos),
    /// Asked for; tried again at this time.
    Opening(Nanos),
    /// There.
    Open(ChannelId, LinkId),
}

/// A live session.
pub struct Session {
    pub number: PeerSession,
    pub identity: PeerIdentity,
    /// Place of the peer in the cluster; known to the dialler.
    pub peer: Option<usize>,
    pub conn: ConnId,
    channel: SealedChannel,
    liveness: Liveness,
    pub ended: bool,
    pub path: PullPath,
    data_count: u64,
    pub grant_highest: u64,
    renewed_at: Nanos,
    listed: BTreeSet<(AttemptId, u64)>,
    /// Reads that wait for room, oldest first.
    pub waiting: VecDeque<(Key, super::pull::PostArgs)>,
}

impl Session {
    /// Whether a pull from the peer could start now.
    pub fn can_pull(&self) -> bool {
        let open = matches!(self.path, PullPath::Open(..));
        open && !self.ended && self.liveness.pulse() == Pulse::Alive
    }
}

impl Node {
    fn local(&self) -> LocalNode {
        LocalNode {
            node_id: self.plan.name.clone(),
            incarnation: self.incarnation,
            role: self.plan.role,
            fingerprint: 7,
            layout_hash: 11,
            page_bytes: PAGE_BYTES as u64,
            api_url: String::new(),
            features: match self.plan.checksums {
                ChecksumMode::Off => 0,
                ChecksumMode::Sampled => 1,
                ChecksumMode::Full => 2,
            },
            // Simulated pools are not mapped by peers: pulls go over the simulated network.
            shm: ShmOffer::default(),
        }
    }

    // ---- dials ------------------------------------------------------------------------------

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

    fn dial_failed(&mut self, peer: usize, context: &mut Context) {
        let now = self.turned_at;
        for dial in &mut self.dials {
            if dial.peer == peer && matches!(dial.state, DialState::Dialling(_)) {
                dial.state = DialState::Idle(now.after(back_off(dial, context)));
            }
        }
    }

    fn close_line(&mut self, conn: ConnId) {
        if self.lines.remove(&conn).is_some() {
            self.out.push(Outgoing::Close { conn });
        }
    }

    // ---- what comes in ------------------------------------------------------------------------

    pub(super) fn read_inbox(&mut self, context: &mut Context) {
        while let Some(incoming) = self.inbox.pop_front() {
            match incoming {
                Incoming::Connected { conn, peer } => {
                    let (handshake, first) =
                        Handshake::dial(self.local(), self.key.clone(), nonce(context));
                    self.shake(conn, handshake, Some(peer));
                    self.send_bytes(conn, first, false);
                }
                Incoming::Accepted { conn } => {
                    let handshake =
                        Handshake::accept(self.local(), self.key.clone(), nonce(context));
                    self.shake(conn, handshake, None);
                }
                Incoming::ConnectFailed { peer } => self.dial_failed(peer, context),
                Incoming::Bytes {
                    conn,
                    bytes,
                    tampered,
                } => self.read_bytes(context, conn, &bytes, tampered),
                Incoming::Closed { conn } => match self.lines.remove(&conn) {
                    Some(Line::Session { number, .. }) => {
                        self.end_session(number, RefuseReason::Disconnected, true);
                    }
                    Some(Line::Shaking { dialled, .. }) => {
                        context.coverage.hit("handshake failed");
                        if let Some(peer) = dialled {
                            self.dial_failed(peer, context);
                        }
                    }
                    None => {}
                },
                Incoming::DataOpen { from, bytes } => self.take_data(from, &bytes),
                Incoming::DataAccepted {
                    open,
                    bytes,
                    server,
                    session,
                } => self.attach_data(context, &open, &bytes, server, session),
                Incoming::Request { client, left_ns } => self.accept(context, client, left_ns),
                Incoming::Cancel { client } => self.cancel_client(context, client),
            }
            self.finish_sessions(context);
        }
    }

    fn shake(&mut self, conn: ConnId, handshake: Handshake, dialled: Option<usize>) {
        let line = Line::Shaking {
            handshake: Box::new(handshake),
            frames: FrameStream::new(),
            by: self.turned_at.after(HANDSHAKE),
            dialled,
            tampered: false,
        };
        self.lines.insert(conn, line);
    }

    fn send_bytes(&mut self, conn: ConnId, bytes: Vec<u8>, idle: bool) {
        if !bytes.is_empty() {
            self.out.push(Outgoing::Bytes { conn, bytes, idle });
        }
    }

    fn read_bytes(&mut self, context: &mut Context, conn: ConnId, bytes: &[u8], bent: bool) {
        match self.lines.get_mut(&conn) {
            None => return,
            Some(
                Line::Shaking {
                    frames, tampered, ..
                }
                | Line::Session {
                    frames, tampered, ..
                },
            ) => {
                frames.push(bytes);
                *tampered |= bent;
            }
        }
        while let Some(line) = self.lines.remove(&conn) {
            let (line, more) = match line {
                Line::Shaking {
                    handshake,
                    frames,
                    by,
                    dialled,
                    tampered,
                } => self.shake_on(context, conn, handshake, frames, by, dialled, tampered),
                Line::Session {
                    number,
                    mut frames,
                    tampered,
                } => {
                    let more = self.read_frame(context, number, &mut frames, tampered);
                    let line = Line::Session {
                        number,
                        frames,
                        tampered,
                    };
                    (Some(line), more)
                }
            };
            match line {
                Some(line) => self.lines.insert(conn, line),
                None => {
                    self.out.push(Outgoing::Close { conn });
                    return;
                }
            };
            self.finish_sessions(context);
            if !more {
                return;
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // the fields of a line
    fn shake_on(
        &mut self,
        context: &mut Context,
        conn: ConnId,
        mut handshake: Box<Handshake>,
        mut frames: FrameStream,
        by: Nanos,
        dialled: Option<usize>,
        tampered: bool,
    ) -> (Option<Line>, bool) {
        let frame = match frames.next_frame() {
            Ok(None) => {
                let line = Line::Shaking {
                    handshake,
                    frames,
                    by,
                    dialled,
                    tampered,
                };
                return (Some(line), false);
            }
            Ok(Some(frame)) => frame.to_vec(),
            Err(_) => return self.shake_failed(context, dialled),
        };
        let step = {
            let admit = &mut |peer: &PeerIdentity| self.admit(peer, dialled.is_some());
            handshake.on_frame(&frame, admit)
        };
        match step {
            Step::Continue { send, trusted } => {
                if trusted {
                    frames.trust();
                }
                self.send_bytes(conn, send, false);
                let line = Line::Shaking {
                    handshake,
                    frames,
                    by,
                    dialled,
                    tampered,
                };
                (Some(line), true)
            }
            Step::Refused { send, refusal } => {
                if refusal.by_peer && refusal.reason == RefuseReason::Superseded {
                    self.superseded = true;
                }
                self.send_bytes(conn, send, false);
                self.shake_failed(context, dialled)
            }
            Step::Up { channel, peer } => {
                if tampered {
                    context.broke(Invariant::I5, "a bent handshake came up (S1)");
                }
                match self.register(channel, peer, dialled, conn) {
                    Ok(number) => {
                        frames.trust();
                        let line = Line::Session {
                            number,
                            frames,
                            tampered,
                        };
                        (Some(line), true)
                    }
                    Err(_) => self.shake_failed(context, dialled),
                }
            }
        }
    }

    fn shake_failed(
        &mut self,
        context: &mut Context,
        dialled: Option<usize>,
    ) -> (Option<Line>, bool) {
        context.coverage.hit("handshake failed");
        if let Some(peer) = dialled {
            self.dial_failed(peer, context);
        }
        (None, false)
    }

    fn session_of(&self, node_id: &str) -> Option<&Session> {
        let of = |session: &&Session| !session.ended && session.identity.node_id == node_id;
        self.sessions.values().rev().find(of)
    }

    fn admit(&self, peer: &PeerIdentity, we_dialled: bool) -> Result<(), Refusal> {
        let Some(known) = self.session_of(&peer.node_id) else {
            return Ok(());
        };
        if peer.incarnation < known.identity.incarnation {
            return Err(Refusal::ours(
                RefuseReason::Superseded,
                "a later start is up",
            ));
        }
        // Dials go one way here: the dialler keeps what it has, the acceptor takes the newer.
        if peer.incarnation == known.identity.incarnation && we_dialled {
            return Err(Refusal::ours(RefuseReason::Duplicate, "connected already"));
        }
        Ok(())
    }

    fn register(
        &mut self,
        channel: SealedChannel,
        identity: PeerIdentity,
        dialled: Option<usize>,
        conn: ConnId,
    ) -> Result<PeerSession, Refusal> {
        self.admit(&identity, dialled.is_some())?;
        if let Some(known) = self.session_of(&identity.node_id) {
            let reason = if known.identity.incarnation < identity.incarnation {
                RefuseReason::Superseded
            } else {
                RefuseReason::Duplicate
            };
            let number = known.number;
            self.end_session(number, reason, false);
        }
        self.session_last += 1;
        let number = PeerSession(self.session_last);
        let now = self.turned_at;
        for dial in &mut self.dials {
            if Some(dial.peer) == dialled {
                dial.state = DialState::Up(number);
                dial.pause = BACK_OFF.0;
            }
        }
        let session = Session {
            number,
            identity,
            peer: dialled,
            conn,
            channel,
            liveness: Liveness::new(LIVENESS, now),
            ended: false,
            path: PullPath::None(now),
            data_count: 0,
            grant_highest: 0,
            renewed_at: now,
            listed: BTreeSet::new(),
            waiting: VecDeque::new(),
        };
        self.sessions.insert(number, session);
        Ok(number)
    }

    // ---- frames -------------------------------------------------------------------------------

    /// Takes one frame; whether there may be more.
    fn read_frame(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        frames: &mut FrameStream,
        tampered: bool,
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return false;
        };
        let opened = match frames.next_frame() {
            Ok(None) => return false,
            Ok(Some(bytes)) => session.channel.open(bytes),
            Err(error) => Err(error),
        };
        match opened {
            Ok(opened) => {
                session.liveness.heard();
                // What is bent stands behind everything that was whole, or in its place.
                if tampered && frames.rest().is_empty() {
                    context.broke(Invariant::I5, "bent bytes were taken for a frame (S1)");
                }
                if opened.incarnation == session.identity.incarnation {
                    self.on_frame(context, number, opened.frame);
                }
            }
            Err(_) => self.end_session(number, RefuseReason::Violation, false),
        }
        true
    }

    fn on_frame(&mut self, context: &mut Context, number: PeerSession, frame: Frame) {
        if !matches!(frame, Frame::Heartbeat) {
            context.note(|| format!("{} hears {}", self.plan.name, brief(&frame)));
        }
        match frame {
            // Places are only told to peers that have mapped a pool, which these have not.
            Frame::Heartbeat
            | Frame::ReleaseAnswer { .. }
            | Frame::App { .. }
            | Frame::Places { .. } => {}
            Frame::Prefill {
                id,
                left_ns,
                held_pages: _,
                prompt,
                payload,
            } => self.on_prefill(context, number, id, left_ns, prompt, &payload),
            Frame::Granted {
                id,
                lease,
                epoch,
                pages,
            } => {
                if let Some(session) = self.sessions.get_mut(&number) {
                    session.grant_highest = session.grant_highest.max(lease);
                }
                let event = PullEvent::Granted {
                    lease,
                    epoch,
                    pages,
                };
                if !self.feed(context, (number, id), event) {
                    self.send(context, number, &Frame::Release { id, lease, epoch });
                }
            }
            Frame::Busy { id, retry_ms } => {
                self.feed(context, (number, id), PullEvent::Busy { retry_ms });
            }
            Frame::PrefillRefused { id, refusal, code } => {
                self.feed(context, (number, id), PullEvent::Refused { refusal, code });
            }
            Frame::Queued { id, ahead: _ } => {
                self.feed(context, (number, id), PullEvent::Queued);
            }
            Frame::Watermark {
                id,
                lease,
                first,
                checksums,
            } => {
                let event = PullEvent::Watermark {
                    lease,
                    first,
                    checksums,
                };
                self.feed(context, (number, id), event);
            }
            Frame::FirstToken { id, payload } => {
                self.feed(context, (number, id), PullEvent::FirstToken(payload));
            }
            Frame::Complete {
                id,
                lease,
                pages,
                tail_tokens: _,
                first,
                checksums,
            } => {
                let event = PullEvent::Complete {
                    lease,
                    pages,
                    first,
                    checksums,
                };
                self.feed(context, (number, id), event);
            }
            Frame::Aborted { id, reason } => {
                self.feed(context, (number, id), PullEvent::Aborted(reason));
            }
            Frame::CommitAnswer { id, lease, outcome } => {
                self.feed(
                    context,
                    (number, id),
                    PullEvent::CommitAnswer { lease, outcome },
                );
            }
            Frame::FenceQuery { id, lease } => {
                if !self.feed(context, (number, id), PullEvent::FenceQuery { lease }) {
                    self.send(context, number, &Frame::FenceAnswer { id, lease });
                }
            }
            Frame::Bye { reason } | Frame::Refused { reason, text: _ } => {
                if reason == RefuseReason::Superseded {
                    self.superseded = true;
                }
                self.end_session(number, reason, true);
            }
            Frame::Commit { .. }
            | Frame::Release { .. }
            | Frame::Cancel { .. }
            | Frame::Renew { .. }
            | Frame::FenceAnswer { .. } => self.on_lease_frame(context, number, frame),
            Frame::Challenge(_)
            | Frame::Proof(_)
            | Frame::Hello(_)
            | Frame::Welcome
            | Frame::DataOpen(_)
            | Frame::DataAccepted(_) => {
                self.end_session(number, RefuseReason::Violation, false);
            }
        }
    }

    /// Seals and sends a frame, if nothing strikes it before.
    pub(super) fn send(&mut self, context: &mut Context, number: PeerSession, frame: &Frame) {
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return;
        };
        let strike = (context.armed).strikes(self.plan.index, frame, &mut context.rng);
        let idle = matches!(frame, Frame::Heartbeat);
        let mut times = 1;
        let mut other = None;
        match strike {
            None => {}
            Some(FrameFault::Lose) => {
                context.note(|| format!("{}: lost {}", self.plan.name, brief(frame)));
                return context.fault("fault: frame lost");
            }
            Some(FrameFault::Double) => {
                context.fault("fault: frame doubled");
                times = 2;
            }
            Some(FrameFault::StaleCommit(part)) => {
                context.fault("fault: stale commit");
                other = Some(stale(frame, part));
            }
            Some(FrameFault::WatermarkBack) => {
                context.fault("fault: watermark goes back");
                if let Frame::Watermark { id, lease, .. } = frame {
                    other = Some(Frame::Watermark {
                        id: *id,
                        lease: *lease,
                        first: 0,
                        checksums: Vec::new(),
                    });
                }
                // The right one follows, so that only the regression is new.
                let bytes = session.channel.seal(other.as_ref().unwrap_or(frame));
                let conn = session.conn;
                self.out.push(Outgoing::Bytes { conn, bytes, idle });
                other = None;
            }
        }
        for _ in 0..times {
            let bytes = session.channel.seal(other.as_ref().unwrap_or(frame));
            let conn = session.conn;
            self.out.push(Outgoing::Bytes { conn, bytes, idle });
        }
    }

    // ---- time ---------------------------------------------------------------------------------

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
            self.pump(context, number);
            if renew && pulls {
                self.renew(context, number);
            }
        }
    }

    fn renew(&mut self, context: &mut Context, number: PeerSession) {
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

    // ---- data connections ---------------------------------------------------------------------

    pub(super) fn check_path(&mut self, number: PeerSession) {
        let Some(session) = self.sessions.get(&number) else {
            return;
        };
        if let PullPath::Open(channel, link) = session.path {
            let stands = self.fabric.borrow().stands(link);
            if !(self.hub.channel_is_open(channel) && stands) {
                self.close_path(number);
            }
        }
    }

    /// Takes the pull connection down the ladder.
    fn close_path(&mut self, number: PeerSession) {
        let again = self.turned_at.after(DATA_PAUSE);
        if let Some(session) = self.sessions.get_mut(&number) {
            let path = std::mem::replace(&mut session.path, PullPath::None(again));
            if let PullPath::Open(channel, _) = path {
                self.hub.close_channel(channel);
            }
        }
    }

    fn open_data(&mut self, number: PeerSession) {
        self.check_path(number);
        let now = self.turned_at;
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return;
        };
        let wanted = self.plan.role == Role::Decode && session.identity.role.serves();
        let Some(peer) = session.peer.filter(|_| wanted) else {
            return;
        };
        match session.path {
            PullPath::None(at) | PullPath::Opening(at) if now >= at => {}
            PullPath::None(_) | PullPath::Opening(_) | PullPath::Open(..) => return,
        }
        session.data_count += 1;
        session.path = PullPath::Opening(now.after(HANDSHAKE / 4));
        let open = (session.channel).data_open(session.identity.incarnation, 0, session.data_count);
        let bytes = plain(&Frame::DataOpen(open.clone()));
        self.out.push(Outgoing::DataOpen { peer, open, bytes });
    }

    fn take_data(&mut self, from: usize, bytes: &[u8]) {
        let Ok(Frame::DataOpen(open)) = open_plain(&bytes[4..]) else {
            return;
        };
        let incarnation = self.incarnation;
        let fits = |session: &&mut Session| {
            !session.ended
                && session.identity.incarnation == open.opener
                && open.target == incarnation
                && session.channel.data_open_is_genuine(&open)
        };
        let Some(session) = self.sessions.values_mut().find(fits) else {
            return;
        };
        if open.count <= session.data_count {
            return;
        }
        session.data_count = open.count;
        let (number, answer) = (session.number, session.channel.data_accept(&open));
        (self.fabric.borrow_mut()).destroy_session(self.endpoint, number.0, false);
        self.out.push(Outgoing::DataAccept {
            to: from,
            bytes: plain(&Frame::DataAccepted(answer)),
            session: number.0,
        });
    }

    fn attach_data(
        &mut self,
        context: &mut Context,
        open: &DataOpen,
        bytes: &[u8],
        server: usize,
        server_session: u64,
    ) {
        let Ok(Frame::DataAccepted(proof)) = open_plain(&bytes[4..]) else {
            return;
        };
        let fits = |session: &&Session| {
            !session.ended
                && session.identity.incarnation == open.target
                && open.count == session.data_count
                && session.channel.data_accept_is_genuine(open, &proof)
        };
        let Some(number) = self.sessions.values().find(fits).map(|s| s.number) else {
            return;
        };
        self.close_path(number);
        let kind = if self.plan.one_sided {
            ChannelKind::Rdma
        } else {
            ChannelKind::Simulated
        };
        let channel = self
            .hub
            .open_channel(kind, self.transport_source, RING_POSTS);
        let (Some(session), Ok(channel)) = (self.sessions.get_mut(&number), channel) else {
            return;
        };
        let link = self.fabric.borrow_mut().connect(
            self.endpoint,
            channel,
            server,
            session.identity.incarnation,
            server_session,
            self.plan.one_sided,
            ordinary_flush(context),
        );
        session.path = PullPath::Open(channel, link);
        self.pump(context, number);
    }

    // ---- the end of a session -----------------------------------------------------------------

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
                _ => "session ended: other",
            });
            self.close_path(number);
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

fn back_off(dial: &mut Dial, context: &mut Context) -> Duration {
    dial.pause = (dial.pause * 2).min(BACK_OFF.1);
    dial.pause + dial.pause.mul_f64(context.rng.below(250) as f64 / 1000.0)
}

fn nonce(context: &mut Context) -> [u8; 32] {
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&context.rng.bits().to_le_bytes());
    }
    bytes
}

/// A COMMIT that names an older grant.
fn stale(frame: &Frame, part: u8) -> Frame {
    let mut frame = frame.clone();
    if let Frame::Commit {
        grantor,
        lease,
        epoch,
        ..
    } = &mut frame
    {
        match part % 3 {
            0 => *grantor = grantor.wrapping_sub(1),
            1 => *lease = lease.wrapping_sub(1),
            _ => *epoch = epoch.wrapping_sub(1),
        }
    }
    frame
}

fn brief(frame: &Frame) -> String {
    let mut text = format!("{frame:?}");
    text.truncate(150);
    text
}
