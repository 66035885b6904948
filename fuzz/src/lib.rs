//! What the fuzz targets and the generator of their seeds have in common.

#[path = "../../tests/common/mod.rs"]
pub mod common;

pub mod states;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::PathBuf;

use sekv::error::{Error, Status};
use sekv::model::{Model, ModelParams, RopeKind};

/// Bytes as a file: the readers take paths.
pub struct MemoryFile(File);

impl MemoryFile {
    pub fn new(bytes: &[u8]) -> Self {
        // SAFETY: the name is a text that ends with zero.
        let number = unsafe { libc::memfd_create(c"input".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(number >= 0, "no file in memory: {}", io::Error::last_os_error());
        // SAFETY: the file was opened above and has no other owner.
        let mut file = unsafe { File::from_raw_fd(number) };
        file.write_all(bytes).expect("a file in memory can be written");
        Self(file)
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// What each refusal of a file must be: a sentence in one line, of a kind that blames the file.
pub fn check_refusal(error: &Error, kinds: &[Status]) {
    assert!(kinds.contains(&error.status), "{error:?}");
    assert!(error.message.len() > 10 && !error.message.contains('\n'), "{error:?}");
}

/// The model that sidecars are read for.
pub fn sidecar_model() -> Model {
    let params = ModelParams {
        n_layer: 2,
        n_head: 4,
        n_head_kv: 2,
        head_dim_k: 8,
        rope: RopeKind::Norm,
        fingerprint: [7; 32],
        ..ModelParams::default()
    };
    Model::from_params(&params).expect("this is a model")
}
