//! A model's fingerprint: 32 bytes that tell whether a saved state belongs to it.
//!
//! Hashed, in this order, each part with its length before it:
//! 1. the name of this scheme, which changes when the scheme does;
//! 2. the geometry as this library understood it, so that a state never meets another reading of
//!    the same file;
//! 3. the file's length and its whole header: metadata and tensor table;
//! 4. of each tensor, in the order of the table, the first and the last 4 KiB of its data (all of
//!    it up to 8 KiB).
//!
//! A file of 40 GB has a thousand tensors, so 8 MB are read instead of 40 GB. What this tells
//! apart: other models, other quantisations, fine-tunes (training moves every tensor), edited
//! metadata. What it does not: a file damaged in the middle of a tensor. It is an identity, not an
//! integrity check.

use super::geometry::Geometry;
use super::preflight::Header;

const SCHEME: &[u8] = b"libsekv model fingerprint 1";
const SAMPLE_BYTES: usize = 4096;

pub(crate) fn of_model(header: &Header, file_length: usize, geometry: &Geometry) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    put(&mut hasher, SCHEME);
    put(&mut hasher, &geometry_bytes(geometry));
    put(&mut hasher, &(file_length as u64).to_le_bytes());
    put(&mut hasher, header.bytes);
    for tensor in &header.tensors {
        let data = tensor.data;
        if data.len() <= 2 * SAMPLE_BYTES {
            put(&mut hasher, data);
        } else {
            put(&mut hasher, &data[..SAMPLE_BYTES]);
            put(&mut hasher, &data[data.len() - SAMPLE_BYTES..]);
        }
    }
    *hasher.finalize().as_bytes()
}

fn put(hasher: &mut blake3::Hasher, part: &[u8]) {
    hasher.update(&(part.len() as u64).to_le_bytes());
    hasher.update(part);
}

/// The fields in order, numbers as u64 or f32 little-endian. Frequencies are left out: they follow
/// from the header, through a power whose last bit differs between systems.
pub(crate) fn geometry_bytes(geometry: &Geometry) -> Vec<u8> {
    // Named one by one, so that a new field cannot be forgotten here.
    let Geometry {
        layers,
        key_dim,
        value_dim,
        rope,
        n_rot,
        rope_frequencies: _,
        attention_scale,
        n_ctx_train,
    } = geometry;
    let mut bytes = Vec::new();
    let mut number = |n: usize| bytes.extend_from_slice(&(n as u64).to_le_bytes());
    number(layers.len());
    for layer in layers {
        number(layer.n_heads);
        number(layer.n_kv_heads);
    }
    for n in [*key_dim, *value_dim, *rope as usize, *n_rot, *n_ctx_train] {
        number(n);
    }
    bytes.extend_from_slice(&attention_scale.to_le_bytes());
    bytes
}
