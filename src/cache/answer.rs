//! The queries of a pass: route, zoom, attend.

use std::sync::Arc;
use std::time::Instant;

use super::attend::{ROUTED_QUERIES, RoutedScratch, View as SequenceView};
use super::context::{Context, Scratch, check_values};
use super::pass::{LayerStep, Pass, PassSequence};
use super::plans::{PlanId, PlanPart, StoredPlan};
use super::queries::QUERIES;
use super::sequence::Sequence;
use super::statistics::Counters;
use crate::error::{Result, fail};
use crate::params::Prefill;
use crate::routing::{Plan, Queries};
use crate::tensor::View;

impl Context {
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
        // What could not be read was attended as zeros: the output is void.
        self.store.take_fault()
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
                Arc::make_mut(&mut sequence.queries).put(geometry, layer, first + row, query);
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
            let Scratch { part_q, rows, routed, row, .. } = &mut self.scratch;
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
            row.resize(geometry.value_dim, 0.0);
            let n_heads = queries.n_kv_heads * queries.n_group;
            for i in 0..rows.len() * n_heads {
                let (t, h) = (i / n_heads, i % n_heads);
                let unit = t * queries.n_kv_heads + h / queries.n_group;
                states[unit].finish(h % queries.n_group, row);
                out.store(h, part.tokens[rows[t]], row);
            }
        }
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
