//! How far each kind of arithmetic is from f32, in log-probabilities.

use crate::load::{greedy, push, run_step};
use kvserve_kv::KvDtype;
use kvserve_model::cpu::Isa;
use kvserve_model::{CpuEngine, CpuOptions, Model, Step};

/// Tokens of the prompt, of any language: the first ids that are no control tokens.
const PROMPT_TOKENS: u32 = 24;
/// Positions compared.
const STEPS: usize = 96;
/// Best tokens compared at each.
const TOP: u8 = 40;

/// Prints one line per instruction set: differences to f32 over the best tokens of each step, all
/// fed the tokens that f32 chose.
pub fn print(model: &Model, options: &CpuOptions) -> Result<(), Box<dyn std::error::Error>> {
    let with = |isa: Isa, dtype: KvDtype| {
        let options = CpuOptions {
            dtype,
            isa: Some(isa),
            ..options.clone()
        };
        CpuEngine::new(&model.config, &model.weights, model.rope, &options)
    };
    let best = *Isa::available().last().ok_or("no instruction set")?;
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|i| 300 + i * 37).collect();
    let (tokens, wanted) = follow(&mut with(best, KvDtype::F32)?, &prompt, None);
    println!(
        "log-probabilities of the best {TOP} tokens at {STEPS} positions, beside f32:\n{:<24} {:>12} {:>12} {:>12} {:>8}",
        "", "rms, p >= 1%", "max, p >= 1%", "rms, all", "parted"
    );
    for isa in Isa::available() {
        if isa.name() == "portable" {
            continue;
        }
        let (chosen, found) = follow(&mut with(isa, KvDtype::Bf16)?, &prompt, Some(&tokens));
        let (mut likely, mut all, mut max) = (Vec::new(), Vec::new(), 0.0f64);
        for (wanted, found) in wanted.iter().zip(&found) {
            for (id, logprob) in wanted {
                let Some((_, other)) = found.iter().find(|(other, _)| other == id) else {
                    continue;
                };
                let error = f64::from(other - logprob);
                all.push(error * error);
                if f64::from(*logprob) > 0.01f64.ln() {
                    likely.push(error * error);
                    max = max.max(error.abs());
                }
            }
        }
        let rms = |squares: &[f64]| (squares.iter().sum::<f64>() / squares.len() as f64).sqrt();
        let parted = chosen.iter().zip(&tokens).filter(|(a, b)| a != b).count();
        println!(
            "{:<24} {:>12.5} {max:>12.5} {:>12.5} {parted:>8}",
            isa.kernel_class(KvDtype::Bf16),
            rms(&likely),
            rms(&all)
        );
    }
    Ok(())
}

type Top = Vec<(u32, f32)>;

/// Greedy tokens and the best log-probabilities of each step. With `fed`, those tokens follow the
/// prompt, whatever was chosen.
fn follow(engine: &mut CpuEngine, prompt: &[u32], fed: Option<&[u32]>) -> (Vec<u32>, Vec<Top>) {
    let mut step = Step::default();
    let mut tokens = prompt.to_vec();
    let (mut chosen, mut tops) = (Vec::new(), Vec::new());
    let mut start = 0;
    for i in 0..STEPS {
        step.clear();
        let mut spec = greedy(tokens.len());
        if let Some(spec) = &mut spec {
            spec.logprobs = Some(TOP);
        }
        push(&mut step, 0, &tokens[start..], start, spec);
        run_step(engine, &mut step);
        let Some(sampled) = step.sampled[0].take() else {
            continue;
        };
        start = tokens.len();
        tokens.push(fed.map_or(sampled.token, |fed| fed[i]));
        chosen.push(sampled.token);
        tops.push(sampled.top);
    }
    (chosen, tops)
}
