//! A context: the public calls, in the order in which a pass makes them.

use std::sync::Arc;
use std::time::Instant;

use super::attend::{ROUTED_QUERIES, RoutedScratch, View as SequenceView};
use super::budget;
use super::pass::{LayerStep, Pass, PassSequence};
use super::plans::{PlanId, PlanPart, Plans, StoredPlan};
use super::queries::QUERIES;
use super::sequence::{Committed, Sequence};
use super::statistics::Counters;
use crate::error::{Error, Result, fail};
use crate::kernels::first_outside;
use crate::model::Model;
use crate::params::{FastBudget, Params, Prefill};
use crate::pool::{Pool, Team};
use crate::routing::{Plan, Queries, RouteLimits};
use crate::store::SlowStore;
use crate::tensor::View;

/// Largest magnitude that a key, value or query may have: the largest f16.
pub const LARGEST_VALUE: f32 = 65_504.0;

/// One token of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchToken<'a> {
    pub position: i32,
    /// The sequences it belongs to; its query attends over the first.
    pub sequences: &'a [i32],
}

/// The KV cache of some sequences of one model.
pub struct Context {
    pub(super) model: Arc<Model>,
    pub(super) params: Arc<Params>,
    pool: Pool,
    pub(super) store: SlowStore,
    pub(super) sequences: Vec<Option<Sequence>>,
    pub(super) fast_budget: FastBudget,
    limits: RouteLimits,
    pass: Option<Pass>,
    plans: Plans,
    pub(super) counters: Counters,
    scratch: Scratch,
    events: Vec<Error>,
}

/// Buffers kept from call to call.
#[derive(Default)]
struct Scratch {
    /// `[token][n_heads][key_dim]` of the batch.
    q: Vec<f32>,
    /// Of one sequence's attending tokens.
    part_q: Vec<f32>,
    part_out: Vec<f32>,
    rows: Vec<usize>,
    routed: RoutedScratch,
    spare_parts: Vec<PassSequence>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        ((self.q.capacity() + self.part_q.capacity() + self.part_out.capacity()) * 4) as u64
            + self.spare_parts.iter().map(|part| part.staged.bytes()).sum::<u64>()
    }
}

impl Context {
    pub fn new(model: Arc<Model>, params: Params) -> Result<Self> {
        params.validate(model.geometry.layers.len())?;
        let pool = Pool::new(params.n_threads)?;
        let mut sequences = Vec::new();
        sequences.try_reserve_exact(params.n_seq_max)?;
        sequences.resize_with(params.n_seq_max, || None);
        Ok(Self {
            pool,
            store: SlowStore::default(),
            sequences,
            fast_budget: params.fast_budget,
            limits: RouteLimits { fetch_budget: params.fetch_budget },
            pass: None,
            plans: Plans::default(),
            counters: Counters::default(),
            scratch: Scratch::default(),
            events: Vec::new(),
            model,
            params: Arc::new(params),
        })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    /// What went wrong without failing a call, oldest first; taking them empties the list.
    pub fn take_events(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.events)
    }

    pub fn set_fast_budget(&mut self, budget: FastBudget) {
        self.fast_budget = budget;
    }

    pub fn set_fetch_budget(&mut self, tokens: Option<usize>) {
        self.limits.fetch_budget = tokens;
    }

    /// The number of a sequence id.
    pub(super) fn sequence_index(&self, id: i32) -> Result<usize> {
        match usize::try_from(id).ok().filter(|&i| i < self.sequences.len()) {
            Some(index) => Ok(index),
            None => fail!(Sequence, "sequence {id} is outside 0 to {}", self.sequences.len() - 1),
        }
    }

    /// Begins a pass. Everything is checked before anything changes.
    pub fn begin(&mut self, batch: &[BatchToken]) -> Result<()> {
        if self.pass.is_some() {
            fail!(Order, "a pass is running, commit or abort it before the next begins");
        }
        if batch.is_empty() || batch.len() > self.params.n_batch_max {
            fail!(
                Argument,
                "the batch has {} tokens, expected 1 to n_batch_max = {}",
                batch.len(),
                self.params.n_batch_max
            );
        }
        let members = self.members(batch)?;
        let new_tokens: Vec<(usize, usize)> =
            members.iter().map(|(sequence, tokens)| (*sequence, tokens.len())).collect();
        budget::fit(self, &new_tokens)?;
        self.start_pass(batch, members);
        Ok(())
    }

