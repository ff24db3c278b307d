//! Connections: dialling, accepting, handshakes, data connections.
//!
//! A stranger costs at most one half-open place for the handshake's time and 1 KiB of memory;
//! nothing it says is acted on. One control connection per node pair: of two that meet, the
//! newer of one dialler stays, else that of the node with the smaller id; both ends judge alike.

use super::entropy;
use super::hub::Inner;
use super::session::{PullPath, Session};
use super::wait::{Bell, Woken, within};
use crate::session::handshake::Refusal;
use crate::session::seal::{FrameStream, WireError, open_plain, plain};
use crate::session::{
    Frame, Handshake, PeerIdentity, RefuseReason, SealedChannel, Step, frame::DataOpen,
};
use crate::transport::tcp::READS_IN_FLIGHT_MAX;
use kvserve_runtime::net::{TcpListener, TcpStream};
use kvserve_runtime::{ChannelKind, Nanos};
use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// The session's dialler pulls over this lane.
const LANE_DIALLER_PULLS: u16 = 0;
/// The session's acceptor pulls over this lane.
const LANE_ACCEPTOR_PULLS: u16 = 1;

/// Bytes of a `DataAccepted` frame: length, kind, proof. Read exactly, since reads may follow.
const DATA_ACCEPTED_BYTES: usize = 4 + 1 + 32;

/// Posts a pull channel's ring holds: twice what the transport takes, so that posts whose
/// waiters have ended do not shut new ones out.
const RING_POSTS: usize = 2 * READS_IN_FLIGHT_MAX;

/// Pauses between tries to open a data connection.
const DATA_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How often a session with all its data connections looks whether they still stand.
const DATA_LOOK: Duration = Duration::from_millis(200);

/// Pause after an accept that failed (out of descriptors, for instance).
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// One address that is kept dialled.
pub(super) struct Dial {
    pub address: SocketAddr,
    pub since: Nanos,
    node_id: RefCell<String>,
    forgotten: Cell<bool>,
    bell: Bell,
}

impl Dial {
    pub(super) fn new(inner: &Inner, address: SocketAddr) -> Self {
        Dial {
            address,
            since: inner.hub.now(),
            node_id: RefCell::default(),
            forgotten: Cell::new(false),
            bell: Bell::new(&inner.hub, "peer.dial"),
        }
    }

    pub(super) fn forget(&self) {
        self.forgotten.set(true);
        self.bell.ring();
    }

    pub(super) fn node_id(&self) -> String {
        self.node_id.borrow().clone()
    }

    /// Whether a session is the one this dial wants.
    pub(super) fn reaches(&self, view: &super::config::PeerView) -> bool {
        view.address == self.address || view.node_id == *self.node_id.borrow()
    }
}

/// Keeps one address dialled until it is forgotten.
pub(super) async fn dial_loop(inner: Rc<Inner>, dial: Rc<Dial>) {
    let (first, longest) = inner.config.limits.back_off;
    let mut pause = first;
    while !dial.forgotten.get() && !inner.stopped.get() {
        let known = dial.node_id();
        let reached = !known.is_empty() && inner.session_of(&known).is_some();
        if !reached {
            let began = inner.hub.now();
            match dial_once(&inner, &dial).await {
                // A session that ends as soon as it is up must not be dialled in a tight loop.
                Ok(()) if inner.hub.now().since(began) >= longest => pause = first,
                Ok(()) => pause = (pause * 2).min(longest),
                Err(refusal) => {
                    inner.count(|counters| counters.handshakes_failed += 1);
                    inner.events.refused(dial.address, &refusal);
                    pause = (pause * 2).min(longest);
                }
            }
        }
        if dial.forgotten.get() || inner.stopped.get() {
            return;
        }
        let wait = if reached { longest } else { jitter(pause) };
        match dial.bell.wait(inner.hub.now().after(wait)).await {
            Woken::Rung | Woken::Deadline => {}
            Woken::NoSlot => inner.shard.sleep(wait).await,
        }
    }
}

