//! A peer made of a plain socket: it speaks the protocol with the right key and then says what a
//! test wants, true or not.

use super::node::KEY;
use kvserve_kv::session::frame::{FRAME_BYTES_MAX, Frame, RefuseReason, ShmOffer};
use kvserve_kv::session::handshake::Refusal;
use kvserve_kv::session::seal::{FrameStream, open_plain, plain};
use kvserve_kv::session::{Handshake, LocalNode, PeerIdentity, PeerKey, Role, SealedChannel, Step};
use kvserve_kv::transport::tcp::wire::{ANSWER_BYTES, AnswerHead, REQUEST_BYTES, ReadRequest};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How long anything of these peers waits: a liveness bound.
const PATIENCE: Duration = Duration::from_secs(10);

/// Between two heartbeats, as real nodes send them.
const HEARTBEAT: Duration = Duration::from_millis(150);

/// What must match before two nodes exchange pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub fingerprint: u64,
    pub layout_hash: u64,
    pub page_bytes: u64,
    pub features: u64,
}

/// Life numbers of these peers: later than those of anything started before.
pub fn incarnation() -> u64 {
    kvserve_kv::peer::fresh_incarnation().expect("an incarnation")
}

impl Identity {
    pub fn local(self, node_id: &str, role: Role, api_url: &str) -> LocalNode {
        LocalNode {
            node_id: node_id.into(),
            incarnation: incarnation(),
            role,
            fingerprint: self.fingerprint,
            layout_hash: self.layout_hash,
            page_bytes: self.page_bytes,
            api_url: api_url.into(),
            features: self.features,
            // These peers have no pool to map.
            shm: ShmOffer::default(),
        }
    }
}

/// What nodes of the tiny model say of themselves, learned from one of them: each mismatch is
/// refused with both values in the reason's text.
pub fn identity_of(peer: SocketAddr) -> Identity {
    static KNOWN: OnceLock<Identity> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let mut identity = Identity::default();
        for _ in 0..5 {
            let local = identity.local("asker", Role::Decode, "");
            let refusal = match PeerEnd::dial(peer, local) {
                Ok(_) => return identity,
                Err(refusal) => refusal,
            };
            let text = &refusal.text;
            let parts: Vec<_> = text.split('`').collect();
            let value = |place: usize| {
                let word = parts[place + 1].trim_start().split([',', ';', ' ']).next();
                word.expect("a value").to_string()
            };
            let theirs = if parts[1] == "asker" {
                value(3)
            } else {
                value(1)
            };
            let hex = || u64::from_str_radix(theirs.trim_start_matches("0x"), 16).expect("hex");
            match refusal.reason {
                RefuseReason::Fingerprint => identity.fingerprint = hex(),
                RefuseReason::Layout => identity.layout_hash = hex(),
                RefuseReason::PageBytes => identity.page_bytes = theirs.parse().expect("bytes"),
                RefuseReason::Settings => identity.features = hex(),
                other => panic!("refused for {other:?}: {text}"),
            }
        }
        panic!("no node refuses more than four things")
    })
}

/// One end of a session that is up.
pub struct PeerEnd {
    stream: TcpStream,
    frames: FrameStream,
    pub channel: Arc<Mutex<SealedChannel>>,
    pub peer: PeerIdentity,
    /// Our own life.
    pub incarnation: u64,
    address: SocketAddr,
    beat: Instant,
    data_count: u64,
}

fn gone(what: impl std::fmt::Display) -> Refusal {
    Refusal {
        reason: RefuseReason::Disconnected,
        text: what.to_string(),
        by_peer: true,
    }
}

fn read_frame(stream: &mut TcpStream, frames: &mut FrameStream) -> Result<Vec<u8>, Refusal> {
    let mut buffer = [0; 4096];
    loop {
        match frames.next_frame() {
            Ok(Some(frame)) => return Ok(frame.to_vec()),
            Ok(None) => {}
            Err(error) => return Err(gone(error)),
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(gone("closed")),
            Ok(count) => frames.push(&buffer[..count]),
            Err(error) => return Err(gone(error)),
        }
    }
}

impl PeerEnd {
    pub fn dial(address: SocketAddr, local: LocalNode) -> Result<PeerEnd, Refusal> {
        Self::dial_with(address, local, PeerKey::new(KEY))
    }

