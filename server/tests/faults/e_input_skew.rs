//! E: crashes on input or skew.

use crate::harness::{
    Pair, PeerEnd, Spec, closed_by_peer, eventually, free_port, tiny_qwen2, two_at_a_time,
};
use crate::steps::{WITHIN, identity, prompt, reference, short_body};
use kvserve_kv::session::frame::{AttemptId, Frame, RequestId};
use kvserve_kv::session::seal::plain;
use kvserve_kv::session::{PeerKey, Role};
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Numbers that are the same in each run (splitmix64).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// What a stranger without the key may send.
fn stranger_bytes(rng: &mut Rng, number: usize) -> Vec<u8> {
    let framed = |length: u32, rest: &[u8]| {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(rest);
        bytes
    };
    let id = AttemptId {
        request: RequestId {
            incarnation: 1,
            counter: 1,
        },
        attempt: 1,
    };
    let length = (rng.next() % 300) as usize;
    match number % 6 {
        0 => rng.bytes(length + 1),
        1 => framed(u32::MAX, &rng.bytes(length)),
        2 => framed(0, &[]),
        3 => framed(length as u32 + 1, &rng.bytes(length / 2)),
        4 => {
            let kind = (rng.next() % 40) as u8;
            let mut body = vec![kind];
            body.extend(rng.bytes(length));
            framed(body.len() as u32, &body)
        }
        _ => plain(&Frame::Cancel { id }),
    }
}

#[test]
fn fault_34_garbage_on_the_peer_port_ends_its_own_connection_only() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let body = short_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let mut rng = Rng(34);
    for (node, port) in [
        ("prefill", pair.prefill.spec.peer),
        ("decode", pair.decode.spec.peer),
    ] {
        let mut streams = Vec::new();
        for number in 0..120 {
            let bytes = stranger_bytes(&mut rng, number);
            let mut stream = TcpStream::connect(port).expect("connect");
            // It may be closed while it is being written to.
            let _ = stream.write_all(&bytes);
            streams.push(stream);
            // Fewer at once than the half-open places.
            if streams.len() == 40 {
                for stream in &mut streams {
                    assert!(
                        closed_by_peer(stream, Duration::from_secs(5)),
                        "{node} keeps a stranger that sent garbage or nothing more"
                    );
                }
                streams.clear();
            }
        }
    }
    // An authenticated peer whose frames are bent: its session ends, and nothing else.
    for number in 0..24 {
        let local = identity().local("bent", Role::Decode, "");
        let mut end = PeerEnd::dial(pair.prefill.spec.peer, local).expect("session");
        let sealed = end.channel.lock().expect("channel").seal(&Frame::Prefill {
            id: AttemptId {
                request: RequestId {
                    incarnation: end.incarnation,
                    counter: 1,
                },
                attempt: 1,
            },
            left_ns: 1_000_000_000,
            held_pages: 0,
            prompt: prompt(30, number),
            payload: vec![0; 21],
        });
        let mut bytes = sealed.clone();
        match number % 4 {
            0 => {
                let at = 4 + (rng.next() as usize) % (bytes.len() - 4);
                bytes[at] ^= 1 << (rng.next() % 8);
            }
            1 => bytes[..4].copy_from_slice(&(700_000u32).to_le_bytes()),
            2 => {
                // Replayed: the number of the frame is no longer due.
                bytes.extend_from_slice(&sealed);
            }
            _ => bytes = rng.bytes(200),
        }
        end.send_bytes(&bytes);
        if number % 4 == 3 {
            // A random length word may ask for more: the silence then ends it.
            end.send_bytes(&rng.bytes(700_000));
        }
        assert!(
            end.is_ended(Duration::from_secs(5)),
            "bent frame {number} was taken"
        );
    }
    // Truncated: half a frame and then nothing, not even heartbeats.
    let local = identity().local("half", Role::Decode, "");
    let mut end = PeerEnd::dial(pair.prefill.spec.peer, local).expect("session");
    let half = end.channel.lock().expect("channel").seal(&Frame::Heartbeat);
    end.send_bytes(&half[..half.len() / 2]);
    std::thread::sleep(Duration::from_secs(4));
    assert!(
        end.is_ended(Duration::from_secs(3)),
        "a half frame holds a session"
    );
    assert!(pair.prefill.healthy() && pair.decode.healthy());
    pair.serves_by_migration(&body, &expected, "after the garbage");
    pair.wait_restored("after the garbage");
}

