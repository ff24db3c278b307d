//! Control connections and sessions: handshakes, and what comes in.

use super::dial::DialState;
use super::path::PullPath;
use super::{BACK_OFF, ConnId, HANDSHAKE, Incoming, LIVENESS, Node, Outgoing};
use crate::sim::check::Invariant;
use crate::sim::context::Context;
use crate::sim::model::PAGE_BYTES;
use kvserve_kv::ChecksumMode;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::session::handshake::Refusal;
use kvserve_kv::session::{
    AttemptId, FrameStream, Handshake, Liveness, LocalNode, PeerIdentity, Pulse, RefuseReason,
    SealedChannel, ShmOffer, Step,
};
use kvserve_runtime::Nanos;
use std::collections::BTreeSet;

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
/// A live session.
pub struct Session {
    pub number: PeerSession,
    pub identity: PeerIdentity,
    /// Place of the peer in the cluster; known to the dialler.
    pub peer: Option<usize>,
    pub conn: ConnId,
    pub(super) channel: SealedChannel,
    pub(super) liveness: Liveness,
    pub ended: bool,
    pub path: PullPath,
    pub(super) data_count: u64,
    pub grant_highest: u64,
    pub(super) renewed_at: Nanos,
    pub(super) listed: BTreeSet<(AttemptId, u64)>,
}

impl Session {
    /// Whether a pull from the peer could start now.
    pub fn can_pull(&self) -> bool {
        let open = matches!(self.path, PullPath::Open(..));
        open && !self.ended && self.liveness.pulse() == Pulse::Alive
    }
}

impl Node {
    pub(super) fn local(&self) -> LocalNode {
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

    pub(super) fn shake(&mut self, conn: ConnId, handshake: Handshake, dialled: Option<usize>) {
        let line = Line::Shaking {
            handshake: Box::new(handshake),
            frames: FrameStream::new(),
            by: self.turned_at.after(HANDSHAKE),
            dialled,
            tampered: false,
        };
        self.lines.insert(conn, line);
    }

    pub(super) fn send_bytes(&mut self, conn: ConnId, bytes: Vec<u8>, idle: bool) {
        if !bytes.is_empty() {
            self.out.push(Outgoing::Bytes { conn, bytes, idle });
        }
    }

    pub(super) fn read_bytes(
        &mut self,
        context: &mut Context,
        conn: ConnId,
        bytes: &[u8],
        bent: bool,
    ) {
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
    pub(super) fn shake_on(
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

    pub(super) fn shake_failed(
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

    pub(super) fn session_of(&self, node_id: &str) -> Option<&Session> {
        let of = |session: &&Session| !session.ended && session.identity.node_id == node_id;
        self.sessions.values().rev().find(of)
    }

    pub(super) fn admit(&self, peer: &PeerIdentity, we_dialled: bool) -> Result<(), Refusal> {
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

    pub(super) fn register(
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
        };
        self.sessions.insert(number, session);
        Ok(number)
    }
}

fn nonce(context: &mut Context) -> [u8; 32] {
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&context.rng.bits().to_le_bytes());
    }
    bytes
}
