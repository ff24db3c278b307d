//! A listener on a shard: accept, the connection limit, the drain.

use super::alarm::Alarm;
use super::connection::{self, Conn};
use super::counters::{HttpCounters, count};
use super::drain::{Drain, DrainWatch};
use super::limits::HttpLimits;
use super::reply;
use super::request::Request;
use super::response::Response;
use crate::net::{Socket, TcpListener, UnixListener};
use crate::shard::Shard;
use crate::time::Nanos;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// What answers requests. It runs on the shard: it must not block.
pub type Handler = Rc<dyn Fn(Request) -> Pin<Box<dyn Future<Output = Response>>>>;

/// Makes a [`Handler`] from an async function or closure.
pub fn handler<F>(serve: impl Fn(Request) -> F + 'static) -> Handler
where
    F: Future<Output = Response> + 'static,
{
    Rc::new(move |request| Box::pin(serve(request)))
}

/// Connections over the limit that are told so (503) at the same time; more are just closed.
/// Each lives at most the linger time: 64 are 32 told a second at worst.
const REFUSALS_MAX: usize = 64;

/// What hyper may hold of a connection in each direction (and what it reads at a time).
const BUFFER_BYTES_MAX: usize = 64 * 1024;

/// Accepts in a row before other tasks get a turn: 64 x ~10 µs.
const ACCEPTS_A_TURN: usize = 64;

/// After an accept failed (no descriptors, no memory): time for some to come back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Accepted after the drain began, out of the kernel's queue: as many as it can hold.
const BACKLOG_SWEEP_MAX: usize = 4096;

/// After a cut, connections end in their next turn; this bounds a wait for a bug.
const CUT_WAIT: Duration = Duration::from_secs(1);

/// Where connections come from.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Listener::Tcp(listener)
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Listener::Unix(listener)
    }
}

impl Listener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Socket, SocketAddr)>> {
        match self {
            Listener::Tcp(listener) => listener
                .poll_accept(cx)
                .map_ok(|(stream, peer)| (stream.into_inner(), peer)),
            Listener::Unix(listener) => listener
                .poll_accept(cx)
                .map_ok(|stream| (stream.into_inner(), (Ipv4Addr::LOCALHOST, 0).into())),
        }
    }
}

/// How a listener ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeEnd {
    /// Connections cut at the drain's deadline with a request running.
    pub cut: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Open,
    Draining { since: Nanos },
    Cut,
}

/// What the connections of one listener share.
pub(super) struct Server {
    pub(super) shard: Shard,
    pub(super) limits: HttpLimits,
    pub(super) handler: Handler,
    pub(super) counters: Rc<HttpCounters>,
    pub(super) builder: hyper::server::conn::http1::Builder,
    pub(super) stage: Cell<Stage>,
    open: RefCell<BTreeMap<u64, Rc<Conn>>>,
    next_id: Cell<u64>,
    refusals: Cell<usize>,
    /// Woken when the last connection has ended.
    empty: RefCell<Option<Waker>>,
}

/// Serves `listener` until `drain` has begun and everything is done (or cut at its deadline).
/// Dropping the future cuts all connections.
pub async fn serve(
    shard: Shard,
    listener: impl Into<Listener>,
    limits: HttpLimits,
    handler: Handler,
    drain: Drain,
) -> ServeEnd {
    serve_counted(shard, listener, limits, handler, drain, Rc::default()).await
}

/// [`serve`], with counters that the caller can read meanwhile.
pub async fn serve_counted(
    shard: Shard,
    listener: impl Into<Listener>,
    limits: HttpLimits,
    handler: Handler,
    drain: Drain,
    counters: Rc<HttpCounters>,
) -> ServeEnd {
    let listener = listener.into();
    let server = Rc::new(Server {
        builder: builder(&limits),
        shard,
        limits,
        handler,
        counters,
        stage: Cell::new(Stage::Open),
        open: RefCell::default(),
        next_id: Cell::new(0),
        refusals: Cell::new(0),
        empty: RefCell::new(None),
    });
    let cut = CutOnDrop(server.clone());
    let drain = drain.watch(&server.shard);
    accept_until_drain(&server, &listener, &drain).await;
    sweep_backlog(&server, &listener).await;
    drop(listener);
    server.set_stage(Stage::Draining {
        since: server.shard.now(),
    });
    finish(&server, &drain).await;
    drop(cut);
    ServeEnd {
        cut: server.counters.cut.get(),
    }
}

fn builder(limits: &HttpLimits) -> hyper::server::conn::http1::Builder {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.max_header_size(limits.head_bytes_max());
    builder.max_buf_size(limits.head_bytes_max().max(BUFFER_BYTES_MAX));
    // hyper's own default is 100 on the stack; another number costs an allocation a request.
    if limits.header_fields_max != 100 {
        builder.max_headers(limits.header_fields_max);
    }
    builder
}

