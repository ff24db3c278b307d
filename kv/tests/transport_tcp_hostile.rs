//! What a broken or hostile other end can do to either side of a data connection: end that
//! connection, and nothing else.

mod conformance;

use conformance::tcp_rig::{INCARNATION, Leases, TcpRig, socket_pair};
use conformance::{PATIENCE, REFUSED, Rig, Shape, World, read, readable};
use kvserve_kv::transport::code;
use kvserve_kv::transport::tcp::wire::{ANSWER_BYTES, AnswerHead, ReadRequest};
use kvserve_kv::transport::tcp::{
    ChannelState, READS_IN_FLIGHT_MAX, ServerConfig, TcpReadServer, pages_per_read_max,
};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{
    ChannelId, ChannelKind, CompletionSource, CompletionStatus, Nanos, Reap, WorkId,
};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: usize = 1024;
const PAGES: usize = 64;

const SHAPE: Shape = Shape {
    pages: PAGES,
    page_bytes: PAGE,
    narrow: false,
};

struct Server {
    server: TcpReadServer,
    leases: Rc<RefCell<Leases>>,
}

impl Server {
    fn new(write_stall_max: Duration) -> Self {
        let pool = Arc::new(PoolMemory::memfd(PAGES, PAGE).unwrap());
        let leases = Rc::new(RefCell::new(Leases::new(PAGES)));
        let config = ServerConfig {
            write_stall_max,
            // So that a reader that takes nothing is noticed before megabytes lie in the kernel.
            buffer_bytes: 64 << 10,
        };
        let server = TcpReadServer::new(pool, PAGE, leases.clone(), config).unwrap();
        Server { server, leases }
    }

    fn connect(&mut self) -> TcpStream {
        let (near, far) = socket_pair();
        near.set_nonblocking(true).unwrap();
        self.server.add_connection(far).unwrap();
        near
    }

    fn turn(&mut self) {
        self.server.poll(Nanos::now(), &mut Vec::new());
    }

    fn turn_until(&mut self, what: &str, enough: impl Fn(&TcpReadServer) -> bool) {
        let begun = Instant::now();
        while !enough(&self.server) {
            self.turn();
            assert!(begun.elapsed() < PATIENCE, "{what}");
        }
    }

    /// Serves until the stream has given `wanted` bytes or has ended.
    fn read(&mut self, stream: &mut TcpStream, wanted: usize) -> Vec<u8> {
        let mut bytes = vec![0; wanted];
        let mut filled = 0;
        let begun = Instant::now();
        while filled < wanted {
            self.turn();
            match stream.read(&mut bytes[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
            assert!(begun.elapsed() < PATIENCE, "{filled} of {wanted} bytes");
        }
        bytes.truncate(filled);
        bytes
    }
}

fn request(lease: u64, first: u32, count: u32, position: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    ReadRequest {
        incarnation: INCARNATION,
        lease,
        epoch: 1,
        first,
        count,
        page_bytes: PAGE as u32,
        position,
    }
    .encode(&mut bytes);
    bytes
}

fn head_of(bytes: &[u8]) -> AnswerHead {
    AnswerHead::decode(bytes[..ANSWER_BYTES].try_into().unwrap()).unwrap()
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let mut server = Server::new(Duration::from_secs(60));
    let all: Vec<_> = (0..PAGES as u32).map(PageId).collect();
    let lease = server.leases.borrow_mut().grant(&all);
    let mut good = server.connect();
    let mut seed = 1u64;
    let mut garbage: Vec<Vec<u8>> = (0..40)
        .map(|round| {
            let noise = (0..64 + round * 7).map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 56) as u8
            });
            noise.collect()
        })
        .collect();
    garbage.push(
        b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: everything at all\r\n\r\n\r\n".to_vec(),
    );
    // Well-formed, and impossible: no pages, too many, another page size.
    let too_many = pages_per_read_max(PAGE) as u32 + 1;
    for (count, page_bytes) in [(0, PAGE), (too_many, PAGE), (u32::MAX, PAGE), (1, 2 * PAGE)] {
        let mut bytes = Vec::new();
        ReadRequest {
            incarnation: INCARNATION,
            lease: lease.id,
            epoch: 1,
            first: 0,
            count,
            page_bytes: page_bytes as u32,
            position: 0,
        }
        .encode(&mut bytes);
        garbage.push(bytes);
    }
    let rounds = garbage.len() as u64;
    for (round, bytes) in garbage.into_iter().enumerate() {
        let mut bad = server.connect();
        bad.write_all(&bytes).unwrap();
        assert!(
            server.read(&mut bad, 1).is_empty(),
            "garbage is not answered"
        );
        assert_eq!(server.server.counters().violations, round as u64 + 1);
        // The other connection goes on.
        good.write_all(&request(lease.id, 0, 1, round as u64))
            .unwrap();
        let answer = server.read(&mut good, ANSWER_BYTES + PAGE);
        assert_eq!(
            (head_of(&answer).code, answer.len()),
            (0, ANSWER_BYTES + PAGE)
        );
    }
    assert_eq!(server.server.counters().violations, rounds);
    assert_eq!(server.server.connections(), 1);
    assert_eq!(server.leases.borrow().closed.len(), rounds as usize);
    assert_eq!(server.leases.borrow().guards(), 0);
}

