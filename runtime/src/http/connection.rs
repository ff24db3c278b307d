//! One connection of a listener: hyper's state machine, our limits around it.
//!
//! hyper answers malformed heads itself, with an empty body. [`Io`] therefore keeps back
//! whatever hyper writes while no request is being answered (that can only be such an answer),
//! and the task writes the JSON error instead. One corner keeps hyper's bare status: a
//! malformed *pipelined* head that is parsed before the answer in front of it is written out.

use super::alarm::Alarm;
use super::counters::count;
use super::dispatch::Dispatch;
use super::reply;
use super::server::{Server, Stage};
use crate::net::Socket;
use crate::time::Nanos;
use hyper::rt::ReadBufCursor;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

/// How often a client is looked after while hyper does not read (unread body or pipelined
/// requests in the way). Half of the 100 ms in which a cancel must be seen.
const WATCH_EVERY: Duration = Duration::from_millis(50);

/// How long a closed answer waits for the client to read it and close. Closing at once would
/// reset the connection if unread bytes are left, and the reset can overtake the answer.
const LINGER: Duration = Duration::from_secs(2);

/// What is read and thrown away meanwhile: two bodies of the default limit.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// For a plain answer of < 1 KiB into an empty socket buffer.
const REPLY_WRITE: Duration = Duration::from_secs(1);

/// What the connection does now, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Accepted; no byte has come.
    First(Nanos),
    /// Between two requests; no byte of the next one has come.
    Idle(Nanos),
    /// Some bytes of a head have come.
    Head(Nanos),
    /// The handler's future runs.
    Handling,
    /// The answer is being written.
    Responding,
}

