//! The API of one shard: from a [`Call`] to an [`Answer`].

use super::assemble::Assembler;
use super::call::{Answer, Call, JSON, METRICS_TEXT};
use super::clock::{Clock, unix_s};
use super::error::ApiError;
use super::generation::Generation;
use super::ids::RandomIds;
use super::metrics::{ApiMetrics, Endpoint};
use super::offload::{Offload, offload};
use super::pages::AdminPages;
use super::params::Kind;
use super::prepare::{Prepared, prepare};
use super::route::Route;
use super::run::{ChoiceSpec, Run, RunSpec};
use super::shape::Shape;
use super::text::ServedModel;
use super::tokenize::{detokenize, tokenize};
use crate::engine::{Engine, GenerateRequest, SamplingParams};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use kvserve_model::{LogitRules, StopMatcher};
use kvserve_runtime::{Deadline, Nanos};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Longest body in bytes (api.md "Limits").
pub const BODY_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Longest client's request id that is echoed; a longer one is replaced.
const LABEL_BYTES_MAX: usize = 128;
/// Header that lowers the request timeout (PROTOCOL R4).
pub const TIMEOUT_HEADER: &str = "x-kvserve-timeout-ms";
/// Header with the request's label, in both directions.
pub const REQUEST_ID_HEADER: &str = "x-request-id";

/// Settings of the API.
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// The request timeout; a header may lower it.
    pub request_timeout: Duration,
    /// Whether `/debug/*` is served here (only on loopback or the admin listener).
    pub debug_pages: bool,
}

/// The API of one shard.
pub struct Api {
    /// Generates.
    pub engine: Rc<dyn Engine>,
    /// What is served.
    pub model: Arc<ServedModel>,
    /// Settings.
    pub config: ApiConfig,
    /// Takes work shaped by the client off the shard.
    pub offload: Rc<dyn Offload>,
    /// Time.
    pub clock: Rc<dyn Clock>,
    /// Pages that the node around it provides.
    pub pages: Rc<dyn AdminPages>,
    /// Counters of this shard.
    pub metrics: Arc<ApiMetrics>,
    /// Counters of all shards, this one's among them, for `/metrics`.
    pub all_metrics: Vec<Arc<ApiMetrics>>,
    /// Ids of answers, seeds.
    pub ids: RandomIds,
}

/// Time and name of one request.
struct Terms {
    arrived: Nanos,
    timeout: Duration,
    deadline: Deadline,
    label: String,
}

impl Api {
    /// Answers a request whose body has been read; `arrived` is when its head came in.
    pub async fn handle(&self, call: Call, arrived: Nanos) -> Answer {
        let (endpoint, result) = match Route::find(&call.method, &call.path) {
            Ok(route) => (route.endpoint(), self.answer(route, &call, arrived).await),
            Err(error) => (Endpoint::Unknown, Err(error)),
        };
        let answer = result.unwrap_or_else(Answer::from);
        self.metrics.answered(endpoint, answer.status);
        match client_label(&call.headers) {
            Some(label) => with_label(answer, label),
            None => answer,
        }
    }

    async fn answer(&self, route: Route, call: &Call, arrived: Nanos) -> Result<Answer, ApiError> {
        match route {
            Route::Generate(kind) => self.generate(kind, call, arrived).await,
            Route::Tokenize => self.text_work(call, arrived, tokenize).await,
            Route::Detokenize => self.text_work(call, arrived, detokenize).await,
            Route::Models => Ok(Answer::json(
                StatusCode::OK,
                &json!({"object": "list", "data": self.model_cards()}),
            )),
            Route::Model(name) => self.model_card(&name),
            Route::Health => Ok(self.pages.health().into()),
            Route::Ready => Ok(self.pages.ready().into()),
            Route::Progress => Ok(self.pages.progress().into()),
            Route::Metrics => {
                let mut text = String::new();
                ApiMetrics::render(&self.all_metrics, &mut text);
                self.pages.metrics(&mut text);
                Ok(Answer::full(StatusCode::OK, METRICS_TEXT, text))
            }
            Route::Version => Ok(Answer::json(StatusCode::OK, &version())),
            Route::NodesStatus => match self.pages.nodes_status() {
                Some(page) => Ok(page.into()),
                None => Err(ApiError::unknown_path("GET", &call.path)),
            },
            Route::Debug => self.debug(call).await,
        }
    }

    async fn debug(&self, call: &Call) -> Result<Answer, ApiError> {
        let unknown = || ApiError::unknown_path(call.method.as_str(), &call.path);
        if !self.config.debug_pages {
            return Err(unknown());
        }
        let page = self
            .pages
            .debug(call.method.clone(), call.path.clone(), call.body.clone())
            .await?;
        page.map(Answer::from).ok_or_else(unknown)
    }

    fn model_cards(&self) -> Vec<Value> {
        self.model
            .names
            .iter()
            .map(|name| {
                json!({
                    "id": name,
                    "object": "model",
                    "created": self.model.created,
                    "owned_by": "kvserve",
                    "max_model_len": self.model.context_tokens,
                })
            })
            .collect()
    }

    fn model_card(&self, name: &str) -> Result<Answer, ApiError> {
        self.model_cards()
            .iter()
            .find(|card| card["id"] == name)
            .map(|card| Answer::json(StatusCode::OK, card))
            .ok_or_else(|| ApiError::unknown_model(name, self.model.name()))
    }

    /// Runs a pure function of the body beside the shard.
    async fn text_work(
        &self,
        call: &Call,
        arrived: Nanos,
        work: fn(&[u8], &ServedModel) -> Result<Vec<u8>, ApiError>,
    ) -> Result<Answer, ApiError> {
        let terms = self.terms(call, arrived)?;
        let (body, model) = (call.body.clone(), self.model.clone());
        let json = offload(
            &*self.offload,
            terms.deadline,
            terms.timeout,
            call.body.len(),
            move || work(&body, &model),
        )
        .await??;
        Ok(Answer::full(StatusCode::OK, JSON, json))
    }

