//! Attend: the chosen tokens exactly, all others through their block's coarse row, and those
//! between through their value sketch as well.

use super::layout::widen;
use super::plan::{Piece, Sealed};
use crate::attend::{ROWS_AT_ONCE, SoftmaxState, attend_rows};
use crate::kernels::{coefficients_accumulate, f16_to_f32, prefetch, row_accumulate};

/// The piece's share of a unit's attention, into the piece's own state.
pub fn attend_piece(
    piece: &mut Piece,
    sealed: &Sealed,
    q: &[f32],
    log_sum: &[f32],
    dims: [usize; 2],
) {
    let [key_dim, value_dim] = dims;
    let n_group = log_sum.len();
    piece.scratch.state.reset(n_group, value_dim);
    if piece.n_blocks == 0 {
        return;
    }
    prefetch_fetched(piece, sealed, 0);
    coarse(piece, sealed, log_sum, value_dim);
    middle(piece, sealed, n_group, value_dim);
    exact(piece, sealed, q, key_dim);
}

/// One row a block: weight sum over t in the block, not fetched, of exp(s_t), value the block's
/// mean. Weights are relative to Z, so the state's m is log Z.
fn coarse(piece: &mut Piece, sealed: &Sealed, log_sum: &[f32], value_dim: usize) {
    let n_group = log_sum.len();
    let scratch = &mut piece.scratch;
    let n = piece.n_blocks;
    scratch.coarse.clear();
    scratch.coarse.extend_from_slice(&piece.block_sum[..n_group * n]);
    for chosen in &piece.fetched {
        let b = chosen.block as usize;
        for g in 0..n_group {
            let weight = piece.weights[(b * n_group + g) * piece.stride + chosen.token as usize];
            let rest = &mut scratch.coarse[g * n + b];
            *rest = (*rest - weight).max(0.0);
        }
    }
    let state = &mut scratch.state;
    for (g, &log_sum) in log_sum.iter().enumerate() {
        let mut sum = 0.0;
        let factors = &piece.factor[g * n..][..n];
        for (weight, factor) in scratch.coarse[g * n..][..n].iter_mut().zip(factors) {
            *weight *= factor;
            sum += *weight;
        }
        state.m[g] = log_sum;
        state.l[g] = sum;
    }
    let mut rows: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    for start in (0..n).step_by(ROWS_AT_ONCE) {
        let later = sealed.blocks[piece.first..piece.first + n].iter().skip(start + ROWS_AT_ONCE);
        for block in later.take(ROWS_AT_ONCE) {
            prefetch(&block.fast[block.shape.mean_value(sealed.head)]);
        }
        let blocks = &sealed.blocks[piece.first + start..][..(n - start).min(ROWS_AT_ONCE)];
        for (row, block) in rows.iter_mut().zip(blocks) {
            *row = &block.fast[block.shape.mean_value(sealed.head)];
        }
        let codec = blocks[0].shape.mean_codec;
        let (rows, weights) = (&rows[..blocks.len()], &scratch.coarse[start..]);
        row_accumulate(codec, value_dim, weights, n, n_group, rows, &mut state.o);
    }
}

