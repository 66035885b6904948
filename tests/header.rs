//! `include/sekv.h` is what the C layer's sources say, and compilers of each standard accept it.

use std::path::Path;

/// The C layer's files, in the order in which a reader of the header meets them.
const SOURCES: [&str; 9] =
    ["status", "model", "params", "log", "context", "batch", "plan", "pass", "sequence"];

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in SOURCES.iter().chain(&["stats"]) {
        builder = builder.with_src(root.join(format!("src/capi/{name}.rs")));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_header_is_not_stale() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/sekv.h");
    let header = generated();
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &header).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == header,
        "include/sekv.h is not what src/capi says: run `UPDATE_HEADER=1 cargo test --test header`"
    );
}
