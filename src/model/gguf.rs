//! The attention of a model, read from its GGUF file.

use std::path::Path;

use super::architecture::{Architecture, ScoreScale};
use super::fingerprint;
use super::geometry::{Geometry, LayerGeometry, MAX_LAYERS, RopeKind};
use super::mapped_file::{MappedFile, in_file};
use super::metadata::{Counts, Metadata};
use super::preflight::{Header, TensorInfo, quoted};
use super::rope::{RopeScaling, Yarn, frequencies};
use super::sidecar::ARCHITECTURE as SIDECAR_ARCHITECTURE;
use super::tensor_values::read_floats;
use crate::error::{Error, Result, Status, fail};

/// What a model file says.
#[derive(Debug)]
pub(crate) struct ModelFile {
    pub architecture: String,
    pub geometry: Geometry,
    pub fingerprint: [u8; 32],
}

impl ModelFile {
    pub fn read(path: &Path) -> Result<Self> {
        let read = || {
            let file = MappedFile::open(path)?;
            let header = Header::scan(file.bytes())?;
            let (architecture, geometry) = read_geometry(&header)?;
            file.expect_scattered_reads();
            let fingerprint = fingerprint::of_model(&header, file.bytes().len(), &geometry);
            Ok(Self { architecture: architecture.name.to_owned(), geometry, fingerprint })
        };
        read().map_err(|e| in_file(path, e))
    }
}

/// The attention that a header describes, or why it cannot be served.
pub(crate) fn read_geometry(header: &Header) -> Result<(Architecture, Geometry)> {
    let metadata = Metadata::decode(header)?;
    refuse_other_contents(&metadata)?;
    let Some(name) = metadata.text("general.architecture")? else {
        fail!(Format, "the key \"general.architecture\" is missing");
    };
    let model = ModelKeys { architecture: Architecture::named(name)?, metadata: &metadata, header };
    model.refuse_what_cannot_be_served()?;
    let geometry = model.geometry(model.layers()?)?;
    Ok((model.architecture, geometry))
}

/// Files that are no whole model.
fn refuse_other_contents(metadata: &Metadata) -> Result<()> {
    if let Some(parts) = metadata.count("split.count")?.filter(|&parts| parts > 1) {
        fail!(
            Unsupported,
            "this is one of {parts} parts of a split model, expected one whole file (merge them \
             with llama-gguf-split)"
        );
    }
    if let Some(kind) = metadata.text("general.type")?.filter(|&kind| kind != "model") {
        fail!(Unsupported, "the file holds {}, expected a \"model\"", quoted(kind));
    }
    if metadata.text("general.architecture")? == Some(SIDECAR_ARCHITECTURE) {
        fail!(Unsupported, "the file is a sidecar, expected a model");
    }
    Ok(())
}

/// The keys of one model, which all begin with its architecture's name.
struct ModelKeys<'a> {
    architecture: Architecture,
    metadata: &'a Metadata,
    header: &'a Header<'a>,
}