    /// Which tokens each sequence gets, in batch order; refuses ids and positions that don't fit.
    fn members(&self, batch: &[BatchToken]) -> Result<Vec<(usize, Vec<usize>)>> {
        let mut members: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut slot = vec![usize::MAX; self.sequences.len()];
        for (i, token) in batch.iter().enumerate() {
            if token.position < 0 {
                fail!(Position, "token {i} has position {}, expected 0 or more", token.position);
            }
            if token.sequences.is_empty() {
                fail!(Sequence, "token {i} belongs to no sequence");
            }
            for &id in token.sequences {
                let index = self.sequence_index(id)?;
                if slot[index] == usize::MAX {
                    slot[index] = members.len();
                    members.push((index, Vec::new()));
                }
                let tokens = &mut members[slot[index]].1;
                let last = match tokens.last() {
                    Some(&earlier) if earlier == i => {
                        fail!(Sequence, "token {i} names sequence {id} twice")
                    }
                    Some(&earlier) => Some(batch[earlier].position),
                    None => self.sequences[index].as_ref().and_then(Sequence::last_position),
                };
                if let Some(last) = last
                    && token.position <= last
                {
                    fail!(
                        Position,
                        "token {i} has position {} in sequence {id}, expected more than {last}",
                        token.position
                    );
                }
                tokens.push(i);
            }
        }
        Ok(members)
    }

    fn start_pass(&mut self, batch: &[BatchToken], members: Vec<(usize, Vec<usize>)>) {
        let geometry = &self.model.geometry;
        let mut pass = Pass {
            n_tokens: batch.len(),
            positions: batch.iter().map(|token| token.position).collect(),
            parts: Vec::with_capacity(members.len()),
            steps: vec![LayerStep::Waiting; geometry.layers.len()],
        };
        for (sequence, tokens) in members {
            let mut part = self.scratch.spare_parts.pop().unwrap_or_default();
            part.sequence = sequence;
            part.staged.reset(geometry, tokens.len());
            let names_first = |&i: &usize| batch[tokens[i]].sequences[0] as usize == sequence;
            part.attending.clear();
            part.attending.extend((0..tokens.len()).filter(names_first));
            part.tokens = tokens;
            pass.parts.push(part);
        }
        let started = Instant::now();
        let mut sealed = 0;
        for part in &pass.parts {
            let is_prompt = part.tokens.len() > ROUTED_QUERIES;
            let (model, params, store) = (&self.model, &self.params, &self.store);
            let sequence = self.sequences[part.sequence]
                .get_or_insert_with(|| Sequence::new(model, params, store));
            let done = self.pool.team(|team| sequence.before_pass(team, is_prompt));
            sealed += done.sealed_tokens;
            note_seal(&mut self.counters, &mut self.events, done);
        }
        if sealed > 0 {
            self.counters.seal.add(started.elapsed());
        }
        self.pass = Some(pass);
    }

    /// Tokens of the running pass.
    pub fn pass_tokens(&self) -> Option<usize> {
        self.pass.as_ref().map(|pass| pass.n_tokens)
    }

