//! Which way pages take between two nodes (PROTOCOL X1): shared memory on one host, RDMA where both
//! offer it ([`super::rdma`]), else TCP.
//!
//! Chosen when a session comes up, by the side that pulls, and probed: the boot ids must be
//! equal, the peer's pool must come over a Unix socket from a process of the same user that holds
//! the session's key, and the nonce that the peer named must be read through the map. No pull
//! starts before that is settled. From shared memory a session goes to TCP once, counted, when
//! the probe fails, the socket ends, or checksums do not match; never back.
//!
//! TCP data connections are there all the while, so that a fall-back costs nothing.

use super::config::TransportChoice;
use super::connect::{jitter, next_frame};
use super::entropy;
use super::hub::{Inner, Pages};
use super::rdma::RdmaPhase;
use super::session::{PullPath, Session};
use super::wait::{Woken, within};
use crate::pool::PageId;
use crate::session::frame::{DataOpen, Frame, PLACES_PER_FRAME_MAX, ShmOffer};
use crate::session::seal::{FrameStream, open_plain, plain};
use crate::session::{AttemptId, PeerIdentity, RefuseReason};
use crate::transport::shm::{
    ExpectedPool, LearnError, Place, SharedPool, own_uid, peer_uid, receive_descriptor,
    send_descriptor,
};
use crate::transport::tcp::{ChannelState, READS_IN_FLIGHT_MAX};
use kvserve_runtime::net::{UnixListener, UnixStream};
use kvserve_runtime::{ChannelId, ChannelKind};
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

/// The pool of the session's acceptor is handed to its dialler over this lane.
const LANE_DIALLER_MAPS: u16 = 2;

/// The pool of the session's dialler is handed to its acceptor over this lane.
const LANE_ACCEPTOR_MAPS: u16 = 3;

/// Bytes of the answer that comes with the descriptor: length, kind, proof.
const ANSWER_BYTES: usize = 4 + 1 + 32;

/// Posts a copy queue's ring holds; see the TCP data connection's.
const RING_POSTS: usize = 2 * READS_IN_FLIGHT_MAX;

/// Between two looks for an answer of a process on the same host.
const ANSWER_LOOK: Duration = Duration::from_micros(200);

/// How often a session's path is looked after, and a handed-over socket's session.
const PATH_LOOK: Duration = Duration::from_millis(500);

/// Shared memory as a session's way to pull.
#[derive(Clone, Copy, Debug)]
pub(super) enum ShmPath {
    /// It is not this session's way (any more).
    Off,
    /// The hand-over is under way.
    Trying,
    /// Pages are copied.
    Open(ChannelId),
}

impl Session {
    /// The channel that reads are posted on now.
    pub(super) fn pull_path(&self) -> PullPath {
        match self.shm_path.get() {
            ShmPath::Open(channel) => PullPath::Open(channel),
            ShmPath::Trying => PullPath::None,
            ShmPath::Off if self.rdma.phase.get() != RdmaPhase::Off => match self.rdma.channel() {
                Some(channel) => PullPath::Open(channel),
                None => PullPath::None,
            },
            ShmPath::Off if self.tcp_out.get() => PullPath::None,
            ShmPath::Off => self.tcp_path.get(),
        }
    }
}

impl Pages {
    /// Reads that a channel takes now.
    pub(super) fn room(&self, channel: ChannelId) -> usize {
        match channel.kind {
            ChannelKind::SharedMemory => self.shm.borrow().inner().room(channel),
            ChannelKind::Rdma => self.rdma.as_ref().map_or(0, |rdma| {
                let transport = rdma.transport.borrow();
                transport.inner().room(channel)
            }),
            _ => self.transport.borrow().inner().room(channel),
        }
    }

