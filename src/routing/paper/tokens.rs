//! The sealed tokens of one sequence.

use std::sync::Arc;

use super::attend::{HeadPieces, attend_unit};
use super::piece::PieceShape;
use super::route::Router;
use super::run::runs;
use super::seal::{Recipe, Source, seal_piece};
use super::weights::{Weights, gate_mlp};
use super::{PaperPlan, Piece, Placed, Run, demote, remove, save, shift};
use crate::attend::SoftmaxState;
use crate::error::Result;
use crate::model::Model;
use crate::params::Params;
use crate::pool::Team;
use crate::routing::{
    Counted, OpenRows, Plan, Queries, RecentQueries, Remade, RouteLimits, RoutingReport,
    SealedBytes, SealedTokens,
};
use crate::segment::{Moments, SegmentRule, cut};
use crate::span::{Span, weights};
use crate::store::{Image, ImageReader, SlowStore};

#[derive(Clone)]
pub struct PaperTokens {
    pub(super) model: Arc<Model>,
    pub(super) params: Arc<Params>,
    store: Arc<SlowStore>,
    pub(super) weights: Option<Weights>,
    pub(super) runs: Vec<Run>,
    /// `[layer][run]`
    pub(super) layers: Vec<Vec<Placed>>,
    /// Of the sealed tokens, in nats; NaN where it is unknown.
    pub(super) surprisal: Vec<f32>,
    /// Sealed tokens that are anchors, ascending.
    pub(super) anchors: Vec<u32>,
    pub(super) demoted: u64,
}

impl PaperTokens {
    pub fn new(model: &Arc<Model>, params: &Arc<Params>, store: &SlowStore) -> Self {
        Self {
            model: Arc::clone(model),
            params: Arc::clone(params),
            store: Arc::new(store.for_sequence()),
            weights: None,
            runs: Vec::new(),
            layers: model.geometry.layers.iter().map(|_| Vec::new()).collect(),
            surprisal: Vec::new(),
            anchors: Vec::new(),
            demoted: 0,
        }
    }

    /// The tokens that an image holds.
    pub fn restore(
        model: &Arc<Model>,
        params: &Arc<Params>,
        store: &SlowStore,
        image: &mut ImageReader,
    ) -> Result<Self> {
        let mut tokens = Self::new(model, params, store);
        save::restore(&mut tokens, image)?;
        Ok(tokens)
    }

    pub(super) fn rule(&self) -> SegmentRule {
        SegmentRule {
            alpha: self.params.surprisal_alpha,
            span_min: self.params.span_min,
            span_max: self.params.span_max,
        }
    }

    pub(super) fn shape(&self, layer: usize, run: &Run) -> PieceShape {
        let geometry = &self.model.geometry;
        PieceShape {
            n_whole: run.n_whole,
            n_span: run.n_span,
            n_heads: geometry.layers[layer].n_heads,
            n_kv_heads: geometry.layers[layer].n_kv_heads,
            key_dim: geometry.key_dim,
            value_dim: geometry.value_dim,
            whole_codec: self.params.resident_codec,
            mean_codec: self.params.mean_codec,
        }
    }

    /// Makes the pieces of runs, `[run][layer]`, in parallel. `first` is the index in the
    /// sequence of sealed token 0, `surprisal` that of all tokens to be sealed.
    pub(super) fn make_pieces(
        &self,
        team: &Team,
        rows: &dyn OpenRows,
        first: usize,
        runs: &[Run],
        surprisal: impl Fn(usize) -> f32 + Sync,
    ) -> Result<Vec<Placed>> {
        let n_layers = self.layers.len();
        let weights_of = |run: &Run| {
            let tokens = run.span_first()..run.end();
            weights(&tokens.map(&surprisal).collect::<Vec<f32>>())
        };
        let span_weights: Vec<Vec<f32>> = runs.iter().map(weights_of).collect();
        let mut made: Vec<Option<Result<Piece>>> = Vec::new();
        made.resize_with(n_layers * runs.len(), || None);
        team.for_each_mut(&mut made, |i, out| {
            let (run, layer) = (i / n_layers, i % n_layers);
            let source = Source { rows, layer, first: first + runs[run].first };
            let shape = self.shape(layer, &runs[run]);
            let make = || {
                let recipe = self.recipe(layer)?;
                seal_piece(shape, &span_weights[run], &source, &recipe)
            };
            *out = Some(make());
        });
        self.store.take_fault()?;
        made.into_iter().flatten().map(|piece| piece.map(Placed::new)).collect()
    }

