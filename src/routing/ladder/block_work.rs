//! A block that is made ahead of time, by another thread than the sequence's.

use std::any::Any;

use super::{LadderTokens, Slab};
use crate::error::Result;
use crate::routing::{OpenRows, SealWork};
use crate::store::Reserved;

/// The making of it. The tokens come without their layers.
pub struct BlockWork {
    pub tokens: LadderTokens,
    pub first: usize,
}

pub struct MadeBlock {
    /// Those that its slabs were made for.
    pub dense_layers: Vec<usize>,
    /// `[layer]`
    pub slabs: Vec<Slab>,
}

impl SealWork for BlockWork {
    fn run(self: Box<Self>, rows: &dyn OpenRows) -> Result<Box<dyn Any + Send>> {
        let layers = 0..self.tokens.layers.len();
        let room = layers.flat_map(|layer| self.tokens.room(layer, 1));
        let room = room.collect::<Result<Vec<Option<Reserved>>>>()?;
        let slabs = room
            .into_iter()
            .enumerate()
            .map(|(layer, room)| self.tokens.make_block(layer, self.first, rows, room));
        let slabs = slabs.collect::<Result<Vec<Slab>>>()?;
        let dense_layers = self.tokens.layout.map_or(Vec::new(), |layout| layout.dense_layers);
        Ok(Box::new(MadeBlock { dense_layers, slabs }))
    }
}