#[test]
fn fault_34_wrong_parameters_and_prompts_of_a_peer_are_refused_one_by_one() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let local = identity().local("odd", Role::Decode, "");
    let mut end = PeerEnd::dial(prefill.spec.peer, local).expect("session");
    let mut good = vec![0; 8];
    good.extend(1f32.to_le_bytes());
    good.extend(0u64.to_le_bytes());
    good.push(0xFF);
    let mut nan = good.clone();
    nan[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let cases = [
        ("no payload", prompt(20, 1), Vec::new()),
        ("short payload", prompt(20, 1), vec![1; 5]),
        ("long payload", prompt(20, 1), vec![1; 60_000]),
        ("not a number", prompt(20, 1), nan),
        ("unknown ids", vec![1, u32::MAX, 3], good.clone()),
        ("just outside the vocabulary", vec![512], good.clone()),
        ("no prompt", Vec::new(), good.clone()),
        ("longer than the context", vec![1; 100_000], good.clone()),
    ];
    for (counter, (name, prompt, payload)) in cases.into_iter().enumerate() {
        let id = AttemptId {
            request: RequestId {
                incarnation: end.incarnation,
                counter: counter as u64 + 1,
            },
            attempt: 1,
        };
        end.send(&Frame::Prefill {
            id,
            left_ns: 5_000_000_000,
            held_pages: 0,
            prompt,
            payload,
        });
        end.wait_for(name, |frame| match frame {
            Frame::PrefillRefused { id: of, .. } | Frame::Aborted { id: of, .. } => {
                (of == id).then_some(())
            }
            Frame::FirstToken { .. } => panic!("{name} got a token"),
            _ => None,
        });
    }
    assert!(prefill.healthy());
    for name in ["building", "ready"] {
        assert_eq!(prefill.pages(name), 0);
    }
    drop(end);
    prefill.wait_restored("after odd prompts", Duration::from_secs(5));
}

#[test]
fn fault_35_a_thousand_handshakes_at_once_time_out_and_the_rest_goes_on() {
    let _turn = two_at_a_time();
    let pair = Pair::start();
    let body = short_body(2);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let port = pair.prefill.spec.peer;
    let mut streams: Vec<_> = (0..1000)
        .map(|number| {
            let mut stream = TcpStream::connect(port).expect("connect");
            if number % 2 == 0 {
                // A first word, or a part of one, and then silence. Beyond the half-open places
                // it is closed at once.
                let first = plain(&Frame::Proof([9; 32]));
                let _ = stream.write_all(&first[..number % first.len()]);
            }
            stream
        })
        .collect();
    // The session that is up does not care.
    let began = Instant::now();
    assert_eq!(pair.decode.ids(&body), expected);
    assert!(began.elapsed() < Duration::from_secs(3));
    for (number, stream) in streams.iter_mut().enumerate() {
        assert!(
            closed_by_peer(stream, WITHIN),
            "half-open connection {number} was kept"
        );
    }
    // And there is room for an honest one again.
    eventually("an honest handshake", WITHIN, || {
        let local = identity().local("honest", Role::Decode, "");
        PeerEnd::dial(port, local).ok()
    });
    assert!(pair.prefill.healthy());
    pair.serves_by_migration(&body, &expected, "after a thousand handshakes");
}

#[test]
fn fault_35_a_thousand_honest_handshakes_end_in_sessions_or_reasons() {
    let _turn = two_at_a_time();
    let prefill = Spec::new("prefill", "prefill-0").join(free_port()).start();
    let (identity, port) = (identity(), prefill.spec.peer);
    let threads: Vec<_> = (0..20)
        .map(|thread| {
            std::thread::spawn(move || {
                let mut up = 0;
                for number in 0..50 {
                    let name = format!("node-{thread}-{number}");
                    let local = identity.local(&name, Role::Decode, "");
                    // One in five holds another key.
                    let key = PeerKey::new([if number % 5 == 0 { 1 } else { 0x5A }; 32]);
                    match PeerEnd::dial_with(port, local, key) {
                        Ok(_end) => {
                            assert_ne!(number % 5, 0, "another key came up");
                            up += 1;
                        }
                        Err(refusal) => assert!(!refusal.text.is_empty()),
                    }
                }
                up
            })
        })
        .collect();
    let up: usize = threads
        .into_iter()
        .map(|thread| thread.join().expect("dialler"))
        .sum();
    assert!(up >= 400, "only {up} of 800 honest handshakes came up");
    assert!(prefill.healthy());
    prefill.wait_restored("after the handshakes", Duration::from_secs(5));
}

#[test]
fn fault_37_a_broken_model_file_is_a_sentence_and_an_exit_code() {
    let _turn = two_at_a_time();
    let source = tiny_qwen2();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("broken-model");
    let weights = fs::read(source.join("model.safetensors")).expect("weights");
    type Bend = fn(&mut Vec<u8>);
    let bends: [(&str, Bend); 5] = [
        ("cut", |bytes| bytes.truncate(bytes.len() / 2)),
        ("cut in the header", |bytes| bytes.truncate(100)),
        ("empty", |bytes| bytes.clear()),
        ("huge header", |bytes| bytes[..8].fill(0xFF)),
        ("broken header", |bytes| bytes[8..60].fill(b'{')),
    ];
    for (name, bend) in bends {
        fs::create_dir_all(&folder).expect("folder");
        for file in ["config.json", "generation_config.json"] {
            fs::copy(source.join(file), folder.join(file)).expect("copied");
        }
        let mut bytes = weights.clone();
        bend(&mut bytes);
        fs::write(folder.join("model.safetensors"), bytes).expect("written");
        let mut spec = Spec::new("serve", "broken");
        spec.model = folder.clone();
        let (code, text) = spec.run_to_end();
        assert_eq!(code, Some(1), "{name}: {text}");
        assert!(
            text.contains("kvserve: ") && !text.contains("panicked"),
            "{name}: {text}"
        );
    }
    fs::remove_dir_all(&folder).expect("removed");
}
