//! What a request may hold: fields, ranges, bounds; and thousands of broken ones.

mod api_support;
use api_support::*;
use kvserve::api::ServedModel;
use kvserve::api::params::Kind;
use kvserve::api::prepare::{Prepared, prepare};
use kvserve::engine::FinishReason;
use serde_json::{Value, json};

fn completion(body: Value) -> Result<Prepared, (u16, String, String)> {
    prepared(Kind::Completion, body, &served_model(true))
}

fn chat(body: Value) -> Result<Prepared, (u16, String, String)> {
    prepared(Kind::Chat, body, &served_model(true))
}

fn prepared(
    kind: Kind,
    body: Value,
    model: &ServedModel,
) -> Result<Prepared, (u16, String, String)> {
    prepare(kind, body.to_string().as_bytes(), model).map_err(|error| {
        let param = error.param.unwrap_or_default().into_owned();
        (error.status.as_u16(), error.code.to_owned(), param)
    })
}

fn refused(status: u16, code: &str, param: &str) -> (u16, String, String) {
    (status, code.into(), param.into())
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn the_four_forms_of_a_prompt() {
    let prompts = |value: Value| -> Vec<Vec<u32>> {
        let body = json!({"prompt": value, "add_special_tokens": false});
        let prepared = completion(body).unwrap();
        prepared.prompts.into_iter().map(|one| one.ids).collect()
    };
    assert_eq!(prompts(json!("ab")), [ids("ab")]);
    assert_eq!(prompts(json!(["ab", "c"])), [ids("ab"), ids("c")]);
    assert_eq!(prompts(json!([1, 2])), [vec![1, 2]]);
    assert_eq!(prompts(json!([[1, 2], [3]])), [vec![1, 2], vec![3]]);
    assert_eq!(prompts(json!(["ab", [1]])), [ids("ab"), vec![1]]);
}

#[test]
fn odd_prompts_are_refused_by_name() {
    for (value, code, param) in [
        (json!(null), "missing_field", "prompt"),
        (json!(5), "invalid_type", "prompt"),
        (json!({"a": 1}), "invalid_type", "prompt"),
        (json!([null]), "invalid_type", "prompt[0]"),
        (json!([1, "a"]), "invalid_type", "prompt[1]"),
        (json!(["a", 1]), "invalid_type", "prompt[1]"),
        (json!([[1], [1.5]]), "invalid_type", "prompt[1][0]"),
        (json!([1, 258]), "invalid_token_id", "prompt[1]"),
        (json!([[0], [-1]]), "invalid_token_id", "prompt[1][0]"),
        (json!([]), "invalid_value", "prompt"),
        (json!([[]]), "invalid_value", "prompt"),
        (json!(vec!["a"; 129]), "invalid_value", "prompt"),
        (json!("a\u{0}"), "tokenizer_failed", "prompt"),
    ] {
        let body = json!({"prompt": value});
        assert_eq!(
            completion(body).unwrap_err(),
            refused(400, code, param),
            "{value}"
        );
    }
}

#[test]
fn an_empty_prompt_starts_from_bos_where_there_is_one() {
    let body = json!({"prompt": "", "add_special_tokens": false});
    assert_eq!(
        completion(body.clone()).unwrap_err(),
        refused(400, "invalid_value", "prompt")
    );
    let model = ServedModel {
        bos_id: Some(BOS),
        ..served_model(true)
    };
    let prepared = prepared(Kind::Completion, body, &model).unwrap();
    assert_eq!(prepared.prompts[0].ids, [BOS]);
}

#[test]
fn the_context_bounds_prompt_and_answer() {
    let with = |length: usize, more: Value| {
        let mut body = json!({"prompt": vec![1; length]});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        completion(body)
    };
    let context = CONTEXT as usize;
    assert_eq!(with(1, json!({})).unwrap().prompts[0].max_tokens, 16);
    assert_eq!(
        with(context - 1, json!({})).unwrap().prompts[0].max_tokens,
        1
    );
    assert_eq!(
        with(4, json!({"max_tokens": 1000})).unwrap().prompts[0].max_tokens,
        CONTEXT - 4
    );
    assert_eq!(
        with(4, json!({"max_tokens": 9, "max_completion_tokens": 7}))
            .unwrap()
            .prompts[0]
            .max_tokens,
        7
    );
    for length in [context, context + 1, 5000] {
        let body = json!({"prompt": vec![1; length]}).to_string();
        let error = prepare(Kind::Completion, body.as_bytes(), &served_model(true)).unwrap_err();
        assert_eq!(
            (error.status.as_u16(), error.code),
            (400, "context_length_exceeded")
        );
        assert!(error.message.contains(&length.to_string()) && error.message.contains("64"));
    }
    // A text that cannot fit is refused before it is tokenised.
    let error = chat(json!({"messages": [{"role": "user", "content": "x".repeat(1 << 20)}]}));
    assert_eq!(
        error.unwrap_err(),
        refused(400, "context_length_exceeded", "messages")
    );
}

#[test]
fn sampling_fields_have_ranges() {
    let good = json!({
        "prompt": "a", "temperature": 0, "top_p": 0.9, "top_k": -1, "seed": -5,
        "stop": ["x", "yy"], "stop_token_ids": [3], "ignore_eos": true, "logprobs": 20,
        "skip_special_tokens": false, "n": 1, "user": "u", "made_up": 1, "suffix": null
    });
    let params = completion(good).unwrap().params;
    assert_eq!(
        (params.temperature, params.top_p, params.top_k),
        (0.0, 0.9, 0)
    );
    assert_eq!(params.seed, Some(-5i64 as u64));
    assert_eq!(params.stop, ["x", "yy"]);
    assert_eq!(
        (params.stop_token_ids, params.logprobs),
        (vec![3], Some(20))
    );
    assert!(params.ignore_eos && !params.skip_special_tokens && !params.stream);
    assert_eq!(
        (params.tolerated.unknown_fields, params.tolerated.nulls),
        (1, 1)
    );
    assert_eq!(
        completion(json!({"prompt": "a", "top_p": 0}))
            .unwrap()
            .params
            .top_k,
        1
    );

    for (field, value, code) in [
        ("temperature", json!(-0.1), "invalid_value"),
        ("temperature", json!(2.1), "invalid_value"),
        ("temperature", json!("1"), "invalid_type"),
        ("top_p", json!(1.01), "invalid_value"),
        ("top_k", json!(-2), "invalid_value"),
        ("top_k", json!(1e12), "invalid_value"),
        ("max_tokens", json!(0), "invalid_value"),
        ("max_tokens", json!(-1), "invalid_value"),
        ("max_tokens", json!(1.5), "invalid_type"),
        ("max_tokens", json!(u64::MAX), "invalid_value"),
        ("max_completion_tokens", json!(0), "invalid_value"),
        ("seed", json!(1.5), "invalid_type"),
        ("seed", json!(1e300), "invalid_type"),
        ("stop", json!(""), "invalid_value"),
        ("stop", json!([1]), "invalid_type"),
        ("stop", json!(vec!["x"; 17]), "invalid_value"),
        ("stop", json!("x".repeat(1025)), "invalid_value"),
        ("stop_token_ids", json!([258]), "invalid_token_id"),
        ("stop_token_ids", json!(vec![1; 129]), "invalid_value"),
        ("logprobs", json!(21), "invalid_value"),
        ("logprobs", json!(true), "invalid_type"),
        ("stream", json!("yes"), "invalid_type"),
        ("stream_options", json!({}), "invalid_value"),
        ("n", json!(2), "not_supported"),
        ("presence_penalty", json!(2.1), "invalid_value"),
        ("frequency_penalty", json!("x"), "invalid_type"),
        ("repetition_penalty", json!(0), "invalid_value"),
        ("min_p", json!(1.5), "invalid_value"),
        ("min_tokens", json!(-1), "invalid_value"),
        ("logit_bias", json!({"x": 5}), "invalid_value"),
        ("logit_bias", json!({"4000000000": 5}), "invalid_value"),
        ("logit_bias", json!({"1": 101}), "invalid_value"),
        ("logit_bias", json!([1]), "invalid_type"),
        ("model", json!(1), "invalid_type"),
    ] {
        let (status, got, param) =
            completion(json!({"prompt": "a", field: value.clone()})).unwrap_err();
        assert_eq!((status, got.as_str()), (400, code), "{field} {value}");
        assert!(param.starts_with(field), "{field}: {param}");
    }
    assert_eq!(
        completion(json!({"prompt": "a", "model": "gpt-5"})).unwrap_err(),
        refused(404, "model_not_found", "model")
    );
}

#[test]
fn chat_logprobs_need_their_switch() {
    let messages = json!([{"role": "user", "content": "a"}]);
    let with = |more: Value| {
        let mut body = json!({"messages": messages});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        chat(body).map(|prepared| prepared.params.logprobs)
    };
    assert_eq!(with(json!({"logprobs": true})).unwrap(), Some(0));
    assert_eq!(
        with(json!({"logprobs": true, "top_logprobs": 5})).unwrap(),
        Some(5)
    );
    assert_eq!(
        with(json!({"logprobs": false, "top_logprobs": 0})).unwrap(),
        None
    );
    assert_eq!(
        with(json!({"top_logprobs": 5})).unwrap_err(),
        refused(400, "invalid_value", "top_logprobs")
    );
}

#[test]
fn messages_are_checked_one_by_one() {
    let good = json!([
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "user", "content": "c", "name": "me"}
    ]);
    let prepared = chat(json!({"messages": good})).unwrap();
    assert_eq!(prepared.prompts[0].ids, ids("s:be kind;u:a\nb;a:;u:c;a:"));
    for (messages, code, param) in [
        (json!(null), "missing_field", "messages"),
        (json!("hi"), "invalid_type", "messages"),
        (json!([]), "invalid_value", "messages"),
        (json!(["hi"]), "invalid_type", "messages[0]"),
        (
            json!([{"content": "a"}]),
            "missing_field",
            "messages[0].role",
        ),
        (
            json!([{"role": 1, "content": "a"}]),
            "invalid_type",
            "messages[0].role",
        ),
        (
            json!([{"role": "boss", "content": "a"}]),
            "invalid_value",
            "messages[0].role",
        ),
        (
            json!([{"role": "tool", "content": "a"}]),
            "not_supported",
            "messages[0].role",
        ),
        (
            json!([{"role": "user"}]),
            "missing_field",
            "messages[0].content",
        ),
        (
            json!([{"role": "user", "content": 1}]),
            "invalid_type",
            "messages[0].content",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            "not_supported",
            "messages[0].content[0].type",
        ),
        (
            json!([{"role": "user", "content": [{"text": "a"}]}]),
            "missing_field",
            "messages[0].content[0].type",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{}]}]),
            "not_supported",
            "messages[0].tool_calls",
        ),
        (
            json!([{"role": "user", "content": "boom"}]),
            "chat_template_failed",
            "messages",
        ),
    ] {
        let error = chat(json!({"messages": messages})).unwrap_err();
        assert_eq!(error, refused(400, code, param), "{messages}");
    }
}

