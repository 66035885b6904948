//! Route: score every sealed token from its sketch, and choose what to read exactly.

use std::ops::Range;

use super::plan::{Chosen, Piece, PieceScratch, Sealed};
use super::slab::{Sketch, Slab, Stream, halves};
use crate::attend::SoftmaxState;
use crate::kernels::{
    BlockSums, Candidates, GROUP, RowCodec, Rows, SketchRun, TOKENS, Weighed, exp_minus, max,
    row_scores, sketch_run, tokens_above, weigh_lines,
};
use crate::model::Rotation;
use crate::params::Params;

/// A candidate's share is rounded twice, as is the threshold's score.
const LESS_ROUNDING: f32 = 1.0 - 1e-3;

/// Times [`Params::share_reference`]: the length up to which the threshold of the middle rung falls
/// with epsilon.
const MIDDLE_FALLS_UNTIL: usize = 2;

/// Blocks of one slab that are scored before sums and floor move on.
pub const SCORED_AT_ONCE: usize = 64;

/// Numbers of a cache line.
const LINE: usize = 16;

/// Scores the piece's tokens for a group of query heads (`q`: `[n_group][key_dim]`, scaled):
///
/// s_t = sum over kept dimensions of q_j k_tj + sum over the others of q_j m_bj
///
/// where k is the sketch and m_b the block's mean key. Leaves the sum of each block's weights
/// exp(s_t - r), the piece's own in the scratch, and the tokens that may be chosen. The reference r
/// is what is known of log Z when the block is scored: no pass over the scores need find their
/// maximum first.
///
/// Z is at least what `seen` (residents, and the step's own rows) and the blocks scored so far sum
/// to. A token whose share is below the lower threshold even of that cannot be chosen.
pub fn score(piece: &mut Piece, sealed: &Sealed, q: &[f32], seen: &SoftmaxState, at: Thresholds) {
    let (n_group, n_blocks) = (seen.n_group(), piece.n_blocks);
    piece.reference.resize(n_blocks * n_group, 0.0);
    piece.block_sum.resize(n_blocks * n_group, 0.0);
    piece.counts.resize(n_blocks, 0);
    let scratch = &mut piece.scratch;
    scratch.m.clear();
    scratch.m.resize(n_group, f32::NEG_INFINITY);
    scratch.l.clear();
    scratch.l.resize(n_group, 0.0);
    let n_chunks = n_group.div_ceil(GROUP);
    scratch.running.clear();
    scratch.running.resize(n_chunks, [0.0; GROUP]);
    let running = scratch.running.as_flattened_mut().iter_mut().enumerate().take(n_group);
    running.for_each(|(g, running)| *running = seen.log_sum(g));
    scratch.known.resize(n_chunks, [0.0; GROUP]);
    scratch.factors.resize(n_chunks, [0.0; GROUP]);

    // The newest blocks first: they tell more of Z than any others, and with it who may be chosen.
    let recent = n_blocks.saturating_sub(SCORED_AT_ONCE);
    score_blocks(piece, sealed, q, seen, at, recent..n_blocks);
    piece.n_recent = piece.n_candidates;
    score_blocks(piece, sealed, q, seen, at, 0..recent);
}

/// Scores some of the piece's blocks.
fn score_blocks(
    piece: &mut Piece,
    sealed: &Sealed,
    q: &[f32],
    seen: &SoftmaxState,
    at: Thresholds,
    blocks: Range<usize>,
) {
    let n_group = seen.n_group();
    let (mut prepared, mut done) = (None, blocks.start);
    let blocks = piece.first + blocks.start..piece.first + blocks.end;
    for (slab, range, rotation) in sealed.layer.turned_runs(blocks) {
        let wanted = Some((slab.shape.sketch, rotation.map(|rotation| rotation.shift)));
        if prepared != wanted {
            turn_query(&mut piece.scratch, sealed, rotation, q, n_group);
            prepare_query(&mut piece.scratch, sealed, slab.shape.sketch, q, n_group);
            prepared = wanted;
        }
        let room = n_group * slab.shape.n_tokens.next_multiple_of(16) + LINE;
        if piece.scratch.block_weights.len() < room {
            piece.scratch.block_weights.resize(room, 0.0);
        }
        for first in range.clone().step_by(SCORED_AT_ONCE) {
            let run = first..range.end.min(first + SCORED_AT_ONCE);
            let blocks = done..done + run.len();
            make_room(piece, run.len() * slab.shape.n_tokens, n_group);
            match slab.shape.sketch {
                Sketch::Packed { n4: 0, n2: 0 } => {
                    score_means(piece, slab, sealed.head, run, done, n_group, at)
                }
                Sketch::Packed { .. } => {
                    score_sketches(piece, slab, sealed.head, run, done, n_group, at)
                }
                Sketch::Raw => score_keys(piece, slab, sealed.head, run, done, q, n_group, at),
            }
            sum_up(piece, blocks.clone(), n_group, seen);
            done = blocks.end;
        }
    }
}

