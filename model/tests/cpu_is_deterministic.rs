//! PROTOCOL D1: logits are bit-equal over batch 1 to 64, chunk 1 to 512, threads 1 to n, prefill
//! or decode path, and whichever pages a sequence has.

mod cpu_support;

use cpu_support::{Random, RandomModel, bits, generate, greedy, push};
use kvserve_kv::{KvDtype, PageId};
use kvserve_model::cpu::Isa;
use kvserve_model::{CpuEngine, RopeLayout, SampleSpec, Sampled, Step};

type Bits = Vec<(u32, u32, Vec<(u32, u32)>)>;

/// All logits of the vocabulary are compared, as log-probabilities.
const ALL: u8 = 203;

fn all_bits(samples: &[Sampled]) -> Bits {
    samples.iter().map(bits).collect()
}

fn prompt(random: &mut Random, length: usize) -> Vec<u32> {
    (0..length).map(|_| random.below(203) as u32).collect()
}

/// Different pages of the pool in random order.
fn pages(random: &mut Random, count: usize) -> Vec<PageId> {
    let mut all: Vec<u32> = (0..2048).collect();
    for i in 0..count {
        let other = i + random.below(all.len() - i);
        all.swap(i, other);
    }
    all[..count].iter().map(|page| PageId(*page)).collect()
}

fn variants() -> Vec<(bool, bool, RopeLayout, KvDtype)> {
    vec![
        (true, false, RopeLayout::Interleaved, KvDtype::F32),
        (false, true, RopeLayout::Halves, KvDtype::F32),
        (true, true, RopeLayout::Halves, KvDtype::Bf16),
        (false, false, RopeLayout::Interleaved, KvDtype::Bf16),
    ]
}

fn engines(mut check: impl FnMut(&mut dyn FnMut(usize) -> CpuEngine, &str)) {
    for (index, (quantised, bias, rope, dtype)) in variants().into_iter().enumerate() {
        let model = RandomModel::new(quantised, bias, 11 + index as u64);
        for isa in Isa::available() {
            let name = format!("{} {dtype:?} quantised={quantised} bias={bias}", isa.name());
            check(
                &mut |threads| model.engine(isa, dtype, threads, rope),
                &name,
            );
        }
    }
}

#[test]
fn over_chunks_and_threads() {
    engines(|build, name| {
        let mut random = Random(3);
        // Over a span's border at 512, off every block and page border.
        let prompt = prompt(&mut random, 523);
        let mut expected: Option<Bits> = None;
        for (threads, chunks) in [
            (1, vec![512]),
            (2, vec![1, 2, 3, 4, 5, 12, 13, 64]),
            (3, vec![523]),
            (2, vec![7, 256, 1, 100]),
        ] {
            let mut engine = build(threads);
            let table = pages(&mut random, 34);
            let out = generate(&mut engine, &prompt, &table, &chunks, 4, ALL);
            let found = all_bits(&out);
            let expected = expected.get_or_insert_with(|| found.clone());
            assert_eq!(
                &found, expected,
                "{name}: {threads} threads, chunks {chunks:?}"
            );
        }
    });
}

#[test]
fn one_token_at_a_time_is_the_same_as_a_prefill() {
    engines(|build, name| {
        let mut random = Random(4);
        let prompt = prompt(&mut random, 90);
        let mut engine = build(2);
        let whole = generate(&mut engine, &prompt, &pages(&mut random, 7), &[512], 3, ALL);
        let single = generate(&mut engine, &prompt, &pages(&mut random, 7), &[1], 3, ALL);
        assert_eq!(all_bits(&whole), all_bits(&single), "{name}");
    });
}

/// Sequences of a batch, each with its own prompt, decoded together; some are still in prefill
/// while others decode.
fn batch(
    engine: &mut CpuEngine,
    prompts: &[Vec<u32>],
    tables: &[Vec<PageId>],
    chunk: usize,
    count: usize,
) -> Vec<Vec<Sampled>> {
    let mut tokens = prompts.to_vec();
    let mut done = vec![0; prompts.len()];
    let mut out: Vec<Vec<Sampled>> = vec![Vec::new(); prompts.len()];
    let mut step = Step::default();
    while out.iter().any(|out| out.len() < count) {
        step.clear();
        let mut members = Vec::new();
        for i in 0..prompts.len() {
            if out[i].len() >= count {
                continue;
            }
            let left = tokens[i].len() - done[i];
            let take = left.min(chunk);
            let spec = (take == left).then(|| greedy(tokens[i].len(), Some(ALL)));
            push(
                &mut step,
                &tokens[i][done[i]..done[i] + take],
                done[i],
                &tables[i],
                spec,
            );
            done[i] += take;
            members.push(i);
        }
        engine.run(&mut step).unwrap();
        for (sampled, i) in step.sampled.iter_mut().zip(members) {
            if let Some(sampled) = sampled.take() {
                tokens[i].push(sampled.token);
                out[i].push(sampled);
            }
        }
    }
    out
}

