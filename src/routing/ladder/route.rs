//! Route: score every sealed token from its sketch, and choose what to read exactly.

use std::ops::Range;

use super::plan::{Chosen, Piece, Sealed};
use super::slab::{Sketch, Slab, Stream, halves};
use crate::attend::SoftmaxState;
use crate::kernels::{
    BlockSums, RowCodec, SketchRun, exp_minus, max, row_scores, shares_above, sketch_run,
};
use crate::model::Rotation;

/// Blocks of one slab that are scored before sums and floor move on.
pub const SCORED_AT_ONCE: usize = 64;

/// Scores the piece's tokens for a group of query heads (`q`: `[n_group][key_dim]`, scaled):
///
/// s_t = sum over kept dimensions of q_j k_tj + sum over the others of q_j m_bj
///
/// where k is the sketch and m_b the block's mean key. Leaves each block's maximum and sum of
/// exp(s_t - maximum), and the piece's own in the scratch.
///
/// Z is at least what `seen` (residents, and the step's own rows) and the blocks scored so far sum
/// to. A block whose largest score is below the lower threshold even of that keeps no weights: no
/// token of it can be chosen, and its coarse row needs the sum alone.
pub fn score(piece: &mut Piece, sealed: &Sealed, q: &[f32], seen: &SoftmaxState, at: Thresholds) {
    let (n_group, n_blocks) = (seen.n_group(), piece.n_blocks);
    piece.block_max.resize(n_blocks * n_group, 0.0);
    piece.block_sum.resize(n_blocks * n_group, 0.0);
    let scratch = &mut piece.scratch;
    scratch.m.clear();
    scratch.m.resize(n_group, f32::NEG_INFINITY);
    scratch.l.clear();
    scratch.l.resize(n_group, 0.0);
    scratch.floor.clear();
    scratch.floor.extend((0..n_group).map(|g| at.floor(seen.log_sum(g))));
    let blocks = piece.first..piece.first + n_blocks;
    let runs = || sealed.layer.turned_runs(blocks.clone());
    let lengths = || runs().map(|(slab, ..)| slab.shape.n_tokens);
    piece.n_tokens = lengths().max().unwrap_or(0);
    piece.is_uneven = lengths().any(|length| length < piece.n_tokens);
    piece.stride = piece.n_tokens.next_multiple_of(16);

    let (mut prepared, mut done) = (None, 0);
    for (slab, range, rotation) in runs() {
        let wanted = Some((slab.shape.sketch, rotation.map(|rotation| rotation.shift)));
        if prepared != wanted {
            turn_query(&mut piece.scratch, sealed, rotation, q, n_group);
            prepare_query(&mut piece.scratch, sealed, slab.shape.sketch, q, n_group);
            prepared = wanted;
        }
        for first in range.clone().step_by(SCORED_AT_ONCE) {
            let run = first..range.end.min(first + SCORED_AT_ONCE);
            let blocks = done..done + run.len();
            let room = (piece.kept.len() + run.len()) * n_group * piece.stride;
            if piece.weights.len() < room {
                piece.weights.resize(room, 0.0);
            }
            match slab.shape.sketch {
                Sketch::Packed { n4: 0, n2: 0 } => {
                    score_means(piece, slab, sealed.head, run, done, n_group)
                }
                Sketch::Packed { .. } => {
                    score_sketches(piece, slab, sealed.head, run, done, n_group)
                }
                Sketch::Raw => score_keys(piece, slab, sealed.head, run, done, q, n_group),
            }
            sum_up(piece, blocks.clone(), n_group, seen, at);
            done = blocks.end;
        }
    }
}

/// What the mean keys of some blocks of a slab add to the scores of the blocks' tokens.
fn offsets(piece: &mut Piece, slab: &Slab, head: usize, run: &Range<usize>, n_group: usize) {
    let shape = &slab.shape;
    let row_bytes = shape.mean_codec.row_bytes(shape.key_dim);
    let mut means: [&[u8]; SCORED_AT_ONCE] = [&[]; SCORED_AT_ONCE];
    let rows = slab.stream(Stream::MeanKey, head, run.start).chunks_exact(row_bytes);
    means.iter_mut().zip(rows).take(run.len()).for_each(|(mean, row)| *mean = row);
    let scratch = &mut piece.scratch;
    scratch.offsets.resize(n_group * SCORED_AT_ONCE, 0.0);
    let (q, out, means) = (&scratch.q_rest[..], &mut scratch.offsets[..], &means[..run.len()]);
    row_scores(shape.mean_codec, shape.key_dim, q, n_group, means, out, SCORED_AT_ONCE);
    for (offsets, bias) in out.chunks_mut(SCORED_AT_ONCE).zip(&scratch.turned.bias) {
        offsets.iter_mut().for_each(|offset| *offset += bias);
    }
}

