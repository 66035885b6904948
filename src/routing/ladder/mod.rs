//! Routing `ladder`: every sealed token is scored from a sketch of its key; those that matter are
//! read exactly, the others are seen through their block's mean (docs/architecture.md).

mod attend;
mod block_work;
mod change;
mod dense;
mod layer;
mod layout;
mod picked_rows;
mod plan;
mod route;
mod save;
mod seal;
mod shrink;
mod sizes;
mod slab;
mod tokens;

pub use tokens::LadderTokens;

use layer::Layer;
use layout::HeadLayout;
use plan::LadderPlan;
use slab::{BlockShape, Sketch, Slab};
