//! Clients under load, each request with exactly one terminal state.

use crate::harness::{Answer, ids_of, post_stream, try_post};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How requests ended.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// 200 with the right text.
    pub right: usize,
    /// A typed error: its status and code.
    pub refused: Vec<(u16, String)>,
    /// The client left.
    pub left: usize,
    /// The connection ended without an answer.
    pub cut: usize,
}

/// A typed error of the API: JSON with a code. Panics on anything else.
pub fn typed_error(answer: &Answer) -> (u16, String) {
    let code = answer.error_code();
    assert!(
        !code.is_empty(),
        "status {} without a typed error: {}",
        answer.status,
        answer.body
    );
    assert!(
        [429, 502, 503, 504].contains(&answer.status),
        "status {} is no fault of ours: {}",
        answer.status,
        answer.body
    );
    (answer.status, code)
}

/// Clients that ask in turns until they are told to stop or all requests are used up.
pub struct Clients {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    tally: Arc<Mutex<Tally>>,
    done: Arc<AtomicUsize>,
}

impl Clients {
    /// `count` clients; request k is `bodies[k % bodies.len()]` with its right text. Every
    /// `leave_every`th leaves in the middle of its stream (0: none).
    pub fn start(
        api: SocketAddr,
        count: usize,
        requests: usize,
        bodies: Vec<(Value, Vec<u32>)>,
        leave_every: usize,
    ) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let next = Arc::new(AtomicUsize::new(0));
        let done = Arc::new(AtomicUsize::new(0));
        let bodies = Arc::new(bodies);
        let threads = (0..count)
            .map(|_| {
                let (stop, tally, next, done, bodies) = (
                    stop.clone(),
                    tally.clone(),
                    next.clone(),
                    done.clone(),
                    bodies.clone(),
                );
                std::thread::spawn(move || {
                    while !stop.load(SeqCst) {
                        let number = next.fetch_add(1, SeqCst);
                        if number >= requests {
                            return;
                        }
                        let (body, text) = &bodies[number % bodies.len()];
                        if leave_every > 0 && number % leave_every == leave_every - 1 {
                            leave(api, body, number % 5);
                            tally.lock().expect("tally").left += 1;
                        } else {
                            one(api, body, text, &tally);
                        }
                        done.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        Clients {
            stop,
            threads,
            tally,
            done,
        }
    }

    /// Requests that have ended.
    pub fn done(&self) -> usize {
        self.done.load(SeqCst)
    }

    /// Lets the requests under way end; how all of them ended.
    pub fn stop(self) -> Tally {
        self.stop.store(true, SeqCst);
        self.join()
    }

    /// Waits until all requests are used up.
    pub fn join(self) -> Tally {
        for thread in self.threads {
            thread.join().expect("client");
        }
        let tally = self.tally.lock().expect("tally");
        tally.clone()
    }
}

fn one(api: SocketAddr, body: &Value, text: &[u32], tally: &Mutex<Tally>) {
    match try_post(api, "/v1/completions", body) {
        Ok(answer) if answer.status == 200 => {
            assert_eq!(ids_of(&answer.json()), text, "a wrong text");
            tally.lock().expect("tally").right += 1;
        }
        Ok(answer) => {
            let error = typed_error(&answer);
            tally.lock().expect("tally").refused.push(error);
            // A real client waits as it is told to; this one is only less patient.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Err(error) => {
            let timed_out = matches!(
                error.kind(),
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
            );
            assert!(!timed_out, "a request without an end: {error}");
            tally.lock().expect("tally").cut += 1;
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Reads some tokens of a stream and leaves.
fn leave(api: SocketAddr, body: &Value, tokens: usize) {
    let mut body = body.clone();
    body["stream"] = json!(true);
    // A refusal is as good: the client leaves either way.
    if let Ok(mut stream) = post_stream(api, "/v1/completions", &body) {
        for _ in 0..tokens {
            if !matches!(stream.next_data(), Ok(Some(_))) {
                return;
            }
        }
    }
}
