//! Removing sealed tokens, and moving them to other positions.
//!
//! Blocks are shared between copies of a sequence and never change. Blocks that go whole are left
//! out of the sequence's lists; a block of which some tokens stay is sealed anew from the rows of
//! those, in the same bytes, so that its sketch and means know nothing of the others. A shift is
//! kept beside the blocks and applied on read; only a block that does not move whole is divided.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::layer::Turn;
use super::picked_rows::PickedRows;
use super::seal::{Source, dense_block, seal_block};
use super::{BlockShape, LadderTokens, Layer, Slab};
use crate::error::{Result, fail};
use crate::model::Rotation;
use crate::pool::Team;

/// Some tokens of a block.
type Part = (usize, Range<usize>);

/// The tokens without `first..first + n`.
pub fn without(tokens: &LadderTokens, team: &Team, first: usize, n: usize) -> Result<LadderTokens> {
    let (from, to) = (tokens.layers[0].place(first), tokens.layers[0].place(first + n));
    let mut kept: Vec<Part> = Vec::new();
    if from.1 > 0 {
        kept.push((from.0, 0..from.1));
    }
    if to.1 > 0 {
        kept.push((to.0, to.1..block_len(&tokens.layers[0], to.0)));
    }
    let touched = from.0..to.0 + usize::from(to.1 > 0);
    let n_kept: usize = kept.iter().map(|(_, range)| range.len()).sum();
    // What is left on both sides becomes one block where it may.
    let alike = n_kept <= tokens.params.block_tokens
        && kept.iter().all(|part| {
            shift_of(&tokens.layers[0], part.0) == shift_of(&tokens.layers[0], kept[0].0)
        });
    let new: Vec<Vec<Part>> = match alike && !kept.is_empty() {
        true => vec![kept],
        false => kept.into_iter().map(|part| vec![part]).collect(),
    };
    let mut changed = tokens.clone();
    exchange(&mut changed, team, touched, &new)?;
    for (layer, before) in changed.layers.iter_mut().zip(&tokens.layers) {
        layer.compact(before);
    }
    changed.count_bytes();
    Ok(changed)
}

/// The tokens with `first..first + n` moved by `delta` positions.
pub fn shifted(
    tokens: &LadderTokens,
    team: &Team,
    first: usize,
    n: usize,
    delta: i32,
) -> Result<LadderTokens> {
    let mut changed = tokens.clone();
    divide(&mut changed, team, first)?;
    divide(&mut changed, team, first + n)?;
    let blocks = changed.layers[0].place(first).0..changed.layers[0].place(first + n).0;
    let geometry = &tokens.model.geometry;
    let mut turns: HashMap<i32, Turn> = HashMap::new();
    for layer in &mut changed.layers {
        *layer = layer.turned(blocks.clone(), |before| {
            let shift = before + delta;
            let new = || (shift != 0).then(|| Arc::new(Rotation::new(geometry, shift)));
            turns.entry(shift).or_insert_with(new).clone()
        });
    }
    Ok(changed)
}

/// Sees to it that a block begins at a token.
fn divide(tokens: &mut LadderTokens, team: &Team, at: usize) -> Result<()> {
    let (block, inside) = tokens.layers[0].place(at);
    if inside == 0 {
        return Ok(());
    }
    let end = block_len(&tokens.layers[0], block);
    let halves = [vec![(block, 0..inside)], vec![(block, inside..end)]];
    exchange(tokens, team, block..block + 1, &halves)?;
    tokens.count_bytes();
    Ok(())
}

fn block_len(layer: &Layer, block: usize) -> usize {
    layer.walk().find(block).0.shape.n_tokens
}

fn shift_of(layer: &Layer, block: usize) -> i32 {
    let mut walk = layer.walk();
    walk.find(block);
    walk.turn().as_ref().map_or(0, |turn| turn.shift)
}

/// Puts new blocks, each of some parts of old ones that have moved alike, in the place of others,
/// in every layer. On an error nothing changes.
fn exchange(
    tokens: &mut LadderTokens,
    team: &Team,
    touched: Range<usize>,
    new: &[Vec<Part>],
) -> Result<()> {
    let mut made: Vec<Option<Result<(Slab, Turn)>>> = Vec::new();
    made.resize_with(tokens.layers.len() * new.len(), || None);
    team.for_each_mut(&mut made, |i, out| {
        *out = Some(seal_parts(tokens, i / new.len(), &new[i % new.len()]));
    });
    tokens.store.take_fault()?;
    let mut made = made.into_iter().flatten();
    let exchanged = tokens.layers.iter().map(|layer| {
        let blocks = made.by_ref().take(new.len()).collect::<Result<_>>()?;
        Ok(layer.exchanged(touched.clone(), blocks))
    });
    let exchanged: Vec<Layer> = exchanged.collect::<Result<_>>()?;
    tokens.layers = exchanged;
    Ok(())
}

/// One layer's block of some parts of old ones, at the resolution of the first.
fn seal_parts(tokens: &LadderTokens, layer: usize, parts: &[Part]) -> Result<(Slab, Turn)> {
    let mut walk = tokens.layers[layer].walk();
    let mut rows = Vec::new();
    for (number, range) in parts {
        let (slab, block) = walk.find(*number);
        rows.extend(range.clone().map(|token| (slab, block, token)));
    }
    let (first, _) = walk.find(parts[0].0);
    let turn = walk.turn().clone();
    let shape = BlockShape { n_tokens: rows.len(), ..first.shape };
    let source = Source { rows: &PickedRows(rows), layer, first: 0 };
    let Some(layout) = &tokens.layout else {
        fail!(Internal, "a block was sealed before there was a layout");
    };
    let slab = if first.is_dense() {
        dense_block(shape, &source)?
    } else {
        let room = tokens.store.reserve(shape.rows_bytes())?;
        seal_block(shape, &layout.heads[layer], &source, &tokens.store, room)?
    };
    Ok((slab, turn))
}
