//! The sealed tokens of one sequence.

use std::any::Any;
use std::sync::Arc;

use super::attend::{attend_dense, attend_piece};
use super::block_work::{BlockWork, MadeBlock};
use super::layer::Turn;
use super::layout::{self, SequenceLayout};
use super::picked_rows::PickedRows;
use super::plan::Sealed;
use super::route::{self, Thresholds};
use super::seal::{Source, dense_block, seal_block};
use super::{BlockShape, HeadLayout, LadderPlan, Layer, Sketch, Slab, change, dense, save};
use crate::attend::SoftmaxState;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::Model;
use crate::params::{BasisCodec, DenseLayers, Params};
use crate::pool::Team;
use crate::routing::{
    Counted, OpenRows, Plan, Queries, RecentQueries, Remade, RouteLimits, RoutingReport, SealWork,
    SealedBytes, SealedTokens,
};
use crate::store::{Image, ImageReader, Reserved, SlowStore};

/// Blocks that one thread takes at a time, at the least: below, sharing costs more than it gains.
const BLOCKS_A_PIECE: usize = 8;

/// Pieces for each thread, so that an uneven pace evens out.
const PIECES_A_THREAD: usize = 4;

#[derive(Clone)]
pub struct LadderTokens {
    pub(super) model: Arc<Model>,
    pub(super) params: Arc<Params>,
    pub(super) store: Arc<SlowStore>,
    pub(super) layout: Option<SequenceLayout>,
    pub(super) layers: Vec<Layer>,
    /// What all of it takes, shared or not.
    pub(super) bytes: SealedBytes,
    n_threads_hint: usize,
    pub(super) repacked_blocks: u64,
}