    /// Puts the routing weights in force.
    pub(super) fn take_weights(&mut self) -> Result<&Weights> {
        let weights = Weights::new(&self.model, self.params.seed)?;
        // So that no route has to fail.
        for layer in 0..self.layers.len() {
            weights.layer(&self.model.geometry, layer)?;
        }
        Ok(self.weights.insert(weights))
    }

    pub(super) fn recipe(&self, layer: usize) -> Result<Recipe<'_>> {
        let Some(weights) = &self.weights else {
            crate::error::fail!(Internal, "tokens were to be sealed before there was a layout");
        };
        Ok(Recipe {
            params: &self.params,
            projection: weights.layer(&self.model.geometry, layer)?.0,
            gate: gate_mlp(&self.model),
            store: &self.store,
        })
    }

    /// The run that a sealed token belongs to.
    pub(super) fn run_of(&self, token: usize) -> usize {
        self.runs.partition_point(|run| run.end() <= token)
    }

    /// Encoded key and value of a token that is kept whole and has not moved.
    pub(super) fn whole_row(
        &self,
        layer: usize,
        head: usize,
        token: usize,
    ) -> Option<(&[u8], &[u8])> {
        let index = self.run_of(token);
        let offset = token - self.runs.get(index)?.first;
        let piece = &self.layers[layer][index];
        (offset < piece.shape.n_whole && piece.shift() == 0)
            .then(|| (piece.whole_key(head, offset), piece.whole_value(head, offset)))
    }

    /// Compressed spans, by index into the sealed tokens.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> {
        let compressed = self.runs.iter().filter(|run| run.n_span > 0);
        compressed.map(|run| Span {
            start: run.span_first(),
            end: run.end(),
            full_resolution: false,
        })
    }
}

fn paper_plan(plan: &mut dyn Plan) -> Option<&mut PaperPlan> {
    plan.as_any().downcast_mut()
}

impl SealedTokens for PaperTokens {
    fn has_layout(&self) -> bool {
        self.weights.is_some()
    }

    /// There is nothing to learn from the first tokens but their surprisal; the layout point is
    /// where a threshold begins to mean something.
    fn lay_out(
        &mut self,
        _: &Team,
        _: &dyn OpenRows,
        _: usize,
        _: &dyn RecentQueries,
    ) -> Result<()> {
        self.take_weights().map(drop)
    }

    fn centre(&self, _: usize, _: usize) -> Option<&[f32]> {
        None
    }

    fn n_tokens(&self) -> usize {
        self.runs.last().map_or(0, Run::end)
    }

    /// Tokens of unknown surprisal wait, and all behind them, until they are forced. So does a last
    /// span that is too short to be compressed: what follows may join it.
    fn sealable(&self, n_open: usize, surprisal: &[f32], force: bool) -> usize {
        let surprisal = &surprisal[..n_open];
        let is_first = self.params.n_sinks == 0 && self.runs.is_empty();
        let unknown = |(i, h): (usize, &f32)| h.is_nan() && !(is_first && i == 0);
        let ready = match surprisal.iter().enumerate().position(unknown) {
            Some(first) if !force => first,
            _ => n_open,
        };
        if !self.has_layout() || ready < self.params.block_tokens {
            return 0;
        }
        let mut moments = Moments::new();
        moments.extend(&self.surprisal);
        moments.extend(&surprisal[..ready]);
        let rule = self.rule();
        let cut = cut(&surprisal[..ready], moments.threshold(rule.alpha), &rule, is_first);
        match cut.spans.last() {
            Some(span) if span.full_resolution && span.end == ready => span.start,
            _ => ready,
        }
    }

