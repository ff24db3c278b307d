//! A scripted engine, a byte tokenizer and a hand-turned clock for the API's tests.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use bytes::Bytes;
use hyper::{HeaderMap, Method, StatusCode};
use kvserve::api::ids::RandomIds;
use kvserve::api::{
    AdminPages, Answer, AnswerBody, Api, ApiConfig, ApiError, ApiMetrics, Call, ChatMessage, Clock,
    Detokenizer, EventSource, Inline, LocalFuture, Page, SamplingDefaults, ServedModel, TextError,
    TextModel,
};
use kvserve::engine::{
    Engine, FinishReason, GenerateEvent, GenerateRequest, Refusal, TokenEvent, TokenStream,
};
use kvserve_runtime::Nanos;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Ids 0 to 255 are bytes; these two follow.
pub const BOS: u32 = 256;
pub const EOS: u32 = 257;
pub const VOCABULARY: u32 = 258;
pub const CONTEXT: u32 = 64;

pub struct Bytewise;

impl TextModel for Bytewise {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        if text.contains('\0') {
            return Err(TextError::Tokenizer("no zero bytes".into()));
        }
        let bytes = text.bytes().map(u32::from);
        Ok(add_special
            .then_some(BOS)
            .into_iter()
            .chain(bytes)
            .collect())
    }

    fn render_chat(&self, messages: &[ChatMessage]) -> Result<String, TextError> {
        let mut text = String::new();
        for message in messages {
            if message.content == "boom" {
                return Err(TextError::Template("boom is not allowed".into()));
            }
            text += &format!("{}:{};", &message.role[..1], message.content);
        }
        Ok(text + "a:")
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        match id {
            BOS => b"<s>".to_vec(),
            EOS => b"</s>".to_vec(),
            byte => vec![byte as u8],
        }
    }

    fn detokenizer(self: Arc<Self>, skip_special: bool) -> Box<dyn Detokenizer> {
        Box::new(WholeCharacters {
            model: self,
            skip_special,
            open: Vec::new(),
        })
    }
}

struct WholeCharacters {
    model: Arc<Bytewise>,
    skip_special: bool,
    open: Vec<u8>,
}

impl Detokenizer for WholeCharacters {
    fn push(&mut self, id: u32, out: &mut String) {
        if id >= 256 && self.skip_special {
            return;
        }
        self.open.extend(self.model.token_bytes(id));
        match std::str::from_utf8(&self.open) {
            Ok(text) => {
                out.push_str(text);
                self.open.clear();
            }
            Err(error) if error.error_len().is_none() => {}
            Err(_) => self.finish(out),
        }
    }

    fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&std::mem::take(&mut self.open)));
    }
}

/// One stream's script; events can be added while it runs.
#[derive(Clone, Default)]
pub struct Script(pub Rc<RefCell<VecDeque<GenerateEvent>>>);

/// What the engine was asked for, and what it answers.
#[derive(Default)]
pub struct FakeEngine {
    pub scripts: RefCell<VecDeque<Result<Script, Refusal>>>,
    pub asked: RefCell<Vec<GenerateRequest>>,
    /// Streams alive now.
    pub live: Rc<Cell<usize>>,
}

struct FakeStream {
    script: Script,
    live: Rc<Cell<usize>>,
    ended: bool,
}

impl Drop for FakeStream {
    fn drop(&mut self) {
        self.live.set(self.live.get() - 1);
    }
}

impl TokenStream for FakeStream {
    fn next(&mut self) -> LocalFuture<'_, Option<GenerateEvent>> {
        Box::pin(std::future::poll_fn(move |_| {
            if self.ended {
                return Poll::Ready(None);
            }
            match self.script.0.borrow_mut().pop_front() {
                Some(event) => {
                    self.ended = !matches!(event, GenerateEvent::Token(_));
                    Poll::Ready(Some(event))
                }
                None => Poll::Pending,
            }
        }))
    }
}

impl Engine for FakeEngine {
    fn generate(&self, request: GenerateRequest) -> Result<Box<dyn TokenStream>, Refusal> {
        self.asked.borrow_mut().push(request);
        let script = self
            .scripts
            .borrow_mut()
            .pop_front()
            .expect("the test scripted fewer generations than were asked for")?;
        self.live.set(self.live.get() + 1);
        Ok(Box::new(FakeStream {
            script,
            live: self.live.clone(),
            ended: false,
        }))
    }
}

/// A clock that moves only when told to.
#[derive(Clone, Default)]
pub struct HandClock(pub Rc<Cell<u64>>);

impl HandClock {
    pub fn pass(&self, span: Duration) {
        self.0.set(self.0.get() + span.as_nanos() as u64);
    }
}

impl Clock for HandClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }

    fn sleep(&self, span: Duration) -> LocalFuture<'static, ()> {
        let (clock, until) = (self.clone(), self.now().after(span));
        Box::pin(std::future::poll_fn(move |_| {
            if clock.now() >= until {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        }))
    }
}

pub struct FakePages;

impl AdminPages for FakePages {
    fn health(&self) -> Page {
        Page::ok(json!({"status": "ok"}))
    }
    fn ready(&self) -> Page {
        Page {
            status: StatusCode::SERVICE_UNAVAILABLE,
            body: json!({"ready": false}),
        }
    }
    fn progress(&self) -> Page {
        Page::ok(json!({}))
    }
    fn metrics(&self, out: &mut String) {
        out.push_str("node_metric 1\n");
    }
    fn debug(
        &self,
        method: Method,
        path: String,
        body: Bytes,
    ) -> LocalFuture<'_, Result<Option<Page>, ApiError>> {
        Box::pin(async move {
            if path == "/debug/missing" {
                return Ok(None);
            }
            Ok(Some(Page::ok(
                json!({"method": method.as_str(), "path": path, "bytes": body.len()}),
            )))
        })
    }
}

