//! Hosts in C: `tests/c` and `ffi_examples/c`, compiled as a host would be and run against the
//! library as a host would load it.

#![cfg(unix)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const TIME_LIMIT: Duration = Duration::from_secs(300);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file that cargo has built beside this test.
fn built(name: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// As build.rs says.
fn soname() -> String {
    match (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR")) {
        ("0", minor) => format!("libsekv.so.0.{minor}"),
        (major, _) => format!("libsekv.so.{major}"),
    }
}

/// Compiles a program into a folder of its own, which has the library under its soname.
fn compile(source: &str, link: &[&str]) -> PathBuf {
    let name = Path::new(source).file_stem().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let library = folder.join(soname());
    let _ = std::fs::remove_file(&library);
    std::os::unix::fs::symlink(built("libsekv.so"), &library).unwrap();
    let program = folder.join(name);
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    compiler.args(["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O1", "-g"]);
    compiler.arg("-I").arg(root().join("include")).arg(root().join(source));
    if link.is_empty() {
        let rpath = format!("-Wl,-rpath,{}", folder.display());
        compiler.arg(&library).arg(rpath).args(["-lm", "-lpthread"]);
    } else {
        compiler.args(link);
    }
    let output = compiler.arg("-o").arg(&program).output().unwrap();
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs a program, not for ever.
fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // cargo's own would find an older build first.
    command.env_remove("LD_LIBRARY_PATH");
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > TIME_LIMIT {
            child.kill().unwrap();
            panic!("{} has not ended after {TIME_LIMIT:?}", program.display());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// The program finds everything in order, and neither it nor the library has said anything.
fn passes(name: &str) {
    let output = run(&compile(&format!("tests/c/{name}.c"), &[]), &[]);
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = [said(&output.stdout), said(&output.stderr)];
    assert!(output.status.success(), "{name}: {} {said:?}", output.status);
    assert_eq!(said, ["", ""], "{name} wrote to its host's stdout or stderr");
}

#[test]
fn wrong_arguments_are_errors_that_name_them() {
    passes("arguments");
}

#[test]
fn structs_of_older_and_newer_hosts_are_understood() {
    passes("struct_sizes");
}

#[test]
fn calls_out_of_order_and_plans_that_are_gone_are_refused() {
    passes("order");
}

#[test]
fn models_of_every_shape_attend_and_other_files_are_refused() {
    passes("models");
}

#[test]
fn both_routings_serve_surprisal_of_every_kind() {
    passes("routings");
}

#[test]
fn views_take_strides_and_types_and_refuse_what_does_not_fit() {
    passes("views");
}

#[test]
fn batches_take_several_sequences_and_refuse_wrong_positions() {
    passes("batches");
}

#[test]
fn sequences_are_copied_cut_and_moved_without_touching_each_other() {
    passes("sequences");
}

#[test]
fn states_are_saved_and_loaded_and_a_full_disk_is_told() {
    passes("state");
}

#[test]
fn threads_have_their_own_contexts_or_are_told() {
    passes("threads");
}

#[test]
fn a_forked_child_is_told_and_does_not_hang() {
    passes("forked");
}

#[test]
fn objects_end_in_any_order_and_the_host_keeps_its_process() {
    passes("lifetimes");
}

fn the_example_runs(link: &[&str], arguments: &[&str]) {
    let output = run(&compile("ffi_examples/c/minimal.c", link), arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for line in ["fast tier", "slow tier", "largest difference to dense attention"] {
        assert!(text.contains(line), "'{line}' is not in:\n{text}");
    }
}

#[test]
fn the_example_is_close_to_dense_attention_with_both_libraries() {
    the_example_runs(&[], &[]);
    let archive = built("libsekv.a");
    let link = [archive.to_str().unwrap(), "-lpthread", "-ldl", "-lm"];
    the_example_runs(&link, &["1100", "4"]);
}

fn tool(name: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(name).args(arguments).arg(file).output();
    let output = output.unwrap_or_else(|e| panic!("{name} (of binutils): {e}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Names of functions that the header declares: those at the start of a `name(`.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("include/sekv.h")).unwrap();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let lines = header.lines().filter(|line| !line.starts_with([' ', '/', '#']));
    let before_bracket = lines.filter(|line| !line.starts_with("typedef"));
    before_bracket
        .filter_map(|line| line.split_once('(').map(|(before, _)| before))
        .map(|before| before.rsplit(|c| !is_word(c)).next().unwrap_or("").to_owned())
        .collect()
}

#[cfg(target_os = "linux")]
#[test]
fn the_shared_library_exports_what_the_header_declares_and_no_more() {
    let library = built("libsekv.so");
    let symbols = tool("nm", &["-D", "--defined-only"], &library);
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .collect();
    assert_eq!(exported, declared());
    assert!(exported.len() > 25);
    let dynamic = tool("readelf", &["-d"], &library);
    assert!(dynamic.contains(&format!("[{}]", soname())), "{dynamic}");
}
