//! The API over the default model's own tokenizer and chat template.

mod api_support;
use api_support::*;
use kvserve::api::ServedModel;
use kvserve::api::params::Kind;
use kvserve::api::prepare::prepare;
use kvserve::engine::{FinishReason, GenerateEvent, TokenEvent};
use kvserve_model::Model;
use kvserve_model::testing::smollm2_path;
use serde_json::json;

#[test]
fn the_default_model_chats_tokenizes_and_stops() {
    let Some(path) = smollm2_path() else {
        eprintln!("skipped: KVSERVE_TEST_OFFLINE=1 and the model is not in the cache");
        return;
    };
    let mut model = Model::load(&path).unwrap();
    let tokenizer = model.tokenizer.clone().unwrap();
    let served = ServedModel::of(&mut model, vec!["smollm2-135m".into()], 2048);
    assert_eq!(served.name(), "smollm2-135m");
    assert!(!served.eos_ids.is_empty());

    let body = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}],
                      "max_tokens": 16, "temperature": 0});
    let prepared = prepare(Kind::Chat, body.to_string().as_bytes(), &served).unwrap();
    let prompt = tokenizer.decode(&prepared.prompts[0].ids, false);
    assert!(
        prompt.ends_with(
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        ),
        "{prompt}"
    );

    // The engine gives the ids of a text with a character of several tokens.
    let said = "Paris 🙂 is. END of it";
    let bench = bench_with(served);
    let script = Script::default();
    let ids = tokenizer.encode(said, false).unwrap();
    for id in &ids {
        script
            .0
            .borrow_mut()
            .push_back(GenerateEvent::Token(TokenEvent {
                token: *id,
                logprob: -0.25,
                top: Vec::new(),
            }));
    }
    script
        .0
        .borrow_mut()
        .push_back(finished(FinishReason::Stop));
    bench.will(Ok(script));
    let body = json!({"prompt": "Hi", "stop": "END", "max_tokens": 50, "stream": true,
                      "return_token_ids": true});
    let chunks = data(&drain(&mut *events(bench.post("/v1/completions", &body))));
    let mut text = String::new();
    let mut streamed_ids = Vec::new();
    for chunk in chunks.iter().filter(|chunk| chunk.is_object()) {
        let choice = &chunk["choices"][0];
        text += choice["text"].as_str().unwrap();
        for id in choice["token_ids"].as_array().unwrap() {
            streamed_ids.push(id.as_u64().unwrap() as u32);
        }
    }
    assert_eq!(text, "Paris 🙂 is. ");
    assert!(ids.starts_with(&streamed_ids) && streamed_ids.len() < ids.len());

    let (_, body) = bench.post_json("/tokenize", &json!({"content": said}));
    assert_eq!(body["tokens"], json!(ids));
    let (_, body) = bench.post_json("/detokenize", &json!({"tokens": ids}));
    assert_eq!(body["content"], said);
}
