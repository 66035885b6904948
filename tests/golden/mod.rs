//! Reads the golden vectors. README.md beside this file says what they are.
//!
//! SEKV_GOLDEN names another folder that holds them.
#![allow(dead_code)] // each test program uses its own part

use nalgebra::{DMatrix, DVector};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;

use sekv::model::{GateMlp, LayerRouting, Linear, RoutingWeights, Sidecar};
use sekv::span::Span;

pub type Tensors = HashMap<String, Tensor>;

pub fn folder() -> PathBuf {
    match std::env::var_os("SEKV_GOLDEN") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
    }
}

pub fn read_json(name: &str) -> Vec<Value> {
    let path = folder().join(name);
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

pub struct Tensor {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Tensor {
    /// The part of the tensor at the given leading indices.
    pub fn at(&self, indices: &[usize]) -> &[f32] {
        let size: usize = self.shape[indices.len()..].iter().product();
        let offset = indices.iter().zip(&self.shape).fold(0, |o, (&i, &n)| {
            assert!(i < n);
            o * n + i
        });
        &self.data[offset * size..(offset + 1) * size]
    }
}

pub fn read_tensors(name: &str) -> HashMap<String, Tensor> {
    let path = folder().join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), safetensors::Dtype::F32);
            let (numbers, rest) = view.data().as_chunks::<4>();
            assert!(rest.is_empty());
            let data = numbers.iter().map(|&b| f32::from_le_bytes(b)).collect();
            (name, Tensor { shape: view.shape().to_vec(), data })
        })
        .collect()
}

pub fn integer(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{key} of {case}")) as usize
}

pub fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or_else(|| panic!("{key} of {case}"))
}

pub fn integers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}

pub fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

pub fn spans(case: &Value) -> Vec<Span> {
    let spans = case["spans"].as_array().unwrap();
    spans
        .iter()
        .map(|span| Span {
            start: integer(span, "start"),
            end: integer(span, "end"),
            full_resolution: span["full_resolution"].as_bool().unwrap(),
        })
        .collect()
}

/// The tolerance of README.md: 2e-5 of the expected tensor's largest magnitude.
#[track_caller]
pub fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 2e-5 * largest, "{what}[{i}]: found {a}, expected {b}");
    }
}

/// The cases of routing `paper`: decode and gates.
pub fn paper_cases() -> Vec<(Value, Tensors)> {
    let cases = read_json("decode.json").into_iter().chain(read_json("gates.json"));
    cases.map(|case| (case.clone(), read_tensors(case["file"].as_str().unwrap()))).collect()
}

/// A case's trained parameters.
pub fn sidecar(case: &Value, tensors: &Tensors) -> Sidecar {
    let linear = |index: usize| {
        let weight = &tensors[&format!("g_phi.mlp.{index}.weight")];
        Linear {
            rows: weight.shape[0],
            cols: weight.shape[1],
            weight: weight.data.clone(),
            bias: tensors[&format!("g_phi.mlp.{index}.bias")].data.clone(),
        }
    };
    let head_dim = integer(case, "head_dim");
    let r_max = integer(case, "r_max");
    let layer = LayerRouting {
        projection: tensors["W"].data.clone(),
        threshold: tensors["tau"].data.clone(),
    };
    Sidecar {
        routing: Some(RoutingWeights {
            summary_dim: integer(case, "summary_dim"),
            layers: vec![layer],
        }),
        gate: Some(GateMlp {
            r_max,
            input_dim: r_max + head_dim,
            layers: [linear(0), linear(2), linear(4)],
        }),
        dense_layers: None,
    }
}

/// The shortest key that all heads of a group score at -1e4, before the attention scale.
pub fn ghost_key(queries: &[f32], head_dim: usize) -> Vec<f32> {
    let n = queries.len() / head_dim;
    let q = DMatrix::from_fn(n, head_dim, |i, j| f64::from(queries[i * head_dim + j]));
    let wanted = DVector::from_element(n, -1e4);
    let inner = (&q * q.transpose()).cholesky().unwrap().solve(&wanted);
    (q.transpose() * inner).iter().map(|&x| x as f32).collect()
}
