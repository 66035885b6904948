//! A model described by its host, where there is no GGUF file.

use std::path::PathBuf;

use super::geometry::{Geometry, LayerGeometry, MAX_LAYERS, RopeKind};
use super::rope::{RopeScaling, frequencies};
use crate::error::{Error, Result, Status, fail};

/// What a host says of its model. A 0 asks for what its line says.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelParams {
    pub n_layer: usize,
    pub n_head: usize,
    /// 0: `n_head`.
    pub n_head_kv: usize,
    pub head_dim_k: usize,
    /// 0: `head_dim_k`.
    pub head_dim_v: usize,
    pub rope: RopeKind,
    /// 0: `head_dim_k`.
    pub n_rot: usize,
    /// 0: unknown.
    pub n_ctx_train: usize,
    /// 0: 10,000.
    pub rope_freq_base: f32,
    /// What every frequency is multiplied by, 1 / factor of linear scaling. 0: 1.
    pub rope_freq_scale: f32,
    /// 0: 1 / sqrt(head_dim_k).
    pub attention_scale: f32,
    /// One for each layer instead of `n_head`.
    pub n_head_per_layer: Option<Vec<usize>>,
    /// One for each layer instead of `n_head_kv`.
    pub n_head_kv_per_layer: Option<Vec<usize>>,
    /// Each divides the frequency of its pair; `n_rot / 2` of them.
    pub rope_freq_factors: Option<Vec<f32>>,
    pub sidecar_path: Option<PathBuf>,
    /// The host's own identity of geometry and weights. All zeros: none; saved states are then
    /// told apart by the geometry alone.
    pub fingerprint: [u8; 32],
}

impl Default for ModelParams {
    fn default() -> Self {
        Self {
            n_layer: 0,
            n_head: 0,
            n_head_kv: 0,
            head_dim_k: 0,
            head_dim_v: 0,
            rope: RopeKind::None,
            n_rot: 0,
            n_ctx_train: 0,
            rope_freq_base: 0.0,
            rope_freq_scale: 0.0,
            attention_scale: 0.0,
            n_head_per_layer: None,
            n_head_kv_per_layer: None,
            rope_freq_factors: None,
            sidecar_path: None,
            fingerprint: [0; 32],
        }
    }
}

impl ModelParams {
    /// The geometry that they describe, checked.
    pub fn geometry(&self) -> Result<Geometry> {
        if self.n_layer == 0 || self.n_layer > MAX_LAYERS {
            fail!(Argument, "n_layer is {}, expected 1 to {MAX_LAYERS}", self.n_layer);
        }
        let n_head_kv = if self.n_head_kv == 0 { self.n_head } else { self.n_head_kv };
        let heads = self.per_layer("n_head_per_layer", &self.n_head_per_layer, self.n_head)?;
        let kv_heads =
            self.per_layer("n_head_kv_per_layer", &self.n_head_kv_per_layer, n_head_kv)?;
        let layers = heads.into_iter().zip(kv_heads);
        let layers = layers.map(|(n_heads, n_kv_heads)| LayerGeometry { n_heads, n_kv_heads });

        let or = |value: f32, default: f32| if value == 0.0 { default } else { value };
        let key_dim = self.head_dim_k;
        let n_rot = match self.rope {
            RopeKind::None => 0,
            RopeKind::Norm | RopeKind::Neox if self.n_rot == 0 => key_dim,
            RopeKind::Norm | RopeKind::Neox => self.n_rot,
        };
        let mut geometry = Geometry {
            layers: layers.collect(),
            key_dim,
            value_dim: if self.head_dim_v == 0 { key_dim } else { self.head_dim_v },
            rope: self.rope,
            n_rot,
            rope_frequencies: Vec::new(),
            attention_scale: or(self.attention_scale, 1.0 / (key_dim as f32).sqrt()),
            n_ctx_train: self.n_ctx_train,
        };
        // Before the frequencies, whose number depends on what is checked here.
        geometry.validate()?;
        if self.rope == RopeKind::None {
            if self.rope_freq_factors.is_some() {
                fail!(Argument, "there are RoPE factors and the RoPE kind is none");
            }
        } else {
            let scale = f64::from(or(self.rope_freq_scale, 1.0));
            let base = f64::from(or(self.rope_freq_base, 10_000.0));
            let factors = self.rope_freq_factors.as_deref();
            geometry.rope_frequencies =
                frequencies(n_rot, base, RopeScaling::Uniform { scale }, factors)
                    // What a file breaks as a format, a caller breaks as an argument.
                    .map_err(|e| Error::new(Status::Argument, e.message))?;
        }
        Ok(geometry)
    }

    fn per_layer(&self, name: &str, each: &Option<Vec<usize>>, all: usize) -> Result<Vec<usize>> {
        match each {
            None => Ok(vec![all; self.n_layer]),
            Some(each) if each.len() == self.n_layer => Ok(each.clone()),
            Some(each) => {
                fail!(Argument, "{name} has {} values, expected {}", each.len(), self.n_layer)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> ModelParams {
        ModelParams { n_layer: 2, n_head: 4, n_head_kv: 2, head_dim_k: 8, ..Default::default() }
    }

    #[test]
    fn zeros_ask_for_defaults() {
        let geometry = ModelParams { rope: RopeKind::Neox, ..params() }.geometry().unwrap();
        assert_eq!((geometry.value_dim, geometry.n_rot), (8, 8));
        assert_eq!(geometry.attention_scale, 1.0 / 8f32.sqrt());
        assert_eq!(geometry.rope_frequencies, [1.0, 0.1, 0.01, 0.001]);
        let all_heads = ModelParams { n_head_kv: 0, ..params() }.geometry().unwrap();
        assert_eq!(all_heads.layers[0].n_kv_heads, 4);
    }

    #[test]
    fn heads_may_differ_by_layer() {
        let params = ModelParams {
            n_head_per_layer: Some(vec![4, 6]),
            n_head_kv_per_layer: Some(vec![1, 3]),
            ..params()
        };
        let geometry = params.geometry().unwrap();
        assert_eq!(geometry.layers[1], LayerGeometry { n_heads: 6, n_kv_heads: 3 });
    }

    #[test]
    fn wrong_arguments_are_named() {
        let norm = ModelParams { rope: RopeKind::Norm, ..params() };
        for (params, name) in [
            (ModelParams { n_layer: 0, ..params() }, "n_layer"),
            (ModelParams { n_head: 0, ..params() }, "heads"),
            (ModelParams { n_head_kv: 3, ..params() }, "KV heads"),
            (ModelParams { head_dim_k: 0, ..params() }, "head_dim_k"),
            (ModelParams { attention_scale: -1.0, ..params() }, "attention_scale"),
            (ModelParams { n_head_per_layer: Some(vec![4]), ..params() }, "n_head_per_layer"),
            (ModelParams { rope_freq_factors: Some(vec![1.0; 4]), ..params() }, "RoPE factors"),
            (ModelParams { n_rot: 10, ..norm.clone() }, "n_rot"),
            (ModelParams { n_rot: 3, ..norm.clone() }, "n_rot"),
            (ModelParams { rope_freq_base: f32::NAN, ..norm.clone() }, "base"),
            (ModelParams { rope_freq_scale: -1.0, ..norm.clone() }, "scale"),
            (ModelParams { rope_freq_factors: Some(vec![1.0]), ..norm }, "RoPE factors"),
        ] {
            let error = params.geometry().unwrap_err();
            assert_eq!(error.status, Status::Argument, "{error}");
            assert!(error.message.contains(name), "{error}, expected {name}");
        }
    }
}