impl LadderTokens {
    pub fn new(model: &Arc<Model>, params: &Arc<Params>, store: &SlowStore) -> Self {
        let n_threads_hint = match params.n_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        Self {
            model: Arc::clone(model),
            params: Arc::clone(params),
            store: Arc::new(store.for_sequence()),
            layout: None,
            layers: vec![Layer::default(); model.geometry.layers.len()],
            bytes: SealedBytes::default(),
            n_threads_hint,
            repacked_blocks: 0,
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
        tokens.count_bytes();
        Ok(tokens)
    }

    pub(super) fn is_dense(&self, layer: usize) -> bool {
        self.layout.as_ref().is_some_and(|layout| layout.dense_layers.contains(&layer))
    }

    /// A sealed block's shape with the sketch that the host chose.
    pub(super) fn shape(&self, layer: usize, sketch: Sketch) -> BlockShape {
        let geometry = &self.model.geometry;
        let row_codec = match self.params.basis_codec {
            BasisCodec::Rows(codec) => codec,
            BasisCodec::LowRank(_) => RowCodec::Int8,
        };
        BlockShape {
            n_tokens: self.params.block_tokens,
            n_kv_heads: geometry.layers[layer].n_kv_heads,
            key_dim: geometry.key_dim,
            value_dim: geometry.value_dim,
            sketch,
            value_rank: layout::value_rank(&self.params, geometry.value_dim),
            mean_codec: self.params.mean_codec,
            row_codec,
        }
    }

    /// A dense layer's rows take the codec of the residents that they are.
    pub(super) fn dense_shape(&self, layer: usize) -> BlockShape {
        BlockShape { row_codec: self.params.resident_codec, ..self.shape(layer, self.sketch()) }
    }

    pub(super) fn sketch(&self) -> Sketch {
        let dim = self.model.geometry.key_dim;
        layout::sketch_of(self.params.sketch_profile(dim), dim)
    }

    /// Room for the rows of `n` new blocks of a layer; None where its rows are resident.
    pub(super) fn room(
        &self,
        layer: usize,
        n: usize,
    ) -> impl Iterator<Item = Result<Option<Reserved>>> {
        let is_slow = !self.is_dense(layer);
        let len = self.shape(layer, self.sketch()).rows_bytes();
        (0..n).map(move |_| is_slow.then(|| self.store.reserve(len)).transpose())
    }

    pub(super) fn make_block(
        &self,
        layer: usize,
        first: usize,
        rows: &dyn OpenRows,
        room: Option<Reserved>,
    ) -> Result<Slab> {
        let source = Source { rows, layer, first };
        let Some(layout) = &self.layout else {
            fail!(Internal, "tokens were to be sealed before there was a layout");
        };
        match room {
            None => dense_block(self.dense_shape(layer), &source),
            Some(room) => {
                let shape = self.shape(layer, self.sketch());
                seal_block(shape, &layout.heads[layer], &source, &self.store, room)
            }
        }
    }

    /// Appends blocks, `[layer][block]`; on an error none.
    fn append_blocks(
        &mut self,
        n_blocks: usize,
        mut made: impl Iterator<Item = Result<Slab>>,
    ) -> Result<()> {
        let before = self.layers[0].n_blocks();
        let mut append = || {
            for layer in &mut self.layers {
                let new = made.by_ref().take(n_blocks).map(|slab| Ok((slab?, None)));
                layer.append(new.collect::<Result<_>>()?)?;
            }
            Ok(())
        };
        let result = append();
        if result.is_err() {
            self.layers.iter_mut().for_each(|layer| layer.truncate(before));
        }
        self.count_bytes();
        result
    }

    /// One layer with its blocks made anew, in parallel, each from its slab and number in it.
    pub(super) fn rebuilt_layer(
        &self,
        team: &Team,
        layer: usize,
        make: impl Fn(&Slab, usize) -> Result<Slab> + Sync,
    ) -> Result<Layer> {
        let old = &self.layers[layer];
        let mut walk = old.walk();
        let places: Vec<(&Slab, usize, &Turn)> = (0..old.n_blocks())
            .map(|number| {
                let (slab, block) = walk.find(number);
                (slab, block, walk.turn())
            })
            .collect();
        let mut made: Vec<Option<Result<Slab>>> = Vec::new();
        made.resize_with(places.len(), || None);
        team.for_each_mut(&mut made, |i, out| *out = Some(make(places[i].0, places[i].1)));
        self.store.take_fault()?;
        let turned = made.into_iter().flatten().zip(&places);
        let slabs = turned.map(|(slab, place)| Ok((slab?, place.2.clone())));
        let mut layer_made = Layer::default();
        layer_made.append(slabs.collect::<Result<_>>()?)?;
        Ok(layer_made)
    }

    fn sealed<'a>(&'a self, layer: usize, head: usize, none: &'a HeadLayout) -> Sealed<'a> {
        let layout = self.layout.as_ref().map_or(none, |layout| &layout.heads[layer][head]);
        Sealed { layer: &self.layers[layer], head, layout }
    }

    fn n_pieces(&self, n_blocks: usize, n_units: usize) -> usize {
        let wanted = (PIECES_A_THREAD * self.n_threads_hint).div_ceil(n_units.max(1));
        if self.n_threads_hint == 1 {
            1
        } else {
            wanted.clamp(1, (n_blocks / BLOCKS_A_PIECE).max(1))
        }
    }

    fn thresholds(&self, n_tokens: usize) -> Thresholds {
        let has_values = layout::value_rank(&self.params, self.model.geometry.value_dim) > 0;
        Thresholds::at(&self.params, n_tokens, has_values)
    }
}

fn ladder_plan(plan: &mut dyn Plan) -> Option<&mut LadderPlan> {
    plan.as_any().downcast_mut()
}

impl SealedTokens for LadderTokens {
    fn has_layout(&self) -> bool {
        self.layout.is_some()
    }

    fn lay_out(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        n_tokens: usize,
        queries: &dyn RecentQueries,
    ) -> Result<()> {
        let geometry = &self.model.geometry;
        let mut layout = layout::choose(geometry, &self.params, team, rows, n_tokens, queries);
        let overruled =
            self.model.sidecar.as_ref().and_then(|sidecar| sidecar.dense_layers.clone());
        layout.dense_layers = match (&self.params.dense, overruled) {
            (DenseLayers::List(list), _) => list.clone(),
            (DenseLayers::None, _) => Vec::new(),
            (DenseLayers::Rule, Some(list)) => list,
            (DenseLayers::Rule, None) => {
                let threshold = self.params.dense_threshold;
                dense::diffuse_layers(
                    geometry,
                    threshold,
                    team,
                    n_tokens,
                    queries,
                    &|il, head, out| {
                        let mut value = vec![0.0; geometry.value_dim];
                        for (t, key) in out.chunks_mut(geometry.key_dim).enumerate() {
                            rows.read(il, head, t, key, &mut value);
                        }
                    },
                )
            }
        };
        self.layout = Some(layout);
        self.count_bytes();
        Ok(())
    }

