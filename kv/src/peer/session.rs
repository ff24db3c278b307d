//! One live session: its state, its outbox, its reader and writer, and how it ends.
//!
//! An end has two steps. [`Session::request_end`] only marks it and may be called from anywhere;
//! [`Inner::finish_session`] does the work (channels first, then leases, then attempts, then the
//! events) and runs at the top of a task, where nothing is borrowed.

use super::config::TransportChoice;
use super::config::{PathCounters, PeerState, PeerView};
use super::hub::Inner;
use super::migrate::AttemptCell;
use super::path::ShmPath;
use super::rdma::RdmaPath;
use super::wait::{Bell, Either, Woken, race, within};
use crate::credits::PeerCredits;
use crate::lease::PeerSession;
use crate::pull::PullEvent;
use crate::session::seal::FrameStream;
use crate::session::{Frame, Liveness, PeerIdentity, Pulse, RefuseReason, SealedChannel};
use crate::transport::chaos::MessageFate;
use crate::transport::tcp::ConnectionId;
use kvserve_runtime::net::TcpStream;
use kvserve_runtime::{ChannelId, ChannelKind, Nanos};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Bytes one read of a control connection takes: a quarter of a full watermark frame's worst
/// case, several of any usual frame.
const READ_BYTES: usize = 16 * 1024;

/// Bytes written in one go, so that a stalled peer is noticed per piece.
const WRITE_BYTES: usize = 256 * 1024;

/// What a last word may take before the connection is closed.
const BYE_LIMIT: Duration = Duration::from_millis(100);

/// How often an idle writer looks up; it is rung for every frame.
const WRITER_LOOK: Duration = Duration::from_secs(1);

/// How often a session looks whether it has been ended; it is rung when it is.
const SESSION_LOOK: Duration = Duration::from_secs(1);

/// How long the socket is tried again and again for a frame that is due at once (the answer to
/// COMMIT, COMMIT after `Complete`, `Complete` after the first token), before the shard may sleep
/// on it. COMMIT comes some 80 us after `Complete` when 24 pages of 16 KiB are pulled in between,
/// an answer sooner: twice that. A migration of a few pages then costs one wake-up; one that takes
/// longer costs this much of a shard once.
const DUE_SPIN: Duration = Duration::from_micros(160);

/// Why and by whom a session ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub reason: RefuseReason,
    pub by_peer: bool,
}

struct Outgoing {
    bytes: Vec<u8>,
    not_before: Nanos,
}

/// The data connection over which this node pulls.
#[derive(Clone, Copy)]
pub(super) enum PullPath {
    None,
    Open(ChannelId),
}

pub(super) struct Session {
    pub number: PeerSession,
    pub peer: PeerIdentity,
    pub address: SocketAddr,
    pub we_dialled: bool,
    since: Nanos,
    pub channel: RefCell<SealedChannel>,
    outbox: RefCell<VecDeque<Outgoing>>,
    outbox_bytes: Cell<usize>,
    outbox_bell: Bell,
    liveness: RefCell<Liveness>,
    end: Cell<Option<End>>,
    finished: Cell<bool>,
    /// The last word is in the outbox: the writer ends when that is empty.
    bye_queued: Cell<bool>,
    end_bell: Bell,
    pub tcp_path: Cell<PullPath>,
    /// TCP must not be pulled over: by the node's choice, or after mismatches.
    pub tcp_out: Cell<bool>,
    pub shm_path: Cell<ShmPath>,
    pub rdma: RdmaPath,
    pub path_bell: Bell,
    /// Peers' maps of our pool: one once it was handed over.
    pub maps_served: Cell<u32>,
    /// Pages that did not match since the path was chosen.
    pub mismatches: Cell<u32>,
    /// Data connections on which the peer reads from us.
    pub served: RefCell<Vec<ConnectionId>>,
    /// Number of the newest data connection of each lane; tokens serve once.
    pub data_count: Cell<[u64; 4]>,
    pub data_bell: Bell,
    pub grant_highest: Cell<u64>,
    pub renewed_at: Cell<Nanos>,
    /// Until then a frame of the peer is due at once.
    due_until: Cell<Nanos>,
    /// Reads posted (once), posted again, and bytes of those that came in, since the start.
    pub reads: Cell<u64>,
    pub reposts: Cell<u64>,
    pub bytes_pulled: Cell<u64>,
    /// Times that its path was changed, and pages that did not match.
    pub fallbacks: Cell<u64>,
    pub mismatches_seen: Cell<u64>,
    /// Migrations from this peer.
    pub attempts: RefCell<BTreeMap<crate::session::AttemptId, Rc<AttemptCell>>>,
}

