//! One pass of the transformer, run by all members of a team together.
//!
//! ```text
//! embed, rope table │ per layer: norm │ q k v │ rotate, store │ attention │ out + residual
//!                   │            norm │ gate up silu │ down + residual │
//! sampled rows      │ norm │ head │ sample
//! ```
//! Each `│` is a barrier. Within a phase members claim disjoint parts of its result, and read
//! only what earlier phases wrote: that is the safety argument of every `unsafe` block here.

use super::aligned::{Aligned, Rows};
use super::attention::{Scratch, Tile, attend};
use super::elementwise::{RmsNorm, SiluMul};
use super::lanes::{Lanes, SumMode};
use super::matmul::{Input, Output, multiply, panel_len};
use super::matrix::{GROUP, Matrix};
use super::packed::{Layer, PackedModel};
use super::paged_kv::{PagedKv, Plane};
use super::plan::{PASS_ROWS_MAX, Pass, RowTile};
use super::rope::Rope;
use super::team::Member;
use crate::backend::{Sampled, Step};
use crate::sampling::Sampler;
use kvserve_kv::PageId;
use kvserve_kv::layout::KeyOrValue;
use kvserve_runtime::lane::LanePulse;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows whose logits are held at once: 32 x 49,152 f32 are 6 MiB; more come in turns.
const LOGIT_ROWS_MAX: usize = 32;

/// What a member needs for itself.
pub(crate) struct Own {
    panel: Aligned<f32>,
    attention: Scratch,
    sampler: Sampler,
}

/// Everything a pass writes, allocated once; pages of it that no pass has reached stay untouched.
pub(crate) struct Workspace {
    residual: Rows,
    normed: Rows,
    query: Rows,
    key: Rows,
    value: Rows,
    attended: Rows,
    gate: Rows,
    up: Rows,
    rope_table: Rows,
    logits: Rows,
    /// Results of the sampled rows of a pass, in order.
    pub sampled: Vec<Mutex<Option<Sampled>>>,
    own: Vec<Mutex<Own>>,
}

impl Workspace {
    /// For a team of `threads` at instruction set `S`.
    pub fn new<S: Lanes>(model: &PackedModel, rope: &Rope, threads: usize) -> Self {
        let config = &model.config;
        let rows = |columns| Rows::new(PASS_ROWS_MAX, columns);
        let query = config.heads * config.head_dim;
        let key = config.kv_heads * config.head_dim;
        let widest = config.hidden.max(config.ffn).max(query);
        let own = || {
            Mutex::new(Own {
                panel: Aligned::zeroed(panel_len::<S>(widest)),
                attention: Scratch::new(config.head_dim, config.heads / config.kv_heads),
                sampler: Sampler::new(super::elementwise::exp_into::<S>),
            })
        };
        Workspace {
            residual: rows(config.hidden),
            normed: rows(config.hidden),
            query: rows(query),
            key: rows(key),
            value: rows(key),
            attended: rows(query),
            gate: rows(config.ffn),
            up: rows(config.ffn),
            rope_table: rows(rope.table_len()),
            logits: Rows::new(LOGIT_ROWS_MAX, config.vocab),
            sampled: (0..PASS_ROWS_MAX).map(|_| Mutex::new(None)).collect(),
            own: (0..threads).map(|_| own()).collect(),
        }
    }
}

/// A pass, as all members see it.
pub(crate) struct Forward<'a> {
    pub model: &'a PackedModel,
    pub rope: &'a Rope,
    pub kv: &'a PagedKv,
    pub work: &'a Workspace,
    pub pass: &'a Pass,
    pub step: &'a Step,
    /// Signs of life, given by the leader with each part of a product that it takes: at 576 rows
    /// and the slowest instruction set a layer may take a second.
    pub pulse: Option<&'a LanePulse>,
}

