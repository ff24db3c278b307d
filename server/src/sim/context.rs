//! What every part of a run shares: chance, the clients, armed faults, what was seen.

use super::check::{Invariant, Violation};
use super::coverage::Coverage;
use super::random::Rng;
use kvserve_kv::session::Frame;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};

/// Lines a failing run prints.
pub const TRACE_LINES_MAX: usize = 80;

thread_local! {
    // Where a panic hook finds them: a core's own assertion ends a run, too.
    static SEED: Cell<u64> = const { Cell::new(0) };
    static TRACE: RefCell<Option<VecDeque<String>>> = const { RefCell::new(None) };
}

/// The seed that this thread runs, and its last lines if it is traced.
pub fn running() -> (u64, Vec<String>) {
    let lines = TRACE.with_borrow(|trace| trace.iter().flatten().cloned().collect());
    (SEED.get(), lines)
}

/// How a client's request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of the right text.
    Finished,
    /// A typed error.
    Failed(&'static str),
    /// The client left.
    Left,
}

/// A client with its request, what it must get, and what it got.
#[derive(Clone, Debug)]
pub struct Client {
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Most tokens.
    pub max_tokens: u32,
    /// What it gives the request, in nanoseconds.
    pub timeout_ns: u64,
    /// By when it must have ended, on the world's clock; 0 before it was sent.
    pub until: u64,
    /// The right text.
    pub expected: Vec<u32>,
    /// Tokens told so far.
    pub told: usize,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// Sent after the faults have stopped: it must be answered.
    pub later: bool,
}

/// What a frame meets before it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// It is lost.
    Lose,
    /// It is lost, and it is the last or last but one of an attempt.
    LoseLastWord,
    /// It is sent twice.
    Double,
    /// A COMMIT names an older grant: incarnation, lease or epoch.
    StaleCommit(u8),
    /// A COMMIT that the attempt's machine did not send.
    OutOfTurn(OutOfTurn),
    /// A watermark repeats pages that were published before.
    WatermarkBack,
}

/// When a COMMIT comes out of turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfTurn {
    /// Right behind the `Prefill` frame.
    Asked,
    /// At the grant, before anything is read.
    Granted,
    /// Behind the attempt's last word.
    Stopped,
}

/// Something that happens on a node's way, so that a fault can strike just then. Attempts of a
/// decode node: the phases, and the first read. Leases of a prefill node: what the peer is told
/// and what it says.
pub const MOMENTS: &[&str] = &[
    "attempt asked",
    "attempt pulling",
    "attempt posts a read",
    "attempt posts its last read",
    "attempt committing",
    "attempt stopping",
    "attempt ended",
    "lease granted",
    "lease watermark",
    "lease complete",
    "lease aborted",
    "lease fenced",
    "lease commit heard",
];

/// What strikes at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// The node stands still for this long.
    Freeze(u64),
    /// It is killed; whether silently.
    Kill(bool),
    /// The request's client leaves.
    Leave,
    /// The node gives a lease of its own up.
    GiveUp,
    /// No word passes between the node and another for this long.
    Cut(u64),
}

/// A strike whose moment has come.
#[derive(Clone, Copy, Debug)]
pub struct Blow {
    /// The node it strikes.
    pub node: usize,
    /// The client whose request it was about, if that is known.
    pub client: Option<usize>,
    /// What.
    pub strike: Strike,
}

/// A strike that waits for its moment.
#[derive(Clone, Copy, Debug)]
pub struct Aimed {
    /// One of [`MOMENTS`].
    pub moment: &'static str,
    /// What strikes.
    pub strike: Strike,
    /// It strikes the other side, where that is known.
    pub at_peer: bool,
}

/// What sealed bytes meet on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFault {
    /// They come this much later (and what follows them, too).
    Late(u64),
    /// A bit flips.
    Corrupt,
    /// The end is missing.
    Truncate,
    /// They come twice.
    Replay,
    /// They come after what follows them.
    Reorder,
}

/// Faults that wait for their moment.
#[derive(Clone, Debug, Default)]
pub struct Armed {
    /// For frames: from which node (any if `None`), which fault.
    pub frames: Vec<(Option<usize>, FrameFault)>,
    /// For bytes on the wire.
    pub wires: Vec<WireFault>,
    /// Every frame of this node is sent twice until then.
    pub doubled: Option<(usize, u64)>,
    /// For moments.
    pub moments: Vec<Aimed>,
}

impl Armed {
    /// The fault that strikes this frame of node `from`.
    pub fn strikes(
        &mut self,
        time: u64,
        from: usize,
        frame: &Frame,
        rng: &mut Rng,
    ) -> Option<FrameFault> {
        let told = !matches!(frame, Frame::Heartbeat | Frame::Bye { .. });
        if told
            && self
                .doubled
                .is_some_and(|(node, until)| node == from && time < until)
        {
            return Some(FrameFault::Double);
        }
        if self.frames.is_empty() {
            return None;
        }
        let fits = |(node, fault): &(Option<usize>, FrameFault)| {
            let here = node.is_none_or(|node| node == from);
            here && match fault {
                FrameFault::Lose | FrameFault::Double => {
                    !matches!(frame, Frame::Heartbeat | Frame::Bye { .. })
                }
                FrameFault::LoseLastWord => {
                    matches!(frame, Frame::Cancel { .. } | Frame::Release { .. })
                }
                FrameFault::StaleCommit(_) => matches!(frame, Frame::Commit { .. }),
                FrameFault::WatermarkBack => matches!(frame, Frame::Watermark { .. }),
                FrameFault::OutOfTurn(_) => false,
            }
        };
        let place = self.frames.iter().position(fits)?;
        // So that not always the first frame is struck.
        rng.percent(60).then(|| self.frames.remove(place).1)
    }

