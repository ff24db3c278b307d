//! Greedy tokens and log-probabilities equal those of transformers on the same weights, through
//! one process and through a migration.

use crate::harness::{
    Case, Cluster, Options, fixture, ids_of, ids_request, model_path, one_at_a_time, skipped,
    tiny_qwen2,
};
use serde_json::Value;

const SMOLLM2: &str = "smollm2-q4_1-greedy.json";
const QWEN2: &str = "qwen2-tiny-random-greedy.json";

/// Log-probabilities of f32 arithmetic may differ from the reference's by this.
const LOGPROB_F32: f64 = 1e-3;
/// Those of bf16, and the margin below which bf16 may choose another token.
const LOGPROB_BF16: f64 = 0.05;

fn ask(cluster: &Cluster, case: &Case) -> Value {
    let mut body = ids_request(&case.prompt_ids, case.gen_ids.len());
    body["logprobs"] = 5.into();
    cluster.complete(&body)
}

fn token_logprobs(answer: &Value) -> Vec<f64> {
    answer["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .expect("token_logprobs")
        .iter()
        .map(|value| value.as_f64().expect("a number"))
        .collect()
}

fn equal_exactly(cluster: &Cluster, cases: &[Case]) {
    for case in cases {
        let answer = ask(cluster, case);
        assert_eq!(ids_of(&answer), case.gen_ids, "case {}", case.id);
        let logprobs = token_logprobs(&answer);
        assert_eq!(logprobs.len(), case.top5.len());
        for (step, (got, top)) in logprobs.iter().zip(&case.top5).enumerate() {
            let wanted = top[0].1;
            assert!(
                (got - wanted).abs() < LOGPROB_F32,
                "case {} step {step}: log-probability {got}, reference {wanted}",
                case.id
            );
        }
    }
}

#[test]
fn serve_gives_the_reference_tokens_and_logprobs() {
    let Some(model) = model_path() else {
        return skipped("serve_gives_the_reference_tokens_and_logprobs");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::serve(model));
    equal_exactly(&cluster, &fixture(SMOLLM2));
}

#[test]
fn a_migration_changes_no_token_and_no_logprob() {
    let Some(model) = model_path() else {
        return skipped("a_migration_changes_no_token_and_no_logprob");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model).arg("--prefix-cache off"));
    let cases = fixture(SMOLLM2);
    equal_exactly(&cluster, &cases);
    let decode = cluster.role(3)[0];
    assert_eq!(
        cluster.metric(decode, "kvserve_migrations_committed_total"),
        cases.len() as f64,
        "every request migrated"
    );
    cluster.ledgers_restored("ledgers after the fixtures");
}

#[test]
fn the_tiny_qwen2_folder_gives_the_reference_tokens_apart_and_together() {
    let _turn = one_at_a_time();
    let cases = fixture(QWEN2);
    for options in [Options::serve(tiny_qwen2()), Options::up(tiny_qwen2())] {
        let cluster = Cluster::start(&options);
        equal_exactly(&cluster, &cases);
    }
}

#[test]
fn bf16_parts_from_the_reference_only_where_two_tokens_are_close() {
    let Some(model) = model_path() else {
        return skipped("bf16_parts_from_the_reference_only_where_two_tokens_are_close");
    };
    let _turn = one_at_a_time();
    let mut options = Options::up(model);
    options.args = vec!["--dtype".into(), "bf16".into(), "--deterministic".into()];
    let cluster = Cluster::start(&options);
    for case in fixture(SMOLLM2) {
        let answer = ask(&cluster, &case);
        let ids = ids_of(&answer);
        let logprobs = token_logprobs(&answer);
        for (step, (got, wanted)) in ids.iter().zip(&case.gen_ids).enumerate() {
            if got != wanted {
                let margin = case.margin[step];
                assert!(
                    margin < LOGPROB_BF16,
                    "case {} parts at step {step} where the margin is {margin}",
                    case.id
                );
                // What follows a different token has no reference.
                break;
            }
            let error = (logprobs[step] - case.top5[step][0].1).abs();
            assert!(
                error < LOGPROB_BF16,
                "case {} step {step}: off by {error}",
                case.id
            );
        }
    }
}
