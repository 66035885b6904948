use super::*;
use crate::model::gguf_writer::GgufWriter;
use crate::model::preflight::value_type;
use crate::model::testing::{
    Mutations, TemporaryFile, model_keys, small_geometry, take_largest_request,
};
use crate::model::{Model, ModelParams};

fn geometry_of(writer: &GgufWriter) -> Result<Geometry> {
    read_geometry(&Header::scan(&writer.finish())?).map(|(_, geometry)| geometry)
}

#[track_caller]
fn assert_refused(writer: &GgufWriter, status: Status, message: &str) {
    let error = geometry_of(writer).unwrap_err();
    assert_eq!(error.status, status, "{error}");
    assert!(error.message.contains(message), "{error}, expected {message}");
    assert!(!error.message.contains('\n'), "{error}");
}

#[test]
fn reads_the_geometry_of_a_model() {
    assert_eq!(geometry_of(&model_keys("llama")).unwrap(), small_geometry());
}

#[test]
fn a_model_file_and_its_description_agree() {
    let file = TemporaryFile::with(&model_keys("llama").finish());
    let from_file = Model::from_gguf(file.path(), None).unwrap();
    let params = ModelParams {
        n_layer: 2,
        n_head: 4,
        n_head_kv: 2,
        head_dim_k: 8,
        rope: RopeKind::Norm,
        n_ctx_train: 2048,
        fingerprint: [7; 32],
        ..Default::default()
    };
    let described = Model::from_params(&params).unwrap();
    assert_eq!(from_file.geometry, described.geometry);
    assert_eq!(from_file.architecture, "llama");
    assert_eq!(described.fingerprint, [7; 32]);
}

#[test]
fn own_head_dimensions_go_before_the_embedding() {
    let mut writer = model_keys("qwen3");
    writer
        .u32("qwen3.attention.key_length", 16)
        .u32("qwen3.attention.value_length", 24)
        .u32("qwen3.rope.dimension_count", 12);
    let geometry = geometry_of(&writer).unwrap();
    assert_eq!((geometry.key_dim, geometry.value_dim, geometry.n_rot), (16, 24, 12));
    assert_eq!(geometry.rope_frequencies.len(), 6);
    assert_eq!(geometry.rope, RopeKind::Neox);
    assert_eq!(geometry.attention_scale, 0.25);
}

#[test]
fn kv_heads_default_to_heads() {
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", "gpt2")
        .u32("gpt2.block_count", 1)
        .u32("gpt2.embedding_length", 32)
        .u32("gpt2.attention.head_count", 4);
    let geometry = geometry_of(&writer).unwrap();
    assert_eq!(geometry.layers, [LayerGeometry { n_heads: 4, n_kv_heads: 4 }]);
    assert_eq!((geometry.rope, geometry.n_rot, geometry.n_ctx_train), (RopeKind::None, 0, 0));
    assert!(geometry.rope_frequencies.is_empty());
}

#[test]
fn heads_may_differ_by_layer() {
    let per_layer = |heads: &[u32], kv_heads: &[u32]| {
        let mut writer = GgufWriter::new();
        writer
            .text("general.architecture", "openelm")
            .u32("openelm.block_count", 3)
            .u32("openelm.attention.key_length", 8)
            .u32("openelm.attention.value_length", 8)
            .u32_array("openelm.attention.head_count", heads)
            .u32_array("openelm.attention.head_count_kv", kv_heads);
        writer
    };
    let geometry = geometry_of(&per_layer(&[4, 8, 12], &[1, 2, 3])).unwrap();
    let heads: Vec<_> = geometry.layers.iter().map(|l| (l.n_heads, l.n_kv_heads)).collect();
    assert_eq!(heads, [(4, 1), (8, 2), (12, 3)]);
    assert_refused(&per_layer(&[4, 8], &[1, 2, 3]), Status::Format, "has 2 values");
    assert_refused(&per_layer(&[4, 8, 7], &[1, 2, 3]), Status::Format, "layer 2 has 7 heads");
    assert_refused(&per_layer(&[4, 0, 3], &[1, 0, 3]), Status::Unsupported, "layer 1 has no");
}

