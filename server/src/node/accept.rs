//! Taking requests in and seeing each to its end.

use super::NodeContext;
use super::request::RequestOut;
use super::{decode, local};
use crate::engine::{CancelFlag, EngineCommand, FinishReason, RetryClass, ServeError, Stage};
use crate::perf::{REQUEST_BEGIN, REQUEST_END, Span};
use futures_lite::future;
use kvserve_kv::session::Role;
use kvserve_runtime::bridge;
use kvserve_runtime::shard::Task;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

/// How often cancel flags are looked at while requests live: a fifth of the promised 100 ms.
const SWEEP: Duration = Duration::from_millis(20);

/// A request under way. Dropping it cancels the task.
struct Live {
    cancelled: CancelFlag,
    done: Rc<Cell<bool>>,
    _task: Task<()>,
}

/// Takes requests from all shards until the bridge closes at shutdown.
pub async fn accept(node: Rc<NodeContext>, mut commands: bridge::Receiver<EngineCommand>) {
    let mut live: Vec<Live> = Vec::new();
    enum Heard {
        Command(Option<EngineCommand>),
        Sweep,
    }
    loop {
        let heard = if live.is_empty() {
            Heard::Command(commands.recv().await)
        } else {
            future::or(async { Heard::Command(commands.recv().await) }, async {
                node.shard.sleep(SWEEP).await;
                Heard::Sweep
            })
            .await
        };
        match heard {
            Heard::Command(Some(command)) => live.push(start(&node, command)),
            Heard::Command(None) => return,
            Heard::Sweep => {}
        }
        sweep(&node, &mut live);
    }
}

fn sweep(node: &NodeContext, live: &mut Vec<Live>) {
    live.retain(|request| {
        let done = request.done.get();
        let left = request.cancelled.load(Acquire);
        if left && !done {
            node.metrics.requests_cancelled.fetch_add(1, Relaxed);
        }
        !done && !left
    });
    node.readiness.set_active(live.len());
}

fn start(node: &Rc<NodeContext>, command: EngineCommand) -> Live {
    node.metrics.requests.fetch_add(1, Relaxed);
    node.metrics
        .prompt_tokens
        .fetch_add(command.request.prompt.len() as u64, Relaxed);
    let (out, cancelled) = RequestOut::new(node.next_request_id(), node.perf.clone(), command);
    let done = Rc::new(Cell::new(false));
    let context = node.clone();
    let flag = done.clone();
    let task = node.shard.spawn(async move {
        run(&context, out).await;
        flag.set(true);
    });
    Live {
        cancelled,
        done,
        _task: task,
    }
}

/// One request, bounded by its deadline, to exactly one end.
async fn run(node: &NodeContext, out: RequestOut) {
    let metrics = &node.metrics;
    let trace = node.shard.trace();
    let number = out.id.counter;
    let (prompt, new) = (out.request.prompt.len(), out.request.max_tokens);
    trace.record(&REQUEST_BEGIN, number, prompt as u64, new.into());
    let ended = match node.hub.begin("request", out.request.deadline, None) {
        Ok(deadline) => {
            future::or(drive(node, &out), async {
                let _ = deadline.await;
                Err(out.deadline_error())
            })
            .await
        }
        Err(full) => Err(no_slot(full.slots_max)),
    };
    metrics.tokens.fetch_add(out.told() as u64, Relaxed);
    trace.record(
        &REQUEST_END,
        number,
        out.told() as u64,
        ended.is_err().into(),
    );
    node.perf
        .record(Span::Request, node.shard.now().since(out.arrived));
    match ended {
        Ok(reason) => {
            metrics.requests_finished.fetch_add(1, Relaxed);
            out.finished(reason);
        }
        Err(error) => {
            metrics.requests_failed.fetch_add(1, Relaxed);
            if error.reason == "deadline_exceeded" {
                metrics.requests_expired.fetch_add(1, Relaxed);
            }
            node.log.warn(
                "request failed",
                &[
                    ("request", &out.request.label),
                    ("stage", &error.stage.label()),
                    ("reason", &error.reason),
                    ("message", &error.message),
                ],
            );
            out.failed(error);
        }
    }
}

fn no_slot(slots_max: u32) -> ServeError {
    ServeError {
        stage: Stage::Queue,
        reason: "overloaded",
        retry: RetryClass::SamePair,
        message: format!("all {slots_max} completion slots of this shard are in use; try later"),
    }
}

async fn drive(node: &NodeContext, out: &RequestOut) -> Result<FinishReason, ServeError> {
    match node.role {
        Role::Decode => decode::drive(node, out).await,
        Role::Hybrid | Role::Prefill | Role::Proxy => local::drive(node, out).await,
    }
}
