//! The answers, byte for byte as JSON: plain and streamed, both endpoints.

mod api_support;
use api_support::*;
use kvserve::engine::FinishReason;
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn hello() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

/// The keys of `value`'s text form, in order, must be these.
fn assert_key_order(text: &str, keys: &[&str]) {
    let mut from = 0;
    for key in keys {
        let quoted = format!("\"{key}\":");
        let place = text[from..].find(&quoted);
        from += place.unwrap_or_else(|| panic!("{key} is missing or out of order in {text}"));
    }
}

#[test]
fn a_plain_completion() {
    let bench = bench();
    bench.will_say("Hé", FinishReason::Length);
    let answer = bench.post(COMPLETIONS, &json!({"prompt": "ab", "max_tokens": 3}));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.content_type, "application/json");
    let bytes = body_bytes(answer);
    let text = std::str::from_utf8(&bytes).unwrap();
    assert_key_order(
        text,
        &["id", "object", "created", "model", "choices", "usage"],
    );
    assert!(
        !text.contains(": ") && !text.contains(", "),
        "compact: {text}"
    );
    assert_eq!(
        settled(serde_json::from_str(text).unwrap()),
        json!({
            "id": "cmpl", "object": "text_completion", "created": 0, "model": "tiny",
            "choices": [{"index": 0, "text": "Hé", "logprobs": null, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
                      "prompt_tokens_details": {"cached_tokens": 0}}
        })
    );
    let asked = bench.engine.asked.borrow();
    assert_eq!(asked[0].prompt, [BOS, 97, 98]);
    assert_eq!(asked[0].max_tokens, 3);
    assert_eq!(asked[0].stop_token_ids, [EOS]);
}

#[test]
fn a_plain_chat() {
    let bench = bench();
    bench.will_say("Paris.", FinishReason::Stop);
    let (status, body) =
        bench.post_json(CHAT, &json!({"messages": hello(), "model": "alias/tiny"}));
    assert_eq!(status, 200);
    assert_eq!(
        settled(body),
        json!({
            "id": "chatcmpl", "object": "chat.completion", "created": 0, "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."},
                         "logprobs": null, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13,
                      "prompt_tokens_details": {"cached_tokens": 0}}
        })
    );
    let asked = bench.engine.asked.borrow();
    assert_eq!(
        asked[0].prompt,
        "u:hi;a:".bytes().map(u32::from).collect::<Vec<_>>()
    );
    // Chat without max_tokens: what the context has left.
    assert_eq!(asked[0].max_tokens, CONTEXT - 7);
}

