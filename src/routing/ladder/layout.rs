//! What a sequence's sketches have in common, chosen once from its first tokens.

use std::sync::Arc;

use half::f16;
use nalgebra::{DMatrix, SymmetricEigen};

use super::Sketch;
use crate::kernels::{f16_to_f32, f32_to_f16};
use crate::model::Geometry;
use crate::params::{Params, SketchProfile};
use crate::pool::Team;
use crate::routing::{OpenRows, RecentQueries};

/// One KV head's choices.
#[derive(Clone, Default)]
pub struct HeadLayout {
    /// Mean key, subtracted from every key: `[key_dim]`. q . centre is the same for every token
    /// and cancels in the softmax, so this changes nothing but the precision of what is stored.
    pub centre: Vec<f32>,
    /// Key dimensions by falling worth, RoPE pairs together. A sketch keeps the first of them.
    pub order: Vec<u16>,
    /// Leading directions of the values' residuals: `[value_rank][value_dim]`.
    pub value_basis: Vec<f16>,
}

/// All heads' choices.
#[derive(Clone, Default)]
pub struct SequenceLayout {
    /// `[layer][KV head]`, shared with copies of the sequence.
    pub heads: Arc<Vec<Vec<HeadLayout>>>,
    pub dense_layers: Vec<usize>,
    pub without_queries: bool,
}

impl SequenceLayout {
    pub fn bytes(&self) -> u64 {
        self.heads.iter().flatten().map(|head| head.bytes() as u64).sum()
    }
}

impl HeadLayout {
    fn bytes(&self) -> usize {
        self.centre.len() * 4 + self.order.len() * 2 + self.value_basis.len() * 2
    }

    /// Gathers a row of `key_dim` values in the order of a sketch's channels; channels beyond the
    /// last dimension get 0.
    pub fn gather(&self, row: &[f32], channels: &mut [f32]) {
        for (i, out) in channels.iter_mut().enumerate() {
            *out = self.order.get(i).map_or(0.0, |&dim| row[dim as usize]);
        }
    }
}

/// The sketch that a profile means for keys of `key_dim` dimensions: whole pairs, counts rounded
/// up to what fills a packed unit.
pub fn sketch_of(profile: SketchProfile, key_dim: usize) -> Sketch {
    let pairs = |share: usize| key_dim.div_ceil(2 * share) * 2;
    let (n4, n2) = match profile {
        SketchProfile::Compact => (pairs(8), pairs(4)),
        SketchProfile::Standard | SketchProfile::Auto => (pairs(4), pairs(4)),
        SketchProfile::High => (pairs(2), 0),
        SketchProfile::Raw => return Sketch::Raw,
    };
    Sketch::Packed { n4: n4.next_multiple_of(8), n2: n2.next_multiple_of(16) }
}

/// Coefficients of a value sketch: a quarter of the dimensions, in whole bytes of codes.
pub fn value_rank(params: &Params, value_dim: usize) -> usize {
    if params.value_sketch {
        value_dim.div_ceil(4).next_multiple_of(4).min(value_dim) & !3
    } else {
        0
    }
}

/// Chooses the layout of every head from tokens `0..n_tokens`.
pub fn choose(
    geometry: &Geometry,
    params: &Params,
    team: &Team,
    rows: &dyn OpenRows,
    n_tokens: usize,
    queries: &dyn RecentQueries,
) -> SequenceLayout {
    let mut jobs: Vec<(usize, usize, HeadLayout)> = Vec::new();
    for (il, layer) in geometry.layers.iter().enumerate() {
        jobs.extend((0..layer.n_kv_heads).map(|head| (il, head, HeadLayout::default())));
    }
    team.for_each_mut(&mut jobs, |_, (il, head, layout)| {
        *layout = choose_head(geometry, params, rows, n_tokens, queries, *il, *head);
    });
    let mut heads: Vec<Vec<HeadLayout>> = geometry.layers.iter().map(|_| Vec::new()).collect();
    for (il, _, layout) in jobs {
        heads[il].push(layout);
    }
    SequenceLayout {
        heads: Arc::new(heads),
        dense_layers: Vec::new(),
        without_queries: queries.count() == 0,
    }
}

fn choose_head(
    geometry: &Geometry,
    params: &Params,
    rows: &dyn OpenRows,
    n_tokens: usize,
    queries: &dyn RecentQueries,
    layer: usize,
    head: usize,
) -> HeadLayout {
    let (dk, dv) = (geometry.key_dim, geometry.value_dim);
    let mut keys = vec![0.0; n_tokens * dk];
    let mut values = vec![0.0; n_tokens * dv];
    for (t, (key, value)) in keys.chunks_mut(dk).zip(values.chunks_mut(dv)).enumerate() {
        rows.read(layer, head, t, key, value);
    }
    let centre = mean(&keys, dk);
    let mut variance = vec![0.0f64; dk];
    for block in keys.chunks(params.block_tokens.max(2) * dk) {
        let mean = mean(block, dk);
        for key in block.chunks(dk) {
            for (v, (x, m)) in variance.iter_mut().zip(key.iter().zip(&mean)) {
                *v += (f64::from(*x) - m).powi(2);
            }
        }
    }
    let centre = on_grid(centre, &keys);
    let energy = query_energy(geometry, queries, layer, head);
    let worth: Vec<f64> = variance.iter().zip(&energy).map(|(v, e)| v * e).collect();
    let rank = value_rank(params, dv);
    HeadLayout {
        centre,
        order: rank_pairs(geometry, &worth),
        value_basis: value_basis(&values, dv, params.block_tokens.max(2), rank),
    }
}

