//! Routing summaries: how much a query head wants to see a span's tokens.
//!
//! The paper keeps K_S = W k_S / |W k_S| for every span and query head, W of shape d' x d, and
//! scores it with q' = W q: gate a = sigmoid(q'.K_S / sqrt(d') + log|S|). Since
//!
//! ```text
//! q'.K_S = (W q).(W k_S) / |W k_S| = (W^T W q).k_S / |W k_S|,
//! ```
//!
//! no K_S is kept: one norm a span and query head is, and the transformed query reads the same
//! mean key k_S that the coarse row reads.

use crate::error::{Result, fail};

/// Below this a projected key has no direction; its summary is 0, as in the reference
/// (`normalize` of PyTorch).
const SMALLEST_NORM: f32 = 1e-12;

/// The projections W of one layer, one for each query head.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    weights: &'a [f32],
    n_heads: usize,
    summary_dim: usize,
    key_dim: usize,
}

impl<'a> Projection<'a> {
    /// `weights` is `[n_heads][summary_dim][key_dim]`.
    pub fn new(
        weights: &'a [f32],
        n_heads: usize,
        summary_dim: usize,
        key_dim: usize,
    ) -> Result<Self> {
        let expected = n_heads * summary_dim * key_dim;
        if weights.len() != expected || expected == 0 {
            fail!(
                Shape,
                "the routing projection has {} numbers, expected {n_heads} heads x {summary_dim} x \
                 {key_dim}",
                weights.len()
            );
        }
        Ok(Self { weights, n_heads, summary_dim, key_dim })
    }

    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    pub fn summary_dim(&self) -> usize {
        self.summary_dim
    }

    fn rows(&self, head: usize) -> std::slice::ChunksExact<'a, f32> {
        let size = self.summary_dim * self.key_dim;
        self.weights[head * size..(head + 1) * size].chunks_exact(self.key_dim)
    }

    /// W x of one query head, `[summary_dim]`: q' of a query, or K_S up to its length.
    pub fn project(&self, head: usize, x: &[f32]) -> Vec<f32> {
        self.rows(head).map(|row| dot(row, x)).collect()
    }

    /// |W k_S| of one query head.
    pub fn norm(&self, head: usize, mean_key: &[f32]) -> f32 {
        self.rows(head).map(|row| f64::from(dot(row, mean_key)).powi(2)).sum::<f64>().sqrt() as f32
    }

    /// W^T W q / sqrt(d') of one query head, `[key_dim]`: once a query, whatever the spans.
    pub fn fold_query(&self, head: usize, query: &[f32]) -> Vec<f32> {
        let scale = 1.0 / (self.summary_dim as f32).sqrt();
        let mut folded = vec![0f32; self.key_dim];
        for row in self.rows(head) {
            let projected = dot(row, query) * scale;
            for (f, &w) in folded.iter_mut().zip(row) {
                *f += projected * w;
            }
        }
        folded
    }
}

/// The gate a of a span for one query head, from the product of the folded query with the span's
/// mean key, and the span's routing norm: sigmoid(folded.k_S / |W k_S| + log|S|).
pub fn relevance(product: f32, norm: f32, tokens: usize) -> f32 {
    sigmoid(product / norm.max(SMALLEST_NORM) + (tokens as f32).ln())
}

/// 1 / (1 + e^-x), without an overflow on either side.
pub fn sigmoid(x: f32) -> f32 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

/// Eight sums side by side, so that the compiler may keep them in one register.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let mut sums = [0f32; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (x, y) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[n_heads][summary_dim][key_dim]`, no two rows alike.
    fn weights(n_heads: usize, summary_dim: usize, key_dim: usize) -> Vec<f32> {
        (0..n_heads * summary_dim * key_dim).map(|i| (i as f32 * 1.7).sin()).collect()
    }

    #[test]
    fn folding_gives_the_score_of_the_stored_summary() {
        let (summary_dim, key_dim) = (5, 13);
        let weights = weights(2, summary_dim, key_dim);
        let projection = Projection::new(&weights, 2, summary_dim, key_dim).unwrap();
        let query: Vec<f32> = (0..key_dim).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let key: Vec<f32> = (0..key_dim).map(|i| (i as f32 * 0.3).cos() * 2.0).collect();
        for head in 0..2 {
            let summary = projection.project(head, &key);
            let norm = projection.norm(head, &key);
            let routed = projection.project(head, &query);
            let score = dot(&routed, &summary) / norm / (summary_dim as f32).sqrt();
            let expected = sigmoid(score + 20f32.ln());
            let found = relevance(dot(&projection.fold_query(head, &query), &key), norm, 20);
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn a_key_of_zeros_routes_by_its_length_alone() {
        let weights = weights(1, 2, 4);
        let projection = Projection::new(&weights, 1, 2, 4).unwrap();
        let norm = projection.norm(0, &[0.0; 4]);
        let gate = relevance(dot(&projection.fold_query(0, &[1.0; 4]), &[0.0; 4]), norm, 3);
        assert!((gate - 0.75).abs() < 1e-6);
    }

    #[test]
    fn sigmoid_saturates_without_overflow() {
        assert_eq!(sigmoid(1e4), 1.0);
        assert_eq!(sigmoid(-1e4), 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
    }

    #[test]
    fn refuses_a_projection_of_another_shape() {
        assert!(Projection::new(&[0.0; 7], 1, 2, 4).is_err());
    }
}