/// What the task, hyper's I/O, the dispatcher and the answer's body share.
pub(super) struct Conn {
    pub(super) socket: Socket,
    peer: SocketAddr,
    phase: Cell<Phase>,
    /// Number of the request being answered.
    request: Cell<u64>,
    /// That request's body has ended or was given up.
    body_done: Cell<bool>,
    /// The client's side of the stream has ended.
    end_of_input: Cell<bool>,
    write_blocked_since: Cell<Option<Nanos>>,
    /// hyper answered a malformed head and we kept it back.
    kept_back: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Conn {
    pub(super) fn new(socket: Socket, peer: SocketAddr) -> Rc<Self> {
        Rc::new(Conn {
            socket,
            peer,
            phase: Cell::new(Phase::First(Nanos::now())),
            request: Cell::new(0),
            body_done: Cell::new(false),
            end_of_input: Cell::new(false),
            write_blocked_since: Cell::new(None),
            kept_back: Cell::new(false),
            waker: RefCell::new(None),
        })
    }

    /// Makes the task look at the listener's stage again.
    pub(super) fn wake(&self) {
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    pub(super) fn answering(&self) -> bool {
        match self.phase.get() {
            Phase::Handling | Phase::Responding => true,
            Phase::First(_) | Phase::Idle(_) | Phase::Head(_) => false,
        }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The number of the request being answered.
    pub(super) fn request(&self) -> u64 {
        self.request.get()
    }

    /// A head has been read whole.
    pub(super) fn begin_request(&self) {
        self.request.set(self.request.get() + 1);
        self.body_done.set(false);
        self.write_blocked_since.set(None);
        self.phase.set(Phase::Handling);
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        self.phase.set(phase);
    }

    /// The body of the answer to `request` is done or given up.
    pub(super) fn end_body(&self, request: u64) {
        if self.request.get() == request {
            self.body_done.set(true);
        }
    }

    fn waits_for_request(&self) -> bool {
        match self.phase.get() {
            Phase::First(_) | Phase::Idle(_) => true,
            Phase::Head(_) | Phase::Handling | Phase::Responding => false,
        }
    }

    fn note_waker(&self, cx: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
    }
}

/// Why a connection's task ended.
enum End {
    /// hyper is done with it.
    Protocol(Result<(), hyper::Error>),
    /// No request came.
    Idle,
    /// A head did not get complete.
    HeadTimeout,
    /// The client does not read.
    Stalled,
    /// The client left while hyper was not looking.
    Left,
    /// The drain's deadline, or the listener was dropped.
    Cut,
}

/// Runs a connection to its end.
pub(super) async fn run(server: Rc<Server>, conn: Rc<Conn>) {
    let mut hyper = server.builder.serve_connection(
        Io { conn: conn.clone() },
        Dispatch {
            server: server.clone(),
            conn: conn.clone(),
        },
    );
    let mut watch = Watch {
        alarm: Alarm::new(server.shard.clone()),
        look_at: None,
    };
    let mut told_to_finish = false;
    let end = poll_fn(|cx| {
        conn.note_waker(cx);
        match server.stage.get() {
            Stage::Open => {}
            Stage::Draining { .. } => {
                // Never on an idle connection: hyper would close it under a request that is
                // on its way. The grace in `limit` closes those.
                if conn.answering() && !told_to_finish {
                    told_to_finish = true;
                    Pin::new(&mut hyper).graceful_shutdown();
                }
            }
            Stage::Cut => return Poll::Ready(End::Cut),
        }
        if let Poll::Ready(result) = Pin::new(&mut hyper).poll(cx) {
            return Poll::Ready(End::Protocol(result));
        }
        poll_limits(&server, &conn, &mut watch, cx)
    })
    .await;

    let answering = conn.answering();
    // Dropping hyper drops the handler's future or the streamed body: this *is* the cancel.
    let unparsed = hyper.into_parts().read_buf;
    let left = match &end {
        End::Protocol(_) => conn.end_of_input.get() || conn.socket.hung_up(),
        End::Left => true,
        End::Idle | End::HeadTimeout | End::Stalled | End::Cut => false,
    };
    if answering && left {
        count(&server.counters.clients_left);
    }
    let reply = match end {
        End::Protocol(Err(error)) if !answering && !conn.end_of_input.get() => {
            let http = error.is_parse() || error.is_parse_version_h2() || conn.kept_back.get();
            if http {
                count(&server.counters.malformed);
            }
            http.then(|| reply::malformed(&error, &unparsed, &server.limits))
        }
        End::Protocol(Err(_)) => {
            if answering && !left {
                // Aborted by its producer: the client must not take it for a whole answer.
                conn.socket.reset();
            }
            return;
        }
        End::Protocol(Ok(())) => None,
        End::HeadTimeout => {
            count(&server.counters.head_timeouts);
            Some(reply::head_timeout(&server.limits))
        }
        End::Idle => None,
        End::Stalled => {
            count(&server.counters.stalled);
            conn.socket.reset();
            return;
        }
        End::Left => return,
        End::Cut => {
            if answering {
                count(&server.counters.cut);
                conn.socket.reset();
            }
            return;
        }
    };
    if !conn.end_of_input.get() {
        close(&server, &conn, reply.as_deref().unwrap_or_default()).await;
    }
}

/// The connection's timer, and when the client is looked after next.
struct Watch {
    alarm: Alarm,
    look_at: Option<Nanos>,
}

/// The earliest limit that applies; ready when one has passed, or when the client is gone.
fn poll_limits(server: &Server, conn: &Conn, watch: &mut Watch, cx: &mut Context<'_>) -> Poll<End> {
    loop {
        let limit = limit(server, conn);
        // While hyper waits for the read side, an end of the stream wakes it by itself.
        if !conn.answering() || conn.socket.read_waiting() {
            watch.look_at = None;
        } else if watch.look_at.is_none() {
            watch.look_at = Some(server.shard.now().after(WATCH_EVERY));
        }
        let at = match (&limit, watch.look_at) {
            (Some((at, _)), Some(look_at)) => look_at.min(*at),
            (Some((at, _)), None) => *at,
            (None, Some(look_at)) => look_at,
            (None, None) => return Poll::Pending,
        };
        if watch.alarm.poll_until(cx, at).is_pending() {
            return Poll::Pending;
        }
        let now = server.shard.now();
        if let Some((at, end)) = limit
            && now >= at
        {
            return Poll::Ready(end);
        }
        if watch.look_at.take().is_some_and(|at| now >= at) && conn.socket.hung_up() {
            return Poll::Ready(End::Left);
        }
    }
}

/// What ends the connection in its present phase, and when. The handler's time is not ours.
fn limit(server: &Server, conn: &Conn) -> Option<(Nanos, End)> {
    let limits = &server.limits;
    let no_request = |since: Nanos, span: Duration| {
        let at = since.after(span);
        match server.stage.get() {
            Stage::Draining { since } => at.min(since.after(limits.drain_idle_grace)),
            Stage::Open | Stage::Cut => at,
        }
    };
    match conn.phase.get() {
        Phase::First(since) => Some((no_request(since, limits.header_read), End::Idle)),
        Phase::Idle(since) => Some((no_request(since, limits.keep_alive_idle), End::Idle)),
        Phase::Head(since) => Some((since.after(limits.header_read), End::HeadTimeout)),
        Phase::Handling | Phase::Responding => {
            let since = conn.write_blocked_since.get()?;
            Some((since.after(limits.write_stall), End::Stalled))
        }
    }
}

/// Writes `reply`, closes our side and waits shortly for the client to close its own.
pub(super) async fn close(server: &Server, conn: &Conn, mut reply: &[u8]) {
    let mut alarm = Alarm::new(server.shard.clone());
    let write_until = server.shard.now().after(REPLY_WRITE);
    let mut closed_at = None;
    let mut thrown_away = 0;
    let mut scratch = [0; 4096];
    poll_fn(|cx| {
        conn.note_waker(cx);
        if server.stage.get() == Stage::Cut {
            return Poll::Ready(());
        }
        while !reply.is_empty() {
            match conn.socket.poll_write(cx, reply) {
                Poll::Ready(Ok(written)) if written > 0 => reply = &reply[written..],
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return alarm.poll_until(cx, write_until),
            }
        }
        let since = match closed_at {
            Some(at) => at,
            None => {
                if conn.socket.shutdown(Shutdown::Write).is_err() {
                    return Poll::Ready(());
                }
                *closed_at.insert(server.shard.now())
            }
        };
        let until = since.after(match server.stage.get() {
            Stage::Open => LINGER,
            Stage::Draining { .. } | Stage::Cut => LINGER.min(server.limits.drain_idle_grace),
        });
        // 64 reads of 4 KiB a turn, so that a fast sender does not hold the shard.
        for _ in 0..64 {
            match conn.socket.poll_read(cx, &mut scratch) {
                Poll::Ready(Ok(count)) if count > 0 && thrown_away < LINGER_BYTES_MAX => {
                    thrown_away += count;
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return alarm.poll_until(cx, until),
            }
        }
        if server.shard.now() >= until {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// hyper's view of the socket.
struct Io {
    conn: Rc<Conn>,
}

impl hyper::rt::Read for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let conn = &self.conn;
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        // SAFETY: `poll_recv` only writes received bytes into the slice, it never makes an
        // initialised byte uninitialised.
        let count = ready!(conn.socket.poll_recv(cx, unsafe { buffer.as_mut() }))?;
        // SAFETY: the kernel has just written `count` bytes to the start of the slice.
        unsafe { buffer.advance(count) };
        if count == 0 {
            conn.end_of_input.set(true);
        } else if conn.waits_for_request() {
            conn.phase.set(Phase::Head(Nanos::now()));
        }
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buffer)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let conn = &self.conn;
        if !conn.answering() {
            conn.kept_back.set(true);
            return Poll::Ready(Ok(buffers.iter().map(|buffer| buffer.len()).sum()));
        }
        match conn.socket.poll_write_vectored(cx, buffers) {
            Poll::Ready(result) => {
                conn.write_blocked_since.set(None);
                Poll::Ready(result)
            }
            Poll::Pending => {
                if conn.write_blocked_since.get().is_none() {
                    conn.write_blocked_since.set(Some(Nanos::now()));
                }
                Poll::Pending
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// hyper flushes when all it had is written: after a body's end the answer is complete.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let conn = &self.conn;
        if conn.phase.get() == Phase::Responding && conn.body_done.get() {
            conn.phase.set(Phase::Idle(Nanos::now()));
        }
        Poll::Ready(Ok(()))
    }

    /// The task closes the socket itself: it may have an answer of its own to write before.
    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
