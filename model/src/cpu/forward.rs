//! One pass of the transformer, run by all members of a team together.
//!
//! ```text
//! embed, rope table │ per layer: [norm │] q k v │ [rotate, store │] attention │ out + residual
//!                   │            [norm │] gate up silu │ down + residual │
//! sampled rows      │ [norm │] head │ sample
//! ```
//! Each `│` is a barrier. What stands in brackets is shared out among members when there are many
//! rows; with few (decode) every member norms all rows for itself, which takes less time than a
//! barrier, and rotates what its attention needs. Before a product activations are brought into
//! the forms that its weights take ([`Forms`]), in the same two ways. Within a phase members claim disjoint parts of its result, and read
//! only what earlier phases wrote: that is the safety argument of every `unsafe` block here.

use super::aligned::{Aligned, Rows};
use super::attention::{Scratch, Tile, attend};
#[cfg(target_arch = "x86_64")]
use super::dots;
use super::dots::Arithmetic;
use super::dots::digits::DigitRows;
use super::dots::pairs::PairRows;
use super::elementwise::{RmsNorm, SiluMul};
use super::lanes::{Lanes, SumMode};
use super::matmul::{Forms, Input, Output, multiply, panel_len};
use super::matrix::{GROUP, Matrix};
use super::packed::{Layer, PackedModel};
use super::paged_kv::{PagedKv, Plane};
use super::phases::{Clock, Phase};
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

/// Up to this many rows, every member prepares all of them for itself: a row of 576 takes some
/// 200 ns, a barrier 500 to 1,000.
const OWN_ROWS_MAX: usize = 4;

/// Activations brought into the forms that products take.
struct Prepared {
    normed: Rows,
    digits: DigitRows,
    pairs: PairRows,
}

impl Prepared {
    fn new(rows: usize, hidden: usize, widest: usize, arithmetic: Arithmetic) -> Self {
        let (rows_formed, widest) = match arithmetic {
            Arithmetic::Float => (0, 0),
            Arithmetic::Dots(_) => (rows, widest),
        };
        Prepared {
            normed: Rows::new(rows, hidden),
            digits: DigitRows::new(rows_formed, widest),
            pairs: PairRows::new(rows_formed, widest),
        }
    }

    /// Fills a row's forms from its floats.
    ///
    /// # Safety
    /// `x` has `columns` floats, padded with zeroes to 16; nobody else touches this row; `forms`
    /// are of this processor.
    unsafe fn fill(&self, row: usize, x: *const f32, columns: usize, forms: Forms) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on: forms are asked for only where the processor has the instructions.
        unsafe {
            if let Some(count) = forms.digits {
                self.digits.fill(row, x, columns, count);
            }
            if forms.pairs {
                self.pairs.fill(row, x, columns);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        assert_eq!(forms, Forms::default(), "row {row}: {x:?}, {columns}");
    }

    /// `floats` with those forms.
    fn input(&self, floats: &Rows, rows: usize, forms: Forms) -> Input {
        Input {
            start: floats.row(0),
            stride: floats.stride(),
            rows,
            digits: forms.digits.map(|count| self.digits.input(count)),
            pairs: forms.pairs.then(|| self.pairs.input()),
        }
    }
}

/// What a member needs for itself.
pub(crate) struct Own {
    panel: Aligned<f32>,
    attention: Attention,
    sampler: Sampler,
    prepared: Prepared,
    /// Read by the leader only.
    pub clock: Clock,
    /// Queries of one key head, its key and its value.
    rotated: Aligned<f32>,
}

/// Scratch of attention.
enum Attention {
    Float(Scratch),
    #[cfg(target_arch = "x86_64")]
    Dots(dots::attention::Scratch),
}

impl Attention {
    fn new(head_dim: usize, group: usize, arithmetic: Arithmetic) -> Self {
        match arithmetic {
            #[cfg(target_arch = "x86_64")]
            Arithmetic::Dots(_) => Attention::Dots(dots::attention::Scratch::new(head_dim, group)),
            #[cfg(not(target_arch = "x86_64"))]
            Arithmetic::Dots(_) => unreachable!("no such instruction set"),
            Arithmetic::Float => Attention::Float(Scratch::new(head_dim, group)),
        }
    }

    /// # Safety
    /// As [`attend`]; made for an arithmetic of this processor.
    unsafe fn attend<S: Lanes>(&mut self, kv: &PagedKv, tile: &Tile<'_>) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Attention::Float(scratch) => attend::<S>(kv, tile, scratch),
                #[cfg(target_arch = "x86_64")]
                Attention::Dots(scratch) => dots::attention::attend(kv, tile, scratch),
            }
        }
    }
}

