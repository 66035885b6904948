//! Number crunching on slices of host memory; nothing here knows of sequences or tiers.
//!
//! Each kernel has a plain scalar version, which defines its result, and fast paths for AVX2
//! and AVX-512 that are chosen once, at run time ([`Level`]). Fast paths may sum in another order
//! and, where a kernel says so, multiply in int8; the tests hold each level against the scalar
//! version on random shapes. Lengths are checked at each kernel's door, inputs are finite
//! ([`convert::first_outside`] is what guards that at the library's own door).
//!
//! `rows`: exact rows; `sketch`, `value_sketch`: packed partial ones; `shares`: choosing; `exp`, `tile`: softmax.

pub mod convert;
pub mod exp;
mod level;
mod prefetch;
pub mod rows;
pub mod shares;
#[cfg(target_arch = "x86_64")]
mod simd;
pub mod sketch;
#[cfg(test)]
mod testing;
pub mod tile;
pub mod value_sketch;

pub use convert::{bf16_to_f32, f16_to_f32, f32_to_f16, first_outside, half_bytes};
pub use exp::{exp_minus, max};
#[doc(hidden)]
pub use level::Level;
pub use prefetch::{prefetch, prefetch_value};
pub use rows::{RowCodec, Rows, row_accumulate, row_scores};
pub use shares::{TOKENS, Weighed, tokens_above, weigh_lines};
pub use sketch::{BlockSums, Candidates, GROUP, SketchRun, SketchShape, sketch_pack, sketch_run};
pub use tile::{scratch_len as tile_scratch_len, tile_attend};
pub use value_sketch::{Coefficients, TokenWeights, coefficients_accumulate, coefficients_pack};