/// Connects, shakes hands and runs the session to its end.
async fn dial_once(inner: &Rc<Inner>, dial: &Dial) -> Result<(), Refusal> {
    let address = dial.address;
    let shaken = within(&inner.shard, inner.config.limits.handshake, async {
        let stream = TcpStream::connect(address).await.map_err(io_refusal)?;
        let nonce = entropy::bytes().map_err(io_refusal)?;
        let local = inner.config.local();
        let (handshake, first) = Handshake::dial(local, inner.config.key.clone(), nonce);
        stream.write_all(&first).await.map_err(io_refusal)?;
        let mut frames = FrameStream::new();
        let up = shake(inner, &stream, &mut frames, handshake, true, address).await?;
        Ok((stream, frames, up))
    });
    let (stream, frames, (channel, peer)) = shaken.await.unwrap_or_else(|| Err(too_slow()))?;
    dial.node_id.replace(peer.node_id.clone());
    if dial.forgotten.get() {
        return Ok(());
    }
    let session = inner.register(channel, peer, true, address)?;
    super::session::run(inner.clone(), session, stream, frames).await;
    Ok(())
}

/// Accepts until the hub is stopped.
pub(super) async fn accept_loop(inner: Rc<Inner>, listener: TcpListener) {
    while !inner.stopped.get() {
        // Bounded, so that a stopped hub lets its port go.
        let accepted = within(&inner.shard, Duration::from_millis(200), listener.accept()).await;
        match accepted {
            None => {}
            Some(Err(_)) => inner.shard.sleep(ACCEPT_PAUSE).await,
            Some(Ok((stream, address))) => {
                if inner.half_open.get() >= inner.config.limits.half_open_max {
                    inner.count(|counters| counters.half_open_refused += 1);
                    continue; // dropping the stream closes it
                }
                inner.half_open.set(inner.half_open.get() + 1);
                let shard = inner.shard.clone();
                shard
                    .spawn(accepted_one(inner.clone(), stream, address))
                    .detach();
            }
        }
    }
}

/// An accepted connection that turned out to be a proven control connection.
struct Control {
    stream: TcpStream,
    frames: FrameStream,
    channel: SealedChannel,
    peer: PeerIdentity,
}

async fn accepted_one(inner: Rc<Inner>, stream: TcpStream, address: SocketAddr) {
    let limit = inner.config.limits.handshake;
    let outcome = within(&inner.shard, limit, take_in(&inner, stream, address)).await;
    inner.half_open.set(inner.half_open.get() - 1);
    let outcome = outcome.unwrap_or_else(|| Err(too_slow()));
    let registered = match outcome {
        Ok(None) => return,
        Ok(Some(control)) => inner
            .register(control.channel, control.peer, false, address)
            .map(|session| (session, control.stream, control.frames)),
        Err(refusal) => Err(refusal),
    };
    match registered {
        Ok((session, stream, frames)) => {
            super::session::run(inner, session, stream, frames).await;
        }
        Err(refusal) => {
            inner.count(|counters| counters.handshakes_failed += 1);
            inner.events.refused(address, &refusal);
        }
    }
}

/// Takes a connection in; `None`: it was a data connection, and is where it belongs.
async fn take_in(
    inner: &Rc<Inner>,
    stream: TcpStream,
    address: SocketAddr,
) -> Result<Option<Control>, Refusal> {
    let mut frames = FrameStream::new();
    let first = next_frame(&stream, &mut frames).await?;
    if let Ok(Frame::DataOpen(open)) = open_plain(&first) {
        if !frames.rest().is_empty() {
            return Err(violation("bytes after a data connection's first frame"));
        }
        inner.take_data(stream, &open).await?;
        return Ok(None);
    }
    let nonce = entropy::bytes().map_err(io_refusal)?;
    let mut handshake = Handshake::accept(inner.config.local(), inner.config.key.clone(), nonce);
    let admit = &mut |peer: &PeerIdentity| inner.admit(peer, false, address);
    let send = match handshake.on_frame(&first, admit) {
        Step::Continue { send, .. } => send,
        Step::Refused { send, refusal } => {
            // Told or not, the connection is closed.
            let _told: io::Result<()> = stream.write_all(&send).await;
            return Err(refusal);
        }
        Step::Up { .. } => return Err(violation("a handshake of one frame")),
    };
    stream.write_all(&send).await.map_err(io_refusal)?;
    let (channel, peer) = shake(inner, &stream, &mut frames, handshake, false, address).await?;
    Ok(Some(Control {
        stream,
        frames,
        channel,
        peer,
    }))
}

