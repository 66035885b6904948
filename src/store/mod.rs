//! Where sealed data lies: aligned memory for the fast tier, segments for the slow tier.

mod aligned;
mod slow;

pub use aligned::AlignedBytes;
pub use slow::{Segment, SlowStore};
