//! The CPU backend through its `Backend` face: steps end as completions, wrong plans come back.

mod cpu_support;

use cpu_support::{RandomModel, bits, generate, greedy, push};
use kvserve_kv::{KvDtype, PageId};
use kvserve_model::cpu::{InvalidStep, Isa};
use kvserve_model::{Backend, CpuBackend, RopeLayout, Step, SubmitReason};
use kvserve_runtime::lane::LaneConfig;
use kvserve_runtime::{
    ChannelId, ChannelKind, Completed, CompletionSource, CompletionStatus, Nanos, Reap, WorkId,
};
use std::time::{Duration, Instant};

const CHANNEL: ChannelId = ChannelId {
    kind: ChannelKind::EngineLane,
    index: 3,
};

fn backend(model: &RandomModel) -> CpuBackend {
    let isa = *Isa::available().last().unwrap();
    let engine = model.engine(isa, KvDtype::F32, 2, RopeLayout::Halves);
    CpuBackend::start(engine, LaneConfig::new("engine-test")).unwrap()
}

fn wait_for(backend: &mut CpuBackend, count: usize) -> Vec<Completed> {
    let mut out = Vec::new();
    let limit = Instant::now() + Duration::from_secs(30);
    while out.len() < count {
        backend.poll(Nanos(0), &mut out);
        assert!(
            Instant::now() < limit,
            "{} of {count} steps ended",
            out.len()
        );
        std::thread::sleep(Duration::from_micros(200));
    }
    out
}

fn step(tokens: &[u32], start: usize, pages: &[u32]) -> Box<Step> {
    let mut step = Box::new(Step::default());
    let pages: Vec<PageId> = pages.iter().map(|page| PageId(*page)).collect();
    let spec = greedy(start + tokens.len(), Some(5));
    push(&mut step, tokens, start, &pages, Some(spec));
    step
}

#[test]
fn steps_end_in_order_with_their_samples() {
    let model = RandomModel::new(true, false, 31);
    let mut backend = backend(&model);
    assert_eq!(backend.vocab_size(), 203);
    assert_eq!(backend.context_length(), 2048);
    assert_eq!(backend.pool().pages(), 2048);
    let work = |position| WorkId::new(CHANNEL, position);
    backend.submit(work(0), step(&[1, 2, 3], 0, &[9])).unwrap();
    backend.submit(work(1), step(&[4], 3, &[9])).unwrap();
    assert_eq!(backend.in_flight(), 2);
    let ends = wait_for(&mut backend, 2);
    for (position, end) in ends.iter().enumerate() {
        assert_eq!(end.work, work(position as u64));
        assert_eq!(end.status, CompletionStatus::Success);
    }
    let first = backend.collect().unwrap();
    let second = backend.collect().unwrap();
    assert!(backend.collect().is_none());
    assert!(first.compute_ns > 0 && first.sampled.len() == 1);

    let isa = *Isa::available().last().unwrap();
    let mut engine = model.engine(isa, KvDtype::F32, 1, RopeLayout::Halves);
    let alone = generate(&mut engine, &[1, 2, 3, 4], &[PageId(0)], &[4], 1, 5);
    assert_eq!(bits(second.sampled[0].as_ref().unwrap()), bits(&alone[0]));

    backend.kill(CHANNEL);
    assert_eq!(backend.reap(CHANNEL), Reap::Quiet);
    let refused = backend.submit(work(2), step(&[4], 4, &[9])).unwrap_err();
    assert_eq!(refused.reason, SubmitReason::Gone);
    backend.shut_down().join().unwrap();
}

#[test]
fn a_wrong_plan_comes_back_whole_and_a_full_lane_is_busy() {
    let model = RandomModel::new(false, true, 32);
    let mut backend = backend(&model);
    let work = |position| WorkId::new(CHANNEL, position);
    let wrong = step(&[1, 203], 0, &[0]);
    let refused = backend.submit(work(0), wrong.clone()).unwrap_err();
    assert_eq!(refused.step, wrong);
    let expected = InvalidStep::TokenId {
        sequence: 0,
        token: 203,
        vocab: 203,
    };
    assert_eq!(refused.reason, SubmitReason::Invalid(expected));
    assert_eq!(
        expected.to_string(),
        "sequence 0 has token 203; ids are below 203"
    );
    let refused = backend
        .submit(work(0), step(&[1; 17], 0, &[0]))
        .unwrap_err();
    assert!(matches!(
        refused.reason,
        SubmitReason::Invalid(InvalidStep::PageTable { .. })
    ));
    assert_eq!(backend.in_flight(), 0);

    let mut taken = 0;
    let busy = loop {
        match backend.submit(work(taken), step(&[1; 16], 0, &[0])) {
            Ok(()) => taken += 1,
            Err(refused) => break refused.reason,
        }
        assert!(taken < 1000, "a lane without a bound");
    };
    assert_eq!(busy, SubmitReason::Busy);
    wait_for(&mut backend, taken as usize);
}
