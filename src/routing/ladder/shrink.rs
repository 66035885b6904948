//! Giving up fast-tier bytes when the budget is short: dense layers are sealed first, then the
//! oldest blocks' sketches are repacked smaller, down to their means. Nothing is lost: the rows
//! stay on the slow tier.

use std::ops::Range;

use super::layout::sketch_of;
use super::picked_rows::PickedRows;
use super::seal::{Source, seal_block};
use super::{BlockShape, LadderTokens, Sketch, Slab};
use crate::error::{Result, fail};
use crate::params::SketchProfile;
use crate::pool::Team;
use crate::routing::Remade;

/// Blocks that give up bytes together.
const AT_ONCE: usize = 16;

/// Frees at least `excess` bytes where it can; returns what was freed.
pub fn shrink(
    tokens: &mut LadderTokens,
    team: &Team,
    excess: u64,
    remade: &mut Remade,
) -> Result<u64> {
    let before = tokens.bytes.fast();
    let freed = |tokens: &LadderTokens| before.saturating_sub(tokens.bytes.fast());
    while freed(tokens) < excess && seal_dense_layer(tokens, team, remade)? {}
    for notch in 0..NOTCHES.len() {
        let n_blocks = tokens.layers[0].n_blocks();
        for first in (0..n_blocks).step_by(AT_ONCE) {
            if freed(tokens) >= excess {
                return Ok(freed(tokens));
            }
            repack(tokens, first..(first + AT_ONCE).min(n_blocks), notch, remade)?;
        }
    }
    Ok(freed(tokens))
}

/// Profiles from rich to poor; None: means only.
const NOTCHES: [Option<SketchProfile>; 3] =
    [Some(SketchProfile::Standard), Some(SketchProfile::Compact), None];

fn shape_at(tokens: &LadderTokens, layer: usize, notch: usize) -> BlockShape {
    match NOTCHES[notch] {
        Some(profile) => tokens.shape(layer, sketch_of(profile, tokens.model.geometry.key_dim)),
        None => {
            BlockShape { value_rank: 0, ..tokens.shape(layer, Sketch::Packed { n4: 0, n2: 0 }) }
        }
    }
}

fn seal_dense_layer(tokens: &mut LadderTokens, team: &Team, remade: &mut Remade) -> Result<bool> {
    let Some(layout) = &tokens.layout else { return Ok(false) };
    let Some(&layer) = layout.dense_layers.last() else { return Ok(false) };
    let dense = &tokens.layers[layer];
    let (_, sealed) = remade.get_or_make(dense.name(), || {
        let shape = tokens.shape(layer, tokens.sketch());
        let sealed = tokens.rebuilt_layer(team, layer, |slab, block| {
            let shape = BlockShape { n_tokens: slab.shape.n_tokens, ..shape };
            seal_again(slab, block, shape, &layout.heads[layer], layer, &tokens.store)
        })?;
        Ok((dense.clone(), sealed))
    })?;
    tokens.layers[layer] = sealed;
    tokens.layout.iter_mut().for_each(|layout| layout.dense_layers.retain(|&il| il != layer));
    tokens.count_bytes();
    Ok(true)
}

/// Repacks some blocks of every layer at a notch, where that makes them smaller.
fn repack(
    tokens: &mut LadderTokens,
    blocks: Range<usize>,
    notch: usize,
    remade: &mut Remade,
) -> Result<()> {
    let n_blocks = blocks.len() as u64;
    let mut repacked = false;
    for layer in 0..tokens.layers.len() {
        let shape = shape_at(tokens, layer, notch);
        let Some(layout) = &tokens.layout else {
            fail!(Internal, "a block was sealed before there was a layout");
        };
        let (heads, store) = (&layout.heads[layer], &tokens.store);
        repacked |= tokens.layers[layer].replace(blocks.clone(), notch, remade, |slab| {
            let shape = BlockShape { n_tokens: slab.shape.n_tokens, ..shape };
            if slab.is_dense() || shape.fast_bytes() >= slab.shape.fast_bytes() {
                return Ok(None);
            }
            let made = (0..slab.n_blocks).map(|b| seal_again(slab, b, shape, heads, layer, store));
            let made = made.collect::<Result<Vec<Slab>>>()?;
            store.take_fault()?;
            let parts: Vec<_> = made.iter().map(|slab| (slab, 0..1)).collect();
            Ok(Some(Slab::concat(&parts)?))
        })?;
    }
    tokens.count_bytes();
    tokens.repacked_blocks += if repacked { n_blocks } else { 0 };
    Ok(())
}

fn seal_again(
    slab: &Slab,
    block: usize,
    shape: BlockShape,
    heads: &[super::HeadLayout],
    layer: usize,
    store: &crate::store::SlowStore,
) -> Result<Slab> {
    let rows = PickedRows::of_block(slab, block);
    let room = store.reserve(shape.rows_bytes())?;
    seal_block(shape, heads, &Source { rows: &rows, layer, first: 0 }, store, room)
}