impl Forward<'_> {
    /// This member's part of the pass.
    ///
    /// # Safety
    /// The processor has `S`; all members of one team, and nobody else, run this pass on this
    /// workspace; the step was checked against the pool of `kv`.
    pub unsafe fn run<S: Lanes>(&self, member: &Member<'_>) {
        let own = &mut *self.work.own[member.index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // SAFETY: passed on; the phases are as the module's docs say.
        unsafe {
            self.embed(member);
            for (index, layer) in self.model.layers.iter().enumerate() {
                self.norm::<S>(member, &layer.attention_norm);
                self.query_key_value::<S>(member, own, layer);
                self.rotate_and_store(member, layer, index);
                self.attention::<S>(member, own, index);
                self.add_to_residual::<S>(
                    member,
                    own,
                    &layer.attention_output,
                    &self.work.attended,
                );
                self.norm::<S>(member, &layer.feed_forward_norm);
                self.gate_and_up::<S>(member, own, layer);
                self.add_to_residual::<S>(member, own, &layer.down, &self.work.gate);
            }
            for first in (0..self.pass.samples.len()).step_by(LOGIT_ROWS_MAX) {
                let last = self.pass.samples.len().min(first + LOGIT_ROWS_MAX);
                self.sample::<S>(member, own, first..last);
            }
        }
    }

    fn rows(&self) -> usize {
        self.pass.rows.len()
    }

    fn pages(&self, row: usize) -> &[PageId] {
        let sequence = &self.step.sequences[self.pass.rows[row].sequence];
        &self.step.pages[sequence.pages.clone()]
    }

    /// # Safety
    /// As [`Forward::run`]; so for all phases.
    unsafe fn embed(&self, member: &Member<'_>) {
        while let Some(rows) = member.claim(self.rows(), 4) {
            for row in rows {
                let plan = self.pass.rows[row];
                // SAFETY: the row is this member's.
                let (x, table) = unsafe {
                    (
                        self.work.residual.write(row, self.model.config.hidden),
                        self.work.rope_table.write(row, self.rope.table_len()),
                    )
                };
                self.model.embedding.row(plan.token as usize, x);
                self.rope.fill(plan.position, table);
            }
        }
        member.barrier();
    }

    unsafe fn norm<S: Lanes>(&self, member: &Member<'_>, weight: &Aligned<f32>) {
        while let Some(rows) = member.claim(self.rows(), 4) {
            for row in rows {
                // SAFETY: reads the residual, which no one writes now; the result is ours.
                unsafe { self.norm_row::<S>(row, row, weight) };
            }
        }
        member.barrier();
    }

    unsafe fn norm_row<S: Lanes>(&self, from: usize, to: usize, weight: &Aligned<f32>) {
        // SAFETY: rows of the workspace, padded with zeroes to whole vectors.
        unsafe {
            S::enter(RmsNorm {
                x: self.work.residual.row(from),
                weight: weight.as_ptr(),
                out: self.work.normed.row(to),
                length: self.model.config.hidden,
                epsilon: self.model.config.rms_norm_eps,
            });
        }
    }

    /// Claims groups of `total` for this phase: four at a time feed four independent sums.
    fn claim_groups(&self, member: &Member<'_>, total: usize) -> Option<Range<usize>> {
        if let (0, Some(pulse)) = (member.index, self.pulse) {
            pulse.advance();
        }
        member.claim(total, 4)
    }

    unsafe fn query_key_value<S: Lanes>(&self, member: &Member<'_>, own: &mut Own, layer: &Layer) {
        let work = self.work;
        let parts = [
            (&layer.query, &work.query),
            (&layer.key, &work.key),
            (&layer.value, &work.value),
        ];
        let total = parts.iter().map(|(matrix, _)| matrix.groups()).sum();
        while let Some(claimed) = self.claim_groups(member, total) {
            let mut before = 0;
            for (matrix, out) in parts {
                let own_start = claimed.start.clamp(before, before + matrix.groups()) - before;
                let own_end = claimed.end.clamp(before, before + matrix.groups()) - before;
                before += matrix.groups();
                let x = input(&work.normed, self.rows());
                let out = output(out, SumMode::Store);
                // SAFETY: the claimed outputs are ours; `normed` is not written now.
                unsafe {
                    multiply::<S>(matrix, own_start..own_end, x, out, own.panel.as_mut_slice());
                }
            }
        }
        member.barrier();
    }

    unsafe fn rotate_and_store(&self, member: &Member<'_>, layer: &Layer, index: usize) {
        let config = &self.model.config;
        let (dim, work) = (config.head_dim, self.work);
        while let Some(rows) = member.claim(self.rows(), 1) {
            for row in rows {
                // SAFETY: the rows of query, key and value are ours, the table is quiet.
                let (query, key, value, table) = unsafe {
                    (
                        work.query.write(row, config.heads * dim),
                        work.key.write(row, config.kv_heads * dim),
                        work.value.write(row, config.kv_heads * dim),
                        work.rope_table.read(row, self.rope.table_len()),
                    )
                };
                if let Some([query_bias, key_bias, value_bias]) = &layer.biases {
                    add_bias(query, query_bias);
                    add_bias(key, key_bias);
                    add_bias(value, value_bias);
                }
                for head in query.chunks_exact_mut(dim).chain(key.chunks_exact_mut(dim)) {
                    self.rope.turn(head, table);
                }
                let (pages, position) = (self.pages(row), self.pass.rows[row].position);
                for (part, all) in [(KeyOrValue::Key, &*key), (KeyOrValue::Value, &*value)] {
                    for (head, values) in all.chunks_exact(dim).enumerate() {
                        let plane = Plane {
                            layer: index,
                            part,
                            head,
                        };
                        self.kv.store(pages, plane, position, values);
                    }
                }
            }
        }
        member.barrier();
    }

    unsafe fn attention<S: Lanes>(&self, member: &Member<'_>, own: &mut Own, index: usize) {
        let config = &self.model.config;
        let (tiles, kv_heads) = (&self.pass.tiles, config.kv_heads);
        let (group, work) = (config.heads / kv_heads, self.work);
        while let Some(units) = member.claim(tiles.len() * kv_heads, 1) {
            for unit in units {
                // The last tiles of a chunk see the most tokens: take them first.
                let RowTile { first_row, rows } = tiles[tiles.len() - 1 - unit / kv_heads];
                let kv_head = unit % kv_heads;
                let first_element = kv_head * group * config.head_dim;
                // SAFETY: this tile's heads of the result are ours; queries, keys and values
                // are not written now.
                unsafe {
                    let tile = Tile {
                        pages: self.pages(first_row),
                        layer: index,
                        kv_head,
                        group,
                        position: self.pass.rows[first_row].position,
                        rows,
                        query: work.query.row(first_row).add(first_element),
                        query_stride: work.query.stride(),
                        out: work.attended.row(first_row).add(first_element),
                        out_stride: work.attended.stride(),
                    };
                    attend::<S>(self.kv, &tile, &mut own.attention);
                }
            }
        }
        member.barrier();
    }

    unsafe fn add_to_residual<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &mut Own,
        matrix: &Matrix,
        from: &Rows,
    ) {
        while let Some(groups) = self.claim_groups(member, matrix.groups()) {
            let x = input(from, self.rows());
            let out = output(&self.work.residual, SumMode::Add);
            // SAFETY: the claimed outputs of the residual are ours; `from` is quiet.
            unsafe { multiply::<S>(matrix, groups, x, out, own.panel.as_mut_slice()) };
        }
        member.barrier();
    }

    unsafe fn gate_and_up<S: Lanes>(&self, member: &Member<'_>, own: &mut Own, layer: &Layer) {
        let work = self.work;
        while let Some(groups) = self.claim_groups(member, layer.gate.groups()) {
            let x = input(&work.normed, self.rows());
            let panel = own.panel.as_mut_slice();
            // SAFETY: the claimed outputs of both are ours; `normed` is quiet.
            unsafe {
                let (gate, up) = (&work.gate, &work.up);
                multiply::<S>(
                    &layer.gate,
                    groups.clone(),
                    x,
                    output(gate, SumMode::Store),
                    panel,
                );
                multiply::<S>(
                    &layer.up,
                    groups.clone(),
                    x,
                    output(up, SumMode::Store),
                    panel,
                );
                for row in 0..self.rows() {
                    S::enter(SiluMul {
                        gate: gate.row(row).add(groups.start * GROUP),
                        up: up.row(row).add(groups.start * GROUP),
                        length: groups.len() * GROUP,
                    });
                }
            }
        }
        member.barrier();
    }

    /// Logits and samples of some of the pass's sampled rows.
    unsafe fn sample<S: Lanes>(&self, member: &Member<'_>, own: &mut Own, which: Range<usize>) {
        let (work, head) = (self.work, &*self.model.head);
        while let Some(claimed) = member.claim(which.len(), 1) {
            for i in claimed {
                let from = self.pass.samples[which.start + i];
                // SAFETY: the residual is quiet, the result is ours.
                unsafe { self.norm_row::<S>(from, i, &self.model.output_norm) };
            }
        }
        member.barrier();
        while let Some(groups) = self.claim_groups(member, head.groups()) {
            let x = input(&work.normed, which.len());
            let out = output(&work.logits, SumMode::Store);
            // SAFETY: the claimed logits are ours; `normed` is quiet.
            unsafe { multiply::<S>(head, groups, x, out, own.panel.as_mut_slice()) };
        }
        member.barrier();
        while let Some(claimed) = member.claim(which.len(), 1) {
            for i in claimed {
                let row = self.pass.samples[which.start + i];
                let sequence = &self.step.sequences[self.pass.rows[row].sequence];
                // SAFETY: these logits are ours.
                let logits = unsafe { work.logits.write(i, self.model.config.vocab) };
                let sampled = sequence.sample.as_ref().map(|spec| {
                    let named = spec.shaping.as_ref().map(|shaping| shaping.history.clone());
                    let history = named.and_then(|range| self.step.history.get(range));
                    let history = history.unwrap_or_default();
                    own.sampler.choose(logits, spec, history)
                });
                *work.sampled[which.start + i]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = sampled;
            }
        }
        member.barrier();
    }
}

fn add_bias(row: &mut [f32], bias: &[f32]) {
    for (x, b) in row.iter_mut().zip(bias) {
        *x += b;
    }
}

fn input(rows: &Rows, count: usize) -> Input {
    Input {
        start: rows.row(0),
        stride: rows.stride(),
        rows: count,
    }
}

fn output(rows: &Rows, mode: SumMode) -> Output {
    Output {
        start: rows.row(0),
        stride: rows.stride(),
        mode,
    }
}