impl Session {
    pub(super) fn new(
        inner: &Inner,
        number: PeerSession,
        peer: PeerIdentity,
        address: SocketAddr,
        we_dialled: bool,
        channel: SealedChannel,
    ) -> Self {
        let now = inner.hub.now();
        let shm_path = match inner.shm_plan(&peer) {
            Ok(()) => ShmPath::Trying,
            Err(_told_when_it_is_registered) => ShmPath::Off,
        };
        let by_rdma = matches!(shm_path, ShmPath::Off) && inner.rdma_plan(&peer).is_ok();
        Session {
            number,
            peer,
            address,
            we_dialled,
            since: now,
            channel: RefCell::new(channel),
            outbox: RefCell::default(),
            outbox_bytes: Cell::new(0),
            outbox_bell: Bell::new(&inner.hub, "peer.outbox"),
            liveness: RefCell::new(Liveness::new(inner.config.limits.liveness, now)),
            end: Cell::new(None),
            finished: Cell::new(false),
            bye_queued: Cell::new(false),
            end_bell: Bell::new(&inner.hub, "peer.session"),
            tcp_path: Cell::new(PullPath::None),
            tcp_out: Cell::new(matches!(
                inner.config.transport,
                TransportChoice::Shm | TransportChoice::Rdma
            )),
            shm_path: Cell::new(shm_path),
            rdma: RdmaPath::new(inner, by_rdma),
            path_bell: Bell::new(&inner.hub, "peer.path"),
            maps_served: Cell::new(0),
            mismatches: Cell::new(0),
            served: RefCell::default(),
            data_count: Cell::new([0; 4]),
            data_bell: Bell::new(&inner.hub, "peer.data"),
            grant_highest: Cell::new(0),
            renewed_at: Cell::new(now),
            due_until: Cell::new(Nanos(0)),
            reads: Cell::new(0),
            reposts: Cell::new(0),
            bytes_pulled: Cell::new(0),
            fallbacks: Cell::new(0),
            mismatches_seen: Cell::new(0),
            attempts: RefCell::default(),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.end.get().is_none()
    }

    pub(super) fn pulse(&self) -> Pulse {
        self.liveness.borrow().pulse()
    }

    pub(super) fn tick(&self, now: Nanos) -> Pulse {
        self.liveness.borrow_mut().tick(now)
    }

    /// Marks the session as over; the first reason stays.
    pub(super) fn request_end(&self, reason: RefuseReason, by_peer: bool) {
        if self.end.get().is_none() {
            self.end.set(Some(End { reason, by_peer }));
            self.end_bell.ring();
            self.outbox_bell.ring();
        }
    }

    /// Seals and queues a frame. A peer whose queue is full is too slow: its session ends.
    pub(super) fn send(&self, inner: &Inner, frame: &Frame) {
        if self.is_live() {
            self.queue(inner, frame);
        }
    }

    fn queue(&self, inner: &Inner, frame: &Frame) {
        let fate = match (frame, &inner.chaos) {
            // Heartbeats and last words are spared: chaos is about losing a request's frames.
            (Frame::Heartbeat | Frame::Bye { .. }, _) | (_, None) => MessageFate::Deliver,
            (_, Some(chaos)) => chaos.on_message(),
        };
        let mut not_before = Nanos(0);
        match fate {
            // Lost before it is sealed: a gap in the sequence would end the session.
            MessageFate::Lose => return,
            MessageFate::Deliver | MessageFate::Corrupt { .. } => {}
            MessageFate::Late(span) => not_before = inner.hub.now().after(span),
        }
        if matches!(frame, Frame::Complete { .. } | Frame::Commit { .. }) {
            self.answer_due(inner.hub.now());
        }
        let mut bytes = self.channel.borrow_mut().seal(frame);
        match fate {
            MessageFate::Corrupt { seed } => {
                let bit = (seed % (bytes.len() as u64 * 8)) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            MessageFate::Lose | MessageFate::Deliver | MessageFate::Late(_) => {}
        }
        inner.count(|counters| counters.frames_sent += 1);
        self.outbox_bytes.set(self.outbox_bytes.get() + bytes.len());
        self.outbox
            .borrow_mut()
            .push_back(Outgoing { bytes, not_before });
        if self.outbox_bytes.get() > inner.config.limits.outbox_bytes_max {
            self.request_end(RefuseReason::TooSlow, false);
        }
        self.outbox_bell.ring();
    }

    /// The peer's next frame is due at once: do not sleep on the socket yet.
    fn answer_due(&self, now: Nanos) {
        self.due_until.set(now.after(DUE_SPIN));
    }

    /// A frame has come: what was due, or what tells that more is.
    fn heard(&self, frame: &Frame, now: Nanos) {
        self.liveness.borrow_mut().heard();
        match frame {
            Frame::FirstToken { .. } => self.answer_due(now),
            Frame::Commit { .. } | Frame::CommitAnswer { .. } => self.due_until.set(Nanos(0)),
            _ => {}
        }
    }

    /// What the peer has sent. Polled again at once while a frame is due.
    fn poll_receive(
        &self,
        inner: &Inner,
        stream: &TcpStream,
        buffer: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if inner.hub.now() < self.due_until.get() {
            match stream.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // After the shard's other tasks.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return Poll::Ready(received),
            }
        }
        stream.poll_read(cx, buffer)
    }

    pub(super) fn view(&self, pulls: bool, credits: PeerCredits) -> PeerView {
        let state = match (self.is_live(), self.pulse()) {
            (false, _) | (true, Pulse::Dead) => PeerState::Dead,
            (true, Pulse::Alive) => PeerState::Up,
            (true, Pulse::Suspect) => PeerState::Suspect,
        };
        let (path, can_pull) = match (self.pull_path(), self.shm_path.get()) {
            (PullPath::Open(_), ShmPath::Open(_)) => ("shm", true),
            (PullPath::Open(channel), ShmPath::Off | ShmPath::Trying) => match channel.kind {
                ChannelKind::Rdma => ("rdma", true),
                _ => ("tcp", true),
            },
            (PullPath::None, _) if self.maps_served.get() > 0 => ("shm", false),
            (PullPath::None, _) if self.rdma.is_served() => ("rdma", false),
            (PullPath::None, _) if pulls && self.peer.role.serves() => ("", false),
            (PullPath::None, _) if self.served.borrow().is_empty() => ("", false),
            (PullPath::None, _) => ("tcp", false),
        };
        PeerView {
            node_id: self.peer.node_id.clone(),
            role: Some(self.peer.role),
            incarnation: self.peer.incarnation,
            address: self.address,
            state,
            api_url: self.peer.api_url.clone(),
            since: self.since,
            path,
            can_pull: can_pull && pulls && state == PeerState::Up,
            in_flight: self.attempts.borrow().len(),
            moved: PathCounters {
                reads: self.reads.get(),
                bytes: self.bytes_pulled.get(),
                reposts: self.reposts.get(),
                mismatches: self.mismatches_seen.get(),
                fallbacks: self.fallbacks.get(),
            },
            credits,
        }
    }

    /// Frames that may be written now, at most [`WRITE_BYTES`] and at least one frame; or when
    /// the next one may.
    fn next_write(&self, now: Nanos) -> Result<Vec<u8>, Nanos> {
        let mut outbox = self.outbox.borrow_mut();
        let mut bytes = Vec::new();
        while let Some(front) = outbox.front() {
            let full = !bytes.is_empty() && bytes.len() + front.bytes.len() > WRITE_BYTES;
            if front.not_before > now || full {
                break;
            }
            if let Some(front) = outbox.pop_front() {
                if bytes.is_empty() {
                    bytes = front.bytes;
                } else {
                    bytes.extend_from_slice(&front.bytes);
                }
            }
        }
        if bytes.is_empty() {
            let look = now.after(WRITER_LOOK);
            return Err(outbox
                .front()
                .map_or(look, |front| front.not_before.min(look)));
        }
        self.outbox_bytes
            .set(self.outbox_bytes.get().saturating_sub(bytes.len()));
        Ok(bytes)
    }
}

/// Runs a registered session to its end. `frames` may hold bytes that came with the handshake.
pub(super) async fn run(
    inner: Rc<Inner>,
    session: Rc<Session>,
    stream: TcpStream,
    mut frames: FrameStream,
) {
    frames.trust();
    let mut writer = pin!(write_loop(&inner, &session, &stream));
    let writer_ended = {
        let reader = read_loop(&inner, &session, &stream, &mut frames);
        let others = race(
            reader,
            race(
                session_end(&inner, &session),
                race(inner.data_loop(&session), inner.path_loop(&session)),
            ),
        );
        match race(writer.as_mut(), others).await {
            Either::Left(()) => true,
            Either::Right(_) => false,
        }
    };
    inner.finish_session(&session);
    let end = session.end.get();
    if let Some(end) = end.filter(|end| !end.by_peer && !writer_ended) {
        session.queue(&inner, &Frame::Bye { reason: end.reason });
        session.bye_queued.set(true);
        // Whether it arrives or not, the connection is closed now.
        let _told: Option<()> = within(&inner.shard, BYE_LIMIT, writer.as_mut()).await;
    }
}

/// Ready once the session has been asked to end.
async fn session_end(inner: &Inner, session: &Session) {
    while session.is_live() {
        let until = inner.hub.now().after(SESSION_LOOK);
        match session.end_bell.wait(until).await {
            Woken::Rung | Woken::Deadline => {}
            Woken::NoSlot => inner.shard.sleep(SESSION_LOOK).await,
        }
    }
}

async fn write_loop(inner: &Inner, session: &Session, stream: &TcpStream) {
    loop {
        let now = inner.hub.now();
        match session.next_write(now) {
            Ok(bytes) => {
                let limit = inner.config.limits.liveness.dead;
                match within(&inner.shard, limit, stream.write_all(&bytes)).await {
                    Some(Ok(())) => {}
                    Some(Err(_)) => return session.request_end(RefuseReason::Disconnected, true),
                    None => return session.request_end(RefuseReason::TooSlow, false),
                }
            }
            Err(_) if session.bye_queued.get() && session.outbox.borrow().is_empty() => return,
            Err(until) => match session.outbox_bell.wait(until).await {
                Woken::Rung | Woken::Deadline => {}
                Woken::NoSlot => {
                    inner.shard.sleep(Duration::from_millis(5)).await;
                }
            },
        }
    }
}

async fn read_loop(
    inner: &Rc<Inner>,
    session: &Rc<Session>,
    stream: &TcpStream,
    frames: &mut FrameStream,
) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        inner.catch_up();
        loop {
            let opened = match frames.next_frame() {
                Ok(None) => break,
                Ok(Some(bytes)) => session.channel.borrow_mut().open(bytes),
                Err(error) => Err(error),
            };
            match opened {
                Ok(opened) => {
                    session.heard(&opened.frame, inner.hub.now());
                    inner.count(|counters| counters.frames_received += 1);
                    if opened.incarnation == session.peer.incarnation {
                        inner.on_frame(session, opened.frame);
                    } else {
                        inner.count(|counters| counters.frames_stale += 1);
                    }
                }
                Err(_malformed) => return session.request_end(RefuseReason::Violation, false),
            }
            if !session.is_live() {
                return;
            }
            inner.shard.yield_now().await;
        }
        let received = poll_fn(|cx| session.poll_receive(inner, stream, &mut buffer, cx)).await;
        match received {
            Ok(0) | Err(_) => return session.request_end(RefuseReason::Disconnected, true),
            Ok(count) => frames.push(&buffer[..count]),
        }
    }
}

