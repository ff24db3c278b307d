//! Bytes that are no HTTP, or HTTP with bytes changed: the shard survives and serves others.

mod http_support;

use http_support::*;
use kvserve_runtime::http::HttpLimits;
use std::io::{Read, Write};
use std::time::Duration;

/// A small generator (xorshift*): a failing seed replays exactly.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

const SEEDS: [&[u8]; 5] = [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nab",
    b"OPTIONS * HTTP/1.0\r\nconnection: keep-alive\r\nupgrade: x\r\n\r\n",
];

fn mutate(random: &mut Random) -> Vec<u8> {
    let mut bytes = SEEDS[random.below(SEEDS.len())].to_vec();
    for _ in 0..random.below(4) {
        let at = random.below(bytes.len());
        match random.below(4) {
            0 => bytes[at] = random.next() as u8,
            1 => bytes.truncate(at.max(1)),
            2 => bytes.insert(at, random.next() as u8),
            _ => {
                let piece = bytes[at..].to_vec();
                bytes.extend_from_slice(&piece);
            }
        }
    }
    if random.below(8) == 0 {
        bytes = (0..random.below(3000))
            .map(|_| random.next() as u8)
            .collect();
    }
    bytes
}

#[test]
fn garbage_hurts_nobody_else() {
    let limits = HttpLimits {
        header_read: Duration::from_millis(500),
        body_read: Duration::from_millis(500),
        keep_alive_idle: Duration::from_millis(500),
        ..HttpLimits::default()
    };
    let served = serve_app(limits);
    for seed in 1..=400_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let bytes = mutate(&mut random);
        let mut socket = served.connect();
        // In two writes, so that heads and chunks are split anywhere.
        let cut = random.below(bytes.len() + 1);
        let _ = socket.write_all(&bytes[..cut]);
        let _ = socket.write_all(&bytes[cut..]);
        if random.below(3) > 0 {
            let _ = socket.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            // A reset is an answer, too; a hang is not.
            if let Err(error) = socket.read_to_end(&mut answer) {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "seed {seed}");
            }
        }
        if seed % 10 == 0 {
            assert_eq!(served.get("/").status, 200, "seed {seed}");
        }
    }
    let (_, counts) = served.end(PATIENCE);
    assert_eq!(counts.connections_open, 0);
    assert!(counts.malformed > 20, "{counts:?}");
}
