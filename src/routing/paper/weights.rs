//! The routing projections and thresholds in force: a sidecar's, or untrained ones.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Result;
use crate::model::{DEFAULT_SUMMARY_DIM, GateMlp, Geometry, LayerRouting, Model, RoutingWeights};
use crate::store::checksum;
use crate::summary::Projection;

/// Weights of one model, shared with whoever else uses them.
#[derive(Clone)]
pub enum Weights {
    Trained(Arc<Model>),
    Untrained(Arc<Untrained>),
}

/// Drawn from a seed, for a model that nobody trained.
pub struct Untrained {
    geometry: Geometry,
    seed: u64,
    weights: RoutingWeights,
}

/// Untrained weights that are in use, so that all sequences and contexts of a model share one copy:
/// at 32 layers of 32 heads they are 16 MB.
static IN_USE: Mutex<Vec<Weak<Untrained>>> = Mutex::new(Vec::new());

impl Weights {
    pub fn new(model: &Arc<Model>, seed: u64) -> Result<Self> {
        if model.sidecar.as_ref().is_some_and(|sidecar| sidecar.routing.is_some()) {
            return Ok(Self::Trained(Arc::clone(model)));
        }
        // A list of weak references is right whatever a thread that panicked did to it.
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|entry| entry.strong_count() > 0);
        let geometry = &model.geometry;
        let found = in_use.iter().filter_map(Weak::upgrade);
        for entry in found {
            if entry.seed == seed && entry.geometry == *geometry {
                return Ok(Self::Untrained(entry));
            }
        }
        let weights = RoutingWeights::untrained(geometry, DEFAULT_SUMMARY_DIM, seed)?;
        let entry = Arc::new(Untrained { geometry: geometry.clone(), seed, weights });
        in_use.push(Arc::downgrade(&entry));
        Ok(Self::Untrained(entry))
    }

    fn all(&self) -> Option<&RoutingWeights> {
        match self {
            Self::Trained(model) => model.sidecar.as_ref()?.routing.as_ref(),
            Self::Untrained(untrained) => Some(&untrained.weights),
        }
    }

    /// Tells whether summaries that were made with some weights serve with these.
    pub fn checksum(&self) -> Result<u32> {
        let Some(weights) = self.all() else {
            crate::error::fail!(Internal, "the routing weights of the sidecar vanished");
        };
        let mut bytes = Vec::new();
        let mut checksums = Vec::new();
        for layer in &weights.layers {
            bytes.clear();
            bytes.extend(layer.projection.iter().flat_map(|x| x.to_le_bytes()));
            checksums.extend_from_slice(&checksum(&bytes).to_le_bytes());
        }
        Ok(checksum(&checksums))
    }

    /// One layer's projection and thresholds, `[n_heads]`.
    pub fn layer(&self, geometry: &Geometry, layer: usize) -> Result<(Projection<'_>, &[f32])> {
        let Some(weights) = self.all() else {
            crate::error::fail!(Internal, "the routing weights of the sidecar vanished");
        };
        let LayerRouting { projection, threshold } = &weights.layers[layer];
        let n_heads = geometry.layers[layer].n_heads;
        let projection =
            Projection::new(projection, n_heads, weights.summary_dim, geometry.key_dim)?;
        Ok((projection, threshold))
    }
}

/// The rank gates of a model, if it has any.
pub fn gate_mlp(model: &Model) -> Option<&GateMlp> {
    model.sidecar.as_ref()?.gate.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelParams;

    fn model(n_head: usize) -> Arc<Model> {
        let params = ModelParams {
            n_layer: 1,
            n_head,
            n_head_kv: 1,
            head_dim_k: 8,
            head_dim_v: 8,
            ..ModelParams::default()
        };
        Arc::new(Model::from_params(&params).unwrap())
    }

    #[test]
    fn untrained_weights_are_drawn_once_a_model_and_seed() {
        let same = |a: &Weights, b: &Weights| match (a, b) {
            (Weights::Untrained(a), Weights::Untrained(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let weights = Weights::new(&model(2), 77).unwrap();
        assert!(same(&weights, &Weights::new(&model(2), 77).unwrap()));
        assert!(!same(&weights, &Weights::new(&model(2), 78).unwrap()));
        assert!(!same(&weights, &Weights::new(&model(3), 77).unwrap()));
        let geometry = &model(2).geometry;
        assert_eq!(weights.layer(geometry, 0).unwrap().1.len(), 2);
    }
}