    pub(super) fn is_open(&self, channel: ChannelId) -> bool {
        let state = match channel.kind {
            ChannelKind::SharedMemory => self.shm.borrow().inner().channel_state(channel),
            ChannelKind::Rdma => self.rdma.as_ref().and_then(|rdma| {
                let transport = rdma.transport.borrow();
                transport.inner().channel_state(channel)
            }),
            _ => self.transport.borrow().inner().channel_state(channel),
        };
        state == Some(ChannelState::Open)
    }
}

/// What a serving node tells its peers at the start, and where it waits for them.
pub(super) fn offer(
    pages: &Pages,
    serves: bool,
    choice: TransportChoice,
) -> io::Result<(ShmOffer, Option<UnixListener>)> {
    let mut offer = ShmOffer {
        boot_id: boot_id().unwrap_or_default(),
        ..ShmOffer::default()
    };
    let linked = pages
        .ledger
        .with(|ledger| ledger.raises_generations_of(&pages.pool));
    // Without generations a reuse would not be noticed: such a pool is never handed out.
    let wanted = matches!(choice, TransportChoice::Auto | TransportChoice::Shm);
    if !serves || !wanted || !linked || pages.pool.memfd_raw().is_none() {
        return Ok((offer, None));
    }
    let random: [u8; 16] = entropy::bytes()?;
    let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    offer.socket = format!("kvserve-pool-{hex}");
    offer.nonce = pages.pool.nonce();
    let listener = UnixListener::bind_abstract(&offer.socket)?;
    Ok((offer, Some(listener)))
}

/// Which boot of which machine this is; `None` when the kernel does not tell.
fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: Vec<u8> = text
        .trim()
        .chars()
        .filter(|letter| *letter != '-')
        .map(|letter| letter.to_digit(16).map(|digit| digit as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[pair.len() - 1])
        .collect();
    bytes.try_into().ok()
}

// ---- the side that pulls ------------------------------------------------------------------

