//! The shape of a model's attention, the one thing that every other module knows of it.

use crate::error::{Result, fail};

/// Which dimensions RoPE rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeKind {
    /// No rotation.
    None,
    /// Neighbours: (2i, 2i + 1).
    Norm,
    /// Halves: (i, i + n_rot / 2).
    Neox,
}

/// One layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGeometry {
    /// Query heads, H.
    pub n_heads: usize,
    /// KV heads, H_kv. Query head h reads KV head h / (H / H_kv).
    pub n_kv_heads: usize,
}

impl LayerGeometry {
    /// Query heads that share a KV head, G.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }
}

/// The shape of a model's attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    pub layers: Vec<LayerGeometry>,
    /// Dimensions of a key and a query, d_k.
    pub key_dim: usize,
    /// Dimensions of a value, d_v.
    pub value_dim: usize,
    pub rope: RopeKind,
    /// The first `n_rot` dimensions are rotated; the others are left alone.
    pub n_rot: usize,
    /// Radians per position of each rotated pair, `n_rot / 2` of them, scaling and factors
    /// included.
    pub rope_frequencies: Vec<f32>,
    /// What a score is multiplied by, 1 / sqrt(d_k) in most models.
    pub attention_scale: f32,
    /// Tokens the model was trained with; 0 where the host did not say.
    pub n_ctx_train: usize,
}

/// Limits that keep every product of sizes inside a `usize` and every allocation sane.
pub const MAX_LAYERS: usize = 1024;
pub const MAX_HEADS: usize = 1024;
pub const MAX_HEAD_DIM: usize = 1024;

impl Geometry {
    /// Checks what the rest of the library takes for granted.
    pub fn validate(&self) -> Result<()> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            fail!(Argument, "n_layer is {}, expected 1 to {MAX_LAYERS}", self.layers.len());
        }
        for (il, layer) in self.layers.iter().enumerate() {
            let (h, kv) = (layer.n_heads, layer.n_kv_heads);
            if h == 0 || h > MAX_HEADS || kv == 0 || kv > h || h % kv != 0 {
                fail!(
                    Argument,
                    "layer {il} has {h} heads and {kv} KV heads, expected 1 to {MAX_HEADS} heads, \
                     a multiple of its KV heads"
                );
            }
        }
        for (name, dim) in [("head_dim_k", self.key_dim), ("head_dim_v", self.value_dim)] {
            if dim == 0 || dim > MAX_HEAD_DIM {
                fail!(Argument, "{name} is {dim}, expected 1 to {MAX_HEAD_DIM}");
            }
        }
        if self.n_rot > self.key_dim || !self.n_rot.is_multiple_of(2) {
            fail!(
                Argument,
                "n_rot is {}, expected an even number up to head_dim_k = {}",
                self.n_rot,
                self.key_dim
            );
        }
        if !self.attention_scale.is_finite() || self.attention_scale <= 0.0 {
            fail!(
                Argument,
                "attention_scale is {}, expected a positive number",
                self.attention_scale
            );
        }
        Ok(())
    }

    /// The key dimensions in pairs that are closed under RoPE; dimensions that RoPE leaves alone
    /// form neighbour pairs, and an odd one left over stands alone, as (i, i).
    pub fn rope_pairs(&self) -> Vec<(usize, usize)> {
        let n_rot = if self.rope == RopeKind::None { 0 } else { self.n_rot };
        let half = n_rot / 2;
        let mut pairs: Vec<_> = (0..half)
            .map(|i| match self.rope {
                RopeKind::Neox => (i, i + half),
                RopeKind::Norm | RopeKind::None => (2 * i, 2 * i + 1),
            })
            .collect();
        let mut i = n_rot;
        while i < self.key_dim {
            pairs.push((i, (i + 1).min(self.key_dim - 1)));
            i += 2;
        }
        pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(rope: RopeKind, key_dim: usize, n_rot: usize) -> Geometry {
        Geometry {
            layers: vec![LayerGeometry { n_heads: 4, n_kv_heads: 2 }],
            key_dim,
            value_dim: key_dim,
            rope,
            n_rot,
            rope_frequencies: vec![1.0; n_rot / 2],
            attention_scale: 1.0,
            n_ctx_train: 0,
        }
    }

    #[test]
    fn pairs_cover_every_dimension_once() {
        for (rope, d, n_rot) in [
            (RopeKind::Neox, 64, 64),
            (RopeKind::Norm, 64, 64),
            (RopeKind::Neox, 80, 32),
            (RopeKind::None, 7, 0),
        ] {
            let mut seen = vec![0; d];
            for (i, j) in geometry(rope, d, n_rot).rope_pairs() {
                seen[i] += 1;
                if j != i {
                    seen[j] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{rope:?} {d} {n_rot}: {seen:?}");
        }
    }

    #[test]
    fn refuses_heads_that_do_not_divide() {
        let mut g = geometry(RopeKind::Neox, 64, 64);
        g.layers[0] = LayerGeometry { n_heads: 5, n_kv_heads: 2 };
        assert!(g.validate().unwrap_err().message.contains("layer 0"));
    }
}