#[test]
fn layers_that_only_draft_tokens_do_not_count() {
    let mut writer = model_keys("glm4moe");
    writer.u32("glm4moe.nextn_predict_layers", 1);
    assert_eq!(geometry_of(&writer).unwrap().layers.len(), 1);
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", "glm4moe")
        .u32("glm4moe.block_count", 3)
        .u32("glm4moe.nextn_predict_layers", 1)
        .u32("glm4moe.embedding_length", 32)
        .u32_array("glm4moe.attention.head_count", &[4, 2, 1]);
    let heads: Vec<_> = geometry_of(&writer).unwrap().layers.iter().map(|l| l.n_heads).collect();
    assert_eq!(heads, [4, 2]);
    let mut writer = model_keys("glm4moe");
    writer.u32("glm4moe.nextn_predict_layers", 2);
    assert_refused(&writer, Status::Format, "drafting layers");
}

#[test]
fn the_score_is_scaled_as_the_host_does_it() {
    assert_eq!(geometry_of(&model_keys("gemma")).unwrap().attention_scale, 1.0);
    assert_eq!(geometry_of(&model_keys("phi3")).unwrap().attention_scale, 1.0);
    let mut writer = model_keys("granite");
    writer.f32("granite.attention.scale", 0.015625);
    assert_eq!(geometry_of(&writer).unwrap().attention_scale, 0.015625);
    let mut writer = model_keys("granite");
    writer.f32("granite.attention.scale", -1.0);
    assert_refused(&writer, Status::Format, "attention_scale is -1");
}

#[test]
fn granite_can_switch_rope_off() {
    let mut writer = model_keys("granite");
    writer.flag("granite.rope.scaling.finetuned", false);
    let geometry = geometry_of(&writer).unwrap();
    assert_eq!((geometry.rope, geometry.n_rot), (RopeKind::None, 0));
}