/// Makes room for `n` more candidates.
fn make_room(piece: &mut Piece, n: usize, n_group: usize) {
    let room = piece.n_candidates + n + TOKENS;
    if piece.candidates.len() < room {
        piece.candidates.resize(room, 0);
        piece.weights.resize(room * n_group, 0.0);
    }
}

/// `room` from the beginning of a line of the cache on: no vector stored there lies in two.
fn from_line(room: &mut [f32]) -> &mut [f32] {
    let start = room.as_ptr().align_offset(4 * LINE).min(LINE);
    &mut room[start..]
}

/// What the mean keys of some blocks of a slab add to the scores of the blocks' tokens.
fn offsets(piece: &mut Piece, slab: &Slab, head: usize, run: &Range<usize>, n_group: usize) {
    let shape = &slab.shape;
    let row_bytes = shape.mean_codec.row_bytes(shape.key_dim);
    // These blocks' means, and those of the next run.
    let mut means: [&[u8]; 2 * SCORED_AT_ONCE] = [&[]; 2 * SCORED_AT_ONCE];
    let stream = slab.stream(Stream::MeanKey, head, run.start).chunks_exact(row_bytes);
    let n = stream.len().min(run.len() + SCORED_AT_ONCE);
    means.iter_mut().zip(stream).take(n).for_each(|(mean, row)| *mean = row);
    let scratch = &mut piece.scratch;
    scratch.offsets.resize(n_group * SCORED_AT_ONCE, 0.0);
    let (q, out) = (&scratch.q_rest[..], &mut scratch.offsets[..]);
    let means = Rows { rows: &means[..run.len()], next: &means[run.len()..n] };
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
    at: Thresholds,
) {
    offsets(piece, slab, head, &run, n_group);
    let n_blocks = piece.n_blocks;
    let code_bytes = slab.block(Stream::Codes, head, run.start).len();
    let n_channels = 2 * slab.shape.sketch.shape().channels();
    let scratch = &mut piece.scratch;
    let sketches = SketchRun {
        shape: slab.shape.sketch.shape(),
        n_tokens: slab.shape.n_tokens,
        codes: &slab.stream(Stream::Codes, head, run.start)[..run.len() * code_bytes],
        channels: &halves(slab.stream(Stream::Channels, head, run.start))[..run.len() * n_channels],
        q: &scratch.q,
        n_group,
        offsets: &scratch.offsets,
        offset_stride: SCORED_AT_ONCE,
        limit: at.limit(),
    };
    let mut sums = BlockSums {
        running: &mut scratch.running,
        reference: &mut piece.reference[done..],
        sum: &mut piece.block_sum[done..],
        stride: n_blocks,
        known: &mut scratch.known,
        factors: &mut scratch.factors,
        weights: from_line(&mut scratch.block_weights),
    };
    let mut candidates = Candidates {
        tokens: &mut piece.candidates[piece.n_candidates..],
        lines: &mut piece.weights[piece.n_candidates * n_group..],
        counts: &mut piece.counts[done..],
    };
    piece.n_candidates += sketch_run(&sketches, &mut sums, &mut candidates);
}

/// Blocks that have given up their sketches: all tokens score as the mean does.
fn score_means(
    piece: &mut Piece,
    slab: &Slab,
    head: usize,
    run: Range<usize>,
    done: usize,
    n_group: usize,
    at: Thresholds,
) {
    offsets(piece, slab, head, &run, n_group);
    let stride = slab.shape.n_tokens.next_multiple_of(16);
    for i in 0..run.len() {
        let scratch = &mut piece.scratch;
        for g in 0..n_group {
            let row = &mut scratch.block_weights[g * stride..][..slab.shape.n_tokens];
            row.fill(scratch.offsets[g * SCORED_AT_ONCE + i]);
        }
        weigh(piece, slab.shape.n_tokens, done + i, n_group, at);
    }
}

