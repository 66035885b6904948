//! libsekv: a resolution-adaptive KV cache with hierarchical semantic memory.
//!
//! Dependencies point one way: `capi` -> `cache` -> `routing` -> (`zoom`, `attend`) ->
//! (`segment`, `span`, `summary`, `basis`) -> (`store`, `kernels`) -> `model`, `error`.

pub mod basis;
pub mod error;
pub mod kernels;
pub mod model;
pub mod segment;
pub mod span;
pub mod summary;
pub mod zoom;
