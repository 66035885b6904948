//! What the sealed tokens take, would take, and take at the least.

use super::layout::SequenceLayout;
use super::{BlockShape, LadderTokens, Layer, Sketch, Slab};
use crate::routing::{Counted, SealedBytes};
use crate::store::Segment;

impl LadderTokens {
    /// Counts what all slabs take, after a change.
    pub(super) fn count_bytes(&mut self) {
        self.bytes = self.bytes_beside(&mut Counted::default());
    }

    pub(super) fn bytes_beside(&self, counted: &mut Counted) -> SealedBytes {
        let slabs = self.layers.iter().flat_map(Layer::slabs);
        let new = slabs.filter(|slab| counted.is_new(slab)).map(|slab| slab_bytes(slab));
        let sealed = new.fold(SealedBytes::default(), SealedBytes::plus);
        SealedBytes { layout: self.layout_beside(counted), ..sealed }
    }

    pub(super) fn layout_beside(&self, counted: &mut Counted) -> u64 {
        let layout = self.layout.as_ref().filter(|layout| counted.is_new(&layout.heads));
        layout.map_or(0, SequenceLayout::bytes)
    }

    /// Of `n_blocks` sealed from the start on.
    pub(super) fn bytes_of_blocks(&self, layer: usize, n_blocks: u64) -> SealedBytes {
        if self.is_dense(layer) {
            let one = dense_bytes(self.dense_shape(layer).rows_bytes());
            SealedBytes {
                resident: n_blocks * one.resident,
                metadata: n_blocks * SLAB_METADATA,
                ..one
            }
        } else {
            let shape = self.shape(layer, self.sketch());
            let mut bytes = sealed_bytes(&shape, n_blocks, n_blocks * shape.rows_bytes() as u64);
            bytes.metadata += Layer::most_slabs(n_blocks as usize) as u64 * SLAB_METADATA;
            bytes
        }
    }

    /// A block of a layer that has given up its sketches.
    pub(super) fn bytes_of_means(&self, layer: usize) -> u64 {
        let shape = self.shape(layer, Sketch::Packed { n4: 0, n2: 0 });
        BlockShape { value_rank: 0, ..shape }.fast_bytes() as u64 + BLOCK_METADATA + SLAB_METADATA
    }
}

/// Bookkeeping of one block, and of one slab.
const BLOCK_METADATA: u64 = Segment::METADATA as u64;
const SLAB_METADATA: u64 = Layer::SLAB_METADATA as u64;

fn slab_bytes(slab: &Slab) -> SealedBytes {
    let n = slab.n_blocks as u64;
    let mut bytes = if slab.is_dense() {
        dense_bytes(slab.fast_bytes())
    } else {
        sealed_bytes(&slab.shape, n, slab.slow_bytes() as u64)
    };
    bytes.metadata += SLAB_METADATA;
    bytes
}

fn dense_bytes(rows: usize) -> SealedBytes {
    SealedBytes { resident: rows as u64, ..Default::default() }
}

fn sealed_bytes(shape: &BlockShape, n_blocks: u64, slow: u64) -> SealedBytes {
    let (sketch, value_sketch) = (shape.sketch_bytes() as u64, shape.value_sketch_bytes() as u64);
    SealedBytes {
        sketch: n_blocks * sketch,
        value_sketch: n_blocks * value_sketch,
        mean: n_blocks * (shape.fast_bytes() as u64 - sketch - value_sketch),
        metadata: n_blocks * BLOCK_METADATA,
        slow,
        ..Default::default()
    }
}
