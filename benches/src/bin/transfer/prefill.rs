//! The child: owns the source pool, serves what it is told to.

use super::args::PrefillArgs;
use super::child::{Serves, Told};
use super::floors::write_pages;
use super::size::{Size, scattered};
use super::sys;
use super::wait::Waiter;
use kvserve_kv::transport::tcp::{ConnectionId, ReadAuthority, ServerConfig, TcpReadServer};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{CompletionSource, GuardToken, Nanos};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of the floor's request; of them the first four say from which page of the lease on.
pub const REQUEST_BYTES: usize = 64;

/// Serves until its input ends or the parent kills it.
pub fn serve(args: &PrefillArgs) {
    sys::pin(args.core);
    let pool = Arc::new(args.size.pool(0));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let told = Told {
        descriptor: pool.memfd_raw().expect("a memfd"),
        port: listener.local_addr().expect("bound").port(),
        bytes: pool.bytes(),
        pages_at: pool.bytes() - pool.pages() * pool.page_stride(),
        nonce: pool.nonce(),
    };
    say(&told.line());
    let mut prefill = Prefill::new(args, pool, listener);
    let mut serves = Serves::Nothing;
    loop {
        let go_on = match serves {
            Serves::Nothing => prefill.sleep(),
            Serves::Floor => prefill.floor(),
            Serves::Reads => prefill.reads(),
        };
        match go_on {
            Some(next) => serves = next,
            None => return,
        }
        say("ready");
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .expect("the parent listens");
}

struct Prefill {
    pool: Arc<PoolMemory>,
    size: Size,
    places: Vec<u32>,
    listener: TcpListener,
    floor: Option<TcpStream>,
    server: TcpReadServer,
    waiter: Waiter,
    buffer_bytes: usize,
}

impl Prefill {
    fn new(args: &PrefillArgs, pool: Arc<PoolMemory>, listener: TcpListener) -> Self {
        let places = scattered(pool.pages());
        let authority = Rc::new(RefCell::new(OneLease(places.clone())));
        let server = TcpReadServer::new(
            pool.clone(),
            args.size.page_bytes,
            authority,
            ServerConfig {
                buffer_bytes: args.buffer_bytes,
                ..ServerConfig::default()
            },
        );
        listener.set_nonblocking(true).expect("an option");
        Prefill {
            pool,
            size: args.size,
            places,
            listener,
            floor: None,
            server: server.expect("descriptors"),
            waiter: Waiter::new(args.spin),
            buffer_bytes: args.buffer_bytes,
        }
    }

    /// The next command, if there is one; `None` when the parent is gone.
    fn command(&self) -> Option<Serves> {
        let mut byte = [0];
        match std::io::stdin().read(&mut byte) {
            Ok(1) => [Serves::Nothing, Serves::Floor, Serves::Reads]
                .into_iter()
                .find(|serves| *serves as u8 == byte[0]),
            _ => None,
        }
    }

    fn commanded() -> bool {
        let mut entry = libc::pollfd {
            fd: 0,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid entry, no wait.
        unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
    }

    /// Waits for commands and connections.
    fn sleep(&mut self) -> Option<Serves> {
        loop {
            let listener = self.listener.as_raw_fd();
            self.waiter
                .sleep(&[(0, libc::POLLIN), (listener, libc::POLLIN)]);
            match self.listener.accept() {
                Ok((stream, _)) => self.connected(stream),
                Err(_) if Self::commanded() => return self.command(),
                Err(_) => {}
            }
        }
    }

    fn connected(&mut self, mut stream: TcpStream) {
        stream.set_nonblocking(false).expect("an option");
        stream.set_nodelay(true).expect("an option");
        let mut whose = [0];
        stream
            .read_exact(&mut whose)
            .expect("the parent says whose");
        if whose[0] == Serves::Floor as u8 {
            stream.set_nonblocking(true).expect("an option");
            sys::set_buffers(&stream, self.buffer_bytes);
            self.floor = Some(stream);
        } else {
            self.server.add_connection(stream).expect("a connection");
        }
        say("connected");
    }

    /// Answers each request with its pages.
    fn floor(&mut self) -> Option<Serves> {
        let mut stream = self.floor.take().expect("connected before");
        let mut request = [0; REQUEST_BYTES];
        let mut filled = 0;
        let next = loop {
            match stream.read(&mut request[filled..]) {
                Ok(0) => break None,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.waiter.spins() {
                        continue;
                    }
                    let socket = stream.as_raw_fd();
                    self.waiter
                        .sleep(&[(socket, libc::POLLIN), (0, libc::POLLIN)]);
                    if Self::commanded() {
                        break self.command();
                    }
                }
                Err(error) => panic!("the floor's socket: {error}"),
            }
            if filled == REQUEST_BYTES {
                filled = 0;
                let first = u32::from_le_bytes([request[0], request[1], request[2], request[3]]);
                let pages = &self.places[first as usize..first as usize + self.size.pages];
                write_pages(
                    &stream,
                    &self.pool,
                    pages,
                    self.size.page_bytes,
                    &self.waiter,
                );
                self.waiter.completed();
            }
        };
        self.floor = Some(stream);
        next
    }

    /// Runs the read server, as a shard does.
    fn reads(&mut self) -> Option<Serves> {
        let mut told = Vec::new();
        loop {
            if self.turn(&mut told) || self.waiter.spins() {
                continue;
            }
            let descriptor = self.server.arm();
            if self.turn(&mut told) {
                continue;
            }
            let armed = descriptor.unwrap_or(0);
            self.waiter
                .sleep(&[(armed, libc::POLLIN), (0, libc::POLLIN)]);
            if Self::commanded() {
                return self.command();
            }
        }
    }

    /// One poll of the server; whether it did anything.
    fn turn(&mut self, told: &mut Vec<kvserve_runtime::Completed>) -> bool {
        let before = self.server.counters();
        self.server.poll(Nanos::now(), told);
        let after = self.server.counters();
        if after.reads != before.reads {
            self.waiter.completed();
        }
        after.requests != before.requests || after.bytes != before.bytes
    }
}

/// Grants every page of the pool, scattered.
struct OneLease(Vec<u32>);

impl ReadAuthority for OneLease {
    fn resolve(
        &mut self,
        _connection: ConnectionId,
        _incarnation: u64,
        _lease: u64,
        _epoch: u32,
        first: u32,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<GuardToken, u32> {
        let end = first.checked_add(count).ok_or(1u32)? as usize;
        let run = self.0.get(first as usize..end).ok_or(1u32)?;
        out.extend(run.iter().copied().map(PageId));
        Ok(GuardToken::issue(NonZeroU32::MIN))
    }

    fn served(&mut self, _guards: GuardToken) {}
}