    fn centre(&self, layer: usize, head: usize) -> Option<&[f32]> {
        self.layout.as_ref().map(|layout| &layout.heads[layer][head].centre[..])
    }

    fn n_tokens(&self) -> usize {
        self.layers[0].n_tokens()
    }

    fn sealable(&self, n_open: usize, _: &[f32], _: bool) -> usize {
        if self.has_layout() {
            n_open / self.params.block_tokens * self.params.block_tokens
        } else {
            0
        }
    }

    fn seal(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        first: usize,
        n: usize,
        _: &[f32],
    ) -> Result<()> {
        let n_blocks = n / self.params.block_tokens;
        let n_layers = self.layers.len();
        type Making = (Option<Reserved>, Option<Result<Slab>>);
        let mut made: Vec<Making> = Vec::with_capacity(n_layers * n_blocks);
        for layer in 0..n_layers {
            for room in self.room(layer, n_blocks) {
                made.push((room?, None));
            }
        }
        team.for_each_mut(&mut made, |i, (room, out)| {
            let first = first + i % n_blocks * self.params.block_tokens;
            *out = Some(self.make_block(i / n_blocks, first, rows, room.take()));
        });
        self.append_blocks(n_blocks, made.into_iter().filter_map(|(_, slab)| slab))
    }

    fn seal_work(&self, first: usize, n: usize) -> Option<Box<dyn SealWork>> {
        if n != self.params.block_tokens {
            return None;
        }
        // Without the layers: nothing of them is kept alive for a block that is not among them.
        let layers = vec![Layer::default(); self.layers.len()];
        let store = Arc::clone(&self.store);
        let tokens = Self { layers, store, layout: self.layout.clone(), ..self.clone() };
        Some(Box::new(BlockWork { tokens, first }))
    }

    fn take_sealed(&mut self, made: Box<dyn Any + Send>) -> Result<bool> {
        let Ok(made) = made.downcast::<MadeBlock>() else { return Ok(false) };
        let dense = self.layout.as_ref().map(|layout| &layout.dense_layers);
        if dense != Some(&made.dense_layers) {
            return Ok(false);
        }
        self.append_blocks(1, made.slabs.into_iter().map(Ok))?;
        Ok(true)
    }

    fn share(&self) -> Box<dyn SealedTokens> {
        let store = Arc::new(self.store.for_sequence());
        Box::new(Self { store, repacked_blocks: 0, ..self.clone() })
    }

    fn without(&self, team: &Team, first: usize, n: usize) -> Result<Box<dyn SealedTokens>> {
        Ok(Box::new(change::without(self, team, first, n)?))
    }

    fn shifted(
        &self,
        team: &Team,
        first: usize,
        n: usize,
        delta: i32,
    ) -> Result<Box<dyn SealedTokens>> {
        Ok(Box::new(change::shifted(self, team, first, n, delta)?))
    }

    fn cut_below(&self, n_keep: usize) -> usize {
        let n_keep = n_keep.min(self.n_tokens());
        n_keep - self.layers[0].place(n_keep).1
    }

    fn truncate(&mut self, n_keep: usize) {
        let (n_blocks, _) = self.layers[0].place(n_keep);
        self.layers.iter_mut().for_each(|layer| layer.truncate(n_blocks));
        self.count_bytes();
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
        let geometry = &self.model.geometry;
        let rows = keys.chunks_mut(geometry.key_dim).zip(values.chunks_mut(geometry.value_dim));
        let mut blocks = self.layers[layer].walk();
        let (mut number, mut token) = self.layers[layer].place(first);
        let mut room = Vec::new();
        for (key, value) in rows.take(n) {
            let (slab, block) = blocks.find(number);
            slab.decode_row((head, block, token), &mut room, key, value);
            if let Some(rotation) = blocks.turn() {
                rotation.apply_centred(key, self.centre(layer, head).unwrap_or(&[]));
            }
            token += 1;
            if token == slab.shape.n_tokens {
                (number, token) = (number + 1, 0);
            }
        }
    }

