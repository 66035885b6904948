//! Reads a sidecar: every key and tensor in it must be known, used and of the right shape.

use std::collections::BTreeSet;

use super::geometry::Geometry;
use super::metadata::{Counts, Metadata};
use super::preflight::{Header, TensorInfo, quoted};
use super::routing_weights::{GateMlp, LayerRouting, Linear, RoutingWeights};
use super::sidecar::{self, Sidecar};
use super::tensor_values::read_floats;
use crate::error::{Error, Result, Status, fail};

/// Far above the paper's 64 and 32, and small enough that no product of two overflows.
const MAX_GATE_DIM: u64 = 1 << 16;

/// The model that a sidecar must be for.
pub(super) struct Target<'a> {
    pub geometry: &'a Geometry,
    pub fingerprint: &'a [u8; 32],
}

pub(super) fn parse(file: &[u8], target: &Target) -> Result<Sidecar> {
    let header = Header::scan(file)?;
    let metadata = Metadata::decode(&header)?;
    check_identity(&metadata)?;
    check_target(&metadata, target)?;
    let mut tensors = Tensors { header: &header, taken: BTreeSet::new() };
    let sidecar = Sidecar {
        routing: read_routing(&metadata, &mut tensors, target.geometry)?,
        gate: read_gate(&metadata, &mut tensors, target.geometry)?,
        dense_layers: read_dense_layers(&metadata)?,
    };
    tensors.check_all_taken()?;
    // The rules are those for parameters; here a file breaks them.
    sidecar.validate(target.geometry).map_err(|e| Error::new(Status::Format, e.message))?;
    Ok(sidecar)
}

fn check_identity(metadata: &Metadata) -> Result<()> {
    let architecture = metadata.text("general.architecture")?.unwrap_or_default();
    if architecture != sidecar::ARCHITECTURE {
        fail!(
            Format,
            "general.architecture is {}, expected \"{}\"",
            quoted(architecture),
            sidecar::ARCHITECTURE
        );
    }
    let version = metadata.required_count(sidecar::KEY_VERSION)?;
    if version != sidecar::VERSION {
        fail!(Unsupported, "the sidecar's version is {version}, expected {}", sidecar::VERSION);
    }
    // A key of a later version, or a misspelt one, would otherwise be ignored in silence.
    match metadata.keys_under("sekv.").find(|key| !sidecar::KEYS.contains(key)) {
        Some(key) => fail!(Format, "the key {} is not known in version {version}", quoted(key)),
        None => Ok(()),
    }
}

fn check_target(metadata: &Metadata, target: &Target) -> Result<()> {
    let layers = &target.geometry.layers;
    let numbers = [
        (sidecar::KEY_LAYERS, layers.len()),
        (sidecar::KEY_KEY_DIM, target.geometry.key_dim),
        (sidecar::KEY_VALUE_DIM, target.geometry.value_dim),
    ];
    for (key, expected) in numbers {
        let found = metadata.required_count(key)?;
        if found != expected {
            fail!(Format, "{key} is {found}, and the model has {expected}");
        }
    }
    let heads = [
        (sidecar::KEY_HEADS, layers.iter().map(|layer| layer.n_heads).collect::<Vec<_>>()),
        (sidecar::KEY_KV_HEADS, layers.iter().map(|layer| layer.n_kv_heads).collect()),
    ];
    for (key, expected) in heads {
        let Some(found) = metadata.counts(key)? else {
            fail!(Format, "the key {} is missing", quoted(key));
        };
        let found = found.by_layer(key, layers.len())?;
        let differs = found.iter().zip(&expected).position(|(found, model)| found != model);
        if let Some(index) = differs {
            fail!(
                Format,
                "{key} is {} in layer {index}, and the model has {}",
                found[index],
                expected[index]
            );
        }
    }
    let Some(found) = metadata.text(sidecar::KEY_FINGERPRINT)? else { return Ok(()) };
    let expected = sidecar::hexadecimal(target.fingerprint);
    if found != expected {
        fail!(
            Format,
            "the sidecar is for the model with fingerprint {}, and this one has {expected}",
            quoted(found)
        );
    }
    Ok(())
}

