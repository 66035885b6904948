//! Routing `paper`, step by step, against the reference implementation's values.
//!
//! The attention here is the plain one: a list of rows and one softmax in f64.

mod golden;

use golden::{Tensor, assert_close, integer, integers, read_json, read_tensors, spans};
use sekv::basis::{BasisShape, decompose, encode, rebuild};
use sekv::kernels::RowCodec;
use sekv::model::{GateMlp, Linear};
use sekv::span::{Span, weighted_mean, weights};
use sekv::summary::{Projection, relevance};
use sekv::zoom::budget::{Candidate, select, union};
use sekv::zoom::gates::rank_gates;
use sekv::zoom::rows::{Row, RowKind, list};
use serde_json::Value;
use std::collections::HashMap;

/// A span of one KV head, as it is stored.
struct Stored {
    mean_key: Vec<f32>,
    mean_value: Vec<f32>,
    singular_key: Vec<f32>,
    singular_value: Vec<f32>,
    gates: Vec<f32>,
    rebuilt_keys: Vec<f32>,
    rebuilt_values: Vec<f32>,
}

/// One golden case with everything that is stored for it.
struct Layer {
    name: String,
    tensors: HashMap<String, Tensor>,
    anchors: Vec<usize>,
    spans: Vec<Span>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    summary_dim: usize,
    budget: Option<usize>,
    /// [KV head][span], None for full-resolution spans.
    stored: Vec<Vec<Option<Stored>>>,
}

impl Layer {
    fn read(case: &Value) -> Self {
        let name = case["file"].as_str().unwrap().to_string();
        let mut layer = Layer {
            tensors: read_tensors(&name),
            name,
            anchors: integers(&case["anchors"]),
            spans: spans(case),
            n_heads: integer(case, "num_q_heads"),
            n_kv_heads: integer(case, "num_kv_heads"),
            head_dim: integer(case, "head_dim"),
            summary_dim: integer(case, "summary_dim"),
            budget: case.get("budget").map(|budget| budget.as_u64().unwrap() as usize),
            stored: Vec::new(),
        };
        let mlp = layer.gate_mlp(integer(case, "r_max"));
        layer.stored = (0..layer.n_kv_heads)
            .map(|kv_head| {
                let store = |span: &Span| layer.store(kv_head, span, &mlp);
                layer.spans.iter().map(|s| (!s.full_resolution).then(|| store(s))).collect()
            })
            .collect();
        layer
    }

    fn gate_mlp(&self, r_max: usize) -> GateMlp {
        let linear = |index: usize| {
            let weight = &self.tensors[&format!("g_phi.mlp.{index}.weight")];
            Linear {
                rows: weight.shape[0],
                cols: weight.shape[1],
                weight: weight.data.clone(),
                bias: self.tensors[&format!("g_phi.mlp.{index}.bias")].data.clone(),
            }
        };
        let input_dim = r_max + self.head_dim;
        GateMlp { r_max, input_dim, layers: [linear(0), linear(2), linear(4)] }
    }

    fn store(&self, kv_head: usize, span: &Span, mlp: &GateMlp) -> Stored {
        let d = self.head_dim;
        let rows = |name: &str| -> &[f32] {
            &self.tensors[name].at(&[kv_head])[span.start * d..span.end * d]
        };
        let (keys, values) = (rows("K"), rows("V"));
        let weights = weights(&self.tensors["surprisal"].data[span.tokens()]);
        let mean_key = weighted_mean(keys, d, &weights);
        let key_basis = decompose(keys, d, mlp.r_max).unwrap();
        let value_basis = decompose(values, d, mlp.r_max).unwrap();
        let gates = rank_gates(Some(mlp), &key_basis.singular, &mean_key).unwrap();
        let rebuilt = |basis| {
            let mut bytes = Vec::new();
            encode(basis, RowCodec::F32, &mut bytes);
            let mut rows = vec![f32::NAN; span.len() * d];
            let shape = BasisShape::of(basis, RowCodec::F32);
            rebuild(&shape, &bytes, &gates, 0..span.len(), &mut rows);
            rows
        };
        Stored {
            mean_value: weighted_mean(values, d, &weights),
            rebuilt_keys: rebuilt(&key_basis),
            rebuilt_values: rebuilt(&value_basis),
            singular_key: key_basis.singular,
            singular_value: value_basis.singular,
            mean_key,
            gates,
        }
    }

    fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    fn projection(&self) -> Projection<'_> {
        let weights = &self.tensors["W"].data;
        Projection::new(weights, self.n_heads, self.summary_dim, self.head_dim).unwrap()
    }

    /// Spans that have a summary, by index.
    fn compressed(&self) -> Vec<usize> {
        (0..self.spans.len()).filter(|&i| !self.spans[i].full_resolution).collect()
    }

    fn summary(&self, kv_head: usize, span: usize) -> &Stored {
        self.stored[kv_head][span].as_ref().unwrap()
    }

    /// The gates of one query head, one for each compressed span.
    fn relevance(&self, head: usize) -> Vec<f32> {
        let projection = self.projection();
        let folded = projection.fold_query(head, self.tensors["q"].at(&[head]));
        let gate = |&span: &usize| {
            let mean_key = &self.summary(head / self.group(), span).mean_key;
            let norm = projection.norm(head, mean_key);
            let product = folded.iter().zip(mean_key).map(|(f, k)| f * k).sum();
            relevance(product, norm, self.spans[span].len())
        };
        self.compressed().iter().map(gate).collect()
    }

    /// Spans that one query head zooms.
    fn zoomed(&self, head: usize, budget: Option<usize>) -> Vec<usize> {
        let compressed = self.compressed();
        let whole: usize = self.spans.iter().filter(|s| s.full_resolution).map(Span::len).sum();
        let candidates: Vec<Candidate> = self
            .relevance(head)
            .iter()
            .zip(&compressed)
            .map(|(&gate, &span)| Candidate { gate, tokens: self.spans[span].len() })
            .collect();
        let threshold = self.tensors["tau"].data[head];
        let zoomed = select(&candidates, threshold, self.anchors.len() + whole, budget);
        zoomed.into_iter().map(|i| compressed[i]).collect()
    }

    fn rows(&self, head: usize, budget: Option<usize>) -> Vec<Row> {
        let first = head / self.group() * self.group();
        let zoomed: Vec<Vec<usize>> =
            (first..first + self.group()).map(|h| self.zoomed(h, budget)).collect();
        let rebuilt = union(zoomed.iter().map(Vec::as_slice));
        list(&self.anchors, &self.spans, &zoomed[head - first], &rebuilt)
    }

    /// One softmax over the rows of one query head.
    fn attend(&self, head: usize, rows: &[Row]) -> Vec<f32> {
        let d = self.head_dim;
        let kv_head = head / self.group();
        let key_and_value = |row: &Row| -> (&[f32], &[f32]) {
            let stored = || self.summary(kv_head, row.span.unwrap());
            match row.kind {
                RowKind::Resident => {
                    let token = row.token.unwrap();
                    (
                        self.tensors["K"].at(&[kv_head, token]),
                        self.tensors["V"].at(&[kv_head, token]),
                    )
                }
                RowKind::Coarse => (&stored().mean_key, &stored().mean_value),
                RowKind::Rebuilt => {
                    let at = row.token.unwrap() - self.spans[row.span.unwrap()].start;
                    let range = at * d..(at + 1) * d;
                    (&stored().rebuilt_keys[range.clone()], &stored().rebuilt_values[range])
                }
            }
        };
        softmax(self.tensors["q"].at(&[head]), rows.iter().map(|r| (key_and_value(r), r.bias)))
    }

    fn outputs(&self, budget: Option<usize>) -> Vec<f32> {
        (0..self.n_heads).flat_map(|head| self.attend(head, &self.rows(head, budget))).collect()
    }
}

/// sum softmax(q.k / sqrt(d) + bias) v, in f64.
fn softmax<'a>(q: &[f32], rows: impl Iterator<Item = ((&'a [f32], &'a [f32]), f32)>) -> Vec<f32> {
    let rows: Vec<_> = rows.collect();
    let scale = 1.0 / (q.len() as f64).sqrt();
    let logits: Vec<f64> = rows
        .iter()
        .map(|((key, _), bias)| {
            let product: f64 = q.iter().zip(*key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            product * scale + f64::from(*bias)
        })
        .collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0f64; q.len()];
    let mut total = 0.0;
    for (((_, value), _), logit) in rows.iter().zip(&logits) {
        let weight = (logit - largest).exp();
        total += weight;
        out.iter_mut().zip(*value).for_each(|(o, &v)| *o += weight * f64::from(v));
    }
    out.into_iter().map(|o| (o / total) as f32).collect()
}

fn layers(name: &str) -> Vec<(Value, Layer)> {
    let cases = read_json(name);
    cases.into_iter().map(|case| (case.clone(), Layer::read(&case))).collect()
}

