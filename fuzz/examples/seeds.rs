//! Writes the seeds of all fuzz targets to fuzz/seeds: `make seeds`.
//!
//! Inputs that once broke something lie there too; they are kept.

use std::path::{Path, PathBuf};

use sekv::model::{GateMlp, GgufWriter, LayerRouting, Linear, RoutingWeights, Sidecar};
use sekv_fuzz::common::Random;
use sekv_fuzz::sidecar_model;
use sekv_fuzz::states::{ALL, CODED, PAPER, UNREPAIRED, new_context, pass, save};

fn main() {
    models();
    sidecars();
    states();
    operations();
}

fn folder(target: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    folder
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    std::fs::write(folder(target).join(name), bytes).expect("the file can be written");
}

// Value types of GGUF.
const FLOAT: u32 = 6;
const FLAG: u32 = 7;
const ARRAY: u32 = 9;
const STRING: u32 = 8;

/// What every model says.
fn model(architecture: &str) -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", architecture)
        .u32(&format!("{architecture}.block_count"), 2)
        .u32(&format!("{architecture}.embedding_length"), 32)
        .u32(&format!("{architecture}.attention.head_count"), 4);
    writer
}

fn models() {
    write("gguf", "llama", &model("llama").u32("llama.attention.head_count_kv", 2).finish());
    write("gguf", "no-rope", &model("gpt2").finish());
    let mut by_layer = model("qwen3");
    by_layer
        .u32_array("qwen3.attention.head_count_kv", &[1, 4])
        .u32("qwen3.attention.key_length", 16)
        .u32("qwen3.attention.value_length", 24)
        .u32("qwen3.rope.dimension_count", 12)
        .entry("qwen3.attention.scale", FLOAT, &0.5f32.to_le_bytes());
    write("gguf", "by-layer", &by_layer.finish());

    let mut yarn = model("llama");
    yarn.u32("general.alignment", 32)
        .u32("llama.context_length", 2048)
        .text("llama.rope.scaling.type", "yarn")
        .u32("llama.rope.scaling.original_context_length", 512)
        .f32_tensor("rope_freqs.weight", &[4], &[1.0, 1.0, 2.0, 8.0]);
    for (suffix, value) in [
        ("freq_base", 1e6f32),
        ("scaling.factor", 4.0),
        ("scaling.yarn_beta_fast", 32.0),
        ("scaling.yarn_beta_slow", 1.0),
        ("scaling.yarn_ext_factor", 1.0),
    ] {
        yarn.entry(&format!("llama.rope.{suffix}"), FLOAT, &value.to_le_bytes());
    }
    write("gguf", "yarn", &yarn.finish());

    // Whatever is looked at, at the value that changes nothing.
    let mut keys = model("granite");
    for suffix in [
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.sliding_window",
        "attention.shared_kv_layers",
        "attention.indexer.top_k",
        "ssm.state_size",
        "wkv.head_size",
        "nextn_predict_layers",
    ] {
        keys.u32(&format!("granite.{suffix}"), 0);
    }
    for suffix in ["attention.max_alibi_bias", "attn_logit_softcapping", "rope.scaling.alpha"] {
        keys.entry(&format!("granite.{suffix}"), FLOAT, &[0; 4]);
    }
    keys.text("general.type", "model")
        .u32("split.count", 1)
        .u32_array("granite.rope.dimension_sections", &[0, 0, 0, 0])
        .entry("granite.attention.causal", FLAG, &[1])
        .entry("granite.rope.scaling.finetuned", FLAG, &[0])
        .text("granite.rope.scaling.type", "linear");
    write("gguf", "every-key", &keys.finish());

    let mut tensors = model("phi3");
    let tokens = b"\x08\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0a\x02\0\0\0\0\0\0\0bc";
    assert_eq!(tokens[..4], STRING.to_le_bytes());
    tensors
        .entry("tokenizer.ggml.tokens", ARRAY, tokens)
        .tensor("blk.0.attn_k.weight", &[32, 2], 8, vec![3; 2 * 34])
        .tensor("blk.0.attn_q.weight", &[256, 1, 1, 1], 12, vec![5; 144])
        .tensor("rope_freqs.weight", &[4], 1, [0, 0x3c].repeat(4));
    write("gguf", "tensors", &tensors.finish());
}

fn sidecars() {
    let model = sidecar_model();
    let mut random = Random(1);
    let layers = (0..2)
        .map(|_| LayerRouting { projection: random.normals(4 * 2 * 8), threshold: vec![0.5; 4] });
    let routing = Some(RoutingWeights { summary_dim: 2, layers: layers.collect() });
    let mut linear = |cols: usize, rows: usize| Linear {
        rows,
        cols,
        weight: random.normals(rows * cols),
        bias: random.normals(rows),
    };
    let layers = [linear(10, 3), linear(3, 3), linear(3, 2)];
    let gate = Some(GateMlp { r_max: 2, input_dim: 10, layers });
    let dense_layers = Some(vec![1]);
    for (name, sidecar) in [
        ("empty", Sidecar::default()),
        ("routing", Sidecar { routing: routing.clone(), ..Sidecar::default() }),
        ("gate", Sidecar { gate: gate.clone(), ..Sidecar::default() }),
        ("dense-layers", Sidecar { dense_layers: dense_layers.clone(), ..Sidecar::default() }),
        ("everything", Sidecar { routing, gate, dense_layers }),
    ] {
        let fingerprint = (name == "everything").then_some(&model.fingerprint);
        sidecar
            .write(&folder("sidecar").join(name), &model.geometry, fingerprint)
            .expect("the sidecar can be written");
    }
}

fn states() {
    for (routing, kind) in
        [("ladder", 0), ("ladder-coded", CODED), ("paper", PAPER), ("paper-coded", PAPER | CODED)]
    {
        let write = |name: &str, bits: u8, state: Vec<u8>| {
            let input = [vec![kind | bits], state].concat();
            write("state", &format!("{routing}-{name}"), &input);
        };
        let mut context = new_context(kind);
        let mut random = Random(1);
        pass(&mut context, &mut random, 0, 4, true);
        write("open", 0, save(&context, 0));
        pass(&mut context, &mut random, 0, 12, true);
        pass(&mut context, &mut random, 0, 1, true);
        write("sealed", 0, save(&context, 0));
        context.copy(0, 1, -1, -1).expect("a sequence can be copied");
        context.remove(0, 5, 7).expect("positions can be removed");
        context.shift(0, 9, -1, 4).expect("positions can be shifted");
        write("moved", UNREPAIRED, save(&context, 0));
        pass(&mut context, &mut random, 1, 2, true);
        write("all", ALL, save(&context, -1));
    }
}

/// Choices of operations: any bytes are some.
fn operations() {
    let mut random = Random(1);
    for number in 0..12 {
        let n = 24 + 8 * number;
        let bytes: Vec<u8> = (0..n).map(|_| random.below(256) as u8).collect();
        write("operations", &format!("random-{number}"), &bytes);
    }
}