impl Inner {
    /// Whether a session's pages are to be tried by shared memory; else why not.
    pub(super) fn shm_plan(&self, peer: &PeerIdentity) -> Result<(), &'static str> {
        let here = self.shm_offer.boot_id;
        if self.pages.is_none() || !self.config.role.pulls() || !peer.role.serves() {
            return Err("nothing is pulled");
        }
        match self.config.transport {
            TransportChoice::Auto | TransportChoice::Shm => {}
            TransportChoice::Tcp => return Err("this node's --transport is tcp"),
            TransportChoice::Rdma => return Err("this node's --transport is rdma"),
        }
        if peer.shm.socket.is_empty() {
            return Err("the peer offers no shared memory");
        }
        if here == [0; 16] || here != peer.shm.boot_id {
            return Err("the peer is on another host");
        }
        Ok(())
    }

    /// Settles the way of a session's pulls and looks after it. Never ends by itself.
    pub(super) async fn path_loop(&self, session: &Session) {
        let mut pause = Duration::from_millis(20);
        if !session.peer.role.serves() || !self.config.role.pulls() {
            std::future::pending::<()>().await;
        }
        loop {
            match session.shm_path.get() {
                ShmPath::Trying => {
                    let limit = self.config.limits.handshake;
                    let fetched = within(&self.shard, limit, self.fetch_pool(session)).await;
                    let fetched = fetched.unwrap_or_else(|| Err("no answer in time".into()));
                    match fetched {
                        Ok(()) => {}
                        Err(reason) if self.config.transport == TransportChoice::Shm => {
                            self.events.path(&session.peer.node_id, "", &reason);
                            pause = (pause * 2).min(Duration::from_secs(1));
                            self.shard.sleep(jitter(pause)).await;
                        }
                        Err(reason) => self.fall_back(session, &reason),
                    }
                }
                ShmPath::Off if session.rdma.phase.get() != RdmaPhase::Off => {
                    self.rdma_loop(session).await;
                }
                ShmPath::Off | ShmPath::Open(_) => {
                    self.check_pull_path(session);
                    let until = self.hub.now().after(PATH_LOOK);
                    match session.path_bell.wait(until).await {
                        Woken::Rung | Woken::Deadline => {}
                        Woken::NoSlot => self.shard.sleep(PATH_LOOK).await,
                    }
                }
            }
        }
    }

    /// Has the peer's pool handed over, maps it, and opens the session's copy queue.
    async fn fetch_pool(&self, session: &Session) -> Result<(), String> {
        let Some(pages) = &self.pages else {
            return Err("this node has no pages".into());
        };
        let offer = &session.peer.shm;
        let text = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
        let failed = "cannot reach the peer's socket";
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)
            .map_err(text(failed))?;
        socket.set_nonblocking(true).map_err(text(failed))?;
        let address =
            socket2::SockAddr::unix(format!("\0{}", offer.socket)).map_err(text(failed))?;
        socket.connect(&address).map_err(text(failed))?;
        let (user, own) = (
            peer_uid(socket.as_raw_fd()).map_err(text(failed))?,
            own_uid(),
        );
        if user != own {
            return Err(format!("the peer runs as user {user}, this node as {own}"));
        }
        let lane = match session.we_dialled {
            true => LANE_DIALLER_MAPS,
            false => LANE_ACCEPTOR_MAPS,
        };
        let count = session.next_count(lane);
        let target = session.peer.incarnation;
        let open = session.channel.borrow().data_open(target, lane, count);
        let first = plain(&Frame::DataOpen(open.clone()));
        let sent = socket
            .send(&first)
            .map_err(text("cannot ask for the pool"))?;
        if sent != first.len() {
            return Err("cannot ask for the pool: the socket is full".into());
        }
        let mut answer = [0; ANSWER_BYTES];
        let message = loop {
            match receive_descriptor(socket.as_raw_fd(), &mut answer) {
                Ok(message) => break message,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.shard.sleep(ANSWER_LOOK).await;
                }
                Err(error) => return Err(format!("no answer about the pool: {error}")),
            }
        };
        if message.count != ANSWER_BYTES {
            return Err("the peer refused to hand its pool over".into());
        }
        let genuine = match open_plain(&answer[4..]) {
            Ok(Frame::DataAccepted(proof)) => {
                let channel = session.channel.borrow();
                channel.data_accept_is_genuine(&open, &proof)
            }
            Ok(_) | Err(_) => false,
        };
        let descriptor = message.descriptor.filter(|_| genuine);
        let descriptor = descriptor.ok_or("the answer is not the session's peer's")?;
        let expected = ExpectedPool {
            nonce: offer.nonce,
            page_bytes: self.config.page_bytes,
            uid: own,
        };
        let shared = SharedPool::map(descriptor, &expected)
            .map_err(|refusal| format!("the peer's pool cannot be mapped: {refusal}"))?;
        let channel = self
            .hub
            .open_channel(ChannelKind::SharedMemory, pages.shm_source, RING_POSTS)
            .map_err(|error| error.to_string())?;
        let stream = std::os::unix::net::UnixStream::from(std::os::fd::OwnedFd::from(socket));
        let added = pages
            .shm
            .borrow_mut()
            .inner_mut()
            .add_channel(channel, stream, shared);
        if let Err(error) = added {
            self.hub.close_channel(channel);
            return Err(error.to_string());
        }
        session.shm_path.set(ShmPath::Open(channel));
        self.count(|counters| counters.pools_mapped += 1);
        self.hub.ring();
        self.events.path(&session.peer.node_id, "shm", "");
        session.pump(self);
        Ok(())
    }

    /// The socket of a hand-over has ended, or it failed: TCP for the rest of the session. With
    /// `--transport shm` the hand-over is tried again instead.
    pub(super) fn fall_back(&self, session: &Session, reason: &str) {
        let next = match self.config.transport {
            TransportChoice::Shm => ShmPath::Trying,
            TransportChoice::Auto | TransportChoice::Tcp | TransportChoice::Rdma => ShmPath::Off,
        };
        self.leave_shm(session, next, reason);
    }

    fn leave_shm(&self, session: &Session, next: ShmPath, reason: &str) {
        match session.shm_path.replace(next) {
            ShmPath::Off | ShmPath::Trying => {}
            ShmPath::Open(channel) => self.hub.close_channel(channel),
        }
        self.count(|counters| counters.path_fallbacks += 1);
        session.fallbacks.set(session.fallbacks.get() + 1);
        let path = match session.tcp_out.get() {
            true => "",
            false => "tcp",
        };
        self.events.path(&session.peer.node_id, path, reason);
        session.path_bell.ring();
        session.pump(self);
    }

    /// A page did not match its checksum (the attempt has failed by that). After the second time
    /// the way it came by is out of use for the rest of the session; when it was the last one,
    /// the session ends and is made anew.
    pub(super) fn mismatched(&self, session: &Session) {
        self.count(|counters| counters.checksum_mismatches += 1);
        session
            .mismatches_seen
            .set(session.mismatches_seen.get() + 1);
        let seen = session.mismatches.get() + 1;
        session.mismatches.set(seen);
        if seen < self.config.limits.mismatches_max {
            return;
        }
        session.mismatches.set(0);
        let reason = format!("{seen} pages did not match their checksums");
        self.count(|counters| counters.paths_out_of_use += 1);
        match session.shm_path.get() {
            ShmPath::Open(_) | ShmPath::Trying => self.leave_shm(session, ShmPath::Off, &reason),
            ShmPath::Off if session.rdma.phase.get() != RdmaPhase::Off => {
                self.leave_rdma(session, &reason);
                if session.tcp_out.get() {
                    // As below: a new session probes anew.
                    session.request_end(RefuseReason::Violation, false);
                }
            }
            ShmPath::Off => {
                session.tcp_out.set(true);
                self.events.path(&session.peer.node_id, "", &reason);
                // No way is left. A new session probes them anew (PROTOCOL X1), so that the pair
                // works again within one back-off once the fault has stopped (I11).
                session.request_end(RefuseReason::Violation, false);
            }
        }
    }

    /// Where pages of a lease lie, for a live attempt of this session.
    pub(super) fn on_places(
        &self,
        session: &Session,
        id: AttemptId,
        lease: u64,
        first: u32,
        places: &[(u32, u64)],
    ) {
        let attempt = session.attempts.borrow().get(&id).cloned();
        let granted = attempt.as_ref().and_then(|attempt| attempt.lease_granted());
        let epoch = match granted {
            Some((number, epoch)) if number == lease => epoch,
            Some(_) | None => return self.count(|counters| counters.frames_stale += 1),
        };
        let places: Vec<_> = places
            .iter()
            .map(|(page, generation)| Place {
                page: *page,
                generation: *generation,
            })
            .collect();
        let (Some(pages), Some(attempt)) = (&self.pages, attempt) else {
            return;
        };
        let first = first as usize;
        let learnt = match session.shm_path.get() {
            ShmPath::Open(channel) => {
                attempt.learnt.set(Some((channel, lease)));
                let mut shm = pages.shm.borrow_mut();
                shm.inner_mut()
                    .learn_lease(channel, lease, epoch, first, &places)
            }
            ShmPath::Trying | ShmPath::Off => session.rdma.learn(lease, epoch, first, &places),
        };
        match learnt {
            Ok(()) => {}
            // A frame was lost, or the channel is over: reads of what is missing fail by
            // themselves.
            Err(LearnError::Gap(..) | LearnError::NotConnected) => {}
            Err(LearnError::Page(..) | LearnError::TooMany(_)) => {
                session.request_end(RefuseReason::Violation, false);
            }
        }
    }
}