/// Small deterministic numbers for the mutations.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

fn mutated(body: &[u8], dice: &mut Dice) -> Vec<u8> {
    const PARTS: [&[u8]; 14] = [
        b"null",
        b"-1",
        b"1e400",
        b"\"",
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b"\\u",
        b"\xff",
        b"1e18",
        b"true",
        b"[[[[[[[[",
    ];
    let mut body = body.to_vec();
    for _ in 0..=dice.roll(4) {
        let at = dice.roll(body.len() + 1);
        match dice.roll(4) {
            0 => body.truncate(at),
            1 => body
                .splice(at..at, PARTS[dice.roll(PARTS.len())].iter().copied())
                .for_each(drop),
            2 if at < body.len() => body[at] = dice.roll(256) as u8,
            _ => {
                let end = (at + dice.roll(12)).min(body.len());
                body.splice(at..end, []).for_each(drop);
            }
        }
    }
    body
}

#[test]
fn no_mutated_body_panics_or_gets_anything_but_json() {
    let seeds: [(&str, Value); 4] = [
        (
            "/v1/completions",
            json!({"prompt": ["ab", [1, 2]], "max_tokens": 4, "stop": ["x"], "logprobs": 2,
                   "seed": 7, "temperature": 0.5, "stream_options": null, "logit_bias": {}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "s"},
                                {"role": "user", "content": [{"type": "text", "text": "é"}]}],
                   "top_logprobs": 3, "logprobs": true, "n": 1, "response_format": {"type": "text"}}),
        ),
        (
            "/tokenize",
            json!({"prompt": "ab", "add_special_tokens": true}),
        ),
        ("/detokenize", json!({"tokens": [1, 2, 300]})),
    ];
    let mut dice = Dice(0x5eed_1234_5678_9abc);
    let (mut good, mut bad) = (0, 0);
    for (path, seed) in &seeds {
        let seed = seed.to_string();
        for _ in 0..5_000 {
            let body = mutated(seed.as_bytes(), &mut dice);
            let bench = bench();
            for _ in 0..8 {
                bench.will_say("aé", FinishReason::Stop);
            }
            let answer = bench.call("POST", path, &body);
            let status = answer.status.as_u16();
            if status == 200 {
                good += 1;
                continue;
            }
            bad += 1;
            assert!(
                (400..500).contains(&status),
                "{status}: {}",
                String::from_utf8_lossy(&body)
            );
            let error = body_json(answer)["error"].clone();
            assert!(error["code"].is_string() && error["type"].is_string());
            assert!(bench.engine.asked.borrow().is_empty());
        }
    }
    assert!(
        good > 100 && bad > 1000,
        "the mutations are too tame or too wild: {good} {bad}"
    );
}
