//! The C ABI. One file for each object of `include/sekv.h`; no logic lives here.
//!
//! Every export goes through `boundary`: no panic leaves it, every failure has a status and a
//! message, and a context that is used wrongly (two threads at once, a forked child) says so.
//!
//! The header is generated from these files by cbindgen (`tests/header.rs`), their comments
//! included: what stands on an export is written for a C programmer.

#![expect(non_camel_case_types, reason = "these are the names of the C header")]
#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "shapes such as [n_tok] are the header's, and no links"
)]
#![expect(
    clippy::missing_safety_doc,
    reason = "the header says for each function what its pointers must be; it would repeat there"
)]

pub mod batch;
mod boundary;
pub mod context;
pub mod log;
pub mod model;
pub mod params;
pub mod pass;
pub mod plan;
pub mod sequence;
mod sized;
pub mod state;
pub mod stats;
pub mod status;
