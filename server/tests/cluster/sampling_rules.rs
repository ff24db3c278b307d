//! Bias, penalties and `min_tokens` do what they say, on one node and over a migration alike.

use crate::harness::{
    Cluster, Options, fixture, ids_of, ids_request, model_path, one_at_a_time, skipped,
};
use serde_json::{Value, json};

fn with(mut body: Value, more: &Value) -> Value {
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more.clone());
    }
    body
}

#[test]
fn rules_hold_and_texts_of_serve_and_up_are_equal() {
    let Some(model) = model_path() else {
        return skipped("rules_hold_and_texts_of_serve_and_up_are_equal");
    };
    let _turn = one_at_a_time();
    let case = &fixture("smollm2-q4_1-greedy.json")[0];
    let plain = ids_request(&case.prompt_ids, 24);
    let first = case.gen_ids[0].to_string();
    let chat = json!({
        "prompt": case.prompt_ids, "max_tokens": 64, "temperature": 0, "return_token_ids": true,
    });
    let asked = [
        with(plain.clone(), &json!({"logit_bias": {first.clone(): -100}})),
        with(plain.clone(), &json!({"logit_bias": {"77": 100}})),
        with(
            plain.clone(),
            &json!({"frequency_penalty": 2, "presence_penalty": 2}),
        ),
        with(plain.clone(), &json!({"repetition_penalty": 1.8})),
        with(
            plain.clone(),
            &json!({"temperature": 1, "min_p": 1, "seed": 3}),
        ),
        with(
            chat.clone(),
            &json!({"min_tokens": 60, "logit_bias": {"2": 100}}),
        ),
        with(chat.clone(), &json!({"logit_bias": {"2": 100}})),
        plain,
    ];
    let answers = |options: Options| -> Vec<Vec<u32>> {
        let cluster = Cluster::start(&options);
        let answers = asked.iter().map(|body| ids_of(&cluster.complete(body)));
        answers.collect()
    };
    let on_one = answers(Options::serve(model.clone()));
    let on_two = answers(Options::up(model));
    assert_eq!(on_one, on_two);
    let [
        banned,
        forced,
        penalised,
        repeated,
        best,
        early,
        ended,
        greedy,
    ] = &on_one[..]
    else {
        panic!("as many answers as questions");
    };
    assert!(!banned.contains(&case.gen_ids[0]));
    assert_eq!(forced, &[77; 24]);
    assert_eq!(greedy[..], case.gen_ids[..24]);
    assert_eq!(best, greedy, "min_p of 1 leaves the best token alone");
    let most = |ids: &[u32]| {
        let count = |id| ids.iter().filter(|other| **other == id).count();
        ids.iter().map(|id| count(*id)).max()
    };
    assert!(most(penalised) < Some(4), "{penalised:?}");
    assert_ne!(repeated, greedy);
    // Token 2 ends a text of this model: biased, it comes at once, or as soon as it may.
    assert_eq!(ended.len(), 0, "{ended:?}");
    assert_eq!(early.len(), 60, "{early:?}");
}