impl ModelKeys<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture.name)
    }

    fn count(&self, suffix: &str) -> Result<Option<usize>> {
        self.metadata.count(&self.key(suffix))
    }

    fn float(&self, suffix: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.key(suffix))
    }

    fn refuse_what_cannot_be_served(&self) -> Result<()> {
        let name = self.architecture.name;
        let refuse = |what: &str, sign: &str| -> Result<()> {
            fail!(Unsupported, "this {name} model has {what} ({sign}), which is not supported")
        };
        let counts = [
            ("attention.kv_lora_rank", "multi-head latent attention (MLA)"),
            ("attention.key_length_mla", "multi-head latent attention (MLA)"),
            ("attention.sliding_window", "sliding-window attention"),
            ("attention.shared_kv_layers", "layers that share a KV cache"),
            ("attention.indexer.top_k", "sparse attention by an indexer"),
            ("ssm.state_size", "recurrent layers"),
            ("wkv.head_size", "recurrent layers"),
        ];
        for (suffix, what) in counts {
            if self.count(suffix)?.is_some_and(|count| count > 0) {
                refuse(what, &self.key(suffix))?;
            }
        }
        let floats = [
            ("attention.max_alibi_bias", "ALiBi position biases"),
            ("attn_logit_softcapping", "attention logit softcapping"),
            ("rope.scaling.alpha", "NTK-aware RoPE scaling"),
        ];
        for (suffix, what) in floats {
            if self.float(suffix)?.is_some_and(|float| float > 0.0) {
                refuse(what, &self.key(suffix))?;
            }
        }
        let sections_key = self.key("rope.dimension_sections");
        let sections = match self.metadata.counts(&sections_key)? {
            Some(Counts::Same(count)) => count,
            Some(Counts::Each(counts)) => counts.into_iter().max().unwrap_or(0),
            None => 0,
        };
        if sections > 0 {
            refuse("multi-section RoPE (mrope)", &sections_key)?;
        }
        let causal_key = self.key("attention.causal");
        if self.metadata.flag(&causal_key)? == Some(false) {
            refuse("attention that is not causal", &causal_key)?;
        }
        for tensor in &self.header.tensors {
            if tensor.name.starts_with("rope_factors_") {
                refuse("LongRoPE factors", tensor.name)?;
            }
            if tensor.name.contains(".attn_sinks") {
                refuse("attention sinks", tensor.name)?;
            }
        }
        // llama.cpp knows the two Baichuan models apart by their depth alone.
        if name == "baichuan" && self.count("block_count")? == Some(40) {
            refuse("ALiBi position biases", "its 40 layers")?;
        }
        Ok(())
    }

    fn layers(&self) -> Result<Vec<LayerGeometry>> {
        let n_blocks = self.metadata.required_count(&self.key("block_count"))?;
        // The last blocks may only draft tokens; they take no part in a pass.
        let n_drafting = self.count("nextn_predict_layers")?.unwrap_or(0);
        let n_layer = n_blocks.checked_sub(n_drafting).filter(|&n| n > 0 && n_blocks <= MAX_LAYERS);
        let Some(n_layer) = n_layer else {
            fail!(
                Format,
                "{} is {n_blocks} with {n_drafting} drafting layers, expected 1 to {MAX_LAYERS} \
                 layers",
                quoted(&self.key("block_count"))
            );
        };
        let heads_key = self.key("attention.head_count");
        let Some(heads) = self.metadata.counts(&heads_key)? else {
            fail!(Format, "the key {} is missing", quoted(&heads_key));
        };
        let kv_heads_key = self.key("attention.head_count_kv");
        let kv_heads = self.metadata.counts(&kv_heads_key)?.unwrap_or_else(|| heads.clone());
        // An array has a value for each block, those that draft at its end.
        let heads = heads.by_layer(&heads_key, n_blocks)?;
        let kv_heads = kv_heads.by_layer(&kv_heads_key, n_blocks)?;
        let layers = heads.into_iter().zip(kv_heads).take(n_layer);
        let layers = layers.map(|(n_heads, n_kv_heads)| LayerGeometry { n_heads, n_kv_heads });
        let layers: Vec<_> = layers.collect();
        if let Some(layer) = layers.iter().position(|l| l.n_heads == 0 || l.n_kv_heads == 0) {
            fail!(Unsupported, "layer {layer} has no attention heads, which is not supported");
        }
        Ok(layers)
    }

    fn geometry(&self, layers: Vec<LayerGeometry>) -> Result<Geometry> {
        let n_heads = layers.first().map_or(0, |layer| layer.n_heads);
        let key_dim = self.head_dim("attention.key_length", n_heads)?;
        let rope = self.rope_kind()?;
        let n_rot = match rope {
            RopeKind::None => 0,
            RopeKind::Norm | RopeKind::Neox => {
                self.count("rope.dimension_count")?.unwrap_or(key_dim)
            }
        };
        let attention_scale = match self.float("attention.scale")?.filter(|&scale| scale != 0.0) {
            Some(scale) => scale as f32,
            None => match self.architecture.scale {
                ScoreScale::InverseRoot => 1.0 / (key_dim as f32).sqrt(),
                ScoreScale::One => 1.0,
            },
        };
        let mut geometry = Geometry {
            layers,
            key_dim,
            value_dim: self.head_dim("attention.value_length", n_heads)?,
            rope,
            n_rot,
            rope_frequencies: Vec::new(),
            attention_scale,
            n_ctx_train: self.count("context_length")?.unwrap_or(0),
        };
        // Before the frequencies, whose number depends on what is checked here. The rules are
        // those for parameters; here a file breaks them.
        geometry.validate().map_err(|e| Error::new(Status::Format, e.message))?;
        if rope != RopeKind::None {
            geometry.rope_frequencies = self.rope_frequencies(n_rot, geometry.n_ctx_train)?;
        }
        Ok(geometry)
    }

    /// A head's dimensions: its own key, else the embedding shared out among the heads.
    fn head_dim(&self, suffix: &str, n_heads: usize) -> Result<usize> {
        if let Some(dim) = self.count(suffix)?.filter(|&dim| dim > 0) {
            return Ok(dim);
        }
        let embedding = self.metadata.required_count(&self.key("embedding_length"))?;
        if n_heads == 0 || embedding % n_heads != 0 {
            fail!(
                Format,
                "the embedding has {embedding} dimensions and {} is missing, expected a multiple \
                 of {n_heads} heads",
                quoted(&self.key(suffix))
            );
        }
        Ok(embedding / n_heads)
    }

    fn rope_kind(&self) -> Result<RopeKind> {
        // Granite switches RoPE off by this key, whatever it means elsewhere.
        if self.architecture.name == "granite" {
            let finetuned = self.metadata.flag("granite.rope.scaling.finetuned")?;
            if finetuned == Some(false) {
                return Ok(RopeKind::None);
            }
        }
        Ok(self.architecture.rope)
    }

    fn rope_frequencies(&self, n_rot: usize, n_ctx_train: usize) -> Result<Vec<f32>> {
        let base = self.float("rope.freq_base")?.unwrap_or(10_000.0);
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.float("rope.scale_linear")?.unwrap_or(0.0),
        };
        // 0 stands for no scaling.
        let scale = if factor == 0.0 { 1.0 } else { 1.0 / factor };
        let scaling_key = self.key("rope.scaling.type");
        let scaling = match self.metadata.text(&scaling_key)? {
            None | Some("linear") => RopeScaling::Uniform { scale },
            Some("none") => RopeScaling::Uniform { scale: 1.0 },
            Some("yarn") => {
                let original = self.count("rope.scaling.original_context_length")?;
                let original_context = original.filter(|&n| n > 0).unwrap_or(n_ctx_train);
                if original_context == 0 {
                    fail!(Format, "YaRN scaling needs an original context length, found none");
                }
                RopeScaling::Yarn(Yarn {
                    scale,
                    original_context,
                    beta_fast: self.yarn_number("beta_fast", 32.0)?,
                    beta_slow: self.yarn_number("beta_slow", 1.0)?,
                    extrapolation: self.yarn_number("ext_factor", 1.0)?,
                })
            }
            Some(other) => fail!(
                Unsupported,
                "{} is {}, which is not supported (none, linear and yarn are)",
                quoted(&scaling_key),
                quoted(other)
            ),
        };
        let factors = match self.header.tensor("rope_freqs.weight") {
            Some(tensor) => Some(self.rope_factors(tensor, n_rot)?),
            None => None,
        };
        frequencies(n_rot, base, scaling, factors.as_deref())
    }

    /// A parameter of YaRN; absent and negative both mean the default, as in llama.cpp.
    fn yarn_number(&self, name: &str, default: f64) -> Result<f64> {
        let number = self.float(&format!("rope.scaling.yarn_{name}"))?;
        Ok(number.filter(|&number| number >= 0.0).unwrap_or(default))
    }

    fn rope_factors(&self, tensor: &TensorInfo, n_rot: usize) -> Result<Vec<f32>> {
        let n_pairs = n_rot as u64 / 2;
        read_floats(tensor, &[n_pairs])
    }
}

#[cfg(test)]
mod tests;
