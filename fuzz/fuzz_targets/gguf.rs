//! Any bytes as a model file: a model that can be, or one sentence that says what is wrong.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sekv::error::Status;
use sekv::model::Model;
use sekv_fuzz::{MemoryFile, check_refusal};

fuzz_target!(|bytes: &[u8]| {
    let file = MemoryFile::new(bytes);
    match Model::from_gguf(&file.path(), None) {
        Ok(model) => {
            model.geometry.validate().expect("a model that was accepted is one");
            assert_ne!(model.fingerprint, [0; 32]);
        }
        Err(error) => check_refusal(&error, &[Status::Format, Status::Unsupported]),
    }
});