    pub fn dial_with(
        address: SocketAddr,
        local: LocalNode,
        key: PeerKey,
    ) -> Result<PeerEnd, Refusal> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(gone)?;
        let incarnation = local.incarnation;
        let nonce = kvserve_kv::peer::fresh_key().map_err(gone)?;
        let (handshake, first) = Handshake::dial(local, key, nonce);
        stream.write_all(&first).map_err(gone)?;
        Self::shake(stream, FrameStream::new(), handshake, incarnation, address)
    }

    /// Answers a dialler whose first frame has come.
    fn accept(stream: TcpStream, first: &[u8], local: LocalNode) -> Result<PeerEnd, Refusal> {
        let address = stream.peer_addr().map_err(gone)?;
        let incarnation = local.incarnation;
        let nonce = kvserve_kv::peer::fresh_key().map_err(gone)?;
        let mut handshake = Handshake::accept(local, PeerKey::new(KEY), nonce);
        let mut stream = stream;
        match handshake.on_frame(first, &mut |_| Ok(())) {
            Step::Continue { send, .. } => stream.write_all(&send).map_err(gone)?,
            Step::Refused { refusal, .. } => return Err(refusal),
            Step::Up { .. } => return Err(gone("up after one frame")),
        }
        Self::shake(stream, FrameStream::new(), handshake, incarnation, address)
    }

    fn shake(
        mut stream: TcpStream,
        mut frames: FrameStream,
        mut handshake: Handshake,
        incarnation: u64,
        address: SocketAddr,
    ) -> Result<PeerEnd, Refusal> {
        stream.set_read_timeout(Some(PATIENCE)).map_err(gone)?;
        stream.set_nodelay(true).map_err(gone)?;
        loop {
            let frame = read_frame(&mut stream, &mut frames)?;
            match handshake.on_frame(&frame, &mut |_| Ok(())) {
                Step::Continue { send, trusted } => {
                    if trusted {
                        frames.trust();
                    }
                    stream.write_all(&send).map_err(gone)?;
                }
                Step::Up { channel, peer } => {
                    frames.trust();
                    return Ok(PeerEnd {
                        stream,
                        frames,
                        channel: Arc::new(Mutex::new(channel)),
                        peer,
                        incarnation,
                        address,
                        beat: Instant::now(),
                        data_count: 0,
                    });
                }
                Step::Refused { send, refusal } => {
                    // Told or not, it is over.
                    let _ = stream.write_all(&send);
                    return Err(refusal);
                }
            }
        }
    }

    /// Sends a frame, rightly sealed. False when the peer has closed.
    pub fn send(&mut self, frame: &Frame) -> bool {
        let bytes = self.channel.lock().expect("channel").seal(frame);
        self.send_bytes(&bytes)
    }

    /// Sends bytes as they are.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// The next frame but heartbeats, which this end goes on sending; `None` when the peer closes
    /// or nothing comes within `limit`.
    pub fn next(&mut self, limit: Duration) -> Option<Frame> {
        let end = Instant::now() + limit;
        self.stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .ok()?;
        let mut buffer = vec![0; 64 * 1024];
        while Instant::now() < end {
            if self.beat.elapsed() > HEARTBEAT {
                self.beat = Instant::now();
                self.send(&Frame::Heartbeat);
            }
            while let Some(frame) = self.frames.next_frame().ok()? {
                let opened = self.channel.lock().expect("channel").open(frame).ok()?;
                if opened.frame != Frame::Heartbeat {
                    return Some(opened.frame);
                }
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.frames.push(&buffer[..count]),
                Err(error) if retry(&error) => {}
                Err(_) => return None,
            }
        }
        None
    }

    /// The next frame that `pick` takes; others are passed over.
    pub fn wait_for<T>(&mut self, what: &str, mut pick: impl FnMut(Frame) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            match self.next(end - Instant::now()) {
                Some(frame) => {
                    if let Some(value) = pick(frame) {
                        return value;
                    }
                }
                None => break,
            }
        }
        panic!("no {what} came from {}", self.peer.node_id);
    }

    /// Keeps the session alive for a while; what comes meanwhile is given.
    pub fn stay(&mut self, span: Duration) -> Vec<Frame> {
        let end = Instant::now() + span;
        let mut heard = Vec::new();
        while Instant::now() < end {
            match self.next(end - Instant::now()) {
                Some(frame) => heard.push(frame),
                None => break,
            }
        }
        heard
    }

    /// Whether the peer ends the session within `limit`.
    pub fn is_ended(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            match self.next(Duration::from_millis(100)) {
                Some(Frame::Bye { .. } | Frame::Refused { .. }) => return true,
                Some(_) => {}
                None => {
                    let mut byte = [0];
                    match self.stream.read(&mut byte) {
                        Ok(0) => return true,
                        Err(error) if retry(&error) => {}
                        Ok(_) => {}
                        Err(_) => return true,
                    }
                }
            }
        }
        false
    }

    /// As the session's dialler, opens a data connection to pull over.
    pub fn open_data(&mut self) -> Option<DataEnd> {
        self.data_count += 1;
        let open = self.channel.lock().expect("channel").data_open(
            self.peer.incarnation,
            0,
            self.data_count,
        );
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream
            .write_all(&plain(&Frame::DataOpen(open.clone())))
            .ok()?;
        let mut answer = [0; 37];
        stream.read_exact(&mut answer).ok()?;
        let Ok(Frame::DataAccepted(proof)) = open_plain(&answer[4..]) else {
            return None;
        };
        let channel = self.channel.lock().expect("channel");
        channel
            .data_accept_is_genuine(&open, &proof)
            .then_some(DataEnd { stream })
    }
}

