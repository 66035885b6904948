//! Writes small GGUF files: sidecars, and the hand-made models of the tests and of the fuzz targets.

use super::preflight::{DEFAULT_ALIGNMENT, MAGIC, value_type};
use super::tensor_type;

/// Collects metadata and tensors, then lays them out as GGUF version 3, little-endian.
#[derive(Clone, Default)]
pub struct GgufWriter {
    entries: Vec<u8>,
    n_entries: u64,
    tensors: Vec<Tensor>,
}

#[derive(Clone)]
struct Tensor {
    name: String,
    dims: Vec<u64>,
    type_number: u32,
    data: Vec<u8>,
}

impl GgufWriter {
    pub fn new() -> Self {
        Self::default()
    }

    /// An entry whose value is already encoded.
    pub fn entry(&mut self, key: &str, value_type: u32, value: &[u8]) -> &mut Self {
        put_string(&mut self.entries, key);
        self.entries.extend_from_slice(&value_type.to_le_bytes());
        self.entries.extend_from_slice(value);
        self.n_entries += 1;
        self
    }

    pub fn text(&mut self, key: &str, value: &str) -> &mut Self {
        let mut encoded = Vec::new();
        put_string(&mut encoded, value);
        self.entry(key, value_type::STRING, &encoded)
    }

    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.entry(key, value_type::U32, &value.to_le_bytes())
    }

    pub fn u32_array(&mut self, key: &str, values: &[u32]) -> &mut Self {
        let mut encoded = value_type::U32.to_le_bytes().to_vec();
        encoded.extend_from_slice(&(values.len() as u64).to_le_bytes());
        encoded.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.entry(key, value_type::ARRAY, &encoded)
    }

    /// `dims` has the fastest dimension first.
    pub fn tensor(
        &mut self,
        name: &str,
        dims: &[u64],
        type_number: u32,
        data: Vec<u8>,
    ) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), dims: dims.to_vec(), type_number, data });
        self
    }

    pub fn f32_tensor(&mut self, name: &str, dims: &[u64], values: &[f32]) -> &mut Self {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, dims, tensor_type::F32, data)
    }

    /// The whole file.
    pub fn finish(&self) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend_from_slice(&3u32.to_le_bytes());
        file.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        file.extend_from_slice(&self.n_entries.to_le_bytes());
        file.extend_from_slice(&self.entries);
        let alignment = DEFAULT_ALIGNMENT as usize;
        let mut offset = 0;
        for tensor in &self.tensors {
            put_string(&mut file, &tensor.name);
            file.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            file.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            file.extend_from_slice(&tensor.type_number.to_le_bytes());
            file.extend_from_slice(&(offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(alignment), 0);
            file.extend_from_slice(&tensor.data);
        }
        file
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
