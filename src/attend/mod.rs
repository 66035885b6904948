//! One softmax over rows of every kind.
//!
//! Rows arrive in pieces (tiers, blocks, threads); each piece ends in a [`SoftmaxState`], and
//! states merge associatively.

mod rows;
mod state;
mod turned;

pub use rows::{ROWS_AT_ONCE, RowScratch, attend_rows};
pub use state::SoftmaxState;
pub use turned::TurnedQuery;
