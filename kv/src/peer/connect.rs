//! Connections: dialling, accepting, handshakes, data connections.
//!
//! A stranger costs at most one half-open place for the handshake's time and 1 KiB of memory;
//! nothing it says is acted on. One control connection per node pair: of two that meet, the
//! newer of one dialler stays, else that of the node with the smaller id; both ends judge alike.

use super::config::TransportChoice;
use super::entropy;
use super::hub::Inner;
use super::session::Session;
use super::wait::{Bell, Woken, within};
use crate::credits::PeerCredits;
use crate::session::handshake::Refusal;
use crate::session::seal::{FrameStream, WireError, open_plain};
use crate::session::{Frame, Handshake, PeerIdentity, RefuseReason, SealedChannel, Step};
use kvserve_runtime::Nanos;
use kvserve_runtime::net::{Socket, TcpListener, TcpStream};
use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

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
        let local = inner
            .config
            .local(inner.shm_offer.clone(), inner.rdma_offered());
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
    let mut handshake = Handshake::accept(
        inner
            .config
            .local(inner.shm_offer.clone(), inner.rdma_offered()),
        inner.config.key.clone(),
        nonce,
    );
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

pub(super) async fn next_frame(
    stream: &Socket,
    frames: &mut FrameStream,
) -> Result<Vec<u8>, Refusal> {
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
        self.events
            .up(session.view(self.config.role.pulls(), PeerCredits::default()));
        if self.config.role.pulls() && session.peer.role.serves() {
            let (node_id, choice) = (&session.peer.node_id, self.config.transport);
            match self.shm_plan(&session.peer) {
                // Told when it is settled.
                Ok(()) => {}
                Err(reason) if choice == TransportChoice::Shm => {
                    self.events.path(node_id, "", reason);
                }
                Err(not_shm) => match self.rdma_plan(&session.peer) {
                    Ok(()) => {}
                    Err(reason) if choice == TransportChoice::Rdma => {
                        self.events.path(node_id, "", reason);
                    }
                    Err(reason) => {
                        let both = format!("{not_shm}; {reason}");
                        self.events.path(node_id, "tcp", &both);
                    }
                },
            }
        }
        Ok(session)
    }
}

/// `span` and up to a quarter more, so that nodes that failed together do not come together.
pub(super) fn jitter(span: Duration) -> Duration {
    let random = entropy::bytes().map_or(0, u32::from_le_bytes);
    span + span.mul_f64(f64::from(random) / f64::from(u32::MAX) / 4.0)
}

pub(super) fn io_refusal(error: io::Error) -> Refusal {
    Refusal::ours(RefuseReason::Disconnected, error.to_string())
}

pub(super) fn wire_refusal(error: WireError) -> Refusal {
    Refusal::ours(RefuseReason::Violation, error.to_string())
}

pub(super) fn violation(text: &str) -> Refusal {
    Refusal::ours(RefuseReason::Violation, text)
}

fn too_slow() -> Refusal {
    Refusal::ours(
        RefuseReason::HandshakeTimeout,
        "the handshake did not end in time",
    )
}
