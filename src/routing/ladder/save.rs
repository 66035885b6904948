//! Sealed tokens in an image (docs/state.md, "Sealed tokens of `ladder`").

use std::collections::HashMap;
use std::sync::Arc;

use half::f16;

use super::layer::Turn;
use super::layout::{self, HeadLayout, SequenceLayout, sketch_of};
use super::{BlockShape, LadderTokens, Layer, Sketch, Slab};
use crate::error::{Result, fail};
use crate::model::Rotation;
use crate::params::{MAX_BLOCK_TOKENS, SketchProfile};
use crate::store::{Image, ImageReader, Segment};

pub fn save(tokens: &LadderTokens, image: &mut Image) -> Result<()> {
    image.flag(tokens.layout.is_some());
    let Some(layout) = &tokens.layout else { return Ok(()) };
    image.shared_blob(&layout.heads, || Arc::new(layout_bytes(&layout.heads)));
    image.flag(layout.without_queries);
    image.count(layout.dense_layers.len());
    layout.dense_layers.iter().for_each(|&layer| image.u32(layer as u32));
    image.u64(tokens.repacked_blocks);
    for layer in &tokens.layers {
        let parts = layer.parts()?;
        image.count(parts.len());
        for (slab, turn) in &parts {
            image.i32(turn.as_ref().map_or(0, |turn| turn.shift));
            save_slab(slab, tokens.model.geometry.key_dim, image)?;
        }
    }
    Ok(())
}

/// What a sketch is called in an image. The numbers never change.
const SKETCHES: [(u8, Option<SketchProfile>); 5] = [
    (0, None),
    (1, Some(SketchProfile::Compact)),
    (2, Some(SketchProfile::Standard)),
    (3, Some(SketchProfile::High)),
    (4, Some(SketchProfile::Raw)),
];

/// The sketch of a profile; None: means only.
fn sketch(profile: Option<SketchProfile>, key_dim: usize) -> Sketch {
    profile.map_or(Sketch::Packed { n4: 0, n2: 0 }, |profile| sketch_of(profile, key_dim))
}

fn save_slab(slab: &Arc<Slab>, key_dim: usize, image: &mut Image) -> Result<()> {
    let is_same = |(_, profile): &&(u8, _)| sketch(*profile, key_dim) == slab.shape.sketch;
    let Some((number, _)) = SKETCHES.iter().find(is_same) else {
        fail!(Internal, "a block has a sketch that no profile means");
    };
    image.u32(slab.shape.n_tokens as u32);
    image.flag(slab.is_dense());
    image.u8(*number);
    image.flag(slab.shape.value_rank > 0);
    image.count(slab.n_blocks);
    slab.segments().iter().for_each(|segment| image.segment(segment));
    image.shared_blob(slab, || Arc::clone(slab) as _);
    Ok(())
}

