//! Route: score every sealed token from its sketch, and choose what to read exactly.

use super::block::Sketch;
use super::plan::{Chosen, Piece, Sealed};
use crate::kernels::{RowCodec, exp_minus, max, prefetch_value, row_scores, sketch_scores};

/// Blocks whose sketches are asked for before they are scored.
const AHEAD: usize = 2;

/// Scores the piece's tokens for a group of query heads (`q`: `[n_group][key_dim]`, scaled):
///
/// s_t = sum over kept dimensions of q_j k_tj + sum over the others of q_j m_bj
///
/// where k is the sketch and m_b the block's mean key. Leaves exp(s_t - block maximum) in
/// `weights`, and the piece's own maximum and sum in the scratch.
pub fn score(piece: &mut Piece, sealed: &Sealed, q: &[f32], n_group: usize) {
    let blocks = &sealed.blocks[piece.first..piece.first + piece.n_blocks];
    let longest = blocks.iter().map(|b| b.shape.n_tokens).max().unwrap_or(0);
    piece.stride = longest.next_multiple_of(16);
    let block_len = n_group * piece.stride;
    piece.weights.resize(blocks.len() * block_len, 0.0);
    piece.block_max.resize(blocks.len() * n_group, 0.0);
    piece.block_sum.resize(blocks.len() * n_group, 0.0);
    piece.scratch.m.clear();
    piece.scratch.m.resize(n_group, f32::NEG_INFINITY);
    piece.scratch.l.clear();
    piece.scratch.l.resize(n_group, 0.0);

    let n_blocks = blocks.len();
    let mut prepared = None;
    for block in blocks.iter().take(AHEAD) {
        block.prefetch_sketch(sealed.head);
    }
    for (b, block) in blocks.iter().enumerate() {
        if let Some(later) = blocks.get(b + 2 * AHEAD) {
            prefetch_value(&**later);
        }
        if let Some(later) = blocks.get(b + AHEAD) {
            later.prefetch_sketch(sealed.head);
        }
        let weights = &mut piece.weights[b * block_len..][..block_len];
        let shape = &block.shape;
        if prepared != Some(shape.sketch) {
            prepare_query(&mut piece.scratch, sealed, shape.sketch, q, n_group);
            prepared = Some(shape.sketch);
        }
        let scratch = &mut piece.scratch;
        let codes = &block.fast[shape.codes(sealed.head)];
        match shape.sketch {
            Sketch::Raw => {
                for t in 0..shape.n_tokens {
                    let len = RowCodec::F32.row_bytes(shape.key_dim);
                    let row = &codes[t * len..][..len];
                    let out = &mut weights[t..];
                    row_scores(RowCodec::F32, shape.key_dim, q, n_group, &[row], out, piece.stride);
                }
            }
            Sketch::Packed { .. } => {
                let mean = &block.fast[shape.mean_key(sealed.head)];
                scratch.offset.resize(n_group, 0.0);
                let (q_rest, offset) = (&scratch.q_rest[..], &mut scratch.offset[..]);
                row_scores(shape.mean_codec, shape.key_dim, q_rest, n_group, &[mean], offset, 1);
                let kernel_shape = shape.sketch.shape();
                if kernel_shape.channels() == 0 {
                    for (weights, &s) in weights.chunks_mut(piece.stride).zip(offset.iter()) {
                        weights.fill(s);
                    }
                } else {
                    let (minimum, scale) = block.channels(sealed.head);
                    let n = shape.n_tokens;
                    let q = &scratch.q[..];
                    sketch_scores(
                        &kernel_shape,
                        codes,
                        minimum,
                        scale,
                        n,
                        q,
                        n_group,
                        offset,
                        weights,
                        piece.stride,
                    );
                }
            }
        }
        for g in 0..n_group {
            let weights = &mut weights[g * piece.stride..][..shape.n_tokens];
            let m = max(weights);
            let sum = exp_minus(weights, m);
            piece.block_max[g * n_blocks + b] = m;
            piece.block_sum[g * n_blocks + b] = sum;
            add(&mut scratch.m[g], &mut scratch.l[g], m, sum);
        }
    }
}

/// Adds a term `l * exp(m)` to a running sum of that form.
pub fn add(running_m: &mut f32, running_l: &mut f32, m: f32, l: f32) {
    if m > *running_m {
        *running_l = if *running_l == 0.0 { 0.0 } else { *running_l * (*running_m - m).exp() } + l;
        *running_m = m;
    } else if l > 0.0 {
        *running_l += l * (m - *running_m).exp();
    }
}

