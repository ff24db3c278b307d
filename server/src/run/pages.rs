//! `/health`, `/ready`, `/progress`, `/metrics`, `/debug/*` of a node, on any shard.

use crate::api::{AdminPages, ApiError, LocalFuture, Page};
use crate::metrics::Metrics;
use crate::node::{DebugQuery, DebugQuestion, StatusBoard};
use crate::perf::Perf;
use crate::readiness::Readiness;
use bytes::Bytes;
use hyper::{Method, StatusCode};
use kvserve_kv::transport::chaos::ChaosSpec;
use kvserve_runtime::Deadline;
use kvserve_runtime::bridge;
use kvserve_runtime::completion::Hub;
use kvserve_runtime::sentinel::HealthView;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// How long the engine's shard may take to answer a debug question.
const DEBUG_WAIT: Duration = Duration::from_secs(1);

/// A node's pages on one shard.
pub struct NodePages {
    /// For the time.
    pub hub: Hub,
    /// Whether work is admitted.
    pub readiness: Arc<Readiness>,
    /// What the engine's shard published.
    pub board: Arc<StatusBoard>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Where time goes.
    pub perf: Arc<Perf>,
    /// What the sentinel sees.
    pub health: HealthView,
    /// The way to the engine's shard.
    pub queries: bridge::Sender<DebugQuery>,
}

/// The page of a sentinel's view.
pub fn health_page(health: &HealthView) -> Page {
    let (status, text) = health.answer();
    Page {
        status: StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
        body: serde_json::from_str(&text).unwrap_or(Value::String(text)),
    }
}

/// The page of a readiness.
pub fn ready_page(readiness: &Readiness) -> Page {
    let missing = match readiness.draining() {
        true => Some("the process is draining".to_string()),
        false => readiness.missing(),
    };
    match missing {
        None => Page::ok(json!({ "status": "ready" })),
        Some(missing) => Page {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: json!({ "status": "not ready", "missing": missing }),
        },
    }
}

impl NodePages {
    async fn ask(&self, question: DebugQuestion) -> Result<Value, ApiError> {
        let (answer, mut answers) = bridge::channel(1);
        self.queries
            .try_send(DebugQuery { question, answer })
            .map_err(|_| ApiError::server("-", "too many debug questions wait; ask again"))?;
        let deadline = Deadline::after(self.hub.now(), DEBUG_WAIT);
        match answers.recv_until(deadline).await {
            Ok(Some(value)) => Ok(value),
            Ok(None) | Err(_) => Err(ApiError::server(
                "-",
                "the engine's shard did not answer within 1 s; see /health",
            )),
        }
    }
}

impl AdminPages for NodePages {
    fn health(&self) -> Page {
        health_page(&self.health)
    }

    fn ready(&self) -> Page {
        ready_page(&self.readiness)
    }

    fn progress(&self) -> Page {
        Page::ok(self.board.progress())
    }

    fn nodes_status(&self) -> Option<Page> {
        Some(Page::ok(self.board.nodes()))
    }

    fn metrics(&self, out: &mut String) {
        self.metrics.render(out);
        self.perf.render(out);
        self.board.write_gauges(out);
        self.health.write_metrics("kvserve_", out);
    }

    fn debug(
        &self,
        method: Method,
        path: String,
        body: Bytes,
    ) -> LocalFuture<'_, Result<Option<Page>, ApiError>> {
        Box::pin(async move {
            let question = match (method.as_str(), path.as_str()) {
                ("GET", "/debug/transfers") => DebugQuestion::Transfers,
                ("GET", "/debug/pages") => DebugQuestion::Pages,
                ("GET", "/debug/trace") => DebugQuestion::Trace,
                ("GET", "/debug/chaos") => DebugQuestion::Chaos,
                ("POST", "/debug/chaos") => DebugQuestion::SetChaos(chaos_spec(&body)?),
                _ => return Ok(None),
            };
            self.ask(question).await.map(|value| Some(Page::ok(value)))
        })
    }
}

fn chaos_spec(body: &[u8]) -> Result<ChaosSpec, ApiError> {
    let wrong = |message: String| ApiError::invalid("invalid_value", "spec", message);
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| wrong(format!("the body is not JSON: {error}")))?;
    let text = value["spec"]
        .as_str()
        .ok_or_else(|| wrong("the body needs a string `spec`, e.g. completion=lose@1".into()))?;
    text.parse().map_err(|error| wrong(format!("{error}")))
}