/// Blocks whose sketch is the keys themselves.
#[allow(clippy::too_many_arguments, reason = "a run of blocks and the query, as its siblings'")]
fn score_keys(
    piece: &mut Piece,
    slab: &Slab,
    head: usize,
    run: Range<usize>,
    done: usize,
    q: &[f32],
    n_group: usize,
    at: Thresholds,
) {
    let (codec, dim) = (RowCodec::F32, slab.shape.key_dim);
    let stride = slab.shape.n_tokens.next_multiple_of(16);
    for (i, block) in run.enumerate() {
        let scratch = &mut piece.scratch;
        let keys = slab.block(Stream::Codes, head, block).chunks_exact(codec.row_bytes(dim));
        for (t, key) in keys.enumerate() {
            let out = &mut scratch.block_weights[t..];
            let turned = &scratch.turned;
            let q = if turned.bias.is_empty() { q } else { &turned.q };
            row_scores(codec, dim, q, n_group, &[key], out, stride);
            for (g, bias) in turned.bias.iter().enumerate() {
                out[g * stride] += bias;
            }
        }
        weigh(piece, slab.shape.n_tokens, done + i, n_group, at);
    }
}

/// Turns the scores of one block, number `number` of the piece, into weights relative to the
/// largest, and takes out what may be chosen.
fn weigh(piece: &mut Piece, n_tokens: usize, number: usize, n_group: usize, at: Thresholds) {
    let (stride, part) = (n_tokens.next_multiple_of(16), (n_group as f32).recip());
    let scratch = &mut piece.scratch;
    for g in 0..n_group {
        let row = &mut scratch.block_weights[g * stride..][..n_tokens];
        let m = max(row);
        piece.reference[g * piece.n_blocks + number] = m;
        piece.block_sum[g * piece.n_blocks + number] = exp_minus(row, m);
        // Z is no less than the block's largest term, whatever else is known.
        let running = scratch.running.as_flattened()[g];
        scratch.factors.as_flattened_mut()[g] = part * (m - running).min(0.0).exp();
    }
    let factors = &scratch.factors.as_flattened()[..n_group];
    let weighed = Weighed { weights: &scratch.block_weights, stride, n_tokens, factors };
    let tokens = &mut piece.candidates[piece.n_candidates..];
    let lines = &mut piece.weights[piece.n_candidates * n_group..];
    let n = tokens_above(&weighed, at.limit(), tokens, lines);
    piece.counts[number] = n as u32;
    piece.n_candidates += n;
}

