//! The decoder against garbage: random bytes, truncations, bit flips, lying counts. Seeds are
//! fixed; a failure prints the seed.

use super::frame::*;
use super::seal::{FrameStream, PeerKey, SealedChannel, WireError};

/// A small generator (splitmix64): the test needs spread, not secrecy.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

fn samples() -> Vec<Frame> {
    let id = AttemptId {
        request: RequestId {
            incarnation: 5,
            counter: 6,
        },
        attempt: 7,
    };
    vec![
        Frame::Challenge(Challenge {
            protocol_min: 1,
            protocol_max: 2,
            nonce: [3; 32],
            node_id: "prefill-0".into(),
            incarnation: 9,
            role: Role::Hybrid,
        }),
        Frame::Proof([1; 32]),
        Frame::Refused {
            reason: RefuseReason::Layout,
            text: "layouts differ".into(),
        },
        Frame::Hello(Hello {
            features: 1,
            fingerprint: 2,
            layout_hash: 3,
            page_bytes: 4,
            lease_pages_max: 5,
            api_url: "http://127.0.0.1:8000".into(),
            shm: ShmOffer {
                boot_id: [6; 16],
                socket: "pool".into(),
                nonce: [7; 32],
            },
        }),
        Frame::RdmaAsk {
            pair: 1,
            serial: 7,
            endpoint: vec![9; 56],
        },
        Frame::RdmaAnswer {
            pair: 1,
            serial: 7,
            endpoint: Vec::new(),
            text: "no".into(),
        },
        Frame::Places {
            id,
            lease: 1,
            first: 2,
            places: vec![(3, 4), (5, u64::MAX)],
        },
        Frame::Welcome,
        Frame::DataOpen(DataOpen {
            opener: 1,
            target: 2,
            lane: 1,
            count: 3,
            token: [4; 32],
        }),
        Frame::DataAccepted([5; 32]),
        Frame::Heartbeat,
        Frame::Prefill {
            id,
            left_ns: 1,
            held_pages: 0,
            prompt: vec![1, 2, u32::MAX],
            payload: vec![9; 20],
        },
        Frame::Granted {
            id,
            lease: 1,
            epoch: 2,
            pages: 3,
        },
        Frame::Busy { id, retry_ms: 4 },
        Frame::PrefillRefused {
            id,
            refusal: RefusedKind::Invalid,
            code: 7,
        },
        Frame::Queued { id, ahead: 3 },
        Frame::Watermark {
            id,
            lease: 1,
            first: 2,
            checksums: vec![3, 4],
        },
        Frame::FirstToken {
            id,
            payload: vec![1, 2],
        },
        Frame::Complete {
            id,
            lease: 1,
            pages: 3,
            tail_tokens: 4,
            first: 2,
            checksums: vec![8],
        },
        Frame::Aborted {
            id,
            reason: AbortReason::Engine,
        },
        Frame::Commit {
            id,
            grantor: 1,
            lease: 2,
            epoch: 3,
            pages: 4,
        },
        Frame::CommitAnswer {
            id,
            lease: 1,
            outcome: CommitOutcome::Expired,
        },
        Frame::Release {
            id,
            lease: 1,
            epoch: 2,
        },
        Frame::ReleaseAnswer { id, lease: 1 },
        Frame::Cancel { id },
        Frame::Renew {
            grant_highest: 9,
            live: vec![(id, 1), (id, 2)],
        },
        Frame::FenceQuery { id, lease: 1 },
        Frame::FenceAnswer { id, lease: 1 },
        Frame::App {
            kind: 2,
            bytes: vec![1],
        },
        Frame::Bye {
            reason: RefuseReason::Silent,
        },
    ]
}

fn body(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out);
    out
}

#[test]
fn every_frame_comes_back_as_it_was() {
    let mut kinds = std::collections::BTreeSet::new();
    for frame in samples() {
        assert_eq!(
            Frame::decode(frame.kind(), &body(&frame)),
            Ok(frame.clone())
        );
        assert!(kinds.insert(frame.kind()), "two frames of one kind");
    }
    // Every kind that decodes to something is among the samples.
    for kind in 0..=u8::MAX {
        let known = Frame::decode(kind, &[]) != Err(super::codec::Malformed::Kind(kind));
        assert_eq!(known, kinds.contains(&kind), "kind {kind}");
    }
}

#[test]
fn every_truncation_and_every_extra_byte_is_refused() {
    for frame in samples() {
        let whole = body(&frame);
        for cut in 0..whole.len() {
            assert!(
                Frame::decode(frame.kind(), &whole[..cut]).is_err(),
                "{frame:?} cut at {cut}"
            );
        }
        let mut more = whole;
        more.push(0);
        assert!(Frame::decode(frame.kind(), &more).is_err());
    }
}

#[test]
fn a_lying_count_is_refused_before_anything_is_allocated() {
    let id_bytes = [0u8; 20];
    let mut lie = id_bytes.to_vec();
    lie.extend([0; 12]); // left, held
    lie.extend(u32::MAX.to_le_bytes()); // prompt tokens
    assert!(Frame::decode(17, &lie).is_err());
    let mut lie = id_bytes.to_vec();
    lie.extend([0; 12]);
    lie.extend((PROMPT_TOKENS_MAX as u32).to_le_bytes()); // legal, but not there
    assert!(Frame::decode(17, &lie).is_err());
}

#[test]
fn random_bodies_and_flipped_bits_never_panic() {
    let samples = samples();
    for seed in 0..40_000u64 {
        let mut rng = Rng(seed);
        let length = rng.below(120);
        let bytes = rng.bytes(length);
        let kind = rng.below(40) as u8;
        // What decodes must encode to the same bytes: the layout has one form only.
        if let Ok(frame) = Frame::decode(kind, &bytes) {
            assert_eq!(body(&frame), bytes, "seed {seed}");
        }
        let frame = &samples[rng.below(samples.len())];
        let mut bent = body(frame);
        for _ in 0..1 + rng.below(3) {
            if !bent.is_empty() {
                let at = rng.below(bent.len());
                bent[at] ^= 1 << rng.below(8);
            }
        }
        if let Ok(frame) = Frame::decode(frame.kind(), &bent) {
            assert_eq!(body(&frame), bent, "seed {seed}");
        }
    }
}

#[test]
fn a_stream_of_garbage_ends_with_an_error_and_holds_little() {
    for seed in 0..2_000u64 {
        let mut rng = Rng(seed);
        let mut stream = FrameStream::new();
        let mut channel = SealedChannel::new(&PeerKey::new([1; 32]), &[2; 32], true, 3);
        let mut ended = false;
        for _ in 0..200 {
            let length = rng.below(400);
            stream.push(&rng.bytes(length));
            match stream.next_frame() {
                Ok(None) => {}
                Ok(Some(frame)) => match channel.open(frame) {
                    Err(WireError::Mac | WireError::TooShort(_)) => ended = true,
                    other => panic!("seed {seed}: {other:?}"),
                },
                Err(WireError::TooLong(..) | WireError::TooShort(_)) => ended = true,
                Err(other) => panic!("seed {seed}: {other:?}"),
            }
            if ended {
                break;
            }
            assert!(stream.rest().len() <= HANDSHAKE_FRAME_BYTES_MAX + 404);
        }
        assert!(ended, "seed {seed}: garbage was swallowed");
    }
}