// ---- the side that serves -----------------------------------------------------------------

/// Hands the pool over to peers that ask for it, until the hub is stopped.
pub(super) async fn hand_over_loop(inner: Rc<Inner>, listener: UnixListener) {
    while !inner.stopped.get() {
        // Bounded, so that a stopped hub lets its name go.
        let accepted = within(&inner.shard, Duration::from_millis(200), listener.accept()).await;
        match accepted {
            None => {}
            Some(Err(_)) => inner.shard.sleep(Duration::from_millis(20)).await,
            Some(Ok(stream)) => {
                if inner.half_open.get() >= inner.config.limits.half_open_max {
                    inner.count(|counters| counters.half_open_refused += 1);
                    continue; // dropping the stream closes it
                }
                inner.half_open.set(inner.half_open.get() + 1);
                let shard = inner.shard.clone();
                shard.spawn(hand_over(inner.clone(), stream)).detach();
            }
        }
    }
}

async fn hand_over(inner: Rc<Inner>, stream: UnixStream) {
    let limit = inner.config.limits.handshake;
    let given = within(&inner.shard, limit, inner.give_pool(&stream)).await;
    inner.half_open.set(inner.half_open.get() - 1);
    let Some(Some(session)) = given else {
        return inner.count(|counters| counters.pools_refused += 1);
    };
    inner.count(|counters| counters.pools_given += 1);
    session.maps_served.set(session.maps_served.get() + 1);
    // Open for as long as the session: the peer takes its end for ours.
    let mut byte = [0];
    while session.is_live() {
        match within(&inner.shard, PATH_LOOK, stream.read(&mut byte)).await {
            None => {}
            Some(_) => break, // it has ended, or talks unasked
        }
    }
    session.maps_served.set(session.maps_served.get() - 1);
}