#[test]
fn over_batches_of_prefill_and_decode() {
    engines(|build, name| {
        let mut random = Random(5);
        let lengths: Vec<usize> = (0..64).map(|i| 1 + (i * 37) % 90).collect();
        let prompts: Vec<_> = lengths
            .iter()
            .map(|length| prompt(&mut random, *length))
            .collect();
        let table = pages(&mut random, 64 * 7);
        let tables: Vec<Vec<PageId>> = table.chunks(7).map(<[PageId]>::to_vec).collect();
        let mut engine = build(2);
        let alone: Vec<Bits> = prompts
            .iter()
            .zip(&tables)
            .map(|(prompt, table)| all_bits(&generate(&mut engine, prompt, table, &[512], 3, ALL)))
            .collect();
        for (size, chunk) in [(64, 16), (64, 512), (17, 5), (5, 33), (2, 1)] {
            let mut engine = build(1 + size % 3);
            let found = batch(&mut engine, &prompts[..size], &tables[..size], chunk, 3);
            for (i, found) in found.iter().enumerate() {
                assert_eq!(
                    all_bits(found),
                    alone[i],
                    "{name}: sequence {i} of {size}, chunk {chunk}"
                );
            }
        }
    });
}

#[test]
fn a_step_longer_than_a_pass_is_cut_without_a_trace() {
    engines(|build, name| {
        let mut random = Random(6);
        let prompt = prompt(&mut random, 1300);
        let mut engine = build(2);
        let cut = generate(
            &mut engine,
            &prompt,
            &pages(&mut random, 82),
            &[1300],
            2,
            ALL,
        );
        let chunks = generate(
            &mut engine,
            &prompt,
            &pages(&mut random, 82),
            &[400],
            2,
            ALL,
        );
        assert_eq!(all_bits(&cut), all_bits(&chunks), "{name}");
    });
}

#[test]
fn shared_prefix_pages_give_the_same_as_own_ones() {
    engines(|build, name| {
        let mut random = Random(7);
        let prefix = prompt(&mut random, 64);
        let table = pages(&mut random, 12);
        let mut engine = build(2);
        generate(&mut engine, &prefix, &table, &[64], 1, 0);
        let tails = [prompt(&mut random, 9), prompt(&mut random, 20)];
        let mut step = Step::default();
        for (i, tail) in tails.iter().enumerate() {
            let own = 4 + i * 4;
            let mut shared = table[..4].to_vec();
            shared.extend(&table[own..own + 4]);
            let spec = greedy(64 + tail.len(), Some(ALL));
            push(&mut step, tail, 64, &shared, Some(spec));
        }
        engine.run(&mut step).unwrap();
        for (sampled, tail) in step.sampled.iter().zip(&tails) {
            let whole: Vec<u32> = prefix.iter().chain(tail).copied().collect();
            let own = pages(&mut random, 6);
            let alone = generate(&mut engine, &whole, &own, &[512], 1, ALL);
            assert_eq!(bits(sampled.as_ref().unwrap()), bits(&alone[0]), "{name}");
        }
    });
}

#[test]
fn what_lies_in_the_pages_behind_a_sequence_is_never_read() {
    engines(|build, name| {
        let mut random = Random(8);
        let prompt = prompt(&mut random, 37);
        let mut engine = build(2);
        let clean = generate(&mut engine, &prompt, &pages(&mut random, 3), &[512], 2, ALL);
        let pool = engine.pool();
        for page in 0..pool.pages() {
            // SAFETY: no step runs; every byte of the page is ours. All ones are NaNs.
            unsafe {
                pool.page(PageId(page as u32))
                    .write_bytes(0xFF, pool.page_stride())
            };
        }
        let dirty = generate(
            &mut engine,
            &prompt,
            &pages(&mut random, 3),
            &[5, 20],
            2,
            ALL,
        );
        assert_eq!(all_bits(&clean), all_bits(&dirty), "{name}");
    });
}

#[test]
fn drawn_tokens_do_not_depend_on_the_batch() {
    let model = RandomModel::new(true, false, 21);
    let isa = *Isa::available().last().unwrap();
    let mut engine = model.engine(isa, KvDtype::F32, 2, RopeLayout::Halves);
    let mut random = Random(9);
    let prompts: Vec<_> = (0..40).map(|i| prompt(&mut random, 3 + i)).collect();
    let table = pages(&mut random, 40 * 3);
    let spec = |i: usize| SampleSpec {
        temperature: 0.9,
        top_k: [0, 5, 40][i % 3],
        top_p: [1.0, 0.8][i % 2],
        seed: 77,
        choice: i as u32,
        ..greedy(prompts[i].len(), None)
    };
    let mut together = Step::default();
    for (i, prompt) in prompts.iter().enumerate() {
        push(
            &mut together,
            prompt,
            0,
            &table[i * 3..i * 3 + 3],
            Some(spec(i)),
        );
    }
    engine.run(&mut together).unwrap();
    for (i, prompt) in prompts.iter().enumerate() {
        let mut alone = Step::default();
        push(
            &mut alone,
            prompt,
            0,
            &table[i * 3..i * 3 + 3],
            Some(spec(i)),
        );
        engine.run(&mut alone).unwrap();
        let token = |step: &Step, i: usize| step.sampled[i].as_ref().unwrap().token;
        assert_eq!(token(&alone, 0), token(&together, i), "prompt {i}");
    }
}