/// Scores blocks from their sketches. `run` is of the slab; `done` is the first one's number in
/// the piece.
fn score_sketches(
    piece: &mut Piece,
    slab: &Slab,
    head: usize,
    run: Range<usize>,
    done: usize,
    n_group: usize,
) {
    offsets(piece, slab, head, &run, n_group);
    let (start, n_blocks) = (piece.kept.len() * n_group * piece.stride, piece.n_blocks);
    let code_bytes = slab.block(Stream::Codes, head, run.start).len();
    let n_channels = 2 * slab.shape.sketch.shape().channels();
    let scratch = &piece.scratch;
    let sketches = SketchRun {
        shape: slab.shape.sketch.shape(),
        n_tokens: slab.shape.n_tokens,
        codes: &slab.stream(Stream::Codes, head, run.start)[..run.len() * code_bytes],
        channels: &halves(slab.stream(Stream::Channels, head, run.start))[..run.len() * n_channels],
        q: &scratch.q,
        n_group,
        offsets: &scratch.offsets,
        offset_stride: SCORED_AT_ONCE,
        stride: piece.stride,
        floor: &scratch.floor,
    };
    let mut kept = [false; SCORED_AT_ONCE];
    let mut sums = BlockSums {
        largest: &mut piece.block_max[done..],
        sum: &mut piece.block_sum[done..],
        stride: n_blocks,
        kept: &mut kept,
    };
    sketch_run(&sketches, &mut piece.weights[start..], &mut sums);
    let kept = kept.iter().take(run.len()).enumerate().filter(|(_, kept)| **kept);
    piece.kept.extend(kept.map(|(i, _)| (done + i) as u32));
}

/// Blocks that have given up their sketches: all tokens score as the mean does.
fn score_means(
    piece: &mut Piece,
    slab: &Slab,
    head: usize,
    run: Range<usize>,
    done: usize,
    n_group: usize,
) {
    offsets(piece, slab, head, &run, n_group);
    for i in 0..run.len() {
        let start = piece.kept.len() * n_group * piece.stride;
        for g in 0..n_group {
            let row = &mut piece.weights[start + g * piece.stride..][..slab.shape.n_tokens];
            row.fill(piece.scratch.offsets[g * SCORED_AT_ONCE + i]);
        }
        sum_block(piece, slab.shape.n_tokens, done + i, n_group);
    }
}

/// Blocks whose sketch is the keys themselves.
fn score_keys(
    piece: &mut Piece,
    slab: &Slab,
    head: usize,
    run: Range<usize>,
    done: usize,
    q: &[f32],
    n_group: usize,
) {
    let (codec, dim) = (RowCodec::F32, slab.shape.key_dim);
    for (i, block) in run.enumerate() {
        let start = piece.kept.len() * n_group * piece.stride;
        let keys = slab.block(Stream::Codes, head, block).chunks_exact(codec.row_bytes(dim));
        for (t, key) in keys.enumerate() {
            let out = &mut piece.weights[start + t..];
            let turned = &piece.scratch.turned;
            let q = if turned.bias.is_empty() { q } else { &turned.q };
            row_scores(codec, dim, q, n_group, &[key], out, piece.stride);
            for (g, bias) in turned.bias.iter().enumerate() {
                out[g * piece.stride] += bias;
            }
        }
        sum_block(piece, slab.shape.n_tokens, done + i, n_group);
    }
}

/// Turns the scores that stand where the next kept block's weights go into weights.
fn sum_block(piece: &mut Piece, n_tokens: usize, number: usize, n_group: usize) {
    let start = piece.kept.len() * n_group * piece.stride;
    let mut keep = false;
    for g in 0..n_group {
        let row = &mut piece.weights[start + g * piece.stride..][..n_tokens];
        let m = max(row);
        keep |= m >= piece.scratch.floor[g];
        piece.block_max[g * piece.n_blocks + number] = m;
        piece.block_sum[g * piece.n_blocks + number] = exp_minus(row, m);
    }
    if keep {
        piece.kept.push(number as u32);
    }
}