#[test]
fn rope_base_and_linear_scaling_are_read() {
    let mut writer = model_keys("llama");
    writer
        .f32("llama.rope.freq_base", 1000.0)
        .text("llama.rope.scaling.type", "linear")
        .f32("llama.rope.scaling.factor", 4.0);
    let found = geometry_of(&writer).unwrap().rope_frequencies;
    for (pair, frequency) in found.iter().enumerate() {
        let expected = 1000f32.powf(-(pair as f32) / 4.0) / 4.0;
        assert!((frequency - expected).abs() < 1e-6 * expected, "{found:?}");
    }
    let mut writer = model_keys("llama");
    writer.text("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(geometry_of(&writer).unwrap(), small_geometry());
    let mut writer = model_keys("llama");
    writer.f32("llama.rope.scale_linear", 2.0);
    assert_eq!(geometry_of(&writer).unwrap().rope_frequencies[0], 0.5);
}

#[test]
fn yarn_scales_slow_pairs_only() {
    let mut writer = model_keys("qwen2");
    writer
        .text("qwen2.rope.scaling.type", "yarn")
        .f32("qwen2.rope.scaling.factor", 4.0)
        .u32("qwen2.rope.scaling.original_context_length", 512);
    let found = geometry_of(&writer).unwrap().rope_frequencies;
    // 32 turns in 512 tokens lie before pair 1 and one turn before pair 2, so the ramp starts at
    // 0 (kept) and ends at 2 (scaled), with pair 1 half way.
    let expected = [1.0, 0.1 * 0.625, 0.01 / 4.0, 0.001 / 4.0];
    for (frequency, expected) in found.iter().zip(expected) {
        assert!((frequency - expected).abs() < 1e-6 * expected, "{found:?}");
    }
}

#[test]
fn llama_3_factors_divide_the_frequencies() {
    let mut writer = model_keys("llama");
    writer.f32_tensor("rope_freqs.weight", &[4], &[1.0, 2.0, 4.0, 8.0]);
    let found = geometry_of(&writer).unwrap().rope_frequencies;
    for (frequency, expected) in found.iter().zip([1.0, 0.05, 0.0025, 0.000125]) {
        assert!((frequency - expected).abs() < 1e-6 * expected, "{found:?}");
    }
    let mut writer = model_keys("llama");
    writer.f32_tensor("rope_freqs.weight", &[3], &[1.0, 2.0, 4.0]);
    assert_refused(&writer, Status::Format, "\"rope_freqs.weight\" has shape [3, 1, 1, 1]");
}

#[test]
fn refuses_attention_that_it_does_not_compute() {
    type Change = fn(&mut GgufWriter) -> &mut GgufWriter;
    let cases: [(Change, &str); 15] = [
        (|w| w.u32("llama.attention.kv_lora_rank", 512), "MLA"),
        (|w| w.u32("llama.attention.key_length_mla", 192), "MLA"),
        (|w| w.u32("llama.attention.sliding_window", 4096), "sliding-window"),
        (|w| w.u32("llama.attention.shared_kv_layers", 10), "share a KV cache"),
        (|w| w.u32("llama.attention.indexer.top_k", 64), "indexer"),
        (|w| w.u32("llama.ssm.state_size", 16), "recurrent"),
        (|w| w.f32("llama.attention.max_alibi_bias", 8.0), "ALiBi"),
        (|w| w.f32("llama.attn_logit_softcapping", 50.0), "softcapping"),
        (|w| w.f32("llama.rope.scaling.alpha", 1000.0), "NTK"),
        (|w| w.u32_array("llama.rope.dimension_sections", &[16, 24, 24, 0]), "mrope"),
        (|w| w.flag("llama.attention.causal", false), "not causal"),
        (|w| w.text("llama.rope.scaling.type", "longrope"), "\"longrope\""),
        (|w| w.f32_tensor("rope_factors_long.weight", &[4], &[1.0; 4]), "LongRoPE"),
        (|w| w.f32_tensor("blk.0.attn_sinks.weight", &[4], &[1.0; 4]), "attention sinks"),
        (|w| w.u32("split.count", 3), "3 parts of a split model"),
    ];
    for (change, message) in cases {
        let mut writer = model_keys("llama");
        change(&mut writer);
        assert_refused(&writer, Status::Unsupported, message);
    }
}

#[test]
fn keys_of_zero_refuse_nothing() {
    let mut writer = model_keys("llama");
    writer
        .u32("llama.attention.sliding_window", 0)
        .f32("llama.attention.max_alibi_bias", 0.0)
        .u32_array("llama.rope.dimension_sections", &[0; 4])
        .u32("split.count", 1)
        .text("general.type", "model");
    assert_eq!(geometry_of(&writer).unwrap(), small_geometry());
}

#[test]
fn tells_the_baichuan_models_apart() {
    let baichuan = |layers| {
        let mut writer = GgufWriter::new();
        writer
            .text("general.architecture", "baichuan")
            .u32("baichuan.block_count", layers)
            .u32("baichuan.embedding_length", 32)
            .u32("baichuan.attention.head_count", 4);
        writer
    };
    assert_eq!(geometry_of(&baichuan(32)).unwrap().layers.len(), 32);
    assert_refused(&baichuan(40), Status::Unsupported, "ALiBi");
}

#[test]
fn refuses_files_that_hold_no_model() {
    let mut adapter = model_keys("llama");
    adapter.text("general.type", "adapter");
    assert_refused(&adapter, Status::Unsupported, "\"adapter\"");
    let mut sidecar = GgufWriter::new();
    sidecar.text("general.architecture", SIDECAR_ARCHITECTURE);
    assert_refused(&sidecar, Status::Unsupported, "a sidecar");
    assert_refused(&GgufWriter::new(), Status::Format, "general.architecture");
}

#[test]
fn names_keys_that_are_missing_or_wrong() {
    let mut writer = GgufWriter::new();
    writer.text("general.architecture", "llama");
    assert_refused(&writer, Status::Format, "\"llama.block_count\" is missing");
    writer.u32("llama.block_count", 1);
    assert_refused(&writer, Status::Format, "\"llama.attention.head_count\" is missing");
    writer.u32("llama.attention.head_count", 3);
    assert_refused(&writer, Status::Format, "\"llama.embedding_length\" is missing");
    writer.u32("llama.embedding_length", 32);
    assert_refused(&writer, Status::Format, "expected a multiple of 3 heads");

    for (key, value_type, value, message) in [
        ("context_length", value_type::F32, &1f32.to_le_bytes()[..], "is a float"),
        ("context_length", value_type::I32, &(-1i32).to_le_bytes(), "is -1"),
        ("context_length", value_type::U64, &(1u64 << 32).to_le_bytes(), "is 4294967296"),
        ("rope.freq_base", value_type::F32, &f32::NAN.to_le_bytes(), "not finite"),
        ("rope.freq_base", value_type::F32, &0f32.to_le_bytes(), "base frequency is 0"),
        ("attention.key_length", value_type::U32, &(1u32 << 30).to_le_bytes(), "head_dim_k is"),
        ("rope.dimension_count", value_type::U32, &9u32.to_le_bytes(), "n_rot is 9"),
        ("rope.dimension_count", value_type::U32, &12u32.to_le_bytes(), "n_rot is 12"),
        ("rope.scaling.type", value_type::U32, &1u32.to_le_bytes(), "expected a string"),
    ] {
        let mut writer = GgufWriter::new();
        writer
            .text("general.architecture", "qwen2")
            .u32("qwen2.block_count", 1)
            .u32("qwen2.embedding_length", 32)
            .u32("qwen2.attention.head_count", 4)
            .entry(&format!("qwen2.{key}"), value_type, value);
        assert_refused(&writer, Status::Format, message);
    }
}

#[test]
fn a_long_tokenizer_is_not_decoded() {
    let mut writer = model_keys("llama");
    writer.u32_array("tokenizer.ggml.token_type", &vec![1; 200_000]);
    writer.u32_array("general.something.long", &vec![1; 200_000]);
    assert_eq!(geometry_of(&writer).unwrap(), small_geometry());
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32_array("llama.attention.head_count", &[1; 5000]);
    assert_refused(&writer, Status::Format, "more than 4096 values");
}

#[test]
fn an_error_names_the_file() {
    let error = Model::from_gguf(Path::new("/nowhere/at all.gguf"), None).unwrap_err();
    assert_eq!(error.status, Status::Io);
    assert!(error.message.starts_with("\"/nowhere/at all.gguf\": "), "{error}");
    let error = Model::from_gguf(&std::env::temp_dir(), None).unwrap_err();
    assert_eq!(error.status, Status::Io, "{error}");
    let empty = TemporaryFile::with(b"");
    let error = Model::from_gguf(empty.path(), None).unwrap_err();
    assert!(error.message.contains("empty"), "{error}");
}

#[test]
fn the_fingerprint_follows_header_and_weights() {
    let fingerprint = |weights: &[f32], name: &str| {
        let mut writer = model_keys("llama");
        writer.text("general.name", name);
        writer.f32_tensor("weights", &[weights.len() as u64], weights);
        let file = TemporaryFile::with(&writer.finish());
        Model::from_gguf(file.path(), None).unwrap().fingerprint
    };
    let weights = vec![0.5; 10_000];
    let original = fingerprint(&weights, "a");
    assert_eq!(original, fingerprint(&weights, "a"));
    assert_ne!(original, fingerprint(&weights, "b"));
    let changed = |index: usize| {
        let mut weights = weights.clone();
        weights[index] = 0.25;
        fingerprint(&weights, "a")
    };
    assert_ne!(original, changed(0));
    assert_ne!(original, changed(9_999));
    // The documented limit: the middle of a tensor is not read.
    assert_eq!(original, changed(5_000));
}

/// Whatever a damaged file says, reading it ends in a result. The seed is fixed, so that a failure
/// comes again.
#[test]
fn damaged_files_end_in_errors_never_in_panics() {
    let mut rich = model_keys("llama");
    rich.text("llama.rope.scaling.type", "yarn")
        .f32("llama.rope.scaling.factor", 4.0)
        .u32_array("llama.attention.head_count_kv_list", &[2, 2])
        .u32("general.alignment", 32);
    rich.f32_tensor("rope_freqs.weight", &[4], &[1.0; 4]);
    let mut small = GgufWriter::new();
    small.text("general.architecture", "llama").u32("llama.block_count", 2);
    let seeds = [rich.finish(), model_keys("qwen2").finish(), small.finish()];

    let mut accepted = 0;
    let mut random = Mutations::new(0x5e4b);
    const ROUNDS: usize = 40_000;
    for round in 0..ROUNDS {
        let file = random.mutate(&seeds[round % seeds.len()]);
        take_largest_request();
        let result = Header::scan(&file).and_then(|header| read_geometry(&header));
        let largest = take_largest_request();
        assert!(largest < 1 << 17, "{largest} bytes for a file of {}", file.len());
        if let Ok((_, geometry)) = result {
            geometry.validate().unwrap();
            accepted += 1;
        }
    }
    // Some damage is harmless (a bit of the context length); most is not.
    assert!(accepted > 0 && accepted < ROUNDS / 2, "{accepted} of {ROUNDS} accepted");
}
