//! Routing `ladder`: every sealed token is scored from a sketch of its key; those that matter are
//! read exactly, the others are seen through their block's mean (docs/architecture.md).

mod attend;
mod block;
mod dense;
mod layout;
mod plan;
mod route;
mod seal;
mod shrink;
mod tokens;

pub use tokens::LadderTokens;

use block::{Block, BlockShape, Sketch};
use layout::HeadLayout;
use plan::LadderPlan;
