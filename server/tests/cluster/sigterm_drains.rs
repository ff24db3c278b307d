//! SIGTERM under load cuts no request.

use crate::harness::{
    Cluster, Options, fixture, ids_of, ids_request, model_path, one_at_a_time, post, skipped,
};
use std::time::Duration;

#[test]
fn sigterm_under_load_cuts_no_request_that_was_taken() {
    let Some(model) = model_path() else {
        return skipped("sigterm_under_load_cuts_no_request_that_was_taken");
    };
    let _turn = one_at_a_time();
    let case = &fixture("smollm2-q4_1-greedy.json")[0];
    for options in [Options::serve(model.clone()), Options::up(model)] {
        let cluster = Cluster::start(&options);
        let body = ids_request(&case.prompt_ids, 48);
        let api = cluster.api;
        let clients: Vec<_> = (0..12)
            .map(|_| {
                let body = body.clone();
                std::thread::spawn(move || post(api, "/v1/completions", &body))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        // SAFETY: a signal to our own child.
        assert_eq!(unsafe { libc::kill(cluster.pid(), libc::SIGTERM) }, 0);
        for client in clients {
            let answer = client.join().expect("client");
            assert_eq!(answer.status, 200, "{}: {}", options.command, answer.body);
            assert_eq!(ids_of(&answer.json()), case.gen_ids);
        }
    }
}
