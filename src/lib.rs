//! libsekv: a resolution-adaptive KV cache with hierarchical semantic memory.
//!
//! Dependencies point one way: `capi` -> `cache` -> `state`, `routing` -> (`zoom`, `attend`) ->
//! (`segment`, `span`, `summary`, `basis`) -> (`store`, `kernels`) -> `model`, `error`.

pub mod attend;
pub mod basis;
pub mod cache;
pub mod capi;
pub mod error;
pub mod kernels;
pub mod model;
pub mod params;
pub mod pool;
pub mod routing;
pub mod segment;
pub mod span;
pub mod state;
pub mod store;
pub mod summary;
pub mod tensor;
pub mod zoom;
