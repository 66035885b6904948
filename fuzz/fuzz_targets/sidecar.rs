//! Any bytes as a sidecar: what is accepted serves a context, and is read back as it was written.

#![no_main]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use sekv::cache::Context;
use sekv::error::{Result, Status};
use sekv::model::{Model, Sidecar};
use sekv_fuzz::common::Random;
use sekv_fuzz::{MemoryFile, check_refusal, sidecar_model, states};

static MODEL: LazyLock<Model> = LazyLock::new(sidecar_model);

fn read(path: &Path) -> Result<Sidecar> {
    Sidecar::read(path, &MODEL.geometry, &MODEL.fingerprint)
}

fuzz_target!(|bytes: &[u8]| {
    let file = MemoryFile::new(bytes);
    let sidecar = match read(&file.path()) {
        Ok(sidecar) => sidecar,
        Err(error) => return check_refusal(&error, &[Status::Format, Status::Unsupported]),
    };
    let path = std::env::temp_dir().join(format!("sekv-fuzz-{}.gguf", std::process::id()));
    sidecar.write(&path, &MODEL.geometry, Some(&MODEL.fingerprint)).expect("it can be written");
    let again = read(&path);
    std::fs::remove_file(&path).expect("a file that was just written can be removed");
    assert_eq!(again.as_ref(), Ok(&sidecar));

    for params in [states::params(0), states::params(states::PAPER)] {
        let model = Model { sidecar: Some(sidecar.clone()), ..MODEL.clone() };
        let mut context = Context::new(Arc::new(model), params).expect("it serves a context");
        let mut random = Random(1);
        states::pass(&mut context, &mut random, 0, 12, true);
        states::pass(&mut context, &mut random, 0, 1, true);
    }
});
