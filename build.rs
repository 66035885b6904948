//! Gives the shared library its soname: hosts load the version whose ABI they were linked with.
//! Before 1.0, a minor version may change the ABI; from then on the major version says it.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is_elf = matches!(
        var("CARGO_CFG_TARGET_OS").as_deref(),
        Ok("linux" | "android" | "freebsd" | "netbsd" | "openbsd" | "dragonfly")
    );
    if let (true, Ok(major), Ok(minor)) =
        (is_elf, var("CARGO_PKG_VERSION_MAJOR"), var("CARGO_PKG_VERSION_MINOR"))
    {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsekv.so.{major}.{minor}");
    }
}