/// Takes the sums of some blocks into the piece's, and raises the floor accordingly.
fn sum_up(
    piece: &mut Piece,
    blocks: Range<usize>,
    n_group: usize,
    seen: &SoftmaxState,
    at: Thresholds,
) {
    let scratch = &mut piece.scratch;
    let mut factors = [0.0; SCORED_AT_ONCE];
    for g in 0..n_group {
        let range = g * piece.n_blocks + blocks.start..g * piece.n_blocks + blocks.end;
        let factors = &mut factors[..blocks.len()];
        factors.copy_from_slice(&piece.block_max[range.clone()]);
        let m = max(factors);
        exp_minus(factors, m);
        let sums = piece.block_sum[range].iter();
        let l: f32 = sums.zip(factors.iter()).map(|(sum, factor)| sum * factor).sum();
        add(&mut scratch.m[g], &mut scratch.l[g], m, l);
        let (mut m, mut l) = (scratch.m[g], scratch.l[g]);
        add(&mut m, &mut l, seen.m[g], seen.l[g]);
        scratch.floor[g] = at.floor(m + l.ln());
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

/// Turns the query back for blocks that have moved by a rotation.
fn turn_query(
    scratch: &mut super::plan::PieceScratch,
    sealed: &Sealed,
    rotation: Option<&Rotation>,
    q: &[f32],
    n_group: usize,
) {
    match rotation {
        Some(rotation) => scratch.turned.turn(rotation, &sealed.layout.centre, q, n_group),
        None => scratch.turned.bias.clear(),
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
    let q = if scratch.turned.bias.is_empty() { q } else { &scratch.turned.q };
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

    fn lowest(&self) -> f32 {
        self.fetch.min(self.middle)
    }

    /// The score below which no token of one head reaches the lower threshold, if log Z is
    /// `log_sum`. A mean over heads is no larger than the largest.
    fn floor(&self, log_sum: f32) -> f32 {
        // Less what rounding may add to a share.
        if self.lowest() > 0.0 { log_sum + self.lowest().ln() - 1e-3 } else { f32::NEG_INFINITY }
    }
}

/// Chooses tokens by their share, mean over the group: exp(score) / Z. `log_sum` is log Z of each
/// head. A block whose largest shares cannot reach the lower threshold is passed over whole.
pub fn select(piece: &mut Piece, sealed: &Sealed, log_sum: &[f32], at: Thresholds) {
    let (n_group, n_blocks) = (log_sum.len(), piece.n_blocks);
    let lowest = at.lowest();
    piece.factor.clear();
    piece.factor.extend_from_slice(&piece.block_max[..n_group * n_blocks]);
    for (factor, &log_sum) in piece.factor.chunks_mut(n_blocks.max(1)).zip(log_sum) {
        exp_minus(factor, log_sum);
    }
    // Mean over the group.
    let part = (n_group as f32).recip();
    let (stride, mut n_tokens) = (piece.stride, piece.n_tokens);
    let scratch = &mut piece.scratch;
    scratch.tokens.resize(n_tokens, 0);
    scratch.shares.resize(n_tokens, 0.0);
    scratch.factors.resize(n_group, 0.0);
    let mut blocks = sealed.layer.walk();
    for (kept, &block) in piece.kept.iter().enumerate() {
        let of_block = piece.factor.chunks_exact(n_blocks).map(|of_head| of_head[block as usize]);
        scratch.factors.iter_mut().zip(of_block).for_each(|(part_of, f)| *part_of = f * part);
        if scratch.factors.iter().sum::<f32>() <= lowest {
            continue;
        }
        if piece.is_uneven {
            n_tokens = blocks.find(piece.first + block as usize).0.shape.n_tokens;
        }
        let weights = &piece.weights[kept * n_group * stride..][..n_group * stride];
        let (tokens, shares) = (&mut scratch.tokens[..], &mut scratch.shares[..]);
        let n = shares_above(weights, stride, n_tokens, &scratch.factors, lowest, tokens, shares);
        for (&token, &share) in tokens.iter().zip(shares.iter()).take(n) {
            let number = (piece.fetched.len() + piece.middle.len()) as u32;
            let chosen = Chosen { block, token, number, share };
            let of_token = weights.chunks_exact(stride).map(|line| line[token as usize]);
            piece.chosen_weights.extend(of_token);
            if share > at.fetch {
                piece.fetched.push(chosen);
            } else {
                piece.middle.push(chosen);
            }
        }
    }
}

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
