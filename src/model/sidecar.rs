//! The sidecar: a small GGUF file with what was trained for a model and this library, and nothing
//! of the model itself. docs/sidecar.md describes the format.

use std::path::Path;

use super::geometry::{Geometry, LayerGeometry};
use super::gguf_writer::GgufWriter;
use super::mapped_file::{MappedFile, in_file};
use super::routing_weights::{GateMlp, RoutingWeights};
use super::sidecar_reader::{self, Target};
use crate::error::{Error, Result, Status, fail};

/// `general.architecture` of a sidecar.
pub(crate) const ARCHITECTURE: &str = "sekv-sidecar";
pub(super) const VERSION: usize = 1;

pub(super) const KEY_VERSION: &str = "sekv.sidecar.version";
pub(super) const KEY_LAYERS: &str = "sekv.model.block_count";
pub(super) const KEY_HEADS: &str = "sekv.model.head_count";
pub(super) const KEY_KV_HEADS: &str = "sekv.model.head_count_kv";
pub(super) const KEY_KEY_DIM: &str = "sekv.model.key_length";
pub(super) const KEY_VALUE_DIM: &str = "sekv.model.value_length";
pub(super) const KEY_FINGERPRINT: &str = "sekv.model.fingerprint";
pub(super) const KEY_SUMMARY_DIM: &str = "sekv.route.summary_length";
pub(super) const KEY_GATE_RANK: &str = "sekv.gate.rank";
pub(super) const KEY_DENSE_LAYERS: &str = "sekv.ladder.dense_layers";

pub(super) const KEYS: [&str; 10] = [
    KEY_VERSION,
    KEY_LAYERS,
    KEY_HEADS,
    KEY_KV_HEADS,
    KEY_KEY_DIM,
    KEY_VALUE_DIM,
    KEY_FINGERPRINT,
    KEY_SUMMARY_DIM,
    KEY_GATE_RANK,
    KEY_DENSE_LAYERS,
];

/// What a sidecar holds; each part may be absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sidecar {
    /// Projections and thresholds of routing `paper`.
    pub routing: Option<RoutingWeights>,
    /// The rank gates of routing `paper`; absent, every gate is 1.
    pub gate: Option<GateMlp>,
    /// The layers that routing `ladder` keeps whole, instead of its rule; rising, maybe none.
    pub dense_layers: Option<Vec<usize>>,
}

pub(super) fn projection_name(layer: usize) -> String {
    format!("blk.{layer}.sekv.route.weight")
}

pub(super) fn threshold_name(layer: usize) -> String {
    format!("blk.{layer}.sekv.route.threshold")
}

pub(super) fn gate_name(layer: usize, part: &str) -> String {
    format!("sekv.gate.{layer}.{part}")
}

impl Sidecar {
    /// Reads the sidecar of a model and checks that it is for that model.
    pub fn read(path: &Path, geometry: &Geometry, fingerprint: &[u8; 32]) -> Result<Self> {
        let read = || {
            let file = MappedFile::open(path)?;
            sidecar_reader::parse(file.bytes(), &Target { geometry, fingerprint })
        };
        read().map_err(|e| in_file(path, e))
    }

    /// Checks that these are parameters for that model.
    pub fn validate(&self, geometry: &Geometry) -> Result<()> {
        if let Some(routing) = &self.routing {
            routing.validate(geometry)?;
        }
        if let Some(gate) = &self.gate {
            gate.validate(geometry.key_dim)?;
        }
        if let Some(dense_layers) = &self.dense_layers {
            let rising = dense_layers.windows(2).all(|pair| pair[0] < pair[1]);
            let n_layer = geometry.layers.len();
            if !rising || dense_layers.last().is_some_and(|&layer| layer >= n_layer) {
                fail!(
                    Argument,
                    "the dense layers are {dense_layers:?}, expected rising numbers below \
                     {n_layer}"
                );
            }
        }
        Ok(())
    }

    /// Writes the file whole or not at all: under another name first, then renamed. With a
    /// fingerprint it serves that one model only, without one every model of the same shape.
    pub fn write(
        &self,
        path: &Path,
        geometry: &Geometry,
        fingerprint: Option<&[u8; 32]>,
    ) -> Result<()> {
        self.validate(geometry)?;
        let bytes = self.encode(geometry, fingerprint);
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(format!(".{}.unfinished", std::process::id()));
        let written =
            std::fs::write(&unfinished, bytes).and_then(|()| std::fs::rename(&unfinished, path));
        written.map_err(|e| {
            // What is left of the attempt; there may be nothing.
            let _ = std::fs::remove_file(&unfinished);
            in_file(path, Error::new(Status::Io, format!("cannot write the file: {e}")))
        })
    }

    fn encode(&self, geometry: &Geometry, fingerprint: Option<&[u8; 32]>) -> Vec<u8> {
        // Everything here has been checked against limits far below u32.
        let per_layer = |count: fn(&LayerGeometry) -> usize| -> Vec<u32> {
            geometry.layers.iter().map(|layer| count(layer) as u32).collect()
        };
        let mut writer = GgufWriter::new();
        writer
            .text("general.architecture", ARCHITECTURE)
            .u32(KEY_VERSION, VERSION as u32)
            .u32(KEY_LAYERS, geometry.layers.len() as u32)
            .u32_array(KEY_HEADS, &per_layer(|layer| layer.n_heads))
            .u32_array(KEY_KV_HEADS, &per_layer(|layer| layer.n_kv_heads))
            .u32(KEY_KEY_DIM, geometry.key_dim as u32)
            .u32(KEY_VALUE_DIM, geometry.value_dim as u32);
        if let Some(fingerprint) = fingerprint {
            writer.text(KEY_FINGERPRINT, &hexadecimal(fingerprint));
        }
        if let Some(dense_layers) = &self.dense_layers {
            let layers: Vec<u32> = dense_layers.iter().map(|&layer| layer as u32).collect();
            writer.u32_array(KEY_DENSE_LAYERS, &layers);
        }
        if let Some(routing) = &self.routing {
            writer.u32(KEY_SUMMARY_DIM, routing.summary_dim as u32);
            let (key_dim, summary_dim) = (geometry.key_dim as u64, routing.summary_dim as u64);
            for (index, layer) in routing.layers.iter().enumerate() {
                let heads = layer.threshold.len() as u64;
                let shape = [key_dim, summary_dim, heads];
                writer.f32_tensor(&projection_name(index), &shape, &layer.projection);
                writer.f32_tensor(&threshold_name(index), &[heads], &layer.threshold);
            }
        }
        if let Some(gate) = &self.gate {
            writer.u32(KEY_GATE_RANK, gate.r_max as u32);
            for (index, layer) in gate.layers.iter().enumerate() {
                let shape = [layer.cols as u64, layer.rows as u64];
                writer.f32_tensor(&gate_name(index, "weight"), &shape, &layer.weight);
                writer.f32_tensor(&gate_name(index, "bias"), &shape[1..], &layer.bias);
            }
        }
        writer.finish()
    }
}

/// Bytes as the fingerprint's key has them: two lower-case digits each.
pub(super) fn hexadecimal(bytes: &[u8; 32]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