    async fn generate(&self, kind: Kind, call: &Call, arrived: Nanos) -> Result<Answer, ApiError> {
        let terms = self.terms(call, arrived)?;
        let (body, model) = (call.body.clone(), self.model.clone());
        let prepared = offload(
            &*self.offload,
            terms.deadline,
            terms.timeout,
            call.body.len(),
            move || prepare(kind, &body, &model),
        )
        .await??;
        let tolerated = prepared.params.tolerated;
        self.metrics
            .unknown_fields
            .fetch_add(u64::from(tolerated.unknown_fields), Relaxed);
        self.metrics
            .null_fields
            .fetch_add(u64::from(tolerated.nulls), Relaxed);
        let stream = prepared.params.stream;
        let run = self.start(prepared, terms)?;
        if stream {
            Ok(Answer::events(run.stream().await?))
        } else {
            Ok(Answer::full(StatusCode::OK, JSON, run.whole().await?))
        }
    }

    /// Hands all generations of a request to the engine: all or none.
    fn start(&self, prepared: Prepared, terms: Terms) -> Result<Run, ApiError> {
        let Prepared {
            kind,
            params,
            prompts,
        } = prepared;
        let mut stop_token_ids = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_token_ids.extend_from_slice(&self.model.eos_ids);
        }
        // Checked field by field before; the matcher has the same bounds.
        let stops = StopMatcher::new(&params.stop, false)
            .map_err(|error| ApiError::invalid("invalid_value", "stop", error.to_string()))?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len() as u64).sum();
        let rules = LogitRules {
            early_banned: stop_token_ids.clone(),
            ..params.rules.clone()
        };
        let rules = (!rules.is_neutral()).then(|| Arc::new(rules));
        let mut streams = Vec::with_capacity(prompts.len());
        let mut choices = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            choices.push(ChoiceSpec {
                assembler: Assembler::new(
                    self.model
                        .text
                        .clone()
                        .map(|text| text.detokenizer(params.skip_special_tokens)),
                    stops.clone(),
                ),
                prompt_ids: params.return_token_ids.then(|| prompt.ids.clone()),
            });
            let stream = self
                .engine
                .generate(GenerateRequest {
                    prompt: prompt.ids,
                    max_tokens: prompt.max_tokens,
                    sampling: SamplingParams {
                        temperature: params.temperature,
                        top_k: params.top_k,
                        top_p: params.top_p,
                        min_p: params.min_p,
                        rules: rules.clone(),
                        seed: params.seed.unwrap_or_else(|| self.ids.number()),
                        logprobs: params.logprobs,
                    },
                    stop_token_ids: stop_token_ids.clone(),
                    cache_salt: params.cache_salt.clone(),
                    deadline: terms.deadline,
                    label: terms.label.clone(),
                })
                .map_err(ApiError::from_refusal)?;
            streams.push(stream);
        }
        let id = self.ids.id(match kind {
            Kind::Completion => "cmpl-",
            Kind::Chat => "chatcmpl-",
        });
        let spec = RunSpec {
            shape: Shape {
                kind,
                id: id.clone(),
                created: unix_s(),
                model: self.model.name().to_owned(),
                include_usage: params.include_usage,
                text: self.model.text.clone(),
            },
            logprobs: params.logprobs.is_some(),
            token_ids: params.return_token_ids,
            prompt_tokens,
            request_id: id,
            arrived: terms.arrived,
        };
        Ok(Run::new(
            spec,
            Generation::new(streams, terms.deadline, &*self.clock),
            choices,
            self.metrics.clone(),
            self.clock.clone(),
        ))
    }

    fn terms(&self, call: &Call, arrived: Nanos) -> Result<Terms, ApiError> {
        let timeout = request_timeout(&call.headers, self.config.request_timeout)?;
        Ok(Terms {
            arrived,
            timeout,
            deadline: Deadline::after(arrived, timeout),
            label: client_label(&call.headers)
                .and_then(|label| label.to_str().ok())
                .map_or_else(|| self.ids.id("req-"), str::to_owned),
        })
    }
}

/// The version page, the same on every node.
pub fn version() -> Value {
    json!({"name": "kvserve", "version": env!("CARGO_PKG_VERSION")})
}

/// The client's own id for the request, if it is fit to be echoed.
pub fn client_label(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(REQUEST_ID_HEADER).filter(|value| {
        (1..=LABEL_BYTES_MAX).contains(&value.len())
            && value.as_bytes().iter().all(u8::is_ascii_graphic)
    })
}

/// Echoes the client's id.
pub fn with_label(answer: Answer, label: &HeaderValue) -> Answer {
    answer.with_header(HeaderName::from_static(REQUEST_ID_HEADER), label.clone())
}

/// The request's timeout: the server's, or less by the header.
///
/// # Errors
/// 400 for a header that is no whole number of milliseconds from 1.
pub fn request_timeout(headers: &HeaderMap, most: Duration) -> Result<Duration, ApiError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else {
        return Ok(most);
    };
    let asked_ms = value
        .to_str()
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse::<u64>().ok())
        .filter(|asked_ms| *asked_ms > 0);
    match asked_ms {
        Some(asked_ms) => Ok(most.min(Duration::from_millis(asked_ms))),
        None => Err(ApiError::invalid(
            "invalid_value",
            TIMEOUT_HEADER,
            format!(
                "the header {TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to {}",
                most.as_millis()
            ),
        )),
    }
}