/// In f64: f32 would round what is far from zero more coarsely than what is near.
fn mean(rows: &[f32], dim: usize) -> Vec<f64> {
    let mut sum = vec![0.0f64; dim];
    for row in rows.chunks(dim) {
        for (s, &x) in sum.iter_mut().zip(row) {
            *s += f64::from(x);
        }
    }
    let n = (rows.len() / dim).max(1) as f64;
    sum.iter().map(|s| s / n).collect()
}

/// The centre rounded to 1/64 of each dimension's spread, as a power of two. Any vector near the
/// mean serves; one on a grid moves by exactly what a constant on the grid adds to every key, so
/// that the stored rows, and the answers, don't change at all.
fn on_grid(centre: Vec<f64>, keys: &[f32]) -> Vec<f32> {
    let n = (keys.len() / centre.len()) as f64;
    let mut squares = vec![0.0f64; centre.len()];
    for key in keys.chunks(centre.len()) {
        for (s, (x, c)) in squares.iter_mut().zip(key.iter().zip(&centre)) {
            *s += (f64::from(*x) - c).powi(2);
        }
    }
    let rounded = centre.iter().zip(squares).map(|(&mean, squares)| {
        let step = ((squares / n).sqrt() / 64.0).log2().floor().exp2();
        let steps = (mean / step).round();
        // A channel that doesn't move has no spread to round to.
        if steps.is_finite() { (steps * step) as f32 } else { mean as f32 }
    });
    rounded.collect()
}

/// E[q_i^2] over the last queries of the heads that share the KV head; 1 where none was seen.
fn query_energy(
    geometry: &Geometry,
    queries: &dyn RecentQueries,
    layer: usize,
    head: usize,
) -> Vec<f64> {
    let dk = geometry.key_dim;
    if queries.count() == 0 {
        return vec![1.0; dk];
    }
    let group = geometry.layers[layer].group();
    let mut energy = vec![0.0; dk];
    for i in 0..queries.count() {
        for q in queries.query(layer, i)[head * group * dk..][..group * dk].chunks(dk) {
            for (e, &x) in energy.iter_mut().zip(q) {
                *e += f64::from(x).powi(2);
            }
        }
    }
    energy
}

/// Dimensions by the worth of their RoPE pair, E[q_i^2] Var(k_i) + E[q_j^2] Var(k_j), falling.
/// Pairs stay together, so that a rotation of the sketch is a rotation of the query.
fn rank_pairs(geometry: &Geometry, worth: &[f64]) -> Vec<u16> {
    let mut pairs = geometry.rope_pairs();
    let of = |&(i, j): &(usize, usize)| if i == j { worth[i] } else { worth[i] + worth[j] };
    pairs.sort_by(|a, b| of(b).total_cmp(&of(a)));
    let mut order = Vec::with_capacity(geometry.key_dim);
    for (i, j) in pairs {
        order.push(i as u16);
        if j != i {
            order.push(j as u16);
        }
    }
    order
}

/// The `rank` leading eigenvectors of the covariance of the values around their block's mean.
/// Values aren't rotated, so the basis of the first tokens holds at later positions.
fn value_basis(values: &[f32], dim: usize, block_tokens: usize, rank: usize) -> Vec<f16> {
    if rank == 0 {
        return Vec::new();
    }
    let mut covariance = DMatrix::<f32>::zeros(dim, dim);
    for block in values.chunks(block_tokens * dim) {
        let mean = mean(block, dim);
        let n = block.len() / dim;
        // Column t is token t's residual.
        let residual =
            DMatrix::from_fn(dim, n, |i, t| (f64::from(block[t * dim + i]) - mean[i]) as f32);
        covariance.gemm(1.0, &residual, &residual.transpose(), 1.0);
    }
    let eigen = SymmetricEigen::new(covariance);
    let mut by_value: Vec<usize> = (0..dim).collect();
    by_value.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
    let mut basis = vec![f16::ZERO; rank * dim];
    for (&column, out) in by_value.iter().zip(basis.chunks_mut(dim)) {
        let vector: Vec<f32> = eigen.eigenvectors.column(column).iter().copied().collect();
        f32_to_f16(&vector, out);
    }
    basis
}

/// A value basis as f32.
pub fn widen(basis: &[f16], out: &mut Vec<f32>) {
    out.resize(basis.len(), 0.0);
    f16_to_f32(basis, out);
}
