//! A model as this library sees it: the shape of its attention, and what was trained for it.

mod architecture;
mod fingerprint;
mod geometry;
mod gguf;
mod gguf_writer;
mod mapped_file;
mod metadata;
mod params;
mod preflight;
mod rope;
mod rotation;
mod routing_weights;
mod sidecar;
mod sidecar_reader;
mod tensor_type;
mod tensor_values;

#[cfg(test)]
mod testing;

use std::path::Path;

pub use geometry::{Geometry, LayerGeometry, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, RopeKind};
#[doc(hidden)]
pub use gguf_writer::GgufWriter;
pub use params::ModelParams;
pub use rotation::Rotation;
pub use routing_weights::{
    DEFAULT_SUMMARY_DIM, GateMlp, LayerRouting, Linear, RoutingWeights, UNTRAINED_THRESHOLD,
};
pub use sidecar::Sidecar;

use crate::error::Result;

/// A model. Nothing in it changes once it is made, so that threads and contexts may share it.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub geometry: Geometry,
    /// What saved states and sidecars are matched by.
    pub fingerprint: [u8; 32],
    /// The architecture's name in its GGUF file; "params" for one that its host described.
    pub architecture: String,
    pub sidecar: Option<Sidecar>,
}

impl Model {
    /// Reads a model from its GGUF file: the header, and small samples of the weights.
    pub fn from_gguf(path: &Path, sidecar: Option<&Path>) -> Result<Self> {
        let file = gguf::ModelFile::read(path)?;
        Self::new(file.architecture, file.geometry, file.fingerprint, sidecar)
    }

    /// Takes a model as its host describes it.
    pub fn from_params(params: &ModelParams) -> Result<Self> {
        let geometry = params.geometry()?;
        let sidecar = params.sidecar_path.as_deref();
        Self::new("params".to_owned(), geometry, params.fingerprint, sidecar)
    }

    /// The geometry as a saved state has it: by value, for models whose host gave no fingerprint.
    pub(crate) fn geometry_bytes(&self) -> Vec<u8> {
        fingerprint::geometry_bytes(&self.geometry)
    }

    fn new(
        architecture: String,
        geometry: Geometry,
        fingerprint: [u8; 32],
        sidecar: Option<&Path>,
    ) -> Result<Self> {
        let sidecar = match sidecar {
            Some(path) => Some(Sidecar::read(path, &geometry, &fingerprint)?),
            None => None,
        };
        Ok(Self { geometry, fingerprint, architecture, sidecar })
    }
}
