//! The mutual handshake, both sides (PROTOCOL S1, S2). Sans-IO.
//!
//! The acceptor proves itself only to a dialler that has proven itself; the labels in the two
//! proofs differ, so neither can be reflected. `Hello` travels sealed, and a session is up only
//! when each side has welcomed the other's.

use super::frame::{
    Challenge, FEATURE_RDMA, FEATURES_EQUAL, Frame, Hello, LEASE_PAGES_MAX, PROTOCOL_MAX,
    PROTOCOL_MIN, REASON_TEXT_BYTES_MAX, RefuseReason, Role, ShmOffer,
};
use super::seal::{self, PeerKey, SealedChannel, WireError};

/// What a node says of itself.
#[derive(Clone, Debug)]
pub struct LocalNode {
    /// Its id, at most 255 bytes.
    pub node_id: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its role.
    pub role: Role,
    /// Which model, which weights.
    pub fingerprint: u64,
    /// [`crate::KvLayout::hash`].
    pub layout_hash: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Base URL of its API.
    pub api_url: String,
    /// See [`Hello::features`].
    pub features: u64,
    /// Whether and where a peer on this host may map its pool.
    pub shm: ShmOffer,
}

impl LocalNode {
    fn hello(&self) -> Hello {
        Hello {
            features: self.features,
            fingerprint: self.fingerprint,
            layout_hash: self.layout_hash,
            page_bytes: self.page_bytes,
            lease_pages_max: LEASE_PAGES_MAX as u32,
            api_url: self.api_url.clone(),
            shm: self.shm.clone(),
        }
    }
}

/// Who the other side has proven to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Its id.
    pub node_id: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its role.
    pub role: Role,
    /// Base URL of its API.
    pub api_url: String,
    /// Most pages a lease may have on it.
    pub lease_pages_max: u32,
    /// Whether and where its pool may be mapped.
    pub shm: ShmOffer,
    /// Whether its pool can be read by RDMA.
    pub rdma: bool,
}

/// Why a handshake failed, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub reason: RefuseReason,
    /// What was wrong, for the log.
    pub text: String,
    /// Whether the peer said so (else we did).
    pub by_peer: bool,
}

impl Refusal {
    /// A refusal of ours.
    pub fn ours(reason: RefuseReason, text: impl Into<String>) -> Self {
        let mut text: String = text.into();
        let mut cut = text.len().min(REASON_TEXT_BYTES_MAX);
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        text.truncate(cut);
        Refusal {
            reason,
            text,
            by_peer: false,
        }
    }
}

/// What a frame led to.
#[derive(Debug)]
pub enum Step {
    /// Send these bytes (perhaps none) and go on; `trusted`: the peer has proven the key.
    Continue {
        /// To be sent.
        send: Vec<u8>,
        /// Larger frames may be taken from now on.
        trusted: bool,
    },
    /// The session is up.
    Up {
        /// Keys and sequence numbers to go on with.
        channel: SealedChannel,
        /// Who it is.
        peer: PeerIdentity,
    },
    /// It is not coming about; send these bytes, log, close.
    Refused {
        /// To be sent, may be empty.
        send: Vec<u8>,
        /// Why.
        refusal: Refusal,
    },
}

enum State {
    AwaitChallenge,
    AwaitProof {
        theirs: Challenge,
    },
    AwaitHello {
        theirs: Challenge,
        channel: SealedChannel,
    },
    AwaitWelcome {
        peer: PeerIdentity,
        channel: SealedChannel,
    },
    Ended,
}

/// One handshake.
pub struct Handshake {
    local: LocalNode,
    key: PeerKey,
    dialler: bool,
    ours: Challenge,
    state: State,
}

impl Handshake {
    /// The dialling side; returns the bytes to send first. `nonce` must be fresh and random.
    pub fn dial(local: LocalNode, key: PeerKey, nonce: [u8; 32]) -> (Self, Vec<u8>) {
        let handshake = Self::new(local, key, nonce, true);
        let first = seal::plain(&Frame::Challenge(handshake.ours.clone()));
        (handshake, first)
    }

    /// The accepting side. `nonce` must be fresh and random.
    pub fn accept(local: LocalNode, key: PeerKey, nonce: [u8; 32]) -> Self {
        Self::new(local, key, nonce, false)
    }

    fn new(local: LocalNode, key: PeerKey, nonce: [u8; 32], dialler: bool) -> Self {
        let ours = Challenge {
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            nonce,
            node_id: local.node_id.clone(),
            incarnation: local.incarnation,
            role: local.role,
        };
        Handshake {
            local,
            key,
            dialler,
            ours,
            state: State::AwaitChallenge,
        }
    }