/// Takes the sums of some blocks into the piece's, and into what is known of Z.
fn sum_up(piece: &mut Piece, blocks: Range<usize>, n_group: usize, seen: &SoftmaxState) {
    let scratch = &mut piece.scratch;
    scratch.run_factors.resize(SCORED_AT_ONCE, 0.0);
    for g in 0..n_group {
        let range = g * piece.n_blocks + blocks.start..g * piece.n_blocks + blocks.end;
        let factors = &mut scratch.run_factors[..blocks.len()];
        factors.copy_from_slice(&piece.reference[range.clone()]);
        let m = max(factors);
        exp_minus(factors, m);
        let sums = piece.block_sum[range].iter();
        let l: f32 = sums.zip(factors.iter()).map(|(sum, factor)| sum * factor).sum();
        add(&mut scratch.m[g], &mut scratch.l[g], m, l);
        let (mut all_m, mut all_l) = (scratch.m[g], scratch.l[g]);
        add(&mut all_m, &mut all_l, seen.m[g], seen.l[g]);
        scratch.running.as_flattened_mut()[g] = all_m + all_l.ln();
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
    scratch: &mut PieceScratch,
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
    scratch: &mut PieceScratch,
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
    /// Those of a sequence of `n_tokens`. Epsilon 0 reads every token, also those whose share is too
    /// small for a float. Without value sketches there is no second threshold.
    pub fn at(params: &Params, n_tokens: usize, has_values: bool) -> Self {
        let epsilon = |n_tokens: usize| {
            let scale = match params.share_reference {
                0 => 1.0,
                reference => (reference as f32 / n_tokens.max(1) as f32).sqrt(),
            };
            params.share_threshold * scale
        };
        let fetch = epsilon(n_tokens);
        // What tokens left to their coarse rows are off by adds up as a random walk: the square
        // root of the largest share among them, at any length.
        let falls_until = MIDDLE_FALLS_UNTIL * params.share_reference.max(1);
        let middle = params.middle_fraction * epsilon(n_tokens.min(falls_until));
        Self {
            fetch: if fetch > 0.0 { fetch } else { -1.0 },
            middle: if has_values { middle } else { f32::INFINITY },
        }
    }

    /// The share below which nothing is chosen, less what rounding may take from one.
    fn limit(&self) -> f32 {
        let lowest = self.fetch.min(self.middle);
        if lowest > 0.0 { lowest * LESS_ROUNDING } else { lowest }
    }
}

/// Turns the candidates' weights into shares of each head, exp(score) / Z, and chooses by their mean
/// over the group. `log_sum` is log Z of each head.
pub fn select(piece: &mut Piece, log_sum: &[f32], at: Thresholds) {
    let (n_group, n_blocks) = (log_sum.len(), piece.n_blocks);
    piece.factor.clear();
    piece.factor.extend_from_slice(&piece.reference[..n_group * n_blocks]);
    for (factor, &log_sum) in piece.factor.chunks_mut(n_blocks.max(1)).zip(log_sum) {
        exp_minus(factor, log_sum);
    }
    let part = (n_group as f32).recip();
    piece.starts.resize(n_blocks, 0);
    // Every candidate is written to both lists, and stays where it belongs: nobody can guess which
    // one that is.
    let (mut n_fetched, mut n_middle) = (0, 0);
    piece.fetched.resize(piece.n_candidates, Chosen::default());
    piece.middle.resize(piece.n_candidates, Chosen::default());
    // In the blocks' order: those that were scored first are the last.
    let mut start = piece.n_recent;
    for b in 0..n_blocks {
        if b + SCORED_AT_ONCE == n_blocks.max(SCORED_AT_ONCE) {
            start = 0;
        }
        piece.starts[b] = start as u32;
        let n = piece.counts[b] as usize;
        let candidates = &piece.candidates[start..][..n];
        let lines = &mut piece.weights[start * n_group..][..n * n_group];
        piece.scratch.shares.resize(n, 0.0);
        weigh_lines(&piece.factor[b..], n_blocks, lines, &mut piece.scratch.shares);
        let shares = candidates.iter().zip(&piece.scratch.shares).enumerate();
        for (number, (&token, sum)) in shares {
            let share = part * sum;
            let chosen = Chosen { block: b as u32, token, number: number as u32, share };
            let fetch = share > at.fetch;
            piece.fetched[n_fetched] = chosen;
            n_fetched += usize::from(fetch);
            piece.middle[n_middle] = chosen;
            n_middle += usize::from(!fetch & (share > at.middle));
        }
        start += n;
    }
    piece.fetched.truncate(n_fetched);
    piece.middle.truncate(n_middle);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_fall_with_the_length_and_the_middle_one_stays_beyond_twice_the_reference() {
        let params = Params::default();
        let at = |n_tokens| Thresholds::at(&params, n_tokens, true);
        assert_eq!(at(4096).fetch, 1.6e-4);
        assert!((at(4 * 4096).fetch - 0.8e-4).abs() < 1e-9);
        assert!((at(1024).middle - 3.2e-5).abs() < 1e-9);
        assert!(at(8192).middle < at(4096).middle);
        assert_eq!(at(1 << 20).middle, at(8192).middle);
        // Where it would lie above epsilon, what is not fetched is coarse.
        assert_eq!(at(1 << 22).limit(), at(1 << 22).fetch * LESS_ROUNDING);
    }

    #[test]
    fn epsilon_0_reads_every_token_and_without_value_sketches_there_is_no_middle() {
        let all = Thresholds::at(&Params { share_threshold: 0.0, ..Params::default() }, 100, true);
        assert!(all.fetch < 0.0 && all.limit() < 0.0);
        let fixed = Params { share_reference: 0, ..Params::default() };
        for n_tokens in [1, 1 << 20] {
            let at = Thresholds::at(&fixed, n_tokens, false);
            assert_eq!((at.fetch, at.middle), (fixed.share_threshold, f32::INFINITY));
        }
    }
}
