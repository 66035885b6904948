//! Routing `paper` through the C ABI alone, its parameters from a sidecar file, against the
//! reference implementation's outputs.

mod golden;

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::ptr;

use golden::{Tensors, assert_close, integer, spans};
use sekv::capi::batch::{sekv_batch, sekv_view};
use sekv::capi::context::{sekv_context, sekv_context_free, sekv_init, sekv_set_fetch_budget};
use sekv::capi::model::{
    sekv_model, sekv_model_free, sekv_model_from_params, sekv_model_params, sekv_model_params_init,
};
use sekv::capi::params::{sekv_params, sekv_params_init};
use sekv::capi::pass::{sekv_abort, sekv_attend, sekv_begin, sekv_commit, sekv_prefill_ingest};
use sekv::capi::stats::{sekv_statistics, sekv_stats};
use sekv::model::{Model, ModelParams};
use serde_json::Value;

/// `enum sekv_routing`, `sekv_codec` and `sekv_dtype` of the header.
const ROUTING_PAPER: i32 = 1;
const CODEC_F32: i32 = 0;
const CODEC_LOW_RANK_F32: i32 = 5;
const DTYPE_F32: i32 = 0;

fn ok(status: i32) {
    assert_eq!(status, 0);
}

/// A model handle of one layer whose parameters come from a file.
fn model(case: &Value, tensors: &Tensors) -> *mut sekv_model {
    let (heads, kv_heads) = (integer(case, "num_q_heads"), integer(case, "num_kv_heads"));
    let head_dim = integer(case, "head_dim");
    let described = ModelParams {
        n_layer: 1,
        n_head: heads,
        n_head_kv: kv_heads,
        head_dim_k: head_dim,
        ..ModelParams::default()
    };
    let geometry = Model::from_params(&described).unwrap().geometry;
    let name =
        format!("sekv-golden-{}-{}.gguf", std::process::id(), case["file"].as_str().unwrap());
    let path = std::env::temp_dir().join(name);
    golden::sidecar(case, tensors).write(&path, &geometry, None).unwrap();
    let text = CString::new(path.to_str().unwrap()).unwrap();
    let mut handle = MaybeUninit::uninit();
    // SAFETY: the structs are initialised by the library, and `text` outlives the call.
    let model = unsafe {
        let mut params = MaybeUninit::<sekv_model_params>::zeroed().assume_init();
        ok(sekv_model_params_init(&raw mut params, size_of::<sekv_model_params>()));
        params.n_layer = 1;
        params.n_head = heads as i32;
        params.n_head_kv = kv_heads as i32;
        params.head_dim_k = head_dim as i32;
        params.sidecar_path = text.as_ptr();
        ok(sekv_model_from_params(&raw const params, Some(&mut handle)));
        handle.assume_init()
    };
    std::fs::remove_file(path).unwrap();
    model
}

fn context(case: &Value, model: &sekv_model) -> *mut sekv_context {
    let mut handle = MaybeUninit::uninit();
    // SAFETY: as in `model`.
    unsafe {
        let mut params = MaybeUninit::<sekv_params>::zeroed().assume_init();
        ok(sekv_params_init(&raw mut params, size_of::<sekv_params>()));
        params.routing = ROUTING_PAPER;
        (params.n_sinks, params.window) = (0, 0);
        (params.block_tokens, params.layout_tokens) = (1, 1);
        (params.codec_resident, params.codec_mean) = (CODEC_F32, CODEC_F32);
        params.codec_basis = CODEC_LOW_RANK_F32;
        params.surprisal_alpha = golden::number(case, "alpha") as f32;
        params.span_min = integer(case, "l_min") as i32;
        params.r_max = integer(case, "r_max") as i32;
        ok(sekv_init(Some(model), &raw const params, Some(&mut handle)));
        handle.assume_init()
    }
}

/// Golden rows, [head][token][elem].
fn view(data: &[f32], head: usize, token: usize, elem: usize) -> sekv_view {
    assert_eq!(data.len(), head * token * elem);
    // SAFETY: a struct of integers and a pointer; every field is set below.
    let mut view = unsafe { MaybeUninit::<sekv_view>::zeroed().assume_init() };
    view.data = data.as_ptr().cast_mut().cast();
    view.dtype = DTYPE_F32;
    (view.n_elem, view.n_head, view.n_tok) = (elem as i32, head as i32, token as i32);
    (view.stride_head, view.stride_tok) = (token * elem * 4, elem * 4);
    view
}

