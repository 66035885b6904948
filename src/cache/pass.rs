//! A forward pass between begin and commit.

use crate::model::Geometry;

/// One layer's rows of a pass, of one sequence.
#[derive(Default)]
struct LayerRows {
    /// `[KV head][row][key_dim]`, and values alike.
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// The rows that a pass has brought for one sequence, as f32, keys centred where the sequence has
/// a centre.
#[derive(Default)]
pub struct Staged {
    n_rows: usize,
    key_dim: usize,
    value_dim: usize,
    layers: Vec<LayerRows>,
}

impl Staged {
    /// Empties the buffers for `n_rows` rows a layer, keeping their memory.
    pub fn reset(&mut self, geometry: &Geometry, n_rows: usize) {
        self.n_rows = n_rows;
        (self.key_dim, self.value_dim) = (geometry.key_dim, geometry.value_dim);
        self.layers.resize_with(geometry.layers.len(), LayerRows::default);
        for layer in &mut self.layers {
            layer.keys.clear();
            layer.values.clear();
        }
    }

    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Room for a layer's rows: keys and values, `[KV head][row][dim]`.
    pub fn layer_mut(&mut self, layer: usize, n_kv_heads: usize) -> (&mut [f32], &mut [f32]) {
        let rows = n_kv_heads * self.n_rows;
        let LayerRows { keys, values } = &mut self.layers[layer];
        keys.resize(rows * self.key_dim, 0.0);
        values.resize(rows * self.value_dim, 0.0);
        (keys, values)
    }

    pub fn key(&self, layer: usize, head: usize, row: usize) -> &[f32] {
        &self.layers[layer].keys[(head * self.n_rows + row) * self.key_dim..][..self.key_dim]
    }

    pub fn value(&self, layer: usize, head: usize, row: usize) -> &[f32] {
        &self.layers[layer].values[(head * self.n_rows + row) * self.value_dim..][..self.value_dim]
    }

    pub fn bytes(&self) -> u64 {
        let layer = |l: &LayerRows| (l.keys.capacity() + l.values.capacity()) as u64 * 4;
        self.layers.iter().map(layer).sum()
    }
}

/// One sequence's part of a pass.
#[derive(Default)]
pub struct PassSequence {
    pub sequence: usize,
    /// Index in the batch of each of the sequence's tokens.
    pub tokens: Vec<usize>,
    /// Those whose attention is over this sequence: the tokens that name it first. Indices into
    /// `tokens`.
    pub attending: Vec<usize>,
    pub staged: Staged,
}

/// What a layer has seen in the running pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerStep {
    #[default]
    Waiting,
    Ingested,
    Attended,
}

#[derive(Default)]
pub struct Pass {
    pub n_tokens: usize,
    pub positions: Vec<i32>,
    pub parts: Vec<PassSequence>,
    pub steps: Vec<LayerStep>,
}
