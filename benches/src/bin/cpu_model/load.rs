//! Steps of many streams, each with its own pages.

use kvserve_kv::PageId;
use kvserve_model::{CpuEngine, SampleSpec, Step, StepSequence};

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 16;
/// Pages per stream: 256 tokens for decode; the first streams' pages together hold the prompts.
pub const STREAM_PAGES: usize = 256 / PAGE_TOKENS;

/// Greedy, for the token at `position`.
pub fn greedy(position: usize) -> Option<SampleSpec> {
    Some(SampleSpec {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        seed: 0,
        choice: 0,
        position: position as u32,
        logprobs: None,
        min_p: 0.0,
        banned: Vec::new(),
        shaping: None,
    })
}

/// Adds a stream's tokens at positions `start..` to a step.
pub fn push(
    step: &mut Step,
    stream: usize,
    tokens: &[u32],
    start: usize,
    sample: Option<SampleSpec>,
) {
    let first = step.tokens.len();
    step.tokens.extend(tokens);
    let first_page = step.pages.len();
    let needed = (start + tokens.len()).div_ceil(PAGE_TOKENS);
    let page = |i| PageId((stream * STREAM_PAGES + i) as u32);
    step.pages.extend((0..needed).map(page));
    step.sequences.push(StepSequence {
        tokens: first..step.tokens.len(),
        start,
        pages: first_page..step.pages.len(),
        sample,
    });
}

/// Runs a step; gives its nanoseconds.
pub fn run_step(engine: &mut CpuEngine, step: &mut Step) -> u64 {
    engine.run(step).expect("the bench plans valid steps");
    step.compute_ns
}