/// Adds sum of exp(s_t) U_v c_t over the middle tokens: the residuals from the coarse rows.
fn middle(piece: &mut Piece, sealed: &Sealed, n_group: usize, value_dim: usize) {
    let rank = sealed.layout.value_basis.len() / value_dim;
    if piece.middle.is_empty() || rank == 0 {
        return;
    }
    let scratch = &mut piece.scratch;
    scratch.coefficients.clear();
    scratch.coefficients.resize(n_group * rank, 0.0);
    let mut runs = piece.middle.chunk_by(|a, b| a.block == b.block).peekable();
    while let Some(run) = runs.next() {
        if let Some(next) = runs.peek() {
            let block = &sealed.blocks[piece.first + next[0].block as usize];
            prefetch(&block.fast[block.shape.coefficients(sealed.head)]);
            prefetch(&block.fast[block.shape.coefficient_scales(sealed.head)]);
        }
        let b = run[0].block as usize;
        let block = &sealed.blocks[piece.first + b];
        if block.shape.value_rank == 0 {
            continue;
        }
        scratch.token_list.clear();
        scratch.token_list.extend(run.iter().map(|chosen| chosen.token));
        scratch.token_weights.resize(n_group * run.len(), 0.0);
        scratch.codes.clear();
        scratch.codes.resize(n_group * rank, 0.0);
        for g in 0..n_group {
            let factor = piece.factor[g * piece.n_blocks + b];
            let weights = &piece.weights[(b * n_group + g) * piece.stride..];
            for (w, chosen) in scratch.token_weights[g * run.len()..].iter_mut().zip(run) {
                *w = factor * weights[chosen.token as usize];
            }
        }
        let codes = &block.fast[block.shape.coefficients(sealed.head)];
        let (list, weights) = (&scratch.token_list[..], &scratch.token_weights[..]);
        coefficients_accumulate(codes, rank, list, weights, run.len(), n_group, &mut scratch.codes);
        let (minimum, scale) = block.coefficient_scales(sealed.head);
        scratch.scales.resize(2 * rank, 0.0);
        f16_to_f32(minimum, &mut scratch.scales[..rank]);
        f16_to_f32(scale, &mut scratch.scales[rank..]);
        let (minimum, scale) = scratch.scales.split_at(rank);
        for g in 0..n_group {
            let weight: f32 = weights[g * run.len()..][..run.len()].iter().sum();
            let sums = scratch.codes[g * rank..][..rank].iter();
            let out = scratch.coefficients[g * rank..][..rank].iter_mut();
            for ((out, code), (min, scale)) in out.zip(sums).zip(minimum.iter().zip(scale)) {
                *out += scale * code + min * weight;
            }
        }
    }
    widen(&sealed.layout.value_basis, &mut scratch.value_basis);
    for g in 0..n_group {
        let out = &mut scratch.state.o[g * value_dim..][..value_dim];
        let coefficients = &scratch.coefficients[g * rank..][..rank];
        for (c, direction) in coefficients.iter().zip(scratch.value_basis.chunks(value_dim)) {
            for (o, d) in out.iter_mut().zip(direction) {
                *o += c * d;
            }
        }
    }
}

/// Asks for the rows of the next fetched tokens from `start` on.
fn prefetch_fetched(piece: &Piece, sealed: &Sealed, start: usize) {
    for chosen in piece.fetched.iter().skip(start).take(ROWS_AT_ONCE) {
        let block = &sealed.blocks[piece.first + chosen.block as usize];
        block.prefetch_rows(sealed.head, chosen.token as usize);
    }
}

/// The fetched tokens, from their rows.
fn exact(piece: &mut Piece, sealed: &Sealed, q: &[f32], key_dim: usize) {
    let Some(codec) = sealed.blocks.first().map(|block| block.shape.row_codec) else { return };
    let mut keys: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    let mut values: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
    for (i, run) in piece.fetched.chunks(ROWS_AT_ONCE).enumerate() {
        prefetch_fetched(piece, sealed, (i + 1) * ROWS_AT_ONCE);
        for ((key, value), chosen) in keys.iter_mut().zip(&mut values).zip(run) {
            let block = &sealed.blocks[piece.first + chosen.block as usize];
            *key = block.key(sealed.head, chosen.token as usize);
            *value = block.value(sealed.head, chosen.token as usize);
        }
        let (keys, values) = (&keys[..run.len()], &values[..run.len()]);
        let (state, rows) = (&mut piece.scratch.state, &mut piece.scratch.rows);
        attend_rows(codec, key_dim, q, keys, values, None, state, rows);
    }
}

/// Every token of the piece's blocks from its rows: a dense layer.
pub fn attend_dense(
    piece: &mut Piece,
    sealed: &Sealed,
    q: &[f32],
    n_group: usize,
    dims: [usize; 2],
) {
    let [key_dim, value_dim] = dims;
    let state: &mut SoftmaxState = &mut piece.scratch.state;
    state.reset(n_group, value_dim);
    let mut keys: Vec<&[u8]> = Vec::with_capacity(ROWS_AT_ONCE);
    let mut values: Vec<&[u8]> = Vec::with_capacity(ROWS_AT_ONCE);
    for block in &sealed.blocks[piece.first..piece.first + piece.n_blocks] {
        keys.clear();
        values.clear();
        keys.extend((0..block.shape.n_tokens).map(|t| block.key(sealed.head, t)));
        values.extend((0..block.shape.n_tokens).map(|t| block.value(sealed.head, t)));
        let codec = block.shape.row_codec;
        attend_rows(codec, key_dim, q, &keys, &values, None, state, &mut piece.scratch.rows);
    }
}
