//! Hand-made models for the tests of this folder.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::geometry::{Geometry, LayerGeometry, RopeKind};
use super::gguf_writer::GgufWriter;
use super::preflight::value_type;

/// A model of two layers, 4 query heads, 2 KV heads and keys of 8 dimensions, as `model_keys`
/// describes it.
pub(crate) fn small_geometry() -> Geometry {
    Geometry {
        layers: vec![LayerGeometry { n_heads: 4, n_kv_heads: 2 }; 2],
        key_dim: 8,
        value_dim: 8,
        rope: RopeKind::Norm,
        n_rot: 8,
        rope_frequencies: vec![1.0, 0.1, 0.01, 0.001],
        attention_scale: 1.0 / 8f32.sqrt(),
        n_ctx_train: 2048,
    }
}

/// The keys that every model has, under that architecture.
pub(crate) fn model_keys(architecture: &str) -> GgufWriter {
    let mut writer = GgufWriter::new();
    let key = |suffix: &str| format!("{architecture}.{suffix}");
    writer
        .text("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("embedding_length"), 32)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .u32(&key("context_length"), 2048);
    writer
}

impl GgufWriter {
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.entry(key, value_type::F32, &value.to_le_bytes())
    }

    pub fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.entry(key, value_type::BOOL, &[u8::from(value)])
    }
}

/// A file that goes when the test does.
pub(crate) struct TemporaryFile(PathBuf);

impl TemporaryFile {
    /// A name nobody else uses; the file itself is not made.
    pub fn unwritten() -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("sekv-test-{}-{number}.gguf", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub fn with(bytes: &[u8]) -> Self {
        let file = Self::unwritten();
        std::fs::write(&file.0, bytes).expect("a temporary file can be written");
        file
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