#[test]
fn a_streamed_completion_never_sends_half_a_character() {
    let bench = bench();
    bench.will_say("aé", FinishReason::Stop);
    let answer = bench.post(COMPLETIONS, &json!({"prompt": "x", "stream": true}));
    assert_eq!(answer.content_type, "text/event-stream");
    let text = drain(&mut *events(answer));
    let chunk = |text: &str, finish: Value| {
        json!({"id": "cmpl", "object": "text_completion", "created": 0, "model": "tiny",
               "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}]})
    };
    let chunks: Vec<Value> = data(&text).into_iter().map(settled).collect();
    assert_eq!(
        chunks,
        [
            chunk("a", json!(null)),
            chunk("é", json!(null)),
            chunk("", json!("stop")),
            json!("[DONE]")
        ]
    );
}

#[test]
fn a_streamed_chat_with_usage() {
    let bench = bench();
    bench.will_say("ab", FinishReason::Length);
    let body =
        json!({"messages": hello(), "stream": true, "stream_options": {"include_usage": true}});
    let text = drain(&mut *events(bench.post(CHAT, &body)));
    let chunk = |delta: Value, finish: Value| {
        json!({"id": "chatcmpl", "object": "chat.completion.chunk", "created": 0, "model": "tiny",
               "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}],
               "usage": null})
    };
    let chunks: Vec<Value> = data(&text).into_iter().map(settled).collect();
    assert_eq!(
        chunks,
        [
            chunk(json!({"role": "assistant", "content": ""}), json!(null)),
            chunk(json!({"content": "a"}), json!(null)),
            chunk(json!({"content": "b"}), json!(null)),
            chunk(json!({}), json!("length")),
            json!({"id": "chatcmpl", "object": "chat.completion.chunk", "created": 0,
                   "model": "tiny", "choices": [],
                   "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9,
                             "prompt_tokens_details": {"cached_tokens": 0}}}),
            json!("[DONE]")
        ]
    );
    let ids: Vec<&str> = text.matches("chatcmpl-").collect();
    assert_eq!(ids.len(), 5);
}

#[test]
fn a_stop_string_over_token_borders_ends_the_text_before_it() {
    for stream in [false, true] {
        let bench = bench();
        bench.will_say("one END. two", FinishReason::Length);
        let body = json!({"prompt": "x", "max_tokens": 30, "stop": ["END."], "stream": stream});
        let answer = bench.post(COMPLETIONS, &body);
        let (text, finish) = if stream {
            let mut source = events(answer);
            let chunks = data(&drain(&mut *source));
            assert_eq!(chunks.last().unwrap(), "[DONE]");
            // The generation was cancelled by its stop string, the source is still there.
            assert_eq!(bench.live(), 0);
            joined(&chunks)
        } else {
            let body = body_json(answer);
            assert_eq!(body["usage"]["completion_tokens"], 8);
            let choice = &body["choices"][0];
            (
                choice["text"].as_str().unwrap().to_owned(),
                choice["finish_reason"].clone(),
            )
        };
        assert_eq!(text, "one ");
        assert_eq!(finish, "stop");
    }
}

/// Text and last finish_reason of a completion's chunks.
fn joined(chunks: &[Value]) -> (String, Value) {
    let mut text = String::new();
    let mut finish = json!(null);
    for chunk in chunks.iter().filter(|chunk| chunk.is_object()) {
        let choice = &chunk["choices"][0];
        text += choice["text"].as_str().unwrap();
        finish = choice["finish_reason"].clone();
    }
    (text, finish)
}

#[test]
fn what_was_held_back_for_a_stop_string_comes_out_at_the_end() {
    let bench = bench();
    bench.will_say("an EN", FinishReason::Length);
    let body = json!({"prompt": "x", "stop": "END", "stream": true});
    let chunks = data(&drain(&mut *events(bench.post(COMPLETIONS, &body))));
    assert_eq!(joined(&chunks), ("an EN".into(), json!("length")));
}

#[test]
fn completion_logprobs_and_ids() {
    let bench = bench();
    bench.will_say("aé", FinishReason::Length);
    let body = json!({"prompt": [1, 2], "logprobs": 2, "return_token_ids": true});
    let (_, body) = bench.post_json(COMPLETIONS, &body);
    assert_eq!(
        body["choices"][0],
        json!({
            "index": 0, "text": "aé",
            "logprobs": {
                "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
                "token_logprobs": [-0.5, -0.5, -0.5],
                "top_logprobs": [{"a": -0.5, "z": -1.5}, {"bytes:\\xc3": -0.5, "z": -1.5},
                                 {"bytes:\\xa9": -0.5, "z": -1.5}],
                "text_offset": [0, 1, 1]
            },
            "finish_reason": "length", "token_ids": [97, 195, 169], "prompt_token_ids": [1, 2]
        })
    );
    assert_eq!(bench.engine.asked.borrow()[0].sampling.logprobs, Some(2));
}

#[test]
fn chat_logprobs() {
    let bench = bench();
    bench.will_say("a", FinishReason::Length);
    let body = json!({"messages": hello(), "logprobs": true, "top_logprobs": 2});
    let (_, body) = bench.post_json(CHAT, &body);
    assert_eq!(
        body["choices"][0]["logprobs"],
        json!({"content": [{
            "token": "a", "logprob": -0.5, "bytes": [97],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]},
                             {"token": "z", "logprob": -1.5, "bytes": [122]}]
        }]})
    );
}

#[test]
fn streamed_ids_come_with_their_token_even_while_text_is_held_back() {
    let bench = bench();
    bench.will_say("é", FinishReason::Length);
    let body = json!({"prompt": [7], "return_token_ids": true, "logprobs": 0, "stream": true});
    let chunks = data(&drain(&mut *events(bench.post(COMPLETIONS, &body))));
    let choice = |place: usize| chunks[place]["choices"][0].clone();
    assert_eq!(choice(0)["text"], "");
    assert_eq!(choice(0)["token_ids"], json!([195]));
    assert_eq!(choice(0)["prompt_token_ids"], json!([7]));
    assert_eq!(choice(0)["logprobs"]["token_logprobs"], json!([-0.5]));
    assert_eq!(choice(1)["text"], "é");
    assert_eq!(choice(1)["token_ids"], json!([169]));
    assert_eq!(choice(1).get("prompt_token_ids"), None);
    assert_eq!(choice(2)["finish_reason"], "length");
    assert_eq!(choice(2)["token_ids"], json!([]));
    assert_eq!(choice(2)["logprobs"], json!(null));
}

#[test]
fn chat_stream_tells_the_prompt_ids_once_with_the_role() {
    let bench = bench();
    bench.will_say("ab", FinishReason::Length);
    let body = json!({"messages": hello(), "return_token_ids": true, "stream": true});
    let text = drain(&mut *events(bench.post(CHAT, &body)));
    assert_eq!(text.matches("prompt_token_ids").count(), 1);
    let chunks = data(&text);
    assert_eq!(
        chunks[0]["choices"][0]["prompt_token_ids"]
            .as_array()
            .unwrap()
            .len(),
        7
    );
    assert_eq!(chunks[1]["choices"][0]["token_ids"], json!([97]));
}