/// Takes a handshake to its end.
async fn shake(
    inner: &Rc<Inner>,
    stream: &TcpStream,
    frames: &mut FrameStream,
    mut handshake: Handshake,
    we_dialled: bool,
    address: SocketAddr,
) -> Result<(SealedChannel, PeerIdentity), Refusal> {
    loop {
        let frame = next_frame(stream, frames).await?;
        let admit = &mut |peer: &PeerIdentity| inner.admit(peer, we_dialled, address);
        match handshake.on_frame(&frame, admit) {
            Step::Continue { send, trusted } => {
                if trusted {
                    frames.trust();
                }
                stream.write_all(&send).await.map_err(io_refusal)?;
            }
            Step::Up { channel, peer } => return Ok((channel, peer)),
            Step::Refused { send, refusal } => {
                // Told or not, the connection is closed.
                let _told: io::Result<()> = stream.write_all(&send).await;
                return Err(refusal);
            }
        }
    }
}

async fn next_frame(stream: &TcpStream, frames: &mut FrameStream) -> Result<Vec<u8>, Refusal> {
    let mut buffer = [0; 1024];
    loop {
        match frames.next_frame() {
            Ok(Some(frame)) => return Ok(frame.to_vec()),
            Ok(None) => {}
            Err(error) => return Err(wire_refusal(error)),
        }
        match stream.read(&mut buffer).await.map_err(io_refusal)? {
            0 => {
                return Err(Refusal::ours(
                    RefuseReason::Disconnected,
                    "the connection was closed during the handshake",
                ));
            }
            count => frames.push(&buffer[..count]),
        }
    }
}

impl Inner {
    /// Whether a session with this proven peer may come up beside those there are.
    fn admit(
        &self,
        peer: &PeerIdentity,
        we_dialled: bool,
        address: SocketAddr,
    ) -> Result<(), Refusal> {
        let refuse = |reason, text: String| Err(Refusal::ours(reason, text));
        if self.stopped.get() {
            return refuse(RefuseReason::ShuttingDown, "going down".into());
        }
        let Some(known) = self.session_of(&peer.node_id) else {
            if self.sessions.borrow().len() >= self.config.limits.sessions_max {
                let text = format!("{} sessions are up", self.config.limits.sessions_max);
                return refuse(RefuseReason::Full, text);
            }
            return Ok(());
        };
        let node_id = &peer.node_id;
        if peer.incarnation < known.peer.incarnation {
            let text = format!("a later start of `{node_id}` is up at {}", known.address);
            return refuse(RefuseReason::Superseded, text);
        }
        if peer.incarnation > known.peer.incarnation {
            return Ok(());
        }
        let stays = if we_dialled == known.we_dialled {
            // The dialler dials again only when its own end of the old one is gone. Seen from
            // its side, a live one means that the node was dialled by two addresses.
            we_dialled
        } else {
            let dialler_of_new = if we_dialled {
                &self.config.node_id
            } else {
                node_id
            };
            let smaller = node_id.min(&self.config.node_id);
            dialler_of_new != smaller
        };
        if stays {
            let text = format!(
                "`{node_id}` is connected by {}, so not by {address}",
                known.address
            );
            return refuse(RefuseReason::Duplicate, text);
        }
        Ok(())
    }