    /// Takes one frame (without its length word). `admit` is asked once, about a peer that has
    /// proven the key and matches; it decides about duplicates and superseded nodes.
    pub fn on_frame(
        &mut self,
        bytes: &[u8],
        admit: &mut dyn FnMut(&PeerIdentity) -> Result<(), Refusal>,
    ) -> Step {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::AwaitChallenge => match self.plain(bytes) {
                Ok(Frame::Challenge(theirs)) => self.on_challenge(theirs),
                Ok(other) => self.unexpected(&other, None),
                Err(refusal) => refused_plain(refusal),
            },
            State::AwaitProof { theirs } => match self.plain(bytes) {
                Ok(Frame::Proof(proof)) => self.on_proof(theirs, &proof),
                Ok(other) => self.unexpected(&other, None),
                Err(refusal) => refused_plain(refusal),
            },
            State::AwaitHello {
                theirs,
                mut channel,
            } => match sealed(&mut channel, bytes) {
                Ok(Frame::Hello(hello)) => self.on_hello(theirs, hello, channel, admit),
                Ok(other) => self.unexpected(&other, Some(channel)),
                Err(refusal) => refused_sealed(refusal, &mut channel),
            },
            State::AwaitWelcome { peer, mut channel } => match sealed(&mut channel, bytes) {
                Ok(Frame::Welcome) => Step::Up { channel, peer },
                Ok(other) => self.unexpected(&other, Some(channel)),
                Err(refusal) => refused_sealed(refusal, &mut channel),
            },
            State::Ended => Step::Refused {
                send: Vec::new(),
                refusal: Refusal::ours(RefuseReason::Violation, "a frame after the end"),
            },
        }
    }

    /// Gives the handshake up (its time is over); the bytes to send.
    pub fn abandon(&mut self, refusal: &Refusal) -> Vec<u8> {
        let frame = Frame::Refused {
            reason: refusal.reason,
            text: refusal.text.clone(),
        };
        match std::mem::replace(&mut self.state, State::Ended) {
            State::AwaitChallenge | State::AwaitProof { .. } => seal::plain(&frame),
            State::AwaitHello { mut channel, .. } | State::AwaitWelcome { mut channel, .. } => {
                channel.seal(&frame)
            }
            State::Ended => Vec::new(),
        }
    }

    fn plain(&self, bytes: &[u8]) -> Result<Frame, Refusal> {
        match seal::open_plain(bytes) {
            Ok(Frame::Refused { reason, text }) => Err(Refusal {
                reason,
                text,
                by_peer: true,
            }),
            Ok(frame) => Ok(frame),
            Err(error) => Err(violation(error)),
        }
    }

    fn unexpected(&self, frame: &Frame, channel: Option<SealedChannel>) -> Step {
        let refusal = Refusal::ours(
            RefuseReason::Violation,
            format!("frame kind {} has no place in the handshake", frame.kind()),
        );
        match channel {
            Some(mut channel) => refused_sealed(refusal, &mut channel),
            None => refused_plain(refusal),
        }
    }

    fn on_challenge(&mut self, theirs: Challenge) -> Step {
        if theirs.protocol_max < PROTOCOL_MIN || theirs.protocol_min > PROTOCOL_MAX {
            return refused_plain(Refusal::ours(
                RefuseReason::ProtocolRange,
                format!(
                    "peer `{}` speaks protocol {} to {}, this node {PROTOCOL_MIN} to {PROTOCOL_MAX}",
                    theirs.node_id, theirs.protocol_min, theirs.protocol_max
                ),
            ));
        }
        if theirs.node_id == self.local.node_id || theirs.nonce == self.ours.nonce {
            return refused_plain(Refusal::ours(
                RefuseReason::SameNode,
                format!(
                    "both ends are `{}`: a node dialled itself, or two nodes share one --node-id",
                    theirs.node_id
                ),
            ));
        }
        let send = if self.dialler {
            seal::plain(&Frame::Proof(self.proof(true, &theirs)))
        } else {
            seal::plain(&Frame::Challenge(self.ours.clone()))
        };
        self.state = State::AwaitProof { theirs };
        Step::Continue {
            send,
            trusted: false,
        }
    }

    fn on_proof(&mut self, theirs: Challenge, proof: &[u8; 32]) -> Step {
        let transcript = self.transcript(&theirs);
        let genuine = self
            .key
            .verify(&[proof_label(!self.dialler), &transcript], proof);
        if !genuine {
            return refused_plain(Refusal::ours(
                RefuseReason::BadProof,
                format!(
                    "`{}` and `{}` do not hold the same peer key",
                    theirs.node_id, self.local.node_id
                ),
            ));
        }
        let mut channel =
            SealedChannel::new(&self.key, &transcript, self.dialler, self.local.incarnation);
        let mut send = Vec::new();
        if !self.dialler {
            send = seal::plain(&Frame::Proof(self.proof(false, &theirs)));
        }
        send.extend(channel.seal(&Frame::Hello(self.local.hello())));
        self.state = State::AwaitHello { theirs, channel };
        Step::Continue {
            send,
            trusted: true,
        }
    }

    fn on_hello(
        &mut self,
        theirs: Challenge,
        hello: Hello,
        mut channel: SealedChannel,
        admit: &mut dyn FnMut(&PeerIdentity) -> Result<(), Refusal>,
    ) -> Step {
        let peer = PeerIdentity {
            node_id: theirs.node_id.clone(),
            incarnation: theirs.incarnation,
            role: theirs.role,
            api_url: hello.api_url.clone(),
            lease_pages_max: hello.lease_pages_max,
            shm: hello.shm.clone(),
            rdma: hello.features & FEATURE_RDMA != 0,
        };
        let verdict = self.compare(&theirs, &hello).and_then(|()| admit(&peer));
        if let Err(refusal) = verdict {
            return refused_sealed(refusal, &mut channel);
        }
        let send = channel.seal(&Frame::Welcome);
        self.state = State::AwaitWelcome { peer, channel };
        Step::Continue {
            send,
            trusted: true,
        }
    }

    fn compare(&self, theirs: &Challenge, hello: &Hello) -> Result<(), Refusal> {
        if !self.local.role.has_pages() || !theirs.role.has_pages() {
            return Ok(());
        }
        let (us, them) = (&self.local.node_id, &theirs.node_id);
        if hello.fingerprint != self.local.fingerprint {
            return Err(Refusal::ours(
                RefuseReason::Fingerprint,
                format!(
                    "models differ: `{us}` {:016x}, `{them}` {:016x}; give both the same MODEL",
                    self.local.fingerprint, hello.fingerprint
                ),
            ));
        }
        if hello.layout_hash != self.local.layout_hash {
            return Err(Refusal::ours(
                RefuseReason::Layout,
                format!(
                    "KV layouts differ: `{us}` {:016x}, `{them}` {:016x}; give both the same \
                     --dtype and the same kind of processor",
                    self.local.layout_hash, hello.layout_hash
                ),
            ));
        }
        if hello.page_bytes != self.local.page_bytes {
            return Err(Refusal::ours(
                RefuseReason::PageBytes,
                format!(
                    "page sizes differ: `{us}` {} bytes, `{them}` {} bytes",
                    self.local.page_bytes, hello.page_bytes
                ),
            ));
        }
        let (ours, theirs) = (
            self.local.features & FEATURES_EQUAL,
            hello.features & FEATURES_EQUAL,
        );
        if ours != theirs {
            return Err(Refusal::ours(
                RefuseReason::Settings,
                format!(
                    "settings differ: `{us}` {ours:#x}, `{them}` {theirs:#x}; give both the same \
                     checksum mode"
                ),
            ));
        }
        Ok(())
    }

    fn proof(&self, by_dialler: bool, theirs: &Challenge) -> [u8; 32] {
        self.key
            .mac(&[proof_label(by_dialler), &self.transcript(theirs)])
    }

    /// One hash over both challenges, the dialler's first. Keyed, so that it needs no second
    /// hash function; ids are length-prefixed.
    fn transcript(&self, theirs: &Challenge) -> [u8; 32] {
        let (first, second) = if self.dialler {
            (&self.ours, theirs)
        } else {
            (theirs, &self.ours)
        };
        let mut bytes = Vec::with_capacity(128);
        Frame::Challenge(first.clone()).encode(&mut bytes);
        Frame::Challenge(second.clone()).encode(&mut bytes);
        self.key.mac(&[b"kvserve transcript 1", &bytes])
    }
}

