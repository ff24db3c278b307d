//! Many streams at once give the texts of one-at-a-time runs.

use crate::harness::{
    Cluster, Options, fixture, ids_of, ids_request, model_path, one_at_a_time, post, skipped,
};

/// Streams at once.
const STREAMS: usize = 64;

#[test]
fn sixty_four_streams_of_mixed_lengths_equal_their_single_runs() {
    let Some(model) = model_path() else {
        return skipped("sixty_four_streams_of_mixed_lengths_equal_their_single_runs");
    };
    let _turn = one_at_a_time();
    let cluster = Cluster::start(&Options::up(model));
    let cases = fixture("smollm2-q4_1-greedy.json");
    // Prompts from 1 token to beyond a page and a chunk; answers of 4 to 27 tokens.
    let requests: Vec<_> = (0..STREAMS)
        .map(|number| {
            let case = &cases[number % cases.len()];
            let length = 1 + number * 3;
            let prompt: Vec<u32> = case
                .prompt_ids
                .iter()
                .copied()
                .cycle()
                .take(length)
                .collect();
            ids_request(&prompt, 4 + number % 24)
        })
        .collect();
    let alone: Vec<_> = requests
        .iter()
        .map(|body| ids_of(&cluster.complete(body)))
        .collect();
    let api = cluster.api;
    let clients: Vec<_> = requests
        .iter()
        .cloned()
        .map(|body| std::thread::spawn(move || post(api, "/v1/completions", &body)))
        .collect();
    for (number, client) in clients.into_iter().enumerate() {
        let answer = client.join().expect("client");
        assert_eq!(answer.status, 200, "stream {number}: {}", answer.body);
        assert_eq!(ids_of(&answer.json()), alone[number], "stream {number}");
    }
    cluster.ledgers_restored("ledgers after 64 streams");
}