    /// Makes a shaken connection the session with its node; what it replaces ends first.
    fn register(
        &self,
        channel: SealedChannel,
        peer: PeerIdentity,
        we_dialled: bool,
        address: SocketAddr,
    ) -> Result<Rc<Session>, Refusal> {
        self.admit(&peer, we_dialled, address)?;
        if let Some(known) = self.session_of(&peer.node_id) {
            let reason = if known.peer.incarnation < peer.incarnation {
                RefuseReason::Superseded
            } else {
                RefuseReason::Duplicate
            };
            known.request_end(reason, false);
            self.finish_session(&known);
        }
        let number = self.next_session();
        let session = Rc::new(Session::new(
            self, number, peer, address, we_dialled, channel,
        ));
        self.sessions.borrow_mut().insert(number, session.clone());
        self.count(|counters| counters.sessions_up += 1);
        self.events.up(session.view(self.config.role.pulls()));
        Ok(session)
    }

    // ---- data connections ---------------------------------------------------------------

    /// On the session's dialler: keeps its data connections up. Never ends by itself.
    pub(super) async fn data_loop(&self, session: &Session) {
        let (we, they) = (self.config.role, session.peer.role);
        let lanes = [
            (LANE_DIALLER_PULLS, we.pulls() && they.serves()),
            (LANE_ACCEPTOR_PULLS, we.serves() && they.pulls()),
        ];
        let mut pause = DATA_PAUSE.0;
        loop {
            let mut missing = false;
            for (lane, wanted) in lanes {
                if !wanted || !session.we_dialled || self.lane_stands(session, lane) {
                    continue;
                }
                let limit = self.config.limits.handshake;
                let opened = within(&self.shard, limit, self.open_data(session, lane)).await;
                match opened {
                    Some(Ok(())) => pause = DATA_PAUSE.0,
                    Some(Err(_)) | None => missing = true,
                }
            }
            let wait = if missing {
                pause = (pause * 2).min(DATA_PAUSE.1);
                jitter(pause)
            } else {
                DATA_LOOK
            };
            match session.data_bell.wait(self.hub.now().after(wait)).await {
                // A channel that broke may still be on the ladder: a short pause, then anew.
                Woken::Rung => self.shard.sleep(DATA_PAUSE.0).await,
                Woken::Deadline => {}
                Woken::NoSlot => self.shard.sleep(wait).await,
            }
        }
    }

    fn lane_stands(&self, session: &Session, lane: u16) -> bool {
        if lane == LANE_DIALLER_PULLS {
            self.check_pull_path(session);
            return matches!(session.pull_path.get(), PullPath::Open(_));
        }
        let mut served = session.served.borrow_mut();
        if let Some(pages) = &self.pages {
            served.retain(|connection| pages.authority.borrow().knows(*connection));
        }
        !served.is_empty()
    }

    async fn open_data(&self, session: &Session, lane: u16) -> Result<(), Refusal> {
        let stream = TcpStream::connect(session.address)
            .await
            .map_err(io_refusal)?;
        let count = next_count(session, lane);
        let open = session
            .channel
            .borrow()
            .data_open(session.peer.incarnation, lane, count);
        let first = plain(&Frame::DataOpen(open.clone()));
        stream.write_all(&first).await.map_err(io_refusal)?;
        let mut answer = [0; DATA_ACCEPTED_BYTES];
        let mut filled = 0;
        while filled < answer.len() {
            match stream
                .read(&mut answer[filled..])
                .await
                .map_err(io_refusal)?
            {
                0 => return Err(violation("the data connection was closed")),
                count => filled += count,
            }
        }
        let genuine = match open_plain(&answer[4..]).map_err(wire_refusal)? {
            Frame::DataAccepted(proof) => session
                .channel
                .borrow()
                .data_accept_is_genuine(&open, &proof),
            _ => false,
        };
        if !genuine {
            return Err(violation("the data connection was not accepted"));
        }
        self.attach_data(session, stream, lane == LANE_DIALLER_PULLS)
    }

