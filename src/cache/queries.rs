//! The last queries of a prompt, kept until the sketch's layout and the dense layers are settled.

use crate::error::{Result, fail};
use crate::model::Geometry;
use crate::routing::RecentQueries;
use crate::store::{Image, ImageReader};

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

    pub fn save(&self, image: &mut Image) {
        image.flag(!self.layers.is_empty());
        if self.layers.is_empty() {
            return;
        }
        image.count(self.held.len());
        for &(_, token) in &self.held {
            image.count(token);
        }
        let numbers = self.layers.iter().flatten();
        image.blob(numbers.flat_map(|x| x.to_le_bytes()).collect());
    }

    /// The queries that an image holds, of a sequence of `n_tokens`.
    pub fn restore(geometry: &Geometry, n_tokens: usize, image: &mut ImageReader) -> Result<Self> {
        let mut ring = Self::default();
        if !image.flag()? {
            return Ok(ring);
        }
        for _ in 0..image.count("queries", 0, QUERIES)? {
            let token = image.count("tokens before a query", 0, n_tokens - 1)?;
            if ring.held.iter().any(|&(slot, _)| slot == token % QUERIES) {
                fail!(Format, "the state has two queries in the place of token {token}'s");
            }
            ring.held.push((token % QUERIES, token));
        }
        ring.key_dim = geometry.key_dim;
        let lens: Vec<usize> =
            geometry.layers.iter().map(|l| QUERIES * l.n_heads * geometry.key_dim).collect();
        let bytes = image.blob("queries", 4 * lens.iter().sum::<usize>())?;
        let mut numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        ring.layers = lens.into_iter().map(|len| numbers.by_ref().take(len).collect()).collect();
        if ring.layers.iter().flatten().any(|x| !x.is_finite()) {
            fail!(Format, "the state has a query that is not finite");
        }
        Ok(ring)
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
