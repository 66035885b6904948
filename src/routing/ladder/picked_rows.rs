//! Sealed tokens read back, so that they can be sealed again.

use super::Slab;
use crate::kernels::RowCodec;
use crate::routing::{OpenRows, RowBytes};

/// Tokens of one layer's blocks, as stored: the slab, the block's number in it, the token's in the
/// block.
pub struct PickedRows<'a>(pub Vec<(&'a Slab, usize, usize)>);

impl<'a> PickedRows<'a> {
    /// All of one block.
    pub fn of_block(slab: &'a Slab, block: usize) -> Self {
        Self((0..slab.shape.n_tokens).map(|token| (slab, block, token)).collect())
    }
}

impl OpenRows for PickedRows<'_> {
    fn read(&self, _: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        let (slab, block, token) = self.0[token];
        slab.decode_row((head, block, token), &mut Vec::new(), key, value);
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        _: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let (slab, block, token) = self.0[token];
        slab.copy_row(codec, (head, block, token), out)
    }
}