/// Everything a pass writes, allocated once; pages of it that no pass has reached stay untouched.
pub(crate) struct Workspace {
    residual: Rows,
    prepared: Prepared,
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
    pub own: Vec<Mutex<Own>>,
}

impl Workspace {
    /// For a team of `threads` at instruction set `S`.
    pub fn new<S: Lanes>(
        model: &PackedModel,
        rope: &Rope,
        threads: usize,
        arithmetic: Arithmetic,
    ) -> Self {
        let config = &model.config;
        let rows = |columns| Rows::new(PASS_ROWS_MAX, columns);
        let query = config.heads * config.head_dim;
        let key = config.kv_heads * config.head_dim;
        let widest = config.hidden.max(config.ffn).max(query);
        let group = config.heads / config.kv_heads;
        let prepared = |rows| Prepared::new(rows, config.hidden, widest, arithmetic);
        let own = || {
            Mutex::new(Own {
                panel: Aligned::zeroed(panel_len::<S>(widest)),
                attention: Attention::new(config.head_dim, group, arithmetic),
                sampler: Sampler::new(super::elementwise::exp_into::<S>),
                prepared: prepared(OWN_ROWS_MAX),
                clock: Clock::new(),
                rotated: Aligned::zeroed((group + 2) * config.head_dim),
            })
        };
        Workspace {
            residual: rows(config.hidden),
            prepared: prepared(PASS_ROWS_MAX),
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
    pub arithmetic: Arithmetic,
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
            own.clock.start();
            self.embed(member);
            own.clock.end(Phase::Embed);
            for (index, layer) in self.model.layers.iter().enumerate() {
                let forms = Forms::of(self.arithmetic, [&layer.query, &layer.key, &layer.value]);
                let x = self.norm::<S>(member, own, &layer.attention_norm, forms);
                self.query_key_value::<S>(member, own, layer, x);
                own.clock.end(Phase::QueryKeyValue);
                self.attention::<S>(member, own, layer, index);
                own.clock.end(Phase::Attention);
                self.add_to_residual::<S>(
                    member,
                    own,
                    &layer.attention_output,
                    &self.work.attended,
                );
                own.clock.end(Phase::AttentionOutput);
                let forms = Forms::of(self.arithmetic, [&layer.gate, &layer.up]);
                let x = self.norm::<S>(member, own, &layer.feed_forward_norm, forms);
                self.gate_and_up::<S>(member, own, layer, x);
                own.clock.end(Phase::GateUp);
                self.add_to_residual::<S>(member, own, &layer.down, &self.work.gate);
                own.clock.end(Phase::Down);
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

    /// The normed residual as input of a product.
    unsafe fn norm<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &Own,
        weight: &Aligned<f32>,
        forms: Forms,
    ) -> Input {
        // SAFETY: passed on.
        unsafe { self.norm_rows::<S>(member, own, self.rows(), |i| i, weight, forms) }
    }

    /// `count` rows of the residual, normed: row i is row `from(i)` of it.
    unsafe fn norm_rows<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &Own,
        count: usize,
        from: impl Fn(usize) -> usize,
        weight: &Aligned<f32>,
        forms: Forms,
    ) -> Input {
        let hidden = self.model.config.hidden;
        let one = |prepared: &Prepared, i: usize| {
            // SAFETY: reads the residual, which no one writes now; the result is ours.
            unsafe {
                S::enter(RmsNorm {
                    x: self.work.residual.row(from(i)),
                    weight: weight.as_ptr(),
                    out: prepared.normed.row(i),
                    length: hidden,
                    epsilon: self.model.config.rms_norm_eps,
                });
                prepared.fill(i, prepared.normed.row(i), hidden, forms);
            }
        };
        let prepared = if count <= OWN_ROWS_MAX {
            (0..count).for_each(|i| one(&own.prepared, i));
            &own.prepared
        } else {
            while let Some(rows) = member.claim(count, 4) {
                rows.for_each(|i| one(&self.work.prepared, i));
            }
            member.barrier();
            &self.work.prepared
        };
        prepared.input(&prepared.normed, count, forms)
    }

    /// Rows of a phase's result as input of a product with `matrix`.
    unsafe fn form(&self, member: &Member<'_>, own: &Own, floats: &Rows, matrix: &Matrix) -> Input {
        let (count, columns) = (self.rows(), matrix.inputs);
        let forms = Forms::of(self.arithmetic, [matrix]);
        let prepared = if count <= OWN_ROWS_MAX {
            for row in 0..count {
                // SAFETY: `floats` are quiet, the member's own rows are its own.
                unsafe { own.prepared.fill(row, floats.row(row), columns, forms) };
            }
            &own.prepared
        } else {
            if forms != Forms::default() {
                while let Some(rows) = member.claim(count, 4) {
                    for row in rows {
                        // SAFETY: as above; the claimed rows are ours.
                        unsafe {
                            self.work
                                .prepared
                                .fill(row, floats.row(row), columns, forms)
                        };
                    }
                }
                member.barrier();
            }
            &self.work.prepared
        };
        prepared.input(floats, count, forms)
    }

    /// Claims groups of `total` for this phase: four at a time feed four independent sums.
    fn claim_groups(&self, member: &Member<'_>, total: usize) -> Option<Range<usize>> {
        if let (0, Some(pulse)) = (member.index, self.pulse) {
            pulse.advance();
        }
        member.claim(total, 4)
    }

    unsafe fn query_key_value<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &mut Own,
        layer: &Layer,
        x: Input,
    ) {
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
                let out = output(out, SumMode::Store);
                // SAFETY: the claimed outputs are ours; the input is quiet.
                unsafe {
                    multiply::<S>(matrix, own_start..own_end, x, out, own.panel.as_mut_slice());
                }
            }
        }
        member.barrier();
    }

    /// Biases, rotation and the store of keys and values, row by row.
    unsafe fn rotate_and_store(&self, member: &Member<'_>, layer: &Layer, index: usize) {
        let config = &self.model.config;
        let (dim, work) = (config.head_dim, self.work);
        while let Some(rows) = member.claim(self.rows(), 1) {
            for row in rows {
                // SAFETY: the rows of query, key and value are ours.
                let (query, key, value) = unsafe {
                    (
                        work.query.write(row, config.heads * dim),
                        work.key.write(row, config.kv_heads * dim),
                        work.value.write(row, config.kv_heads * dim),
                    )
                };
                // SAFETY: the table is quiet.
                unsafe { self.rotate(layer, row, 0, 0, query, key, value) };
                self.store(row, index, 0, key, value);
            }
        }
        member.barrier();
    }

    /// Adds biases and turns queries and keys of whole heads: the first of each are
    /// `first_head` and `first_kv_head`.
    #[allow(
        clippy::too_many_arguments,
        reason = "which heads, and three rows of them"
    )]
    unsafe fn rotate(
        &self,
        layer: &Layer,
        row: usize,
        first_head: usize,
        first_kv_head: usize,
        query: &mut [f32],
        key: &mut [f32],
        value: &mut [f32],
    ) {
        let dim = self.model.config.head_dim;
        if let Some([query_bias, key_bias, value_bias]) = &layer.biases {
            add_bias(query, &query_bias[first_head * dim..]);
            add_bias(key, &key_bias[first_kv_head * dim..]);
            add_bias(value, &value_bias[first_kv_head * dim..]);
        }
        // SAFETY: the caller's word: nobody writes the table.
        let table = unsafe { self.work.rope_table.read(row, self.rope.table_len()) };
        for head in query.chunks_exact_mut(dim).chain(key.chunks_exact_mut(dim)) {
            self.rope.turn(head, table);
        }
    }

    /// Stores keys and values of whole heads, the first of them `first_kv_head`.
    fn store(&self, row: usize, layer: usize, first_kv_head: usize, key: &[f32], value: &[f32]) {
        let (pages, position) = (self.pages(row), self.pass.rows[row].position);
        for (part, all) in [(KeyOrValue::Key, key), (KeyOrValue::Value, value)] {
            let heads = all.chunks_exact(self.model.config.head_dim);
            for (head, values) in heads.enumerate() {
                let head = first_kv_head + head;
                let plane = Plane { layer, part, head };
                self.kv.store(pages, plane, position, values);
            }
        }
    }

    unsafe fn attention<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &mut Own,
        layer: &Layer,
        index: usize,
    ) {
        let config = &self.model.config;
        let (tiles, kv_heads) = (&self.pass.tiles, config.kv_heads);
        let (group, dim, work) = (config.heads / kv_heads, config.head_dim, self.work);
        // Decode: a unit's row has one new token, which nobody else's attention reads.
        let single = self.pass.single;
        if !single {
            // SAFETY: passed on.
            unsafe { self.rotate_and_store(member, layer, index) };
        }
        while let Some(units) = member.claim(tiles.len() * kv_heads, 1) {
            for unit in units {
                // The last tiles of a chunk see the most tokens: take them first.
                let RowTile { first_row, rows } = tiles[tiles.len() - 1 - unit / kv_heads];
                let kv_head = unit % kv_heads;
                let first_element = kv_head * group * dim;
                // SAFETY: this tile's heads of the result are ours; queries, keys and values
                // are not written now, but for those of a single row's own head by us.
                unsafe {
                    let (query, query_stride) = if single {
                        (self.rotate_head(own, layer, index, first_row, kv_head), 0)
                    } else {
                        let query = work.query.row(first_row).add(first_element);
                        (query.cast_const(), work.query.stride())
                    };
                    let tile = Tile {
                        pages: self.pages(first_row),
                        layer: index,
                        kv_head,
                        group,
                        position: self.pass.rows[first_row].position,
                        rows,
                        query,
                        query_stride,
                        out: work.attended.row(first_row).add(first_element),
                        out_stride: work.attended.stride(),
                    };
                    own.attention.attend::<S>(self.kv, &tile);
                }
            }
        }
        member.barrier();
    }

    /// Rotates one key head of a row and the queries that share it, stores key and value, and
    /// gives the queries.
    unsafe fn rotate_head(
        &self,
        own: &mut Own,
        layer: &Layer,
        index: usize,
        row: usize,
        kv_head: usize,
    ) -> *const f32 {
        let config = &self.model.config;
        let (group, dim, work) = (config.heads / config.kv_heads, config.head_dim, self.work);
        let rotated = &mut own.rotated.as_mut_slice()[..(group + 2) * dim];
        let (query, rest) = rotated.split_at_mut(group * dim);
        let (key, value) = rest.split_at_mut(dim);
        // SAFETY: the products' results are quiet in this phase.
        unsafe {
            let all = work.query.read(row, config.heads * dim);
            query.copy_from_slice(&all[kv_head * group * dim..][..group * dim]);
            let all = work.key.read(row, config.kv_heads * dim);
            key.copy_from_slice(&all[kv_head * dim..][..dim]);
            let all = work.value.read(row, config.kv_heads * dim);
            value.copy_from_slice(&all[kv_head * dim..][..dim]);
            self.rotate(layer, row, kv_head * group, kv_head, query, key, value);
        }
        self.store(row, index, kv_head, key, value);
        query.as_ptr()
    }

    unsafe fn add_to_residual<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &mut Own,
        matrix: &Matrix,
        from: &Rows,
    ) {
        // SAFETY: passed on.
        let x = unsafe { self.form(member, own, from, matrix) };
        while let Some(groups) = self.claim_groups(member, matrix.groups()) {
            let out = output(&self.work.residual, SumMode::Add);
            // SAFETY: the claimed outputs of the residual are ours; the input is quiet.
            unsafe { multiply::<S>(matrix, groups, x, out, own.panel.as_mut_slice()) };
        }
        member.barrier();
    }

    unsafe fn gate_and_up<S: Lanes>(
        &self,
        member: &Member<'_>,
        own: &mut Own,
        layer: &Layer,
        x: Input,
    ) {
        let work = self.work;
        while let Some(groups) = self.claim_groups(member, layer.gate.groups()) {
            let panel = own.panel.as_mut_slice();
            // SAFETY: the claimed outputs of both are ours; the input is quiet.
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
        let forms = Forms::of(self.arithmetic, [head]);
        let samples = &self.pass.samples[which.clone()];
        let weight = &self.model.output_norm;
        // SAFETY: the residual is quiet.
        let x = unsafe {
            self.norm_rows::<S>(member, own, samples.len(), |i| samples[i], weight, forms)
        };
        while let Some(groups) = self.claim_groups(member, head.groups()) {
            let out = output(&work.logits, SumMode::Store);
            // SAFETY: the claimed logits are ours; the input is quiet.
            unsafe { multiply::<S>(head, groups, x, out, own.panel.as_mut_slice()) };
        }
        member.barrier();
        own.clock.end(Phase::Head);
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
        own.clock.end(Phase::Sample);
    }
}

fn add_bias(row: &mut [f32], bias: &[f32]) {
    for (x, b) in row.iter_mut().zip(bias) {
        *x += b;
    }
}

fn output(rows: &Rows, mode: SumMode) -> Output {
    Output {
        start: rows.row(0),
        stride: rows.stride(),
        mode,
    }
}
