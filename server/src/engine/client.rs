//! The engine as any shard reaches it: commands over a bounded bridge, events back over one
//! bounded bridge a request.
//!
//! Two ends watch a request's deadline: the driver on the engine's shard, which knows the stage,
//! and, [`BACKSTOP`] later, the stream on the API's shard, so that a client is answered in time
//! even while the engine's shard stands still.

use super::face::{
    Engine, GenerateEvent, GenerateRequest, Refusal, RetryClass, ServeError, Stage, TokenStream,
};
use crate::readiness::Readiness;
use futures_lite::future;
use kvserve_runtime::bridge;
use kvserve_runtime::completion::{Completion, Hub};
use kvserve_runtime::{Deadline, Shard};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How much later than the driver the stream itself gives up.
const BACKSTOP: Duration = Duration::from_millis(5);

/// When a refused client should come again: about the time a short answer takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A flag that the API sets when nobody waits for the answer any more. The engine's shard
/// looks at it each sweep, so a cancel cannot be lost in a full queue.
pub type CancelFlag = Arc<AtomicBool>;

/// One request on its way to the engine's shard.
pub struct EngineCommand {
    /// What to generate.
    pub request: GenerateRequest,
    /// Where its events go.
    pub events: bridge::Sender<GenerateEvent>,
    /// Set when the client has left.
    pub cancelled: CancelFlag,
}

/// The engine's face on one shard.
pub struct EngineClient {
    shard: Shard,
    hub: Hub,
    commands: bridge::Sender<EngineCommand>,
    readiness: Arc<Readiness>,
}

impl EngineClient {
    /// A client on `shard` that sends to the engine's command bridge.
    pub fn new(
        shard: Shard,
        hub: Hub,
        commands: bridge::Sender<EngineCommand>,
        readiness: Arc<Readiness>,
    ) -> Self {
        EngineClient {
            shard,
            hub,
            commands,
            readiness,
        }
    }
}

impl Engine for EngineClient {
    fn generate(&self, request: GenerateRequest) -> Result<Box<dyn TokenStream>, Refusal> {
        self.readiness.admit(&request)?;
        // Prompt and tokens are in the stream at most once, plus its end.
        let (sender, events) = bridge::channel(request.max_tokens as usize + 2);
        let cancelled = CancelFlag::default();
        let now = self.shard.now();
        let backstop = Deadline::after(now, request.deadline.left(now) + BACKSTOP);
        let overloaded = |queued: usize, queued_max: usize| Refusal::Overloaded {
            queued,
            queued_max,
            retry_after: RETRY_AFTER,
        };
        let deadline = self
            .hub
            .begin("request", backstop, None)
            .map_err(|_| overloaded(self.readiness.active(), self.readiness.active_max()))?;
        let command = EngineCommand {
            request,
            events: sender,
            cancelled: cancelled.clone(),
        };
        if self.commands.try_send(command).is_err() {
            return Err(overloaded(
                self.readiness.active(),
                self.readiness.active_max(),
            ));
        }
        Ok(Box::new(ClientStream {
            events,
            deadline: Some(deadline),
            cancelled,
            ended: false,
        }))
    }
}

struct ClientStream {
    events: bridge::Receiver<GenerateEvent>,
    /// Taken once it has fired.
    deadline: Option<Completion>,
    cancelled: CancelFlag,
    ended: bool,
}

impl TokenStream for ClientStream {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<GenerateEvent>> + '_>> {
        Box::pin(async {
            if self.ended {
                return None;
            }
            let event = match &mut self.deadline {
                Some(deadline) => {
                    future::or(async { self.events.recv().await }, async {
                        let _ = deadline.await;
                        Some(GenerateEvent::Failed(late()))
                    })
                    .await
                }
                None => Some(GenerateEvent::Failed(late())),
            };
            // A driver that went away without an end is a failure, not a silent cut.
            let event = event.unwrap_or_else(|| GenerateEvent::Failed(lost()));
            match event {
                GenerateEvent::Token(_) => {}
                GenerateEvent::Finished { .. } | GenerateEvent::Failed(_) => {
                    self.ended = true;
                    self.deadline = None;
                }
            }
            Some(event)
        })
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Release);
    }
}

fn late() -> ServeError {
    ServeError {
        stage: Stage::Queue,
        reason: "deadline_exceeded",
        retry: RetryClass::Fail,
        message: "the request's time ran out; raise --request-timeout or lower the load".into(),
    }
}

fn lost() -> ServeError {
    ServeError {
        stage: Stage::Decode,
        reason: "engine_failed",
        retry: RetryClass::Fail,
        message: "the engine dropped this request without an end; see the server's log".into(),
    }
}