    /// A layer's keys and values of the pass.
    pub fn ingest(&mut self, layer: usize, k: &View, v: &View) -> Result<()> {
        let Some(pass) = &mut self.pass else {
            fail!(Order, "no pass is running, begin one before prefill_ingest");
        };
        let geometry = &self.model.geometry;
        let Some(shape) = geometry.layers.get(layer) else {
            fail!(
                Argument,
                "layer {layer} does not exist, the model has {}",
                geometry.layers.len()
            );
        };
        if pass.steps[layer] != LayerStep::Waiting {
            fail!(Order, "layer {layer} was ingested already in this pass");
        }
        if let Some(earlier) = pass.steps[..layer].iter().position(|&s| s == LayerStep::Waiting) {
            fail!(Order, "layer {layer} comes before layer {earlier} was ingested");
        }
        k.check("k", geometry.key_dim, shape.n_kv_heads, pass.n_tokens)?;
        v.check("v", geometry.value_dim, shape.n_kv_heads, pass.n_tokens)?;
        for part in &mut pass.parts {
            let sealed = self.sequences[part.sequence].as_ref().map(|s| &s.sealed);
            let n_rows = part.staged.n_rows();
            let (keys, values) = part.staged.layer_mut(layer, shape.n_kv_heads);
            for head in 0..shape.n_kv_heads {
                let centre = sealed.and_then(|sealed| sealed.centre(layer, head));
                let first = head * n_rows;
                for (row, &token) in part.tokens.iter().enumerate() {
                    let key = &mut keys[(first + row) * geometry.key_dim..][..geometry.key_dim];
                    k.load(head, token, key);
                    check_values("K", layer, head, token, key)?;
                    for (x, c) in key.iter_mut().zip(centre.unwrap_or(&[])) {
                        *x -= c;
                    }
                    let value =
                        &mut values[(first + row) * geometry.value_dim..][..geometry.value_dim];
                    v.load(head, token, value);
                    check_values("V", layer, head, token, value)?;
                }
            }
        }
        pass.steps[layer] = LayerStep::Ingested;
        Ok(())
    }

    /// Reads a layer's queries into the scratch, `[token][n_heads][key_dim]`.
    fn load_queries(&mut self, call: &str, layer: usize, q: &View) -> Result<()> {
        let Some(pass) = &self.pass else {
            fail!(Order, "no pass is running, begin one before {call}");
        };
        let geometry = &self.model.geometry;
        let Some(shape) = geometry.layers.get(layer) else {
            fail!(
                Argument,
                "layer {layer} does not exist, the model has {}",
                geometry.layers.len()
            );
        };
        q.check("q", geometry.key_dim, shape.n_heads, pass.n_tokens)?;
        let dim = geometry.key_dim;
        self.scratch.q.resize(pass.n_tokens * shape.n_heads * dim, 0.0);
        for (i, row) in self.scratch.q.chunks_mut(dim).enumerate() {
            let (token, head) = (i / shape.n_heads, i % shape.n_heads);
            q.load(head, token, row);
            check_values("Q", layer, head, token, row)?;
        }
        Ok(())
    }

    /// Shows a layer's queries without attending: for hosts that replay recorded K and V.
    pub fn observe(&mut self, layer: usize, q: &View) -> Result<()> {
        self.load_queries("observe", layer, q)?;
        if let Some(pass) = self.pass.take() {
            self.keep_queries(layer, &pass);
            self.pass = Some(pass);
        }
        Ok(())
    }

    /// Routes a layer's queries, and keeps the result for an attend.
    pub fn route(&mut self, layer: usize, q: &View) -> Result<PlanId> {
        self.load_queries("route", layer, q)?;
        let Some(pass) = self.pass.take() else {
            fail!(Internal, "the pass vanished");
        };
        let complete = pass.steps[layer] != LayerStep::Waiting;
        let started = Instant::now();
        let mut parts = Vec::with_capacity(pass.parts.len());
        for part in &pass.parts {
            if self.attends_over_tiles(part) || part.attending.is_empty() {
                parts.push(None);
                continue;
            }
            self.gather_part(layer, part, 0..part.attending.len());
            let Some(sequence) = &self.sequences[part.sequence] else { continue };
            let view = SequenceView {
                geometry: &self.model.geometry,
                sequence,
                staged: &part.staged,
                has_rows: complete,
            };
            let (part_q, rows) = (&self.scratch.part_q, &self.scratch.rows);
            let queries = queries(&self.model.geometry, layer, part_q, rows.len(), sequence, part);
            let (mut states, mut units, mut plan) = (Vec::new(), Vec::new(), None);
            let limits = self.limits;
            self.pool.team(|team| {
                view.residents(team, &queries, rows, &mut states, &mut units);
                view.route(team, &queries, &states, limits, &mut plan);
            });
            parts.push(plan.map(|plan| PlanPart { states, plan, n_units: queries.n_units }));
        }
        self.counters.route.add(started.elapsed());
        self.pass = Some(pass);
        let q = self.scratch.q.clone();
        self.plans.insert(StoredPlan { layer, q, complete, parts })
    }