fn proof_label(by_dialler: bool) -> &'static [u8] {
    if by_dialler {
        b"kvserve proof of the dialler "
    } else {
        b"kvserve proof of the acceptor"
    }
}

fn sealed(channel: &mut SealedChannel, bytes: &[u8]) -> Result<Frame, Refusal> {
    match channel.open(bytes).map(|opened| opened.frame) {
        Ok(Frame::Refused { reason, text }) => Err(Refusal {
            reason,
            text,
            by_peer: true,
        }),
        Ok(frame) => Ok(frame),
        Err(error) => Err(violation(error)),
    }
}

fn violation(error: WireError) -> Refusal {
    Refusal::ours(RefuseReason::Violation, error.to_string())
}

fn refused_plain(refusal: Refusal) -> Step {
    let send = answer(&refusal).map_or_else(Vec::new, |frame| seal::plain(&frame));
    Step::Refused { send, refusal }
}

fn refused_sealed(refusal: Refusal, channel: &mut SealedChannel) -> Step {
    let send = answer(&refusal).map_or_else(Vec::new, |frame| channel.seal(&frame));
    Step::Refused { send, refusal }
}

/// A peer that refused us needs no refusal back.
fn answer(refusal: &Refusal) -> Option<Frame> {
    (!refusal.by_peer).then(|| Frame::Refused {
        reason: refusal.reason,
        text: refusal.text.clone(),
    })
}
