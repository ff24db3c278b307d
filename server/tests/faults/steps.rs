//! The steps of a migration as frames, prompts for them, and the texts they must lead to.

use crate::harness::{Flow, Identity, Node, Pair, Spec, Way, free_port, identity_of, ids_request};
use kvserve_kv::session::frame::{AttemptId, Frame, RequestId};
use serde_json::Value;
use std::time::Duration;

/// Two attempts at their stage limits (1 s to pair, 3 s for a watermark or 1 s for bytes), the
/// 3 s after which a silent peer is dead, a recompute, and room for a loaded machine.
pub const WITHIN: Duration = Duration::from_secs(15);

/// Pages of [`prompt`]: more than one chunk of 512 tokens, so that watermarks come in turns.
const PROMPT_TOKENS: usize = 1200;

/// Kind bytes of the frames that a test may act upon.
pub mod kind {
    use super::*;

    fn id() -> AttemptId {
        AttemptId {
            request: RequestId {
                incarnation: 0,
                counter: 0,
            },
            attempt: 0,
        }
    }

    pub fn prefill() -> u8 {
        Frame::Prefill {
            id: id(),
            left_ns: 0,
            held_pages: 0,
            prompt: Vec::new(),
            payload: Vec::new(),
        }
        .kind()
    }

    pub fn granted() -> u8 {
        Frame::Granted {
            id: id(),
            lease: 0,
            epoch: 0,
            pages: 0,
        }
        .kind()
    }

    pub fn watermark() -> u8 {
        Frame::Watermark {
            id: id(),
            lease: 0,
            first: 0,
            checksums: Vec::new(),
        }
        .kind()
    }

    pub fn first_token() -> u8 {
        Frame::FirstToken {
            id: id(),
            payload: Vec::new(),
        }
        .kind()
    }

    pub fn complete() -> u8 {
        Frame::Complete {
            id: id(),
            lease: 0,
            pages: 0,
            tail_tokens: 0,
            first: 0,
            checksums: Vec::new(),
        }
        .kind()
    }

    pub fn commit() -> u8 {
        Frame::Commit {
            id: id(),
            grantor: 0,
            lease: 0,
            epoch: 0,
            pages: 0,
        }
        .kind()
    }

    pub fn commit_answer() -> u8 {
        Frame::CommitAnswer {
            id: id(),
            lease: 0,
            outcome: kvserve_kv::session::CommitOutcome::Ok,
        }
        .kind()
    }

    pub fn cancel() -> u8 {
        Frame::Cancel { id: id() }.kind()
    }

    pub fn release() -> u8 {
        Frame::Release {
            id: id(),
            lease: 0,
            epoch: 0,
        }
        .kind()
    }

    pub fn welcome() -> u8 {
        Frame::Welcome.kind()
    }

    /// The plain and sealed frames of a handshake, in order: challenge, proof, hello.
    pub const HANDSHAKE: [u8; 3] = [1, 2, 4];
}

/// Every step of one migration at which something can happen, in order.
pub fn migration_steps() -> Vec<(&'static str, Flow)> {
    vec![
        ("prefill", Flow::Frame(Way::Forth, kind::prefill())),
        ("granted", Flow::Frame(Way::Back, kind::granted())),
        ("watermark", Flow::Frame(Way::Back, kind::watermark())),
        ("read", Flow::Data(Way::Forth)),
        ("bytes", Flow::Data(Way::Back)),
        ("first token", Flow::Frame(Way::Back, kind::first_token())),
        ("complete", Flow::Frame(Way::Back, kind::complete())),
        ("commit", Flow::Frame(Way::Forth, kind::commit())),
        (
            "commit answer",
            Flow::Frame(Way::Back, kind::commit_answer()),
        ),
    ]
}

/// `count` ids of the tiny vocabulary, other ones for each `seed`.
pub fn prompt(count: usize, seed: usize) -> Vec<u32> {
    (0..count)
        .map(|place| ((place * 7 + seed * 131 + place * place / 3) % 509 + 1) as u32)
        .collect()
}

/// A request whose prompt takes several chunks.
pub fn long_body(seed: usize) -> Value {
    ids_request(&prompt(PROMPT_TOKENS, seed), 12)
}

/// A request of one page.
pub fn short_body(seed: usize) -> Value {
    ids_request(&prompt(12, seed), 12)
}

/// What one process alone answers to each of these.
pub fn reference(bodies: &[Value]) -> Vec<Vec<u32>> {
    let serve = Spec::new("serve", "reference").start();
    bodies.iter().map(|body| serve.ids(body)).collect()
}

/// A pair, a long request, and its text from a process alone; pages go over TCP.
pub fn pair_and_text() -> (Pair, Value, Vec<u32>) {
    pair_and_text_over("tcp")
}

/// The same with another way of pages.
pub fn pair_and_text_over(transport: &str) -> (Pair, Value, Vec<u32>) {
    let body = long_body(1);
    let expected = reference(std::slice::from_ref(&body)).remove(0);
    let pair = Pair::over(transport, "", "");
    assert_eq!(pair.decode.ids(&body), expected);
    (pair, body, expected)
}

/// The steps that pass the relay when pages go this way.
pub fn steps_over(transport: &str) -> Vec<(&'static str, Flow)> {
    let mut steps = migration_steps();
    // Pages in shared memory pass by no relay.
    steps.retain(|(_, flow)| transport == "tcp" || matches!(flow, Flow::Frame(..)));
    steps
}

/// Whether a node has been asked to compute nothing for a while.
pub fn computes_nothing(node: &Node) -> bool {
    let steps = || node.metric("kvserve_engine_steps_total");
    let before = steps();
    std::thread::sleep(Duration::from_millis(150));
    steps() == before
}

/// What nodes of the tiny model say of themselves.
pub fn identity() -> Identity {
    static KNOWN: std::sync::OnceLock<Identity> = std::sync::OnceLock::new();
    *KNOWN.get_or_init(|| {
        let node = Spec::new("prefill", "asked").join(free_port()).start();
        identity_of(node.spec.peer)
    })
}