#[test]
fn requests_in_pieces_are_read_and_half_a_request_is_forgotten() {
    let mut server = Server::new(Duration::from_secs(60));
    let lease = server.leases.borrow_mut().grant(&[PageId(5), PageId(6)]);
    let mut stream = server.connect();
    let mut bytes = request(lease.id, 0, 2, 1);
    bytes.extend(request(lease.id + 1, 0, 1, 2));
    for byte in bytes {
        stream.write_all(&[byte]).unwrap();
        server.turn();
    }
    let answer = server.read(&mut stream, 2 * ANSWER_BYTES + 2 * PAGE);
    assert_eq!((head_of(&answer).code, head_of(&answer).position), (0, 1));
    let second = head_of(&answer[ANSWER_BYTES + 2 * PAGE..]);
    assert_eq!((second.code, second.position), (REFUSED, 2));
    stream.write_all(&request(lease.id, 0, 1, 3)[..40]).unwrap();
    server.turn();
    drop(stream);
    server.turn_until("the peer has closed", |server| server.connections() == 0);
    let counters = server.server.counters();
    assert_eq!((counters.closed_by_peer, counters.violations), (1, 0));
    assert_eq!(
        (counters.reads, counters.pages, counters.refused),
        (1, 2, 1)
    );
}

#[test]
fn a_flood_of_requests_is_cut_off_at_the_bound() {
    let mut server = Server::new(Duration::from_secs(60));
    let all: Vec<_> = (0..PAGES as u32).map(PageId).collect();
    let lease = server.leases.borrow_mut().grant(&all);
    let mut stream = server.connect();
    // Never reads an answer, so the queue only grows; each is 64 KiB of answer.
    let mut position = 0;
    let begun = Instant::now();
    while server.server.connections() == 1 {
        let bytes = request(lease.id, 0, PAGES as u32, position);
        match stream.write(&bytes) {
            Ok(count) => {
                assert_eq!(count, bytes.len());
                position += 1;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        server.turn();
        assert!(server.server.in_flight() <= READS_IN_FLIGHT_MAX);
        assert!(begun.elapsed() < PATIENCE);
    }
    assert_eq!(server.server.counters().violations, 1);
    assert_eq!(server.leases.borrow().guards(), 0);
}

#[test]
fn a_reader_that_takes_nothing_is_closed_and_its_guards_come_back() {
    let stall = Duration::from_millis(500);
    let mut server = Server::new(stall);
    let all: Vec<_> = (0..PAGES as u32).map(PageId).collect();
    let lease = server.leases.borrow_mut().grant(&all);
    let mut stream = server.connect();
    for position in 0..200 {
        let bytes = request(lease.id, 0, PAGES as u32, position);
        stream.write_all(&bytes).unwrap();
        server.turn();
    }
    server.turn_until("requests", |server| server.counters().requests == 200);
    assert_eq!(server.leases.borrow().guards(), 1, "one answer is in hand");
    // Parked as a shard does it: the stall limit wakes it without any event on the socket.
    let begun = Instant::now();
    while server.server.connections() == 1 {
        let fd = server.server.arm().expect("an answer is in hand");
        server.turn();
        if server.server.connections() == 1 {
            assert!(readable(fd, PATIENCE), "nothing wakes the shard");
            server.turn();
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    assert_eq!(server.server.counters().stalled, 1);
    assert_eq!(server.leases.borrow().guards(), 0);
}

#[test]
fn a_closed_session_gives_its_guards_back_at_once() {
    let mut server = Server::new(Duration::from_secs(60));
    let all: Vec<_> = (0..PAGES as u32).map(PageId).collect();
    let lease = server.leases.borrow_mut().grant(&all);
    let (mut near, far) = socket_pair();
    let id = server.server.add_connection(far).unwrap();
    for position in 0..200 {
        near.write_all(&request(lease.id, 0, PAGES as u32, position))
            .unwrap();
        server.turn();
    }
    server.turn_until("requests", |server| server.counters().requests == 200);
    assert_eq!(server.leases.borrow().guards(), 1);
    server.server.close_connection(id);
    server.server.close_connection(id);
    assert_eq!(server.leases.borrow().guards(), 0);
    assert_eq!(server.server.in_flight(), 0);
    server.turn();
    // Another connection may take its place.
    let mut other = server.connect();
    other.write_all(&request(lease.id, 3, 1, 0)).unwrap();
    assert_eq!(
        server.read(&mut other, ANSWER_BYTES + PAGE).len(),
        ANSWER_BYTES + PAGE
    );
    assert_eq!(server.leases.borrow().guards(), 0);
}

/// The reading side with a hand-made peer at the other end of its only channel.
struct Lone {
    world: World<TcpRig>,
    channel: ChannelId,
    far: TcpStream,
    first: WorkId,
}

const ANY: conformance::Lease = conformance::Lease { id: 1, epoch: 1 };

impl Lone {
    /// With three reads of two pages posted.
    fn new(still_max: Duration) -> Self {
        let mut world = World::<TcpRig>::new(SHAPE);
        world.rig = TcpRig::with_limits(SHAPE, still_max, Duration::from_secs(60));
        let channel = ChannelId {
            kind: ChannelKind::Tcp,
            index: 0,
        };
        let (near, far) = socket_pair();
        far.set_nodelay(true).unwrap();
        world
            .rig
            .transport
            .add_channel(channel, near, INCARNATION)
            .unwrap();
        let reads = (0..3).map(|at| read(ANY, 2 * at, 2 * at..2 * at + 2));
        let first = world.post(channel, reads.collect());
        Lone {
            world,
            channel,
            far,
            first,
        }
    }

    fn head(&self, at: u64, count: u32) -> AnswerHead {
        AnswerHead {
            code: 0,
            position: self.first.position() + at,
            count,
            page_bytes: PAGE as u32,
        }
    }

    fn answer(&mut self, at: u64, value: u8) {
        let mut bytes = self.head(at, 2).encode().to_vec();
        bytes.extend([value; 2 * PAGE]);
        self.far.write_all(&bytes).unwrap();
    }

    fn byte(&self, page: u32) -> u8 {
        // SAFETY: inside the page; both sides run on this thread.
        unsafe { self.world.rig.target().page(PageId(page)).read() }
    }

    fn is_over(&mut self, expected: u32) {
        let state = self.world.rig.transport.channel_state(self.channel);
        assert_eq!(state, Some(ChannelState::Failed(expected)));
        assert_eq!(self.world.rig.transport.room(self.channel), 0);
        self.world.rig.transport().kill(self.channel);
        assert_eq!(self.world.rig.transport().reap(self.channel), Reap::Quiet);
        assert_eq!(self.world.rig.transport.channel_state(self.channel), None);
        assert_eq!(self.world.rig.transport.counters().channels_failed, 1);
    }
}

#[test]
fn answers_that_are_none_end_the_channel_with_every_read_failed() {
    type Case = Box<dyn Fn(&Lone) -> Vec<u8>>;
    let mut cases: Vec<Case> = vec![
        Box::new(|_| vec![0; ANSWER_BYTES]),
        Box::new(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n".to_vec()),
        // Another read's answer, another count, another page size, a code of this side's.
        Box::new(|lone| lone.head(1, 2).encode().to_vec()),
        Box::new(|lone| lone.head(0, 3).encode().to_vec()),
        Box::new(|lone| {
            let head = lone.head(0, 2);
            let page_bytes = 2 * PAGE as u32;
            AnswerHead { page_bytes, ..head }.encode().to_vec()
        }),
        Box::new(|lone| {
            let head = lone.head(0, 2);
            let code = code::PROTOCOL;
            AnswerHead { code, ..head }.encode().to_vec()
        }),
    ];
    for bit in [0, 40, 100, 200, 255] {
        cases.push(Box::new(move |lone: &Lone| {
            let mut bytes = lone.head(0, 2).encode().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        }));
    }
    for (number, case) in cases.iter().enumerate() {
        let mut lone = Lone::new(Duration::from_secs(60));
        let bytes = case(&lone);
        lone.far.write_all(&bytes).unwrap();
        let told = lone.world.finish(lone.first, 3);
        let failed = CompletionStatus::Flushed(code::PROTOCOL);
        assert_eq!(told, [failed; 3], "case {number}");
        assert!(
            (0..6).all(|page| lone.byte(page) == 0),
            "bytes of no answer"
        );
        lone.is_over(code::PROTOCOL);
    }
}

#[test]
fn an_answer_cut_anywhere_fails_its_read_and_those_behind() {
    for cut in [0, 1, 31, 32, 33, PAGE, 2 * PAGE, 2 * PAGE + 31] {
        let mut lone = Lone::new(Duration::from_secs(60));
        lone.answer(0, 11);
        let mut bytes = lone.head(1, 2).encode().to_vec();
        bytes.extend([22; 2 * PAGE]);
        lone.far.write_all(&bytes[..cut]).unwrap();
        // Closing with the requests unread would be a reset, which may overtake the bytes.
        let mut requests = [0; 3 * 64];
        lone.far.read_exact(&mut requests).unwrap();
        let far = std::mem::replace(&mut lone.far, socket_pair().0);
        drop(far);
        let told = lone.world.finish(lone.first, 3);
        let failed = CompletionStatus::Flushed(code::PEER_CLOSED);
        assert_eq!(
            told,
            [CompletionStatus::Success, failed, failed],
            "cut {cut}"
        );
        assert_eq!((lone.byte(0), lone.byte(1)), (11, 11));
        lone.is_over(code::PEER_CLOSED);
    }
}

#[test]
fn a_peer_that_talks_unasked_is_cut_off() {
    let mut lone = Lone::new(Duration::from_secs(60));
    (0..3).for_each(|at| lone.answer(at, at as u8 + 1));
    let told = lone.world.finish(lone.first, 3);
    assert_eq!(told, [CompletionStatus::Success; 3]);
    lone.far.write_all(&[0; 5]).unwrap();
    let begun = Instant::now();
    while lone.world.rig.transport.channel_state(lone.channel) == Some(ChannelState::Open) {
        lone.world.poll();
        assert!(begun.elapsed() < PATIENCE);
    }
    lone.is_over(code::PROTOCOL);
}

#[test]
fn a_channel_that_owes_scrap_and_stands_still_is_given_up() {
    let still_max = Duration::from_millis(20);
    let mut lone = Lone::new(still_max);
    // Half of the first answer is there.
    let mut bytes = lone.head(0, 2).encode().to_vec();
    bytes.extend([33; PAGE / 2]);
    lone.far.write_all(&bytes).unwrap();
    let begun = Instant::now();
    while lone.byte(0) != 33 {
        lone.world.poll();
        assert!(begun.elapsed() < PATIENCE);
    }
    // A live read alone may wait as long as its own deadline says: that is not this rule's.
    std::thread::sleep(2 * still_max);
    lone.world.poll();
    assert!(lone.world.told.is_empty());
    lone.world.rig.transport().abandon(lone.first, 1);
    // Parked as a shard does it: its end wakes without any event on the socket.
    let begun = Instant::now();
    while lone.world.told.len() < 3 {
        let fd = lone.world.rig.transport().arm().expect("scrap is owed");
        lone.world.poll();
        if lone.world.told.len() < 3 {
            assert!(readable(fd, PATIENCE), "nothing wakes the shard");
            lone.world.poll();
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    let told: Vec<_> = lone.world.told.iter().map(|told| told.status).collect();
    let still = CompletionStatus::Flushed(code::STOOD_STILL);
    let abandoned = CompletionStatus::Error(code::ABANDONED);
    assert_eq!(told, [abandoned, still, still]);
    lone.is_over(code::STOOD_STILL);
}

#[test]
fn scrap_that_moves_keeps_its_channel() {
    let still_max = Duration::from_millis(200);
    let mut lone = Lone::new(still_max);
    lone.world.rig.transport().abandon(lone.first, 1);
    let mut bytes = lone.head(0, 2).encode().to_vec();
    bytes.extend([33; 2 * PAGE]);
    // 20 pieces over more than the limit in all, each well within it.
    for piece in bytes.chunks(bytes.len().div_ceil(20)) {
        lone.far.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(15));
        lone.world.poll();
    }
    (1..3).for_each(|at| lone.answer(at, 44));
    let told = lone.world.finish(lone.first, 3);
    let abandoned = CompletionStatus::Error(code::ABANDONED);
    assert_eq!(
        told,
        [
            abandoned,
            CompletionStatus::Success,
            CompletionStatus::Success
        ]
    );
    assert_eq!((lone.byte(0), lone.byte(2), lone.byte(5)), (0, 44, 44));
    let counters = lone.world.rig.transport.counters();
    assert_eq!(
        (counters.abandoned, counters.scrap_bytes),
        (1, 2 * PAGE as u64)
    );
}