impl Inner {
    /// The end of a session: its channels are destroyed first, then its leases and attempts end
    /// (PROTOCOL S3), then the layer above hears of it. Happens once.
    pub(super) fn finish_session(&self, session: &Rc<Session>) {
        if session.finished.replace(true) {
            return;
        }
        session.request_end(RefuseReason::Disconnected, true);
        self.sessions.borrow_mut().remove(&session.number);
        self.close_tcp_path(session);
        match session.shm_path.replace(ShmPath::Off) {
            ShmPath::Off | ShmPath::Trying => {}
            ShmPath::Open(channel) => self.hub.close_channel(channel),
        }
        self.close_rdma(session);
        if let Some(pages) = &self.pages {
            for connection in session.served.take() {
                pages.server.borrow_mut().close_connection(connection);
                pages.authority.borrow_mut().forget(connection);
            }
        }
        let now = self.hub.now();
        let mut effects = Vec::new();
        self.leases
            .borrow_mut()
            .session_ended(now, session.number, &mut effects);
        self.perform(effects);
        self.credits.borrow_mut().forget(session.number);
        let attempts: Vec<_> = session.attempts.borrow().values().cloned().collect();
        for attempt in attempts {
            attempt.feed(self, PullEvent::SessionEnded);
        }
        self.count(|counters| counters.sessions_down += 1);
        if let Some(end) = session.end.get() {
            self.events
                .down(&session.peer.node_id, end.reason, end.by_peer);
        }
    }

    /// Takes the pull connection down the ladder.
    pub(super) fn close_tcp_path(&self, session: &Session) {
        match session.tcp_path.replace(PullPath::None) {
            PullPath::None => {}
            PullPath::Open(channel) => self.hub.close_channel(channel),
        }
    }
}