    /// Starts to bring a plan's tokens to the fast tier. The CPU reads the slow tier where it is,
    /// so there is nothing to move; the plan is checked.
    pub fn zoom(&mut self, plan: PlanId) -> Result<()> {
        let started = Instant::now();
        self.plans.get(plan)?;
        self.counters.zoom.add(started.elapsed());
        Ok(())
    }

    pub fn free_plan(&mut self, plan: PlanId) {
        self.plans.remove(plan);
    }

    /// Attends: `out` gets d_v x n_heads x n_tok.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &View,
        plan: Option<PlanId>,
        out: &View,
    ) -> Result<()> {
        if let Some(plan) = plan {
            self.plans.get(plan)?;
        }
        self.load_queries("attend", layer, q)?;
        let Some(pass) = self.pass.take() else {
            fail!(Internal, "the pass vanished");
        };
        let result = self.attend_pass(layer, &pass, plan, out);
        self.pass = Some(pass);
        if result.is_ok()
            && let Some(pass) = &mut self.pass
        {
            pass.steps[layer] = LayerStep::Attended;
        }
        result
    }

    fn attend_pass(
        &mut self,
        layer: usize,
        pass: &Pass,
        plan: Option<PlanId>,
        out: &View,
    ) -> Result<()> {
        let shape = self.model.geometry.layers[layer];
        match pass.steps[layer] {
            LayerStep::Ingested => {}
            LayerStep::Waiting => fail!(Order, "layer {layer} is attended before it was ingested"),
            LayerStep::Attended => fail!(Order, "layer {layer} was attended already in this pass"),
        }
        out.check("out", self.model.geometry.value_dim, shape.n_heads, pass.n_tokens)?;
        let started = Instant::now();
        self.keep_queries(layer, pass);
        let usable = plan.filter(|&id| {
            let stored = self.plans.get(id);
            stored.is_ok_and(|p| p.layer == layer && p.complete && p.q == self.scratch.q)
        });
        match (plan, usable) {
            (Some(_), Some(_)) => self.counters.plans_used += 1,
            (Some(_), None) => self.counters.plans_ignored += 1,
            (None, _) => {}
        }
        for (index, part) in pass.parts.iter().enumerate() {
            if part.attending.is_empty() {
                continue;
            }
            if self.attends_over_tiles(part) {
                self.attend_tiles(layer, part, out);
            } else {
                self.attend_routed(layer, part, index, usable, out);
            }
        }
        self.counters.attend.add(started.elapsed());
        Ok(())
    }

    /// Keeps the last queries of each sequence whose layout isn't settled. The pass is lent out of
    /// `self` while this runs.
    fn keep_queries(&mut self, layer: usize, pass: &Pass) {
        let geometry = &self.model.geometry;
        let len = geometry.layers[layer].n_heads * geometry.key_dim;
        for part in &pass.parts {
            let Some(sequence) = &mut self.sequences[part.sequence] else { continue };
            if !sequence.wants_queries() {
                continue;
            }
            let first = sequence.n_tokens();
            let start = part.tokens.len().saturating_sub(QUERIES);
            for (row, &token) in part.tokens.iter().enumerate().skip(start) {
                let query = &self.scratch.q[token * len..][..len];
                sequence.queries.put(geometry, layer, first + row, query);
            }
        }
    }

    fn attends_over_tiles(&self, part: &PassSequence) -> bool {
        self.params.prefill == Prefill::Exact && part.attending.len() > ROUTED_QUERIES
    }

    /// Gathers a range of the part's attending tokens: their queries, scaled, and their rows.
    fn gather_part(&mut self, layer: usize, part: &PassSequence, range: std::ops::Range<usize>) {
        let geometry = &self.model.geometry;
        let len = geometry.layers[layer].n_heads * geometry.key_dim;
        let Scratch { q, part_q, rows, .. } = &mut self.scratch;
        rows.clear();
        rows.extend_from_slice(&part.attending[range]);
        part_q.clear();
        for &row in rows.iter() {
            let query = &q[part.tokens[row] * len..][..len];
            part_q.extend(query.iter().map(|x| x * geometry.attention_scale));
        }
    }

    fn attend_tiles(&mut self, layer: usize, part: &PassSequence, out: &View) {
        self.gather_part(layer, part, 0..part.attending.len());
        let geometry = &self.model.geometry;
        let n_heads = geometry.layers[layer].n_heads;
        let Scratch { part_q, part_out, .. } = &mut self.scratch;
        part_out.resize(part.attending.len() * n_heads * geometry.value_dim, 0.0);
        let Some(sequence) = &self.sequences[part.sequence] else { return };
        let view = SequenceView { geometry, sequence, staged: &part.staged, has_rows: true };
        self.pool.team(|team| view.tiles(team, part, layer, part_q, part_out));
        for (i, row) in part_out.chunks(geometry.value_dim).enumerate() {
            let token = part.tokens[part.attending[i / n_heads]];
            out.store(i % n_heads, token, row);
        }
    }

    fn attend_routed(
        &mut self,
        layer: usize,
        part: &PassSequence,
        index: usize,
        plan: Option<PlanId>,
        out: &View,
    ) {
        for start in (0..part.attending.len()).step_by(ROUTED_QUERIES) {
            let end = (start + ROUTED_QUERIES).min(part.attending.len());
            self.gather_part(layer, part, start..end);
            let geometry = &self.model.geometry;
            let Some(sequence) = &self.sequences[part.sequence] else { return };
            let view = SequenceView { geometry, sequence, staged: &part.staged, has_rows: true };
            let Scratch { part_q, rows, routed, .. } = &mut self.scratch;
            let queries = queries(geometry, layer, part_q, rows.len(), sequence, part);
            let stored = plan
                .and_then(|id| self.plans.get_mut(id))
                .and_then(|stored| stored.parts.get_mut(index))
                .and_then(Option::as_mut)
                .filter(|stored| stored.n_units == queries.n_units);
            let limits = self.limits;
            let counters = &mut self.counters;
            let RoutedScratch { states, units, plan } = routed;
            self.pool.team(|team| match stored {
                Some(stored) => {
                    states.clone_from(&stored.states);
                    sequence.sealed.attend(team, &queries, &mut *stored.plan, states);
                    count_plan(counters, &*stored.plan, queries.n_units);
                }
                None => {
                    view.residents(team, &queries, rows, states, units);
                    let routing = Instant::now();
                    view.route(team, &queries, states, limits, plan);
                    counters.route.add(routing.elapsed());
                    if let Some(plan) = plan {
                        sequence.sealed.attend(team, &queries, &mut **plan, states);
                        count_plan(counters, &**plan, queries.n_units);
                    }
                }
            });
            let mut row = vec![0.0; geometry.value_dim];
            let n_heads = queries.n_kv_heads * queries.n_group;
            for i in 0..rows.len() * n_heads {
                let (t, h) = (i / n_heads, i % n_heads);
                let unit = t * queries.n_kv_heads + h / queries.n_group;
                states[unit].finish(h % queries.n_group, &mut row);
                out.store(h, part.tokens[rows[t]], &row);
            }
        }
    }

    /// Ends the pass: its tokens count. `surprisal[i]` is token i's, in nats, NaN where unknown.
    pub fn commit(&mut self, surprisal: Option<&[f32]>) -> Result<()> {
        let Some(pass) = &self.pass else {
            fail!(Order, "no pass is running, there is nothing to commit");
        };
        if let Some(layer) = pass.steps.iter().position(|&step| step == LayerStep::Waiting) {
            fail!(Order, "layer {layer} was not ingested, a pass needs every layer");
        }
        if let Some(values) = surprisal {
            if values.len() != pass.n_tokens {
                fail!(
                    Argument,
                    "{} surprisals were given, the batch has {} tokens",
                    values.len(),
                    pass.n_tokens
                );
            }
            check_surprisal(values)?;
        }
        for part in &pass.parts {
            if let Some(sequence) = &mut self.sequences[part.sequence] {
                sequence.reserve(part.tokens.len())?;
            }
        }
        let Some(pass) = self.pass.take() else {
            fail!(Internal, "the pass vanished");
        };
        self.plans.clear();
        let started = Instant::now();
        let mut sealed = 0;
        for part in &pass.parts {
            let Some(sequence) = &mut self.sequences[part.sequence] else { continue };
            let is_prompt = part.tokens.len() > ROUTED_QUERIES;
            let tokens = part.tokens.iter().map(|&token| {
                (pass.positions[token], surprisal.map_or(f32::NAN, |values| values[token]))
            });
            let done =
                self.pool.team(|team| sequence.commit(team, &part.staged, tokens, is_prompt));
            sealed += done.sealed_tokens;
            note_seal(&mut self.counters, &mut self.events, done);
        }
        if sealed > 0 {
            self.counters.seal.add(started.elapsed());
        }
        self.counters.passes += 1;
        self.end_pass(pass);
        if let Err(error) = budget::keep(self) {
            self.events.push(error);
        }
        Ok(())
    }

    /// Ends the pass as if it had never begun.
    pub fn abort(&mut self) -> Result<()> {
        let Some(pass) = self.pass.take() else {
            fail!(Order, "no pass is running, there is nothing to abort");
        };
        self.plans.clear();
        for part in &pass.parts {
            let slot = &mut self.sequences[part.sequence];
            if let Some(sequence) = slot {
                let first = sequence.n_tokens();
                sequence.queries.settle(first, part.tokens.len(), false);
                if first == 0 {
                    *slot = None;
                }
            }
        }
        self.end_pass(pass);
        Ok(())
    }

    fn end_pass(&mut self, pass: Pass) {
        self.scratch.spare_parts.extend(pass.parts);
        self.counters.scratch_peak = self.counters.scratch_peak.max(self.scratch_bytes());
        // A prompt's staging is large and a decode step's small: keep what a step needs.
        if pass.n_tokens <= ROUTED_QUERIES {
            self.scratch.spare_parts.truncate(self.sequences.len());
        } else {
            self.scratch.spare_parts.clear();
            self.scratch.q = Vec::new();
            self.scratch.part_q = Vec::new();
            self.scratch.part_out = Vec::new();
        }
    }

    pub(super) fn scratch_bytes(&self) -> u64 {
        let rings = self.sequences.iter().flatten().map(|s| s.queries.bytes()).sum::<u64>();
        self.scratch.bytes() + rings
    }

    pub(super) fn require_no_pass(&self, call: &str) -> Result<()> {
        if self.pass.is_some() {
            fail!(Order, "{call} during a pass, commit or abort it first");
        }
        Ok(())
    }

    pub(super) fn with_team<R>(
        &mut self,
        work: impl FnOnce(&Team, &mut [Option<Sequence>]) -> R,
    ) -> R {
        let sequences = &mut self.sequences[..];
        self.pool.team(|team| work(team, sequences))
    }
}

