//! The last queries of a prompt, kept until the sketch's layout and the dense layers are settled.

use crate::model::Geometry;
use crate::routing::RecentQueries;

/// Queries kept: enough to rank key dimensions and to tell diffuse layers.
pub const QUERIES: usize = 64;

/// A ring by token index: token t stands in slot t % QUERIES.
#[derive(Clone, Default)]
pub struct QueryRing {
    /// `[layer][slot][n_heads * key_dim]`; empty until the first query.
    layers: Vec<Vec<f32>>,
    /// The slots that hold a whole token's queries, and whose.
    held: Vec<(usize, usize)>,
    key_dim: usize,
}

impl QueryRing {
    /// Keeps one token's queries of one layer, `[n_heads][key_dim]`, before scaling.
    pub fn put(&mut self, geometry: &Geometry, layer: usize, token: usize, query: &[f32]) {
        if self.layers.is_empty() {
            self.key_dim = geometry.key_dim;
            let len = |n_heads: usize| QUERIES * n_heads * geometry.key_dim;
            self.layers = geometry.layers.iter().map(|l| vec![0.0; len(l.n_heads)]).collect();
        }
        self.layers[layer][token % QUERIES * query.len()..][..query.len()].copy_from_slice(query);
    }

    /// Says that every layer of tokens `first..first + n` was put (only the last ones fit), or
    /// that what was put is void.
    pub fn settle(&mut self, first: usize, n: usize, valid: bool) {
        let start = first + n.saturating_sub(QUERIES);
        for token in start..first + n {
            self.held.retain(|&(slot, _)| slot != token % QUERIES);
            if valid {
                self.held.push((token % QUERIES, token));
            }
        }
    }

    /// Whether any token from `n_tokens` on is held.
    pub fn reach_beyond(&self, n_tokens: usize) -> bool {
        self.held.iter().any(|&(_, token)| token >= n_tokens)
    }

    /// Forgets tokens from `n_tokens` on.
    pub fn truncate(&mut self, n_tokens: usize) {
        self.held.retain(|&(_, token)| token < n_tokens);
    }

    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.len() as u64 * 4).sum()
    }
}

impl RecentQueries for QueryRing {
    fn count(&self) -> usize {
        if self.layers.is_empty() { 0 } else { self.held.len() }
    }

    fn token(&self, i: usize) -> usize {
        self.held[i].1
    }

    fn query(&self, layer: usize, i: usize) -> &[f32] {
        let len = self.layers[layer].len() / QUERIES;
        &self.layers[layer][self.held[i].0 * len..][..len]
    }
}
