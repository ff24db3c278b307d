//! Several token streams as one: the events of a request's generations in the order in which
//! they come, and a last line of defence against an engine that forgets one.
//!
//! Owns the streams: dropping it, or stopping one, cancels at every stage. Each wait ends at
//! the request's deadline plus [`BACKSTOP_GRACE`] at the latest, whatever the engine does.

use super::clock::{Clock, LocalFuture};
use crate::engine::{GenerateEvent, RetryClass, ServeError, Stage, TokenStream};
use kvserve_runtime::Deadline;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// How long after its deadline a generation may still be answered by the engine itself (which
/// knows the stage) before the API ends it: one slow engine step and a poll turn.
pub const BACKSTOP_GRACE: Duration = Duration::from_secs(1);

type Step = LocalFuture<'static, (Box<dyn TokenStream>, Option<GenerateEvent>)>;

/// The generations of one request.
pub struct Generation {
    /// One per choice; `None` once it has ended.
    steps: Vec<Option<Step>>,
    /// Where the next scan begins, so that no choice starves the others.
    scan_from: usize,
    backstop: LocalFuture<'static, ()>,
    given_tokens: bool,
}

/// Waits for the stream's next event and gives the stream back with it.
fn step(mut stream: Box<dyn TokenStream>) -> Step {
    Box::pin(async move {
        let event = stream.next().await;
        (stream, event)
    })
}

impl Generation {
    /// Takes over the streams; the place is the choice's index.
    pub fn new(streams: Vec<Box<dyn TokenStream>>, deadline: Deadline, clock: &dyn Clock) -> Self {
        Generation {
            steps: streams
                .into_iter()
                .map(|stream| Some(step(stream)))
                .collect(),
            scan_from: 0,
            backstop: clock.sleep(deadline.left(clock.now()) + BACKSTOP_GRACE),
            given_tokens: false,
        }
    }

    /// Whether every generation has ended.
    pub fn is_over(&self) -> bool {
        self.steps.iter().all(Option::is_none)
    }

    /// Ends one choice's generation (a stop string): drops its stream.
    pub fn stop(&mut self, index: usize) {
        self.steps[index] = None;
    }

    /// Ends all of them.
    pub fn stop_all(&mut self) {
        self.steps.iter_mut().for_each(|step| *step = None);
    }

    /// The next event of any choice, with the choice's index; `None` when all have ended.
    pub async fn next(&mut self) -> Option<(usize, GenerateEvent)> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, GenerateEvent)>> {
        if self.is_over() {
            return Poll::Ready(None);
        }
        let choices = self.steps.len();
        for turn in 0..choices {
            let index = (self.scan_from + turn) % choices;
            let Some(waiting) = &mut self.steps[index] else {
                continue;
            };
            let Poll::Ready((stream, event)) = waiting.as_mut().poll(context) else {
                continue;
            };
            self.scan_from = index + 1;
            self.steps[index] = None;
            let event = event.unwrap_or_else(|| GenerateEvent::Failed(lost(index)));
            if let GenerateEvent::Token(_) = event {
                self.given_tokens = true;
                self.steps[index] = Some(step(stream));
            }
            return Poll::Ready(Some((index, event)));
        }
        if Pin::new(&mut self.backstop).poll(context).is_ready() {
            self.stop_all();
            return Poll::Ready(Some((0, GenerateEvent::Failed(overdue(self.given_tokens)))));
        }
        Poll::Pending
    }
}

fn lost(index: usize) -> ServeError {
    ServeError {
        stage: Stage::Decode,
        reason: "engine_failed",
        retry: RetryClass::Fail,
        message: format!("the engine ended generation {index} without saying why"),
    }
}

fn overdue(given_tokens: bool) -> ServeError {
    ServeError {
        stage: if given_tokens {
            Stage::Decode
        } else {
            Stage::Queue
        },
        reason: "deadline_exceeded",
        retry: RetryClass::Fail,
        message: format!(
            "the request's time passed {} ms ago and the engine has not ended it",
            BACKSTOP_GRACE.as_millis()
        ),
    }
}