fn queries<'a>(
    geometry: &crate::model::Geometry,
    layer: usize,
    q: &'a [f32],
    n_rows: usize,
    sequence: &Sequence,
    part: &PassSequence,
) -> Queries<'a> {
    let shape = geometry.layers[layer];
    Queries {
        layer,
        n_kv_heads: shape.n_kv_heads,
        n_group: shape.group(),
        q,
        n_units: n_rows * shape.n_kv_heads,
        n_tokens: sequence.n_tokens() + part.tokens.len(),
    }
}

fn count_plan(counters: &mut Counters, plan: &dyn Plan, n_units: usize) {
    for unit in 0..n_units {
        counters.fetched.add(plan.fetched(unit) as u64);
        counters.middle.add(plan.middle(unit) as u64);
    }
}

fn note_seal(counters: &mut Counters, events: &mut Vec<Error>, done: Committed) {
    if let Some(error) = done.seal_error {
        counters.seal_failures += 1;
        events.push(error);
    }
}

fn check_values(name: &str, layer: usize, head: usize, token: usize, row: &[f32]) -> Result<()> {
    if let Some(i) = first_outside(row, LARGEST_VALUE) {
        fail!(
            Value,
            "{name} of layer {layer}, head {head}, token {token} holds {} at element {i}, expected \
             finite values of at most {LARGEST_VALUE}",
            row[i]
        );
    }
    Ok(())
}

/// NaN means unknown; infinite or negative surprisal is no surprisal.
pub(super) fn check_surprisal(values: &[f32]) -> Result<()> {
    if let Some(i) = values.iter().position(|&s| s < 0.0 || s.is_infinite()) {
        fail!(
            Value,
            "surprisal of token {i} is {}, expected a number of nats of at least 0, or NaN for \
             unknown",
            values[i]
        );
    }
    Ok(())
}
