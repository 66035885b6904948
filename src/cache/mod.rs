//! Contexts: sequences of tokens, forward passes over them, and what they take.

mod ahead;
mod answer;
mod attend;
mod budget;
mod context;
mod pass;
mod plans;
mod queries;
mod residents;
mod sequence;
mod sequences;
mod sizes;
mod slot;
mod state;
mod statistics;

pub use context::{BatchToken, Context};
pub use plans::PlanId;
pub use sizes::{Memory, Statistics, estimate};
pub use statistics::{Counters, Histogram, Times};