#[test]
fn summaries_and_relevance_are_the_reference_s() {
    for (_, layer) in layers("decode.json").iter().chain(&layers("gates.json")) {
        let compressed = layer.compressed();
        if compressed.is_empty() {
            assert!(!layer.tensors.contains_key("k_bar"));
            continue;
        }
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for &span in &compressed {
            for kv_head in 0..layer.n_kv_heads {
                keys.extend_from_slice(&layer.summary(kv_head, span).mean_key);
                values.extend_from_slice(&layer.summary(kv_head, span).mean_value);
            }
        }
        assert_close(&format!("{} k_bar", layer.name), &keys, &layer.tensors["k_bar"].data);
        assert_close(&format!("{} v_bar", layer.name), &values, &layer.tensors["v_bar"].data);

        let by_head: Vec<Vec<f32>> = (0..layer.n_heads).map(|h| layer.relevance(h)).collect();
        let found: Vec<f32> =
            (0..compressed.len()).flat_map(|s| by_head.iter().map(move |gates| gates[s])).collect();
        let what = format!("{} relevance", layer.name);
        assert_close(&what, &found, &layer.tensors["relevance"].data);

        // Not stored by this library, which folds them away; the parts still have to be right.
        if let Some(expected) = layer.tensors.get("routing_summary") {
            let projection = layer.projection();
            let mut summaries = Vec::new();
            for &span in &compressed {
                for head in 0..layer.n_heads {
                    let mean_key = &layer.summary(head / layer.group(), span).mean_key;
                    let norm = projection.norm(head, mean_key);
                    summaries.extend(projection.project(head, mean_key).iter().map(|x| x / norm));
                }
            }
            assert_close(&format!("{} summary", layer.name), &summaries, &expected.data);
            let routed: Vec<f32> = (0..layer.n_heads)
                .flat_map(|head| projection.project(head, layer.tensors["q"].at(&[head])))
                .collect();
            let what = format!("{} q_route", layer.name);
            assert_close(&what, &routed, &layer.tensors["q_route"].data);
        }
    }
}

#[test]
fn bases_and_rank_gates_are_the_reference_s() {
    let mut checked = 0;
    for (_, layer) in layers("decode.json") {
        let Some(&first) = layer.compressed().first() else { continue };
        let collect = |part: fn(&Stored) -> &Vec<f32>| -> Vec<f32> {
            (0..layer.n_kv_heads).flat_map(|h| part(layer.summary(h, first)).clone()).collect()
        };
        let check = |name: &str, found: Vec<f32>| {
            assert_close(&format!("{} {name}", layer.name), &found, &layer.tensors[name].data);
        };
        check("first_span_singular_k", collect(|s| &s.singular_key));
        check("first_span_singular_v", collect(|s| &s.singular_value));
        check("first_span_K_rec", collect(|s| &s.rebuilt_keys));
        check("first_span_V_rec", collect(|s| &s.rebuilt_values));
        // The reference pads the gates to r_max with zeros.
        let r_max = layer.tensors["first_span_gates"].shape[1];
        let padded: Vec<f32> = (0..layer.n_kv_heads)
            .flat_map(|h| {
                let mut gates = layer.summary(h, first).gates.clone();
                gates.resize(r_max, 0.0);
                gates
            })
            .collect();
        check("first_span_gates", padded);
        checked += 1;
    }
    assert_eq!(checked, 14);
}

#[test]
fn rows_and_zoomed_spans_are_the_reference_s() {
    let cases = layers("gates.json");
    assert_eq!(cases.len(), 8);
    for (case, layer) in &cases {
        for (head, expected) in case["zoomed"].as_array().unwrap().iter().enumerate() {
            assert_eq!(layer.zoomed(head, None), integers(expected), "{} head {head}", layer.name);
        }
        let groups = case["rows_of_first_head_of_each_group"].as_array().unwrap();
        assert_eq!(groups.len(), layer.n_kv_heads);
        for (kv_head, expected) in groups.iter().enumerate() {
            let found = layer.rows(kv_head * layer.group(), None);
            let kinds: Vec<usize> = found.iter().map(|row| row.kind as usize).collect();
            assert_eq!(kinds, integers(&expected["kind"]), "{} KV head {kv_head}", layer.name);
            let spans: Vec<i64> =
                found.iter().map(|row| row.span.map_or(-1, |span| span as i64)).collect();
            assert_eq!(Value::from(spans), expected["span"], "{} KV head {kv_head}", layer.name);
            let biases: Vec<f32> = found.iter().map(|row| row.bias).collect();
            let what = format!("{} bias of KV head {kv_head}", layer.name);
            assert_close(&what, &biases, &golden::numbers(&expected["bias"]));
        }
    }
}

#[test]
fn outputs_with_and_without_a_budget_are_the_reference_s() {
    for (_, layer) in layers("decode.json").iter().chain(&layers("gates.json")) {
        let expected = &layer.tensors["out_no_budget"].data;
        assert_close(&format!("{} without", layer.name), &layer.outputs(None), expected);
        if layer.budget.is_some() {
            let expected = &layer.tensors["out_budget"].data;
            assert_close(&format!("{} budget", layer.name), &layer.outputs(layer.budget), expected);
        }
    }
}

#[test]
fn dense_outputs_are_plain_attention_over_every_token() {
    for (_, layer) in layers("decode.json").iter().chain(&layers("gates.json")) {
        let n = layer.tensors["surprisal"].data.len();
        let all: Vec<Row> = (0..n)
            .map(|token| Row { kind: RowKind::Resident, span: None, token: Some(token), bias: 0.0 })
            .collect();
        let found: Vec<f32> = (0..layer.n_heads).flat_map(|h| layer.attend(h, &all)).collect();
        let what = format!("{} dense", layer.name);
        assert_close(&what, &found, &layer.tensors["out_dense"].data);
    }
}