    fn new_plan(&self) -> Box<dyn Plan> {
        Box::new(LadderPlan::default())
    }

    fn route(
        &self,
        team: &Team,
        queries: &Queries,
        states: &[SoftmaxState],
        limits: RouteLimits,
        plan: &mut dyn Plan,
    ) {
        let Some(plan) = ladder_plan(plan) else { return };
        let n_blocks = self.layers[queries.layer].n_blocks();
        let n_pieces = self.n_pieces(n_blocks, queries.n_units);
        plan.prepare(queries.n_units, n_blocks, n_pieces);
        if n_blocks == 0 || self.is_dense(queries.layer) {
            return;
        }
        let (n_group, n_kv_heads) = (queries.n_group, queries.n_kv_heads);
        let none = HeadLayout::default();
        let at = self.thresholds(queries.n_tokens);
        team.for_each_mut(plan.active(), |i, piece| {
            let unit = i / n_pieces;
            let sealed = self.sealed(queries.layer, unit % n_kv_heads, &none);
            route::score(piece, &sealed, queries.unit(unit), &states[unit], at);
        });
        let mut log_sum = std::mem::take(&mut plan.log_sum);
        log_sum.resize(queries.n_units * n_group, 0.0);
        for (unit, out) in log_sum.chunks_mut(n_group).enumerate() {
            for (g, out) in out.iter_mut().enumerate() {
                let (mut m, mut l) = (states[unit].m[g], states[unit].l[g]);
                for piece in plan.unit_pieces(unit) {
                    route::add(&mut m, &mut l, piece.scratch.m[g], piece.scratch.l[g]);
                }
                *out = m + l.ln();
            }
        }
        team.for_each_mut(plan.active(), |i, piece| {
            route::select(piece, &log_sum[i / n_pieces * n_group..][..n_group], at);
        });
        if let Some(budget) = limits.fetch_budget {
            let middle = layout::value_rank(&self.params, self.model.geometry.value_dim) > 0;
            for pieces in plan.active().chunks_mut(n_pieces) {
                route::limit(pieces, budget, middle);
            }
        }
        plan.log_sum = log_sum;
    }

    fn attend(
        &self,
        team: &Team,
        queries: &Queries,
        plan: &mut dyn Plan,
        states: &mut [SoftmaxState],
    ) {
        let Some(plan) = ladder_plan(plan) else { return };
        if self.layers[queries.layer].n_blocks() == 0 {
            return;
        }
        let (n_group, n_kv_heads, n_pieces) = (queries.n_group, queries.n_kv_heads, plan.n_pieces);
        let dims = [self.model.geometry.key_dim, self.model.geometry.value_dim];
        let dense = self.is_dense(queries.layer);
        let log_sum = std::mem::take(&mut plan.log_sum);
        let none = HeadLayout::default();
        team.for_each_mut(plan.active(), |i, piece| {
            let unit = i / n_pieces;
            let sealed = self.sealed(queries.layer, unit % n_kv_heads, &none);
            let q = queries.unit(unit);
            if dense {
                attend_dense(piece, &sealed, q, n_group, dims);
            } else {
                attend_piece(piece, &sealed, q, &log_sum[unit * n_group..][..n_group], dims);
            }
        });
        plan.log_sum = log_sum;
        for (unit, state) in states.iter_mut().enumerate().take(queries.n_units) {
            for piece in plan.unit_pieces(unit) {
                state.merge(&piece.scratch.state);
            }
        }
    }