impl Inner {
    /// Takes one request for the pool; `None` when it is not a peer's.
    async fn give_pool(&self, stream: &UnixStream) -> Option<Rc<Session>> {
        // Before a byte is read: other users get nothing at all.
        if peer_uid(stream.as_raw_fd()).ok()? != own_uid() {
            return None;
        }
        let mut frames = FrameStream::new();
        let first = next_frame(stream, &mut frames).await.ok()?;
        let Ok(Frame::DataOpen(open)) = open_plain(&first) else {
            return None;
        };
        if !frames.rest().is_empty() {
            return None;
        }
        let session = self.session_of_map(&open)?;
        let lane = open.lane as usize;
        let mut counts = session.data_count.get();
        if open.count <= counts[lane] {
            return None; // a token serves once
        }
        counts[lane] = open.count;
        session.data_count.set(counts);
        let pool = self.pages.as_ref()?.pool.memfd_raw()?;
        let proof = session.channel.borrow().data_accept(&open);
        let answer = plain(&Frame::DataAccepted(proof));
        send_descriptor(stream.as_raw_fd(), &answer, pool).ok()?;
        Some(session)
    }

    /// The live session whose peer may map this node's pool by that request.
    fn session_of_map(&self, open: &DataOpen) -> Option<Rc<Session>> {
        self.live_sessions().into_iter().find(|session| {
            let lane = match session.we_dialled {
                true => LANE_ACCEPTOR_MAPS,
                false => LANE_DIALLER_MAPS,
            };
            session.is_live()
                && open.lane == lane
                && session.peer.incarnation == open.opener
                && self.config.incarnation == open.target
                && session.peer.role.pulls()
                && self.config.role.serves()
                && session.channel.borrow().data_open_is_genuine(open)
        })
    }

    /// Tells a peer that has mapped the pool where a fresh lease's pages lie.
    pub(super) fn send_places(
        &self,
        session: &Session,
        id: AttemptId,
        lease: u64,
        leased: &[PageId],
    ) {
        let Some(pages) = &self.pages else {
            return;
        };
        if session.maps_served.get() == 0 && !session.rdma.is_served() {
            return;
        }
        let mut first = 0;
        for chunk in leased.chunks(PLACES_PER_FRAME_MAX) {
            let places = chunk
                .iter()
                .map(|page| (page.0, pages.pool.generation(*page)))
                .collect();
            session.send(
                self,
                &Frame::Places {
                    id,
                    lease,
                    first,
                    places,
                },
            );
            first += chunk.len() as u32;
        }
    }
}