    fn seal(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        first: usize,
        n: usize,
        surprisal: &[f32],
    ) -> Result<()> {
        let mut surprisal = surprisal.to_vec();
        // Nothing comes before the first token to foresee it by: H_0 = 0.
        if let Some(h) = surprisal.first_mut().filter(|h| h.is_nan()) {
            *h = 0.0;
        }
        let mut moments = Moments::new();
        moments.extend(&surprisal);
        let rule = self.rule();
        let sealed = self.n_tokens();
        let new = &surprisal[first..first + n];
        let cut = cut(new, moments.threshold(rule.alpha), &rule, first == 0);
        let shift =
            |span: &Span| Span { start: span.start + sealed, end: span.end + sealed, ..*span };
        let spans: Vec<Span> = cut.compressed().map(shift).collect();
        let runs = runs(sealed, sealed + n, &spans);

        self.surprisal.try_reserve(n)?;
        self.anchors.try_reserve(cut.anchors.len())?;
        self.runs.try_reserve(runs.len())?;
        for layer in &mut self.layers {
            layer.try_reserve(runs.len())?;
        }
        let of_token = |token: usize| new[token - sealed];
        let made = self.make_pieces(team, rows, first - sealed, &runs, of_token)?;
        let n_layers = self.layers.len();
        for (i, piece) in made.into_iter().enumerate() {
            self.layers[i % n_layers].push(piece);
        }
        self.runs.extend(runs);
        self.surprisal.extend_from_slice(new);
        self.anchors.extend(cut.anchors.iter().map(|&anchor| (sealed + anchor) as u32));
        Ok(())
    }

    fn share(&self) -> Box<dyn SealedTokens> {
        let store = Arc::new(self.store.for_sequence());
        Box::new(Self { store, demoted: 0, ..self.clone() })
    }

    fn without(&self, team: &Team, first: usize, n: usize) -> Result<Box<dyn SealedTokens>> {
        Ok(Box::new(remove::without(self, team, first, n)?))
    }

    fn shifted(
        &self,
        team: &Team,
        first: usize,
        n: usize,
        delta: i32,
    ) -> Result<Box<dyn SealedTokens>> {
        Ok(Box::new(shift::shifted(self, team, first, n, delta)?))
    }

    fn cut_below(&self, n_keep: usize) -> usize {
        if n_keep >= self.n_tokens() {
            return self.n_tokens();
        }
        self.runs[self.run_of(n_keep)].first
    }

    fn truncate(&mut self, n_keep: usize) {
        let n_runs = self.runs.partition_point(|run| run.end() <= n_keep);
        self.runs.truncate(n_runs);
        for layer in &mut self.layers {
            layer.truncate(n_runs);
        }
        self.surprisal.truncate(n_keep);
        let n_anchors = self.anchors.partition_point(|&anchor| (anchor as usize) < n_keep);
        self.anchors.truncate(n_anchors);
    }

