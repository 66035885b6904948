//! Routing `paper` inside the cache, against the reference implementation's outputs.
//!
//! The prompt is replayed without attending. A running token is needed to attend at all; its key
//! is chosen so that every query head scores it at -1e4 / sqrt(d), where its weight is exactly 0.

mod golden;

use std::sync::Arc;

use golden::{Tensors, assert_close, integer, read_json, read_tensors, spans};
use sekv::cache::{BatchToken, Context};
use sekv::kernels::RowCodec;
use sekv::model::{Model, ModelParams};
use sekv::params::{BasisCodec, Params, RoutingKind};
use sekv::tensor::{Dtype, View};
use serde_json::Value;

fn model(case: &Value, tensors: &Tensors) -> Arc<Model> {
    let head_dim = integer(case, "head_dim");
    let mut model = Model::from_params(&ModelParams {
        n_layer: 1,
        n_head: integer(case, "num_q_heads"),
        n_head_kv: integer(case, "num_kv_heads"),
        head_dim_k: head_dim,
        head_dim_v: head_dim,
        ..ModelParams::default()
    })
    .unwrap();
    let sidecar = golden::sidecar(case, tensors);
    sidecar.validate(&model.geometry).unwrap();
    model.sidecar = Some(sidecar);
    Arc::new(model)
}

/// Everything sealed at once and raw.
fn params(case: &Value) -> Params {
    Params {
        n_threads: 2,
        routing: RoutingKind::Paper,
        n_sinks: 0,
        window: 0,
        block_tokens: 1,
        layout_tokens: 1,
        resident_codec: RowCodec::F32,
        mean_codec: RowCodec::F32,
        basis_codec: BasisCodec::LowRank(RowCodec::F32),
        surprisal_alpha: golden::number(case, "alpha") as f32,
        span_min: integer(case, "l_min"),
        rank_max: integer(case, "r_max"),
        ..Params::default()
    }
}

/// A view of golden rows, [head][token][elem].
fn golden_view(data: &mut [f32], head: usize, token: usize, elem: usize) -> View {
    assert_eq!(data.len(), head * token * elem);
    // SAFETY: the rows are within `data`, which outlives the call that reads them.
    unsafe {
        View::new(
            data.as_mut_ptr().cast(),
            Dtype::F32,
            [elem, head, token],
            [token * elem * 4, elem * 4],
        )
    }
}

/// The outputs of the case's queries over its prompt, [n_heads][head_dim].
fn attend(context: &mut Context, case: &Value, tensors: &Tensors) -> Vec<f32> {
    let (heads, kv_heads) = (integer(case, "num_q_heads"), integer(case, "num_kv_heads"));
    let (n, d) = (integer(case, "n"), integer(case, "head_dim"));
    let group = heads / kv_heads;
    let mut q = tensors["q"].data.clone();
    let mut ghost: Vec<f32> =
        q.chunks(group * d).flat_map(|queries| golden::ghost_key(queries, d)).collect();
    let mut nothing = vec![0.0; kv_heads * d];
    let mut out = vec![f32::NAN; heads * d];
    context.begin(&[BatchToken { position: n as i32, sequences: &[0] }]).unwrap();
    let key = golden_view(&mut ghost, kv_heads, 1, d);
    context.ingest(0, &key, &golden_view(&mut nothing, kv_heads, 1, d)).unwrap();
    let out_view = golden_view(&mut out, heads, 1, d);
    context.attend(0, &golden_view(&mut q, heads, 1, d), None, &out_view).unwrap();
    context.abort().unwrap();
    out
}

fn replay(context: &mut Context, case: &Value, tensors: &Tensors) {
    let (n, d) = (integer(case, "n"), integer(case, "head_dim"));
    let kv_heads = integer(case, "num_kv_heads");
    let batch: Vec<BatchToken> =
        (0..n).map(|i| BatchToken { position: i as i32, sequences: &[0] }).collect();
    let (mut k, mut v) = (tensors["K"].data.clone(), tensors["V"].data.clone());
    context.begin(&batch).unwrap();
    let (keys, values) = (golden_view(&mut k, kv_heads, n, d), golden_view(&mut v, kv_heads, n, d));
    context.ingest(0, &keys, &values).unwrap();
    context.commit(Some(&tensors["surprisal"].data)).unwrap();
    assert!(context.take_events().is_empty());
}

#[test]
fn outputs_with_and_without_a_budget_are_the_reference_s() {
    for (case, tensors) in &golden::paper_cases() {
        let name = case["file"].as_str().unwrap();
        let mut context = Context::new(model(case, tensors), params(case)).unwrap();
        replay(&mut context, case, tensors);

        let spans = spans(case);
        let compressed = spans.iter().filter(|span| !span.full_resolution);
        let n_spans = compressed.clone().count();
        let in_spans: usize = compressed.map(|span| span.len()).sum();
        let n = integer(case, "n");
        let report = context.statistics().report;
        assert_eq!((report.spans, report.tokens_without_surprisal), (n_spans as u64, 0), "{name}");

        let found = attend(&mut context, case, tensors);
        assert_close(&format!("{name} without"), &found, &tensors["out_no_budget"].data);
        if let Some(budget) = case.get("budget") {
            // The cache counts the rows that zooming adds to those attended anyway.
            let attended = n - in_spans + n_spans;
            context.set_fetch_budget(Some(budget.as_u64().unwrap() as usize - attended));
            let found = attend(&mut context, case, tensors);
            assert_close(&format!("{name} budget"), &found, &tensors["out_budget"].data);
        }
    }
}

#[test]
fn a_case_counts_the_tokens_of_every_span_that_its_groups_zoom() {
    for case in &read_json("gates.json") {
        let tensors = read_tensors(case["file"].as_str().unwrap());
        let mut context = Context::new(model(case, &tensors), params(case)).unwrap();
        replay(&mut context, case, &tensors);
        attend(&mut context, case, &tensors);
        let spans = spans(case);
        let zoomed: Vec<Vec<usize>> =
            case["zoomed"].as_array().unwrap().iter().map(golden::integers).collect();
        let group = zoomed.len() / integer(case, "num_kv_heads");
        let fetched: Vec<usize> = zoomed
            .chunks(group)
            .map(|heads| {
                let mut union: Vec<usize> = heads.concat();
                union.sort_unstable();
                union.dedup();
                union.into_iter().map(|span| spans[span].len()).sum()
            })
            .collect();
        let counters = context.statistics().counters;
        let mean = fetched.iter().sum::<usize>() as f64 / fetched.len() as f64;
        assert_eq!(counters.fetched.mean(), mean);
        assert_eq!(counters.fetched.max() as usize, *fetched.iter().max().unwrap());
    }
}