fn begin(context: &sekv_context, positions: &[i32]) {
    // SAFETY: `positions` holds as many values as the batch says.
    unsafe {
        let mut batch = MaybeUninit::<sekv_batch>::zeroed().assume_init();
        batch.struct_size = size_of::<sekv_batch>();
        batch.n_tok = positions.len() as i32;
        batch.pos = positions.as_ptr();
        ok(sekv_begin(Some(context), &raw const batch));
    }
}

fn replay(context: &sekv_context, case: &Value, tensors: &Tensors) {
    let (n, d) = (integer(case, "n"), integer(case, "head_dim"));
    let kv_heads = integer(case, "num_kv_heads");
    begin(context, &(0..n as i32).collect::<Vec<_>>());
    let k = view(&tensors["K"].data, kv_heads, n, d);
    let v = view(&tensors["V"].data, kv_heads, n, d);
    // SAFETY: the views lie within the tensors; the surprisals are as many as the tokens.
    unsafe {
        ok(sekv_prefill_ingest(Some(context), 0, Some(&k), Some(&v)));
        ok(sekv_commit(Some(context), tensors["surprisal"].data.as_ptr()));
    }
}

/// The queries' outputs over the prompt, beside a running token of no weight.
fn attend(context: &sekv_context, case: &Value, tensors: &Tensors) -> Vec<f32> {
    let (heads, kv_heads) = (integer(case, "num_q_heads"), integer(case, "num_kv_heads"));
    let (n, d) = (integer(case, "n"), integer(case, "head_dim"));
    let q = &tensors["q"].data;
    let groups = q.chunks(heads / kv_heads * d);
    let ghost: Vec<f32> = groups.flat_map(|queries| golden::ghost_key(queries, d)).collect();
    let nothing = vec![0.0; kv_heads * d];
    let mut out = vec![f32::NAN; heads * d];
    begin(context, &[n as i32]);
    let (k, v) = (view(&ghost, kv_heads, 1, d), view(&nothing, kv_heads, 1, d));
    let mut out_view = view(&out, heads, 1, d);
    out_view.data = out.as_mut_ptr().cast();
    // SAFETY: the views lie within vectors that outlive the calls.
    unsafe {
        ok(sekv_prefill_ingest(Some(context), 0, Some(&k), Some(&v)));
        let q = view(q, heads, 1, d);
        ok(sekv_attend(Some(context), 0, Some(&q), ptr::null(), Some(&out_view)));
        ok(sekv_abort(Some(context)));
    }
    out
}

#[test]
fn outputs_with_and_without_a_budget_are_the_reference_s() {
    let cases = golden::paper_cases();
    assert_eq!(cases.len(), 24);
    for (case, tensors) in &cases {
        let name = case["file"].as_str().unwrap();
        let model_handle = model(case, tensors);
        // SAFETY: fresh handles, freed at the end of the loop and not used after.
        let model = unsafe { &*model_handle };
        let context_handle = context(case, model);
        // SAFETY: as above.
        let context = unsafe { &*context_handle };
        replay(context, case, tensors);

        let spans = spans(case);
        let compressed = spans.iter().filter(|span| !span.full_resolution);
        let n_spans = compressed.clone().count();
        let in_spans: usize = compressed.map(|span| span.len()).sum();
        // SAFETY: the library fills what the size says.
        let statistics = unsafe {
            let mut statistics = MaybeUninit::<sekv_statistics>::zeroed().assume_init();
            statistics.struct_size = size_of::<sekv_statistics>();
            ok(sekv_stats(Some(context), &raw mut statistics));
            statistics
        };
        assert_eq!(statistics.n_spans as usize, n_spans, "{name}");

        let found = attend(context, case, tensors);
        assert_close(&format!("{name} without"), &found, &tensors["out_no_budget"].data);
        if let Some(budget) = case.get("budget") {
            let attended = (integer(case, "n") - in_spans + n_spans) as i64;
            // SAFETY: a live context.
            ok(unsafe {
                sekv_set_fetch_budget(Some(context), budget.as_i64().unwrap() - attended)
            });
            let found = attend(context, case, tensors);
            assert_close(&format!("{name} budget"), &found, &tensors["out_budget"].data);
        }
        // SAFETY: each handle is freed once.
        unsafe {
            sekv_context_free(context_handle);
            sekv_model_free(model_handle);
        }
    }
}