#[test]
fn several_prompts_are_several_choices() {
    let bench = bench();
    bench.will_say("AAA", FinishReason::Stop);
    bench.will_say("B", FinishReason::Length);
    let (_, body) = bench.post_json(COMPLETIONS, &json!({"prompt": ["x", "yy"]}));
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_eq!(
        (&choices[0]["text"], &choices[1]["text"]),
        (&json!("AAA"), &json!("B"))
    );
    assert_eq!(choices[1]["index"], 1);
    assert_eq!(body["usage"]["prompt_tokens"], 5);
    assert_eq!(body["usage"]["completion_tokens"], 4);

    bench.will_say("AAA", FinishReason::Stop);
    bench.will_say("B", FinishReason::Length);
    let body = json!({"prompt": [[1], [2, 3]], "stream": true});
    let chunks = data(&drain(&mut *events(bench.post(COMPLETIONS, &body))));
    let mut texts = [String::new(), String::new()];
    for chunk in chunks.iter().filter(|chunk| chunk.is_object()) {
        let choice = &chunk["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(texts, ["AAA", "B"]);
    assert_eq!(chunks.iter().filter(|chunk| *chunk == "[DONE]").count(), 1);
}

#[test]
fn a_model_without_a_tokenizer_answers_ids_and_empty_text() {
    let bench = bench_with(served_model(false));
    bench.will_say("ab", FinishReason::Length);
    let (status, body) = bench.post_json(COMPLETIONS, &json!({"prompt": [1], "logprobs": 1}));
    assert_eq!(status, 200);
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "");
    assert_eq!(choice["token_ids"], json!([97, 98]));
    assert_eq!(choice["logprobs"]["tokens"][0], "token_id:97");
    for (path, request, param) in [
        (COMPLETIONS, json!({"prompt": "text"}), "prompt"),
        (COMPLETIONS, json!({"prompt": [1], "stop": "x"}), "stop"),
        (CHAT, json!({"messages": hello()}), "messages"),
        ("/tokenize", json!({"prompt": "x"}), "prompt"),
        ("/detokenize", json!({"tokens": [1]}), "tokens"),
    ] {
        let (status, body) = bench.post_json(path, &request);
        assert_eq!(
            (status, &body["error"]["code"]),
            (400, &json!("no_tokenizer")),
            "{path}"
        );
        assert_eq!(body["error"]["param"], param);
    }
}

#[test]
fn tokenize_and_detokenize() {
    let bench = bench();
    for (request, tokens) in [
        (json!({"prompt": "ab"}), json!([BOS, 97, 98])),
        (
            json!({"prompt": "ab", "add_special_tokens": false}),
            json!([97, 98]),
        ),
        (json!({"content": "ab"}), json!([97, 98])),
        (
            json!({"messages": [{"role": "user", "content": ""}]}),
            json!([117, 58, 59, 97, 58]),
        ),
    ] {
        let (status, body) = bench.post_json("/tokenize", &request);
        assert_eq!((status, &body["tokens"]), (200, &tokens), "{request}");
        assert_eq!(body["count"], tokens.as_array().unwrap().len());
        assert_eq!(body["max_model_len"], CONTEXT);
    }
    let (_, body) = bench.post_json(
        "/tokenize",
        &json!({"content": "ab", "return_token_strs": true}),
    );
    assert_eq!(body["token_strs"], json!(["a", "b"]));
    let (_, body) = bench.post_json("/detokenize", &json!({"tokens": [195, 169, EOS]}));
    assert_eq!(body, json!({"prompt": "é</s>", "content": "é</s>"}));
    let (status, body) = bench.post_json("/detokenize", &json!({"tokens": [VOCABULARY]}));
    assert_eq!(
        (status, &body["error"]["param"]),
        (400, &json!("tokens[0]"))
    );
}

#[test]
fn the_other_pages() {
    let bench = bench();
    let get = |path: &str| {
        let answer = bench.call("GET", path, b"");
        (answer.status.as_u16(), body_json(answer))
    };
    let (status, models) = get("/v1/models");
    assert_eq!(status, 200);
    assert_eq!(
        models["data"][0],
        json!({"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "kvserve",
               "max_model_len": CONTEXT})
    );
    assert_eq!(get("/v1/models/alias/tiny").1["id"], "alias/tiny");
    let (status, missing) = get("/v1/models/gpt-5");
    assert_eq!(
        (status, &missing["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    assert_eq!(get("/health"), (200, json!({"status": "ok"})));
    assert_eq!(get("/ready").0, 503);
    assert_eq!(get("/version").1["name"], "kvserve");
    assert_eq!(get("/nodes/status").0, 404);
    assert_eq!(get("/debug/transfers").1["path"], "/debug/transfers");
    assert_eq!(get("/debug/missing").0, 404);
    let chaos = bench.call("POST", "/debug/chaos", b"completion=lose@1");
    assert_eq!(body_json(chaos)["bytes"], 17);
    let metrics = body_bytes(bench.call("GET", "/metrics", b""));
    let text = std::str::from_utf8(&metrics).unwrap();
    assert!(
        text.contains("kvserve_http_requests_total{endpoint=\"models\",status=\"200\"} 2"),
        "{text}"
    );
    assert!(text.ends_with("node_metric 1\n"));
}