/// For every layer and KV head the centre (f32), the order (u16), and the value basis (f16).
fn layout_bytes(heads: &[Vec<HeadLayout>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for head in heads.iter().flatten() {
        bytes.extend(head.centre.iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend(head.order.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(head.value_basis.iter().flat_map(|x| x.to_le_bytes()));
    }
    bytes
}

/// Fills tokens that are empty.
pub fn restore(tokens: &mut LadderTokens, image: &mut ImageReader) -> Result<()> {
    if !image.flag()? {
        return Ok(());
    }
    tokens.layout = Some(restore_layout(tokens, image)?);
    tokens.repacked_blocks = image.u64()?;
    let mut turns = HashMap::new();
    let mut layers: Vec<Layer> = Vec::with_capacity(tokens.layers.len());
    for number in 0..tokens.layers.len() {
        let mut layer = Layer::default();
        for _ in 0..image.length("slabs")? {
            let turn = restore_turn(tokens, &mut turns, image)?;
            layer.push(restore_slab(tokens, number, image)?, turn);
        }
        if layers.first().is_some_and(|first| first.cut() != layer.cut()) {
            fail!(Format, "the state's layer {number} has other blocks than layer 0");
        }
        layers.push(layer);
    }
    tokens.layers = layers;
    Ok(())
}

fn restore_layout(tokens: &LadderTokens, image: &mut ImageReader) -> Result<SequenceLayout> {
    let geometry = &tokens.model.geometry;
    let (key_dim, value_dim) = (geometry.key_dim, geometry.value_dim);
    let rank = layout::value_rank(&tokens.params, value_dim);
    let head_bytes = 6 * key_dim + 2 * rank * value_dim;
    let n_heads: usize = geometry.layers.iter().map(|layer| layer.n_kv_heads).sum();
    let heads = image.shared_blob(
        "layout",
        n_heads * head_bytes,
        |_| true,
        |bytes| {
            let mut parts = bytes.chunks_exact(head_bytes);
            let layers = geometry.layers.iter().map(|layer| {
                let heads = parts.by_ref().take(layer.n_kv_heads);
                heads.map(|bytes| restore_head(bytes, key_dim)).collect::<Result<Vec<_>>>()
            });
            layers.collect::<Result<Vec<_>>>()
        },
    )?;
    let without_queries = image.flag()?;
    let n_dense = image.count("dense layers", 0, geometry.layers.len())?;
    let mut dense_layers = Vec::with_capacity(n_dense);
    for _ in 0..n_dense {
        let layer = image.u32()? as usize;
        if layer >= geometry.layers.len() || dense_layers.contains(&layer) {
            fail!(Format, "the state has layer {layer} in its list of dense layers");
        }
        dense_layers.push(layer);
    }
    Ok(SequenceLayout { heads, dense_layers, without_queries })
}

fn restore_head(bytes: &[u8], key_dim: usize) -> Result<HeadLayout> {
    let (centre, rest) = bytes.split_at(4 * key_dim);
    let (order, basis) = rest.split_at(2 * key_dim);
    let pair = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let layout = HeadLayout {
        centre: centre
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect(),
        order: order.chunks_exact(2).map(pair).collect(),
        value_basis: basis.chunks_exact(2).map(|bytes| f16::from_bits(pair(bytes))).collect(),
    };
    let mut seen = vec![false; key_dim];
    for &dim in &layout.order {
        match seen.get_mut(usize::from(dim)) {
            Some(seen) if !*seen => *seen = true,
            _ => fail!(Format, "the state orders key dimension {dim} of {key_dim} twice or more"),
        }
    }
    if layout.centre.iter().any(|x| !x.is_finite()) {
        fail!(Format, "the state has a centre that is not finite");
    }
    Ok(layout)
}

fn restore_turn(
    tokens: &LadderTokens,
    made: &mut HashMap<i32, Turn>,
    image: &mut ImageReader,
) -> Result<Turn> {
    let shift = image.i32()?;
    let new = || (shift != 0).then(|| Arc::new(Rotation::new(&tokens.model.geometry, shift)));
    Ok(made.entry(shift).or_insert_with(new).clone())
}

fn restore_slab(tokens: &LadderTokens, layer: usize, image: &mut ImageReader) -> Result<Arc<Slab>> {
    let n_tokens = image.u32()? as usize;
    if !(1..=MAX_BLOCK_TOKENS).contains(&n_tokens) {
        fail!(
            Format,
            "the state has a block of {n_tokens} tokens, expected 1 to {MAX_BLOCK_TOKENS}"
        );
    }
    let (is_dense, name, has_values) = (image.flag()?, image.u8()?, image.flag()?);
    let Some((_, profile)) = SKETCHES.iter().find(|(number, _)| *number == name) else {
        fail!(Format, "the state has a sketch of kind {name}, expected 0 to 4");
    };
    let sketch = sketch(*profile, tokens.model.geometry.key_dim);
    let whole = if is_dense { tokens.dense_shape(layer) } else { tokens.shape(layer, sketch) };
    let value_rank = if has_values { whole.value_rank } else { 0 };
    let shape = BlockShape { n_tokens, sketch, value_rank, ..whole };
    if is_dense != tokens.is_dense(layer) || has_values != (value_rank > 0) {
        fail!(Format, "the state has a block of another kind in layer {layer} than the layer is");
    }
    let (n_blocks, fast_bytes) = match is_dense {
        true => (image.count("blocks in a slab", 1, 1)?, shape.rows_bytes()),
        false => (image.length("blocks in a slab")?, shape.fast_bytes()),
    };
    let Some(len) = fast_bytes.checked_mul(n_blocks).filter(|_| n_blocks > 0) else {
        fail!(Format, "the state has a slab of {n_blocks} blocks");
    };
    let mut segments = Vec::new();
    if !is_dense {
        segments.try_reserve_exact(n_blocks)?;
        let rows = shape.rows_bytes();
        for _ in 0..n_blocks {
            segments.push(image.segment("rows", rows, rows)?);
        }
    }
    let addresses =
        |segments: &[Segment]| -> Vec<usize> { segments.iter().map(Segment::address).collect() };
    let rows = addresses(&segments);
    let is_same = |slab: &Slab| slab.shape == shape && addresses(slab.segments()) == rows;
    image.shared_blob("slab", len, is_same, |fast| {
        Ok(Slab::restored(shape, n_blocks, fast, (!is_dense).then_some(segments)))
    })
}