/// The query as the sketch's channels see it, and what is left of it for the mean key.
fn prepare_query(
    scratch: &mut super::plan::PieceScratch,
    sealed: &Sealed,
    sketch: Sketch,
    q: &[f32],
    n_group: usize,
) {
    let n_channels = sketch.shape().channels();
    scratch.q.resize(n_group * n_channels, 0.0);
    scratch.q_rest.clear();
    scratch.q_rest.extend_from_slice(q);
    if n_channels == 0 {
        return;
    }
    let dim = q.len() / n_group;
    let rows = scratch.q.chunks_mut(n_channels).zip(scratch.q_rest.chunks_mut(dim));
    for ((channels, rest), q) in rows.zip(q.chunks(dim)) {
        sealed.layout.gather(q, channels);
        for &kept in sealed.layout.order.iter().take(n_channels) {
            rest[kept as usize] = 0.0;
        }
    }
}

/// Shares above which a token is read exactly, and above which it adds its value sketch.
#[derive(Clone, Copy)]
pub struct Thresholds {
    fetch: f32,
    middle: f32,
}

impl Thresholds {
    /// `epsilon` 0 reads every token, also those whose share is too small for a float. `middle` is
    /// a fraction of epsilon; None: there is no value sketch.
    pub fn new(epsilon: f32, middle: Option<f32>) -> Self {
        Self {
            fetch: if epsilon > 0.0 { epsilon } else { -1.0 },
            middle: middle.map_or(f32::INFINITY, |fraction| fraction * epsilon),
        }
    }
}

/// Chooses tokens by their share, mean over the group: exp(score) / Z. `log_sum` is log Z of each
/// head. A block whose largest shares cannot reach the lower threshold is passed over whole.
pub fn select(
    piece: &mut Piece,
    log_sum: &[f32],
    n_tokens: impl Fn(usize) -> usize,
    at: Thresholds,
) {
    let (n_group, n_blocks) = (log_sum.len(), piece.n_blocks);
    let lowest = at.fetch.min(at.middle);
    piece.factor.clear();
    piece.factor.extend_from_slice(&piece.block_max[..n_group * n_blocks]);
    for (factor, &log_sum) in piece.factor.chunks_mut(n_blocks.max(1)).zip(log_sum) {
        exp_minus(factor, log_sum);
    }
    // Mean over the group.
    let share = (n_group as f32).recip();
    piece.scratch.shares.resize(piece.stride, 0.0);
    for b in 0..n_blocks {
        let factor = |g: usize| piece.factor[g * n_blocks + b] * share;
        if (0..n_group).map(factor).sum::<f32>() <= lowest {
            continue;
        }
        let n = n_tokens(piece.first + b);
        let shares = &mut piece.scratch.shares[..n];
        shares.fill(0.0);
        for g in 0..n_group {
            let weights = &piece.weights[(b * n_group + g) * piece.stride..][..n];
            let factor = factor(g);
            shares.iter_mut().zip(weights).for_each(|(share, weight)| *share += factor * weight);
        }
        for (i, some) in shares.chunks(LOOKED_AT).enumerate() {
            if !some.iter().fold(false, |any, &share| any | (share > lowest)) {
                continue;
            }
            for (j, &share) in some.iter().enumerate() {
                let token = (i * LOOKED_AT + j) as u32;
                if share > at.fetch {
                    piece.fetched.push(Chosen { block: b as u32, token, share });
                } else if share > at.middle {
                    piece.middle.push(Chosen { block: b as u32, token, share });
                }
            }
        }
    }
}

/// Shares that are compared at once before any is looked at by itself.
const LOOKED_AT: usize = 8;

/// Keeps the `budget` largest shares of a unit's pieces; the others see the value sketch.
pub fn limit(pieces: &mut [Piece], budget: usize, middle: bool) {
    let n_fetched: usize = pieces.iter().map(|piece| piece.fetched.len()).sum();
    if n_fetched <= budget {
        return;
    }
    let mut shares: Vec<f32> =
        pieces.iter().flat_map(|piece| piece.fetched.iter().map(|chosen| chosen.share)).collect();
    let cut = if budget == 0 {
        f32::INFINITY
    } else {
        *shares.select_nth_unstable_by(budget - 1, |a, b| b.total_cmp(a)).1
    };
    // Of equal shares, the earlier tokens stay.
    let above: usize = shares.iter().filter(|&&share| share > cut).count();
    let mut ties = budget - above.min(budget);
    for piece in pieces {
        let Piece { fetched, middle: middle_list, .. } = piece;
        fetched.retain(|chosen| {
            let keep = chosen.share > cut || (chosen.share == cut && ties > 0);
            if chosen.share == cut {
                ties = ties.saturating_sub(1);
            }
            if !keep && middle {
                middle_list.push(*chosen);
            }
            keep
        });
        middle_list.sort_unstable_by_key(|chosen| (chosen.block, chosen.token));
    }
}
