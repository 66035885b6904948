//! A model as this library sees it: the shape of its attention, and what was trained for it.

mod geometry;

pub use geometry::{Geometry, LayerGeometry, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, RopeKind};