    fn review(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        n_sinks: usize,
        n_tokens: usize,
        queries: &dyn RecentQueries,
    ) -> Result<()> {
        let decided_by_rule = self.params.dense == DenseLayers::Rule
            && self.model.sidecar.as_ref().is_none_or(|sidecar| sidecar.dense_layers.is_none());
        let Some(layout) = &self.layout else { return Ok(()) };
        let mut dense_layers = layout.dense_layers.clone();
        let free = dense::most(self.layers.len()).saturating_sub(dense_layers.len());
        if !decided_by_rule || free == 0 || self.n_tokens() == 0 {
            return Ok(());
        }
        let geometry = &self.model.geometry;
        let (n_sealed, threshold) = (self.n_tokens(), self.params.dense_threshold);
        let read = |il: usize, head: usize, keys: &mut [f32]| {
            let mut values = vec![0.0; geometry.value_dim * n_sealed];
            let (sinks, rest) = keys.split_at_mut(n_sinks * geometry.key_dim);
            let (sealed, window) = rest.split_at_mut(n_sealed * geometry.key_dim);
            self.read(il, head, 0, n_sealed, sealed, &mut values);
            let value = &mut values[..geometry.value_dim];
            for (t, key) in sinks.chunks_mut(geometry.key_dim).enumerate() {
                rows.read(il, head, t, key, value);
            }
            for (t, key) in window.chunks_mut(geometry.key_dim).enumerate() {
                rows.read(il, head, n_sinks + n_sealed + t, key, value);
            }
        };
        let diffuse = dense::diffuse_layers(geometry, threshold, team, n_tokens, queries, &read);
        let new: Vec<usize> =
            diffuse.into_iter().filter(|il| !dense_layers.contains(il)).take(free).collect();
        for layer in new {
            let shape = self.dense_shape(layer);
            self.layers[layer] = self.rebuilt_layer(team, layer, |slab, block| {
                let shape = BlockShape { n_tokens: slab.shape.n_tokens, ..shape };
                let rows = PickedRows::of_block(slab, block);
                dense_block(shape, &Source { rows: &rows, layer, first: 0 })
            })?;
            dense_layers.push(layer);
        }
        if let Some(layout) = &mut self.layout {
            layout.dense_layers = dense_layers;
        }
        self.count_bytes();
        Ok(())
    }

    fn bytes(&self, counted: &mut Counted) -> SealedBytes {
        self.bytes_beside(counted)
    }

    fn estimate(&self, n: usize) -> SealedBytes {
        let geometry = &self.model.geometry;
        let mut bytes = SealedBytes::default();
        for layer in 0..self.layers.len() {
            let n_blocks = (n / self.params.block_tokens) as u64;
            bytes = bytes.plus(self.bytes_of_blocks(layer, n_blocks));
            let rank = layout::value_rank(&self.params, geometry.value_dim);
            let head = geometry.key_dim * 6 + rank * geometry.value_dim * 2;
            bytes.layout += (geometry.layers[layer].n_kv_heads * head) as u64;
        }
        bytes
    }

    fn bytes_to_seal(&self, n: usize) -> [u64; 2] {
        let n_blocks = (n / self.params.block_tokens) as u64;
        let layers = || 0..self.layers.len();
        let full: u64 = layers().map(|layer| self.bytes_of_blocks(layer, n_blocks).fast()).sum();
        let least: u64 = layers().map(|layer| self.bytes_of_means(layer)).sum();
        [full, least * n_blocks]
    }

    fn minimum_bytes(&self, counted: &mut Counted) -> u64 {
        let mut bytes = self.layout_beside(counted);
        for (layer, blocks) in self.layers.iter().enumerate() {
            bytes += self.bytes_of_means(layer) * blocks.blocks_beside(counted) as u64;
        }
        bytes
    }

    fn shrink(&mut self, team: &Team, excess: u64, remade: &mut Remade) -> Result<u64> {
        super::shrink::shrink(self, team, excess, remade)
    }

    fn report(&self) -> RoutingReport {
        let mut report =
            RoutingReport { repacked_blocks: self.repacked_blocks, ..Default::default() };
        if let Some(layout) = &self.layout {
            report.dense_layers = layout.dense_layers.clone();
            report.layout_without_queries = layout.without_queries;
        }
        let blocks = &self.layers[0];
        report.spans = blocks.n_blocks() as u64;
        for (slab, run) in blocks.runs(0..blocks.n_blocks()) {
            let bucket = slab.shape.n_tokens.ilog2().min(19) as usize;
            report.span_lengths[bucket] += run.len() as u64;
        }
        report
    }

    fn save(&self, image: &mut Image) -> Result<()> {
        save::save(self, image)
    }
}