    fn read(
        &self,
        layer: usize,
        head: usize,
        first: usize,
        n: usize,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let (dk, dv) = (self.model.geometry.key_dim, self.model.geometry.value_dim);
        let end = first + n;
        for (run, piece) in self.runs.iter().zip(&self.layers[layer]).skip(self.run_of(first)) {
            if run.first >= end {
                break;
            }
            for token in first.max(run.first)..end.min(run.span_first()) {
                let (offset, at) = (token - run.first, token - first);
                let codec = piece.shape.whole_codec;
                let key = &mut keys[at * dk..][..dk];
                codec.decode(piece.whole_key(head, offset), key);
                piece.turn(key);
                codec.decode(piece.whole_value(head, offset), &mut values[at * dv..][..dv]);
            }
            let tokens = first.max(run.span_first())..end.min(run.end());
            if tokens.start < tokens.end {
                let (at, len) = (tokens.start - first, tokens.len());
                let tokens = tokens.start - run.span_first()..tokens.end - run.span_first();
                let keys = &mut keys[at * dk..(at + len) * dk];
                let values = &mut values[at * dv..(at + len) * dv];
                piece.read_span_here(head, tokens, false, keys, values);
            }
        }
    }

    fn new_plan(&self) -> Box<dyn Plan> {
        Box::new(PaperPlan::default())
    }

    fn route(
        &self,
        team: &Team,
        queries: &Queries,
        _: &[SoftmaxState],
        limits: RouteLimits,
        plan: &mut dyn Plan,
    ) {
        let Some(plan) = paper_plan(plan) else { return };
        let pieces = &self.layers[queries.layer][..];
        let spans = (0..pieces.len()).filter(|&i| pieces[i].shape.n_span > 0);
        plan.prepare(spans, queries.n_units);
        let geometry = &self.model.geometry;
        let Some(Ok((projection, threshold))) =
            self.weights.as_ref().map(|weights| weights.layer(geometry, queries.layer))
        else {
            return;
        };
        let (spans, units) = plan.active();
        let router = Router {
            pieces,
            spans,
            projection,
            threshold,
            attention_scale: geometry.attention_scale,
            fetch_budget: limits.fetch_budget,
        };
        team.for_each_mut(units, |i, unit| {
            router.route(unit, i % queries.n_kv_heads, queries.unit(i), queries.n_group);
        });
    }

    fn attend(
        &self,
        team: &Team,
        queries: &Queries,
        plan: &mut dyn Plan,
        states: &mut [SoftmaxState],
    ) {
        let Some(plan) = paper_plan(plan) else { return };
        let pieces = &self.layers[queries.layer][..];
        if pieces.is_empty() {
            return;
        }
        let (spans, units) = plan.active();
        team.for_each_mut(units, |i, unit| {
            let sealed = HeadPieces { pieces, spans, head: i % queries.n_kv_heads };
            attend_unit(unit, sealed, queries.unit(i), queries.n_group);
        });
        for (state, unit) in states.iter_mut().zip(units) {
            state.merge(&unit.scratch.state);
        }
    }

    fn review(
        &mut self,
        _: &Team,
        _: &dyn OpenRows,
        _: usize,
        _: usize,
        _: &dyn RecentQueries,
    ) -> Result<()> {
        Ok(())
    }

    fn bytes(&self, counted: &mut Counted) -> SealedBytes {
        self.bytes_beside(counted)
    }

    fn estimate(&self, n: usize) -> SealedBytes {
        self.bytes_expected(n)
    }

    fn bytes_to_seal(&self, n: usize) -> [u64; 2] {
        self.bytes_of_new(n)
    }

    fn minimum_bytes(&self, counted: &mut Counted) -> u64 {
        self.least_fast_bytes(counted)
    }

    fn shrink(&mut self, team: &Team, excess: u64, _: &mut Remade) -> Result<u64> {
        demote::shrink(self, team, excess)
    }

    fn report(&self) -> RoutingReport {
        let mut report = RoutingReport { demoted_anchors: self.demoted, ..Default::default() };
        report.tokens_without_surprisal =
            self.surprisal.iter().filter(|h| h.is_nan()).count() as u64;
        for span in self.spans() {
            report.spans += 1;
            let last = report.span_lengths.len() - 1;
            report.span_lengths[(span.len().ilog2() as usize).min(last)] += 1;
        }
        report
    }

    fn save(&self, image: &mut Image) -> Result<()> {
        save::save(self, image)
    }
}