/// The tensors of the file, each to be taken once.
struct Tensors<'a> {
    header: &'a Header<'a>,
    taken: BTreeSet<&'a str>,
}

impl<'a> Tensors<'a> {
    fn find(&self, name: &str) -> Result<&'a TensorInfo<'a>> {
        match self.header.tensor(name) {
            Some(tensor) => Ok(tensor),
            None => fail!(Format, "the tensor {} is missing", quoted(name)),
        }
    }

    /// The values of a tensor whose shape is known; the fastest dimension first.
    fn take(&mut self, name: &str, shape: &[u64]) -> Result<Vec<f32>> {
        let tensor = self.find(name)?;
        self.taken.insert(tensor.name);
        read_floats(tensor, shape)
    }

    fn check_all_taken(&self) -> Result<()> {
        match self.header.tensors.iter().find(|tensor| !self.taken.contains(tensor.name)) {
            Some(tensor) => fail!(Format, "the tensor {} is not expected", quoted(tensor.name)),
            None => Ok(()),
        }
    }
}

fn read_routing(
    metadata: &Metadata,
    tensors: &mut Tensors,
    geometry: &Geometry,
) -> Result<Option<RoutingWeights>> {
    let Some(summary_dim) = metadata.count(sidecar::KEY_SUMMARY_DIM)? else { return Ok(None) };
    let mut layers = Vec::new();
    layers.try_reserve_exact(geometry.layers.len())?;
    for (index, layer) in geometry.layers.iter().enumerate() {
        let heads = layer.n_heads as u64;
        let shape = [geometry.key_dim as u64, summary_dim as u64, heads];
        layers.push(LayerRouting {
            projection: tensors.take(&sidecar::projection_name(index), &shape)?,
            threshold: tensors.take(&sidecar::threshold_name(index), &[heads])?,
        });
    }
    Ok(Some(RoutingWeights { summary_dim, layers }))
}

fn read_gate(
    metadata: &Metadata,
    tensors: &mut Tensors,
    geometry: &Geometry,
) -> Result<Option<GateMlp>> {
    let Some(r_max) = metadata.count(sidecar::KEY_GATE_RANK)? else { return Ok(None) };
    if r_max as u64 > MAX_GATE_DIM {
        fail!(Format, "{} is {r_max}, expected at most {MAX_GATE_DIM}", sidecar::KEY_GATE_RANK);
    }
    let input_dim = r_max + geometry.key_dim;
    let first = read_linear(tensors, 0, input_dim, None)?;
    let second = read_linear(tensors, 1, first.rows, None)?;
    let third = read_linear(tensors, 2, second.rows, Some(r_max))?;
    Ok(Some(GateMlp { r_max, input_dim, layers: [first, second, third] }))
}

/// One layer of the gate network. A hidden layer is as wide as its tensor says.
fn read_linear(
    tensors: &mut Tensors,
    index: usize,
    cols: usize,
    rows: Option<usize>,
) -> Result<Linear> {
    let name = sidecar::gate_name(index, "weight");
    let rows = rows.map_or_else(|| tensors.find(&name).map(|t| t.dims[1]), |n| Ok(n as u64))?;
    if rows > MAX_GATE_DIM {
        fail!(Format, "tensor {} has {rows} rows, expected at most {MAX_GATE_DIM}", quoted(&name));
    }
    let weight = tensors.take(&name, &[cols as u64, rows])?;
    let bias = tensors.take(&sidecar::gate_name(index, "bias"), &[rows])?;
    Ok(Linear { rows: rows as usize, cols, weight, bias })
}

fn read_dense_layers(metadata: &Metadata) -> Result<Option<Vec<usize>>> {
    match metadata.counts(sidecar::KEY_DENSE_LAYERS)? {
        None => Ok(None),
        Some(Counts::Each(layers)) => Ok(Some(layers)),
        Some(Counts::Same(_)) => {
            fail!(Format, "{} is a number, expected an array", sidecar::KEY_DENSE_LAYERS)
        }
    }
}
