//! What the tests of the CPU backend share: random models, and driving an engine.
#![allow(dead_code, reason = "each test uses a part of it")]

use kvserve_kv::{KvDtype, PageId};
use kvserve_model::cpu::Isa;
use kvserve_model::{
    Architecture, CpuEngine, CpuOptions, LayerTensor, ModelConfig, RopeLayout, SampleSpec, Sampled,
    Step, StepSequence, TensorId, TensorType, TensorView,
};
use std::collections::HashMap;

/// A small generator for tests; the numbers only have to look random.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let x = self.0 ^ (self.0 >> 29);
        x.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// In [-1, 1).
    pub fn float(&mut self) -> f32 {
        (self.next() & 0xFF_FFFF) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// A model of random weights, each matrix of the type that `kind` says.
pub struct RandomModel {
    pub config: ModelConfig,
    tensors: HashMap<TensorId, (TensorType, usize, usize, Vec<u8>)>,
}

impl RandomModel {
    /// Odd shapes on purpose: no width but those of quantised rows is a multiple of 16.
    pub fn new(quantised: bool, bias: bool, seed: u64) -> Self {
        let (heads, kv_heads, head_dim) = if quantised { (4, 2, 24) } else { (6, 2, 10) };
        let config = ModelConfig {
            architecture: if bias {
                Architecture::Qwen2
            } else {
                Architecture::Llama
            },
            layers: 2,
            hidden: if quantised { 64 } else { 50 },
            heads,
            kv_heads,
            head_dim,
            ffn: if quantised { 96 } else { 77 },
            vocab: 203,
            context: 2048,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-5,
            tied_head: !bias,
            qkv_bias: bias,
            bos: None,
            eos: vec![2],
        };
        let mut model = RandomModel {
            config,
            tensors: HashMap::new(),
        };
        model.fill(quantised, &mut Random(seed));
        model
    }

    fn fill(&mut self, quantised: bool, random: &mut Random) {
        let c = self.config.clone();
        let (query, key) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let (q4, q8, half) = if quantised {
            (TensorType::Q4_1, TensorType::Q8_0, TensorType::F16)
        } else {
            (TensorType::F32, TensorType::Bf16, TensorType::F16)
        };
        self.add(random, TensorId::Embedding, q8, c.vocab, c.hidden);
        self.add(random, TensorId::OutputNorm, TensorType::F32, 1, c.hidden);
        if !c.tied_head {
            self.add(random, TensorId::Head, half, c.vocab, c.hidden);
        }
        for layer in 0..c.layers {
            for part in LayerTensor::ALL {
                if part.is_bias() && !c.qkv_bias {
                    continue;
                }
                let plain = TensorType::F32;
                let (kind, rows, columns) = match part {
                    LayerTensor::AttentionNorm | LayerTensor::FeedForwardNorm => {
                        (plain, 1, c.hidden)
                    }
                    LayerTensor::Query => (q4, query, c.hidden),
                    LayerTensor::Key => (q8, key, c.hidden),
                    LayerTensor::Value => (half, key, c.hidden),
                    LayerTensor::QueryBias => (plain, 1, query),
                    LayerTensor::KeyBias | LayerTensor::ValueBias => (plain, 1, key),
                    LayerTensor::AttentionOutput => (q4, c.hidden, query),
                    LayerTensor::Gate => (q4, c.ffn, c.hidden),
                    LayerTensor::Up => (q8, c.ffn, c.hidden),
                    LayerTensor::Down => (q4, c.hidden, c.ffn),
                };
                self.add(random, TensorId::Layer(layer, part), kind, rows, columns);
            }
        }
    }

    fn add(
        &mut self,
        random: &mut Random,
        id: TensorId,
        kind: TensorType,
        rows: usize,
        columns: usize,
    ) {
        let mut bytes = Vec::new();
        let scale = 1.5 / (columns as f32).sqrt();
        for _ in 0..rows * columns / kind.block_elements() {
            match kind {
                TensorType::F32 if rows == 1 => {
                    bytes.extend((1.0 + 0.3 * random.float()).to_le_bytes());
                }
                TensorType::F32 => bytes.extend((random.float() * scale).to_le_bytes()),
                TensorType::Bf16 => {
                    let bits = (random.float() * scale).to_bits() >> 16;
                    bytes.extend((bits as u16).to_le_bytes());
                }
                // Halves with exponents around 2^-4, either sign.
                TensorType::F16 => {
                    let bits = 0x2800 + (random.next() & 0x87FF) as u16;
                    bytes.extend(bits.to_le_bytes());
                }
                TensorType::Q8_0 | TensorType::Q4_1 => {
                    // Scales around 2^-9 or 2^-6; the minimum at about -7.5 scales.
                    let q4 = kind == TensorType::Q4_1;
                    let base: u16 = if q4 { 0x2400 } else { 0x1400 };
                    bytes.extend((base + (random.next() & 0x3FF) as u16).to_le_bytes());
                    if q4 {
                        bytes.extend((0xB000 + (random.next() & 0x3FF) as u16).to_le_bytes());
                    }
                    bytes.extend((0..if q4 { 16 } else { 32 }).map(|_| random.next() as u8));
                }
            }
        }
        self.tensors.insert(id, (kind, rows, columns, bytes));
    }

    pub fn view(&self, id: TensorId) -> TensorView<'_> {
        let (kind, rows, columns, bytes) = &self.tensors[&id];
        TensorView {
            name: "random",
            kind: *kind,
            rows: *rows,
            columns: *columns,
            bytes,
        }
    }

    pub fn engine(&self, isa: Isa, dtype: KvDtype, threads: usize, rope: RopeLayout) -> CpuEngine {
        let options = CpuOptions {
            threads,
            cores: Vec::new(),
            nice: 0,
            dtype,
            pool_pages: 2048,
            page_tokens: 16,
            isa: Some(isa),
        };
        CpuEngine::from_tensors(&self.config, rope, &options, |id| self.view(id)).unwrap()
    }
}