    /// Whether node `from` sends a COMMIT out of turn now.
    pub fn commits_out_of_turn(&mut self, from: usize, when: OutOfTurn) -> bool {
        let fits = |(node, fault): &(Option<usize>, FrameFault)| {
            node.is_none_or(|node| node == from) && *fault == FrameFault::OutOfTurn(when)
        };
        let place = self.frames.iter().position(fits);
        place.map(|place| self.frames.remove(place)).is_some()
    }
}

/// See the module's text.
pub struct Context {
    /// Chance.
    pub rng: Rng,
    /// Counts.
    pub coverage: Coverage,
    /// The first invariant that broke.
    pub violation: Option<Violation>,
    /// All clients.
    pub clients: Vec<Client>,
    /// Faults that wait.
    pub armed: Armed,
    /// Strikes whose moment has come in this event.
    pub blows: Vec<Blow>,
    /// COMMITs answered OK: incarnation and lease.
    pub commits_ok: BTreeSet<(u64, u64)>,
    /// The world's time.
    pub time: u64,
    /// Events so far.
    pub events: u64,
    /// Faults that struck.
    pub faults: u64,
    /// Everything is restored: what strikes now is a bug.
    pub calm: bool,
}

impl Context {
    /// Before anything.
    pub fn new(seed: u64, traced: bool) -> Self {
        SEED.set(seed);
        TRACE.set(traced.then(VecDeque::new));
        Context {
            rng: Rng::new(seed),
            coverage: Coverage::default(),
            violation: None,
            clients: Vec::new(),
            armed: Armed::default(),
            blows: Vec::new(),
            commits_ok: BTreeSet::new(),
            time: 0,
            events: 0,
            faults: 0,
            calm: false,
        }
    }

    /// An invariant broke; the first one stays.
    pub fn broke(&mut self, invariant: Invariant, what: impl Into<String>) {
        let what = what.into();
        self.note(|| format!("BROKEN {invariant:?}: {what}"));
        self.violation.get_or_insert(Violation { invariant, what });
    }

    /// A line for the trace; made only if somebody looks.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        TRACE.with_borrow_mut(|trace| {
            if let Some(trace) = trace {
                if trace.len() == TRACE_LINES_MAX {
                    trace.pop_front();
                }
                let (ms, us) = (self.time / 1_000_000, self.time / 1000 % 1000);
                trace.push_back(format!("{ms:>6}.{us:03} ms  {}", line()));
            }
        });
    }

    /// A moment has come on `node`: what waits for it strikes when the event is over.
    pub fn moment(
        &mut self,
        node: usize,
        peer: Option<usize>,
        client: Option<usize>,
        moment: &'static str,
    ) {
        debug_assert!(MOMENTS.contains(&moment), "{moment}");
        let aimed = |aimed: &Aimed| aimed.moment == moment;
        let Some(place) = self.armed.moments.iter().position(aimed) else {
            return;
        };
        // So that not always the first one is struck.
        if self.rng.percent(50) {
            let aimed = self.armed.moments.remove(place);
            let node = peer.filter(|_| aimed.at_peer).unwrap_or(node);
            let strike = aimed.strike;
            self.note(|| format!("node {node}: {strike:?} at the moment: {moment}"));
            self.blows.push(Blow {
                node,
                client,
                strike,
            });
        }
    }

    /// A fault struck.
    pub fn fault(&mut self, name: &'static str) {
        self.faults += 1;
        self.coverage.hit(name);
        self.note(|| name.to_owned());
    }

    /// A client is told a token: it is a fact from now on, so it must be the right one.
    pub fn told(&mut self, client: usize, token: u32) {
        let known = &mut self.clients[client];
        let (place, wanted) = (known.told, known.expected.get(known.told).copied());
        known.told += 1;
        if wanted != Some(token) {
            let what = format!(
                "client {client} was told token {token} at place {place}; right is {wanted:?}"
            );
            self.broke(Invariant::I5, what);
        }
    }

    /// A client's request ended.
    pub fn ended(&mut self, client: usize, outcome: Outcome) {
        let known = &mut self.clients[client];
        if let Some(before) = known.outcome {
            // A node may end what its proxy has given up; only one end reaches the client.
            let again = matches!((before, outcome), (Outcome::Finished, Outcome::Finished));
            if again {
                self.broke(Invariant::I6, format!("client {client} finished twice"));
            }
            return;
        }
        known.outcome = Some(outcome);
        let (told, wanted, later) = (known.told, known.expected.len(), known.later);
        self.note(|| format!("client {client} ends: {outcome:?}"));
        match outcome {
            Outcome::Finished => {
                self.coverage.hit("request: finished");
                if told != wanted {
                    let what = format!("client {client} finished with {told} of {wanted} tokens");
                    self.broke(Invariant::I5, what);
                }
                if later {
                    self.coverage.hit("later request: finished");
                }
            }
            Outcome::Failed(reason) => {
                self.coverage.hit(match reason {
                    "deadline_exceeded" => "request: failed, deadline_exceeded",
                    "peer_lost" => "request: failed, peer_lost",
                    "engine_failed" => "request: failed, engine_failed",
                    "not_ready" => "request: failed, not_ready",
                    "overloaded" => "request: failed, overloaded",
                    "too_large" => "request: failed, too_large",
                    "kv_exhausted" => "request: failed, kv_exhausted",
                    _ => "request: failed, other",
                });
                if later {
                    let what = format!("client {client}, sent after the faults, failed: {reason}");
                    self.broke(Invariant::I11, what);
                }
            }
            Outcome::Left => self.coverage.hit("request: client left"),
        }
    }
}
