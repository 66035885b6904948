//! `include/sekv.h` is what the C layer's sources say, and compilers of each standard accept it.

use std::path::Path;
use std::process::Command;

/// The C layer's files, in the order in which a reader of the header meets them.
const SOURCES: [&str; 11] = [
    "status", "model", "params", "log", "context", "batch", "plan", "pass", "sequence", "state",
    "stats",
];

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in SOURCES {
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

/// A program that includes the header twice and uses a struct, an enum and a function of it.
const PROGRAM: &str = r#"
#include "sekv.h"
#include "sekv.h"
sekv_status begin(sekv_context *context, const int32_t *pos);
sekv_status begin(sekv_context *context, const int32_t *pos) {
    sekv_batch batch;
    batch.struct_size = sizeof batch;
    batch.n_tok = SEKV_OK + 1;
    batch.pos = pos;
    batch.n_seq_id = 0;
    batch.seq_id = 0;
    return sekv_begin(context, &batch);
}
"#;

#[test]
fn compilers_of_every_standard_accept_it_twice() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (compiler, extension, standards) in [
        ("cc", "c", &["c99", "c11", "c17"][..]),
        ("c++", "cpp", &["c++11", "c++14", "c++17", "c++20"][..]),
    ] {
        let source = folder.join(format!("twice.{extension}"));
        std::fs::write(&source, PROGRAM).unwrap();
        for standard in standards {
            let output = Command::new(compiler)
                .arg(format!("-std={standard}"))
                .args(["-pedantic", "-Wall", "-Wextra", "-Werror", "-Wundef", "-fsyntax-only"])
                .arg("-I")
                .arg(root.join("include"))
                .arg(&source)
                .output()
                .unwrap_or_else(|e| panic!("{compiler}: {e}"));
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{compiler} -std={standard}: {said}");
        }
    }
}

#[test]
fn every_function_says_its_statuses_and_threads() {
    let header = generated();
    let functions = header.split("extern \"C\" {").nth(1).unwrap();
    for part in functions.split(";\n").filter(|part| part.contains("sekv_") && part.contains('(')) {
        assert!(part.contains("Threads: "), "no word of threads: {part}");
        assert!(part.contains("@return") || part.contains("Cannot fail"), "no statuses: {part}");
    }
}
