//! What is asked, by whom, and how each request ended. Drawn from a seed: two runs with one seed
//! ask the same and leave at the same requests.

use super::client::{Answer, post, stream};
use serde_json::{Value, json};
use std::io;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Different requests that are asked for again and again.
const BODIES: usize = 24;

/// Of a hundred clients, so many leave before the end.
const LEAVE_PERCENT: u64 = 12;

/// A number from a seed and a place, the same everywhere (the finaliser of SplitMix64).
fn draw(seed: u64, place: u64) -> u64 {
    let mut z = seed ^ place.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The requests: short and long prompts, greedy and sampled, some with shared beginnings.
pub fn bodies(seed: u64) -> Vec<Value> {
    (0..BODIES as u64)
        .map(|number| {
            let length = [9, 16, 17, 100, 333, 800][number as usize % 6];
            // Every third prompt begins like its neighbour.
            let stem = draw(seed, number - number % 3);
            let own = draw(seed, 1000 + number);
            let ids: Vec<u64> = (0..length as u64)
                .map(|place| {
                    let from = if place < 64 { stem } else { own };
                    draw(from, place) % 509 + 1
                })
                .collect();
            let sampled = number % 4 == 3;
            json!({
                "prompt": ids,
                "max_tokens": 1 + draw(seed, 2000 + number) % 24,
                "temperature": if sampled { 0.8 } else { 0.0 },
                "seed": number,
                "ignore_eos": true,
                "return_token_ids": true,
            })
        })
        .collect()
}

/// The generated ids of a completion answer.
pub fn ids_of(answer: &Value) -> Vec<u64> {
    let ids = answer["choices"][0]["token_ids"].as_array();
    ids.map_or_else(Vec::new, |ids| {
        ids.iter().filter_map(Value::as_u64).collect()
    })
}

/// How requests ended. Everything but `no_end` and `cut` is a terminal state.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// 200 with the text that `serve` gives.
    pub right: usize,
    /// 200 with another text: what must never be.
    pub wrong: usize,
    /// The client left first, as drawn.
    pub left: usize,
    /// A typed error.
    pub refused: Vec<String>,
    /// The connection ended without an answer.
    pub cut: usize,
    /// Nothing came for two minutes.
    pub no_end: usize,
}

/// Clients at work.
pub struct Load<'a> {
    /// Where they ask.
    pub api: SocketAddr,
    /// What they ask, and the right ids.
    pub requests: &'a [(Value, Vec<u64>)],
    /// How often in all.
    pub total: usize,
    /// From which everything is drawn.
    pub seed: u64,
    next: AtomicUsize,
    /// Requests that have ended.
    pub done: AtomicUsize,
    tally: Mutex<Tally>,
}

impl<'a> Load<'a> {
    /// Nothing is asked yet.
    pub fn new(
        api: SocketAddr,
        requests: &'a [(Value, Vec<u64>)],
        total: usize,
        seed: u64,
    ) -> Self {
        Load {
            api,
            requests,
            total,
            seed,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            tally: Mutex::default(),
        }
    }

    /// One client: asks in turns until all requests are used up.
    pub fn client(&self) {
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            if number >= self.total {
                return;
            }
            let drawn = draw(self.seed, 10_000 + number as u64);
            let (body, text) = &self.requests[(drawn >> 32) as usize % self.requests.len()];
            let mut body = body.clone();
            // Three of four share no cached prefix with anybody, so that pages have to move.
            if !(drawn >> 16).is_multiple_of(4) {
                body["cache_salt"] = json!(format!("soak-{number}"));
            }
            if drawn % 100 < LEAVE_PERCENT {
                self.leave(body, drawn);
            } else {
                self.ask(&body, text);
            }
            self.done.fetch_add(1, Relaxed);
        }
    }

    /// How all of them ended.
    pub fn tally(self) -> Tally {
        self.tally.into_inner().unwrap_or_default()
    }

    fn count(&self, change: impl FnOnce(&mut Tally)) {
        if let Ok(mut tally) = self.tally.lock() {
            change(&mut tally);
        }
    }

    fn ask(&self, body: &Value, text: &[u64]) {
        match post(self.api, "/v1/completions", body) {
            Ok(Answer { status: 200, body }) => {
                let answer = serde_json::from_str(&body).unwrap_or(Value::Null);
                let right = ids_of(&answer) == text;
                self.count(|tally| match right {
                    true => tally.right += 1,
                    false => tally.wrong += 1,
                });
            }
            Ok(answer) => {
                let code = answer.json()["error"]["code"].as_str().map(str::to_owned);
                let said = match code {
                    Some(code) => format!("{} {code}", answer.status),
                    None => format!("{} untyped", answer.status),
                };
                self.count(|tally| tally.refused.push(said));
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                let silent = matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                );
                self.count(|tally| match silent {
                    true => tally.no_end += 1,
                    false => tally.cut += 1,
                });
            }
        }
    }

    /// Leaves before the first byte, or after some tokens.
    fn leave(&self, mut body: Value, drawn: u64) {
        body["stream"] = json!(true);
        if let Ok(mut stream) = stream(self.api, "/v1/completions", &body) {
            for _ in 0..(drawn >> 8) % 6 {
                if !matches!(stream.next_data(), Ok(Some(_))) {
                    break;
                }
            }
        }
        self.count(|tally| tally.left += 1);
    }
}