pub fn greedy(position: usize, logprobs: Option<u8>) -> SampleSpec {
    SampleSpec {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        seed: 0,
        choice: 0,
        position: position as u32,
        logprobs,
        min_p: 0.0,
        banned: Vec::new(),
        shaping: None,
    }
}

/// Adds a sequence to a step.
pub fn push(
    step: &mut Step,
    tokens: &[u32],
    start: usize,
    pages: &[PageId],
    sample: Option<SampleSpec>,
) {
    let first = step.tokens.len();
    step.tokens.extend(tokens);
    let first_page = step.pages.len();
    step.pages.extend(pages);
    step.sequences.push(StepSequence {
        tokens: first..step.tokens.len(),
        start,
        pages: first_page..step.pages.len(),
        sample,
    });
}

/// The bits of a sample: equal only if the logits were.
pub fn bits(sampled: &Sampled) -> (u32, u32, Vec<(u32, u32)>) {
    let top = sampled.top.iter().map(|(id, p)| (*id, p.to_bits()));
    (sampled.token, sampled.logprob.to_bits(), top.collect())
}

/// Prefills `prompt` in chunks of the given sizes (the last one repeats) and samples after it,
/// then decodes greedily. One sequence alone.
pub fn generate(
    engine: &mut CpuEngine,
    prompt: &[u32],
    pages: &[PageId],
    chunks: &[usize],
    count: usize,
    top: u8,
) -> Vec<Sampled> {
    let mut step = Step::default();
    let (mut done, mut index) = (0, 0);
    let mut tokens: Vec<u32> = prompt.to_vec();
    let mut out: Vec<Sampled> = Vec::new();
    while out.len() < count {
        let size = if done < prompt.len() {
            chunks[index.min(chunks.len() - 1)].min(prompt.len() - done)
        } else {
            1
        };
        index += 1;
        step.clear();
        let last = done + size >= prompt.len();
        let spec = last.then(|| greedy(done + size, Some(top)));
        push(&mut step, &tokens[done..done + size], done, pages, spec);
        engine.run(&mut step).unwrap();
        done += size;
        if let Some(sampled) = step.sampled[0].take() {
            tokens.push(sampled.token);
            out.push(sampled);
        }
    }
    out
}