async fn accept_until_drain(server: &Rc<Server>, listener: &Listener, drain: &DrainWatch) {
    let mut alarm = Alarm::new(server.shard.clone());
    let mut paused_until = None;
    poll_fn(|cx| {
        if drain.poll_begun(cx).is_ready() {
            return Poll::Ready(());
        }
        if let Some(at) = paused_until {
            if alarm.poll_until(cx, at).is_pending() {
                return Poll::Pending;
            }
            paused_until = None;
        }
        for _ in 0..ACCEPTS_A_TURN {
            match listener.poll_accept(cx) {
                Poll::Ready(Ok((socket, peer))) => server.admit(socket, peer),
                Poll::Ready(Err(error)) => {
                    count(&server.counters.accept_failed);
                    if !connection_died(&error) {
                        let at = server.shard.now().after(ACCEPT_PAUSE);
                        paused_until = Some(at);
                        if alarm.poll_until(cx, at).is_pending() {
                            return Poll::Pending;
                        }
                    }
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Whether an accept failed because that one connection died in the queue (or is forbidden by a
/// firewall): no reason to let the others wait.
fn connection_died(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ECONNABORTED | libc::ECONNRESET | libc::EINVAL | libc::EPROTO | libc::EPERM)
    )
}

/// Connections that the kernel has completed are ours: closing the listener would reset them.
async fn sweep_backlog(server: &Rc<Server>, listener: &Listener) {
    let mut swept = 0;
    poll_fn(|cx| {
        while swept < BACKLOG_SWEEP_MAX {
            match listener.poll_accept_now(cx) {
                Some((socket, peer)) => server.admit(socket, peer),
                None => return Poll::Ready(()),
            }
            swept += 1;
        }
        Poll::Ready(())
    })
    .await;
}

impl Listener {
    fn poll_accept_now(&self, cx: &mut Context<'_>) -> Option<(Socket, SocketAddr)> {
        match self.poll_accept(cx) {
            Poll::Ready(Ok(accepted)) => Some(accepted),
            Poll::Ready(Err(_)) | Poll::Pending => None,
        }
    }
}

async fn finish(server: &Rc<Server>, drain: &DrainWatch) {
    let mut alarm = Alarm::new(server.shard.clone());
    let mut cut_at = None;
    poll_fn(|cx| {
        *server.empty.borrow_mut() = Some(cx.waker().clone());
        if server.open.borrow().is_empty() {
            return Poll::Ready(());
        }
        let at = match cut_at {
            Some(at) => at,
            None => match drain.poll_begun(cx) {
                Poll::Ready(at) => at,
                Poll::Pending => return Poll::Pending,
            },
        };
        if alarm.poll_until(cx, at).is_pending() {
            return Poll::Pending;
        }
        if cut_at.is_some() {
            return Poll::Ready(());
        }
        server.set_stage(Stage::Cut);
        let last = server.shard.now().after(CUT_WAIT);
        cut_at = Some(last);
        alarm.poll_until(cx, last)
    })
    .await;
}

impl Server {
    fn admit(self: &Rc<Self>, socket: Socket, peer: SocketAddr) {
        count(&self.counters.accepted);
        let conn = Conn::new(socket, peer);
        if self.open.borrow().len() >= self.limits.connections_max {
            self.refuse(conn);
            return;
        }
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.open.borrow_mut().insert(id, conn.clone());
        self.update_open();
        let server = self.clone();
        self.shard
            .spawn(async move {
                let entry = Entry { server, id };
                connection::run(entry.server.clone(), conn).await;
            })
            .detach();
    }

    fn refuse(self: &Rc<Self>, conn: Rc<Conn>) {
        count(&self.counters.over_limit);
        if self.refusals.get() >= REFUSALS_MAX {
            return;
        }
        self.refusals.set(self.refusals.get() + 1);
        let server = self.clone();
        self.shard
            .spawn(async move {
                let reply = reply::over_limit(&server.limits);
                connection::close(&server, &conn, &reply).await;
                server.refusals.set(server.refusals.get() - 1);
            })
            .detach();
    }

    fn set_stage(&self, stage: Stage) {
        self.stage.set(stage);
        let open: Vec<_> = self.open.borrow().values().cloned().collect();
        open.iter().for_each(|conn| conn.wake());
    }

    fn update_open(&self) {
        let open = self.open.borrow().len() as u64;
        self.counters.connections_open.set(open);
    }
}

/// A connection's place among the open ones, given back however its task ends.
struct Entry {
    server: Rc<Server>,
    id: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let conn = self.server.open.borrow_mut().remove(&self.id);
        drop(conn);
        self.server.update_open();
        if self.server.open.borrow().is_empty()
            && let Some(waker) = self.server.empty.borrow_mut().take()
        {
            waker.wake();
        }
    }
}

/// Cuts every connection when the listener's future goes away.
struct CutOnDrop(Rc<Server>);

impl Drop for CutOnDrop {
    fn drop(&mut self) {
        self.0.set_stage(Stage::Cut);
    }
}
