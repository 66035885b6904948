//! Sealing: a block of tokens becomes a sketch and means on the fast tier and rows on the slow one.

use super::layout::{HeadLayout, widen};
use super::slab::{BlockShape, Sketch, Slab, Stream, halves_mut};
use crate::error::Result;
use crate::kernels::{RowCodec, coefficients_pack, row_scores, sketch_pack};
use crate::routing::OpenRows;
use crate::store::{Reserved, SlowStore};

/// Where a block's tokens come from: a layer and the first token's index in the sequence.
pub struct Source<'a> {
    pub rows: &'a dyn OpenRows,
    pub layer: usize,
    pub first: usize,
}

/// One head's rows of a block as f32.
struct HeadRows {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl HeadRows {
    fn new(shape: &BlockShape) -> Self {
        Self {
            keys: vec![0.0; shape.n_tokens * shape.key_dim],
            values: vec![0.0; shape.n_tokens * shape.value_dim],
        }
    }
}

/// Seals the block's tokens for all KV heads of one layer; `room` is for its rows.
pub fn seal_block(
    shape: BlockShape,
    heads: &[HeadLayout],
    source: &Source,
    store: &SlowStore,
    room: Reserved,
) -> Result<Slab> {
    let mut scratch = HeadRows::new(&shape);
    Slab::sealed(shape, store, room, |slab, rows| {
        for (head, layout) in heads.iter().enumerate() {
            read_head(&shape, source, head, &mut scratch);
            write_rows(&shape, source, head, &scratch, rows);
            write_sketch(&shape, layout, head, &scratch.keys, slab);
            write_values(&shape, layout, head, &scratch.values, slab);
        }
    })
}

/// Keeps the block's tokens whole on the fast tier.
pub fn dense_block(shape: BlockShape, source: &Source) -> Result<Slab> {
    let mut scratch = HeadRows::new(&shape);
    Slab::dense(shape, |rows| {
        for head in 0..shape.n_kv_heads {
            read_head(&shape, source, head, &mut scratch);
            write_rows(&shape, source, head, &scratch, rows);
        }
    })
}

fn read_head(shape: &BlockShape, source: &Source, head: usize, out: &mut HeadRows) {
    let rows = out.keys.chunks_mut(shape.key_dim).zip(out.values.chunks_mut(shape.value_dim));
    for (t, (key, value)) in rows.enumerate() {
        source.rows.read(source.layer, head, source.first + t, key, value);
    }
}

/// Rows that already stand in the right codec are copied: encoding them again would round twice.
fn write_rows(shape: &BlockShape, source: &Source, head: usize, rows: &HeadRows, out: &mut [u8]) {
    let tokens = rows.keys.chunks(shape.key_dim).zip(rows.values.chunks(shape.value_dim));
    for (t, (key, value)) in tokens.enumerate() {
        let (key_row, value_row) = (shape.key_row(head, t), shape.value_row(head, t));
        let (key_bytes, value_bytes) =
            out[key_row.start..value_row.end].split_at_mut(key_row.len());
        let bytes = (&mut *key_bytes, &mut *value_bytes);
        let (codec, token) = (shape.row_codec, source.first + t);
        if !source.rows.copy_encoded(codec, source.layer, head, token, bytes) {
            codec.encode(key, key_bytes);
            codec.encode(value, value_bytes);
        }
    }
}

fn write_sketch(
    shape: &BlockShape,
    layout: &HeadLayout,
    head: usize,
    keys: &[f32],
    slab: &mut Slab,
) {
    shape.mean_codec.encode(&mean(keys, shape.key_dim), slab.stream_mut(Stream::MeanKey, head));
    match shape.sketch {
        Sketch::Raw => {
            let len = RowCodec::F32.row_bytes(shape.key_dim);
            let rows = slab.stream_mut(Stream::Codes, head).chunks_mut(len);
            for (key, row) in keys.chunks(shape.key_dim).zip(rows) {
                RowCodec::F32.encode(key, row);
            }
        }
        Sketch::Packed { .. } => {
            let kernel_shape = shape.sketch.shape();
            let n_channels = kernel_shape.channels();
            if n_channels == 0 {
                return;
            }
            let mut gathered = vec![0.0; shape.n_tokens * n_channels];
            for (key, row) in keys.chunks(shape.key_dim).zip(gathered.chunks_mut(n_channels)) {
                layout.gather(key, row);
            }
            let (codes, scales) = slab.streams_mut(Stream::Codes, Stream::Channels, head);
            let (minimum, scale) = halves_mut(scales).split_at_mut(n_channels);
            sketch_pack(&kernel_shape, &gathered, shape.n_tokens, codes, minimum, scale);
        }
    }
}

fn write_values(
    shape: &BlockShape,
    layout: &HeadLayout,
    head: usize,
    values: &[f32],
    slab: &mut Slab,
) {
    let (dim, rank) = (shape.value_dim, shape.value_rank);
    let mean_row = slab.stream_mut(Stream::MeanValue, head);
    shape.mean_codec.encode(&mean(values, dim), mean_row);
    if rank == 0 {
        return;
    }
    // Residuals are taken from the mean as it is stored, so that its rounding is made good too.
    let mut stored_mean = vec![0.0; dim];
    shape.mean_codec.decode(mean_row, &mut stored_mean);
    let mut basis = Vec::new();
    widen(&layout.value_basis, &mut basis);
    let codec = RowCodec::F32;
    let mut residuals = vec![0; shape.n_tokens * codec.row_bytes(dim)];
    let mut residual = vec![0.0; dim];
    for (value, row) in values.chunks(dim).zip(residuals.chunks_mut(codec.row_bytes(dim))) {
        for (r, (x, m)) in residual.iter_mut().zip(value.iter().zip(&stored_mean)) {
            *r = x - m;
        }
        codec.encode(&residual, row);
    }
    let rows: Vec<&[u8]> = residuals.chunks(codec.row_bytes(dim)).collect();
    // `[direction][token]`
    let mut products = vec![0.0; rank * shape.n_tokens];
    row_scores(codec, dim, &basis, rank, &rows, &mut products, shape.n_tokens);
    let mut coefficients = vec![0.0; shape.n_tokens * rank];
    for (t, row) in coefficients.chunks_mut(rank).enumerate() {
        for (c, products) in row.iter_mut().zip(products.chunks(shape.n_tokens)) {
            *c = products[t];
        }
    }
    let (scales, codes) = slab.streams_mut(Stream::CoefficientScales, Stream::Coefficients, head);
    let (minimum, scale) = halves_mut(scales).split_at_mut(rank);
    coefficients_pack(&coefficients, shape.n_tokens, rank, codes, minimum, scale);
}

fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sum = vec![0.0f32; dim];
    for row in rows.chunks(dim) {
        for (s, x) in sum.iter_mut().zip(row) {
            *s += x;
        }
    }
    let scale = ((rows.len() / dim).max(1) as f32).recip();
    sum.iter_mut().for_each(|s| *s *= scale);
    sum
}
