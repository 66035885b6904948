//! Gives the shared library its soname: hosts load the version whose ABI they were linked with.
//! Before 1.0, a minor version may change the ABI; from then on the major version says it.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is_elf = matches!(
        var("CARGO_CFG_TARGET_OS").as_deref(),
        Ok("linux" | "android" | "freebsd" | "netbsd" | "openbsd" | "dragonfly")
    );
    let part = |name| var(name).unwrap_or_default();
    let version = match (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR")) {
        (major, minor) if major == "0" => format!("0.{minor}"),
        (major, _) => major,
    };
    if is_elf {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsekv.so.{version}");
    }
}
