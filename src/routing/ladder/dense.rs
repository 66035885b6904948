//! Which layers are diffuse: their attention spreads over so many tokens of small share that no
//! choice of few tokens stands for it, and they keep all rows resident instead.

use crate::kernels::{RowCodec, exp_minus, max, row_scores};
use crate::model::Geometry;
use crate::pool::Team;
use crate::routing::RecentQueries;

/// A share of at most this many even shares (n / N) is small.
const SMALL_SHARE: f32 = 4.0;

/// Layers that may be dense: one in 16.
pub fn most(n_layers: usize) -> usize {
    (n_layers / 16).max(1)
}

/// Reads a KV head's keys of tokens `0..n` (`[n][key_dim]`, centred).
pub type ReadKeys<'a> = dyn Fn(usize, usize, &mut [f32]) + Sync + 'a;

/// The layers whose attention mass on tokens of small share exceeds `threshold`, most diffuse
/// first, at most [`most`] of them. The mass is a mean over query heads and the last queries.
pub fn diffuse_layers(
    geometry: &Geometry,
    threshold: f32,
    team: &Team,
    n_tokens: usize,
    queries: &dyn RecentQueries,
    read_keys: &ReadKeys,
) -> Vec<usize> {
    if queries.count() == 0 {
        return Vec::new();
    }
    let mut jobs: Vec<(usize, usize, f64)> = Vec::new();
    for (il, layer) in geometry.layers.iter().enumerate() {
        jobs.extend((0..layer.n_kv_heads).map(|head| (il, head, 0.0)));
    }
    team.for_each_mut(&mut jobs, |_, (il, head, mass)| {
        let mut keys = vec![0.0; n_tokens * geometry.key_dim];
        read_keys(*il, *head, &mut keys);
        *mass = small_share_mass(geometry, *il, *head, &keys, queries);
    });
    let mut mass = vec![0.0; geometry.layers.len()];
    for (il, _, sum) in jobs {
        mass[il] += sum / (queries.count() * geometry.layers[il].n_heads) as f64;
    }
    let mut layers: Vec<usize> =
        (0..mass.len()).filter(|&il| mass[il] > f64::from(threshold)).collect();
    layers.sort_by(|&a, &b| mass[b].total_cmp(&mass[a]));
    layers.truncate(most(geometry.layers.len()));
    layers
}

/// Summed over the head group's queries.
fn small_share_mass(
    geometry: &Geometry,
    layer: usize,
    head: usize,
    keys: &[f32],
    queries: &dyn RecentQueries,
) -> f64 {
    let (dim, group) = (geometry.key_dim, geometry.layers[layer].group());
    let row_bytes = RowCodec::F32.row_bytes(dim);
    let mut encoded = vec![0; keys.len() / dim * row_bytes];
    for (key, row) in keys.chunks(dim).zip(encoded.chunks_mut(row_bytes)) {
        RowCodec::F32.encode(key, row);
    }
    let rows: Vec<&[u8]> = encoded.chunks(row_bytes).collect();
    let mut scores = vec![0.0; group * rows.len()];
    let mut mass = 0.0;
    for i in 0..queries.count() {
        let n = (queries.token(i) + 1).min(rows.len());
        let q: Vec<f32> = queries.query(layer, i)[head * group * dim..][..group * dim]
            .iter()
            .map(|x| x * geometry.attention_scale)
            .collect();
        row_scores(RowCodec::F32, dim, &q, group, &rows[..n], &mut scores, n);
        for scores in scores.chunks_mut(n).take(group) {
            let sum = exp_minus(scores, max(scores));
            let small = SMALL_SHARE / n as f32 * sum;
            mass += f64::from(scores.iter().filter(|&&e| e <= small).sum::<f32>() / sum);
        }
    }
    mass
}