    /// On the session's acceptor: a data connection came in.
    async fn take_data(&self, stream: TcpStream, open: &DataOpen) -> Result<(), Refusal> {
        let session = self.live_sessions().into_iter().find(|session| {
            session.is_live()
                && !session.we_dialled
                && session.peer.incarnation == open.opener
                && self.config.incarnation == open.target
                && session.channel.borrow().data_open_is_genuine(open)
        });
        let session = session.ok_or_else(|| violation("a data connection of no session"))?;
        let (we, they) = (self.config.role, session.peer.role);
        let we_pull = match open.lane {
            LANE_DIALLER_PULLS if they.pulls() && we.serves() => false,
            LANE_ACCEPTOR_PULLS if we.pulls() && they.serves() => true,
            _ => return Err(violation("a data connection of no use")),
        };
        let lane = open.lane as usize;
        let mut counts = session.data_count.get();
        if open.count <= counts[lane] {
            return Err(violation("a data connection's token came twice"));
        }
        counts[lane] = open.count;
        session.data_count.set(counts);
        let answer = session.channel.borrow().data_accept(open);
        let answer = plain(&Frame::DataAccepted(answer));
        stream.write_all(&answer).await.map_err(io_refusal)?;
        if !session.is_live() {
            return Err(violation("the session of a data connection has ended"));
        }
        self.attach_data(&session, stream, we_pull)
    }

    /// Hands a proven data connection to the transport, in place of an older one.
    fn attach_data(
        &self,
        session: &Session,
        stream: TcpStream,
        we_pull: bool,
    ) -> Result<(), Refusal> {
        let Some(pages) = &self.pages else {
            return Err(violation("this node has no pages"));
        };
        let stream = stream.into_std();
        if we_pull {
            self.close_pull_path(session);
            let channel = self
                .hub
                .open_channel(ChannelKind::Tcp, pages.transport_source, RING_POSTS)
                .map_err(|error| Refusal::ours(RefuseReason::Full, error.to_string()))?;
            let added = pages.transport.borrow_mut().inner_mut().add_channel(
                channel,
                stream,
                session.peer.incarnation,
            );
            if let Err(error) = added {
                self.hub.close_channel(channel);
                return Err(io_refusal(error));
            }
            session.pull_path.set(PullPath::Open(channel));
            session.pump(self);
        } else {
            let older = session.served.take();
            for connection in older {
                pages.server.borrow_mut().close_connection(connection);
                pages.authority.borrow_mut().forget(connection);
            }
            let added = pages.server.borrow_mut().add_connection(stream);
            let connection = added.map_err(io_refusal)?;
            pages
                .authority
                .borrow_mut()
                .learn(connection, session.number);
            session.served.borrow_mut().push(connection);
        }
        // The poll loop may be parked on what it knew before.
        self.hub.ring();
        self.count(|counters| counters.data_connections += 1);
        Ok(())
    }
}

fn next_count(session: &Session, lane: u16) -> u64 {
    let mut counts = session.data_count.get();
    counts[lane as usize] += 1;
    session.data_count.set(counts);
    counts[lane as usize]
}

/// `span` and up to a quarter more, so that nodes that failed together do not come together.
fn jitter(span: Duration) -> Duration {
    let random = entropy::bytes().map_or(0, u32::from_le_bytes);
    span + span.mul_f64(f64::from(random) / f64::from(u32::MAX) / 4.0)
}

fn io_refusal(error: io::Error) -> Refusal {
    Refusal::ours(RefuseReason::Disconnected, error.to_string())
}

fn wire_refusal(error: WireError) -> Refusal {
    Refusal::ours(RefuseReason::Violation, error.to_string())
}

fn violation(text: &str) -> Refusal {
    Refusal::ours(RefuseReason::Violation, text)
}

fn too_slow() -> Refusal {
    Refusal::ours(
        RefuseReason::HandshakeTimeout,
        "the handshake did not end in time",
    )
}
