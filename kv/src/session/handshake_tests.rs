//! Both sides of the handshake against each other, and against liars.

use super::frame::{Challenge, Frame, RefuseReason, Role};
use super::handshake::{Handshake, LocalNode, PeerIdentity, Refusal, Step};
use super::seal::{self, FrameStream, PeerKey, SealedChannel};

fn node(id: &str, role: Role) -> LocalNode {
    LocalNode {
        node_id: id.into(),
        incarnation: 100 + id.len() as u64,
        role,
        fingerprint: 1,
        layout_hash: 2,
        page_bytes: 4096,
        api_url: format!("http://{id}"),
        features: 0x102,
        shm: Default::default(),
    }
}

fn frames(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut stream = FrameStream::new();
    stream.push(bytes);
    let mut out = Vec::new();
    while let Some(frame) = stream.next_frame().unwrap() {
        out.push(frame.to_vec());
    }
    assert!(stream.rest().is_empty());
    out
}

type End = Result<(SealedChannel, PeerIdentity), Refusal>;

/// Runs both sides against each other; `bend` may change the bytes on the way.
fn run(
    mut a: Handshake,
    first: Vec<u8>,
    mut b: Handshake,
    mut bend: impl FnMut(usize, &mut Vec<u8>),
) -> (Option<End>, Option<End>) {
    let mut to_b = frames(&first);
    let mut to_a = Vec::new();
    let mut ends: (Option<End>, Option<End>) = (None, None);
    let mut count = 0;
    while !to_a.is_empty() || !to_b.is_empty() {
        for turn_b in [true, false] {
            let inbox = std::mem::take(if turn_b { &mut to_b } else { &mut to_a });
            for mut frame in inbox {
                bend(count, &mut frame);
                count += 1;
                let (side, end) = if turn_b {
                    (&mut b, &mut ends.1)
                } else {
                    (&mut a, &mut ends.0)
                };
                if end.is_some() {
                    continue;
                }
                let send = match side.on_frame(&frame, &mut |_| Ok(())) {
                    Step::Continue { send, .. } => send,
                    Step::Up { channel, peer } => {
                        *end = Some(Ok((channel, peer)));
                        Vec::new()
                    }
                    Step::Refused { send, refusal } => {
                        *end = Some(Err(refusal));
                        send
                    }
                };
                let outbox = if turn_b { &mut to_a } else { &mut to_b };
                outbox.extend(frames(&send));
            }
        }
    }
    ends
}

fn pair(a: LocalNode, key_a: u8, b: LocalNode, key_b: u8) -> (Option<End>, Option<End>) {
    let (a, first) = Handshake::dial(a, PeerKey::new([key_a; 32]), [1; 32]);
    let b = Handshake::accept(b, PeerKey::new([key_b; 32]), [2; 32]);
    run(a, first, b, |_, _| ())
}

fn reasons(ends: (Option<End>, Option<End>)) -> (RefuseReason, RefuseReason) {
    (
        ends.0.unwrap().unwrap_err().reason,
        ends.1.unwrap().unwrap_err().reason,
    )
}

#[test]
fn both_sides_come_up_and_their_frames_open() {
    let (a, b) = pair(
        node("decode", Role::Decode),
        5,
        node("pre", Role::Prefill),
        5,
    );
    let (mut channel_a, peer_of_a) = a.unwrap().unwrap();
    let (mut channel_b, peer_of_b) = b.unwrap().unwrap();
    assert_eq!(
        (peer_of_a.node_id.as_str(), peer_of_a.role),
        ("pre", Role::Prefill)
    );
    assert_eq!(
        (peer_of_b.node_id.as_str(), peer_of_b.incarnation),
        ("decode", 106)
    );
    assert_eq!(peer_of_b.api_url, "http://decode");
    let sealed = channel_a.seal(&Frame::Heartbeat);
    assert_eq!(channel_b.open(&sealed[4..]).unwrap().incarnation, 106);
    let sealed = channel_b.seal(&Frame::Heartbeat);
    assert_eq!(channel_a.open(&sealed[4..]).unwrap().incarnation, 103);
}

#[test]
fn another_key_is_refused_on_both_sides() {
    let ends = pair(node("d", Role::Decode), 5, node("p", Role::Prefill), 6);
    assert_eq!(
        reasons(ends),
        (RefuseReason::BadProof, RefuseReason::BadProof)
    );
}

