//! Failures: which status, which error object, what is cancelled.

mod api_support;
use api_support::*;
use kvserve::api::{Answer, AnswerBody};
use kvserve::engine::{FinishReason, GenerateEvent, Refusal, RetryClass, ServeError, Stage};
use serde_json::{Value, json};
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";

fn failure(reason: &'static str) -> GenerateEvent {
    GenerateEvent::Failed(ServeError {
        stage: Stage::Pull,
        reason,
        retry: RetryClass::Fail,
        message: "it broke".into(),
    })
}

/// Every error is this object and nothing else.
fn error_of(answer: Answer) -> Value {
    let body = body_json(answer);
    let map = body.as_object().unwrap();
    assert_eq!(map.keys().collect::<Vec<_>>(), ["error"]);
    let keys: Vec<&String> = body["error"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"]);
    assert!(body["error"]["code"].is_string() && body["error"]["message"].is_string());
    body["error"].clone()
}

#[test]
fn a_failure_before_the_first_token_is_an_http_status_streamed_or_not() {
    for (reason, status) in [
        ("deadline_exceeded", 504),
        ("peer_lost", 503),
        ("draining", 503),
        ("engine_failed", 500),
    ] {
        for stream in [false, true] {
            let bench = bench();
            let script = Script::default();
            script.0.borrow_mut().push_back(failure(reason));
            bench.will(Ok(script));
            let answer = bench.post(COMPLETIONS, &json!({"prompt": "x", "stream": stream}));
            assert_eq!(answer.status, status, "{reason}");
            assert_eq!(answer.content_type, "application/json");
            let retry = answer.headers.iter().any(|(name, _)| name == "retry-after");
            assert_eq!(retry, status == 503);
            assert_eq!(error_of(answer)["code"], reason);
            assert_eq!(bench.live(), 0);
        }
    }
}

#[test]
fn a_failure_after_the_first_token_is_an_error_event_and_the_end() {
    let bench = bench();
    let script = Script::default();
    script
        .0
        .borrow_mut()
        .extend([token(b'a'), failure("peer_lost")]);
    bench.will(Ok(script));
    let mut source = events(bench.post(COMPLETIONS, &json!({"prompt": "x", "stream": true})));
    let text = drain(&mut *source);
    let chunks = data(&text);
    assert_eq!(chunks.len(), 2);
    assert_eq!(chunks[1]["error"]["code"], "peer_lost");
    assert!(!text.contains("[DONE]") && !text.contains("\"stop\""));
    assert_eq!(bench.live(), 0);
    let metrics = bench.api.metrics.clone();
    drop(source);
    use std::sync::atomic::Ordering::Relaxed;
    assert_eq!(metrics.stream_errors.load(Relaxed), 1);
    assert_eq!(metrics.clients_left.load(Relaxed), 0);
    assert_eq!(metrics.running.load(Relaxed), 0);
}

#[test]
fn a_failure_after_tokens_of_a_plain_answer_is_still_a_status() {
    let bench = bench();
    let script = Script::default();
    script
        .0
        .borrow_mut()
        .extend([token(b'a'), failure("deadline_exceeded")]);
    bench.will(Ok(script));
    let answer = bench.post(COMPLETIONS, &json!({"prompt": "x"}));
    assert_eq!(answer.status, 504);
}

#[test]
fn refusals_have_their_status_and_retry_after() {
    let table = [
        (
            Refusal::Overloaded {
                queued: 256,
                queued_max: 256,
                retry_after: Duration::from_secs(3),
            },
            429,
            Some("3"),
            "rate_limit_error",
        ),
        (Refusal::Draining, 503, Some("5"), "overloaded_error"),
        (
            Refusal::NotReady {
                missing: "prefill".into(),
            },
            503,
            Some("1"),
            "overloaded_error",
        ),
        (
            Refusal::TooLarge {
                tokens: 9,
                tokens_max: 4,
            },
            400,
            None,
            "invalid_request_error",
        ),
    ];
    for (refusal, status, retry_after, kind) in table {
        let bench = bench();
        // The second of two prompts is refused: nothing of the first may live on.
        bench.will_say("never", FinishReason::Stop);
        bench.will(Err(refusal));
        let answer = bench.post(COMPLETIONS, &json!({"prompt": ["a", "b"], "stream": true}));
        assert_eq!(answer.status, status);
        let header = answer
            .headers
            .iter()
            .find(|(name, _)| name == "retry-after");
        assert_eq!(
            header.map(|(_, value)| value.to_str().unwrap()),
            retry_after
        );
        assert_eq!(error_of(answer)["type"], kind);
        assert_eq!(bench.live(), 0);
    }
}

#[test]
fn dropping_a_stream_cancels_its_generations() {
    let bench = bench();
    for _ in 0..2 {
        let script = Script::default();
        script.0.borrow_mut().push_back(token(b'a'));
        bench.will(Ok(script));
    }
    let body = json!({"prompt": ["x", "y"], "stream": true});
    let mut source = events(bench.post(COMPLETIONS, &body));
    assert!(run(source.next()).is_some());
    assert!(run(source.next()).is_some());
    assert!(poll_once(&mut source.next()).is_pending());
    assert_eq!(bench.live(), 2);
    drop(source);
    assert_eq!(bench.live(), 0);
    use std::sync::atomic::Ordering::Relaxed;
    assert_eq!(bench.api.metrics.clients_left.load(Relaxed), 1);
    assert_eq!(bench.api.metrics.running.load(Relaxed), 0);
}

#[test]
fn dropping_the_handler_before_the_first_token_cancels_too() {
    for stream in [false, true] {
        let bench = bench();
        bench.will(Ok(Script::default()));
        let body = json!({"prompt": "x", "stream": stream}).to_string();
        let call = call("POST", COMPLETIONS, body.as_bytes(), &[]);
        {
            let mut handling = Box::pin(bench.api.handle(call, Default::default()));
            assert!(poll_once(&mut handling).is_pending());
            assert_eq!(bench.live(), 1);
        }
        assert_eq!(bench.live(), 0);
    }
}

#[test]
fn an_engine_that_forgets_a_request_does_not_keep_the_client_waiting() {
    for with_token in [false, true] {
        let bench = bench();
        let script = Script::default();
        if with_token {
            script.0.borrow_mut().push_back(token(b'a'));
        }
        bench.will(Ok(script));
        let body = json!({"prompt": "x", "stream": true}).to_string();
        let call = call(
            "POST",
            COMPLETIONS,
            body.as_bytes(),
            &[("x-kvserve-timeout-ms", "300")],
        );
        let mut handling = Box::pin(bench.api.handle(call, Default::default()));
        let first = poll_once(&mut handling);
        bench.clock.pass(Duration::from_millis(1299));
        if with_token {
            let std::task::Poll::Ready(answer) = first else {
                panic!("the first token answers the headers")
            };
            let mut source = events(answer);
            assert!(run(source.next()).is_some());
            assert!(poll_once(&mut source.next()).is_pending());
            bench.clock.pass(Duration::from_millis(1));
            let event = run(source.next()).unwrap();
            assert!(event.starts_with(b"data: {\"error\""));
            assert!(run(source.next()).is_none());
        } else {
            assert!(first.is_pending());
            assert!(poll_once(&mut handling).is_pending());
            bench.clock.pass(Duration::from_millis(1));
            let answer = run(handling);
            assert_eq!(answer.status, 504);
            assert_eq!(error_of(answer)["code"], "deadline_exceeded");
        }
        assert_eq!(bench.live(), 0);
    }
}

#[test]
fn the_timeout_header_lowers_and_never_raises() {
    let bench = bench();
    for (value, expected_ms) in [("300", 300), ("999999999", 60_000)] {
        bench.will_say("a", FinishReason::Stop);
        let call = call(
            "POST",
            COMPLETIONS,
            br#"{"prompt":"x"}"#,
            &[("x-kvserve-timeout-ms", value), ("x-request-id", "mine-7")],
        );
        let answer = run(bench.api.handle(call, Default::default()));
        let echoed = answer
            .headers
            .iter()
            .find(|(name, _)| name == "x-request-id");
        assert_eq!(echoed.unwrap().1, "mine-7");
        let asked = bench.engine.asked.borrow().last().unwrap().clone();
        assert_eq!(asked.deadline.at().0, expected_ms * 1_000_000);
        assert_eq!(asked.label, "mine-7");
    }
    for bad in ["0", "-1", "1.5", "abc", "", "+5", "99999999999999999999999"] {
        let call = call(
            "POST",
            COMPLETIONS,
            br#"{"prompt":"x"}"#,
            &[("x-kvserve-timeout-ms", bad)],
        );
        let answer = run(bench.api.handle(call, Default::default()));
        assert_eq!(answer.status, 400, "{bad:?}");
        assert_eq!(error_of(answer)["param"], "x-kvserve-timeout-ms");
    }
}

#[test]
fn paths_and_methods() {
    let bench = bench();
    for (method, path, status, code) in [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 501, "not_supported"),
        ("POST", "/v1/responses", 501, "not_supported"),
    ] {
        let answer = bench.call(method, path, b"");
        assert_eq!(answer.status, status, "{path}");
        assert!(matches!(answer.body, AnswerBody::Full(_)));
        let allow = answer.headers.iter().any(|(name, _)| name == "allow");
        assert_eq!(allow, status == 405);
        assert_eq!(error_of(answer)["code"], code);
    }
}