/// An API with everything around it faked.
pub struct Bench {
    pub api: Api,
    pub engine: Rc<FakeEngine>,
    pub clock: HandClock,
}

pub fn served_model(text: bool) -> ServedModel {
    ServedModel {
        names: vec!["tiny".into(), "alias/tiny".into()],
        created: 1_700_000_000,
        context_tokens: CONTEXT,
        vocabulary: VOCABULARY,
        token_bytes_max: 256,
        eos_ids: vec![EOS],
        bos_id: None,
        defaults: SamplingDefaults::default(),
        text: if text { Some(Arc::new(Bytewise)) } else { None },
    }
}

pub fn bench() -> Bench {
    bench_with(served_model(true))
}

pub fn bench_with(model: ServedModel) -> Bench {
    let engine = Rc::new(FakeEngine::default());
    let clock = HandClock::default();
    let metrics = Arc::new(ApiMetrics::default());
    Bench {
        api: Api {
            engine: engine.clone(),
            model: Arc::new(model),
            config: ApiConfig {
                request_timeout: Duration::from_secs(60),
                debug_pages: true,
            },
            offload: Rc::new(Inline),
            clock: Rc::new(clock.clone()),
            pages: Rc::new(FakePages),
            all_metrics: vec![metrics.clone()],
            metrics,
            ids: RandomIds::default(),
        },
        engine,
        clock,
    }
}

pub fn token(byte: u8) -> GenerateEvent {
    GenerateEvent::Token(TokenEvent {
        token: u32::from(byte),
        logprob: -0.5,
        top: vec![(u32::from(byte), -0.5), (u32::from(b'z'), -1.5)],
    })
}

pub fn finished(reason: FinishReason) -> GenerateEvent {
    GenerateEvent::Finished {
        reason,
        cached_tokens: 0,
    }
}

impl Bench {
    /// The next generation gives the bytes of `text`, then ends.
    pub fn will_say(&self, text: &str, reason: FinishReason) -> Script {
        let script = Script::default();
        script.0.borrow_mut().extend(text.bytes().map(token));
        script.0.borrow_mut().push_back(finished(reason));
        self.will(Ok(script.clone()));
        script
    }

    pub fn will(&self, script: Result<Script, Refusal>) {
        self.engine.scripts.borrow_mut().push_back(script);
    }

    pub fn call(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let call = call(method, path, body, &[]);
        run(self.api.handle(call, self.clock.now()))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.call("POST", path, body.to_string().as_bytes())
    }

    pub fn post_json(&self, path: &str, body: &Value) -> (u16, Value) {
        let answer = self.post(path, body);
        (answer.status.as_u16(), body_json(answer))
    }

    pub fn live(&self) -> usize {
        self.engine.live.get()
    }
}

pub fn call(method: &str, path: &str, body: &[u8], headers: &[(&'static str, &str)]) -> Call {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, value.parse().unwrap());
    }
    Call {
        method: Method::from_bytes(method.as_bytes()).unwrap(),
        path: path.into(),
        query: None,
        headers: map,
        body: Bytes::copy_from_slice(body),
    }
}

pub fn body_bytes(answer: Answer) -> Bytes {
    match answer.body {
        AnswerBody::Full(bytes) => bytes,
        AnswerBody::Events(_) => panic!("a stream where a whole body was expected"),
    }
}

pub fn body_json(answer: Answer) -> Value {
    serde_json::from_slice(&body_bytes(answer)).expect("the body is JSON")
}

pub fn events(answer: Answer) -> Box<dyn EventSource> {
    match answer.body {
        AnswerBody::Events(source) => source,
        AnswerBody::Full(bytes) => panic!("no stream: {}", String::from_utf8_lossy(&bytes)),
    }
}

/// Everything a stream sends.
pub fn drain(source: &mut dyn EventSource) -> String {
    let mut all = Vec::new();
    while let Some(bytes) = run(source.next()) {
        all.extend_from_slice(&bytes);
    }
    String::from_utf8(all).expect("a stream is UTF-8")
}

/// The `data:` payloads of a stream; `[DONE]` as a string.
pub fn data(text: &str) -> Vec<Value> {
    let mut values = Vec::new();
    for event in text.split_terminator("\n\n") {
        let payload = event.strip_prefix("data: ").expect("each event has data");
        values.push(match payload {
            "[DONE]" => json!("[DONE]"),
            payload => serde_json::from_str(payload).expect("each chunk is JSON"),
        });
    }
    values
}

/// Polls once.
pub fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    std::pin::Pin::new(future).poll(&mut context)
}

/// Runs a future whose events are all there already.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10_000 {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
    panic!("the future waits for something that the test has not scripted")
}

/// Replaces what differs from run to run.
pub fn settled(mut value: Value) -> Value {
    if let Some(id) = value.get("id").and_then(Value::as_str) {
        let (prefix, random) = id.split_once('-').expect("ids have a prefix");
        assert_eq!(random.len(), 24);
        value["id"] = json!(prefix);
    }
    if value.get("created").is_some() {
        assert!(value["created"].as_u64().unwrap() > 1_600_000_000);
        value["created"] = json!(0);
    }
    value
}