#[test]
fn each_mismatch_is_refused_with_its_reason_on_both_sides() {
    for (bend, reason) in [
        (
            (|n: &mut LocalNode| n.fingerprint = 9) as fn(&mut LocalNode),
            RefuseReason::Fingerprint,
        ),
        (|n| n.layout_hash = 9, RefuseReason::Layout),
        (|n| n.page_bytes = 9, RefuseReason::PageBytes),
        (|n| n.features = 0x101, RefuseReason::Settings),
        (|n| n.node_id = "d".into(), RefuseReason::SameNode),
    ] {
        let mut other = node("p", Role::Prefill);
        bend(&mut other);
        let ends = pair(node("d", Role::Decode), 5, other.clone(), 5);
        assert_eq!(reasons(ends), (reason, reason));
    }
}

#[test]
fn a_proxy_has_nothing_to_match() {
    let mut proxy = node("x", Role::Proxy);
    (proxy.fingerprint, proxy.layout_hash, proxy.page_bytes) = (0, 0, 0);
    let (a, b) = pair(node("d", Role::Decode), 5, proxy, 5);
    assert!(a.unwrap().is_ok() && b.unwrap().is_ok());
}

#[test]
fn a_bent_frame_anywhere_never_brings_a_session_up_on_both_sides() {
    for at in 0..9 {
        for byte in [0usize, 1, 5, 30] {
            let (a, first) =
                Handshake::dial(node("d", Role::Decode), PeerKey::new([5; 32]), [1; 32]);
            let b = Handshake::accept(node("p", Role::Prefill), PeerKey::new([5; 32]), [2; 32]);
            let mut bent = false;
            let (a, b) = run(a, first, b, |count, frame| {
                if count == at && byte < frame.len() {
                    frame[byte] ^= 0x40;
                    bent = true;
                }
            });
            if bent {
                let both = matches!((a, b), (Some(Ok(_)), Some(Ok(_))));
                assert!(!both, "frame {at}, byte {byte}");
            }
        }
    }
}

#[test]
fn a_reflected_challenge_and_proof_get_nowhere() {
    let (mut a, first) = Handshake::dial(node("d", Role::Decode), PeerKey::new([5; 32]), [1; 32]);
    let echo = frames(&first).remove(0);
    match a.on_frame(&echo, &mut |_| Ok(())) {
        Step::Refused { refusal, .. } => assert_eq!(refusal.reason, RefuseReason::SameNode),
        other => panic!("{other:?}"),
    }
    let (mut a, _) = Handshake::dial(node("d", Role::Decode), PeerKey::new([5; 32]), [1; 32]);
    let challenge = seal::plain(&Frame::Challenge(Challenge {
        protocol_min: 1,
        protocol_max: 1,
        nonce: [3; 32],
        node_id: "p".into(),
        incarnation: 4,
        role: Role::Prefill,
    }));
    let Step::Continue { send, .. } = a.on_frame(&challenge[4..], &mut |_| Ok(())) else {
        panic!("the challenge is fine");
    };
    match a.on_frame(&send[4..], &mut |_| Ok(())) {
        Step::Refused { refusal, .. } => assert_eq!(refusal.reason, RefuseReason::BadProof),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_shell_can_veto_a_proven_peer() {
    let (mut a, first) = Handshake::dial(node("d", Role::Decode), PeerKey::new([5; 32]), [1; 32]);
    let mut b = Handshake::accept(node("p", Role::Prefill), PeerKey::new([5; 32]), [2; 32]);
    let mut yes = |_: &PeerIdentity| Ok(());
    let mut no = |_: &PeerIdentity| Err(Refusal::ours(RefuseReason::Superseded, "a later start"));
    let sent = |step: Step| match step {
        Step::Continue { send, .. } => frames(&send),
        other => panic!("{other:?}"),
    };
    let challenge = sent(b.on_frame(&frames(&first)[0], &mut no));
    let proof = sent(a.on_frame(&challenge[0], &mut yes));
    let proof_and_hello = sent(b.on_frame(&proof[0], &mut no));
    let hello = sent(a.on_frame(&proof_and_hello[0], &mut yes));
    sent(a.on_frame(&proof_and_hello[1], &mut yes));
    let Step::Refused { send, refusal } = b.on_frame(&hello[0], &mut no) else {
        panic!("vetoed");
    };
    assert_eq!(refusal.reason, RefuseReason::Superseded);
    match a.on_frame(&frames(&send)[0], &mut yes) {
        Step::Refused { refusal, .. } => {
            assert!(refusal.by_peer);
            assert_eq!(refusal.reason, RefuseReason::Superseded);
        }
        other => panic!("{other:?}"),
    }
}