fn retry(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// The pulling end of a data connection.
pub struct DataEnd {
    pub stream: TcpStream,
}

impl DataEnd {
    /// Reads pages: their bytes, or the code of the refusal. `None` when the peer closed.
    pub fn read(&mut self, request: &ReadRequest) -> Option<Result<Vec<u8>, u32>> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        self.stream.write_all(&bytes).ok()?;
        let mut head = [0; ANSWER_BYTES];
        self.stream.read_exact(&mut head).ok()?;
        let head = AnswerHead::decode(&head).ok()?;
        if head.code != 0 {
            return Some(Err(head.code));
        }
        let mut pages = vec![0; head.count as usize * head.page_bytes as usize];
        self.stream.read_exact(&mut pages).ok()?;
        Some(Ok(pages))
    }
}

/// Whether the other end closes this connection within `limit`; bytes that come are passed over.
pub fn closed_by_peer(stream: &mut TcpStream, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    let mut buffer = [0; 4096];
    if stream
        .set_read_timeout(Some(Duration::from_millis(50)))
        .is_err()
    {
        return true;
    }
    while Instant::now() < end {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if retry(&error) => {}
            Err(_) => return true,
        }
    }
    false
}

/// A prefill node made of plain threads. Each prompt goes to `on_prompt`, which says what it
/// likes; reads are answered with pages of zeros.
pub struct Liar {
    pub address: SocketAddr,
    closed: Arc<AtomicBool>,
    /// Prompts that came.
    pub asked: Arc<AtomicU64>,
    /// Connections that came.
    pub dialled: Arc<AtomicU64>,
}

impl Liar {
    pub fn prefill(
        address: SocketAddr,
        identity: Identity,
        mut on_prompt: impl FnMut(&mut PeerEnd, Frame) + Send + 'static,
    ) -> Liar {
        let listener = TcpListener::bind(address).expect("the liar's port");
        let closed = Arc::new(AtomicBool::new(false));
        let asked = Arc::new(AtomicU64::new(0));
        let dialled = Arc::new(AtomicU64::new(0));
        let (own_closed, own_asked, own_dialled) = (closed.clone(), asked.clone(), dialled.clone());
        let local = identity.local("liar", Role::Prefill, "");
        std::thread::spawn(move || {
            let channel: Arc<Mutex<Option<Arc<Mutex<SealedChannel>>>>> = Arc::default();
            let (prompts, prompts_out) = std::sync::mpsc::channel::<PeerEnd>();
            let asked = own_asked;
            std::thread::spawn(move || {
                // One session at a time, the newest.
                for mut session in prompts_out {
                    while let Some(frame) = session.next(PATIENCE) {
                        if matches!(frame, Frame::Prefill { .. }) {
                            asked.fetch_add(1, SeqCst);
                            on_prompt(&mut session, frame);
                        }
                    }
                }
            });
            for stream in listener.incoming() {
                if own_closed.load(SeqCst) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                own_dialled.fetch_add(1, SeqCst);
                let _ = stream.set_read_timeout(Some(PATIENCE));
                let Ok(first) = read_frame(&mut stream, &mut FrameStream::new()) else {
                    continue;
                };
                if let Ok(Frame::DataOpen(open)) = open_plain(&first) {
                    if let Some(channel) = &*channel.lock().expect("channel") {
                        let proof = channel.lock().expect("channel").data_accept(&open);
                        if stream
                            .write_all(&plain(&Frame::DataAccepted(proof)))
                            .is_ok()
                        {
                            std::thread::spawn(move || serve_zeros(stream));
                        }
                    }
                } else if let Ok(end) = PeerEnd::accept(stream, &first, local.clone()) {
                    *channel.lock().expect("channel") = Some(end.channel.clone());
                    if prompts.send(end).is_err() {
                        return;
                    }
                }
            }
        });
        Liar {
            address,
            closed,
            asked,
            dialled,
        }
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.closed.store(true, SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve_zeros(mut stream: TcpStream) {
    let mut request = [0; REQUEST_BYTES];
    let _ = stream.set_read_timeout(None);
    while stream.read_exact(&mut request).is_ok() {
        let Ok(read) = ReadRequest::decode(&request) else {
            return;
        };
        let head = AnswerHead {
            code: 0,
            position: read.position,
            count: read.count,
            page_bytes: read.page_bytes,
        };
        let pages =
            vec![0; (read.count as usize * read.page_bytes as usize).min(FRAME_BYTES_MAX * 64)];
        if stream.write_all(&head.encode()).is_err() || stream.write_all(&pages).is_err() {
            return;
        }
    }
}
