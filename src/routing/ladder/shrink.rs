//! Giving up fast-tier bytes when the budget is short: dense layers are sealed first, then the
//! oldest blocks' sketches are repacked smaller, down to their means. Nothing is lost: the rows
//! stay on the slow tier.

use super::layout::sketch_of;
use super::seal::{Source, seal_block};
use super::tokens::BlockRows;
use super::{Block, BlockShape, LadderTokens, Sketch};
use crate::error::{Result, fail};
use crate::params::SketchProfile;
use crate::pool::Team;
use crate::routing::SealedTokens;

/// Frees at least `excess` bytes where it can; returns what was freed.
pub fn shrink(tokens: &mut LadderTokens, team: &Team, excess: u64) -> Result<u64> {
    let before = tokens.bytes().fast();
    let freed = |tokens: &LadderTokens| before.saturating_sub(tokens.bytes().fast());
    while freed(tokens) < excess && seal_dense_layer(tokens, team)? {}
    for notch in 0..NOTCHES.len() {
        let n_blocks = tokens.layers[0].len();
        for b in 0..n_blocks {
            if freed(tokens) >= excess {
                return Ok(freed(tokens));
            }
            repack(tokens, b, notch)?;
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

fn seal_dense_layer(tokens: &mut LadderTokens, team: &Team) -> Result<bool> {
    let Some(layout) = &mut tokens.layout else { return Ok(false) };
    let Some(layer) = layout.dense_layers.pop() else { return Ok(false) };
    let heads = layout.heads[layer].clone();
    let (shape, store) = (tokens.shape(layer, tokens.sketch()), tokens.store.clone());
    tokens
        .rebuild_layer(team, layer, |_, block| seal_again(block, shape, &heads, layer, &store))?;
    Ok(true)
}

/// Repacks block `b` of every layer at a notch, where that makes it smaller.
fn repack(tokens: &mut LadderTokens, b: usize, notch: usize) -> Result<()> {
    let mut repacked = false;
    for layer in 0..tokens.layers.len() {
        let shape = shape_at(tokens, layer, notch);
        let block = &tokens.layers[layer][b];
        if block.is_dense() || shape.fast_bytes() >= block.fast.len() {
            continue;
        }
        let Some(layout) = &tokens.layout else {
            fail!(Internal, "a block was sealed before there was a layout");
        };
        let smaller = seal_again(block, shape, &layout.heads[layer], layer, &tokens.store)?;
        tokens.replace(layer, b, smaller);
        repacked = true;
    }
    tokens.repacked_blocks += u64::from(repacked);
    Ok(())
}

fn seal_again(
    block: &Block,
    shape: BlockShape,
    heads: &[super::HeadLayout],
    layer: usize,
    store: &crate::store::SlowStore,
) -> Result<Block> {
    let rows = BlockRows { block, first: 0 };
    seal_block(shape, heads, &Source { rows: &rows, layer, first: 0 }, store)
}
